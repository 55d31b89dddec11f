"""Tests of unused queues: when they are removed and created again. More are in tests/property."""

import gc
import tracemalloc
from collections.abc import Callable
from sys import maxsize

import pytest

from tests.drawing import one_of
from tests.property import targets
from tests.property.disk import found_of
from tests.unit.inspection import groups_of
from tests.unit.test_schedule import NOON_MS, Run
from truenext.broker.pager import read_page
from truenext.engine.background.bulk import Move, Purge
from truenext.engine.engine import Engine
from truenext.engine.queues import queues as queues_module
from truenext.engine.state import memory as memory_module
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.memory import EMPTY, JOIN_BYTES, LANE_BYTES, NO_SEQUENCES, QUEUE_BYTES, add_sequence
from truenext.engine.state.pages import PageResult, StoreRead
from truenext.engine.state.queue import Entry, Queue
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import EventLog
from truenext.errors import RemoteProtocolError
from truenext.model.commands import Abort, Ack, AckMode, Begin, Browse, Commit, Nack, Send, Subscribe, Unsubscribe
from truenext.model.destination import parse_address
from truenext.model.limits import HISTORY_FILE_BYTES, SUBSCRIPTIONS_MAX
from truenext.model.message import SentMessage
from truenext.model.schedule import Schedule
from truenext.model.selector import compile_selector

EACH = QUEUE_BYTES + LANE_BYTES


class Passing(Run):
    """A run in which time passes, and queues go."""

    def __init__(self, *, capacity: int | None = None) -> None:
        """`capacity` is the number of queues of one lane for which there is room; None is any number."""
        self.seconds = 0
        self.capacity = capacity
        super().__init__()

    def start_engine(self) -> None:
        super().start_engine()
        if self.capacity is not None:
            self.engine.state.memory.queues_limit = self.capacity * EACH
        self.advance(0)

    def advance(self, seconds: int) -> None:
        """And the broker looks once a second, as it does."""
        for _ in range(seconds + 1):
            self.engine.state.commit_state.tick(NOON_MS * 1000 + self.seconds * 1_000_000, self.seconds * 1_000_000)
            self.seconds += 1
            self.engine.remove_unused_queues()
            self.settle()

    def read(self, read: StoreRead) -> PageResult:
        page = read_page(self.store, read)
        return PageResult([found_of(one) for one in page.messages], page.as_of, page.is_end)

    def publish(self, queue: str, body: str = "m", *, persistent: bool = True, transaction: str | None = None) -> None:
        message = SentMessage(4, persistent, 0, b"content-length:%d\n" % len(body), body.encode())
        self.engine.commands.send(self.session, Send(parse_address(f"/queue/{queue}", "s"), message, transaction))

    def follow(self, pattern: str, name: str = "1") -> BrokerConsumer:
        destination = parse_address(f"/queue/{pattern}", "s")
        self.engine.commands.subscribe(self.session, Subscribe(name, destination, AckMode.INDIVIDUAL, 1000))
        return self.session.consumers[name]

    def receive(self, queue: str) -> None:
        """Consume all messages of the queue, and unsubscribe."""
        consumer = self.follow(queue, "taker")
        self.settle()
        for sequence in list(consumer.held):
            self.engine.commands.acknowledge(self.session, Ack("taker", sequence))
        self.engine.commands.unsubscribe(self.session, Unsubscribe("taker"))
        self.settle()

    def use(self, queue: str, *, persistent: bool = True) -> None:
        self.publish(queue, persistent=persistent)
        self.settle()
        self.receive(queue)

    def names(self) -> list[str]:
        return sorted(queue.name for queue in self.engine.queues.by_name.values())


def queue_of(run: Passing, name: str) -> Queue:
    return targets.queues(run.engine)[name]


def stored(run: Run) -> list[str]:
    return sorted(run.store._queues.values())


@pytest.mark.parametrize("persistent", [True, False])
def test_a_queue_that_is_empty_and_unused_goes_after_a_minute_and_comes_back_when_it_is_named(persistent: bool) -> None:
    # C8.2, C8.5
    run = Passing()
    run.use("q", persistent=persistent)
    run.advance(55)
    assert run.names() == ["q"]
    run.advance(10)
    assert (run.names(), stored(run), run.engine.state.memory.queue_bytes, run.engine.state.memory.deque_bytes) == (
        [],
        [],
        0,
        0,
    )
    run.publish("q", "again")
    run.settle()
    assert run.names() == ["q"]
    (entry,) = queue_of(run, "q").lane(5)
    assert entry.message is not None and entry.message.body == b"again"


def test_unused_queue_goes_by_whichever_command_it_was_made() -> None:
    run = Passing()
    run.follow("by subscribe")
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.engine.commands.administering.pause("by pause")
    run.engine.commands.administering.resume("by pause")
    run.publish("by move")
    run.engine.commands.administering.pause("by move")
    run.settle()
    assert run.names() == ["by move", "by pause", "by subscribe"]
    run.advance(65)
    assert run.names() == ["by move"]


def test_queue_with_a_waiting_message_stays() -> None:
    run = Passing()
    run.publish("q", persistent=False)
    run.advance(200)
    assert run.names() == ["q"]


def test_a_queue_with_a_consumer_stays() -> None:
    run = Passing()
    run.follow("q")
    run.advance(200)
    assert run.names() == ["q"]


def test_queue_of_a_message_acknowledged_in_an_open_transaction_stays_and_gets_it_back() -> None:
    run = Passing()
    run.publish("q")
    consumer = run.follow("q")
    run.settle()
    (sequence,) = consumer.held
    run.engine.commands.begin(run.session, Begin("t"))
    run.engine.commands.acknowledge(run.session, Ack("1", sequence, "t"))
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.advance(200)
    assert run.names() == ["q"]
    run.engine.commands.abort(run.session, Abort("t"))
    run.advance(200)
    assert queue_of(run, "q").waiting_count() == 1


def test_queue_of_an_evicted_message_acknowledged_in_an_open_transaction_stays_too() -> None:
    run = Passing()
    run.publish("q")
    consumer = run.follow("q")
    run.settle()
    (sequence,) = consumer.held
    memory = run.engine.state.memory
    memory.limit = 0
    run.engine.evict()
    memory.limit = maxsize
    assert memory.message_bytes == 0
    run.engine.commands.begin(run.session, Begin("t"))
    run.engine.commands.acknowledge(run.session, Ack("1", sequence, "t"))
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.advance(200)
    assert run.names() == ["q"]
    run.engine.commands.abort(run.session, Abort("t"))
    run.advance(200)
    assert queue_of(run, "q").waiting_count() == 1
    run.receive("q")
    run.advance(65)
    assert run.names() == []


def test_a_paused_queue_stays_and_goes_once_it_is_resumed() -> None:
    run = Passing()
    run.engine.commands.administering.pause("q")
    run.advance(200)
    assert run.names() == ["q"]
    run.engine.commands.administering.resume("q")
    run.advance(65)
    assert (run.names(), stored(run), run.store.recover().paused) == ([], [], set())


def test_the_next_queue_with_the_number_of_one_that_was_paused_is_not() -> None:
    run = Passing()
    run.engine.commands.administering.pause("q")
    run.settle()
    number = queue_of(run, "q").number
    # Resumed and gone in one batch.
    run.engine.commands.administering.resume("q")
    run.engine.state.commit_state.tick(NOON_MS * 1000, 65_000_000)
    run.engine.remove_unused_queues()
    batch = run.engine.take_batch()
    assert batch is not None and (batch.queues, batch.paused) == ({number: ""}, {number: False})
    run.apply(batch)
    run.publish("next")
    run.settle()
    assert queue_of(run, "next").number == number
    assert run.store.recover().paused == set()


def test_the_queue_of_a_virtual_topic_stays_because_it_collects_by_being_there() -> None:
    run = Passing()
    run.use("Consumer.a.VirtualTopic.t")
    run.use("Consumer.a.b")
    run.advance(200)
    assert run.names() == ["Consumer.a.VirtualTopic.t"]
    run.engine.commands.send(
        run.session, Send(parse_address("/topic/VirtualTopic.t", "s"), SentMessage(4, True, 0, b"", b"m"))
    )
    assert queue_of(run, "Consumer.a.VirtualTopic.t").waiting_count() == 1


def test_a_durable_subscription_stays() -> None:
    run = Passing()
    destination = parse_address("/topic/news", "s")
    run.engine.commands.subscribe(run.session, Subscribe("1", destination, AckMode.INDIVIDUAL, 10, durable_key="me,n"))
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.advance(200)
    assert run.names() == ["subscription,me,n,news"] == stored(run)


def test_queue_with_a_scheduled_send_stays_until_that_is_consumed_and_both_its_queues_go() -> None:
    run = Passing()
    run.send("later", Schedule(delay_ms=100_000))
    run.settle()
    run.advance(90)
    assert run.waiting() == {"q": (0, 1)} and stored(run) == ["/scheduled/q"]
    run.advance(20)
    assert run.waiting() == {"q": (1, 0)}
    run.receive("q")
    run.advance(65)
    assert (run.names(), targets.names_of_scheduled(run.engine), stored(run)) == ([], [], [])
    run.send("again", Schedule(delay_ms=1000))
    run.advance(5)
    assert run.waiting() == {"q": (1, 0)}


def test_a_dead_letter_queue_goes_and_comes_back_with_the_next_dead_letter() -> None:
    run = Passing()
    for _ in range(2):
        run.publish("q")
        consumer = run.follow("q")
        run.settle()
        (sequence,) = consumer.held
        run.engine.commands.nack(run.session, Nack("1", sequence, is_rejected=True))
        run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
        run.settle()
        assert queue_of(run, "DLQ.q").waiting_count() == 1
        run.receive("DLQ.q")
        run.advance(65)
        assert run.names() == []


def test_a_browsed_queue_stays_until_all_was_shown() -> None:
    run = Passing()
    run.use("q")
    run.session.unsent_bytes = run.engine.state.memory.unsent_bytes = 2 << 20
    run.engine.commands.browse(run.session, Browse("b", parse_address("/queue/q", "s")))
    run.advance(65)
    assert run.names() == ["q"]
    run.engine.commands.on_all_sent(run.session)
    run.advance(65)
    assert run.names() == []


def test_queue_stays_while_bulk_work_reads_its_page_and_later_pieces_find_no_message() -> None:
    run = Passing()
    run.publish("q")
    run.settle()
    request = Purge("q")
    read = run.engine.tasks.bulk_pieces.next_read(request)
    assert read is not None
    run.receive("q")
    run.advance(65)
    assert run.names() == ["q"]
    read.finish()
    targets.UNPIN.of(run.engine)(read.lane)
    run.advance(5)
    assert run.names() == []
    with pytest.raises(RemoteProtocolError, match="there is no queue 'q'"):
        run.engine.tasks.bulk_pieces.check_request(request)
    for following in (Purge("q", after=(5, 1), until=9), Move("q", after=(5, 1), until=9, to="p")):
        run.engine.tasks.bulk_pieces.check_request(following)
        assert run.engine.tasks.bulk_pieces.next_read(following) is None


def test_purged_queue_goes_after_a_late_page_although_no_batch_is_written_any_more() -> None:
    run = Passing()
    run.publish("q")
    run.settle()
    run.engine.state.memory.limit = 0
    run.engine.evict()
    run.settle()
    run.engine.state.memory.limit = maxsize
    run.engine.commands.browse(run.session, Browse("b", parse_address("/queue/q", "s")))
    (browsed,) = run.engine.turn.run().reads
    read = run.engine.tasks.bulk_pieces.next_read(Purge("q"))
    assert read is not None
    purged = run.read(read)
    late = run.read(browsed)
    run.engine.tasks.bulk_pieces.execute(Purge("q"), read, purged)
    run.settle()
    run.engine.store_results.on_page_read(browsed, late)
    run.settle()
    run.advance(65)
    assert run.names() == []


# Wildcards


def test_a_queue_that_only_a_wildcard_takes_from_goes_and_is_its_again_when_it_comes_back() -> None:
    # C8.3
    run = Passing()
    wildcard = run.follow("orders.*")
    for number in range(3):
        run.publish("orders.new", str(number))
        run.settle()
        (sequence,) = wildcard.held
        run.advance(65)
        assert run.names() == ["orders.new"], "it holds one"
        run.engine.commands.acknowledge(run.session, Ack("1", sequence))
        run.advance(65)
        assert (run.names(), wildcard.all_queues()) == ([], [])
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    assert run.engine.state.memory.queue_bytes == 0


def test_a_wildcard_gets_messages_in_order_while_its_queues_come_and_go() -> None:
    run = Passing()
    wildcard = run.follow("orders.>")
    wildcard.window = 2
    got: list[bytes] = []
    for round_number in range(20):
        for each in ("orders.a", "orders.b", f"orders.{round_number}"):
            run.publish(each, f"{round_number}", persistent=round_number % 2 == 0)
        run.settle()
        while wildcard.held:
            sequence, entry = next(iter(wildcard.held.items()))
            assert entry.message is not None
            got.append(entry.message.body)
            run.engine.commands.acknowledge(run.session, Ack("1", sequence))
            run.settle()
        run.advance(65 if round_number % 3 else 1)
    assert got == [b"%d" % number for number in range(20) for _ in range(3)]


def test_the_groups_of_a_queue_that_comes_back_are_free() -> None:
    # C5.7, C8.4
    run = Passing()
    wildcard = run.follow("orders.*")
    message = SentMessage(4, True, 0, b"JMSXGroupID:g\n", b"", group="g")
    is_first: list[bool] = []
    for seconds in (1, 65, 0):
        run.engine.commands.send(run.session, Send(parse_address("/queue/orders.new", "s"), message))
        run.settle()
        (entry,) = wildcard.held.values()
        is_first.append(entry.is_first_of_group)
        run.engine.commands.acknowledge(run.session, Ack("1", entry.sequence))
        run.advance(seconds)
    assert is_first == [True, False, True]


# Room


def test_a_name_more_than_memory_allows_is_refused_with_the_limit_and_its_setting() -> None:
    # C8.6, C24.10
    run = Passing(capacity=10)
    for number in range(10):
        run.publish(f"q{number}")
    with pytest.raises(RemoteProtocolError, match=r"no memory for another queue: 10 queues .* --memory-limit"):
        run.publish("one more")
    with pytest.raises(RemoteProtocolError, match="no memory for another queue"):
        run.follow("one more")
    run.publish("q3")
    run.settle()
    assert len(run.names()) == 10


def test_queues_not_used_for_a_second_are_removed_if_there_is_no_room() -> None:
    # C8.5
    run = Passing(capacity=10)
    for number in range(100):
        run.use(f"q{number}")
        run.seconds += 1
        run.engine.state.commit_state.tick(NOON_MS * 1000, run.seconds * 1_000_000)
    assert len(run.names()) <= 10
    assert run.names()[-1] == "q99"


def test_queues_used_within_the_last_second_are_not_removed_for_another() -> None:
    run = Passing(capacity=10)
    for number in range(10):
        run.use(f"q{number}")
    with pytest.raises(RemoteProtocolError, match="no memory"):
        run.publish("one more")
    assert len(run.names()) == 10


def test_a_message_to_several_new_queues_is_in_all_of_them_or_in_none() -> None:
    run = Passing(capacity=10)
    for number in range(9):
        run.use(f"q{number}")
    run.advance(2)
    run.publish("a,/queue/b,/queue/c,/queue/d")
    run.settle()
    assert [queue_of(run, name).waiting_count() for name in "abcd"] == [1, 1, 1, 1]


def full() -> Passing:
    run = Passing(capacity=4)
    for number in range(4):
        run.publish(f"q{number}")
    run.settle()
    with pytest.raises(RemoteProtocolError, match="no memory"):
        run.publish("one more")
    return run


def test_no_dead_letter_is_refused_for_want_of_a_queue() -> None:
    # C8.6
    run = full()
    consumer = run.follow("q0")
    run.settle()
    run.engine.commands.nack(run.session, Nack("1", next(iter(consumer.held)), is_rejected=True))
    run.settle()
    assert queue_of(run, "DLQ.q0").waiting_count() == 1


def test_a_send_in_a_transaction_is_refused_at_once_and_no_commit_is() -> None:
    # C8.6
    run = Passing(capacity=4)
    run.engine.commands.begin(run.session, Begin("t"))
    run.publish("in transaction", transaction="t")
    run.publish("also", transaction="t")
    for number in range(2):
        run.publish(f"q{number}")
    with pytest.raises(RemoteProtocolError, match="no memory"):
        run.publish("one more", transaction="t")
    run.engine.commands.commit(run.session, Commit("t"))
    run.settle()
    assert queue_of(run, "in transaction").waiting_count() == 1


def test_room_for_queues_of_open_transactions_is_reserved_and_commits_stay_within_the_limit() -> None:
    # C8.7
    run = Passing(capacity=4)
    names = ["one", "two", "three"]
    for name in names:
        run.engine.commands.begin(run.session, Begin(name))
        run.publish(name, transaction=name)
        run.publish(name, transaction=name)
    run.publish("the last")
    for transaction in (*names, None):
        with pytest.raises(RemoteProtocolError, match="no memory"):
            run.publish("one more", transaction=transaction)
    for name in names:
        run.engine.commands.commit(run.session, Commit(name))
    run.settle()
    assert [queue_of(run, name).waiting_count() for name in names] == [2, 2, 2]
    assert run.engine.state.memory.queue_bytes <= run.engine.state.memory.queues_limit


@pytest.mark.parametrize("end", ["abort", "lost", "commit"])
def test_room_reserved_for_a_transaction_is_free_when_that_ends(end: str) -> None:
    # C8.7
    run = Passing(capacity=2)
    before = run.engine.state.memory.queue_bytes
    other = run.engine.commands.connect("other")
    run.engine.commands.begin(other, Begin("t"))
    for name in ("a", "b", "a"):
        run.engine.commands.send(
            other, Send(parse_address(f"/queue/{name}", "other"), SentMessage(4, True, 0, b"", b""), "t")
        )
    with pytest.raises(RemoteProtocolError, match="no memory"):
        run.publish("q0")
    if end == "commit":
        run.engine.commands.commit(other, Commit("t"))
        assert {queue_of(run, name).waiting_count() for name in "ab"} == {1, 2}
        return
    if end == "abort":
        run.engine.commands.abort(other, Abort("t"))
    else:
        run.engine.commands.disconnect(other, is_exempt=False)
    assert run.engine.state.memory.queue_bytes == before
    run.publish("q0")


def test_a_send_that_is_refused_for_one_of_several_queues_keeps_room_for_none() -> None:
    run = Passing(capacity=2)
    before = run.engine.state.memory.queue_bytes
    run.engine.commands.begin(run.session, Begin("t"))
    with pytest.raises(RemoteProtocolError, match="no memory"):
        run.publish("a,/queue/b,/queue/c", transaction="t")
    assert run.engine.state.memory.queue_bytes == before
    run.publish("a,/queue/b", transaction="t")
    run.engine.commands.commit(run.session, Commit("t"))
    assert queue_of(run, "a").waiting_count() == queue_of(run, "b").waiting_count() == 1


def test_a_queue_to_which_an_open_transaction_sends_does_not_go() -> None:
    run = Passing()
    run.follow("a")
    run.engine.commands.begin(run.session, Begin("t"))
    run.publish("a", transaction="t")
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.advance(200)
    assert queue_of(run, "a").waiting_count() == 0
    run.engine.commands.abort(run.session, Abort("t"))
    run.advance(200)
    assert "a" not in {queue.name for queue in run.engine.queues.by_name.values()}


def test_a_scheduled_send_in_a_transaction_keeps_room_for_where_it_waits_too() -> None:
    # C8.7
    run = Passing(capacity=3)
    run.engine.commands.begin(run.session, Begin("t"))
    later = Send(
        parse_address("/queue/a", "s"), SentMessage(4, True, 0, b"", b""), "t", schedule=Schedule(delay_ms=1000)
    )
    run.engine.commands.send(run.session, later)
    run.publish("b")
    with pytest.raises(RemoteProtocolError, match="no memory"):
        run.publish("c")
    run.engine.commands.commit(run.session, Commit("t"))
    assert run.engine.state.memory.queue_bytes <= run.engine.state.memory.queues_limit


def test_temporary_queues_that_open_transactions_send_to_count_as_those_of_their_connection() -> None:
    # C8.7
    run = Passing()
    run.engine.commands.begin(run.session, Begin("t"))
    for number in range(SUBSCRIPTIONS_MAX):
        send = Send(parse_address(f"/temp-queue/{number}", "s"), SentMessage(4, False, 0, b"", b""), "t")
        run.engine.commands.send(run.session, send)
    with pytest.raises(RemoteProtocolError, match="this connection has 1000 temporary queues"):
        run.engine.commands.send(
            run.session, Send(parse_address("/temp-queue/x", "s"), SentMessage(4, False, 0, b"", b""), "t")
        )
    run.engine.commands.commit(run.session, Commit("t"))
    assert len(run.session.temporary_queues) == SUBSCRIPTIONS_MAX


def test_scheduled_send_becomes_a_message_although_there_is_no_room_for_its_queue() -> None:
    # C8.6
    run = Passing(capacity=4)
    run.send("later", Schedule(delay_ms=1000), queue="later")
    run.settle()
    for number in range(2):
        run.publish(f"q{number}")
    with pytest.raises(RemoteProtocolError, match="no memory"):
        run.publish("one more")
    run.advance(5)
    assert queue_of(run, "later").waiting_count() == 1


def test_repeated_refused_sends_do_not_have_all_queues_checked_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = full()
    checked: list[str] = []

    def run_checks(*_: object) -> int:
        checked.append("at all")
        return 0

    monkeypatch.setattr(queues_module.Queues, "_remove_unused", run_checks)
    for _ in range(100):
        with pytest.raises(RemoteProtocolError):
            run.publish("one more")
    assert checked == []


def test_queues_take_nothing_from_messages_and_messages_nothing_from_queues() -> None:
    # C24.10
    run = Passing(capacity=100)
    memory = run.engine.state.memory
    excess = memory.bytes_over_limit
    for number in range(99):
        run.engine.commands.administering.pause(f"q{number}")
    assert memory.bytes_over_limit == excess
    memory.message_bytes = maxsize
    assert memory.has_space_for_queue
    memory.message_bytes = 0
    memory.queue_bytes = memory.queues_limit
    assert memory.bytes_over_limit == excess and not memory.has_space_for_queue


# Numbers


def test_a_number_is_given_again_once_all_of_its_queue_is_durably_gone() -> None:
    run = Passing()
    run.use("q")
    number = queue_of(run, "q").number
    run.seconds += 65
    run.engine.state.commit_state.tick(NOON_MS * 1000, run.seconds * 1_000_000)
    run.engine.remove_unused_queues()
    run.publish("while it goes")
    batch = run.engine.take_batch()
    assert batch is not None and batch.queues == {number: "", number + 1: "while it goes"}
    run.publish("while that is written")
    assert queue_of(run, "while that is written").number == number + 2
    run.apply(batch)
    run.publish("after that")
    assert queue_of(run, "after that").number == number
    run.settle()
    run.start_engine()
    assert run.names() == ["after that", "while it goes", "while that is written"]


def test_a_queue_that_comes_and_goes_within_a_batch_leaves_no_trace() -> None:
    run = Passing()
    number = targets.last_number(run.engine)
    run.engine.commands.administering.pause("q")
    run.engine.commands.administering.resume("q")
    run.seconds += 65
    run.engine.state.commit_state.tick(NOON_MS * 1000, run.seconds * 1_000_000)
    run.engine.remove_unused_queues()
    assert run.engine.take_batch() is None
    run.publish("next")
    assert queue_of(run, "next").number == number + 2
    run.settle()
    assert targets.NEW_NUMBER.of(run.engine)() == number + 1


def test_the_name_of_an_ended_subscription_goes_with_the_last_of_it() -> None:
    run = Passing()
    run.engine.commands.subscribe(
        run.session, Subscribe("1", parse_address("/topic/t", "s"), AckMode.INDIVIDUAL, 1, durable_key="me,n")
    )
    number = queue_of(run, "subscription,me,n,t").number
    for _ in range(5):
        run.engine.commands.send(run.session, Send(parse_address("/topic/t", "s"), SentMessage(4, True, 0, b"", b"m")))
    run.settle()
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1", durable_key="me,n"))
    run.settle()
    assert (stored(run), run.engine.state.memory.queue_bytes) == ([], 0)
    assert targets.NEW_NUMBER.of(run.engine)() == number


def test_names_used_once_each_leave_nothing_behind() -> None:
    run = Passing(capacity=30)
    for number in range(600):
        run.use(f"name.{number}", persistent=number % 2 == 0)
        if number % 10 == 9:
            run.advance(1)
    assert len(run.names()) <= 30
    run.advance(100)
    engine = run.engine
    memory = engine.state.memory
    assert (run.names(), stored(run), memory.queue_bytes, memory.deque_bytes, memory.message_bytes) == ([], [], 0, 0, 0)
    assert targets.numbered(engine) == {} and targets.last_number(engine) < 120
    assert not targets.known_routes(targets.topics(engine))
    assert not targets.touched(engine) and not targets.waiting_queues(engine)


# Lanes


def test_a_queue_has_only_the_lanes_that_it_needs_in_the_order_of_their_ranks() -> None:
    run = Passing()
    for priority in (4, 9, 0, 4):
        run.engine.commands.send(
            run.session, Send(parse_address("/queue/q", "s"), SentMessage(priority, True, 0, b"", b"m"))
        )
    assert [lane.rank for lane in queue_of(run, "q").lanes] == [0, 5, 9]
    consumer = run.follow("q")
    run.settle()
    entries: list[Entry] = list(consumer.held.values())
    assert [entry.lane.rank for entry in entries] == [0, 5, 5, 9]


def test_collections_that_empty_lanes_share_cannot_be_changed() -> None:
    lane = Engine().lifespan.restore_queue(1, "q").lane(5)
    for wrong in (
        lambda: lane.delayed.update({1: None}),  # type: ignore[dict-item]
        lambda: lane.unloaded.setdefault(1, None),  # type: ignore[arg-type]
        lambda: lane.removed.__setitem__(1, 1),
        lambda: lane.removed.__ior__({1: 1}),
    ):
        with pytest.raises(TypeError, match="shared"):
            wrong()


# The history


def run_with_events(event_log: EventLog) -> Passing:
    run = Passing()
    run.engine = Engine(CommitState(event_log))
    run.engine.lifespan.start()
    run.session = run.engine.commands.connect("s")
    run.settle()
    return run


def test_hidden_queue_of_scheduled_sends_goes_although_history_does_not_record_it() -> None:
    run = run_with_events(EventLog())
    run.send("later", Schedule(delay_ms=1000))
    run.advance(5)
    run.receive("q")
    run.advance(65)
    run.send("again", Schedule(delay_ms=1000))
    run.advance(5)
    assert run.waiting() == {"q": (1, 0)}


def test_in_one_file_of_the_history_a_number_stands_for_one_name() -> None:
    event_log = EventLog()
    run = run_with_events(event_log)
    numbers = []
    for name in ("a", "b", "c", "d"):
        run.use(name)
        numbers.append(queue_of(run, name).number)
        run.advance(65)
        assert run.names() == []
        if name == "b":
            # The next chunk begins a file.
            event_log._file_size = HISTORY_FILE_BYTES
            run.use("in the new file")
    assert numbers[:2] == [1, 2]
    assert set(numbers[2:]) <= {1, 2}
    assert event_log._unwritten_names == {queue.number: queue.name for queue in run.engine.queues.by_name.values()}


def test_a_file_that_begins_when_a_queue_goes_names_it_once_more() -> None:
    event_log = EventLog()
    engine = Engine(CommitState(event_log))
    queue = engine.lifespan.restore_queue(7, "orders")
    event_log.close_chunk()
    event_log.paused(queue)
    event_log.forget_queue(queue)
    event_log._file_size = HISTORY_FILE_BYTES
    assert b"orders" in event_log.close_chunk()
    event_log.run_started(after_clean_stop=True)
    event_log._file_size = HISTORY_FILE_BYTES
    assert b"orders" not in event_log.close_chunk()
    assert event_log.take_reusable_numbers() == [7]


# ---- Selectors and groups ----


def grouped(run: Passing, queue: str, group: str = "g") -> None:
    message = SentMessage(4, True, 0, b"JMSXGroupID:%s\n" % group.encode(), b"m")
    message.group = group
    run.engine.commands.send(run.session, Send(parse_address(f"/queue/{queue}", "s"), message))
    run.settle()


def choose(run: Passing, pattern: str, selector: str | None, name: str = "1", window: int = 1000) -> BrokerConsumer:
    destination = parse_address(f"/queue/{pattern}", "s")
    chosen = None if selector is None else compile_selector(selector)
    run.engine.commands.subscribe(
        run.session, Subscribe(name, destination, AckMode.INDIVIDUAL, window, selector=chosen)
    )
    run.settle()
    return run.session.consumers[name]


@pytest.mark.parametrize("pattern", ["q1", "*", ">"])
@pytest.mark.parametrize("selector", [None, "x = 1", "JMSPriority > 6", "x is null"])
def test_memory_that_a_consumer_adds_to_queues_is_freed_and_it_creates_no_lanes(
    pattern: str, selector: str | None
) -> None:
    run = Passing()
    for number in range(3):
        run.publish(f"q{number}")
    run.settle()
    before = run.engine.state.memory.queue_bytes
    choose(run, pattern, selector)
    choose(run, pattern, "y = 2 and x = 1", "2")
    assert run.engine.state.memory.queue_bytes > before
    for name in ("1", "2"):
        run.engine.commands.unsubscribe(run.session, Unsubscribe(name))
        run.settle()
    assert run.engine.state.memory.queue_bytes == before
    for queue in run.engine.queues.by_name.values():
        assert (
            len(queue.lanes) == 1
            and queue.lanes[0].selected is None
            and queue not in run.engine.queues.selections.by_queue
        )


def test_memory_that_consumers_add_to_queues_is_freed_by_a_disconnect() -> None:
    run = Passing()
    run.publish("q")
    run.settle()
    before = run.engine.state.memory.queue_bytes
    choose(run, "q", "x is null")
    choose(run, ">", "x = 1", "2")
    run.engine.commands.disconnect(run.session, is_exempt=False)
    run.settle()
    assert run.engine.state.memory.queue_bytes == before


def test_memory_of_groups_is_freed_with_the_last_consumer_if_no_grouped_message_is_left() -> None:
    run = Passing()
    run.publish("q")
    run.settle()
    before = run.engine.state.memory.queue_bytes
    grouped(run, "q")
    assert run.engine.state.memory.queue_bytes > before
    choose(run, "q", None)
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.settle()
    # The message of the group came back.
    assert groups_of(run.engine, queue_of(run, "q")) is not None
    run.receive("q")
    assert groups_of(run.engine, queue_of(run, "q")) is None and run.engine.state.memory.queue_bytes == before
    grouped(run, "q")
    assert len(choose(run, "q", None).held) == 1


def test_message_taken_out_of_turn_is_tracked_until_its_lane_has_passed_it() -> None:
    run = Passing()
    run.publish("q", "first")
    run.publish("q", "second")
    run.settle()
    before = run.engine.state.memory.queue_bytes
    consumer = choose(run, "q", "JMSPriority = 4", window=2)
    # Give the first one back: the second is out of its turn.
    first, second = consumer.held
    run.engine.commands.acknowledge(run.session, Ack("1", second))
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.publish("q", "third")
    run.settle()
    receiver = run.follow("q", "2")
    run.settle()
    assert next(iter(receiver.held)) == first
    run.engine.commands.unsubscribe(run.session, Unsubscribe("2"))
    run.receive("q")
    run.advance(3)
    assert queue_of(run, "q").lanes[0].selected is None and run.engine.state.memory.queue_bytes == before


def test_gap_of_a_selected_message_is_freed_when_the_lane_has_passed_it() -> None:
    run = Passing()
    for body in ("first", "second", "third"):
        priority_of_second = SentMessage(4, True, 0, b"x:%d\n" % (body == "second"), body.encode())
        run.engine.commands.send(run.session, Send(parse_address("/queue/q", "s"), priority_of_second))
    run.settle()
    before = run.engine.state.memory.queue_bytes
    (sequence,) = choose(run, "q", "x = '1'").held
    run.engine.commands.unsubscribe(run.session, Unsubscribe("1"))
    run.settle()
    assert queue_of(run, "q").lanes[0].selected is not None and run.engine.state.memory.queue_bytes > before
    receiver = run.follow("q", "2")
    run.settle()
    assert list(receiver.held)[1] == sequence and len(receiver.held) == 3
    for each in list(receiver.held):
        run.engine.commands.acknowledge(run.session, Ack("2", each))
    run.engine.commands.unsubscribe(run.session, Unsubscribe("2"))
    run.advance(3)
    assert queue_of(run, "q").lanes[0].selected is None and run.engine.state.memory.queue_bytes == before


def test_a_lane_that_is_made_later_is_compared_as_well() -> None:
    run = Passing()
    run.publish("q")
    run.settle()
    everywhere = choose(run, ">", "x = '1'")
    here = choose(run, "q", "x = '1'", "2", window=1)
    for priority in (9, 0):
        run.engine.commands.send(
            run.session, Send(parse_address("/queue/q", "s"), SentMessage(priority, True, 0, b"x:1\n", b"m"))
        )
    run.settle()
    assert len(queue_of(run, "q").lanes) == 3
    assert sorted(len(each.held) for each in (everywhere, here)) == [1, 1]


@pytest.mark.parametrize("pattern", [">", "q.>"])
def test_a_selector_in_more_queues_than_there_is_room_for_is_refused_and_nothing_is_done(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "CONSUMERS_RESERVE", 10_000)
    run = Passing(capacity=60)
    for number in range(50):
        run.publish(f"q.{number}")
    run.settle()
    before = run.engine.state.memory.queue_bytes
    with pytest.raises(RemoteProtocolError, match=r"no memory for this subscription: .* --memory-limit .*fewer"):
        choose(run, pattern, "x = 1")
    assert run.engine.state.memory.queue_bytes == before and not run.session.consumers
    assert all(
        not run.engine.state.clients.receivers_of(queue).wildcards for queue in run.engine.queues.by_name.values()
    )
    assert not run.engine.queues.selections.by_queue
    run.publish("q.new")
    # Who takes all of it, or looks into few of them, can: that makes room.
    assert len(choose(run, "q.7", "x is null").held) == 1
    assert len(choose(run, pattern, None, "2").held) == 50


@one_of("selector", [None, "x = 1", "x is null", "x = 'a'"], ids=["all", "x = 1", "x is null", "x = 'a'"])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_counted_memory_of_selectors_and_groups_in_many_queues_is_that_used(
    selector: str | None, is_grouped: bool
) -> None:
    run = Passing()
    many = 1000
    compile_selector("x = 1")
    publish = grouped if is_grouped else Passing.publish
    for number in range(many):
        publish(run, f"q{number}")
    run.settle()
    gc.collect()
    tracemalloc.start()
    try:
        before = run.engine.state.memory.queue_bytes
        choose(run, ">", selector, window=1)
        gc.collect()
        # Each queue has what its first wildcard takes.
        counted = run.engine.state.memory.queue_bytes - before + many * JOIN_BYTES
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert counted // 3 < used < counted + 100_000
    assert counted <= 3000 * many


def test_shared_empty_collections_cannot_be_changed() -> None:
    changes: list[Callable[[], object]] = [
        lambda: EMPTY.update({1: None}),
        lambda: EMPTY.setdefault(1, None),
        lambda: EMPTY.__setitem__(1, None),
        lambda: NO_SEQUENCES.add(1),
        lambda: NO_SEQUENCES.update({1}),
        lambda: NO_SEQUENCES.__ior__({1}),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="shared"):
            change()
    own = add_sequence(NO_SEQUENCES, 1)
    assert add_sequence(own, 2) is own == {1, 2}
    assert not EMPTY and not NO_SEQUENCES
