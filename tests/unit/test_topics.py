"""Tests of topics that the state machines cannot make: limits, memory, ended subscribers, cached topics."""

import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.property import targets
from tests.property.disk import found_of
from tests.unit.test_engine import commit, send, started, subscribe
from tests.unit.test_schedule import NOON_MS, Run
from truenext.broker.pager import read_page
from truenext.engine.background import bulk
from truenext.engine.engine import Engine
from truenext.engine.queues import topics
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.pages import PageResult
from truenext.engine.state.queue import Queue
from truenext.engine.state.transaction import TransactionLimits
from truenext.errors import RemoteProtocolError
from truenext.model import selector
from truenext.model.answers import Receipt
from truenext.model.batch import Batch
from truenext.model.commands import Ack, AckMode, Begin, Browse, Commit, Send, Subscribe, Unsubscribe
from truenext.model.destination import Destination, DestinationKind, parse_address, parse_queue_name, virtual_topic
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy
from truenext.model.schedule import Schedule


def subscribe_as(engine: Engine, session: ConnectionState, name: str, address: str) -> None:
    engine.commands.subscribe(session, Subscribe(name, parse_address(address, session.id), AckMode.INDIVIDUAL, 100))


def test_a_copy_is_the_same_message_and_no_other_object() -> None:
    engine = started()
    session = engine.commands.connect("s")
    for name in "xyz":
        subscribe_as(engine, session, name, "/topic/t")
    send(engine, session, "/topic/t,/queue/q", body=b"b")
    entries = [entry for entries in engine.turn.run().deliveries.values() for entry in entries]
    assert len(entries) == 3
    assert len({id(entry.message) for entry in entries}) == 1


def test_a_topic_without_subscriptions_leaves_nothing_behind() -> None:
    # C6.1
    engine = started()
    session = engine.commands.connect("s")
    before = engine.state.memory.message_bytes
    send(engine, session, "/topic/t", persistent=True)
    assert not engine.state.commit_state.has_batch and engine.state.memory.message_bytes == before
    assert not list(engine.queues.by_name.values())


def test_an_ended_subscription_leaves_nothing_behind() -> None:
    engine = started()
    session = engine.commands.connect("s")
    subscribe_as(engine, session, "x", "/topic/t")
    subscribe_as(engine, session, "y", "/topic/*")
    send(engine, session, "/topic/t")
    engine.commands.unsubscribe(session, Unsubscribe("x"))
    engine.commands.unsubscribe(session, Unsubscribe("y"))
    send(engine, session, "/topic/t")
    assert (list(engine.queues.by_name.values()), engine.state.memory.message_bytes, session.temporary_queues) == (
        [],
        0,
        [],
    )


def test_a_subscription_that_holds_more_than_its_topics_policy_allows_ends_its_connection_once() -> None:
    # C24.15
    engine = Engine(policies=Policies(by_pattern={"news.>": Policy(memory_limit=5000)}))
    engine.lifespan.start()
    commit(engine)
    sender, slow = engine.commands.connect("sender"), engine.commands.connect("slow")
    subscribe_as(engine, slow, "1", "/topic/news.eu")
    subscribe_as(engine, slow, "2", "/topic/news.*")
    subscribe_as(engine, slow, "3", "/topic/other")
    for _ in range(10):
        send(engine, sender, "/topic/other")
        send(engine, sender, "/topic/news.eu")
    assert engine.evict() == {}
    for _ in range(10):
        send(engine, sender, "/topic/news.eu")
    assert list(engine.evict()) == [slow]


def test_temporary_topic_is_subscribed_to_only_by_its_own_connection_and_by_no_pattern() -> None:
    # C6.14
    engine = started()
    owner, other = engine.commands.connect("owner"), engine.commands.connect("other")
    subscribe(engine, owner, "/temp-topic/t")
    subscribe_as(engine, other, "all", "/topic/>")
    with pytest.raises(RemoteProtocolError, match="only the connection that owns"):
        subscribe(engine, other, "/remote-temp-topic/owner/t")
    send(engine, other, "/remote-temp-topic/owner/t")
    deliveries = engine.turn.run().deliveries
    assert [consumer.session for consumer in deliveries] == [owner]


@pytest.mark.parametrize("subscriptions", [1, 30])
def test_number_of_cached_topics_is_limited_and_smaller_with_more_subscriptions(
    subscriptions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "CACHE_MAX", 1000)
    engine = started()
    session = engine.commands.connect("s")
    for number in range(subscriptions):
        engine.commands.subscribe(
            session, Subscribe(str(number), parse_address("/topic/*", session.id), AckMode.AUTO, 30_000)
        )
    most = 0
    for number in range(200):
        send(engine, session, f"/topic/t{number}")
        most = max(
            most, sum(len(route.subscriptions) for route in targets.known_routes(targets.topics(engine)).values())
        )
        assert targets.size_of_known_topics(engine) <= 1000
    assert (most == 58) if subscriptions == 1 else (600 < most < 680)
    assert all(queue.waiting_count() == 200 for queue in engine.queues.by_name.values())


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


# ---- Queues of virtual topics ----

COLLECTS = "Consumer.a.VirtualTopic.t"


def consume_it(engine: Engine, session: ConnectionState) -> None:
    subscribe(engine, session, f"/queue/{COLLECTS}")


def consume_it_under_another_name(engine: Engine, session: ConnectionState) -> None:
    subscribe_as(engine, session, "again", f"/queue/{COLLECTS}")


def send_to_it(engine: Engine, session: ConnectionState) -> None:
    send(engine, session, f"/queue/{COLLECTS}")


def send_to_it_and_others(engine: Engine, session: ConnectionState) -> None:
    send(engine, session, f"/queue/q,/queue/{COLLECTS},/topic/t")


def send_to_it_in_a_transaction(engine: Engine, session: ConnectionState) -> None:
    engine.commands.begin(session, Begin("x"))
    send(engine, session, f"/queue/{COLLECTS}", transaction="x")
    engine.commands.commit(session, Commit("x"))


def send_to_it_later(engine: Engine, session: ConnectionState) -> None:
    send(engine, session, f"/queue/{COLLECTS}", schedule=Schedule(delay_ms=1_000_000))


def send_to_it_later_in_a_transaction(engine: Engine, session: ConnectionState) -> None:
    engine.commands.begin(session, Begin("x"))
    send(engine, session, f"/queue/{COLLECTS}", transaction="x", schedule=Schedule(delay_ms=1_000_000))
    engine.commands.commit(session, Commit("x"))


def send_to_it_with_a_number(engine: Engine, session: ConnectionState) -> None:
    send(engine, session, f"/queue/{COLLECTS}", producer="p", number=1)


def request_it(engine: Engine, session: ConnectionState) -> None:
    engine.commands.administering.pause(COLLECTS)
    engine.commands.administering.resume(COLLECTS)


def move_to_it(engine: Engine, session: ConnectionState) -> None:
    send(engine, session, "/queue/q")
    request = bulk.Move("q", to=COLLECTS)
    read = engine.tasks.bulk_pieces.next_read(request)
    assert read is not None
    engine.tasks.bulk_pieces.execute(request, read, PageResult([], 0, True))


MAKES = [
    consume_it,
    send_to_it,
    send_to_it_and_others,
    send_to_it_in_a_transaction,
    send_to_it_later,
    send_to_it_later_in_a_transaction,
    send_to_it_with_a_number,
]
"""Commands confirmed by a receipt that create the queue of a virtual topic and store nothing themselves."""


@pytest.mark.parametrize("make", [*MAKES, request_it, move_to_it])
def test_queue_of_a_virtual_topic_collects_after_a_crash_by_whichever_command_it_was_made(
    make: Callable[[Engine, ConnectionState], None],
) -> None:
    run = Run()
    make(run.engine, run.session)
    run.settle()
    run.start_engine()
    run.settle()
    before = waiting(run)[COLLECTS]
    publish(run, "m", to="/topic/VirtualTopic.t")
    run.settle()
    run.start_engine()
    assert waiting(run)[COLLECTS] == before + 1


@pytest.mark.parametrize("make", MAKES)
def test_command_that_creates_the_queue_of_a_virtual_topic_is_answered_when_it_is_durable(
    make: Callable[[Engine, ConnectionState], None],
) -> None:
    # C6.10
    engine = started()
    session = engine.commands.connect("s")
    make(engine, session)
    engine.state.commit_state.answer(session, Receipt("r"))
    assert engine.turn.run().answers == [] and engine.state.commit_state.is_batch_awaited
    commit(engine)
    assert engine.turn.run().answers == [(session, Receipt("r"))]


@pytest.mark.parametrize("name_it", [send_to_it, send_to_it_and_others, send_to_it_in_a_transaction])
def test_send_to_an_existing_queue_of_a_virtual_topic_is_answered_at_once(
    name_it: Callable[[Engine, ConnectionState], None],
) -> None:
    engine = started()
    session = engine.commands.connect("s")
    send_to_it(engine, session)
    commit(engine)
    name_it(engine, session)
    engine.state.commit_state.answer(session, Receipt("r"))
    assert engine.turn.run().answers == [(session, Receipt("r"))]
    assert not engine.state.commit_state.has_batch


@pytest.mark.parametrize("is_batch_closed", [False, True])
def test_subscribe_to_the_queue_of_a_virtual_topic_waits_until_the_queue_is_durable(
    is_batch_closed: bool,
) -> None:
    # C6.10
    engine = started()
    maker, other = engine.commands.connect("maker"), engine.commands.connect("other")
    send_to_it(engine, maker)
    batch = engine.take_batch() if is_batch_closed else None
    consume_it(engine, other)
    engine.state.commit_state.answer(other, Receipt("r"))
    assert engine.turn.run().answers == []
    batch = batch or engine.take_batch()
    assert batch is not None
    engine.store_results.on_committed(batch)
    assert engine.turn.run().answers == [(other, Receipt("r"))]


def test_second_subscribe_to_a_durable_subscription_waits_until_it_is_durable() -> None:
    engine = started()
    maker, other = engine.commands.connect("maker"), engine.commands.connect("other")
    engine.commands.subscribe(
        maker, Subscribe("1", parse_address("/topic/t", "maker"), AckMode.INDIVIDUAL, 100, durable_key="me,n")
    )
    engine.commands.disconnect(maker, is_exempt=True)
    engine.commands.subscribe(
        other, Subscribe("1", parse_address("/topic/t", "other"), AckMode.INDIVIDUAL, 100, durable_key="me,n")
    )
    engine.state.commit_state.answer(other, Receipt("r"))
    assert engine.turn.run().answers == []
    commit(engine)
    assert engine.turn.run().answers == [(other, Receipt("r"))]


def test_repeat_of_the_send_that_created_the_queue_of_a_virtual_topic_waits_for_it_too() -> None:
    engine = started()
    maker, other = engine.commands.connect("maker"), engine.commands.connect("other")
    send_to_it_with_a_number(engine, maker)
    send_to_it_with_a_number(engine, other)
    engine.state.commit_state.answer(other, Receipt("r", is_repeat=True))
    assert engine.turn.run().answers == []
    commit(engine)
    assert engine.turn.run().answers == [(other, Receipt("r", is_repeat=True))]


def test_queue_that_a_start_creates_for_scheduled_sends_is_durable_with_its_first_batch() -> None:
    run = Run()
    send(run.engine, run.session, f"/queue/{COLLECTS}", persistent=True, schedule=Schedule(delay_ms=1000))
    run.settle()
    # An earlier version wrote down what is scheduled and nothing else.
    (number,) = (number for number, name in run.store.recover().queues.items() if name == COLLECTS)
    without = Batch(run.engine.state.commit_state.last_committed + 1)
    without.queues[number] = ""
    run.store.apply(without)
    run.start_engine()
    assert COLLECTS in run.store.recover().queues.values()


# ---- Durable subscriptions, with what else there is ----

DURABLE = "subscription,me,n,t"


def follow(run: Run, topic: str = "t", *, selector_text: str = "", name: str = "1", durable: str = "me,n") -> None:
    chosen = selector.compile_selector(selector_text) if selector_text else None
    command = Subscribe(
        name, parse_address(f"/topic/{topic}", "s"), AckMode.INDIVIDUAL, 100, selector=chosen, durable_key=durable
    )
    run.engine.commands.subscribe(run.session, command)
    run.settle()


def publish(
    run: Run, body: str, colour: str = "", *, to: str = "/topic/t", transaction: str = "", in_ms: int | None = None
) -> None:
    message = SentMessage(4, True, 0, f"colour:{colour}\n".encode() if colour else b"", body.encode())
    schedule = None if in_ms is None else Schedule(delay_ms=in_ms)
    run.engine.commands.send(run.session, Send(parse_address(to, "s"), message, transaction or None, schedule=schedule))


def waiting(run: Run) -> dict[str, int]:
    return {queue.name: queue.waiting_count() for queue in run.engine.queues.by_name.values()}


def test_durable_subscription_keeps_only_selected_messages_also_after_a_restart() -> None:
    run = Run()
    follow(run, selector_text="colour = 'red, or so'")
    for _ in range(2):
        run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
        publish(run, "wanted", "red, or so")
        publish(run, "not", "blue")
        run.settle()
        run.start_engine()
        follow(run, selector_text="colour = 'red, or so'")
    (queue,) = run.engine.queues.by_name.values()
    assert len(list(run.engine.state.clients.held_by_consumers(queue))) == 2
    assert queue.name == "subscription,me,n,t,colour = 'red, or so'"
    assert queue not in run.engine.queues.selections.by_queue, "nothing is compared twice"


def test_a_selector_of_a_subscription_may_ask_when_the_message_came() -> None:
    run = Run()
    follow(run, selector_text=f"JMSTimestamp >= {NOON_MS + 10}")
    publish(run, "early")
    run.at(NOON_MS + 10)
    publish(run, "late")
    run.settle()
    (queue,) = run.engine.queues.by_name.values()
    assert len(list(run.engine.state.clients.held_by_consumers(queue))) == 1


def test_durable_subscription_starts_anew_with_another_selector_and_not_with_the_same() -> None:
    run = Run()
    follow(run, selector_text="colour = 'red'")
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    publish(run, "red", "red")
    follow(run, selector_text="colour = 'red'")
    assert (
        sum(
            len(list(run.engine.state.clients.held_by_consumers(queue))) for queue in run.engine.queues.by_name.values()
        )
        == 1
    )
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    follow(run, selector_text="colour = 'blue'")
    run.start_engine()
    assert waiting(run) == {"subscription,me,n,t,colour = 'blue'": 0}


@pytest.mark.parametrize("spelling", ["colour='red' and size>1", "((colour = 'red') AND size > 0x1)"])
def test_a_durable_subscription_whose_selector_is_spelled_differently_keeps_its_messages(spelling: str) -> None:
    # C6.6
    run = Run()
    follow(run, selector_text="colour = 'red' AND size > 1")
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    message = SentMessage(4, True, 0, b"colour:red\nsize:2\n", b"kept")
    run.engine.commands.send(run.session, Send(parse_address("/topic/t", "s"), message))
    run.settle()
    run.start_engine()
    follow(run, selector_text=spelling)
    (queue,) = run.engine.queues.by_name.values()
    assert len(list(run.engine.state.clients.held_by_consumers(queue))) == 1
    assert queue.name == f"{DURABLE},colour = 'red' AND size > 1"
    assert run.engine.commands.subscribing.take_discarded_subscription() is None


def test_subscribe_that_discards_messages_reports_their_number_and_both_destinations() -> None:
    # C6.5
    run = Run()
    follow(run, selector_text="colour = 'red'")
    publish(run, "acknowledged", "red")
    run.settle()
    run.engine.commands.begin(run.session, Begin("t"))
    (sequence,) = run.session.consumers["1"].held
    run.engine.commands.acknowledge(run.session, Ack("1", sequence, "t"))
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    publish(run, "waits", "red")
    publish(run, "not wanted", "blue")
    run.settle()
    follow(run, "other", selector_text="colour = 'blue'")
    discarded = run.engine.commands.subscribing.take_discarded_subscription()
    assert discarded is not None
    assert (discarded.durable_key, discarded.message_count) == ("me,n", 2)
    assert (discarded.old_destination.topic, discarded.old_destination.selector) == ("t", "colour = 'red'")
    assert (discarded.new_destination.topic, discarded.new_destination.selector) == ("other", "colour = 'blue'")
    assert run.engine.commands.subscribing.take_discarded_subscription() is None
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    follow(run)
    assert run.engine.commands.subscribing.take_discarded_subscription() is None, "nothing waited"


def test_a_durable_subscription_keeps_a_selector_that_is_refused_by_now() -> None:
    run = Run()
    run.engine.commands.subscribe(
        run.session,
        Subscribe(
            "1",
            parse_address("/topic/t", "s"),
            AckMode.INDIVIDUAL,
            selector=selector.compile_stored_selector("content-type > 1"),
            durable_key="me,n",
        ),
    )
    run.settle()
    run.start_engine()
    assert waiting(run) == {f"{DURABLE},content-type > 1": 0}


def test_scheduled_send_to_a_topic_goes_to_the_subscriptions_there_are_when_it_is_due() -> None:
    # C14.6
    run = Run()
    follow(run, durable="me,gone")
    publish(run, "later", to="/topic/t,/queue/q", in_ms=1000)
    assert run.engine.queues.scheduled_count("") == 1
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1", durable_key="me,gone"))
    run.settle()
    run.start_engine()
    follow(run)
    follow(run, name="2", durable="")
    follow(run, name="3", durable="", selector_text="colour = 'red'")
    run.at(NOON_MS + 1000)
    held = {consumer.subscription: len(consumer.held) for consumer in run.session.consumers.values()}
    assert held == {"1": 1, "2": 1, "3": 0}
    assert waiting(run)["q"] == 1
    assert run.engine.queues.scheduled_count("") == 0
    sequences = [next(iter(consumer.held), 0) for consumer in run.session.consumers.values()]
    sequences += [entry.sequence for entry in targets.queues(run.engine)["q"].lane(5).arrived]
    assert max(sequences) - min(filter(None, sequences)) == 2


def test_scheduled_send_to_a_topic_waits_for_its_commit_and_is_dropped_without_subscriptions() -> None:
    run = Run()
    run.engine.commands.begin(run.session, Begin("x"))
    publish(run, "later", transaction="x", in_ms=10)
    run.settle()
    assert run.engine.queues.scheduled_count("") == 0
    run.engine.commands.commit(run.session, Commit("x"))
    run.settle()
    assert run.engine.queues.scheduled_count("") == 1
    run.at(NOON_MS + 10)
    assert (run.engine.queues.scheduled_count(""), waiting(run)) == (0, {})


def test_repeated_send_to_a_topic_goes_there_every_time() -> None:
    run = Run()
    follow(run)
    message = SentMessage(4, True, 0, b"", b"tick")
    schedule = Schedule(delay_ms=5, period_ms=10, repeat=2)
    run.engine.commands.send(run.session, Send(parse_address("/topic/t", "s"), message, schedule=schedule))
    for at, count in ((5, 1), (15, 2), (25, 3), (100, 3)):
        run.at(NOON_MS + at)
        assert len(run.session.consumers["1"].held) == count


def test_a_piece_of_work_on_a_subscription_that_ends_meanwhile_takes_nothing_and_says_so() -> None:
    run = Run()
    follow(run)
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    publish(run, "m")
    run.settle()
    request = bulk.Purge(DURABLE, after=(5, 0))
    read = run.engine.tasks.bulk_pieces.next_read(request)
    assert read is not None
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1", durable_key="me,n"))
    answer = run.engine.tasks.bulk_pieces.execute(request, read, PageResult([], 0, True))
    assert (answer.count, answer.next) == (0, None)
    assert "does not exist any more" in answer.error
    with pytest.raises(RemoteProtocolError, match="there is no queue"):
        run.engine.tasks.bulk_pieces.next_read(request)
    run.settle()
    assert waiting(run) == {}


def test_a_browse_of_a_subscription_ends_with_it_and_shows_nothing_of_a_page_that_comes_later() -> None:
    run = Run()
    follow(run)
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    publish(run, "m")
    run.settle()
    run.start_engine()
    run.engine.commands.browse(run.session, Browse("b", parse_address("/subscription/me,n", "s")))
    effects = run.engine.turn.run()
    (read,) = effects.reads
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1", durable_key="me,n"))
    page = read_page(run.store, read)
    found = [found_of(one) for one in page.messages]
    run.engine.store_results.on_page_read(read, PageResult(found, page.as_of, page.is_end))
    shown = [run.engine.turn.run().browse_slices for _ in range(3)]
    assert [[entry for each in turn for entry in each.entries] for turn in shown] == [[], [], []]
    assert any(each.is_end for turn in shown for each in turn)


def test_browse_of_a_missing_durable_subscription_is_refused() -> None:
    run = Run()
    with pytest.raises(RemoteProtocolError, match="there is no durable subscription"):
        run.engine.commands.browse(run.session, Browse("b", parse_address("/subscription/me,n", "s")))


def test_the_next_queue_with_the_number_of_a_paused_subscription_is_not_paused_after_a_restart() -> None:
    run = Run()
    follow(run)
    run.engine.commands.administering.pause(DURABLE)
    run.settle()
    number = targets.queues(run.engine)[DURABLE].number
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1", durable_key="me,n"))
    run.settle()
    publish(run, "m", to="/queue/q")
    run.settle()
    assert targets.queues(run.engine)["q"].number == number
    assert run.store.recover().paused == set()


def test_a_scheduled_send_may_wait_under_the_number_of_an_ended_subscription() -> None:
    run = Run()
    follow(run)
    publish(run, "held")
    run.settle()
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1", durable_key="me,n"))
    run.settle()
    publish(run, "later", in_ms=10)
    run.settle()
    run.start_engine()
    follow(run)
    run.at(NOON_MS + 10)
    assert len(run.session.consumers["1"].held) == 1


@pytest.mark.parametrize("name", ["a,/queue/b", "a,b", DURABLE])
def test_no_name_with_a_comma_becomes_a_queue(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="comma"):
        parse_queue_name(name)
    with pytest.raises(RemoteProtocolError, match="comma"):
        Run().engine.commands.administering.pause(name)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("a.*", ["a.b"]),
        ("*.b", ["a.b", "c.b"]),
        (">", ["a", "a.b", "a.b.c", "c.b"]),
        ("*", ["a"]),
        ("a.>", ["a.b", "a.b.c"]),
        ("c.*", ["c.b"]),
    ],
)
def test_pattern_of_topics_matches_by_its_words_among_many_others(pattern: str, meant: list[str]) -> None:
    engine = started()
    session = engine.commands.connect("s")
    for number, each in enumerate(["a.*", "c.>", "*", "*.*.*", "b.*", pattern]):
        address = parse_address(f"/topic/{each}", session.id)
        engine.commands.subscribe(session, Subscribe(str(number), address, AckMode.AUTO, 30_000))
    queue = session.consumers["5"].queue
    assert queue is not None
    for topic in ("a", "a.b", "a.b.c", "c.b"):
        send(engine, session, f"/topic/{topic}")
        assert queue.waiting_count() == (topic in meant)
        engine.turn.run()
        engine.commands.on_all_sent(session)
    for number in range(6):
        engine.commands.unsubscribe(session, Unsubscribe(str(number)))
    assert not targets.topic_patterns(engine)


# ---- Queues found ahead ----

WORDS = ["a", "b", "VirtualTopic"]
SELECTORS = ["", "n = '1'", "n LIKE '%1%' OR m = 'x'", "m = 'x'"]


class TopicState(RuleBasedStateMachine):
    """Subscriptions come and go while the queues of messages are found ahead; a naive search says what is right."""

    def __init__(self) -> None:
        super().__init__()
        self.router = topics.TopicRouter()
        self.queues: list[Queue] = []
        self.searches: list[tuple[topics.RouteAhead, str, SentMessage, Iterator[None]]] = []

    @rule(
        topic=st.lists(st.sampled_from([*WORDS, "*", ">"]), min_size=1, max_size=3), selector=st.sampled_from(SELECTORS)
    )
    def subscribe(self, topic: list[str], selector: str) -> None:
        name = ".".join(word for word in topic[:-1] if word != ">") + "." * (len(topic) > 1) + topic[-1]
        destination = Destination(
            DestinationKind.TEMPORARY, f"/s//{len(self.queues)}", "s", topic=name.lstrip("."), selector=selector
        )
        queue = Queue(destination, 0, Policy(), MemoryBudget())
        self.router.add(queue)
        self.queues.append(queue)

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        self.router.remove(self.queues.pop(data.draw(st.integers(0, len(self.queues) - 1))))

    @rule(topic=st.lists(st.sampled_from(WORDS), min_size=1, max_size=3), number=st.sampled_from("123"))
    def search(self, topic: list[str], number: str) -> None:
        message = SentMessage(4, False, 0, f"n:{number}\n".encode(), b"")
        ahead = topics.RouteAhead(self.router)
        self.searches.append((ahead, ".".join(topic), message, ahead.find(".".join(topic), message)))

    @precondition(lambda self: self.searches)
    @rule(data=st.data(), steps=st.integers(1, 3))
    def go_on(self, data: st.DataObject, steps: int) -> None:
        index = data.draw(st.integers(0, len(self.searches) - 1))
        ahead, topic, message, pieces = self.searches[index]
        for _ in range(steps):
            if next(pieces, "end") == "end":
                # A search may begin again, as after a later check of what it left.
                self.searches[index] = (ahead, topic, message, ahead.find(topic, message))
                break

    @precondition(lambda self: self.searches)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        ahead, topic, message, _ = self.searches.pop(data.draw(st.integers(0, len(self.searches) - 1)))
        expected = {queue for queue in self.queues if self._gets(queue, topic, message)}
        found = ahead.queues_of(topic, message)
        assert len(found) == len(expected) and set(found) == expected
        assert set(self.router.queues_of(topic, message)) == expected
        assert ahead.count <= len(self.queues)

    def _gets(self, queue: Queue, topic: str, message: SentMessage) -> bool:
        pattern = queue.destination.topic
        regex = re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+")
        chosen = queue.destination.selector
        return re.fullmatch(regex, topic) is not None and (
            not chosen or selector.compile_selector(chosen).matches(message)
        )


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each comparison a piece of its own where queues are found ahead."""
    monkeypatch.setattr(topics, "PIECE_NS", topics.MATCH_NS)


def test_queues_found_ahead_are_those_of_the_subscriptions_at_acceptance() -> None:
    run_state_machine_as_test(
        TopicState,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def run_ahead(engine: Engine, session: ConnectionState, command: Send | Commit) -> int:
    """Find the queues of a command ahead, if the engine asks for that; return the number of pieces."""
    steps = engine.commands.sending.find_queues_ahead(session, command)
    return 0 if steps is None else sum(1 for _ in steps)


def subscribe_to(engine: Engine, session: ConnectionState, count: int, text: str, address: str = "/topic/t") -> None:
    for number in range(count):
        chosen = selector.compile_selector(text.format(number))
        destination = parse_address(address, session.id)
        engine.commands.subscribe(
            session, Subscribe(f"{address} {len(session.consumers)}", destination, AckMode.AUTO, 100, selector=chosen)
        )


@pytest.mark.parametrize("is_in_transaction", [False, True])
def test_send_with_costly_selectors_is_found_ahead_in_pieces_and_compares_only_later_subscriptions(
    is_in_transaction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started()
    session = engine.commands.connect("s")
    subscribe_to(engine, session, 40, "a LIKE '%" + "_" * 100 + "{}%'")
    message = SentMessage(4, False, 0, b"a:" + b"1" * 60_000 + b"\n", b"")
    destination = parse_address("/topic/t", "s")
    # The first message finds the route.
    engine.commands.send(session, Send(destination, SentMessage(4, False, 0, b"", b"")))
    send = Send(destination, message, "t" if is_in_transaction else None)
    command: Send | Commit = send
    if is_in_transaction:
        engine.commands.begin(session, Begin("t"))
        assert run_ahead(engine, session, send) == 0
        engine.commands.send(session, send)
        command = Commit("t")
    assert run_ahead(engine, session, command) >= 40
    assert run_ahead(engine, session, command) == 0
    subscribe_to(engine, session, 2, "a LIKE '%1{}%'")
    compared: list[str] = []
    matches = selector.Selector.matches

    def counted(one: selector.Selector, to: SentMessage) -> bool:
        compared.append(one.text)
        return matches(one, to)

    monkeypatch.setattr(selector.Selector, "matches", counted)
    if isinstance(command, Commit):
        engine.commands.commit(session, command)
    else:
        engine.commands.send(session, command)
    assert compared == ["a LIKE '%11%'", "a LIKE '%10%'"]
    deliveries = engine.turn.run().deliveries
    assert sorted(consumer.subscription for consumer in deliveries) == [
        "/topic/t 1",
        "/topic/t 11",
        "/topic/t 41",
    ]


def test_due_send_with_costly_selectors_is_found_ahead_and_keeps_its_order() -> None:
    run = Run()
    subscribe_to(run.engine, run.session, 30, "a LIKE '%" + "_" * 100 + "{}%'", "/topic/t")
    for number, text in enumerate(["1", "2", "1"]):
        header = b"a:" + text.encode() * 60_000 + b"\n"
        message = SentMessage(4, True, 0, header, str(number).encode())
        schedule = Schedule(delay_ms=1000 + number)
        run.engine.commands.send(run.session, Send(parse_address("/topic/t", "s"), message, schedule=schedule))
    run.settle()
    run.at(NOON_MS + 2000)
    got = {
        entry.sequence: (consumer.subscription, entry.message.body)
        for consumer in run.session.consumers.values()
        for entry in consumer.held.values()
        if entry.message is not None
    }
    in_order = [got[sequence] for sequence in sorted(got)]
    assert in_order == [
        (f"/topic/t {subscriber}", body)
        for body, subscribers in ((b"0", (1, 11)), (b"1", (2, 22)), (b"2", (1, 11)))
        for subscriber in subscribers
    ]


# ---- Limits ----


def test_more_copies_than_one_command_may_make_are_refused_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    # C6.15
    monkeypatch.setattr("truenext.engine.commands.sending.COPIES_MAX", 5)
    engine = Engine(transaction_limits=TransactionLimits(messages=4))
    engine.lifespan.start()
    commit(engine)
    session = engine.commands.connect("s")
    for number in range(3):
        subscribe_as(engine, session, str(number), "/topic/t")
        subscribe_as(engine, session, f"u{number}", "/topic/u")
    with pytest.raises(RemoteProtocolError, match="6 copies, more than the 5 that one SEND or COMMIT may make"):
        send(engine, session, "/topic/t,/topic/u")
    engine.commands.begin(session, Begin("t"))
    for _ in range(2):
        engine.commands.send(session, Send(parse_address("/topic/t", "s"), SentMessage(4, False, 0, b"", b""), "t"))
    with pytest.raises(RemoteProtocolError, match="6 copies, more than the 5"):
        engine.commands.commit(session, Commit("t"))
    assert not engine.turn.run().deliveries and "t" in session.transactions
    grouped = Send(parse_address("/topic/t", "s"), SentMessage(4, False, 0, b"", b"", group="g"))
    with pytest.raises(
        RemoteProtocolError, match=r"6 copies, more than the 5 .* with a group or an expiry count twice"
    ):
        engine.commands.send(session, grouped)
    assert not engine.turn.run().deliveries


def test_topic_and_patterns_have_at_most_so_many_subscriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    # C6.16
    monkeypatch.setattr(topics, "TOPIC_SUBSCRIPTIONS_MAX", 2)
    engine = started()
    session = engine.commands.connect("s")
    for name, address in [
        ("1", "/topic/t"),
        ("2", "/topic/t"),
        ("3", "/topic/*"),
        ("4", "/topic/>"),
        ("5", "/topic/u"),
    ]:
        subscribe_as(engine, session, name, address)
    for address, of in [("/topic/t", "to topic 't'"), ("/topic/a.>", "to patterns of topics")]:
        with pytest.raises(RemoteProtocolError, match=f"2 subscriptions {of}, the most allowed"):
            subscribe_as(engine, session, "6", address)
        with pytest.raises(RemoteProtocolError, match=f"2 subscriptions {of}, the most allowed"):
            engine.commands.subscribe(
                session, Subscribe("7", parse_address(address, "s"), AckMode.INDIVIDUAL, 100, durable_key="me,x")
            )
    engine.commands.unsubscribe(session, Unsubscribe("1"))
    engine.commands.unsubscribe(session, Unsubscribe("4"))
    subscribe_as(engine, session, "6", "/topic/t")
    subscribe_as(engine, session, "7", "/topic/a.>")
