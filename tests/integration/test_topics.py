"""Does everybody who has subscribed get a copy? Over real sockets and a real store."""

from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RawClient, bodies


def follow(client: RawClient, address: str, *, name: str = "1", headers: dict[str, str] | None = None) -> None:
    said = {"id": name, "destination": address, "ack": "client-individual"} | (headers or {})
    client.say("SUBSCRIBE", said, confirmed=True)


def publish(client: RawClient, address: str, body: str, headers: dict[str, str] | None = None) -> None:
    client.say("SEND", {"destination": address} | (headers or {}), body.encode(), confirmed=True)


def test_every_subscription_gets_a_copy_in_the_order_of_priority(broker: BrokerProcess, queue: str) -> None:
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


def test_nothing_comes_behind_the_receipt_of_an_unsubscribe(broker: BrokerProcess, queue: str) -> None:
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
    sender.say("SEND", {"destination": f"/topic/{queue},/queue/{queue}", "transaction": "t"}, b"m", confirmed=True)
    follow(reader, f"/topic/{queue}")
    follow(reader, f"/queue/{queue}", name="2")
    assert not reader.arrived()
    sender.commit("t")
    assert bodies(reader.only(2)) == ["m", "m"]


def test_a_pattern_follows_all_topics_that_match_in_one_order(broker: BrokerProcess, queue: str) -> None:
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


def test_a_question_can_name_a_temporary_topic_for_its_answer(broker: BrokerProcess, queue: str) -> None:
    asker, other = broker.connect(), broker.connect()
    follow(asker, "/temp-topic/answers")
    follow(other, f"/queue/{queue}")
    publish(asker, f"/queue/{queue}", "?", {"reply-to": "/temp-topic/answers"})
    publish(other, other.message().headers["reply-to"], "!")
    assert bodies(asker.only(1)) == ["!"]
