"""Tests that the machine finds planted faults of the client.

A fault changes a few characters of the client, as a programmer might write them. All must be found.

    TRUENEXT_SEED=7 pytest tests/client/test_planted_faults.py      other examples than usual
"""

from __future__ import annotations

import os
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.client.machine import Machine
from tests.client.oracle import Ack, Disagreement
from tests.client.simulation import NeverIdle
from tests.client.test_rollback_order import try_all
from tests.unit.mutation import mutated
from truenext.client.core.buffer import Subscription
from truenext.client.core.client import Client
from truenext.client.core.reconciler import Reconciler
from truenext.client.core.session import SessionCore
from truenext.client.core.subscriptions import PendingSettlement, Subscriptions
from truenext.client.core.transaction_state import CommitAnswerHandler
from truenext.client.core.transactions import SessionTransactions
from truenext.errors import TruenextError

SEED = int(os.environ.get("TRUENEXT_SEED", "5"))
EXAMPLES = 4000
"""Largest number of examples for each fault; most show in a hundred."""


class Fault(NamedTuple):
    name: str
    owner: type[Any]
    method: str
    old: str
    new: str
    often: tuple[str, ...] = ()
    """Actions without which the fault shows rarely."""


FAULTS = [
    Fault(
        "a receive that waited goes on in a transaction that was rolled back",
        SessionCore,
        "receive",
        "yield from self._wait_until_ready()\n            self._check_consumers",
        "pass\n            self._check_consumers",
    ),
    Fault(
        "a message of an earlier round is handed out",
        Subscriptions,
        "on_message",
        'int(headers["truenext-round"]) < subscription.release_count_min',
        "False",
    ),
    Fault(
        "a release keeps the buffer",
        Subscriptions,
        "release",
        "subscription.clear()",
        "pass",
    ),
    Fault(
        "the buffer ignores the priority of its messages",
        Subscription,
        "push",
        "(received.rank, received.sequence, received)",
        "(0, received.sequence, received)",
    ),
    Fault(
        "a nack does not release the buffer",
        Subscriptions,
        "_send_settlement",
        "self.release_buffered([received.subscription])",
        "pass",
    ),
    Fault(
        "a released message is nacked and the buffer kept",
        SessionCore,
        "_release_all",
        "client.subscriptions.release(subscriptions, returning=current)",
        "[link.write(b'NACK\\nid:%s\\n\\n\\0' % e.ack_id.encode()) for e in current if (link := client.link)]",
    ),
    Fault(
        "a message of the current round is dropped",
        Subscriptions,
        "on_message",
        "< subscription.release_count_min:",
        "<= subscription.release_count_min and subscription.release_count_min:",
    ),
    Fault(
        "an acknowledgement of an earlier connection is sent",
        Subscriptions,
        "settle",
        "if link is not None and received.link_number == link.number:",
        "if link is not None and link.is_up:",
        ("lose", "connect", "answer", "receive"),
    ),
    Fault(
        "a settlement that a lost connection left unconfirmed is forgotten",
        PendingSettlement,
        "on_connection_lost",
        "self._subscriptions.remember_disposition(self._received, self._disposition)",
        "pass",
        ("lose", "answer"),
    ),
    Fault(
        "a nack that the broker has counted is repeated",
        Subscriptions,
        "on_message",
        "(known[0].is_acked or known[0].is_rejected or received.attempts == known[1])",
        "True",
        ("lose", "answer"),
    ),
    Fault(
        "a message that the program still has is handed out again",
        Subscriptions,
        "on_message",
        "earlier = self.orphaned_messages.get(message_id)",
        "earlier = None",
    ),
    Fault(
        "a message of a lost connection that the program released is never handed out again",
        Subscriptions,
        "drop_unsettled",
        "self.forget_orphaned(received)",
        "pass",
    ),
    Fault(
        "a transaction that a lost connection has ended goes on in the next",
        Client,
        "on_connection_lost",
        "transaction.mark_rollback_only(cause)",
        "transaction.link_number = link.number + 1",
        ("lose",),
    ),
    Fault(
        "calls in a rolled-back transaction take effect in the next one",
        SessionTransactions,
        "check_not_rolled_back",
        "raise transaction.rolled_back_error()",
        "self._finish_and_clear(transaction)",
    ),
    Fault(
        "a rollback by another task ends the transaction at once",
        SessionTransactions,
        "_on_aborted",
        "if transaction.owner is owner or self._client.context.has_owner_ended(transaction.owner):",
        "if True:",
    ),
    Fault(
        "a COMMIT in doubt is taken for committed",
        CommitAnswerHandler,
        "on_connection_lost",
        "transaction.outcome = Outcome.IN_DOUBT",
        "transaction.resolve(Outcome.COMMITTED)",
    ),
    Fault(
        "a COMMIT in doubt is taken for rolled back",
        CommitAnswerHandler,
        "on_connection_lost",
        "transaction.outcome = Outcome.IN_DOUBT",
        "self._transaction.resolve(Outcome.ROLLED_BACK)",
        ("lose", "commit"),
    ),
    Fault(
        "a COMMIT in doubt is committed whatever the broker answers",
        Client,
        "request_commit_outcome",
        '_OUTCOMES.get(status.outcome or "", Outcome.UNKNOWN)',
        "Outcome.COMMITTED",
    ),
    Fault(
        "a cancelled receive keeps what it has taken",
        SessionCore,
        "on_receive_interrupted",
        "self._undo_delivery(messages)",
        "pass",
        ("narrow", "cancel", "receive_many"),
    ),
    Fault(
        "a cancellation counts an attempt",
        SessionCore,
        "on_handling_failed",
        "if counted is CountedAttempts.ALL:",
        "if True:",
    ),
    Fault(
        "a rollback counts attempts of messages that it should not count",
        SessionTransactions,
        "_abort",
        "counts_all = counted is CountedAttempts.ALL and not transaction.failed_messages",
        "counts_all = True",
    ),
    Fault(
        "a rollback counts no attempt of messages marked as failed",
        SessionTransactions,
        "_abort",
        "counted is not CountedAttempts.NONE",
        "False",
        ("fail_in_unit", "rollback"),
    ),
    Fault(
        "a receive acknowledges the messages of other tasks",
        SessionCore,
        "_auto_ack",
        "delivered = self._awaiting_auto_ack.pop(owner, None)",
        "delivered = [each for of in self._awaiting_auto_ack.values() for each in of]; self._awaiting_auto_ack.clear()",
    ),
    Fault(
        "messages received together are acknowledged before the program has them",
        SessionCore,
        "_deliver",
        "client.subscriptions.hold(received)",
        "client.subscriptions.hold(received); self._auto_ack(owner, None); self._await_auto_ack([received], owner)",
    ),
    Fault(
        "the broker is not told which messages are started",
        Subscriptions,
        "report_started",
        "link.write(frames.encode_started(received.ack_id))",
        "pass",
    ),
    Fault(
        "an idle buffer is not released",
        Reconciler,
        "_release_idle",
        "self._subscriptions.release([subscription], suspend=True)",
        "pass",
    ),
    Fault(
        "an idle buffer is kept while a receive from another consumer of its session waits",
        Reconciler,
        "_release_idle",
        "buffer.has_waiter(subscription)",
        "buffer._waiters",
    ),
    Fault(
        "a paused consumer keeps its buffer and gets messages",
        Subscriptions,
        "pause",
        "self.release([subscription], suspend=True)",
        "pass",
    ),
    Fault(
        "a release does not wake waiting receives",
        Subscriptions,
        "release",
        "subscription.buffer.wake_all()",
        "pass",
        ("rollback", "receive"),
    ),
    Fault(
        "a message that is not handed out does not wake waiting receives",
        Subscriptions,
        "_on_not_delivered",
        "subscription.buffer.wake_all()",
        "pass",
        ("lose", "receive", "connect"),
    ),
    Fault(
        "a subscription is not renewed after a reconnect",
        Subscriptions,
        "on_connected",
        "self.send_subscribe(subscription)",
        "pass",
    ),
    Fault(
        "a commit does not nack the messages marked as failed",
        SessionTransactions,
        "_send_commit",
        "self._nack(transaction.failed_messages, transaction, link)",
        "pass",
        ("fail_in_unit", "commit", "receive"),
    ),
    Fault(
        "a commit does not acknowledge its messages",
        SessionTransactions,
        "_send_commit",
        "self._acknowledge(received, transaction, link)",
        "pass",
    ),
    Fault(
        "a rollback does not release messages that its transaction has not acknowledged",
        SessionTransactions,
        "_abort",
        "returning=transaction.delivered_messages",
        "returning=()",
        ("rollback", "receive_many"),
    ),
    Fault(
        "a rollback counts no attempt of messages that its transaction has not acknowledged",
        SessionTransactions,
        "_abort",
        "is_all = counts_all and self._acknowledges_at_commit",
        "is_all = False",
    ),
    Fault(
        "a nack in a transaction does not release its other messages",
        SessionTransactions,
        "settle",
        "releases=bool(transaction.delivered_messages)",
        "releases=False",
        ("answer_in_unit", "receive", "run_all"),
    ),
    Fault(
        "a transaction goes on after a nack of one of its messages",
        SessionTransactions,
        "settle",
        "self._abort(transaction, CountedAttempts.NONE, releases=bool(transaction.delivered_messages))",
        "pass",
        ("answer_in_unit", "send_in_unit"),
    ),
    Fault(
        "a task is not told that another task has nacked a message of its transaction",
        SessionTransactions,
        "settle",
        'self._on_aborted(transaction, owner, "another task has nacked a message of the transaction")',
        "self._on_aborted(transaction, transaction.owner, '')",
        ("answer_in_unit",),
    ),
    Fault(
        "a message whose transaction a lost connection has ended cannot be settled",
        SessionTransactions,
        "check_may_settle",
        "if _was_rolled_back_by_other(transaction):",
        "if transaction.outcome is Outcome.ROLLBACK_ONLY:",
        ("answer_in_unit", "lose"),
    ),
    Fault(
        "a flush does not wait for the broker",
        SessionTransactions,
        "flush",
        "answered = link.answer_signal(transaction.last_send_frame)",
        "answered = Signal(); answered.set()",
        ("flush_unit", "send_in_unit"),
    ),
    Fault(
        "a flush does not raise when the transaction was ended",
        SessionTransactions,
        "flush",
        "if transaction.outcome in (Outcome.ROLLBACK_ONLY, Outcome.ROLLED_BACK):",
        "if False:",
        ("flush_unit", "send_in_unit", "lose"),
    ),
    Fault(
        "a transaction goes on after a consumer with messages of it was closed",
        Subscriptions,
        "unsubscribe",
        "if isinstance(received.transaction, TransactionState):",
        "if False:",
        ("close_consumer",),
    ),
    Fault(
        "an acknowledgement that waits is never written",
        SessionCore,
        "settle",
        "client.flush_later()",
        "pass",
        ("answer", "receive"),
    ),
    Fault(
        "an acknowledgement that waits is dropped by the next receive",
        Subscriptions,
        "report_started",
        "frames.add_started_header(self._last_ack, received.ack_id)",
        "frames.encode_started(received.ack_id)",
        ("answer", "receive"),
    ),
    Fault(
        "the broker is not told of a message that is received after an acknowledgement that waits",
        Subscriptions,
        "report_started",
        "out[-1] = frames.add_started_header(self._last_ack, received.ack_id)",
        "pass",
        ("answer", "receive"),
    ),
    Fault(
        "a nack is written before an acknowledgement that waits",
        Subscriptions,
        "_send_settlement",
        "link.write_tracked(data, PendingSettlement(self, received, disposition))",
        "link.write_tracked(data, PendingSettlement(self, received, disposition)); "
        "link.out_chunks.insert(0, link.out_chunks.pop())",
        ("answer", "receive_many"),
    ),
]


def plant(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fault.owner, fault.method, mutated(vars(fault.owner)[fault.method], fault.old, fault.new))


def test_planted_faults_can_be_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the faults that are not drawn."""
    for fault in FAULTS:
        with monkeypatch.context() as patch:
            plant(fault, patch)


@pytest.mark.drawn
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_machine_finds_planted_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch, steps: list[str]) -> None:
    plant(fault, monkeypatch)
    # The broker or the client itself may come upon it first: then connections end, or a request is refused. What is
    # buffered twice cannot be ordered: a TypeError.
    with pytest.raises((Disagreement, NeverIdle, AssertionError, TruenextError, TypeError)):
        for each in range(EXAMPLES):
            steps.clear()
            Machine.run_plainly(Random(SEED + each), monkeypatch, steps, fault.often)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ack, how", [(Ack.INDIVIDUAL, "nack"), (Ack.INDIVIDUAL, "release")])
def test_interleavings_show_a_dispatcher_that_holds_a_message_while_others_are_released(
    ack: Ack, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "if not is_same or self._is_overtaken(subscription, messages):"
    monkeypatch.setattr(SessionCore, "receive", mutated(SessionCore.receive, old, "if False:"))
    with pytest.raises((Disagreement, AssertionError), match=r"was dispatched before|of an earlier round"):
        try_all(monkeypatch, 3, 3, ack, how, 5)
