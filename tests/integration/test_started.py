"""Tests that only started messages count an attempt when a connection is lost, and that the next reader is told of it.

Source of what is expected: docs/contract.md, C10.2, C10.9, C10.10; docs/protocol.md.
"""

import pytest

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies
from truenext.wire.stomp.frame import Frame

pytestmark = LIMITS


def fill(broker: BrokerProcess, queue: str, count: int) -> None:
    sender = broker.connect()
    for number in range(count):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0)
    sender.arrived()
    sender.disconnect()


def attempts(messages: list[Frame]) -> list[int]:
    return [int(message.headers["truenext-attempts"]) for message in messages]


def were_lost(messages: list[Frame]) -> list[bool]:
    return ["truenext-lost" in message.headers for message in messages]


def lose(reader: RawClient) -> None:
    """Let the broker count the connection as lost at once: one that is cut can be taken over for a second."""
    reader.write(b"SEND\nno header\n\n\0")
    reader.error()


def again(broker: BrokerProcess, queue: str, count: int) -> list[Frame]:
    broker.await_facts(queue, consumers=0)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue)
    return reader.only(count)


@pytest.mark.parametrize("ends", ["crashes", "hangs up", "is refused"])
def test_only_started_messages_count_an_attempt_when_the_connection_is_lost(
    broker: BrokerProcess, queue: str, ends: str
) -> None:
    # C10.2
    fill(broker, queue, 5)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue)
    messages = reader.only(5)
    reader.started(messages[1])
    reader.started(messages[3])
    reader.ack(messages[3])
    reader.arrived()
    if ends == "crashes":
        reader.crash()
    elif ends == "hangs up":
        reader.hang_up()
        reader.await_end()
    else:
        lose(reader)
    back = again(broker, queue, 4)
    assert bodies(back) == ["0", "1", "2", "4"]
    assert attempts(back) == [0, 1, 0, 0]
    assert were_lost(back) == [False, True, False, False]


def test_messages_that_were_not_started_count_no_attempt_when_the_connection_is_lost(
    broker: BrokerProcess, queue: str
) -> None:
    # C10.9
    fill(broker, queue, 2)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue)
    reader.only(2)
    lose(reader)
    assert attempts(again(broker, queue, 2)) == [0, 0]


def test_a_message_acknowledged_in_a_transaction_counts_as_started(broker: BrokerProcess, queue: str) -> None:
    fill(broker, queue, 3)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue)
    messages = reader.only(3)
    reader.begin("t")
    reader.ack(messages[2], transaction="t")
    reader.arrived()
    lose(reader)
    back = again(broker, queue, 3)
    assert attempts(back) == [0, 0, 1] and were_lost(back) == [False, False, True]


def test_started_ends_with_the_dispatch(broker: BrokerProcess, queue: str) -> None:
    # C10.9, C20.3
    fill(broker, queue, 2)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue)
    first = reader.only(2)
    for message in first:
        reader.started(message)
    reader.release("1", keep=[first[1]])
    reader.only(1)
    lose(reader)
    assert attempts(again(broker, queue, 2)) == [0, 1]


@pytest.mark.parametrize("unclean", [False, True])
def test_header_of_a_last_attempt_by_lost_connection_survives_restarts(
    own_broker: BrokerProcess, queue: str, unclean: bool
) -> None:
    # C10.10
    broker = own_broker
    sender = broker.connect()
    for number in range(3):
        sender.send(queue, b"%d" % number, persistent=True, confirmed=True)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue)
    messages = reader.only(3)
    reader.started(messages[0])
    reader.nack(messages[1])
    reader.arrived()
    lose(reader)
    # Durable with whatever is confirmed after it.
    sender.send(queue, b"3", persistent=True, confirmed=True)
    broker.restart(is_clean=not unclean)
    back = again(broker, queue, 4)
    assert bodies(back) == ["0", "1", "2", "3"]
    assert attempts(back) == [1, 1, 0, 0]
    assert were_lost(back) == [True, False, False, False]


def test_a_later_failure_of_another_kind_is_no_lost_connection(broker: BrokerProcess, queue: str) -> None:
    fill(broker, queue, 1)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue)
    (message,) = reader.only(1)
    reader.started(message)
    lose(reader)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue)
    (message,) = reader.only(1)
    assert were_lost([message]) == [True]
    reader.nack(message, headers={"truenext-delay": "0"})
    (message,) = reader.only(1)
    assert attempts([message]) == [2] and were_lost([message]) == [False]


def test_a_connection_of_another_client_counts_the_first_message_and_gets_no_header(
    broker: BrokerProcess, queue: str
) -> None:
    fill(broker, queue, 2)
    reader = broker.connect()
    reader.subscribe(queue)
    reader.only(2)
    lose(reader)
    other = broker.connect()
    other.subscribe(queue)
    back = other.only(2)
    assert attempts(back) == [1, 0] and were_lost(back) == [False, False]


def test_an_ack_may_name_the_message_that_is_started_next(broker: BrokerProcess, queue: str) -> None:
    fill(broker, queue, 3)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue)
    messages = reader.only(3)
    reader.send_frame("ACK", {"id": messages[0].headers["ack"], "truenext-started": messages[2].headers["ack"]})
    reader.arrived()
    lose(reader)
    back = again(broker, queue, 2)
    assert bodies(back) == ["1", "2"] and attempts(back) == [0, 1]


def test_an_ack_that_names_a_wrong_message_as_started_does_nothing(broker: BrokerProcess, queue: str) -> None:
    fill(broker, queue, 1)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue)
    (message,) = reader.only(1)
    reader.send_frame("ACK", {"id": message.headers["ack"], "truenext-started": "9999999@1"})
    reader.send_frame(
        "ACK", {"id": message.headers["ack"], "truenext-started": message.headers["ack"], "transaction": "t"}
    )
    assert [reader.next_error().headers["truenext-code"] for _ in range(2)] == ["not-held", "header"]
    reader.ack(message, confirmed=True)


def test_started_is_refused_for_a_message_that_is_not_held(broker: BrokerProcess, queue: str) -> None:
    fill(broker, queue, 1)
    for ack, code in (("auto", "not-held"), ("client", "not-held")):
        reader = broker.connect(headers=TRUENEXT_CLIENT)
        reader.subscribe(queue, ack=ack)
        reader.send_frame("SEND", {"destination": "/control/started", "id": "9999999@1"})
        assert reader.next_error().headers["truenext-code"] == code
