"""Tests that each subscription to a topic gets a copy of its messages; over real sockets, with a real store."""

import json

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RawClient, UnexpectedError, bodies
from truenext.model.left_messages import LEFT_TEXTS
from truenext.wire.stomp.frame import Frame, Version, encode


def follow(client: RawClient, address: str, *, name: str = "1", headers: dict[str, str] | None = None) -> None:
    fields = {"id": name, "destination": address, "ack": "client-individual"} | (headers or {})
    client.send_frame("SUBSCRIBE", fields, confirmed=True)


def publish(client: RawClient, address: str, body: str, headers: dict[str, str] | None = None) -> None:
    client.send_frame("SEND", {"destination": address} | (headers or {}), body.encode(), confirmed=True)


def test_subscriptions_each_get_a_copy_in_the_order_of_priority(broker: BrokerProcess, queue: str) -> None:
    first, second, sender = broker.connect(), broker.connect(), broker.connect()
    publish(sender, f"/topic/{queue}", "too early")
    for client in (first, second):
        follow(client, f"/topic/{queue}", headers={"activemq.prefetchSize": "1"})
    publish(sender, f"/topic/{queue}", "first")
    for priority in range(10):
        publish(sender, f"/topic/{queue}", str(priority), {"priority": str(priority), "persistent": "true"})
    for client in (first, second):
        seen = []
        for _ in range(11):
            message = client.message()
            seen.append(message.body.decode())
            client.ack(message)
        assert seen == ["first", *"9876543210"]
        assert message.headers["destination"] == f"/topic/{queue}"
        assert not client.arrived()


def test_no_message_comes_after_the_receipt_of_an_unsubscribe(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    follow(client, f"/topic/{queue}")
    publish(client, f"/topic/{queue}", "held")
    client.message()
    client.unsubscribe()
    publish(client, f"/topic/{queue}", "missed")
    follow(client, f"/topic/{queue}")
    publish(client, f"/topic/{queue}", "seen")
    assert bodies(client.only(1)) == ["seen"]


def test_a_transaction_is_published_when_it_is_committed(broker: BrokerProcess, queue: str) -> None:
    reader, sender = broker.connect(), broker.connect()
    sender.begin("t")
    sender.send_frame(
        "SEND", {"destination": f"/topic/{queue},/queue/{queue}", "transaction": "t"}, b"m", confirmed=True
    )
    follow(reader, f"/topic/{queue}")
    follow(reader, f"/queue/{queue}", name="2")
    assert not reader.arrived()
    sender.commit("t")
    assert bodies(reader.only(2)) == ["m", "m"]


def test_a_pattern_follows_all_topics_that_match_in_one_order(broker: BrokerProcess, queue: str) -> None:
    # C6.7
    reader, sender = broker.connect(), broker.connect()
    follow(reader, f"/topic/{queue}.*", headers={"activemq.prefetchSize": "1"})
    for number, topic in enumerate(["eu", "us", "eu.de", "us", "eu"]):
        publish(sender, f"/topic/{queue}.{topic}", str(number))
    publish(sender, f"/topic/{queue}", "not")
    seen = []
    for _ in range(4):
        message = reader.message()
        seen.append(message.body.decode())
        reader.ack(message)
    assert seen == list("0134")


def test_a_virtual_topic_fills_the_queues_of_its_consumers(own_broker: BrokerProcess) -> None:
    # C6.9
    client = own_broker.connect()
    for name in ("a", "b"):
        follow(client, f"/queue/Consumer.{name}.VirtualTopic.orders", name=name)
        client.unsubscribe(name)
    follow(client, "/topic/VirtualTopic.orders", name="t")
    publish(client, "/topic/VirtualTopic.orders", "m", {"persistent": "true"})
    assert bodies(client.only(1)) == ["m"]
    own_broker.kill()
    own_broker.start()
    client = own_broker.connect()
    for name in ("a", "b"):
        follow(client, f"/queue/Consumer.{name}.VirtualTopic.orders", name=name)
        assert bodies(client.only(1)) == ["m"]
    publish(client, "/topic/VirtualTopic.orders", "after the restart")
    assert bodies(client.only(2)) == ["after the restart"] * 2


@pytest.mark.parametrize("is_clean", [True, False], ids=["a clean stop", "a kill"])
@pytest.mark.parametrize("is_subscribed", [True, False], ids=["by SUBSCRIBE", "by a transient SEND"])
def test_a_queue_of_a_virtual_topic_that_never_had_a_message_on_disk_collects_after_a_restart(
    own_broker: BrokerProcess, is_subscribed: bool, is_clean: bool
) -> None:
    address = "/queue/Consumer.a.VirtualTopic.orders"
    client = own_broker.connect()
    if is_subscribed:
        follow(client, address)
    else:
        publish(client, address, "transient")
        follow(client, address)
        client.ack(client.message())
    client.disconnect()
    own_broker.restart(is_clean=is_clean)
    publish(own_broker.connect(), "/topic/VirtualTopic.orders", "m", {"persistent": "true"})
    client = own_broker.connect()
    follow(client, address)
    assert bodies(client.only(1)) == ["m"]


def test_a_request_can_name_a_temporary_topic_for_its_reply(broker: BrokerProcess, queue: str) -> None:
    requester, other = broker.connect(), broker.connect()
    follow(requester, "/temp-topic/answers")
    follow(other, f"/queue/{queue}")
    publish(requester, f"/queue/{queue}", "?", {"reply-to": "/temp-topic/answers"})
    publish(other, other.message().headers["reply-to"], "!")
    assert bodies(requester.only(1)) == ["!"]


# ---- Durable subscriptions ----


def known(broker: BrokerProcess, client_id: str = "me") -> RawClient:
    client = broker.connect(sends_connect=False)
    client.send_connect("1.2", "0,0", client_id=client_id)
    return client


def control_request(client: RawClient, verb: str) -> object:
    follow(client, "/temp-queue/answers", name="answers")
    client.send_frame("SEND", {"destination": f"/control/{verb}", "reply-to": "/temp-queue/answers"})
    message = client.message()
    client.ack(message)
    answer: object = json.loads(message.body)
    client.unsubscribe("answers")
    return answer


@pytest.mark.alternates("durable subscriptions over kills")
@pytest.mark.parametrize(
    "headers", [{"durable": "true"}, {"activemq.subscriptionName": "n"}, {"activemq.subcriptionName": "n"}]
)
def test_a_durable_subscription_collects_through_kills_until_it_is_ended(
    own_broker: BrokerProcess, headers: dict[str, str]
) -> None:
    # C6.4, C6.5
    reader = known(own_broker)
    follow(reader, "/topic/news", headers=headers)
    own_broker.kill()
    own_broker.start()
    sender = own_broker.connect()
    for number, priority in enumerate([4, 9, 4]):
        publish(sender, "/topic/news", str(number), {"persistent": "true", "priority": str(priority)})
    own_broker.kill()
    own_broker.start()
    reader = known(own_broker)
    follow(reader, "/topic/news", headers=headers)
    messages = reader.only(3)
    assert bodies(messages) == ["1", "0", "2"]
    reader.ack(messages[0], confirmed=True)
    reader.send_frame("UNSUBSCRIBE", {"id": "1"}, confirmed=True)
    follow(reader, "/topic/news", headers=headers)
    assert bodies(reader.only(2)) == ["0", "2"]
    reader.send_frame("UNSUBSCRIBE", {"id": "1"} | headers, confirmed=True)
    own_broker.kill()
    own_broker.start()
    reader = known(own_broker)
    assert control_request(reader, "queues") == []
    follow(reader, "/topic/news", headers=headers)
    assert not reader.arrived()
    own_broker.stop()


def test_an_ended_subscription_leaves_nothing_on_disk_whatever_it_held(own_broker: BrokerProcess) -> None:
    reader = known(own_broker)
    for name in ("n", "o"):
        follow(reader, "/topic/news", name=name, headers={"durable": "true"})
        reader.unsubscribe(name)
    for number in range(3000):
        reader.send_frame("SEND", {"destination": "/topic/news", "persistent": "true"}, b"x" * (number % 100))
    publish(reader, "/topic/news", "last", {"persistent": "true"})
    reader.send_frame("UNSUBSCRIBE", {"id": "n", "durable": "true"}, confirmed=True)
    own_broker.kill()
    own_broker.start()
    own_broker.stop()
    own_broker.start()
    reader = known(own_broker)
    waiting = [(queue["topic"], queue["waiting"]) for queue in control_request(reader, "queues")]  # type: ignore[attr-defined]
    assert waiting == [("news", 3001)]
    status = control_request(reader, "status")
    assert status["subscriptions"] == {"durable": 1, "non_durable": 0}  # type: ignore[index]
    own_broker.stop()


def test_a_durable_subscription_may_end_in_one_write_with_a_message_to_it(own_broker: BrokerProcess) -> None:
    """Regression: the broker, if it had a history, ended as the event was not written yet."""
    reader = known(own_broker)
    follow(reader, "/topic/news", headers={"durable": "true"})
    reader.unsubscribe("1")
    send = Frame("SEND", {"destination": "/topic/news", "persistent": "true"}, b"m")
    end = Frame("UNSUBSCRIBE", {"id": "1", "durable": "true", "receipt": "ended"}, b"")
    reader.write(encode(send, Version.V1_2) + encode(end, Version.V1_2))
    reader.await_receipt("ended")
    assert control_request(reader, "queues") == []
    own_broker.stop()


def test_a_durable_subscription_has_one_user_at_a_time(broker: BrokerProcess, queue: str) -> None:
    # C6.4
    first, second = known(broker, queue), known(broker, queue)
    follow(first, f"/topic/{queue}", headers={"durable": "true"})
    second.send_frame("SUBSCRIBE", {"id": "1", "destination": f"/topic/{queue}", "durable": "true"})
    assert "is in use by another consumer" in second.error().headers["message"]
    first.disconnect()
    second = known(broker, queue)
    follow(second, f"/topic/{queue}", headers={"durable": "true"})


def test_a_durable_subscription_that_is_taken_up_for_another_topic_begins_anew(
    broker: BrokerProcess, queue: str
) -> None:
    reader = known(broker, queue)
    follow(reader, f"/topic/{queue}", headers={"durable": "true"})
    reader.unsubscribe()
    publish(reader, f"/topic/{queue}", "old", {"persistent": "true"})
    follow(reader, f"/topic/{queue}.*", headers={"durable": "true"})
    publish(reader, f"/topic/{queue}.a", "new", {"persistent": "true"})
    assert bodies(reader.only(1)) == ["new"]


def test_a_subscribe_that_discards_messages_warns_and_another_spelling_discards_nothing(
    own_broker: BrokerProcess,
) -> None:
    # C6.5, C6.6
    durable = {"durable": "true", "selector": "colour = 'red'"}
    reader = known(own_broker, "me")
    follow(reader, "/topic/news", headers=durable)
    reader.disconnect()
    sender = own_broker.connect()
    for body in ("1", "2"):
        publish(sender, "/topic/news", body, {"persistent": "true", "colour": "red"})
    own_broker.restart(is_clean=False)
    reader = known(own_broker, "me")
    follow(reader, "/topic/news", headers=durable | {"selector": "(colour='red')"})
    assert bodies(reader.only(2)) == ["1", "2"]
    reader.disconnect()
    assert "discarded" not in own_broker.log
    follow(known(own_broker, "me"), "/topic/news.*", headers=durable | {"selector": ""})
    (line,) = [line for line in own_broker.log.splitlines() if "discarded" in line]
    assert "WARNING" in line
    for field in (
        *("client_id='me'", "subscription='1'", "messages=2", "topic='news'", "new_topic='news.*'"),
        *("selector=\"colour = 'red'\"", "new_selector=''"),
    ):
        assert field in line


def test_a_rejected_message_of_a_durable_subscription_is_dead_lettered_and_can_be_redriven(
    broker: BrokerProcess, queue: str
) -> None:
    # C11.4, C12.2
    reader = known(broker, queue)
    follow(reader, f"/topic/{queue}", headers={"durable": "true"})
    publish(reader, f"/topic/{queue}", "bad", {"persistent": "true"})
    reader.nack(reader.message(), headers={"truenext-reject": "true"}, confirmed=True)
    follow(reader, f"/queue/DLQ.subscription.{queue}.1", name="dead")
    letter = reader.message()
    assert letter.body == b"bad"
    reader.unsubscribe("dead")
    follow(reader, "/temp-queue/answers", name="answers")
    arguments = json.dumps({"queue": f"DLQ.subscription.{queue}.1"}).encode()
    reader.send_frame("SEND", {"destination": "/control/redrive", "reply-to": "/temp-queue/answers"}, arguments)
    assert sorted(bodies(reader.messages(2)), key=len)[0] == "bad"


@pytest.mark.parametrize("verb", ["purge", "move"])
def test_work_on_a_subscription_that_has_ended_between_two_pieces_is_refused_in_the_answer(
    broker: BrokerProcess, queue: str, verb: str
) -> None:
    reader, operator = known(broker, queue), broker.connect()
    follow(reader, f"/topic/{queue}", headers={"durable": "true"})
    reader.unsubscribe("1")
    for _ in range(3):
        publish(operator, f"/topic/{queue}", "m", {"persistent": "true"})
    follow(operator, "/temp-queue/answers", name="answers")
    name = f"subscription,{queue},1,{queue}"
    arguments = {"queue": name, "limit": 1} | ({"to": f"{queue}.new"} if verb == "move" else {})

    def piece(**rest: object) -> dict[str, object]:
        body = json.dumps(arguments | rest).encode()
        operator.send_frame("SEND", {"destination": f"/control/{verb}", "reply-to": "/temp-queue/answers"}, body)
        answer: dict[str, object] = json.loads(operator.message().body)
        return answer

    first = piece()
    assert (first["moved"], first["error"]) == (1, "")
    reader.send_frame("UNSUBSCRIBE", {"id": "1", "durable": "true"}, confirmed=True)
    for _ in range(2):
        # The connection goes on.
        second = piece(after=first["next"], until=first["until"])
        assert (second["moved"], second["next"]) == (0, None)
        assert second["error"] == f"there is no queue {name!r}"
    with pytest.raises(UnexpectedError, match="there is no queue"):
        piece()


@pytest.mark.parametrize("way", ["at once", "through a kill", "through a move", "given up twice"])
@pytest.mark.parametrize("address", ["/topic/news.eu", "/queue/other,/topic/news.eu"])
def test_a_redriven_message_of_a_durable_subscription_arrives_as_it_was_first_sent(
    own_broker: BrokerProcess, address: str, way: str
) -> None:
    # C12.2
    reader = known(own_broker, "me")
    subscribed = {"durable": "true", "selector": "colour = 'red' OR\ncolour = 'a:b'"}
    follow(reader, "/topic/news.*", headers=subscribed)
    publish(reader, address, "bad", {"persistent": "true", "priority": "12", "colour": "red"})
    dead = "DLQ.subscription.me.1"
    for _ in range(2 if way == "given up twice" else 1):
        message = reader.message()
        reader.nack(message, headers={"truenext-reject": "true"}, confirmed=True)
        (letter,) = own_broker.remaining_messages(dead)
        for frame in (message, letter):
            assert "subscription," not in f"{frame.headers} {frame.body!r}"
        assert letter.headers["truenext-original-destination"] == address
        if way == "through a move":
            own_broker.output_of("move", dead, "DLQ.elsewhere")
            dead = "DLQ.elsewhere"
        if way == "through a kill":
            own_broker.restart(is_clean=False)
            reader = known(own_broker, "me")
            follow(reader, "/topic/news.*", headers=subscribed)
        assert own_broker.output_of("redrive", dead).startswith("1 moved to subscription,me,1,")
    message = reader.message()
    assert (message.body, message.headers["destination"], message.headers["priority"]) == (b"bad", address, "9")
    assert not [name for name in message.headers if name.startswith(("truenext-original", "truenext-dead"))]
    assert "subscription," not in str(message.headers)
    reader.ack(message, confirmed=True)
    # To where it came from, anybody can send.
    publish(reader, message.headers["destination"], "again", {"colour": "a\\cb"})


@pytest.mark.parametrize(
    ("client_id", "headers", "why"),
    [
        (None, {"durable": "true"}, "needs a client-id"),
        ("a,b", {"durable": "true"}, "client-id 'a,b' is empty, or has a character"),
        ("", {"durable": "true"}, "needs a client-id"),
        ("me", {"activemq.subscriptionName": ""}, "name of a durable subscription '' is empty"),
        ("me", {"activemq.subscriptionName": "x" * 240}, "of 242 characters"),
        ("me", {"activemq.subscriptionName": "n", "destination": "/queue/q"}, "durable subscriptions are to topics"),
        ("me", {"durable": "true", "destination": "/temp-topic/q"}, "the topic must not be temporary"),
    ],
)
def test_an_impossible_durable_subscription_is_refused_with_its_cause(
    broker: BrokerProcess, client_id: str | None, headers: dict[str, str], why: str
) -> None:
    client = broker.connect(sends_connect=False)
    client.send_connect("1.2", "0,0", client_id=client_id)
    client.send_frame("SUBSCRIBE", {"id": "1", "destination": "/topic/t"} | headers)
    assert why in client.error().headers["message"]


def test_ending_a_durable_subscription_that_does_not_exist_is_refused(broker: BrokerProcess, queue: str) -> None:
    client = known(broker, queue)
    client.send_frame("UNSUBSCRIBE", {"id": "1", "durable": "true"})
    assert "there is no durable subscription" in client.error().headers["message"]


# ---- With selectors, scheduled sends, and what whoever runs the broker does ----


def test_a_subscription_with_a_selector_collects_only_matching_messages_through_a_kill(
    own_broker: BrokerProcess,
) -> None:
    headers = {"durable": "true", "selector": "colour = 'red' AND total > 5, 9"}
    reader = known(own_broker)
    reader.send_frame("SUBSCRIBE", {"id": "1", "destination": "/topic/news"} | headers)
    assert "selector" in reader.error().headers["message"]
    headers["selector"] = "colour IN ('red', 'green') AND total > 5"
    reader = known(own_broker)
    follow(reader, "/topic/news", headers=headers)
    for _ in range(2):
        for number in range(10):
            colour = "red" if number % 2 else "blue"
            publish(reader, "/topic/news", str(number), {"persistent": "true", "colour": colour, "total": str(number)})
        messages = reader.only(2)
        assert bodies(messages) == ["7", "9"]
        reader.ack(messages[0], confirmed=True)
        reader.ack(messages[1], confirmed=True)
        own_broker.kill()
        own_broker.start()
        reader = known(own_broker)
        follow(reader, "/topic/news", headers=headers)
    publish(reader, "/topic/news", "last", {"persistent": "true", "colour": "red", "total": "6"})
    headers["selector"] = "colour = 'red'"
    reader.message()
    reader.unsubscribe()
    follow(reader, "/topic/news", headers=headers)
    assert not reader.arrived()


def test_a_scheduled_send_to_a_topic_and_a_queue_comes_to_both_once_over_a_kill(own_broker: BrokerProcess) -> None:
    reader = known(own_broker)
    follow(reader, "/topic/news", headers={"durable": "true"})
    follow(reader, "/topic/>", name="2")
    headers = {"persistent": "true", "AMQ_SCHEDULED_DELAY": "300"}
    publish(reader, "/topic/news", "soon", headers)
    for message in reader.messages(2):
        assert message.body == b"soon"
        reader.ack(message, confirmed=True)
    publish(reader, "/topic/news,/queue/q", "over the kill", headers)
    own_broker.kill()
    own_broker.start()
    reader = known(own_broker)
    follow(reader, "/topic/news", headers={"durable": "true"})
    follow(reader, "/queue/q", name="2")
    messages = reader.only(2)
    assert bodies(messages) == ["over the kill"] * 2
    assert {message.headers["subscription"] for message in messages} == {"1", "2"}
    assert {message.headers["destination"] for message in messages} == {"/topic/news,/queue/q"}


@pytest.mark.parametrize("address", ["/temp-topic/t", "/temp-queue/q", "/queue/a,/temp-topic/t"])
def test_scheduled_sends_to_temporary_destinations_are_refused(broker: BrokerProcess, address: str) -> None:
    client = broker.connect()
    client.send_frame("SEND", {"destination": address, "AMQ_SCHEDULED_DELAY": "1"}, b"m")
    assert "is temporary, and may have ended when a scheduled send is due" in client.error().headers["message"]


def test_a_durable_subscription_is_listed_browsed_moved_and_purged_by_its_name(
    broker: BrokerProcess, queue: str
) -> None:
    reader = known(broker, queue)
    follow(reader, f"/topic/{queue}", headers={"activemq.subscriptionName": "n", "selector": "colour <> 'blue, light'"})
    reader.unsubscribe()
    name = f"subscription,{queue},n,{queue},colour <> 'blue, light'"
    for number in range(10):
        colour = "red" if number % 2 else "green"
        publish(reader, f"/topic/{queue}", str(number), {"persistent": str(number > 3).lower(), "colour": colour})
    listed = {each["name"]: each for each in json.loads(broker.output_of("queues", "--json"))}
    assert (listed[name]["waiting"], listed[name]["topic"]) == (10, queue)
    assert broker.output_of("browse", name, "--selector", "colour = 'red'").split() == list("13579")
    assert broker.output_of("browse", f"/subscription/{queue},n", "--count", "2").split() == ["0", "1"]
    assert broker.output_of("move", name, f"{queue}.red", "--selector", "colour = 'red'") == f"5 moved to {queue}.red\n"
    broker.output_of("pause", name)
    follow(reader, f"/topic/{queue}", headers={"activemq.subscriptionName": "n", "selector": "colour <> 'blue, light'"})
    assert not reader.arrived()
    broker.output_of("resume", name)
    assert bodies(reader.only(5)) == list("02468")
    reader.unsubscribe()
    assert broker.output_of("purge", name) == "5 removed\n"
    assert broker.output_of("browse", name) == ""
    reader.send_frame("UNSUBSCRIBE", {"id": "1", "activemq.subscriptionName": "n"}, confirmed=True)
    done = broker.truenext("purge", name)
    assert (done.returncode, f"there is no queue {name!r}" in done.stderr) == (1, True)
    assert "there is no durable subscription" in broker.truenext("browse", name).stderr
    assert bodies(broker.remaining_messages(f"{queue}.red")) == list("13579")


@pytest.mark.parametrize(
    ("command", "address", "why"),
    [
        ("SEND", "/subscription/c,n", "send to its topic"),
        ("SUBSCRIBE", "/subscription/c,n", "subscribe to its topic"),
        ("SEND", "/subscription/c", "name of a durable subscription '' is empty"),
        ("SEND", "/queue/a,/subscription/c,n", "unknown destination 'n'"),
        ("SEND", "/queue/a,/subscription/c", "is empty"),
    ],
)
def test_a_durable_subscription_has_an_address_for_browsing_alone(
    broker: BrokerProcess, command: str, address: str, why: str
) -> None:
    client = broker.connect()
    client.send_frame(command, {"id": "1", "destination": address})
    assert why in client.error().headers["message"]


def test_dead_letters_of_a_subscription_with_a_long_selector_go_back_until_it_ends(
    broker: BrokerProcess, queue: str
) -> None:
    reader = known(broker, queue)
    headers = {"durable": "true", "selector": " OR ".join(f"number = {number}" for number in range(100))}
    follow(reader, f"/topic/{queue}", headers=headers)
    publish(reader, f"/topic/{queue}", "bad", {"persistent": "true", "number": "7"})
    reader.nack(reader.message(), headers={"truenext-reject": "true"}, confirmed=True)
    assert broker.output_of("redrive", f"DLQ.subscription.{queue}.1").startswith("1 moved to subscription,")
    message = reader.message()
    assert message.body == b"bad"
    reader.nack(message, headers={"truenext-reject": "true"}, confirmed=True)
    reader.send_frame("UNSUBSCRIBE", {"id": "1", "durable": "true"}, confirmed=True)
    assert "1 left" in broker.output_of("redrive", f"DLQ.subscription.{queue}.1")


def test_dead_letters_of_an_ended_subscription_are_left_with_the_reason_and_the_remedy(
    broker: BrokerProcess, queue: str
) -> None:
    # C12.2
    reader = known(broker, queue)
    dead = f"DLQ.subscription.{queue}.1"
    # The first time it is taken up for another topic, the second time it ends.
    for topic in (f"{queue}.old", f"{queue}.new"):
        follow(reader, f"/topic/{topic}", headers={"durable": "true"})
        publish(reader, f"/topic/{topic}", "bad", {"persistent": "true"})
        reader.nack(reader.message(), headers={"truenext-reject": "true"}, confirmed=True)
        reader.unsubscribe("1")
    reader.send_frame("UNSUBSCRIBE", {"id": "1", "durable": "true"}, confirmed=True)
    reader.send(dead, b"no dead letter", confirmed=True)

    ended = {f"subscription,{queue},1,{queue}.{topic}": 1 for topic in ("new", "old")}
    facts = json.loads(broker.output_of("redrive", dead, "--json"))
    assert facts == {"count": 0, "to": {}, "left": 3, "transient": 0, "ended": ended, "dry_run": False}
    why = "which does not exist any more; `truenext move` moves them to a queue"
    assert broker.output_of("redrive", dead).splitlines() == [
        "0 moved",
        *(f"1 left: they failed in {name}, {why}" for name in ended),
        f"1 left: {LEFT_TEXTS['redrive']}",
    ]
    assert broker.output_of("move", dead, f"{queue}.saved", "--count", "2") == f"2 moved to {queue}.saved\n"
    assert broker.output_of("redrive", dead).splitlines()[1:] == [f"1 left: {LEFT_TEXTS['redrive']}"]


# ---- Comparisons that take long ----


def costly_selector(number: int) -> str:
    return "a LIKE '%" + "_" * 200 + f"y{number}N%'"


def subscribe_costly(client: RawClient, address: str, count: int) -> None:
    for number in range(count):
        client.send_frame("SUBSCRIBE", {"id": str(number), "destination": address, "selector": costly_selector(number)})
    client.send_frame("BEGIN", {"transaction": "x"})
    client.send_frame("ABORT", {"transaction": "x"}, confirmed=True)


LARGE = {"a": "y" * 60_000}
"""Header that takes long to compare."""


def test_frames_behind_a_send_that_waits_for_comparisons_keep_their_order(broker: BrokerProcess, queue: str) -> None:
    reader, sender = broker.connect(), broker.connect()
    subscribe_costly(reader, f"/topic/{queue}", 200)
    follow(reader, f"/topic/{queue}", name="all")
    publish(sender, f"/topic/{queue}", "0")
    frames = []
    for number in range(1, 20):
        headers = {"destination": f"/topic/{queue}", "receipt": f"r{number}"} | (LARGE if number % 3 == 0 else {})
        frames.append(encode(Frame("SEND", headers, str(number).encode()), Version.V1_2))
    frames.append(encode(Frame("BEGIN", {"transaction": "t"}), Version.V1_2))
    for number in range(20, 25):
        headers = {"destination": f"/topic/{queue}", "transaction": "t"} | LARGE
        frames.append(encode(Frame("SEND", headers, str(number).encode()), Version.V1_2))
    frames.append(encode(Frame("COMMIT", {"transaction": "t", "receipt": "r20"}), Version.V1_2))
    sender.write(b"".join(frames))
    for number in range(1, 21):
        sender.await_receipt(f"r{number}")
    assert bodies(reader.only(25)) == [str(number) for number in range(25)]


def test_connection_that_ends_while_its_send_waits_for_comparisons_sends_nothing(
    broker: BrokerProcess, queue: str
) -> None:
    reader, sender, other = broker.connect(), broker.connect(), broker.connect()
    subscribe_costly(reader, f"/topic/{queue}", 300)
    follow(reader, f"/topic/{queue}", name="all")
    publish(other, f"/topic/{queue}", "before")
    for number in range(10):
        sender.send_frame("SEND", {"destination": f"/topic/{queue},/topic/{queue}.{number}"} | LARGE, b"lost or not")
    sender.reset()
    publish(other, f"/topic/{queue}", "after")
    seen = bodies(reader.messages(2))
    while seen[-1] != "after":
        seen += bodies(reader.messages(1))
    assert seen == ["before", *["lost or not"] * (len(seen) - 2), "after"]


def test_other_clients_are_served_while_a_commit_waits_for_comparisons(broker: BrokerProcess, queue: str) -> None:
    """Fixed: one COMMIT of ten sends, compared with 40 selectors, held up all clients for 7.5 seconds."""
    reader, sender, other = broker.connect(), broker.connect(), broker.connect()
    subscribe_costly(reader, f"/topic/{queue}", 400)
    sender.begin("t")
    for number in range(40):
        # Texts of which none is like another: what one comparison knows is of no use to the next.
        header = {"a": chr(ord("a") + number % 26) * (59_000 + number)}
        sender.send_frame("SEND", {"destination": f"/topic/{queue}", "transaction": "t"} | header)
    sender.send_frame("COMMIT", {"transaction": "t", "receipt": "committed"})
    rounds = 0
    while rounds < 100_000:
        try:
            assert sender.next_frame(0.001).headers["receipt-id"] == "committed"
            break
        except TimeoutError:
            publish(other, f"/queue/{queue}", "quick")
            rounds += 1
    assert rounds > 20
