"""What of topics the state machines cannot see: limits, memory, who is ended, what is kept in mind."""

import pytest

from tests.unit.test_engine import commit, dispatched, send, started, subscribe
from truenext.commands import AckMode, Subscribe, Unsubscribe
from truenext.destination import parse
from truenext.engine.engine import Engine
from truenext.engine.session import Session
from truenext.engine.topics import KNOWN_MAX, virtual_topic
from truenext.errors import RemoteProtocolError
from truenext.limits import COPIES_BYTES_MAX
from truenext.policy import Policies, Policy


def subscribe_as(engine: Engine, session: Session, name: str, address: str) -> None:
    engine.subscribe(session, Subscribe(name, parse(address, session.id), AckMode.INDIVIDUAL, 100))


def test_a_copy_is_the_same_message_and_no_other_object() -> None:
    engine = started()
    session = engine.connect("s")
    for name in "xyz":
        subscribe_as(engine, session, name, "/topic/t")
    send(engine, session, "/topic/t,/queue/q", body=b"b")
    entries = [entry for entries in engine.turn().deliveries.values() for entry in entries]
    assert len(entries) == 3
    assert len({id(entry.message) for entry in entries}) == 1


def test_a_topic_without_subscriptions_leaves_nothing_behind() -> None:
    engine = started()
    session = engine.connect("s")
    before = engine.memory.used
    send(engine, session, "/topic/t", persistent=True)
    assert not engine.has_batch and engine.memory.used == before
    assert not list(engine.queues())


def test_an_ended_subscription_leaves_nothing_behind() -> None:
    engine = started()
    session = engine.connect("s")
    subscribe_as(engine, session, "x", "/topic/t")
    subscribe_as(engine, session, "y", "/topic/*")
    send(engine, session, "/topic/t")
    engine.unsubscribe(session, Unsubscribe("x"))
    engine.unsubscribe(session, Unsubscribe("y"))
    send(engine, session, "/topic/t")
    assert (list(engine.queues()), engine.memory.used, session.temporary_queues) == ([], 0, [])


def test_whoever_does_not_read_what_its_topic_brings_is_ended_when_nothing_else_can_leave_memory() -> None:
    engine = started(limit_of_broker=5000)
    sender, slow, other = (engine.connect(name) for name in ("sender", "slow", "other"))
    subscribe_as(engine, slow, "1", "/topic/t")
    subscribe_as(engine, other, "1", "/topic/u")
    for _ in range(20):
        send(engine, sender, "/topic/t")
    send(engine, sender, "/topic/u")
    assert engine.relieve() == [slow]


def test_a_subscription_that_holds_more_than_its_topics_policy_allows_ends_its_connection_once() -> None:
    engine = Engine(policies=Policies(by_pattern={"news.>": Policy(memory_limit=5000)}))
    engine.start()
    commit(engine)
    sender, slow = engine.connect("sender"), engine.connect("slow")
    subscribe_as(engine, slow, "1", "/topic/news.eu")
    subscribe_as(engine, slow, "2", "/topic/news.*")
    subscribe_as(engine, slow, "3", "/topic/other")
    for _ in range(10):
        send(engine, sender, "/topic/other")
        send(engine, sender, "/topic/news.eu")
    assert engine.relieve() == []
    for _ in range(10):
        send(engine, sender, "/topic/news.eu")
    assert engine.relieve() == [slow]


def test_one_message_is_not_written_for_more_queues_than_fit_into_a_batch() -> None:
    engine = started()
    session = engine.connect("s")
    body = bytes(COPIES_BYTES_MAX // 4)
    send(engine, session, "/queue/a,/queue/b,/queue/c", persistent=True, body=body)
    with pytest.raises(RemoteProtocolError, match="once for each queue"):
        send(engine, session, "/queue/a,/queue/b,/queue/c,/queue/d", persistent=True, body=body)
    send(engine, session, "/queue/a,/queue/b,/queue/c,/queue/d", body=body)


def test_only_its_own_connection_subscribes_to_a_temporary_topic_and_no_pattern_does() -> None:
    engine = started()
    owner, other = engine.connect("owner"), engine.connect("other")
    subscribe(engine, owner, "/temp-topic/t")
    subscribe_as(engine, other, "all", "/topic/>")
    with pytest.raises(RemoteProtocolError, match="only the connection that owns"):
        subscribe(engine, other, "/remote-temp-topic/owner/t")
    send(engine, other, "/remote-temp-topic/owner/t")
    deliveries = engine.turn().deliveries
    assert [consumer.session for consumer in deliveries] == [owner]


def test_many_topics_that_are_sent_to_once_are_not_all_kept_in_mind() -> None:
    engine = started()
    session = engine.connect("s")
    subscribe(engine, session, "/topic/*")
    for number in range(KNOWN_MAX + 10):
        send(engine, session, f"/topic/t{number}")
    assert len(engine._topics._known) <= KNOWN_MAX
    assert len(dispatched(engine)) == KNOWN_MAX + 10


@pytest.mark.parametrize(
    ("queue", "topic"),
    [
        ("Consumer.a.VirtualTopic.x", "VirtualTopic.x"),
        ("Consumer.a.VirtualTopic.x.y", "VirtualTopic.x.y"),
        ("Consumer.a.b.VirtualTopic.x", ""),
        ("Consumer.a.VirtualTopic", ""),
        ("Consumer.a.virtualtopic.x", ""),
        ("consumer.a.VirtualTopic.x", ""),
        ("VirtualTopic.x", ""),
    ],
)
def test_a_queue_belongs_to_a_virtual_topic_by_its_name_alone(queue: str, topic: str) -> None:
    assert virtual_topic(queue) == topic
