"""Tests of releases: messages return to their exact place without an attempt, and the client can tell earlier
dispatches.

Source of what is expected: docs/contract.md, chapter 20; docs/protocol.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies
from truenext.wire.stomp.frame import Frame

pytestmark = LIMITS


@pytest.fixture
def reader(broker: BrokerProcess) -> RawClient:
    return broker.connect(headers=TRUENEXT_CLIENT)


def fill(broker: BrokerProcess, queue: str, count: int, *, first: int = 0) -> None:
    """Send messages, persistent and transient in turn."""
    sender = broker.connect()
    for number in range(first, first + count):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0)
    sender.arrived()
    sender.disconnect()


def numbers(count: int, first: int = 0) -> list[str]:
    return [str(number) for number in range(first, first + count)]


def header_values(messages: list[Frame], name: str) -> list[int]:
    return [int(message.headers[f"truenext-{name}"]) for message in messages]


def of_round(reader: RawClient, number: int, count: int) -> list[Frame]:
    """Return `count` messages of round `number` or later, and drop earlier ones."""
    found: list[Frame] = []
    while len(found) < count:
        message = reader.message()
        if int(message.headers["truenext-round"]) >= number:
            found.append(message)
    return found


def test_released_messages_come_again_in_order_and_without_an_attempt(
    broker: BrokerProcess, queue: str, reader: RawClient
) -> None:
    # C20.1, C20.7
    fill(broker, queue, 5)
    reader.subscribe(queue, prefetch=3)
    first = reader.only(3)
    reader.release("1")
    again = reader.only(3)
    assert bodies(first) == bodies(again) == numbers(3)
    assert header_values(first, "round") == [0, 0, 0] and header_values(again, "round") == [1, 1, 1]
    assert header_values(again, "attempts") == [0, 0, 0] and header_values(again, "deliveries") == [2, 2, 2]


def test_messages_to_keep_are_not_released(broker: BrokerProcess, queue: str, reader: RawClient) -> None:
    # C20.1
    fill(broker, queue, 4)
    reader.subscribe(queue, prefetch=3)
    zero, one, two = reader.only(3)
    reader.release("1", keep=[one, zero])
    (again,) = reader.only(1)
    assert bodies([again]) == ["2"] and again.headers["ack"] != two.headers["ack"]
    reader.ack(one, confirmed=True)
    reader.ack(zero, confirmed=True)
    assert bodies(reader.only(1)) == ["3"]


def test_an_ack_of_an_earlier_dispatch_is_refused(broker: BrokerProcess, queue: str, reader: RawClient) -> None:
    # C20.8
    fill(broker, queue, 1)
    reader.subscribe(queue)
    (first,) = reader.only(1)
    reader.release("1")
    (again,) = reader.only(1)
    reader.ack(first)
    assert reader.next_error().headers["truenext-code"] == "not-held"
    reader.ack(again, confirmed=True)


def test_an_abort_releases_the_transaction_and_the_buffer_in_one_step(
    broker: BrokerProcess, queue: str, reader: RawClient
) -> None:
    # C20.2
    fill(broker, queue, 6)
    reader.subscribe(queue, prefetch=4)
    messages = reader.only(4)
    reader.begin("t")
    reader.ack(messages[0], transaction="t")
    reader.ack(messages[1], transaction="t")
    reader.release("1", abort="t")
    again = of_round(reader, 1, 4)
    assert bodies(again) == numbers(4)
    assert header_values(again, "attempts") == [1, 1, 0, 0]


def test_an_abort_can_count_attempts_of_nacked_messages_alone(
    broker: BrokerProcess, queue: str, reader: RawClient
) -> None:
    fill(broker, queue, 3)
    reader.subscribe(queue, prefetch=3)
    for attempts in ([0, 0, 0], [0, 1, 0]):
        messages = of_round(reader, attempts[1], 3)
        assert bodies(messages) == numbers(3)
        assert header_values(messages, "attempts") == attempts
        reader.begin("t")
        for message in messages:
            reader.ack(message, transaction="t")
        # Acknowledged when it was handed out, and then it failed.
        reader.nack(messages[1], transaction="t")
        reader.release("1", abort="t", count_attempts="nacked")
    # The second failure is followed by a delay.
    assert bodies(of_round(reader, 2, 3)) == ["0", "2", "1"]


def test_an_abort_can_count_no_attempt(broker: BrokerProcess, queue: str, reader: RawClient) -> None:
    fill(broker, queue, 2)
    reader.subscribe(queue)
    for message in reader.only(2):
        reader.send_frame("BEGIN", {"transaction": message.body.decode()})
        reader.ack(message, transaction=message.body.decode())
        reader.send_frame(
            "ABORT", {"transaction": message.body.decode(), "truenext-count-attempts": "nacked"}, confirmed=True
        )
    again = reader.messages(2)
    assert bodies(again) == numbers(2) and header_values(again, "attempts") == [0, 0]


def test_a_suspended_subscription_gets_nothing_until_it_is_woken(
    broker: BrokerProcess, queue: str, reader: RawClient
) -> None:
    # C20.4
    fill(broker, queue, 3)
    reader.subscribe(queue, prefetch=2)
    reader.only(2)
    reader.release("1", suspend=True, confirmed=True)
    fill(broker, queue, 1, first=3)
    assert reader.arrived() == []
    assert bodies(broker.remaining_messages(queue)) == numbers(4)
    reader.wake()
    assert bodies(reader.only(2)) == numbers(2)


def test_a_release_can_keep_more_messages_than_a_header_holds(
    broker: BrokerProcess, queue: str, reader: RawClient
) -> None:
    count = 1000
    sender = broker.connect()
    for number in range(count):
        sender.send(queue, b"%d" % number)
    sender.arrived()
    name = "s" * 200
    reader.subscribe(queue, prefetch=count, subscription=name)
    messages = reader.messages(count)
    kept = messages[::2]
    assert sum(len(message.headers["ack"]) for message in kept) > 65536
    reader.release(name, keep=kept)
    again = reader.messages(count // 2)
    assert bodies(again) == bodies(messages[1::2])
    assert reader.arrived() == []


@pytest.mark.parametrize(
    ("ack", "named", "others", "code"),
    [
        ("auto", "1", {}, "not-held"),
        ("client", "2", {}, "not-found"),
        ("client", "1", {"abort": "t"}, "no-transaction"),
        ("client", "1", {"count_attempts": "none"}, "control-request"),
        ("client", "1", {"spare": []}, "control-request"),
    ],
)
def test_an_invalid_release_is_refused_with_its_cause(
    broker: BrokerProcess, queue: str, reader: RawClient, ack: str, named: str, others: dict[str, Any], code: str
) -> None:
    # C20.6
    reader.subscribe(queue, ack=ack)
    reader.release(named, **others)
    assert reader.next_error().headers["truenext-code"] == code


def test_a_message_that_always_fails_takes_no_neighbour_to_the_dead_letters(
    tmp_path: Path, options: Sequence[str], queue: str
) -> None:
    broker = BrokerProcess(tmp_path, options, policy={"delay_ms": 0})
    try:
        broker.start()
        fill(broker, queue, 3)
        reader = broker.connect(headers=TRUENEXT_CLIENT)
        reader.subscribe(queue, prefetch=3)
        for number in range(10):
            reader.begin("t")
            for message in of_round(reader, number, 3 if number < 7 else 2):
                reader.ack(message, transaction="t")
                if message.body == b"1":
                    reader.nack(message, transaction="t")
            reader.release("1", abort="t", count_attempts="nacked")
        reader.disconnect()
        assert bodies(broker.remaining_messages(f"DLQ.{queue}")) == ["1"]
        remaining = broker.remaining_messages(queue)
        assert bodies(remaining) == ["0", "2"] and header_values(remaining, "attempts") == [0, 0]
        broker.stop()
    finally:
        broker.clean_up()


def test_a_group_stays_with_a_suspended_subscription_while_its_transaction_has_a_message_of_it(
    broker: BrokerProcess, queue: str, reader: RawClient
) -> None:
    # C5.3, C20.5
    sender = broker.connect()
    for number in range(6):
        sender.send(queue, b"%d" % number, headers={"JMSXGroupID": "AB"[number % 2]})
    sender.arrived()
    reader.subscribe(queue)
    reader.messages(6)
    other = broker.connect()
    other.subscribe(queue)
    reader.release("1")
    zero = of_round(reader, 1, 6)[0]
    assert other.arrived() == []
    reader.release("1", keep=[zero], suspend=True)
    assert bodies(other.messages(3)) == ["1", "3", "5"]
    reader.begin("t")
    reader.ack(zero, transaction="t")
    reader.arrived()
    assert other.arrived() == []
    reader.commit("t")
    assert bodies(other.only(2)) == ["2", "4"]
