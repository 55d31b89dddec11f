"""Does the event loop look again for as long as it is told, and sleep then?"""

import asyncio
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

from truenext.broker.broker import Broker
from truenext.broker.busy_poll import BusyPoll
from truenext.broker.recovery import recover
from truenext.commands import Begin
from truenext.policy import Policies
from truenext.store.memory import MemoryStore


class Loop:
    """Runs what is due; each pass takes ten microseconds."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._due: list[Callable[[], None]] = []

    def call_soon(self, action: Callable[[], None]) -> None:
        self._due.append(action)

    def passes_until_it_sleeps(self) -> int:
        passes = 0
        while self._due:
            due, self._due = self._due, []
            self.now_ns += 10_000
            passes += 1
            for action in due:
                action()
        return passes


def poll_of(loop: Loop, microseconds: int) -> BusyPoll:
    return BusyPoll(cast(Any, loop), microseconds, lambda: loop.now_ns)


def test_it_looks_again_for_as_long_as_it_is_told() -> None:
    loop = Loop()
    poll_of(loop, 100).start()
    assert loop.passes_until_it_sleeps() == 10


def test_it_looks_once_a_pass_however_much_has_happened() -> None:
    loop = Loop()
    poll = poll_of(loop, 100)
    for _ in range(5):
        poll.start()
    assert len(loop._due) == 1


def test_it_begins_anew_whenever_something_happens() -> None:
    loop = Loop()
    poll = poll_of(loop, 100)
    poll.start()
    loop.call_soon(poll.start)
    assert loop.passes_until_it_sleeps() == 11
    poll.start()
    assert loop.passes_until_it_sleeps() == 10


def test_an_idle_broker_sleeps_though_it_looks_after_its_queues() -> None:
    """It began to poll with every turn, that of its own look once a second as well."""

    async def run() -> tuple[int, int]:
        store = MemoryStore()
        engine, _ = recover(store, Policies())
        broker = Broker(engine, store, asyncio.get_running_loop(), poll_us=100)
        await broker.start()
        session = broker.connect(mock.Mock())
        await asyncio.sleep(0.02)
        with mock.patch.object(BusyPoll, "start") as start:
            broker._periodic_checks()
            await asyncio.sleep(0.02)
            idle = start.call_count
            broker.execute(session, [Begin("t")])
            await asyncio.sleep(0.02)
            started = start.call_count
        broker.connection_closed(session)
        await broker.stop()
        broker.close()
        return idle, started

    idle, started = asyncio.run(run())
    assert idle == 0 and started == 1
