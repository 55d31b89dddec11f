"""Tests that consumers get the messages of their selectors, in order, in memory and on disk; over real sockets, with a
real store."""

import time

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RawClient, bodies

EVICTED = one_of(
    "options",
    [(), ("--queue-memory-limit", "50KiB", "--page-size", "1"), ("--queue-memory-limit", "50KiB", "--page-size", "50")],
    ids=["in memory", "pages of 1", "pages of 50"],
)
HAYSTACK = 3_000
"""Number of messages that do not match. Pages of one message take a millisecond each, or ten on a busy machine."""


def fill(client: RawClient, queue: str, count: int, *, colour: str = "blue", persistent: bool = True) -> None:
    for number in range(count):
        is_last = number == count - 1
        headers = {"colour": colour}
        client.send(queue, b"%d" % number, persistent=persistent, headers=headers, confirmed=is_last)


def select(client: RawClient, queue: str, selector: str, *, name: str = "s", prefetch: int = 1000) -> None:
    client.subscribe(queue, subscription=name, prefetch=prefetch, headers={"selector": selector})


@EVICTED
def test_consumers_get_the_messages_of_their_selectors_in_order_and_no_others(
    broker: BrokerProcess, queue: str
) -> None:
    sender = broker.connect()
    expected: dict[str, list[tuple[int, int]]] = {"red": [], "blue": []}
    for number in range(900):
        colour, priority = ("red", "blue", "green")[number % 3], number % 4 + 3
        headers = {"colour": colour}
        sender.send(
            queue,
            b"%d" % number,
            persistent=number % 2 > 0,
            priority=priority,
            headers=headers,
            confirmed=number == 899,
        )
        if colour in expected:
            expected[colour].append((-priority, number))
    for colour, keys in expected.items():
        receiver = broker.connect()
        select(receiver, queue, f"colour = '{colour}'", prefetch=7)
        got = []
        for _ in keys:
            got.append(receiver.message())
            receiver.ack(got[-1])
        assert bodies(got) == [str(number) for _, number in sorted(keys)]
        assert receiver.arrived() == []
        receiver.disconnect()
    unselected = broker.connect()
    unselected.subscribe(queue, prefetch=7)
    for number in [number for _, number in sorted((-(number % 4), number) for number in range(2, 900, 3))]:
        message = unselected.message()
        assert bodies([message]) == [str(number)]
        unselected.ack(message)
    assert unselected.arrived() == []


@EVICTED
def test_a_match_is_found_behind_many_that_do_not_match_and_those_stay(broker: BrokerProcess, queue: str) -> None:
    sender, receiver = broker.connect(), broker.connect()
    fill(sender, queue, HAYSTACK)
    select(receiver, queue, "colour = 'red'")
    sender.send(queue, b"first", headers={"colour": "red"}, persistent=True, confirmed=True)
    assert receiver.message().body == b"first"
    # All that was there is compared by now.
    started_at = time.monotonic()
    sender.send(queue, b"second", headers={"colour": "red"}, confirmed=True)
    assert receiver.message().body == b"second"
    assert time.monotonic() - started_at < 5
    assert broker.queues()[queue].waiting == HAYSTACK


def test_consumer_that_selects_high_priorities_gets_them_at_once_and_no_low_ones(
    broker: BrokerProcess, queue: str
) -> None:
    sender, high, *others = [broker.connect() for _ in range(4)]
    select(high, queue, "JMSPriority > 6", prefetch=1)
    for other in others:
        other.subscribe(queue, prefetch=10)
    for number in range(50):
        sender.send(queue, b"low %d" % number, priority=2, confirmed=True)
    for number in range(5):
        sender.send(queue, b"high %d" % number, priority=9, confirmed=True)
    # The others' windows are full of lows.
    for number in range(5):
        message = high.message()
        assert message.body == b"high %d" % number
        high.ack(message, confirmed=True)
    assert high.arrived() == []
    for other in others:
        assert all(message.body.startswith(b"low") for message in other.only(10))


def test_messages_that_match_a_selector_are_found_again_after_a_restart(broker: BrokerProcess, queue: str) -> None:
    sender = broker.connect()
    fill(sender, queue, 500)
    fill(sender, queue, 3, colour="red")
    receiver = broker.connect()
    select(receiver, queue, "colour = 'red'", prefetch=1)
    assert receiver.message().body == b"0"
    broker.restart(is_clean=False)
    receiver = broker.connect()
    select(receiver, queue, "colour = 'red'")
    messages = receiver.messages(3)
    assert bodies(messages) == ["0", "1", "2"]
    for message in messages:
        receiver.ack(message, confirmed=True)
    receiver.disconnect()
    receiver = broker.connect()
    receiver.subscribe(queue)
    assert bodies(receiver.messages(500)) == [str(number) for number in range(500)]
    assert receiver.arrived() == []


def test_an_invalid_selector_is_refused_with_the_place_of_the_fault(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    client.send_frame("SUBSCRIBE", {"id": "b", "destination": f"/queue/{queue}", "selector": "a = = 1"})
    assert "syntax error at character 5" in client.error().headers["message"]
