"""Tests of when an attempt is durable. Source: docs/contract.md, C10.5 to C10.8."""

from collections.abc import Callable

import pytest

from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.model.answers import Receipt
from truenext.model.commands import Abort, Ack, AckMode, Begin, Commit, Nack, Release, Send, Started, Subscribe
from truenext.model.destination import parse_address
from truenext.model.message import SentMessage


class Held:
    """An engine with one message, which a consumer holds; all so far is durable."""

    def __init__(self, *, persistent: bool) -> None:
        self.engine = engine = Engine()
        engine.lifespan.start()
        self.session = engine.commands.connect("s")
        self.session.is_truenext_client = True
        self.other = engine.commands.connect("other")
        engine.commands.subscribe(self.session, Subscribe("0", parse_address("/queue/a", "s"), AckMode.INDIVIDUAL, 1))
        engine.commands.send(
            self.session,
            Send(parse_address("/queue/a", "s"), SentMessage(4, persistent, 0, b"content-length:0\n", b"")),
        )
        self.commit_number_one()
        self.write()
        ((self.entry,),) = engine.turn.run().deliveries.values()
        # Dispatches are written as well, and nobody waits for that.
        self.write()
        assert not engine.state.commit_state.is_batch_awaited

    def commit_number_one(self) -> None:
        self.engine.commands.begin(self.session, Begin("first"))
        self.engine.commands.commit(self.session, Commit("first", "p", 1))

    def write(self) -> None:
        while (batch := self.engine.take_batch()) is not None:
            self.engine.store_results.on_committed(batch)

    def answered(self, session: ConnectionState) -> list[object]:
        return [answer for each, answer in self.engine.turn.run().answers if each is session]


def deliver_and_answer(held: Held, answer: type[Ack] | type[Nack] = Ack) -> None:
    held.engine.commands.begin(held.session, Begin("t"))
    if answer is Ack:
        held.engine.commands.acknowledge(held.session, Ack("0", held.entry.sequence, "t"))
    else:
        held.engine.commands.nack(held.session, Nack("0", held.entry.sequence, "t"))


def nack(held: Held) -> None:
    held.engine.commands.nack(held.session, Nack("0", held.entry.sequence))


def reject(held: Held) -> None:
    held.engine.commands.nack(held.session, Nack("0", held.entry.sequence, is_rejected=True))


def commit_of_a_nack(held: Held) -> None:
    deliver_and_answer(held, Nack)
    held.engine.commands.commit(held.session, Commit("t"))


def abort(held: Held) -> None:
    deliver_and_answer(held)
    held.engine.commands.abort(held.session, Abort("t"))


def abort_of_a_nack_alone(held: Held) -> None:
    deliver_and_answer(held, Nack)
    held.engine.commands.abort(held.session, Abort("t", counts_all=False))


def repeated_commit(held: Held) -> None:
    deliver_and_answer(held)
    held.engine.commands.commit(held.session, Commit("t", "p", 1))


def release_with_a_transaction(held: Held) -> None:
    deliver_and_answer(held)
    held.engine.commands.release(held.session, Release(["0"], [], suspends=False, transaction="t", counts_all=True))


def lost_connection(held: Held) -> None:
    held.engine.commands.mark_started(held.session, Started("0", held.entry.sequence, 1))
    held.engine.commands.disconnect(held.session, is_exempt=False)


CONFIRMED = [
    nack,
    reject,
    commit_of_a_nack,
    abort,
    abort_of_a_nack_alone,
    repeated_commit,
    release_with_a_transaction,
]


@pytest.mark.parametrize("fail", CONFIRMED)
def test_receipt_of_a_command_that_counts_an_attempt_is_sent_once_the_attempt_is_durable(
    fail: Callable[[Held], None],
) -> None:
    # C10.6
    held = Held(persistent=True)
    fail(held)
    held.engine.state.commit_state.answer(held.session, Receipt("of this"))
    assert held.answered(held.session) == []
    held.write()
    assert held.answered(held.session) == [Receipt("of this")]


@pytest.mark.parametrize("fail", [*CONFIRMED, lost_connection])
def test_attempt_of_a_persistent_message_is_written_at_once_without_a_receipt(fail: Callable[[Held], None]) -> None:
    # C10.5
    held = Held(persistent=True)
    fail(held)
    assert held.engine.state.commit_state.is_batch_awaited


@pytest.mark.parametrize("fail", [each for each in [*CONFIRMED, lost_connection] if each is not reject])
def test_attempt_of_a_transient_message_costs_no_write(fail: Callable[[Held], None]) -> None:
    held = Held(persistent=False)
    fail(held)
    assert not held.engine.state.commit_state.is_batch_awaited


def test_message_that_comes_back_without_an_attempt_costs_no_write() -> None:
    held = Held(persistent=True)
    deliver_and_answer(held)
    held.engine.commands.abort(held.session, Abort("t", counts_all=False))
    assert not held.engine.state.commit_state.is_batch_awaited


def test_message_is_dispatched_again_before_its_attempt_is_durable() -> None:
    # C10.7
    held = Held(persistent=True)
    abort(held)
    ((again,),) = held.engine.turn.run().deliveries.values()
    assert (again.sequence, again.attempts) == (held.entry.sequence, 1)
