"""Tests that each group has one consumer, in order, also when consumers are lost; over real sockets, with a real store.

Some tests use stomp.py, a foreign client; some have pages of one message.
"""

from collections import defaultdict

import stomp

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import bodies
from tests.integration.test_stomp_py import Client

GROUPS, OF_EACH = 10, 15

EVICTED = one_of(
    "options",
    [(), ("--queue-memory-limit", "20KiB", "--page-size", "1"), ("--queue-memory-limit", "20KiB", "--page-size", "50")],
    ids=["in memory", "pages of 1", "pages of 50"],
)


@EVICTED
def test_three_consumers_share_ten_groups_and_those_of_a_lost_one_go_on_in_order(
    broker: BrokerProcess, queue: str
) -> None:
    sender = Client(broker.port, "1.2")
    consumers = {name: Client(broker.port, "1.2") for name in ("one", "two", "three")}
    for consumer in consumers.values():
        consumer.subscribe(queue, prefetch=5)
    for number in range(GROUPS * OF_EACH):
        headers = {"JMSXGroupID": f"g{number % GROUPS}", "persistent": "true" if number % 3 else "false"}
        sender.send(queue, str(number), **headers)
    got: dict[str, list[int]] = defaultdict(list)
    owners: dict[str, str] = {}
    firsts: list[tuple[str, str]] = []

    def acknowledge(name: str, message: stomp.utils.Frame) -> None:
        group, number = message.headers["JMSXGroupID"], int(message.body)
        assert owners.setdefault(group, name) == name
        if message.headers.get("JMSXGroupFirstForConsumer") == "true":
            firsts.append((name, group))
        got[group].append(number)
        consumers[name].acknowledge(message)

    for name, consumer in consumers.items():
        for _ in range(15):
            acknowledge(name, consumer.message())
    assert sorted(firsts) == sorted((owner, group) for group, owner in owners.items())
    # What it had in hand is given back.
    lost = consumers.pop("two")
    lost.connection.transport.disconnect_socket()
    lost.await_end()
    groups_of_two = {group for group, owner in owners.items() if owner == "two"}
    assert groups_of_two and len(groups_of_two) < GROUPS
    owners = {group: owner for group, owner in owners.items() if owner != "two"}
    firsts.clear()
    while sum(map(len, got.values())) < GROUPS * OF_EACH:
        for name, consumer in consumers.items():
            while consumer.has_more():
                acknowledge(name, consumer.message())
    assert {group for _, group in firsts} >= groups_of_two
    assert got == {f"g{group}": list(range(group, GROUPS * OF_EACH, GROUPS)) for group in range(GROUPS)}
    for client in (sender, *consumers.values()):
        client.close()


def test_a_closed_group_goes_to_the_consumer_with_the_fewest(broker: BrokerProcess, queue: str) -> None:
    sender, one, two = broker.connect(), broker.connect(), broker.connect()
    one.subscribe(queue, prefetch=10)
    sender.send(queue, b"1", headers={"JMSXGroupID": "g"}, confirmed=True)
    two.subscribe(queue, prefetch=10)
    sender.send(queue, b"2", headers={"JMSXGroupID": "g"}, confirmed=True)
    sender.send(queue, b"3", headers={"JMSXGroupID": "g", "JMSXGroupSeq": "-1"}, confirmed=True)
    sender.send(queue, b"4", headers={"JMSXGroupID": "g"}, confirmed=True)
    assert bodies(one.only(3)) == ["1", "2", "3"]
    (fourth,) = two.only(1)
    assert (fourth.body, fourth.headers["JMSXGroupFirstForConsumer"]) == (b"4", "true")


@EVICTED
def test_after_a_crash_a_message_that_waits_for_its_next_try_still_holds_back_its_group(
    broker: BrokerProcess, queue: str
) -> None:
    sender, one = broker.connect(), broker.connect()
    for number in range(100):
        sender.send(queue, b"%d" % number, persistent=True, headers={"JMSXGroupID": f"g{number % 2}"}, confirmed=True)
    one.subscribe(queue, prefetch=1)
    one.nack(one.message(), headers={"truenext-delay": "5000"}, confirmed=True)
    assert one.message().body == b"1"
    broker.restart(is_clean=False)
    one = broker.connect()
    one.subscribe(queue, prefetch=100)
    got = bodies(one.messages(50))
    assert got == [str(number) for number in range(1, 100, 2)]
    assert bodies(one.messages(50)) == [str(number) for number in range(0, 100, 2)]


def test_a_group_goes_on_after_a_dead_letter(broker: BrokerProcess, queue: str) -> None:
    sender, one = broker.connect(), broker.connect()
    one.subscribe(queue, prefetch=1)
    for body in (b"1", b"2"):
        sender.send(queue, body, persistent=True, headers={"JMSXGroupID": "g"}, confirmed=True)
    one.nack(one.message(), headers={"truenext-reject": "true"}, confirmed=True)
    assert one.message().body == b"2"
