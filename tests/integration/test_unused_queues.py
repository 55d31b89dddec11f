"""Tests that unused queues are removed from a real broker, its disk and its memory, and lose no message."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contract.naive_history import read_folder
from tests.integration.broker_here import broker_here, port_of
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from tests.property import targets
from truenext.engine.engine import Engine
from truenext.engine.writing.commit_state import CommitState
from truenext.store.check import check
from truenext.store.embedded import EmbeddedStore

NAMES = 200


class Clock:
    """Clock of a broker that runs in the test's process."""

    def __init__(self) -> None:
        self.ahead_us = 0


@contextmanager
def clock() -> Iterator[Clock]:
    """Let the test put the broker's clock forward during the block."""
    ahead = Clock()
    tick = CommitState.tick

    def shifted(ledger: CommitState, now_us: int, steady_us: int) -> None:
        tick(ledger, now_us + ahead.ahead_us, steady_us + ahead.ahead_us)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommitState, "tick", shifted)
        yield ahead


def known(port: int) -> RawClient:
    client = RawClient(port)
    client.send_connect("1.2", "0,0")
    return client


def use(port: int, names: range) -> None:
    """Send to each queue once, and receive and acknowledge the message."""
    client = known(port)
    for number in names:
        client.send(f"name.{number}", b"%d" % number, persistent=number % 2 == 0, confirmed=True)
        client.subscribe(f"name.{number}")
        message = client.message()
        assert message.body == b"%d" % number
        client.ack(message, confirmed=True)
        client.unsubscribe()
    client.disconnect()


async def until_removed(engine: Engine) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(not queue.is_temporary for queue in engine.queues.by_name.values()):
        assert time.monotonic() < deadline, f"{len(list(engine.queues.by_name.values()))} queues stay"
        await asyncio.sleep(0.05)


@pytest.mark.timeout(120)
def test_queues_used_once_leave_no_memory_or_disk_taken_and_the_history_distinguishes_them(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    recorded: list[tuple[str, str]] = []

    async def run() -> None:
        with clock() as ahead:
            async with broker_here(data) as listener:
                engine = listener._broker._engine
                for first in (0, NAMES):
                    await asyncio.to_thread(use, port_of(listener), range(first, first + NAMES))
                    ahead.ahead_us += 70_000_000
                    await until_removed(engine)
                    memory = engine.state.memory
                    assert (memory.queue_bytes, memory.deque_bytes, memory.message_bytes) == (0, 0, 0)
                    assert targets.numbered(engine) == {}

    asyncio.run(run())
    assert check(data, lambda finding: pytest.fail(str(finding)), lambda *_: None).names == {}
    store = EmbeddedStore(data)
    assert store.recover().queues == {}
    store.close()
    for event in read_folder(data / "history"):
        if event["kind"] in ("accepted", "acknowledged"):
            recorded.append((event["kind"], event["queue"]))
    assert recorded == [
        (kind, f"name.{number}") for number in range(2 * NAMES) for kind in ("accepted", "acknowledged")
    ]


@pytest.mark.timeout(120)
def test_a_pattern_subscription_gets_messages_of_queues_that_were_removed_and_made_again() -> None:
    async def run() -> None:
        with clock() as ahead:
            async with broker_here() as listener:
                reader, sender = [await asyncio.to_thread(known, port_of(listener)) for _ in range(2)]
                await asyncio.to_thread(reader.subscribe, "orders.*")
                for number in range(3):
                    for name in ("orders.eu", "orders.us"):
                        await asyncio.to_thread(sender.send, name, b"%d" % number, confirmed=True)
                    messages = await asyncio.to_thread(reader.messages, 2)
                    assert bodies(messages) == [str(number)] * 2
                    for message in messages:
                        await asyncio.to_thread(reader.ack, message, confirmed=True)
                    ahead.ahead_us += 70_000_000
                    await until_removed(listener._broker._engine)
                reader.close()
                sender.close()

    asyncio.run(run())


def test_a_broker_killed_before_the_removal_of_empty_queues_starts_undamaged(own_broker: BrokerProcess) -> None:
    """An empty queue is removed after a minute; a broker that was killed before finds it as it was."""
    client = own_broker.connect()
    for number in range(50):
        client.send(f"name.{number}", b"m", persistent=True, confirmed=True)
    reader = own_broker.connect()
    for number in range(49):
        reader.subscribe(f"name.{number}", subscription=str(number))
        reader.ack(reader.message(), confirmed=True)
    own_broker.restart(is_clean=False)
    own_broker.await_facts("name.49", waiting=1)
    reader = own_broker.connect()
    reader.subscribe("name.49")
    assert bodies(reader.messages(1)) == ["m"]
