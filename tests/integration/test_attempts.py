"""Tests that attempts are durable when docs/contract.md says so (C10.5 to C10.7), with a real broker and
kill -9."""

from collections.abc import Callable

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, numbered
from truenext.model.limits import DEAD_LETTERS_PER_TURN
from truenext.wire.stomp.frame import Frame

Fail = Callable[[RawClient, Frame, dict[str, str]], None]


def nack(client: RawClient, message: Frame, headers: dict[str, str]) -> None:
    client.nack(message, headers=headers)


def commit_of_a_nack(client: RawClient, message: Frame, headers: dict[str, str]) -> None:
    client.begin("t")
    client.nack(message, transaction="t")
    client.commit("t", confirmed=False, headers=headers)


def abort(client: RawClient, message: Frame, headers: dict[str, str]) -> None:
    client.begin("t")
    client.ack(message, transaction="t")
    client.send_frame("ABORT", {"transaction": "t"} | headers)


def repeated_commit(client: RawClient, message: Frame, headers: dict[str, str]) -> None:
    client.begin("t")
    client.ack(message, transaction="t")
    client.commit("t", confirmed=False, headers=numbered("p", 1) | headers)


def release_with_a_transaction(client: RawClient, message: Frame, headers: dict[str, str]) -> None:
    client.begin("t")
    client.ack(message, transaction="t")
    client.release("1", abort="t", confirmed=False)
    client.send_frame("SEND", {"destination": "/control/wake", "id": "1"} | headers)


def holding(broker: BrokerProcess, queue: str) -> tuple[RawClient, Frame]:
    """Return a client that holds the only message of a queue, a persistent one, and hold the broker's disk."""
    client = broker.connect(headers=TRUENEXT_CLIENT)
    client.begin("first")
    client.commit("first", headers=numbered("p", 1))
    client.send(queue, b"", persistent=True, confirmed=True)
    client.subscribe(queue, prefetch=1)
    message = client.message()
    broker.hold_disk()
    return client, message


def attempts_after_kill(broker: BrokerProcess, queue: str) -> str:
    broker.kill()
    broker.close_clients()
    broker.start()
    client = broker.connect()
    client.subscribe(queue, prefetch=1)
    return client.message().headers["truenext-attempts"]


@pytest.mark.parametrize(
    "fail", [nack, commit_of_a_nack, abort, repeated_commit, release_with_a_transaction], ids=lambda one: one.__name__
)
def test_attempt_survives_a_kill_after_the_receipt_of_the_frame_that_counted_it(
    held_broker: BrokerProcess, queue: str, fail: Fail
) -> None:
    # C10.6, C10.7
    client, message = holding(held_broker, queue)
    receipt = client.new_receipt()
    fail(client, message, {"receipt": receipt})
    # The dispatch does not wait for the disk, and the receipt does: `next_frame` sees the MESSAGE alone.
    again = client.next_frame()
    assert (again.command, again.headers["truenext-attempts"]) == ("MESSAGE", "1")
    held_broker.resume_disk()
    client.await_receipt(receipt)
    assert attempts_after_kill(held_broker, queue) == "1"


def test_attempt_of_a_lost_connection_survives_a_kill_after_a_later_receipt(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C10.6
    client, message = holding(held_broker, queue)
    client.started(message)
    client.arrived()
    other = held_broker.connect()
    other.subscribe(queue, prefetch=1)
    client.crash()
    assert other.message().headers["truenext-attempts"] == "1"
    held_broker.resume_disk()
    other.send("another", b"", persistent=True, confirmed=True)
    assert attempts_after_kill(held_broker, queue) == "1"


def test_attempt_that_is_not_written_yet_is_forgotten_by_a_kill_although_its_message_came_again(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C10.7
    client, message = holding(held_broker, queue)
    abort(client, message, {})
    assert client.message().headers["truenext-attempts"] == "1"
    held_broker.kill()
    held_broker.resume_disk()
    held_broker.close_clients()
    held_broker.start()
    client = held_broker.connect()
    client.subscribe(queue, prefetch=1)
    assert client.message().headers["truenext-attempts"] == "0"


@pytest.mark.parametrize("is_clean", [True, False], ids=["stop", "kill"])
def test_messages_given_up_together_become_dead_letters_over_a_restart(
    own_broker: BrokerProcess, queue: str, is_clean: bool
) -> None:
    # C10.5
    count = 3 * DEAD_LETTERS_PER_TURN
    client = own_broker.connect()
    for number in range(count):
        client.send(queue, b"%d" % number, persistent=True)
    client.subscribe(queue, ack="client", prefetch=count)
    *_, last = client.messages(count)
    receipt = client.new_receipt()
    client.nack(last, headers={"truenext-reject": "true", "receipt": receipt})
    client.await_receipt(receipt)
    if is_clean:
        own_broker.stop()
    else:
        own_broker.kill()
    own_broker.close_clients()
    own_broker.start()
    client = own_broker.connect()
    client.subscribe(queue, prefetch=1)
    own_broker.await_facts(f"DLQ.{queue}", waiting=count)
    client = own_broker.connect()
    client.subscribe(f"DLQ.{queue}", prefetch=count)
    assert {message.body for message in client.messages(count)} == {b"%d" % number for number in range(count)}
