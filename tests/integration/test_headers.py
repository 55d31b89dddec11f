"""Tests that headers of other brokers' clients do what they mean; over real sockets, with a real store."""

from pathlib import Path

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RECEIVE_SECONDS, RawClient, bodies
from truenext import blocking
from truenext.broker.recovery import recover
from truenext.engine.engine import Engine
from truenext.model.commands import Send
from truenext.model.destination import Destination, DestinationKind
from truenext.model.limits import WINDOW_MAX
from truenext.model.message import SentMessage
from truenext.model.policy import Policies
from truenext.model.schedule import Schedule
from truenext.store.embedded import EmbeddedStore
from truenext.store.store import Store


def fill(broker: BrokerProcess, queue: str, *contents: str, headers: dict[str, str] | None = None) -> RawClient:
    sender = broker.connect()
    for body in contents:
        sender.send(queue, body.encode(), confirmed=True, headers=headers)
    return sender


def follow(client: RawClient, address: str, headers: dict[str, str] | None = None) -> None:
    fields = {"id": "1", "destination": address, "ack": "client-individual"} | (headers or {})
    client.send_frame("SUBSCRIBE", fields, confirmed=True)


def known(broker: BrokerProcess, client_id: str) -> RawClient:
    client = broker.connect(sends_connect=False)
    client.send_connect("1.2", "0,0", client_id=client_id)
    return client


@pytest.mark.parametrize(
    ("suffix", "headers"),
    [
        ("", {"prefetch-count": "2"}),
        ("?consumer.prefetchSize=2", {}),
        ("?consumer.prefetchSize=2", {"prefetch-count": "2", "activemq.prefetchSize": "2"}),
    ],
)
def test_a_window_by_any_name_is_exact(broker: BrokerProcess, queue: str, suffix: str, headers: dict[str, str]) -> None:
    # C4.9
    fill(broker, queue, *"abcd")
    client = broker.connect()
    follow(client, f"/queue/{queue}{suffix}", headers)
    first, _ = client.only(2)
    client.ack(first)
    assert bodies(client.only(1)) == ["c"]


def test_a_prefetch_count_of_0_leaves_the_window_to_the_broker(broker: BrokerProcess, queue: str) -> None:
    fill(broker, queue, *"abcdefghijklmnop")
    client = broker.connect()
    follow(client, f"/queue/{queue}", {"prefetch-count": "0"})
    # An automatic one begins with this.
    assert len(client.only(10)) == 10


@pytest.mark.parametrize("name", ["activemq.prefetchSize", "prefetch-count"])
def test_a_window_that_is_too_large_is_refused_and_says_the_limit(broker: BrokerProcess, queue: str, name: str) -> None:
    # C4.9
    client = broker.connect()
    client.send_frame("SUBSCRIBE", {"id": "1", "destination": f"/queue/{queue}", name: "40000"})
    assert f"{name} 40000 is more than {WINDOW_MAX} messages" in client.error().headers["message"]


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2"])
@pytest.mark.parametrize("command", ["ACK", "NACK"])
def test_an_acknowledgement_that_repeats_all_headers_of_its_message_is_taken(
    broker: BrokerProcess, queue: str, version: str, command: str
) -> None:
    if (version, command) == ("1.0", "NACK"):
        return
    slips = {"truenext-numer": "1", "truenext-deliveries": "7", "truenext-": "x"}
    dead = f"DLQ.{queue}"
    fill(broker, queue, "a", headers=slips)
    first = broker.connect()
    follow(first, f"/queue/{queue}")
    first.nack(first.message(), headers={"truenext-reject": "true"}, confirmed=True)
    client = broker.connect(version=version)
    follow(client, f"/queue/{dead}")
    message = client.message()
    assert {"truenext-numer", "truenext-original-attempts"} < message.headers.keys()
    fields = {name: value for name, value in message.headers.items() if name != "content-length"}
    client.send_frame(command, fields | {"id": message.headers.get("ack", "")}, confirmed=True)
    client.disconnect()
    broker.await_facts(dead, waiting=int(command == "NACK"), unacknowledged=0)


@pytest.mark.parametrize(
    ("command", "headers", "fault"),
    [
        (
            "ABORT",
            {"truenext-number": "1"},
            "unknown header 'truenext-number' of ABORT: this header is for SEND and COMMIT",
        ),
        (
            "COMMIT",
            {"truenext-numer": "1"},
            "truenext- headers of COMMIT are truenext-number, truenext-producer",
        ),
        (
            "SUBSCRIBE",
            {"truenext-expres": "true"},
            "unknown header 'truenext-expres' of SUBSCRIBE: truenext- headers of SUBSCRIBE are truenext-express",
        ),
        (
            "DISCONNECT",
            {"truenext-delay": "5"},
            "unknown header 'truenext-delay' of DISCONNECT: this header is for NACK",
        ),
    ],
)
def test_a_misspelt_truenext_header_is_refused_with_the_headers_that_exist(
    broker: BrokerProcess, queue: str, command: str, headers: dict[str, str], fault: str
) -> None:
    client = broker.connect()
    client.begin("t")
    client.send_frame(command, {"id": "1", "destination": f"/queue/{queue}", "transaction": "t"} | headers)
    assert fault in client.error().headers["message"]


def test_subscribe_options_set_selector_and_consumer_priority(broker: BrokerProcess, queue: str) -> None:
    ordinary, preferred = broker.connect(), broker.connect()
    follow(ordinary, f"/queue/{queue}")
    follow(preferred, f"/queue/{queue}?consumer.priority=5&consumer.selector=colour%20IN%20('red','green')")
    sender = fill(broker, queue, "1", headers={"colour": "red"})
    sender.send(queue, b"2", headers={"colour": "blue"}, confirmed=True)
    assert bodies(preferred.only(1)) == ["1"]
    assert bodies(ordinary.only(1)) == ["2"]


def test_an_exclusive_consumer_by_an_option_is_the_only_one(broker: BrokerProcess, queue: str) -> None:
    first, second = broker.connect(), broker.connect()
    follow(first, f"/queue/{queue}")
    follow(second, f"/queue/{queue}?consumer.exclusive=true")
    fill(broker, queue, *"abc")
    assert bodies(second.only(3)) == ["a", "b", "c"]
    assert first.arrived() == []


RX_STOMP = {"durable": "false", "auto-delete": "true", "exclusive": "true"}
"""Headers with which rx-stomp's tests subscribe to a queue of RabbitMQ."""


def test_an_exclusive_subscriber_of_rabbitmq_receives_alone_until_it_ends(broker: BrokerProcess, queue: str) -> None:
    # C4.12
    ordinary, first, second = broker.connect(), broker.connect(), broker.connect()
    follow(ordinary, f"/queue/{queue}")
    follow(first, f"/queue/{queue}", RX_STOMP)
    follow(second, f"/queue/{queue}", RX_STOMP)
    sender = fill(broker, queue, *"abc")
    for message in first.only(3):
        first.ack(message, confirmed=True)
    # The queue stays, with the next exclusive consumer.
    first.disconnect()
    broker.await_facts(queue, consumers=2)
    sender.send(queue, b"d", confirmed=True)
    assert bodies(second.only(1)) == ["d"]
    assert ordinary.arrived() == []


def test_exclusive_and_activemq_exclusive_that_disagree_are_refused(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    headers = {"id": "1", "destination": f"/queue/{queue}", "exclusive": "true", "activemq.exclusive": "false"}
    client.send_frame("SUBSCRIBE", headers)
    assert "activemq.exclusive 'false' and exclusive 'true' disagree; use one of them" in client.error().body.decode()


def test_subscribe_to_a_composite_destination_is_refused_with_the_alternative(broker: BrokerProcess) -> None:
    client = broker.connect()
    client.send_frame("SUBSCRIBE", {"id": "1", "destination": "/queue/a,/queue/b", "receipt": "r"})
    error = client.error()
    assert (error.headers["receipt-id"], error.headers["truenext-code"]) == ("r", "not-supported")
    assert "'/queue/a,/queue/b': composite destinations are for SEND" in error.headers["message"]
    assert "send a SUBSCRIBE for each part, each with its own id" in error.body.decode()


def test_options_make_no_queue(broker: BrokerProcess, queue: str) -> None:
    address = f"/queue/{queue}?consumer.prefetchSize=1"
    client = broker.connect()
    follow(client, address)
    sender = broker.connect()
    sender.send_frame("SEND", {"destination": address})
    error = sender.error().headers["message"]
    assert f"option 'consumer.prefetchSize' of '{address}': options are for SUBSCRIBE" in error
    assert not [name for name in broker.queues() if "?" in name]


def test_requeue_false_is_a_dead_letter_at_once_and_requeue_true_is_tried_again(
    broker: BrokerProcess, queue: str
) -> None:
    fill(broker, queue, "poison")
    client = broker.connect()
    follow(client, f"/queue/{queue}")
    client.nack(client.message(), headers={"requeue": "true"})
    again = client.message()
    assert again.headers["truenext-attempts"] == "1"
    client.nack(again, headers={"requeue": "false"}, confirmed=True)
    assert client.arrived() == []
    assert bodies(broker.remaining_messages(f"DLQ.{queue}", once_durable=True)) == ["poison"]


@pytest.mark.parametrize("headers", [{"persistent": "true"}, {"durable": "true", "auto-delete": "false"}])
def test_a_durable_subscription_with_rabbitmq_headers_collects_without_a_subscriber(
    broker: BrokerProcess, queue: str, headers: dict[str, str]
) -> None:
    reader = known(broker, f"client-{queue}")
    follow(reader, f"/topic/{queue}", headers)
    reader.disconnect()
    sender = broker.connect()
    sender.send_frame("SEND", {"destination": f"/topic/{queue}", "persistent": "true"}, b"missed", confirmed=True)
    reader = known(broker, f"client-{queue}")
    follow(reader, f"/topic/{queue}", headers)
    message = reader.message()
    assert message.body == b"missed"
    reader.ack(message)
    reader.send_frame("UNSUBSCRIBE", {"id": "1"} | headers, confirmed=True)
    # It has ended, not only gone.
    assert not [name for name in broker.queues() if queue in name]


def test_headers_that_browsers_and_old_clients_add_to_a_subscription_change_nothing(
    broker: BrokerProcess, queue: str
) -> None:
    client = broker.connect()
    added = {
        "X-CSRF-TOKEN": "7c1c",
        "selector": "",
        "durable-subscriber-name": "",
        "no-local": "False",
        "activemq.dispatchAsync": "True",
        "activemq.exclusive": "False",
        "activemq.maximumPendingMessageLimit": "0",
        "activemq.retroactive": "False",
    }
    fields = added | {"durable": "true", "auto-delete": "false", "exclusive": "false", "x-queue-type": "quorum"}
    follow(client, f"/queue/{queue}", fields)
    fill(broker, queue, "a")
    client.ack(client.message())
    client.send_frame("UNSUBSCRIBE", {"id": "1"} | fields, confirmed=True)
    follow(client, f"/topic/{queue}", added | {"auto-delete": "true", "durable": "false"})
    client.send_frame("SEND", {"destination": f"/topic/{queue}"}, b"b", confirmed=True)
    assert bodies(client.only(1)) == ["b"]


def test_a_destination_that_is_a_bare_name_is_a_queue(broker: BrokerProcess, queue: str) -> None:
    reader, sender = broker.connect(), broker.connect()
    follow(reader, queue)
    sender.send_frame("SEND", {"destination": f"/queue/{queue}"}, b"1", confirmed=True)
    sender.send_frame("SEND", {"destination": queue}, b"2", confirmed=True)
    assert bodies(reader.only(2)) == ["1", "2"]
    for slip in (f"queue/{queue}", f"topic/{queue}"):
        client = broker.connect()
        client.send_frame("SEND", {"destination": slip})
        assert f"unknown destination '{slip}': here it is '/{slip}'" in client.error().headers["message"]


def test_unchecked_login_is_reported_to_each_client_and_once_in_the_log(own_broker: BrokerProcess) -> None:
    def log_in(login: str) -> dict[str, str]:
        client = own_broker.connect(sends_connect=False)
        headers = {"accept-version": "1.2", "host": "h", "login": login, "passcode": f"secret of {login}"}
        client.send_frame("CONNECT", headers)
        answer = client.next_frame()
        assert answer.command == "CONNECTED"
        client.close()
        return answer.headers

    own_broker.connect()
    assert "login" not in own_broker.log
    for login in ("guest", "somebody", "somebody else"):
        assert log_in(login)["truenext-login"] == "unchecked"
    own_broker.stop()
    assert own_broker.log.count("login and passcode are not checked: the broker has no users") == 1
    assert "secret" not in own_broker.log and "guest" not in own_broker.log


# ---- Headers without effect ----

INEFFECTIVE = "a header of another broker has no effect here"


def warned_of(broker: BrokerProcess) -> list[str]:
    """Return the headers without effect of which the log warns, in order."""
    return [line.partition(" header='")[2].partition("'")[0] for line in ineffective_lines(broker)]


def ineffective_lines(broker: BrokerProcess) -> list[str]:
    return [line for line in broker.log.splitlines() if INEFFECTIVE in line]


def send_often(client: RawClient, queue: str, headers: dict[str, str], *, count: int = 20) -> None:
    """Send messages of which all but the first are read by their shape."""
    for _ in range(count - 1):
        client.send_frame("SEND", {"destination": f"/queue/{queue}"} | headers, b"x")
    client.send_frame("SEND", {"destination": f"/queue/{queue}"} | headers, b"x", confirmed=True)


def test_headers_without_effect_are_warned_of_once_and_the_messages_go_on(own_broker: BrokerProcess) -> None:
    for headers in ({"delivery-mode": "2"}, {"delivery-mode": "2", "x-delay": "5"}, {"JMSPriority": "9"}):
        for _ in range(3):
            send_often(own_broker.connect(), "q", headers)
    # With a colon in a value no frame is read by a shape; without content-length it is read as a frame.
    own_broker.connect().send("q", b"x", headers={"JMSDeliveryMode": "2", "x": "a:b"}, confirmed=True)
    client = own_broker.connect()
    for _ in range(20):
        client.send("q", b"x", headers={"expiration": "1"})
    follow(client, "/queue/q", {"activemq.maximumRedeliveries": "-1", "activemq.prefetchSize": "1000"})
    messages = client.only(9 * 20 + 1 + 20)
    assert {message.headers["priority"] for message in messages} == {"4"}
    assert sum("delivery-mode" in message.headers for message in messages) == 6 * 20
    assert warned_of(own_broker) == [
        *("delivery-mode", "x-delay", "JMSPriority", "JMSDeliveryMode", "expiration", "activemq.maximumRedeliveries"),
    ]
    first, last = ineffective_lines(own_broker)[0], ineffective_lines(own_broker)[-1]
    assert " WARNING " in first and "frame='SEND' user='' client='127.0.0.1:" in first
    assert "instead='use persistent:true; without it the message is transient" in first
    assert "frame='SUBSCRIBE'" in last and "instead=\"use attempts_max of the queue's policy" in last


def test_misspelt_header_of_truenext_on_send_is_warned_of_once_and_the_messages_go_on(
    own_broker: BrokerProcess,
) -> None:
    for headers in ({"truenext-tll": "5"}, {"truenext-anything": "5"}):
        for _ in range(2):
            send_often(own_broker.connect(), "q", headers)
    assert len(own_broker.remaining_messages("q")) == 80
    (line,) = [each for each in own_broker.log.splitlines() if "begins with truenext-" in each]
    assert " WARNING " in line and "header='truenext-tll' frame='SEND' user=''" in line
    assert "instead='use truenext-ttl'" in line


def test_message_with_the_delivery_mode_of_another_broker_alone_is_lost_in_a_crash(own_broker: BrokerProcess) -> None:
    sender = own_broker.connect()
    sender.send("q", b"transient", headers={"delivery-mode": "2", "JMSDeliveryMode": "PERSISTENT"}, confirmed=True)
    sender.send("q", b"persistent", headers={"delivery-mode": "2", "persistent": "true"}, confirmed=True)
    warned = warned_of(own_broker)
    own_broker.restart(is_clean=False)
    assert bodies(own_broker.remaining_messages("q")) == ["persistent"]
    assert sorted(warned) == ["JMSDeliveryMode", "delivery-mode"]


# ---- Queues from before ----

OLD = "a?consumer.prefetchSize=1"


def write(engine: Engine, store: Store) -> None:
    batch = engine.take_batch()
    assert batch is not None
    store.apply(batch)
    engine.store_results.on_committed(batch)


def fill_as_before(data: Path, *fields: str) -> None:
    """Make the data folder of an old broker, which allowed `?` in all names."""
    store = EmbeddedStore(data)
    engine, _ = recover(store, Policies())
    engine.state.commit_state.now_ms = 1_000_000
    engine.lifespan.start()
    write(engine, store)
    sender = engine.commands.connect("sender")
    for body in fields:
        message = SentMessage(4, True, 0, b"content-length:%d\n" % len(body), body.encode())
        engine.commands.send(sender, Send(Destination(DestinationKind.QUEUE, OLD), message))
    for address in (Destination(DestinationKind.QUEUE, OLD), Destination(DestinationKind.TOPIC, OLD)):
        message = SentMessage(4, True, 0, b"content-length:5\n", b"later")
        engine.commands.send(
            sender, Send(address, message, schedule=Schedule(delay_ms=1000, period_ms=0, repeat=0, cron=""))
        )
    write(engine, store)
    engine.commands.connecting.stop()
    for batch in engine.lifespan.final_batches():
        store.apply(batch)
    store.close()


def test_queues_with_a_question_mark_from_before_can_be_moved_and_purged(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path)
    fill_as_before(broker.data, "1", "2", "3")
    try:
        broker.start()
        # What was scheduled is due by now, also for a topic of that name that nobody can send to any more.
        broker.await_facts(OLD, waiting=4)
        broker.output_of("scheduled", OLD)
        assert broker.output_of("move", OLD, "new", "--count", "2") == "2 moved to new\n"
        assert bodies(broker.remaining_messages("new", once_durable=True)) == ["1", "2"]
        assert broker.output_of("purge", OLD) == "2 removed\n"
        broker.await_facts(OLD, waiting=0)
        # But nothing new comes there.
        failed = broker.truenext("move", "new", "b?c")
        assert failed.returncode == 2 and "the character ? is not allowed in names" in failed.stderr
        broker.stop()
    finally:
        broker.clean_up()


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2"])
@pytest.mark.parametrize("name", ["truenext-unused", "truenext-lost", "truenext-round", "browser"])
def test_a_header_that_only_the_broker_sets_does_not_leave_it_with_a_message(
    broker: BrokerProcess, queue: str, version: str, name: str
) -> None:
    """A `truenext-unused` once kept truenext's consumers waiting for ever, as it ends a pull request."""
    sender = broker.connect(version=version)
    sender.send(queue, b"1", headers={name: "true"})
    sender.send(queue, b"2", confirmed=True)
    with blocking.connect(broker.url) as connection, connection.consumer(f"/queue/{queue}", prefetch=1) as consumer:
        first = consumer.receive(RECEIVE_SECONDS)
        assert first is not None and first.body == b"1" and not first.was_lost
        # The broker itself sends truenext-round.
        assert first.headers.get(name) in (None, "0")
        first.ack()
        second = consumer.receive(RECEIVE_SECONDS)
        assert second is not None and second.body == b"2"
        second.ack()
