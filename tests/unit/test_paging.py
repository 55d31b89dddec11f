"""Tests of which pages are taken in after messages have left memory."""

import pytest

from tests.property import targets
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.pages import PageMessage, PageResult, StoreRead
from truenext.engine.state.queue import Entry, Lane
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import NoEventLog
from truenext.errors import StoreError
from truenext.model.commands import Ack, AckMode, Send, Subscribe, Unsubscribe
from truenext.model.destination import parse_address
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy

LARGE = 1 << 30
STORED = range(1, 11)


def page(read: StoreRead) -> PageResult:
    """Return the page that a store with the messages of STORED gives."""
    after = [sequence for sequence in STORED if sequence > read.after_sequence]
    message = [SentMessage(4, True, 0, b"content-length:0\n", b"") for _ in after]
    found = [PageMessage(sequence, each) for sequence, each in zip(after, message, strict=True)][: read.limit]
    return PageResult(found, 0, len(found) == len(after))


def commit(engine: Engine) -> int:
    """Make all changes so far durable; return the last batch's number."""
    number = 0
    while engine.state.commit_state.has_batch:
        batch = engine.take_batch()
        assert batch is not None
        engine.store_results.on_committed(batch)
        number = batch.number
    return number


def squeeze(engine: Engine, limit: int) -> None:
    engine.state.memory.limit = limit
    engine.evict()
    engine.state.memory.limit = LARGE


def start_engine() -> tuple[Engine, ConnectionState]:
    """Start an engine with the stored messages and a consumer with a window of one."""
    engine = Engine(
        CommitState(NoEventLog(), sequence_limit=STORED.stop),
        memory=MemoryBudget(LARGE),
        policies=Policies(Policy(page_size=4)),
    )
    queue = engine.lifespan.restore_queue(1, "a")
    engine.lifespan.restore_lane(queue, 5, len(STORED))
    engine.lifespan.start()
    commit(engine)
    session = engine.commands.connect("s")
    engine.commands.subscribe(session, Subscribe("0", parse_address("/queue/a", "s"), AckMode.INDIVIDUAL, 1))
    return engine, session


def order_of_dispatch() -> list[int]:
    """Once, memory is short while the next page is being read."""
    engine, session = start_engine()
    order: list[int] = []
    reads: list[StoreRead] = []
    was_short = False
    for _ in range(50):
        effects = engine.turn.run()
        reads += effects.reads
        order += [entry.sequence for entries in effects.deliveries.values() for entry in entries]
        if reads and order and not was_short:
            # Read ahead, while there are still messages in memory.
            was_short = True
            squeeze(engine, limit=0)
        for read in reads:
            engine.store_results.on_page_read(read, page(read))
        reads.clear()
        engine.commands.on_all_sent(session)
        for consumer in session.consumers.values():
            for sequence in list(consumer.held):
                engine.commands.acknowledge(session, Ack("0", sequence))
    assert was_short
    return order


def test_a_page_is_not_taken_in_if_messages_before_it_left_memory_meanwhile() -> None:
    assert order_of_dispatch() == list(STORED)


def test_page_taken_in_after_messages_before_it_left_memory_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_horizon = targets.LOWER_HORIZON.original

    def faulty(lane: Lane) -> Entry:
        reading = lane.pending_read
        entry: Entry = lower_horizon(lane)
        lane.pending_read = reading
        return entry

    targets.LOWER_HORIZON.replace(monkeypatch, faulty)
    # The lane's end shows that one is missing.
    with pytest.raises(StoreError, match="than it has counted: the difference is 1"):
        order_of_dispatch()


def test_page_may_miss_a_message_written_and_evicted_while_it_was_read() -> None:
    """Fixed: the broker reported damage. Both messages are requeued; the body of the second is only in memory when the
    page is read, and only in the store when the page is taken in."""
    engine = Engine(memory=MemoryBudget(LARGE), policies=Policies(Policy()))
    engine.lifespan.start()
    session = engine.commands.connect("s")
    subscribe = Subscribe("0", parse_address("/queue/a", "s"), AckMode.INDIVIDUAL, 2)
    persistent = SentMessage(4, True, 0, b"content-length:9000\n", bytes(9000))
    transient = SentMessage(4, False, 0, b"content-length:0\n", b"")
    engine.commands.subscribe(session, subscribe)
    for message in (persistent, transient):
        engine.commands.send(session, Send(subscribe.destination, message))
    commit(engine)
    engine.turn.run()
    engine.commands.on_all_sent(session)
    engine.commands.unsubscribe(session, Unsubscribe("0"))
    squeeze(engine, limit=engine.state.memory.message_bytes - 1)
    engine.commands.subscribe(session, subscribe)
    as_of = commit(engine)
    (read,) = engine.turn.run().reads
    squeeze(engine, limit=0)
    commit(engine)
    squeeze(engine, limit=0)

    engine.store_results.on_page_read(read, PageResult([PageMessage(1, persistent)], as_of, is_end=True))

    effects = engine.turn.run()
    engine.store_results.on_page_read(effects.reads[0], PageResult([PageMessage(2, transient)], as_of + 1, is_end=True))
    then = engine.turn.run()
    seen = [entry.sequence for one in (effects, then) for entries in one.deliveries.values() for entry in entries]
    assert seen == [1, 2]


def test_committed_message_is_evicted_although_the_page_it_waited_for_is_stale() -> None:
    """Fixed: the message stayed in memory until another one was written."""
    engine, session = start_engine()
    (read,) = engine.turn.run().reads
    engine.store_results.on_page_read(read, page(read))
    reads: list[StoreRead] = []
    while not reads:
        for sequence in list(session.consumers["0"].held):
            engine.commands.acknowledge(session, Ack("0", sequence))
        reads = engine.turn.run().reads
        engine.commands.on_all_sent(session)
    engine.commands.send(
        session, Send(parse_address("/queue/a", "s"), SentMessage(4, True, 0, b"content-length:0\n", b""))
    )
    commit(engine)
    squeeze(engine, limit=0)
    engine.store_results.on_page_read(reads[0], page(reads[0]))
    assert engine.state.memory.message_bytes == engine.state.memory.pending_free_bytes == 0
