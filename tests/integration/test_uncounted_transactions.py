"""Tests that transactions that count their NACKs alone count nothing else, however they end.

Source of what is expected: docs/contract.md, C10.3, C10.4; docs/protocol.md.
"""

import time
from collections.abc import Callable

import pytest

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies, numbered
from tests.integration.test_takeover import numbered as numbered_connection
from truenext.server.ending import TAKEOVER_GRACE_S
from truenext.wire.stomp.frame import Frame

pytestmark = LIMITS

COUNTS_NACKS = {"truenext-count-attempts": "nacked"}
ATTEMPTS_MAX = 7


def fill(broker: BrokerProcess, queue: str, count: int) -> None:
    """Send messages, persistent and transient in turn."""
    sender = broker.connect()
    for number in range(count):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0)
    sender.arrived()
    sender.disconnect()


def attempts(messages: list[Frame]) -> list[int]:
    return [int(message.headers["truenext-attempts"]) for message in messages]


def crash(reader: RawClient) -> None:
    reader.crash()


def hang_up(reader: RawClient) -> None:
    reader.hang_up()
    reader.await_end()


def be_refused(reader: RawClient) -> None:
    reader.send_frame("ACK", {"id": "9999999@1"})
    reader.error()


def be_refused_in_the_transaction(reader: RawClient) -> None:
    reader.send_frame("ACK", {"id": "9999999@1", "transaction": "t"})
    reader.error()


def be_refused_at_the_commit(reader: RawClient) -> None:
    gap = numbered("gapless", 5) | {"truenext-gapless": "true"}
    reader.send_frame("COMMIT", {"transaction": "t"} | gap)
    assert reader.error().headers["truenext-code"] == "gap"


def miss_heart_beats(reader: RawClient) -> None:
    reader.await_silent_end()


LOSSES = [crash, hang_up, be_refused, be_refused_in_the_transaction, be_refused_at_the_commit, miss_heart_beats]


def acknowledging(
    broker: BrokerProcess,
    queue: str,
    count: int,
    begin: dict[str, str],
    *,
    login: dict[str, str] | None = None,
    heart_beat: str = "0,0",
) -> RawClient:
    """Return a client that has acknowledged `count` messages in a transaction."""
    reader = broker.connect(headers=login, heart_beat=heart_beat)
    reader.subscribe(queue, prefetch=count)
    messages = reader.messages(count)
    reader.begin("t", headers=begin)
    for message in messages:
        reader.ack(message, transaction="t")
    reader.arrived()
    return reader


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
def test_lost_connection_counts_no_attempt_of_acknowledged_messages(
    broker: BrokerProcess, queue: str, lose: Callable[[RawClient], None]
) -> None:
    # C10.3
    fill(broker, queue, 4)
    lose(acknowledging(broker, queue, 4, COUNTS_NACKS, heart_beat="1000,0" if lose is miss_heart_beats else "0,0"))
    broker.await_facts(queue, waiting=4, unacknowledged=0)
    assert attempts(broker.remaining_messages(queue)) == [0, 0, 0, 0]


@pytest.mark.parametrize(("begin", "dead"), [(COUNTS_NACKS, 0), ({"truenext-count-attempts": "all"}, 20), ({}, 20)])
def test_seven_kills_dead_letter_only_messages_that_count(
    broker: BrokerProcess, queue: str, begin: dict[str, str], dead: int
) -> None:
    fill(broker, queue, 20)
    for _ in range(ATTEMPTS_MAX):
        acknowledging(broker, queue, 20, begin).crash()
        broker.await_facts(queue, unacknowledged=0)
    remaining = broker.remaining_messages(queue)
    assert bodies(remaining) == [str(number) for number in range(20 - dead)] and not any(attempts(remaining))
    assert len(broker.remaining_messages(f"DLQ.{queue}")) == dead


def test_lost_connection_counts_the_first_message_beside_such_a_transaction(broker: BrokerProcess, queue: str) -> None:
    # C10.4
    fill(broker, queue, 5)
    reader = acknowledging(broker, queue, 2, COUNTS_NACKS)
    broker.await_facts(queue, waiting=1)  # the window lets two more come, perhaps read from the store
    reader.crash()
    broker.await_facts(queue, waiting=5, unacknowledged=0)
    assert attempts(broker.remaining_messages(queue)) == [0, 0, 1, 0, 0]


def test_lost_connection_counts_no_attempt_beside_it_if_no_message_is_started(
    broker: BrokerProcess, queue: str
) -> None:
    fill(broker, queue, 5)
    reader = acknowledging(broker, queue, 2, COUNTS_NACKS, login=TRUENEXT_CLIENT)
    broker.await_facts(queue, waiting=1)
    reader.crash()
    broker.await_facts(queue, waiting=5, unacknowledged=0)
    assert attempts(broker.remaining_messages(queue)) == [0, 0, 0, 0, 0]


def test_lost_connection_counts_no_attempt_of_messages_started_and_then_acknowledged(
    broker: BrokerProcess, queue: str
) -> None:
    fill(broker, queue, 3)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue)
    messages = reader.only(3)
    reader.begin("t", headers=COUNTS_NACKS)
    for message in messages:
        reader.started(message)
    for message in messages[:2]:
        reader.ack(message, transaction="t")
    reader.arrived()
    reader.crash()
    broker.await_facts(queue, waiting=3, unacknowledged=0)
    assert attempts(broker.remaining_messages(queue)) == [0, 0, 1]


def abort(reader: RawClient) -> None:
    reader.send_frame("ABORT", {"transaction": "t", "truenext-count-attempts": "all"})
    reader.disconnect()


def repeat_commit(reader: RawClient) -> None:
    reader.begin("first")
    reader.commit("first", headers=numbered("repeats", 1))
    reader.commit("t", headers=numbered("repeats", 1) | {"truenext-count-attempts": "all"})
    reader.disconnect()


def release(reader: RawClient) -> None:
    reader.release("1", abort="t", count_attempts="all")
    reader.disconnect()


@pytest.mark.parametrize("end", [abort, repeat_commit, release, crash, hang_up], ids=lambda end: end.__name__)
def test_messages_nacked_in_an_uncounted_transaction_count_however_it_ends(
    broker: BrokerProcess, queue: str, end: Callable[[RawClient], None]
) -> None:
    # C10.4
    fill(broker, queue, 3)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue, prefetch=3)
    messages = reader.only(3)
    reader.begin("t", headers=COUNTS_NACKS)
    for message in messages:
        reader.ack(message, transaction="t")
    reader.nack(messages[1], transaction="t")
    reader.arrived()
    end(reader)
    broker.await_facts(queue, waiting=3, unacknowledged=0)
    assert attempts(broker.remaining_messages(queue)) == [0, 1, 0]


def test_transaction_with_a_refused_frame_counts_no_attempt_of_acknowledged_messages(
    broker: BrokerProcess, queue: str
) -> None:
    # C10.3
    fill(broker, queue, 1)
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    reader.subscribe(queue, prefetch=1)
    message = reader.message()
    reader.begin("t", headers=COUNTS_NACKS)
    reader.ack(message, transaction="t")
    reader.begin("t", headers={"truenext-count-attempts": "all"})
    reader.commit("t", confirmed=False)
    assert [reader.next_error().headers["truenext-code"] for _ in range(2)] == ["in-use", "rollback-only"]
    reader.abort("t")
    assert attempts([reader.message()]) == [0]


@pytest.mark.parametrize(("begin", "waits"), [(COUNTS_NACKS, False), ({}, True)])
def test_messages_acknowledged_by_a_cut_connection_go_to_others_at_once_if_they_count_nothing(
    broker: BrokerProcess, queue: str, begin: dict[str, str], waits: bool
) -> None:
    fill(broker, queue, 1)
    reader = broker.connect(headers=numbered_connection(1))
    reader.subscribe(queue, prefetch=1)
    reader.begin("t", headers=begin)
    reader.ack(reader.message(), transaction="t")
    reader.arrived()
    other = broker.connect()
    other.subscribe(queue)
    reader.close()
    closed_at = time.monotonic()
    assert attempts([other.message()]) == [int(waits)]
    assert (time.monotonic() - closed_at > TAKEOVER_GRACE_S / 2) is waits


def test_invalid_value_is_refused_and_begins_nothing(broker: BrokerProcess) -> None:
    client = broker.connect(headers=TRUENEXT_CLIENT)
    client.begin("t", headers={"truenext-count-attempts": "some"})
    client.commit("t", confirmed=False)
    first, second = client.next_error(), client.next_error()
    assert first.headers["message"] == "truenext-count-attempts 'some' is not all or nacked"
    assert [first.headers["truenext-code"], second.headers["truenext-code"]] == ["header", "no-transaction"]
