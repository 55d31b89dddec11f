"""Tests that a subscription to a pattern gets the true next message of all its queues; over real sockets, with a real
store."""

import threading

import pytest
import stomp

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from tests.integration.test_topics import follow, publish

EVICTED = one_of(
    "options",
    [(), ("--queue-memory-limit", "10KiB", "--page-size", "1"), ("--queue-memory-limit", "10KiB", "--page-size", "50")],
    ids=["in memory", "pages of 1", "pages of 50"],
)


def fill(client: RawClient, queue: str, count: int) -> list[tuple[int, int, str]]:
    """Send messages of all priorities to three queues. Return the negative priority, number and address of each."""
    keys = []
    for number in range(count):
        address, priority = f"/queue/{queue}.{'abc'[number * 7 % 3]}", number * 3 % 10
        headers = {"priority": str(priority), "persistent": str(number % 4 > 0).lower()}
        if number == count - 1:
            publish(client, address, str(number), headers)
        else:
            client.send_frame("SEND", {"destination": address} | headers, str(number).encode())
        keys.append((-priority, number, address))
    return keys


@EVICTED
def test_a_pattern_takes_from_all_queues_that_match_in_one_order(broker: BrokerProcess, queue: str) -> None:
    # C7.1, C7.4
    sender, receiver = broker.connect(), broker.connect()
    keys = fill(sender, queue, 300)
    publish(sender, f"/queue/{queue}", "is not meant")
    publish(sender, f"/queue/{queue}.a.b", "is not meant either")
    follow(receiver, f"/queue/{queue}.*", headers={"activemq.prefetchSize": "1"})
    seen = []
    for _ in keys:
        message = receiver.message()
        seen.append((message.body.decode(), message.headers["destination"]))
        receiver.ack(message)
    assert seen == [(str(number), address) for _, number, address in sorted(keys)]
    assert receiver.arrived() == []


@EVICTED
def test_later_messages_overtake_those_of_another_queue_by_priority_alone(broker: BrokerProcess, queue: str) -> None:
    sender, receiver = broker.connect(), broker.connect()
    keys = fill(sender, queue, 100)
    follow(receiver, f"/queue/{queue}.>", headers={"activemq.prefetchSize": "1"})
    first = receiver.message()
    publish(sender, f"/queue/{queue}.made.later", "urgent", {"priority": "9", "persistent": "true"})
    publish(sender, f"/queue/{queue}.made.later", "low", {"priority": "0"})
    nines = [str(number) for priority, number, _ in keys if priority == -9]
    assert first.body.decode() == nines[0]
    receiver.ack(first)
    seen = []
    for _ in range(len(keys) + 1):
        message = receiver.message()
        seen.append(message.body.decode())
        receiver.ack(message)
    assert seen[: len(nines)] == [*nines[1:], "urgent"]
    assert seen[-1] == "low"


def test_a_pattern_has_one_window_and_releases_its_messages_to_their_queues(broker: BrokerProcess, queue: str) -> None:
    # C7.4, C7.7
    sender, receiver = broker.connect(), broker.connect()
    follow(receiver, f"/queue/{queue}.*", headers={"activemq.prefetchSize": "3"})
    for number in range(6):
        publish(sender, f"/queue/{queue}.{number % 2}", str(number), {"persistent": "true"})
    assert bodies(receiver.only(3)) == ["0", "1", "2"]
    facts = broker.queues()
    assert facts[f"{queue}.0"] == (1, 2, 1) and facts[f"{queue}.1"] == (2, 1, 1)
    receiver.unsubscribe()
    for name in "01":
        follow(receiver, f"/queue/{queue}.{name}", name=name)
    returned = sorted((each.headers["destination"], each.body.decode()) for each in receiver.only(6))
    assert returned == [(f"/queue/{queue}.{number % 2}", str(number)) for number in (0, 2, 4, 1, 3, 5)]


def test_a_cumulative_acknowledgement_covers_all_queues(broker: BrokerProcess, queue: str) -> None:
    # C7.7
    sender, receiver = broker.connect(), broker.connect()
    follow(receiver, f"/queue/{queue}.*", headers={"ack": "client"})
    for number in range(4):
        publish(sender, f"/queue/{queue}.{number}", str(number), {"persistent": "true"})
    messages = receiver.messages(4)
    receiver.ack(messages[2], confirmed=True)
    receiver.hang_up()
    other = broker.connect()
    follow(other, f"/queue/{queue}.*")
    assert bodies(other.only(1)) == ["3"]


def test_the_real_queue_is_named_whatever_a_message_was_sent_to(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    follow(client, f"/queue/{queue}.*")
    publish(client, f"/queue/{queue}.a,/queue/{queue}.b", "both")
    assert {each.headers["destination"] for each in client.only(2)} == {f"/queue/{queue}.{name}" for name in "ab"}


def test_dead_letter_queues_match_only_patterns_that_name_them(own_broker: BrokerProcess) -> None:
    # C7.3
    all_queues, dead = own_broker.connect(), own_broker.connect()
    follow(all_queues, "/queue/>")
    publish(all_queues, "/queue/orders", "bad")
    all_queues.nack(all_queues.message(), headers={"truenext-reject": "true"})
    follow(dead, "/queue/DLQ.>")
    assert bodies(dead.only(1)) == ["bad"]
    assert all_queues.arrived() == []


def test_queues_of_spark_match_only_patterns_that_name_them_after_a_restart_too(own_broker: BrokerProcess) -> None:
    queue = "Spark.source.s.1.0"
    client = own_broker.connect()
    for pattern in (">", "*.source.>", "*.*.*.*.*"):
        follow(client, f"/queue/{pattern}", name=pattern)
    publish(client, f"/queue/{queue}", "kept", {"persistent": "true"})
    own_broker.await_facts(queue, waiting=1)
    assert client.arrived() == []
    own_broker.kill()
    own_broker.start()
    all_queues, spark = own_broker.connect(), own_broker.connect()
    follow(all_queues, "/queue/>")
    own_broker.await_facts(queue, waiting=1)
    follow(spark, "/queue/Spark.>")
    assert bodies(spark.only(1)) == ["kept"]
    assert all_queues.arrived() == []


def test_a_pattern_matches_queues_of_an_earlier_run(own_broker: BrokerProcess) -> None:
    client = own_broker.connect()
    keys = fill(client, "q", 60)
    own_broker.kill()
    own_broker.start()
    client = own_broker.connect()
    follow(client, "/queue/q.*")
    kept = [str(number) for _, number, _ in sorted(keys) if number % 4 > 0]
    assert bodies(client.only(len(kept))) == kept


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"browser": "true"}, "one queue is browsed at a time"),
        ({"truenext-express": "true"}, "subscribe to a queue by its name"),
        ({"activemq.subscriptionName": "n"}, "durable subscriptions are to topics"),
    ],
)
def test_options_that_a_pattern_of_queues_cannot_have_are_refused(
    broker: BrokerProcess, headers: dict[str, str], reason: str
) -> None:
    # C7.9
    client = broker.connect(sends_connect=False)
    client.send_connect("1.2", "0,0", client_id="me")
    client.send_frame("SUBSCRIBE", {"id": "1", "destination": "/queue/a.*", "ack": "client-individual"} | headers)
    assert reason in client.error().headers["message"]


def test_a_send_to_a_pattern_is_refused(broker: BrokerProcess) -> None:
    client = broker.connect()
    client.send_frame("SEND", {"destination": "/queue/a.*"})
    assert "is for SUBSCRIBE only" in client.error().headers["message"]


def test_stomp_py_takes_from_all_queues_of_a_pattern(broker: BrokerProcess, queue: str) -> None:
    seen: list[tuple[str, str]] = []
    is_stored, is_done = threading.Event(), threading.Event()

    class Listener(stomp.ConnectionListener):
        def on_receipt(self, frame: stomp.utils.Frame) -> None:
            is_stored.set()

        def on_message(self, frame: stomp.utils.Frame) -> None:
            seen.append((frame.headers["destination"], frame.body))
            connection.ack(frame.headers["ack"])
            if len(seen) == 20:
                is_done.set()

    connection = stomp.Connection12([("127.0.0.1", broker.port)])
    connection.set_listener("", Listener())
    connection.connect(wait=True)
    for number in range(20):
        more = {"receipt": "all"} if number == 19 else {}
        headers = {"priority": str(number % 2), "persistent": "true"} | more
        connection.send(f"/queue/{queue}.{number % 3}", str(number), headers=headers)
    assert is_stored.wait(20)
    connection.subscribe(f"/queue/{queue}.*", id="1", ack="client-individual")
    assert is_done.wait(20)
    connection.disconnect()
    keys = sorted((-(number % 2), number) for number in range(20))
    assert seen == [(f"/queue/{queue}.{number % 3}", str(number)) for _, number in keys]
