"""Tests of windows: consumers make progress without a prefetch of their own, and urgent messages do not wait for full
windows."""

import time

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from truenext.wire.stomp.frame import Frame

pytestmark = LIMITS


def fill(broker: BrokerProcess, queue: str, count: int, *, priority: int = 4) -> RawClient:
    sender = broker.connect()
    for number in range(count):
        sender.send(queue, b"%d" % number, priority=priority)
    sender.send(queue, b"last", priority=priority, confirmed=True)
    return sender


def test_a_consumer_that_acknowledges_every_500_cumulatively_gets_500_each_time(
    broker: BrokerProcess, queue: str
) -> None:
    # C4.9
    fill(broker, queue, 1499)
    receiver = broker.connect()
    receiver.subscribe(queue, ack="client", prefetch=None)
    for _ in range(3):
        receiver.ack(receiver.messages(500)[-1])
    assert receiver.arrived() == []


def test_a_consumer_that_commits_every_100_gets_100_each_time(broker: BrokerProcess, queue: str) -> None:
    fill(broker, queue, 499)
    receiver = broker.connect()
    receiver.subscribe(queue, prefetch=None)
    for number in range(5):
        transaction = f"t{number}"
        receiver.begin(transaction)
        for _ in range(100):
            receiver.ack(receiver.message(), transaction=transaction)
        receiver.commit(transaction)
    assert receiver.arrived() == []


def test_a_consumer_that_acknowledges_only_after_200_gets_200(broker: BrokerProcess, queue: str) -> None:
    # C4.10
    fill(broker, queue, 399)
    receiver = broker.connect()
    receiver.subscribe(queue, prefetch=None)
    for _ in range(2):
        for message in receiver.messages(200):
            receiver.ack(message)
    assert receiver.arrived() == []


def test_an_urgent_message_goes_to_a_working_consumer_and_not_to_a_stalled_one(
    broker: BrokerProcess, queue: str
) -> None:
    sender = fill(broker, queue, 2999)
    stalled, *others = [broker.connect() for _ in range(3)]
    for receiver in (stalled, *others):
        receiver.subscribe(queue, prefetch=None)
    held = stalled.messages(10)
    # The others go on all the time: who waits long for an acknowledgement gets a larger window.
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        for receiver in others:
            _acknowledged(receiver, 10)
        time.sleep(0.05)
    # Stretched by now, and nothing that is urgent may go there.
    sender.send(queue, b"urgent", priority=9, confirmed=True)
    # What their windows hold comes before it.
    got: list[str] = []
    while "urgent" not in got and len(got) < 1000:
        for receiver in others:
            got += bodies(_acknowledged(receiver, 10))
    assert "urgent" in got
    assert "urgent" not in bodies(stalled.arrived())
    assert len(held) == 10


def _acknowledged(receiver: RawClient, count: int) -> list[Frame]:
    messages = []
    for _ in range(count):
        messages.append(receiver.message())
        receiver.ack(messages[-1])
    return messages


def test_an_express_consumer_with_1000_of_priority_4_in_its_window_gets_the_9_next(
    broker: BrokerProcess, queue: str
) -> None:
    # C4.13
    sender = fill(broker, queue, 1999)
    receiver = broker.connect()
    receiver.subscribe(queue, prefetch=1000, headers={"truenext-express": "true"})
    receiver.messages(1000)
    assert receiver.arrived() == []
    for number in range(12):
        sender.send(queue, b"urgent %d" % number, priority=9, confirmed=True)
    urgent = receiver.arrived()
    assert bodies(urgent) == [f"urgent {number}" for number in range(10)]
    receiver.ack(urgent[0], confirmed=True)
    assert bodies(receiver.arrived()) == ["urgent 10"]


def test_without_express_a_full_window_stays_as_it_is(broker: BrokerProcess, queue: str) -> None:
    # C4.13
    sender = fill(broker, queue, 19)
    receiver = broker.connect()
    receiver.subscribe(queue, prefetch=10)
    receiver.messages(10)
    sender.send(queue, b"urgent", priority=9, confirmed=True)
    assert receiver.arrived() == []


def test_an_exclusive_consumer_gets_all_messages_until_the_next_one_takes_over(
    broker: BrokerProcess, queue: str
) -> None:
    # C4.12
    plain, first, second = [broker.connect() for _ in range(3)]
    plain.subscribe(queue)
    for receiver in (first, second):
        receiver.subscribe(queue, headers={"activemq.exclusive": "true"})
    fill(broker, queue, 9)
    assert len(first.only(10)) == 10
    assert [*plain.arrived(), *second.arrived()] == []
    first.disconnect()
    assert len(second.only(10)) == 10
    assert plain.arrived() == []
    second.disconnect()
    assert len(plain.only(10)) == 10


def test_the_consumer_of_the_highest_priority_gets_what_it_has_credit_for(broker: BrokerProcess, queue: str) -> None:
    # C4.11
    low, high = broker.connect(), broker.connect()
    low.subscribe(queue, headers={"activemq.priority": "-1"})
    high.subscribe(queue, prefetch=5, headers={"activemq.priority": "5"})
    fill(broker, queue, 9)
    assert bodies(high.only(5)) == ["0", "1", "2", "3", "4"]
    assert bodies(low.only(5)) == ["5", "6", "7", "8", "last"]
