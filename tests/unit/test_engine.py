"""Do the corners that a review of the engine found stay mended?"""

import pytest

from truenext.commands import Ack, AckMode, Begin, Nack, Send, Subscribe
from truenext.destination import parse
from truenext.engine.engine import Engine
from truenext.engine.session import Session
from truenext.errors import RemoteProtocolError
from truenext.limits import SEQUENCE_BLOCK, TRANSACTION_MESSAGES_MAX
from truenext.message import Message
from truenext.policy import Policy


def started() -> Engine:
    engine = Engine()
    engine.start()
    commit(engine)
    return engine


def commit(engine: Engine) -> None:
    batch = engine.take_batch()
    assert batch is not None
    engine.committed(batch)


def send(engine: Engine, session: Session, address: str = "/queue/a", **numbered: object) -> None:
    message = Message(4, False, 0, b"content-length:0\n", b"")
    engine.send(session, Send(parse(address, session.id), message, **numbered))  # type: ignore[arg-type]


def subscribe(engine: Engine, session: Session, address: str = "/queue/a", mode: AckMode = AckMode.AUTO) -> None:
    engine.subscribe(session, Subscribe("0", parse(address, session.id), mode, 30_000))


def dispatched(engine: Engine) -> list[int]:
    return [entry.sequence for entries in engine.turn().deliveries.values() for entry in entries]


def test_a_message_without_a_reserved_sequence_waits_for_one_and_is_not_refused() -> None:
    engine = started()
    session = engine.connect("s")
    subscribe(engine, session)
    engine._next_sequence = engine._sequence_limit - 1
    send(engine, session)
    send(engine, session)
    assert dispatched(engine) == [SEQUENCE_BLOCK]
    commit(engine)
    assert dispatched(engine) == [SEQUENCE_BLOCK + 1]


def test_the_number_of_a_transient_send_is_written_by_a_clean_stop() -> None:
    engine = started()
    session = engine.connect("s")
    send(engine, session, producer="p", number=7)
    engine.turn()
    engine.stop()
    numbers: dict[str, int] = {}
    for batch in engine.last_batches():
        numbers |= {name: state.number for name, state in batch.producers.items()}
    assert numbers == {"p": 7}


def test_a_message_set_aside_from_a_temporary_queue_that_is_gone_goes_nowhere() -> None:
    engine = started()
    session = engine.connect("s")
    subscribe(engine, session, "/temp-queue/t")
    send(engine, session, "/temp-queue/t")
    (consumer,) = engine.turn().deliveries
    entry = engine.set_aside(consumer)
    engine.disconnect(session, is_clean=True)
    engine.set_right(entry, is_taken=False)
    assert not engine.has_work
    assert entry.lane.queue.waiting() == 0


@pytest.mark.parametrize("answer", [Ack, Nack])
def test_all_that_a_cumulative_answer_covers_counts_towards_the_limit_of_a_transaction(
    answer: type[Ack] | type[Nack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.engine.transaction.TRANSACTION_MESSAGES_MAX", 5)
    assert TRANSACTION_MESSAGES_MAX > 5
    engine = started()
    session = engine.connect("s")
    subscribe(engine, session, mode=AckMode.CLIENT)
    for _ in range(6):
        send(engine, session)
    last = dispatched(engine)[-1]
    engine.begin(session, Begin("t"))
    action = engine.acknowledge if answer is Ack else engine.refuse
    with pytest.raises(RemoteProtocolError, match="open transactions"):
        action(session, answer("0", last, "t"))  # type: ignore[arg-type]
    assert len(session.consumers["0"].held) == 6


def test_a_nack_that_dead_letters_wakes_its_queue() -> None:
    engine = started()
    engine._policy = Policy(attempts_max=1)
    session = engine.connect("s")
    engine.subscribe(session, Subscribe("0", parse("/queue/a", "s"), AckMode.INDIVIDUAL, 1))
    send(engine, session)
    send(engine, session)
    (first,) = dispatched(engine)
    engine.refuse(session, Nack("0", first))
    assert dispatched(engine) == [first + 1]
