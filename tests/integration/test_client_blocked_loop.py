"""Tests of connections whose event loop is blocked for longer than the broker waits for a heart-beat.

Source of what is expected: docs/client.md, "Lost connections". test_client_handlers.py tests a blocked loop without
`heartbeat_thread`.
"""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop

from tests.drawing import one_of
from tests.integration.broker_process import dying_with_us
from truenext import blocking, testing
from truenext.client.tasks import heartbeat_thread
from truenext.client.tasks.connection import Connection, Message, Session, connect
from truenext.errors import ConnectionLost
from truenext.testing.blocking import BlockingBroker

HEART_BEAT_S = 0.8
"""Interval long enough that a thread which waits for a busy processor does not miss one."""
BLOCKED_S = 4.0
"""Duration of a blocked loop: twice as long as a broker waits for a client's heart-beat."""
PATIENCE_S = 60.0


class TimersFirst(asyncio.SelectorEventLoop):
    """Event loop that runs due timers before it reads sockets, as libuv did before 1.45, and with it uvloop."""

    def _run_once(self) -> None:
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        for timer in sorted(scheduled):
            if timer.when() <= self.time() and not timer.cancelled():
                timer._run()
                # It stays among those that are scheduled, and does nothing there.
                timer.cancel()
        super()._run_once()  # type: ignore[misc]


LOOPS = one_of(
    "loop",
    [asyncio.new_event_loop, uvloop.new_event_loop, TimersFirst],
    ids=["asyncio", "uvloop", "timers first"],
)
Loop = Callable[[], asyncio.AbstractEventLoop]
Work = Callable[[BlockingBroker, Connection], Awaitable[None]]


def sleeps() -> None:
    time.sleep(BLOCKED_S)


def computes() -> None:
    until = time.monotonic() + BLOCKED_S
    while time.monotonic() < until:
        pass


def on_a_connection(loop: Loop, work: Work) -> None:
    async def main() -> None:
        with testing.blocking_broker() as broker:
            async with connect(broker.url, heart_beat=HEART_BEAT_S, heartbeat_thread=True) as connection:
                await work(broker, connection)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(main(), 30))


def hearts() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "truenext heart-beat"]


@pytest.fixture(autouse=True)
def no_heartbeat_thread_remains() -> Iterator[None]:
    yield
    until = time.monotonic() + PATIENCE_S
    while hearts() and time.monotonic() < until:
        time.sleep(0.01)
    assert not hearts()


@LOOPS
@one_of("blocks", [sleeps, computes], ids=["sleeps", "computes"])
def test_a_handler_that_blocks_its_loop_is_run_once_and_its_transaction_goes_on(
    loop: Loop, blocks: Callable[[], None]
) -> None:
    async def work(broker: BlockingBroker, connection: Connection) -> None:
        ran: list[tuple[str, int]] = []
        done = asyncio.Event()

        async def handle(message: Message, session: Session) -> None:
            ran.append((message.text, message.attempts))
            await session.send("/queue/done", message.body)
            if message.text == "0":
                blocks()
                await session.flush()
            if message.text == "2":
                done.set()

        await connection.send_many("/queue/q", ["0", "1", "2"])
        others: list[str] = []
        with blocking.connect(broker.url) as other:
            consuming = asyncio.create_task(connection.consume("/queue/q", handle, transacted=True, ack="commit"))
            while not ran:
                await asyncio.sleep(0.01)
            await done.wait()
            with other.consumer("/queue/q") as consumer:
                while (message := consumer.receive(0.1)) is not None:
                    others.append(message.text)
            consuming.cancel()
            await asyncio.wait({consuming})
        assert ran == [("0", 0), ("1", 0), ("2", 0)] and not others
        assert connection.health().reconnects == 0
        assert broker.queue("done").bodies == [b"0", b"1", b"2"]

    on_a_connection(loop, work)


@LOOPS
def test_a_loop_that_goes_on_reads_the_socket_before_it_takes_the_broker_for_silent(loop: Loop) -> None:
    """The heart-beats of the broker have come while the loop was blocked."""

    async def work(broker: BlockingBroker, connection: Connection) -> None:
        for _ in range(3):
            time.sleep(BLOCKED_S / 2)
            await connection.send("/queue/q", "x")
        assert connection.health().reconnects == 0

    on_a_connection(loop, work)


@LOOPS
def test_an_answer_that_waits_in_the_socket_has_come_in_time(loop: Loop) -> None:
    """The answer was in the socket long before the timeout."""

    async def work(broker: BlockingBroker, connection: Connection) -> None:
        request = asyncio.create_task(connection.control_request("queues", timeout=0.5))
        await asyncio.sleep(0)
        time.sleep(1.0)
        assert await request

    on_a_connection(loop, work)


@LOOPS
def test_a_frame_half_written_when_the_loop_was_blocked_is_completed(loop: Loop) -> None:
    body = b"x" * (12 * 1024 * 1024)

    async def work(broker: BlockingBroker, connection: Connection) -> None:
        sending = asyncio.create_task(connection.send("/queue/q", body, persistent=False))
        await asyncio.sleep(0)
        assert connection._driver._unwritten is not None
        # The loop is blocked from here on.
        until = time.monotonic() + PATIENCE_S
        while not broker.queue("q").waiting and time.monotonic() < until:
            time.sleep(0.01)
        assert broker.queue("q").waiting == 1
        await sending
        await connection.send("/queue/q", "behind it")
        assert connection.health().reconnects == 0
        assert broker.queue("q").bodies == [body, b"behind it"]

    on_a_connection(loop, work)


@LOOPS
def test_heart_beats_are_never_written_into_a_frame(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread sends as many heart-beats as possible during frames that no socket takes at once."""
    monkeypatch.setattr(heartbeat_thread, "CHECKS_PER_INTERVAL", 10_000)
    bodies = [str(number).encode() * 3_000_000 for number in range(10, 20)]

    async def work(broker: BlockingBroker, connection: Connection) -> None:
        async with connection.consumer("/queue/q") as consumer:
            for body in bodies:
                sending = asyncio.create_task(connection.send("/queue/q", body, persistent=False))
                await asyncio.sleep(0)
                time.sleep(0.005)
                await sending
                message = await consumer.receive(PATIENCE_S)
                assert message is not None and message.body == body
        assert connection.health().reconnects == 0

    on_a_connection(loop, work)


@LOOPS
def test_a_frozen_connection_is_noticed_with_a_heartbeat_thread(loop: Loop) -> None:
    async def work(broker: BlockingBroker, connection: Connection) -> None:
        broker.freeze(connection)
        while not connection.health().reconnects:
            await asyncio.sleep(0.01)
        assert await connection.control_request("queues")

    on_a_connection(loop, work)


def test_a_heartbeat_thread_exists_for_each_connection_that_asks_for_one_until_it_ends() -> None:
    async def main() -> None:
        async with testing.broker() as broker:
            async with connect(broker.url):
                assert not hearts()
            async with connect(broker.url, heart_beat=0, heartbeat_thread=True):
                assert not hearts()
            async with connect(broker.url, heartbeat_thread=True) as first:
                async with connect(broker.url, heartbeat_thread=True):
                    assert len(hearts()) == 2
                assert len(hearts()) == 1
                broker.drop(first)
                await first.send("/queue/q", "x")
                assert len(hearts()) == 1
            assert not hearts()
        with pytest.raises(ConnectionLost):
            await connect("stomp://127.0.0.1:1", heartbeat_thread=True, timeout=0.1)
        assert not hearts()

    asyncio.run(main())


@LOOPS
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_connection_that_was_not_closed_ends_with_its_loop(loop: Loop) -> None:
    with testing.blocking_broker() as broker, blocking.connect(broker.url) as other:
        other.send("/queue/q", "x")

        async def main() -> Connection:
            connection = await connect(broker.url, heart_beat=HEART_BEAT_S, heartbeat_thread=True)
            consumer = await connection.consumer("/queue/q", ack="individual")
            assert await consumer.receive(PATIENCE_S)
            return connection

        with asyncio.Runner(loop_factory=loop) as runner:
            connection = runner.run(main())
        with other.consumer("/queue/q") as consumer:
            message = consumer.receive(PATIENCE_S)
            assert message is not None
        del connection
        gc.collect()


FORKS = """
import asyncio, os, sys, threading, time
from truenext.client.tasks.connection import connect
from truenext.errors import ClosedError

async def main():
    async with connect(sys.argv[1], heart_beat=0.8, heartbeat_thread=True) as connection:
        await connection.send("/queue/q", "x")
        driver = connection._driver
        # As it is while the thread beats.
        driver._write_lock.acquire()
        child = os.fork()
        if not child:
            names = [each.name for each in threading.enumerate()]
            try:
                await connection.send("/queue/q", "child")
            except ClosedError:
                pass
            else:
                os._exit(3)
            # Nobody would ever give the lock back here.
            driver._close_socket()
            # The end of the `with` does nothing.
            os._exit(2) if names != ["MainThread"] else None
        else:
            driver._write_lock.release()
            _, status = os.waitpid(child, 0)
            assert status == 0, status
            time.sleep(4.0)
            await connection.send("/queue/q", "y")
            assert connection.health().reconnects == 0
    os._exit(0)

asyncio.run(main())
"""


def test_a_forked_child_has_no_heartbeat_thread_and_the_parents_goes_on() -> None:
    with testing.blocking_broker() as broker:
        done = subprocess.run(
            dying_with_us([sys.executable, "-c", FORKS, broker.url]),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env=os.environ | {"PYTHONWARNINGS": "ignore::DeprecationWarning"},
        )
        assert done.returncode == 0, done.stderr
        assert broker.queue("q").bodies == [b"x", b"y"]


def test_a_heartbeat_thread_ends_with_its_driver() -> None:
    class Nothing:
        loop: Any = asyncio.new_event_loop()

        def send_heart_beat_if_idle(self, seen: float) -> float:
            return seen

    beating = Nothing()
    heartbeat_thread.HeartbeatThread(beating, 0.01)
    assert hearts()
    del beating
    until = time.monotonic() + PATIENCE_S
    while hearts() and time.monotonic() < until:
        time.sleep(0.01)
    assert not hearts()
    Nothing.loop.close()
