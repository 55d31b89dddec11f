"""Tests of messages that are given up together, more than one turn dead-letters. Source: docs/contract.md, C10.5."""

from itertools import pairwise

import pytest

from truenext.engine.engine import Engine
from truenext.engine.lifecycle import settlement
from truenext.engine.state.queue import Entry, Queue
from truenext.model.answers import Receipt
from truenext.model.batch import DUE_NEVER, Batch
from truenext.model.commands import Ack, AckMode, Begin, Commit, Nack, Send, Subscribe, Unsubscribe
from truenext.model.destination import durable_key, parse_address
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy

PER_TURN = 3
COUNT = 10
REPORT = b"truenext-report-to:/queue/reports\ntruenext-report-id:i\n"


@pytest.fixture(autouse=True)
def _small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlement, "DEAD_LETTERS_PER_TURN", PER_TURN)


class Holding:
    """An engine with a consumer that holds COUNT messages of one queue; all so far is durable."""

    def __init__(self, *, persistent: bool = True, durable: bool = False, header: bytes = b"") -> None:
        self.engine = Engine()
        self.engine.lifespan.start()
        self.session = self.engine.commands.connect("s")
        address = "/topic/t" if durable else "/queue/a"
        subscribe = Subscribe(
            "0",
            parse_address(address, "s"),
            AckMode.CLIENT,
            COUNT,
            durable_key=durable_key("c", "n") if durable else "",
        )
        self.engine.commands.subscribe(self.session, subscribe)
        self.queue: Queue = next(iter(self.engine.queues.by_name.values()))
        for number in range(COUNT):
            message = SentMessage(4, persistent, 0, b"content-length:1\n" + header, b"%d" % number)
            self.engine.commands.send(self.session, Send(parse_address(address, "s"), message))
        self.write()
        (self.held,) = self.engine.turn.run().deliveries.values()
        self.write()

    def write(self) -> list[Batch]:
        batches: list[Batch] = []
        while (batch := self.engine.take_batch()) is not None:
            batches.append(batch)
            self.engine.store_results.on_committed(batch)
        return batches

    def reject_all(self) -> None:
        self.engine.commands.nack(self.session, Nack("0", self.held[-1].sequence, is_rejected=True))

    def letters(self, name: str = "DLQ.a") -> list[Entry]:
        queue = self.engine.queues.by_name.get(name)
        return [] if queue is None else [entry for lane in queue.lanes for entry in lane]

    def bodies(self, name: str = "DLQ.a") -> list[bytes]:
        return [entry.message.body for entry in self.letters(name) if entry.message is not None]

    def waiting_bytes(self) -> int:
        return self.queue.resident_bytes


def test_messages_given_up_together_become_dead_letters_a_slice_in_each_turn() -> None:
    holding = Holding()
    holding.reject_all()
    counts = [len(holding.letters())]
    while holding.engine.has_work:
        holding.engine.turn.run()
        counts.append(len(holding.letters()))
    assert counts[0] == PER_TURN
    assert max(after - before for before, after in pairwise(counts)) == PER_TURN
    assert holding.bodies() == [b"%d" % number for number in range(COUNT)]
    assert holding.waiting_bytes() == 0
    assert not holding.engine.tasks.given_up.has_work


def test_message_given_up_behind_others_does_not_overtake_them() -> None:
    holding = Holding()
    first = holding.held[0].sequence
    holding.engine.commands.nack(holding.session, Nack("0", holding.held[-2].sequence, is_rejected=True))
    assert holding.held[0].sequence == first
    for _ in range(2):
        holding.engine.turn.run()
    holding.reject_all()
    while holding.engine.has_work:
        holding.engine.turn.run()
    assert holding.bodies() == [b"%d" % number for number in range(COUNT)]


def test_batch_of_a_rejection_has_the_attempts_of_messages_that_still_wait_and_its_receipt_waits_for_no_more() -> None:
    # C10.6
    holding = Holding()
    holding.reject_all()
    holding.engine.state.commit_state.answer(holding.session, Receipt("of this"))
    (batch,) = holding.write()
    assert len(batch.removes) == PER_TURN
    assert [(mark.attempts, mark.due_ms) for mark in batch.marks.values()] == [(1, DUE_NEVER)] * (COUNT - PER_TURN)
    assert [answer for _, answer in holding.engine.turn.run().answers] == [Receipt("of this")]
    assert len(holding.letters()) < COUNT


def test_report_to_a_queue_is_in_the_batch_of_its_dead_letter() -> None:
    # C11.7
    holding = Holding(header=REPORT)
    holding.reject_all()
    for _ in range(COUNT):
        holding.write()
        assert len(holding.letters("reports")) == len(holding.letters())
        holding.engine.turn.run()
    assert len(holding.letters("reports")) == COUNT


@pytest.mark.parametrize("persistent", [True, False])
def test_clean_stop_stores_messages_that_are_given_up_with_their_attempts(persistent: bool) -> None:
    # C10.8
    holding = Holding(persistent=persistent)
    holding.reject_all()
    marks = dict(holding.engine.state.commit_state.batch.marks)
    holding.engine.commands.connecting.stop()
    puts: dict[bytes, bytes] = {}
    for batch in holding.engine.lifespan.final_batches():
        marks |= batch.marks
        puts |= batch.transient_puts
        holding.engine.store_results.on_committed(batch)
    rejected = [key for key, mark in marks.items() if mark.due_ms == DUE_NEVER]
    assert len(rejected) == COUNT - PER_TURN
    assert [key for key in rejected if key in puts] == ([] if persistent else rejected)


def test_queue_stays_while_messages_that_were_given_up_are_in_it() -> None:
    holding = Holding()
    holding.reject_all()
    holding.engine.commands.disconnect(holding.session, is_exempt=True)
    holding.write()
    assert not holding.engine.queues.is_removable(holding.queue)
    while holding.engine.has_work:
        holding.engine.turn.run()
        holding.write()
    assert holding.engine.queues.is_removable(holding.queue)


def test_end_of_a_durable_subscription_removes_what_was_given_up() -> None:
    # C6.5, C13.2
    holding = Holding(durable=True)
    assert not holding.queue.is_temporary
    holding.reject_all()
    holding.engine.commands.unsubscribe(holding.session, Unsubscribe("0"))
    assert holding.engine.queues.end_durable_subscription(holding.queue) == COUNT - PER_TURN
    while holding.engine.has_work:
        holding.engine.turn.run()
        holding.write()
    dead = sum(len(holding.letters(name)) for name in holding.engine.queues.by_name if name.startswith("DLQ."))
    assert (dead, holding.waiting_bytes()) == (PER_TURN, 0)


def test_change_of_the_policies_gives_up_a_slice_at_once_and_the_others_later() -> None:
    # C13.2
    holding = Holding()
    holding.engine.commands.nack(holding.session, Nack("0", holding.held[-1].sequence))
    assert holding.letters() == []
    holding.engine.commands.disconnect(holding.session, is_exempt=True)
    holding.engine.commands.administering.change_policies(Policies(Policy(attempts_max=1)))
    assert len(holding.letters()) == PER_TURN
    while holding.engine.has_work:
        holding.engine.turn.run()
        holding.write()
    assert holding.bodies() == [b"%d" % number for number in range(COUNT)]


@pytest.mark.parametrize("commits", [True, False])
def test_transaction_and_lost_connection_give_up_a_slice_at_once(commits: bool) -> None:
    holding = Holding()
    if commits:
        holding.engine.commands.begin(holding.session, Begin("t"))
        last = holding.held[-1].sequence
        holding.engine.commands.nack(holding.session, Nack("0", last, "t", is_rejected=True))
        holding.engine.commands.commit(holding.session, Commit("t"))
    else:
        holding.engine.commands.administering.change_policies(Policies(Policy(attempts_max=1)))
        holding.engine.commands.begin(holding.session, Begin("t"))
        holding.engine.commands.acknowledge(holding.session, Ack("0", holding.held[-1].sequence, "t"))
        holding.engine.commands.disconnect(holding.session, is_exempt=False)
    assert len(holding.letters()) == PER_TURN
    while holding.engine.has_work:
        holding.engine.turn.run()
        holding.write()
    assert len(holding.letters()) == COUNT
