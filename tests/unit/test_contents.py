"""Tests of contents that several queues share. Random orders of events are in tests/property."""

from collections.abc import Callable

import pytest

from tests.property import targets
from tests.unit.test_engine import started
from tests.unit.test_schedule import Run
from truenext.model.commands import Ack, AckMode, Begin, Commit, Nack, Send, Subscribe, Unsubscribe
from truenext.model.destination import parse_address
from truenext.model.limits import CONTENT_BYTES_MIN
from truenext.model.message import SentMessage
from truenext.model.policy import StoreAndDispatch
from truenext.model.record import CONTENTS_LANE_KEY, lane_key
from truenext.model.schedule import Schedule
from truenext.store.store import UndecodedMessage

BODY = b"b" * 2000
ADDRESS = "/queue/a,/queue/b,/queue/c"


def message(body: bytes = BODY, *, persistent: bool = True) -> SentMessage:
    return SentMessage(4, persistent, 0, b"content-length:%d\n" % len(body), body)


def send(run: Run, to: str = ADDRESS, body: bytes = BODY, *, persistent: bool = True) -> None:
    run.engine.commands.send(run.session, Send(parse_address(to, "s"), message(body, persistent=persistent)))


def contents(run: Run) -> list[UndecodedMessage]:
    return run.store.read_page(CONTENTS_LANE_KEY, 0, 100).messages


def stored(run: Run) -> list[UndecodedMessage]:
    """Return the stored messages of all queues."""
    return [each for number in range(1, 9) for each in run.store.read_page(lane_key(number, 5), 0, 100).messages]


def receive(run: Run, queue: str) -> Callable[[], None]:
    """Subscribe to a queue; what comes back acknowledges the message that came."""
    run.engine.commands.subscribe(
        run.session, Subscribe(queue, parse_address(f"/queue/{queue}", "s"), AckMode.INDIVIDUAL, 1)
    )
    run.settle()
    (entry,) = run.session.consumers[queue].held.values()

    def acknowledge() -> None:
        run.engine.commands.acknowledge(run.session, Ack(queue, entry.sequence))
        run.settle()

    return acknowledge


def in_a_transaction(run: Run) -> None:
    run.engine.commands.begin(run.session, Begin("t"))
    run.engine.commands.send(run.session, Send(parse_address(ADDRESS, "s"), message(), "t"))
    run.engine.commands.commit(run.session, Commit("t"))


def later(run: Run) -> None:
    run.engine.commands.send(run.session, Send(parse_address(ADDRESS, "s"), message(), schedule=Schedule(delay_ms=5)))
    run.settle()
    assert contents(run) == []
    run.at(run.now_ms + 5)


@pytest.mark.parametrize("do", [send, in_a_transaction, later])
def test_content_of_a_message_to_several_queues_is_stored_once(do: Callable[[Run], None]) -> None:
    run = Run()
    do(run)
    run.settle()
    (content,) = contents(run)
    assert content.mark.attempts == 3
    assert [len(each.record) < 100 and each.content == content.record for each in stored(run)] == [True] * 3
    acknowledge = [receive(run, queue) for queue in "abc"]
    for remaining in (2, 1, 0):
        acknowledge.pop()()
        assert [each.mark.attempts for each in contents(run)] == ([remaining] if remaining else [])


def test_a_copy_that_is_not_stored_does_not_count() -> None:
    run = Run()
    send(run, "/queue/a,/queue/b,/temp-queue/t")
    run.settle()
    assert [each.mark.attempts for each in contents(run)] == [2]
    send(run, "/queue/a,/temp-queue/t")
    run.settle()
    assert len(contents(run)) == 1


@pytest.mark.parametrize(
    ("to", "body", "persistent"),
    [("/queue/a", BODY, True), (ADDRESS, b"b" * (CONTENT_BYTES_MIN - 100), True), (ADDRESS, BODY, False)],
    ids=["of one queue", "small", "transient"],
)
def test_single_small_and_transient_messages_have_their_content_in_their_records(
    to: str, body: bytes, persistent: bool
) -> None:
    run = Run()
    send(run, to, body, persistent=persistent)
    run.engine.commands.connecting.stop()
    for batch in run.engine.lifespan.final_batches():
        run.store.apply(batch)
    assert contents(run) == []
    assert {each.content for each in stored(run)} == {b""}
    assert all(len(each.record) > len(body) for each in stored(run))
    assert len(stored(run)) == len(to.split(","))


def test_after_a_restart_it_goes_with_the_last_copy_all_the_same() -> None:
    run = Run()
    send(run)
    run.settle()
    receive(run, "a")()
    run.start_engine()
    for remaining in (1, 0):
        receive(run, "cb"[1 - remaining])()
        assert [each.mark.attempts for each in contents(run)] == ([remaining] if remaining else [])


def test_a_copy_that_is_dead_lettered_leaves_the_others_alone() -> None:
    run = Run()
    send(run)
    run.settle()
    receive(run, "a")
    (sequence,) = run.session.consumers["a"].held
    run.engine.commands.nack(run.session, Nack("a", sequence, is_rejected=True))
    run.settle()
    assert [each.mark.attempts for each in contents(run)] == [2]
    assert targets.queues(run.engine)["DLQ.a"].waiting_count() == 1
    receive(run, "b")()
    receive(run, "c")()
    assert contents(run) == []
    receive(run, "DLQ.a")()
    assert stored(run) == []


def test_ended_durable_subscriptions_dereference_their_copies() -> None:
    run = Run()
    for name in ("x", "y"):
        run.engine.commands.subscribe(
            run.session,
            Subscribe(name, parse_address("/topic/t", "s"), AckMode.INDIVIDUAL, 0, durable_key=f"me,{name}"),
        )
    send(run, "/topic/t,/queue/a")
    run.settle()
    for name, remaining in (("x", 2), ("y", 1)):
        run.engine.commands.unsubscribe(run.session, Unsubscribe(name, durable_key=f"me,{name}"))
        run.settle()
        assert [each.mark.attempts for each in contents(run)] == [remaining]
    receive(run, "a")()
    assert contents(run) == []


def test_a_copy_that_is_acknowledged_before_it_is_written_is_not_written_and_does_not_count() -> None:
    engine = started(store_and_dispatch=StoreAndDispatch.CONCURRENT)
    session = engine.commands.connect("s")
    for queue in "abc":
        engine.commands.subscribe(
            session, Subscribe(queue, parse_address(f"/queue/{queue}", "s"), AckMode.INDIVIDUAL, 1)
        )
    engine.commands.send(session, Send(parse_address(ADDRESS, "s"), message()))
    engine.turn.run()
    for queue, remaining in (("b", 2), ("a", 1)):
        (sequence,) = session.consumers[queue].held
        engine.commands.acknowledge(session, Ack(queue, sequence))
        batch = targets.gathering(engine)
        (content,) = (key for key in batch.puts if key.startswith(CONTENTS_LANE_KEY))
        assert (batch.marks[content].attempts, len(batch.puts), batch.dereferenced) == (remaining, remaining + 1, [])
    (sequence,) = session.consumers["c"].held
    engine.commands.acknowledge(session, Ack("c", sequence))
    batch = targets.gathering(engine)
    assert (batch.puts, batch.marks, batch.dereferenced) == ({}, {}, [])
