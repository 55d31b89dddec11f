"""Tests that a message comes as redelivered only if a program may have received it before, over real sockets.

Source of what is expected: docs/contract.md, C10.1 and C10.14.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies
from tests.integration.test_takeover import numbered, secret_of
from truenext import blocking
from truenext.wire.stomp.frame import Frame

pytestmark = LIMITS
PATIENCE_S = 60.0
UNSEEN = [False, True, False, False]
"""Of messages 0 to 3 only number 1 was started."""

Held = list[Frame]


def fill(broker: BrokerProcess, queue: str) -> None:
    sender = broker.connect()
    for number in range(4):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0)
    sender.arrived()
    sender.disconnect()


def are_flagged(messages: list[Frame]) -> list[bool]:
    """Return whether messages 0 to 3, which all were dispatched once before, come as redelivered."""
    messages = sorted(messages, key=lambda message: message.body)
    assert bodies(messages) == ["0", "1", "2", "3"]
    assert {message.headers["truenext-deliveries"] for message in messages} == {"2"}
    return ["redelivered" in message.headers for message in messages]


def holder(broker: BrokerProcess, queue: str, *, is_truenext: bool = True, ack: str = "client-individual") -> RawClient:
    fill(broker, queue)
    client = broker.connect(headers=TRUENEXT_CLIENT if is_truenext else None)
    client.subscribe(queue, ack=ack, prefetch=4)
    return client


def all_again(broker: BrokerProcess, queue: str) -> Held:
    broker.await_facts(queue, consumers=0)
    other = broker.connect()
    other.subscribe(queue)
    return other.only(4)


def nack_each(client: RawClient, held: Held) -> None:
    for message in held:
        client.nack(message)


ENDS_BY_FRAMES: dict[str, Callable[[RawClient, Held], None]] = {
    "NACKs": nack_each,
    "a cumulative NACK": lambda client, held: client.nack(held[-1]),
    "a release": lambda client, held: client.release("1", suspend=True, confirmed=True),
    "UNSUBSCRIBE": lambda client, held: client.unsubscribe(),
    "DISCONNECT": lambda client, held: client.disconnect(),
}


@pytest.mark.parametrize("how", ENDS_BY_FRAMES)
def test_message_that_was_never_started_is_not_redelivered_after_a_frame(
    broker: BrokerProcess, queue: str, how: str
) -> None:
    # C10.14
    client = holder(broker, queue, ack="client" if how == "a cumulative NACK" else "client-individual")
    held = client.only(4)
    client.started(held[1])
    ENDS_BY_FRAMES[how](client, held)
    if "NACK" in how:
        again = client.only(4)
        assert {message.headers["truenext-attempts"] for message in again} == {"1"}
        assert are_flagged(again) == UNSEEN
        return
    if how == "a release":
        # Message 1 was started in an earlier dispatch, and its flag stays.
        client.wake()
        assert are_flagged(client.only(4)) == UNSEEN
        client.unsubscribe()
        other = broker.connect()
        other.subscribe(queue)
        assert ["redelivered" in message.headers for message in other.only(4)] == UNSEEN
        return
    assert are_flagged(all_again(broker, queue)) == UNSEEN


@pytest.mark.parametrize("how", [how for how in ENDS_BY_FRAMES if how != "a release"])
def test_messages_of_a_plain_client_are_redelivered_after_any_frame(
    broker: BrokerProcess, queue: str, how: str
) -> None:
    client = holder(
        broker, queue, is_truenext=False, ack="client" if how == "a cumulative NACK" else "client-individual"
    )
    held = client.only(4)
    ENDS_BY_FRAMES[how](client, held)
    again = client.only(4) if "NACK" in how else all_again(broker, queue)
    assert are_flagged(again) == [True] * 4


def take_over(broker: BrokerProcess, client: RawClient) -> None:
    broker.connect(headers=numbered(2, secret_of(client)))


def close(broker: BrokerProcess, client: RawClient) -> None:
    client.close()


def send_no_frame(broker: BrokerProcess, client: RawClient) -> None:
    client.write(b"SEND\nno header\n\n\0")
    client.error()


@pytest.mark.parametrize("end", [take_over, close, send_no_frame])
def test_messages_that_were_not_started_are_redelivered_after_an_end_without_disconnect(
    broker: BrokerProcess, queue: str, end: Callable[[BrokerProcess, RawClient], None]
) -> None:
    # C10.14, C22.2, C22.6
    client = holder(broker, queue)
    held = client.only(4)
    client.started(held[1])
    client.arrived()
    end(broker, client)
    assert are_flagged(all_again(broker, queue)) == [True] * 4


@pytest.mark.parametrize("how", ["ABORT", "release"])
def test_messages_of_a_transaction_that_ends_are_redelivered(broker: BrokerProcess, queue: str, how: str) -> None:
    # C10.14
    client = holder(broker, queue)
    held = client.only(4)
    client.begin("t")
    client.ack(held[1], transaction="t")
    if how == "ABORT":
        client.abort("t")
        client.release("1", suspend=True)
        client.arrived()
        client.disconnect()
        again = all_again(broker, queue)
        assert ["redelivered" in message.headers for message in again] == UNSEEN
    else:
        client.release("1", abort="t", count_attempts="nacked")
        assert are_flagged(client.only(4)) == UNSEEN


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_all_messages_that_were_dispatched_are_redelivered_after_an_end_of_the_broker(
    own_broker: BrokerProcess, queue: str, ends: str
) -> None:
    # C10.14
    sender = own_broker.connect()
    for number in range(2):
        sender.send(queue, b"%d" % number, persistent=True)
    sender.arrived()
    client = own_broker.connect(headers=TRUENEXT_CLIENT)
    client.subscribe(queue, prefetch=1)
    client.only(1)
    client.unsubscribe()
    getattr(own_broker, ends)()
    own_broker.start()
    client = own_broker.connect()
    client.subscribe(queue)
    again = client.only(2)
    assert ["redelivered" in message.headers for message in again] == [True, ends == "kill"]


@pytest.mark.parametrize("prefetch", [1, 2, 10, None])
def test_messages_buffered_when_another_one_is_nacked_are_not_redelivered(
    broker: BrokerProcess, queue: str, prefetch: int | None
) -> None:
    """Regression: they came as redelivered with no attempt, and no program had received them."""
    with blocking.connect(broker.url) as connection:
        connection.send_many(f"/queue/{queue}", [str(number) for number in range(50)])
        with connection.consumer(f"/queue/{queue}", ack="individual", prefetch=prefetch) as consumer:
            first = consumer.receive(PATIENCE_S)
            assert first is not None and not first.redelivered
            if prefetch is None:
                # The rest of the window is in the client's buffer.
                broker.await_facts(queue, unacknowledged=50)
            first.nack()
            for number in range(25):
                message = consumer.receive(PATIENCE_S)
                assert message is not None and message.text == str(number)
                assert (message.redelivered, message.attempts) == ((True, 1) if number == 0 else (False, 0))
                message.ack()
        # What the client had in its buffer when it unsubscribed, another consumer gets.
        with connection.consumer(f"/queue/{queue}") as consumer:
            for number in range(25, 50):
                message = consumer.receive(PATIENCE_S)
                assert message is not None and (message.text, message.redelivered) == (str(number), False)


def browse(broker: BrokerProcess, queue: str) -> Held:
    browser = broker.connect()
    browser.send_frame("SUBSCRIBE", {"id": "b", "destination": f"/queue/{queue}", "browser": "true"})
    shown: Held = []
    while "browser" not in (message := browser.message()).headers:
        shown.append(message)
    browser.disconnect()
    return shown


def test_message_that_has_left_memory_keeps_its_flag(tmp_path: Path, options: Sequence[str], queue: str) -> None:
    """C10.14, also of what a browser is shown. Bodies of held and of requeued messages leave memory."""
    broker = BrokerProcess(tmp_path, options, policy={"memory_limit": "20KB"})
    try:
        broker.start()
        client = broker.connect(headers=TRUENEXT_CLIENT)
        client.subscribe(queue, prefetch=6)
        for number in range(12):
            client.send(queue, b"%d" % number + bytes(10_000), persistent=number % 2 == 0, confirmed=True)
        held = client.only(6)
        client.started(held[1])
        client.release("1", suspend=True, confirmed=True)
        for deliveries in ("2", "3"):
            deadline = time.monotonic() + PATIENCE_S
            while broker.status()["in_memory"] > 2:
                assert time.monotonic() < deadline, broker.status()
                client.arrived()
            shown = browse(broker, queue)
            assert ["redelivered" in message.headers for message in shown] == [number == 1 for number in range(12)]
            client.wake()
            again = client.messages(6)
            assert [message.headers["truenext-deliveries"] for message in again] == [deliveries] * 6
            assert ["redelivered" in message.headers for message in again] == [number == 1 for number in range(6)]
            client.release("1", suspend=True, confirmed=True)
    finally:
        broker.clean_up()
