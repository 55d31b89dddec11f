"""Tests of the sends that a transaction may make without disk space.

The test sets how full the disk is (held_disk.py), or fills it. Source of what is expected: docs/contract.md, C24.5
to C24.9.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.held_disk import SEGMENT_BYTES_OF_SMALL_DISK, SEGMENTS_MAX, used_bytes
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies
from truenext.model.disk_level import DiskLevel
from truenext.store.checkpointer import LAG_SEGMENTS_MAX
from truenext.store.disk_space import BALLAST_SEGMENTS
from truenext.store.journal import SPARES_MAX
from truenext.wire.stomp.frame import Frame

FULL = (
    "the broker's disk is as full as it may be (its reserve of free space, --disk-limit or --database-limit is "
    "reached; with --memory: --memory-limit): free disk space, or try again when messages were consumed"
)
ADVICE = (
    "; or use a transaction that first acknowledges messages, of at least as many bytes as it sends "
    "(except 16384 bytes to queues Spark.*)"
)


def sent(broker: BrokerProcess, to: str, *texts: bytes, persistent: bool = True) -> None:
    producer = broker.connect()
    for body in texts:
        producer.send(to, body, persistent=persistent)
    producer.send("barrier", b"", persistent=True, confirmed=True)
    producer.disconnect()


def consumer(broker: BrokerProcess, queue: str, count: int) -> tuple[RawClient, list[Frame]]:
    """Return a client that holds `count` messages, and use up the disk space."""
    client = broker.connect(headers=TRUENEXT_CLIENT)
    client.subscribe(queue, prefetch=count)
    held = client.messages(count)
    broker.set_disk_level(DiskLevel.NONE)
    return client, held


def assert_refused(client: RawClient, transaction: str, text: str = FULL + ADVICE) -> None:
    error = client.next_error()
    assert error.headers["truenext-code"] == "no-space"
    assert error.body.decode().startswith(text), error.body
    client.abort(transaction)


def test_a_transaction_sends_as_many_bytes_as_it_has_acknowledged_and_no_byte_more(held_broker: BrokerProcess) -> None:
    # C24.5
    sent(held_broker, "source", b"a" * 1000, b"b" * 1000, b"c" * 1000)
    client, held = consumer(held_broker, "source", 3)
    client.begin("t")
    client.ack(held[0], transaction="t")
    client.ack(held[1], transaction="t")
    client.send("target", b"d" * 1000, persistent=True, transaction="t", confirmed=True)
    client.send("target", b"e" * 1000, persistent=True, transaction="t", confirmed=True)
    client.commit("t")

    client.begin("u")
    client.ack(held[2], transaction="u")
    client.send("target", b"f" * 1001, persistent=True, transaction="u")
    assert_refused(client, "u")

    assert [len(body) for body in bodies(held_broker.remaining_messages("target"))] == [1000, 1000]


def test_a_transaction_that_acknowledges_only_after_its_send_is_refused(held_broker: BrokerProcess) -> None:
    # C24.5
    sent(held_broker, "source", b"a" * 1000)
    client, held = consumer(held_broker, "source", 1)
    client.begin("t")
    client.send("target", b"b", persistent=True, transaction="t")
    client.ack(held[0], transaction="t")
    assert_refused(client, "t")


def test_a_transaction_with_transients_only_frees_nothing(held_broker: BrokerProcess) -> None:
    # C24.6
    sent(held_broker, "source", b"a" * 1000, persistent=False)
    client, held = consumer(held_broker, "source", 1)
    client.begin("t")
    client.ack(held[0], transaction="t")
    client.send("target", b"b", persistent=True, transaction="t")
    assert_refused(client, "t")


def test_a_transaction_sends_16_kib_to_queues_of_spark_that_it_does_not_free(held_broker: BrokerProcess) -> None:
    # C24.8
    sent(held_broker, "source", b"a")
    client, _ = consumer(held_broker, "source", 1)
    headers = "priority:4\ndestination:/queue/Spark.x\npersistent:true\ncontent-length:16283\n"
    largest = 16_384 - 26 - len(headers)
    assert str(largest) in headers
    client.begin("t")
    client.send("Spark.x", b"b" * largest, persistent=True, transaction="t", confirmed=True)
    client.commit("t")
    client.begin("u")
    client.send("Spark.x", b"b" * (largest + 1), persistent=True, transaction="u")
    assert_refused(client, "u")
    client.begin("v")
    client.send("Sparkle", b"b", persistent=True, transaction="v")
    assert_refused(client, "v")


def test_no_transaction_sends_once_a_write_has_found_no_space(held_broker: BrokerProcess, queue: str) -> None:
    # C24.9
    sent(held_broker, queue, b"a" * 1000)
    client, held = consumer(held_broker, queue, 1)
    held_broker.set_disk_level(DiskLevel.FULL)
    assert "level: full, all sends are refused; " in held_broker.output_of("status")
    client.begin("t")
    client.ack(held[0], transaction="t")
    client.send("Spark.x", b"b", persistent=True, transaction="t")
    assert_refused(client, "t", FULL)


def test_a_content_counts_once_no_other_queue_has_a_copy_of_it(held_broker: BrokerProcess, queue: str) -> None:
    # C24.6
    address, names = f"/topic/VirtualTopic.{queue}", [f"Consumer.{each}.VirtualTopic.{queue}" for each in "xy"]
    first, second = held_broker.connect(headers=TRUENEXT_CLIENT), held_broker.connect(headers=TRUENEXT_CLIENT)
    for client, name in zip((first, second), names, strict=True):
        client.subscribe(name, prefetch=1)
    producer = held_broker.connect()
    producer.send_frame("SEND", {"destination": address, "persistent": "true"}, b"a" * 5000, confirmed=True)
    copy, other = first.message(), second.message()
    held_broker.set_disk_level(DiskLevel.NONE)

    first.begin("t")
    first.ack(copy, transaction="t")
    first.send("target", b"b" * 5000, persistent=True, transaction="t")
    assert_refused(first, "t")

    second.ack(other, confirmed=True)
    copy = first.message()
    first.begin("u")
    first.ack(copy, transaction="u")
    first.send("target", b"b" * 5000, persistent=True, transaction="u", confirmed=True)
    first.commit("u")
    assert [len(body) for body in bodies(held_broker.remaining_messages("target"))] == [5000]


def test_bytes_of_acknowledged_messages_that_left_memory_count_too(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, ("--queue-memory-limit", "1KB"), can_hold_disk=True)
    broker.start()
    try:
        sent(broker, "a", *[b"a" * 1000] * 20)
        client, held = consumer(broker, "a", 20)
        client.begin("t")
        for message in held:
            client.ack(message, transaction="t")
        for _ in held:
            client.send("b", b"b" * 1000, persistent=True, transaction="t", confirmed=True)
        client.commit("t")
    finally:
        broker.clean_up()


# ---- On a disk that is full ----

MIB = 1024 * 1024
BODY = 8 * 1024
PER_BUNDLE = 128
OVERSHOOT = (SEGMENTS_MAX + LAG_SEGMENTS_MAX + SPARES_MAX + 1) * SEGMENT_BYTES_OF_SMALL_DISK
"""Bytes by which the longest journal, of segments as large as a transaction, may exceed a limit: docs/operations.md"""


@pytest.fixture(params=["limit", "size"])
def small_broker(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BrokerProcess]:
    """Broker with a disk limit of 24 MiB, or on a disk that seems to have as much, and the broker's own needs."""
    size = 24 * MIB if request.param == "limit" else 40 * MIB
    (tmp_path / request.param).write_text(str(size))
    broker = BrokerProcess(tmp_path, ("--no-history",), can_hold_disk=True)
    broker.start()
    try:
        yield broker
    finally:
        broker.clean_up()


def fill(broker: BrokerProcess, queue: str) -> int:
    """Fill a queue until the disk has no space, and return the number of its messages."""
    client = broker.connect(headers=TRUENEXT_CLIENT)
    # It does not only send.
    client.subscribe("other")
    count = 0
    while True:
        receipt = client.new_receipt()
        client.send(queue, b"%08d" % count + b"." * (BODY - 8), persistent=True, headers={"receipt": receipt})
        frame = client.next_frame()
        if frame.command == "ERROR":
            assert frame.headers["truenext-code"] == "no-space"
            return count
        count += 1


@pytest.mark.alternates("packing")
def test_a_queue_that_has_filled_the_disk_is_packed_into_another_and_the_folder_stays_within_bounds(
    small_broker: BrokerProcess,
) -> None:
    # C24.9
    broker = small_broker
    count = fill(broker, "source")
    client = broker.connect(headers=TRUENEXT_CLIENT)
    client.subscribe("source", prefetch=2 * PER_BUNDLE, ack="client")
    before = used_bytes(broker.data)
    largest = before
    packed = 0
    without_room = 0
    while packed < count:
        messages = client.messages(min(PER_BUNDLE, count - packed))
        client.begin("t")
        client.ack(messages[-1], transaction="t")
        body = b"".join(message.body for message in messages)
        client.send("Spark.bundles", body, persistent=True, transaction="t")
        client.commit("t")
        packed += len(messages)
        largest = max(largest, used_bytes(broker.data))
        without_room += broker.status()["disk_level"] == "none"
    assert broker.queues()["source"].waiting == 0
    # At the limit there is room again once the checkpoint has fuller pages than before.
    assert without_room > 3
    assert largest <= before + OVERSHOOT + BALLAST_SEGMENTS * SEGMENT_BYTES_OF_SMALL_DISK

    bundles = b"".join(message.body for message in broker.remaining_messages("Spark.bundles"))
    assert [int(bundles[at : at + 8]) for at in range(0, len(bundles), BODY)] == list(range(count))
