"""State of one transaction, from its first message or send to its end.

    OPEN ──commit──▶ COMMITTING ──RECEIPT──▶ COMMITTED
      │                  ├──ERROR───────▶ ROLLED_BACK
      │                  ├──RECEIPT of a repeat──▶ REPEATED
      │                  └──connection lost──▶ IN_DOUBT ──broker answers──▶ COMMITTED, ROLLED_BACK, UNKNOWN
      ├──rollback──▶ ROLLED_BACK
      └──ended by anything else──▶ ROLLBACK_ONLY ──its code has ended──▶ ROLLED_BACK

A transaction is *rollback-only* if something other than its own code has ended it. Examples: the connection was lost,
the broker has refused a frame, or another task has rolled back or closed the session. Until the transaction's code has
ended, each of its calls raises RolledBack, and the next transaction does not begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import msgspec

from truenext.client.core.buffer import ReceivedMessage
from truenext.client.core.link import AnswerHandler
from truenext.client.core.waiting import Signal
from truenext.errors import Code, ConnectionLost, Refused, RolledBack, TruenextError
from truenext.wire.stomp.frame import Frame


class Outcome(Enum):
    """State of a transaction that has not ended, or the outcome of one that has."""

    OPEN = "open"
    """The transaction has not ended. It may be empty."""
    COMMITTING = "committing"
    """COMMIT was sent, and the broker has not answered it."""
    IN_DOUBT = "in doubt"
    """The connection was lost during the commit, and the broker has not reported the outcome yet."""
    ROLLBACK_ONLY = "rollback only"
    """The transaction can only be rolled back, for a reason that the transaction's own code does not know yet."""
    COMMITTED = "committed"
    """The whole transaction took effect."""
    ROLLED_BACK = "rolled back"
    """The transaction had no effect."""
    REPEATED = "repeated"
    """The transaction had no effect, because the program's number was used before."""
    UNKNOWN = "unknown"
    """The outcome cannot be found out. Only another broker knows the outcome, or the broker has forgotten it, or the
    connection was lost during a commit under a number that the program gave."""


_RESOLVABLE_OUTCOMES = frozenset({Outcome.COMMITTING, Outcome.IN_DOUBT, Outcome.UNKNOWN})
ENDED_OUTCOMES = frozenset({Outcome.COMMITTED, Outcome.ROLLED_BACK, Outcome.REPEATED, Outcome.UNKNOWN})


@dataclass(slots=True, eq=False)
class ProducerNumbers:
    """Numbers of one producer, for its COMMITs or for its SENDs. The numbers have no gaps."""

    name: str
    last_number: int = 0
    """Highest number used so far."""
    last_durable_number: int = 0
    """Highest number that the broker knows even after a crash, because it was used for persistent content, or because
    the broker has reported it."""
    link_number: int = 0
    """Number of the link on which the client last sent a producer number, or the broker last reported one."""
    store_id: str = ""
    """Id of the store that knows the numbers; empty if none does."""
    is_retired: bool = False
    """True if the broker has lost durable numbers, because its store was restored from an older copy. The producer is
    then not used again."""

    def set_last_number(self, highest: int, link_number: int) -> bool:
        """Set the highest number to the one that the broker has reported, which is durable now. If the broker has lost
        a durable number, change nothing and return False; the broker then refuses the next COMMIT."""
        self.link_number = link_number
        if highest < self.last_durable_number:
            return False
        self.last_number = self.last_durable_number = highest
        return True


class CallerNumber(NamedTuple):
    """Producer and number that a program gives for a COMMIT. One COMMIT per number takes effect. Source:
    docs/contract.md, C18.5"""

    producer: str
    number: int


class TransactionState(AnswerHandler, msgspec.Struct, eq=False):
    """State of a transaction. It is also the answer handler of the transaction's ACKs, NACKs and SENDs. A refused frame
    or a lost connection makes an open transaction rollback-only."""

    name: str
    """Name of the transaction on the wire."""
    link_number: int
    owner: object
    """Task or thread that runs the code of the transaction."""
    has_begun: bool = False
    has_settled_messages: bool = False
    """True if ACKs or NACKs were sent in the transaction."""
    is_begin_refused: bool = False
    """True if the broker has refused BEGIN, so that there is nothing to abort."""
    is_commit_refused: bool = False
    """True if the broker has refused COMMIT, so that the transaction is still open at the broker."""
    outcome: Outcome = Outcome.OPEN
    rollback_cause: Exception | None = None
    """Reason why the transaction was rolled back, unless its own code has rolled it back."""
    delivered_messages: list[ReceivedMessage] = []
    is_durable: bool = False
    """True if the transaction sends a persistent message to a queue, or acknowledges one from a queue. Then its commit
    and the commit's number are durable."""
    last_send_frame: int = 0
    """Frame number of the transaction's last SEND; 0 if it has none."""
    failed_messages: dict[ReceivedMessage, None] = {}
    """Messages that the transaction's code has marked as failed."""
    producer: ProducerNumbers | None = None
    commit_number: int = 0
    """Number of the COMMIT under the name `producer`. 0 before the commit, and if the program gave its own number."""
    caller_number: CallerNumber | None = None
    """Producer and number of the COMMIT that the program gave; None if it gave none."""
    resolved: Signal = msgspec.field(default_factory=Signal)
    """Signal that is set when the outcome of the COMMIT is known, or the connection has ended for good."""

    @property
    def token(self) -> str:
        """Token with which a program asks the broker for the outcome. Empty if the outcome is known, or if no broker
        can report it."""
        producer = self.producer
        if producer is None or self.outcome not in _RESOLVABLE_OUTCOMES:
            return ""
        return f"{producer.store_id} {producer.name} {self.commit_number}"

    def mark_rollback_only(self, cause: Exception) -> None:
        if self.outcome is Outcome.OPEN:
            self.outcome = Outcome.ROLLBACK_ONLY
            self.rollback_cause = cause

    def resolve(self, outcome: Outcome, cause: Exception | None = None) -> None:
        self.outcome = outcome
        self.rollback_cause = cause
        self.resolved.set()

    def rolled_back_error(self) -> RolledBack:
        reason = "" if self.rollback_cause is None else f": {self.rollback_cause}"
        error = RolledBack(f"the transaction was rolled back and had no effect{reason}")
        error.__cause__ = self.rollback_cause
        return error

    def on_refused(self, error: Refused) -> None:
        self.mark_rollback_only(error)
        if self.outcome is Outcome.COMMITTING and self.rollback_cause is None:
            # The refusal of COMMIT says only that a frame was refused before.
            self.rollback_cause = error

    def on_connection_lost(self) -> None:
        self.mark_rollback_only(ConnectionLost("the connection was lost"))


class BeginAnswerHandler(AnswerHandler, msgspec.Struct, eq=False):
    """Answer handler of BEGIN. After a refusal it notes that there is nothing to abort."""

    _transaction: TransactionState

    def on_refused(self, error: Refused) -> None:
        self._transaction.is_begin_refused = True
        self._transaction.on_refused(error)

    def on_connection_lost(self) -> None:
        self._transaction.on_connection_lost()


class CommitAnswerHandler(AnswerHandler, msgspec.Struct, eq=False):
    """Answer handler of COMMIT, which sets the outcome of the transaction."""

    _transaction: TransactionState

    def on_confirmed(self, frame: Frame) -> None:
        transaction = self._transaction
        if frame.headers.get("truenext-repeat") != "true":
            if transaction.is_durable and transaction.producer is not None:
                transaction.producer.last_durable_number = transaction.commit_number
            transaction.resolve(Outcome.COMMITTED)
        else:
            transaction.resolve(Outcome.UNKNOWN if transaction.caller_number is None else Outcome.REPEATED)

    def on_refused(self, error: Refused) -> None:
        transaction = self._transaction
        transaction.is_commit_refused = True
        cause: TruenextError = error
        if transaction.producer is not None:
            if error.code == Code.ROLLED_BACK and not transaction.is_begin_refused:
                # The transaction was open, so its number was resolved, and counts as used. Source: "Did it happen?" in
                # docs/contract.md
                cause = TruenextError(
                    "the outcome was queried on another connection before the COMMIT reached the broker, and "
                    "since then the broker refuses this COMMIT: repeat the transaction"
                )
            else:
                transaction.producer.last_number = transaction.commit_number - 1
            if error.code == Code.GAP:
                transaction.producer.is_retired = True
                cause = TruenextError(
                    "the broker was restored from an older copy, and has lost transactions that it had confirmed: find "
                    f"out what is missing, and commit again ({error})"
                )
        transaction.resolve(Outcome.ROLLED_BACK, transaction.rollback_cause or cause)

    def on_connection_lost(self) -> None:
        transaction = self._transaction
        if transaction.outcome is not Outcome.COMMITTING:
            return
        if transaction.caller_number is None:
            transaction.outcome = Outcome.IN_DOUBT
        else:
            # The broker is not asked: its answer would use up the number, under which the caller is to commit again.
            transaction.resolve(Outcome.UNKNOWN, ConnectionLost("the connection was lost during the commit"))
