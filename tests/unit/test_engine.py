"""Tests of defects that a review of the engine found."""

from sys import maxsize

import pytest

from tests.property import targets
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.transaction import TransactionLimits
from truenext.errors import RemoteProtocolError
from truenext.model.answers import Receipt
from truenext.model.commands import Abort, Ack, AckMode, Begin, Commit, Nack, Send, Subscribe
from truenext.model.destination import parse_address
from truenext.model.limits import SEQUENCE_BLOCK
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy, StoreAndDispatch


def started(limit_of_broker: int = maxsize, **policy: object) -> Engine:
    engine = Engine(memory=MemoryBudget(limit_of_broker), policies=Policies(Policy(**policy)))  # type: ignore[arg-type]
    engine.lifespan.start()
    commit(engine)
    return engine


def commit(engine: Engine) -> None:
    batch = engine.take_batch()
    assert batch is not None
    engine.store_results.on_committed(batch)


def send(
    engine: Engine,
    session: ConnectionState,
    address: str = "/queue/a",
    *,
    persistent: bool = False,
    body: bytes = b"",
    **numbered: object,
) -> None:
    message = SentMessage(4, persistent, 0, b"content-length:%d\n" % len(body), body)
    engine.commands.send(session, Send(parse_address(address, session.id), message, **numbered))  # type: ignore[arg-type]


def subscribe(
    engine: Engine, session: ConnectionState, address: str = "/queue/a", mode: AckMode = AckMode.AUTO
) -> None:
    engine.commands.subscribe(session, Subscribe("0", parse_address(address, session.id), mode, 30_000))


def dispatched(engine: Engine) -> list[int]:
    return [entry.sequence for entries in engine.turn.run().deliveries.values() for entry in entries]


def test_a_message_without_a_reserved_sequence_waits_for_one_and_is_not_refused() -> None:
    engine = started()
    session = engine.commands.connect("s")
    subscribe(engine, session)
    targets.use_up_sequences(engine, 1)
    send(engine, session)
    send(engine, session)
    assert dispatched(engine) == [SEQUENCE_BLOCK]
    commit(engine)
    assert dispatched(engine) == [SEQUENCE_BLOCK + 1]


def test_the_number_of_a_transient_send_is_written_by_a_clean_stop() -> None:
    engine = started()
    session = engine.commands.connect("s")
    send(engine, session, producer="p", number=7)
    engine.turn.run()
    engine.commands.connecting.stop()
    numbers: dict[str, int] = {}
    for batch in engine.lifespan.final_batches():
        numbers |= {name: state.highest_send for name, state in batch.producers.items()}
    assert numbers == {"p": 7}


def test_a_message_set_aside_from_a_temporary_queue_that_is_gone_goes_nowhere() -> None:
    engine = started()
    session = engine.commands.connect("s")
    subscribe(engine, session, "/temp-queue/t")
    send(engine, session, "/temp-queue/t")
    (consumer,) = engine.turn.run().deliveries
    entry = engine.commands.acknowledging.hold_partially_sent(consumer)
    engine.commands.disconnect(session, is_exempt=True)
    engine.commands.acknowledging.resolve_partially_sent(entry, is_sent=False)
    assert not engine.has_work
    assert entry.lane.queue.waiting_count() == 0


@pytest.mark.parametrize("answer", [Ack, Nack])
def test_messages_covered_by_a_cumulative_answer_count_towards_the_transaction_limit(
    answer: type[Ack] | type[Nack],
) -> None:
    engine = Engine(transaction_limits=TransactionLimits(messages=5))
    engine.lifespan.start()
    commit(engine)
    session = engine.commands.connect("s")
    subscribe(engine, session, mode=AckMode.CLIENT)
    for _ in range(6):
        send(engine, session)
    last = dispatched(engine)[-1]
    engine.commands.begin(session, Begin("t"))
    action = engine.commands.acknowledge if answer is Ack else engine.commands.nack
    with pytest.raises(RemoteProtocolError, match="open transactions"):
        action(session, answer("0", last, "t"))  # type: ignore[arg-type]
    assert len(session.consumers["0"].held) == 6


def test_a_nack_that_dead_letters_wakes_its_queue() -> None:
    engine = started(attempts_max=1)
    session = engine.commands.connect("s")
    engine.commands.subscribe(session, Subscribe("0", parse_address("/queue/a", "s"), AckMode.INDIVIDUAL, 1))
    send(engine, session)
    send(engine, session)
    (first,) = dispatched(engine)
    engine.commands.nack(session, Nack("0", first))
    assert dispatched(engine) == [first + 1]


def test_a_receipt_leaves_although_the_write_that_it_waits_for_was_cancelled() -> None:
    """Fixed: no write was left that could release the receipt, and it was never sent."""
    engine = started(store_and_dispatch=StoreAndDispatch.CONCURRENT)
    session = engine.commands.connect("s")
    subscribe(engine, session, mode=AckMode.INDIVIDUAL)
    for receipt in ("the queue is new to the store", "r"):
        send(engine, session, persistent=True)
        engine.state.commit_state.answer(session, Receipt(receipt))
        (sequence,) = dispatched(engine)
        engine.commands.acknowledge(session, Ack("0", sequence))
        if receipt != "r":
            commit(engine)
            engine.turn.run()
    assert engine.state.commit_state.is_batch_awaited
    batch = engine.take_batch()
    assert batch is not None
    assert batch.is_empty()
    engine.store_results.on_committed(batch)
    assert engine.turn.run().answers == [(session, Receipt("r"))]


@pytest.mark.parametrize("last", [Commit, Abort, Nack])
def test_receipt_of_a_command_that_cancels_all_writes_follows_the_receipts_before_it(
    last: type[Commit | Abort | Nack],
) -> None:
    # Fixed: the later receipt waited for no batch, and was sent before the earlier one.
    engine = started(store_and_dispatch=StoreAndDispatch.CONCURRENT)
    session = engine.commands.connect("s")
    subscribe(engine, session, mode=AckMode.INDIVIDUAL)
    send(engine, session, persistent=True)
    dispatched(engine)
    commit(engine)
    engine.turn.run()
    send(engine, session, persistent=True)
    engine.state.commit_state.answer(session, Receipt("first"))
    (sequence,) = dispatched(engine)
    engine.commands.begin(session, Begin("t"))
    engine.commands.acknowledge(session, Ack("0", sequence, "t"))
    engine.commands.commit(session, Commit("t"))
    if last is Nack:
        send(engine, session)
        (sequence,) = dispatched(engine)
        engine.commands.nack(session, Nack("0", sequence))
    elif last is Abort:
        engine.commands.begin(session, Begin("u"))
        send(engine, session)
        (sequence,) = dispatched(engine)
        engine.commands.acknowledge(session, Ack("0", sequence, "u"))
        engine.commands.abort(session, Abort("u"))
    engine.state.commit_state.answer(session, Receipt("second"))
    receipts = list(engine.turn.run().answers)
    while (batch := engine.take_batch()) is not None:
        engine.store_results.on_committed(batch)
        receipts += engine.turn.run().answers
    assert receipts == [(session, Receipt("first")), (session, Receipt("second"))]


def test_a_queue_that_could_not_shrink_before_a_write_was_durable_shrinks_when_it_is() -> None:
    """The queue shrinks without a new message."""
    limit = 2000
    engine = started(memory_limit=limit, store_and_dispatch=StoreAndDispatch.CONCURRENT)
    session = engine.commands.connect("s")
    subscribe(engine, session, mode=AckMode.INDIVIDUAL)
    for _ in range(5):
        send(engine, session, persistent=True, body=b"." * 500)
    assert len(dispatched(engine)) == 5
    (queue,) = engine.queues.by_name.values()
    engine.evict()
    assert queue.resident_bytes > limit
    commit(engine)
    engine.evict()
    assert queue.resident_bytes <= limit


@pytest.mark.parametrize("end", [Abort, Commit])
def test_messages_returned_by_a_transaction_can_be_evicted_at_once(end: type[Abort] | type[Commit]) -> None:
    """Eviction found nothing while the transaction held all messages; after the transaction it must search again."""
    limit = 4000
    engine = started(limit, attempts_max=2)
    session = engine.commands.connect("s")
    subscribe(engine, session, mode=AckMode.INDIVIDUAL)
    for _ in range(5):
        send(engine, session, persistent=True, body=b"." * 1000)
    commit(engine)
    held = dispatched(engine)
    engine.commands.on_all_sent(session)
    engine.commands.begin(session, Begin("t"))
    for sequence in held:
        engine.commands.nack(session, Nack("0", sequence, "t"))
    engine.evict()
    assert engine.state.memory.message_bytes > limit
    session.consumers["0"].window = 0
    action = engine.commands.abort if end is Abort else engine.commands.commit
    action(session, end("t"))  # type: ignore[arg-type]
    engine.turn.run()
    engine.evict()
    assert engine.state.memory.message_bytes <= limit


def test_a_commit_that_takes_only_transients_away_is_visible_at_once_though_the_store_has_them() -> None:
    engine = started(1)
    session = engine.commands.connect("s")
    engine.commands.subscribe(session, Subscribe("0", parse_address("/queue/a", "s"), AckMode.INDIVIDUAL, 1))
    send(engine, session)
    (first,) = dispatched(engine)
    engine.evict()
    assert session.consumers["0"].held[first].store_batch is not None
    engine.commands.begin(session, Begin("t"))
    engine.commands.acknowledge(session, Ack("0", first, "t"))
    send(engine, session, transaction="t")
    engine.commands.commit(session, Commit("t"))
    assert dispatched(engine) == [first + 1]
