"""Tests that expired messages, and no others, are removed, in memory and on disk."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.drawing import one_of
from tests.integration.broker_here import broker_here, port_of
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from truenext.engine.writing.commit_state import CommitState

COUNT = 20_000
SMALL_MEMORY = ("--queue-memory-limit", "200KB")
LIMITS = one_of("options", [(), SMALL_MEMORY], ids=["default limits", "200 KB a queue"])


def expiring_in(milliseconds: int) -> dict[str, str]:
    return {"expires": str(int(time.time() * 1000) + milliseconds)}


def send_expiring(sender: RawClient, count: int, milliseconds: int) -> None:
    """Send expiring messages, persistent and transient, of several priorities, with one in a thousand that never
    expires.

    Returns when all are accepted.
    """
    for number in range(count):
        headers = {} if number % 1000 == 500 else expiring_in(milliseconds)
        sender.send("q", b"%d" % number, persistent=number % 2 == 0, priority=3 + number % 3, headers=headers)
    sender.send("barrier", b"", persistent=True, confirmed=True)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@LIMITS
def test_expired_messages_without_a_consumer_are_removed_soon(own_broker: BrokerProcess) -> None:
    sender = own_broker.connect()
    with own_broker.watched_memory() as samples:
        send_expiring(sender, COUNT, 1000)
        own_broker.await_facts("q", waiting=COUNT // 1000)

    assert max(samples) < 128 * 1024 * 1024
    assert own_broker.status()["in_memory"] <= COUNT // 1000 + 1
    remaining = bodies(own_broker.remaining_messages("q"))
    assert sorted(map(int, remaining)) == list(range(500, COUNT, 1000))


@LIMITS
def test_messages_that_expire_while_the_broker_is_down_are_removed_soon_after_its_start(
    own_broker: BrokerProcess,
) -> None:
    # C15.2
    sender = own_broker.connect()
    send_expiring(sender, COUNT, 4000)
    own_broker.restart(is_clean=False)
    # Those that never expire are even: persistent.
    own_broker.await_facts("q", waiting=COUNT // 1000)
    own_broker.restart(is_clean=False)
    own_broker.await_facts("q", waiting=COUNT // 1000)

    remaining = bodies(own_broker.remaining_messages("q"))
    assert sorted(map(int, remaining)) == list(range(500, COUNT, 1000))


def test_disk_and_memory_do_not_grow_by_expired_messages(own_broker: BrokerProcess) -> None:
    sender = own_broker.connect()
    send_expiring(sender, COUNT, 0)
    own_broker.await_facts("q", waiting=COUNT // 1000)
    used, on_disk = own_broker.status()["memory"]["used"], size_of(own_broker.data)
    for round_ in range(2, 5):
        send_expiring(sender, COUNT, 0)
        own_broker.await_facts("q", waiting=round_ * COUNT // 1000)
    assert own_broker.status()["memory"]["used"] < used + 100_000
    # The journal uses its segments again.
    assert size_of(own_broker.data) < on_disk + 160 * 1024 * 1024


def test_a_consumer_keeps_what_it_holds_and_gets_nothing_that_has_expired(own_broker: BrokerProcess) -> None:
    sender, reader = own_broker.connect(), own_broker.connect()
    reader.subscribe("q", prefetch=1)
    for number in range(3):
        sender.send("q", b"%d" % number, persistent=True, headers=expiring_in(700))
    sender.send("q", b"stays", persistent=True, confirmed=True)
    first = reader.message()
    own_broker.await_facts("q", waiting=1, unacknowledged=1)
    reader.ack(first, confirmed=True)
    assert bodies(reader.messages(1)) == ["stays"]


def test_a_message_says_when_its_time_to_live_ends_and_is_gone_then(own_broker: BrokerProcess) -> None:
    # C15.4
    sender, reader = own_broker.connect(), own_broker.connect()
    reader.subscribe("seen")
    for ttl in ({"truenext-ttl": "3600000"}, {"truenext-ttl": "3600000", "AMQ_SCHEDULED_DELAY": "50"}, {"ttl": "1"}):
        sender.send("seen", b"", persistent=True, headers=ttl)
    messages = {
        frozenset(message.headers.keys() & {"expires", "truenext-ttl", "ttl"}): message.headers
        for message in reader.messages(3)
    }
    assert messages.keys() == {frozenset({"expires"}), frozenset({"ttl"})}
    headers = messages[frozenset({"expires"})]
    assert int(headers["expires"]) == int(headers["timestamp"]) + 3_600_000

    sender.begin("t")
    for number in range(10):
        sender.send("q", b"%d" % number, persistent=number % 2 == 0, headers={"truenext-ttl": "700"}, transaction="t")
    sender.send("q", b"stays", persistent=True, transaction="t")
    # Longer than they are to live.
    time.sleep(1)
    sender.commit("t")
    own_broker.await_facts("q", waiting=11)
    own_broker.restart(is_clean=False)
    own_broker.await_facts("q", waiting=1)
    assert bodies(own_broker.remaining_messages("q")) == ["stays"]


def test_a_clock_that_is_set_forwards_expires_and_one_that_is_set_back_brings_nothing_back() -> None:
    # C15.1, C15.6
    offset_ms = 0
    tick = CommitState.tick

    def shifted(ledger: CommitState, now_us: int, steady_us: int) -> None:
        tick(ledger, now_us + offset_ms * 1000, steady_us)

    async def run(monkeypatch: pytest.MonkeyPatch) -> None:
        nonlocal offset_ms
        monkeypatch.setattr(CommitState, "tick", shifted)
        async with broker_here() as listener:
            client = await asyncio.to_thread(RawClient, port_of(listener))
            await asyncio.to_thread(client.send_connect, "1.2", "0,0")

            def send() -> None:
                client.send("q", b"in a day", headers=expiring_in(24 * 3600 * 1000), confirmed=True)
                client.send("q", b"in a year", headers=expiring_in(365 * 24 * 3600 * 1000), confirmed=True)

            await asyncio.to_thread(send)
            queue = next(iter(listener._broker._engine.queues.by_name.values()))
            assert queue.waiting_count() == 2
            offset_ms = 25 * 3600 * 1000
            deadline = time.monotonic() + PATIENCE_SECONDS
            while queue.waiting_count() == 2:
                assert time.monotonic() < deadline, "nothing expires"
                await asyncio.sleep(0.01)
            offset_ms = -25 * 3600 * 1000
            await asyncio.to_thread(client.subscribe, "q")
            assert bodies(await asyncio.to_thread(client.messages, 1)) == ["in a year"]
            client.close()

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(run(monkeypatch))
