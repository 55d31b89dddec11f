"""Tests that subscribers of a topic get all messages in order, however much faster they are sent, within the memory of
the broker.

Over real sockets, with a real store. Source of what is expected: docs/contract.md, C6.2, C6.3 and C24.13 to C24.18.
"""

import threading
import time
from pathlib import Path

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import completed_text
from tests.integration.raw_client import RawClient, bodies
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import BODY_BYTES_MAX, MEMORY_LIMIT_MIN
from truenext.wire.stomp.frame import Frame

SMALL = pytest.mark.parametrize("options", [("--memory-limit", "128MiB")], ids=["128 MiB"])
"""Memory limit, a quarter of which is for messages."""
BODY_BYTES = 48 * 1024
MANY = 1500
"""Number of messages that takes more than twice the memory for messages."""


def follow(
    broker: BrokerProcess, *, mode: str = "client-individual", topic: str = "news", window: int = 100
) -> RawClient:
    client = broker.connect()
    headers = {"id": "1", "destination": f"/topic/{topic}", "ack": mode}
    if mode != "auto":
        headers["activemq.prefetchSize"] = str(window)
    client.send_frame("SUBSCRIBE", headers, confirmed=True)
    return client


def publish(client: RawClient, first: int, count: int, *, size: int = BODY_BYTES, persistent: bool = False) -> None:
    """Send messages to a topic as fast as the broker takes them, and return when it has taken all."""
    for number in range(first, first + count):
        headers = {"destination": "/topic/news", "number": str(number)}
        client.send_frame("SEND", headers | ({"persistent": "true"} if persistent else {}), b"x" * size)
    client.send_frame("SEND", {"destination": "/topic/nobody"}, confirmed=True)


def numbers_of(messages: list[Frame]) -> list[int]:
    return [int(message.headers["number"]) for message in messages]


def receive_numbers(client: RawClient, count: int) -> list[int]:
    """Receive and acknowledge `count` messages, and return their numbers."""
    messages = []
    for _ in range(count):
        messages.append(client.message())
        client.ack(messages[-1])
    return numbers_of(messages)


def bytes_on_disk(data: Path) -> int:
    """Return the bytes of store and journal on disk, without the ballast."""
    return sum(file.stat().st_blocks * 512 for name in ("lmdb", "journal") for file in (data / name).iterdir())


def check_store(broker: BrokerProcess) -> str:
    """Run `truenext store check`, which must succeed, and return its output."""
    done = completed_text("store", "check", broker.data)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@SMALL
@pytest.mark.parametrize("mode", ["auto", "client-individual"])
def test_messages_sent_faster_than_they_are_read_come_in_order_within_the_memory_limit(
    own_broker: BrokerProcess, mode: str
) -> None:
    # C24.13
    readers = [follow(own_broker, mode=mode) for _ in range(3)]
    with own_broker.watched_memory() as memory:
        publish(own_broker.connect(), 0, MANY)
        seen: list[list[int]] = [[] for _ in readers]

        def read(at: int) -> None:
            seen[at] = (
                receive_numbers(readers[at], MANY)
                if mode != "auto"
                else numbers_of([readers[at].message() for _ in range(MANY)])
            )

        threads = [threading.Thread(target=read, args=(at,)) for at in range(len(readers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [list(range(MANY))] * len(readers)
    assert max(memory) <= MEMORY_LIMIT_MIN
    own_broker.stop()


@SMALL
def test_the_status_names_the_subscriptions_with_messages_on_disk(own_broker: BrokerProcess) -> None:
    reader = follow(own_broker)
    publish(own_broker.connect(), 0, MANY)
    (largest,) = own_broker.status()["temporary"]["largest"]
    assert (largest["destination"], largest["waiting"] + largest["unacknowledged"]) == ("/topic/news", MANY)
    assert MANY * BODY_BYTES < largest["bytes"] < 1.1 * MANY * BODY_BYTES
    reader.close()
    own_broker.stop()


@SMALL
def test_a_body_is_written_once_for_all_subscribers(own_broker: BrokerProcess) -> None:
    readers = [follow(own_broker) for _ in range(20)]
    publish(own_broker.connect(), 0, MANY)
    assert bytes_on_disk(own_broker.data) < 4 * MANY * BODY_BYTES
    assert receive_numbers(readers[7], 500) == list(range(500))
    own_broker.stop()


def test_two_large_bodies_come_to_two_subscribers(own_broker: BrokerProcess) -> None:
    readers = [follow(own_broker, mode="auto") for _ in range(2)]
    publish(own_broker.connect(), 0, 2, size=BODY_BYTES_MAX)
    for reader in readers:
        assert [len(message.body) for message in reader.only(2)] == [BODY_BYTES_MAX] * 2
    own_broker.stop()


@SMALL
@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
def test_spilled_messages_of_a_subscription_are_gone_after_a_restart(own_broker: BrokerProcess, is_clean: bool) -> None:
    durable = own_broker.connect(sends_connect=False)
    durable.send_connect("1.2", "0,0", client_id="me")
    durable.send_frame("SUBSCRIBE", {"id": "d", "destination": "/topic/kept", "durable": "true"}, confirmed=True)
    reader = follow(own_broker)
    publish(own_broker.connect(), 0, MANY, persistent=True)
    assert receive_numbers(reader, 10) == list(range(10))
    own_broker.restart(is_clean=is_clean)

    reader = follow(own_broker)
    assert own_broker.queues().keys() == {"subscription,me,d,kept"}
    assert reader.arrived() == []
    publish(own_broker.connect(), MANY, MANY)
    assert receive_numbers(reader, MANY) == list(range(MANY, 2 * MANY))
    own_broker.stop()
    check_store(own_broker)
    own_broker.start()
    assert own_broker.queues().keys() == {"subscription,me,d,kept"}
    own_broker.stop()


@SMALL
def test_spilled_messages_of_an_ended_subscription_are_removed_in_the_background(own_broker: BrokerProcess) -> None:
    # C6.3
    readers = [follow(own_broker), follow(own_broker)]
    publish(own_broker.connect(), 0, MANY)
    readers[0].unsubscribe()
    readers[0].arrived()
    readers[1].disconnect()
    # The same name, and perhaps the same number in the store.
    reader = readers[0]
    reader.send_frame(
        "SUBSCRIBE", {"id": "1", "destination": "/topic/news", "ack": "client-individual"}, confirmed=True
    )
    publish(own_broker.connect(), MANY, MANY)
    assert receive_numbers(reader, MANY) == list(range(MANY, 2 * MANY))
    reader.disconnect()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        own_broker.stop()
        output = check_store(own_broker)
        if "0 messages of 0 bytes" in output:
            assert "content" not in output
            break
        assert time.monotonic() < deadline, output
        own_broker.start()
        time.sleep(0.5)


@pytest.mark.parametrize("options", [("--memory-limit", "128MiB")], ids=["128 MiB"])
def test_a_subscriber_that_does_not_read_is_ended_with_the_reason_when_space_is_short(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    # C24.14, C24.18
    broker = BrokerProcess(tmp_path, options, can_hold_disk=True, policy={"stalled_subscriber_ms": 3000})
    broker.start()
    try:
        stalled, slow = follow(broker), follow(broker, window=1)
        sender = broker.connect()
        publish(sender, 0, MANY)
        time.sleep(4)
        # As long as nobody needs the room anybody may stand still.
        message = slow.message()
        assert numbers_of([message]) == [0]
        broker.set_disk_level(DiskLevel.LITTLE)
        for number in range(1, 20):
            slow.ack(message)
            message = slow.message()
            assert numbers_of([message]) == [number]
            time.sleep(0.25)
        error = stalled.error()
        assert "read and acknowledged nothing for 3 s" in error.body.decode()
        assert "stalled_subscriber_ms" in error.body.decode()
        broker.set_disk_level(DiskLevel.PLENTY)
        publish(sender, MANY, 1)
        assert broker.status()["subscriptions"] == {"durable": 0, "non_durable": 1}
        broker.stop()
    finally:
        broker.clean_up()


@SMALL
def test_a_producer_of_a_topic_waits_while_space_is_short(held_broker: BrokerProcess) -> None:
    # C24.13
    reader = follow(held_broker)
    sender = held_broker.connect()
    publish(sender, 0, 1)
    held_broker.set_disk_level(DiskLevel.LITTLE)
    sender.send_frame("SEND", {"destination": "/topic/news", "number": "1", "receipt": "later"}, b"later")
    with pytest.raises(TimeoutError):
        sender.next_frame(0.3)
    assert receive_numbers(reader, 1) == [0]
    held_broker.set_disk_level(DiskLevel.PLENTY)
    sender.await_receipt("later")
    assert bodies(reader.only(1)) == ["later"]
    held_broker.stop()


@SMALL
def test_a_producer_of_a_topic_waits_for_a_slower_disk(held_broker: BrokerProcess) -> None:
    # C24.13
    reader = follow(held_broker)
    sender = held_broker.connect()
    held_broker.hold_disk()
    sent = threading.Thread(target=publish, args=(sender, 0, 2 * MANY))
    with held_broker.watched_memory() as memory:
        sent.start()
        time.sleep(3)
        assert sent.is_alive(), "the broker has taken all, though nothing is written"
        held_broker.resume_disk()
        assert receive_numbers(reader, 2 * MANY) == list(range(2 * MANY))
    sent.join()
    assert max(memory) <= MEMORY_LIMIT_MIN
    held_broker.stop()


def test_a_subscription_that_keeps_more_than_its_topic_allows_is_ended_though_most_is_on_disk(tmp_path: Path) -> None:
    # C24.15, C24.18
    size = MANY * BODY_BYTES
    broker = BrokerProcess(tmp_path, ["--memory-limit", "128MiB"], policy={"memory_limit": f"{size // 2**20}MiB"})
    broker.start()
    try:
        reader, sender = follow(broker), broker.connect()
        publish(sender, 0, MANY // 2)
        assert receive_numbers(reader, 10) == list(range(10))
        publish(sender, MANY // 2, MANY)
        error = reader.error()
        assert "the subscription to news has" in error.body.decode()
        assert f"memory_limit of its policy is {size // 2**20 * 2**20}" in error.body.decode()
        broker.stop()
    finally:
        broker.clean_up()
