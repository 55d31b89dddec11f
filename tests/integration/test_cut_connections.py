"""Tests of cut connections: a client that comes back at once counts no attempt, and no other client waits for nothing.

Source of what is expected: docs/contract.md, C22.5 to C22.8.
"""

import time

import pytest

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from tests.integration.test_takeover import is_taken_over, numbered, secret_of
from truenext.server.ending import TAKEOVER_GRACE_S

pytestmark = LIMITS

FAULTS = pytest.mark.parametrize("is_reset", [False, True], ids=["end of file", "reset"])


def cut(client: RawClient, *, is_reset: bool = False) -> None:
    if is_reset:
        client.reset()
    else:
        client.close()


def client_with_one_started(broker: BrokerProcess, queue: str, number: int = 1) -> RawClient:
    """Return a client that has started one message, and holds another that it has not started."""
    client = broker.connect(headers=numbered(number))
    client.subscribe(queue, prefetch=2)
    for body in (b"begun", b"buffered"):
        client.send(queue, body, persistent=True)
    started, _ = client.messages(2)
    client.send_frame("SEND", {"destination": "/control/started", "id": started.headers["ack"]}, confirmed=True)
    return client


@FAULTS
def test_a_client_that_comes_back_at_once_counts_no_attempt(broker: BrokerProcess, queue: str, is_reset: bool) -> None:
    # C22.5
    client = client_with_one_started(broker, queue)
    for number in range(2, 12):
        cut(client, is_reset=is_reset)
        broker.await_facts(queue, consumers=1, unacknowledged=1)
        client = broker.connect(headers=numbered(number, secret_of(client)))
        assert is_taken_over(client) == "true"
        client.subscribe(queue, prefetch=2)
        started, _ = client.messages(2)
        assert started.headers["truenext-attempts"] == "0" and "truenext-lost" not in started.headers
        client.send_frame("SEND", {"destination": "/control/started", "id": started.headers["ack"]}, confirmed=True)
    client.disconnect()


def test_a_client_that_does_not_come_back_counts_an_attempt_of_its_started_message(
    broker: BrokerProcess, queue: str
) -> None:
    # C22.5
    client = client_with_one_started(broker, queue)
    secret = secret_of(client)
    cut(client)
    broker.await_facts(queue, consumers=0, unacknowledged=0)
    late = broker.connect(headers=numbered(2, secret))
    assert is_taken_over(late) == "false"
    remaining = broker.remaining_messages(queue)
    assert [(each.body, each.headers["truenext-attempts"]) for each in remaining] == [
        (b"begun", "1"),
        (b"buffered", "0"),
    ]


def test_messages_that_a_cut_client_had_not_started_go_to_others_at_once(broker: BrokerProcess, queue: str) -> None:
    # C22.5, C22.6
    client = client_with_one_started(broker, queue)
    other = broker.connect()
    other.subscribe(queue, prefetch=2)
    cut(client)
    started_at = time.monotonic()
    assert other.message().body == b"buffered"
    assert time.monotonic() - started_at < TAKEOVER_GRACE_S / 2
    assert other.message().body == b"begun"
    assert time.monotonic() - started_at > TAKEOVER_GRACE_S / 2


@pytest.mark.parametrize("headers", [{}, numbered(1)], ids=["no secret", "nothing begun"])
def test_messages_of_a_cut_client_without_a_secret_or_a_started_message_go_to_others_at_once(
    broker: BrokerProcess, queue: str, headers: dict[str, str]
) -> None:
    # C22.6
    client = broker.connect(headers=headers)
    client.subscribe(queue, prefetch=1, headers={"activemq.exclusive": "true"})
    client.send(queue, b"0")
    client.message()
    other = broker.connect()
    other.subscribe(queue)
    cut(client)
    started_at = time.monotonic()
    assert other.message().body == b"0"
    assert time.monotonic() - started_at < TAKEOVER_GRACE_S / 2


def test_transactions_of_a_cut_client_count_no_attempt_and_their_sends_never_happen(
    broker: BrokerProcess, queue: str
) -> None:
    # C22.7
    client = broker.connect(headers=numbered(1))
    client.subscribe(queue)
    client.send(queue, b"0", persistent=True)
    client.begin("t")
    client.ack(client.message(), transaction="t")
    client.send(queue, b"never", transaction="t")
    client.arrived()
    cut(client)
    client = broker.connect(headers=numbered(2, secret_of(client)))
    assert is_taken_over(client) == "true"
    (remaining,) = broker.remaining_messages(queue)
    assert (remaining.body, remaining.headers["truenext-attempts"]) == (b"0", "0")


def test_a_group_stays_with_a_cut_client_until_it_is_known_whether_it_comes_back(
    broker: BrokerProcess, queue: str
) -> None:
    # C22.7
    client = broker.connect(headers=numbered(1))
    client.subscribe(queue, prefetch=1)
    for body in (b"0", b"1"):
        client.send(queue, body, headers={"JMSXGroupID": "g"})
    started = client.message()
    client.send_frame("SEND", {"destination": "/control/started", "id": started.headers["ack"]}, confirmed=True)
    other = broker.connect()
    other.subscribe(queue, prefetch=2)
    cut(client)
    assert bodies(other.messages(2)) == ["0", "1"]


def test_a_durable_subscription_of_a_cut_client_is_free_for_a_new_connection(broker: BrokerProcess, queue: str) -> None:
    # C22.8
    fields = {"id": "d", "destination": f"/topic/{queue}", "durable": "true", "ack": "client-individual"}

    def connect(headers: dict[str, str]) -> RawClient:
        client = broker.connect(sends_connect=False)
        client.send_connect("1.2", "0,0", client_id=queue, headers=headers)
        client.send_frame("SUBSCRIBE", fields, confirmed=True)
        return client

    client = connect(numbered(1))
    client.send_frame("SEND", {"destination": f"/topic/{queue}"}, b"0", confirmed=True)
    started = client.message()
    client.send_frame("SEND", {"destination": "/control/started", "id": started.headers["ack"]}, confirmed=True)
    cut(client)
    other = connect({})
    assert other.message().headers["truenext-attempts"] == "1"
    # Who had it comes back a moment later, and there is nothing to be taken over.
    assert is_taken_over(broker.connect(headers=numbered(2, secret_of(client)))) == "false"


def test_a_topic_subscription_of_a_cut_client_ends_at_once(broker: BrokerProcess, queue: str) -> None:
    # C22.6
    client = broker.connect(headers=numbered(1))
    client.send_frame("SUBSCRIBE", {"id": "t", "destination": f"/topic/{queue}", "ack": "client"}, confirmed=True)
    client.send_frame("SEND", {"destination": f"/topic/{queue}"}, b"0", confirmed=True)
    client.message()
    cut(client)
    broker.connect().arrived()
    assert is_taken_over(broker.connect(headers=numbered(2, secret_of(client)))) == "false"


def test_a_clean_stop_does_not_wait_and_counts_no_attempt(own_broker: BrokerProcess, queue: str) -> None:
    # C22.8
    client = client_with_one_started(own_broker, queue)
    cut(client)
    own_broker.await_facts(queue, unacknowledged=1)
    own_broker.restart(is_clean=True)
    assert [each.headers["truenext-attempts"] for each in own_broker.remaining_messages(queue)] == ["0", "0"]
