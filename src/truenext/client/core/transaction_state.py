"""State of one transaction, from its first message or send to its end.

    OPEN ──commit──▶ COMMITTING ──RECEIPT──▶ COMMITTED
      │                  ├──ERROR───────▶ ROLLED_BACK
      │                  ├──RECEIPT of a repeat──▶ REPEATED
      │                  └──connection lost──▶ IN_DOUBT ──broker answers──▶ COMMITTED, ROLLED_BACK, UNKNOWN
      ├──rollback──▶ ROLLED_BACK
      └──ended from elsewhere──▶ ROLLBACK_ONLY ──its code has ended──▶ ROLLED_BACK

A transaction is *rollback-only* when something other than its own code has ended it: the connection was lost, the
broker has refused a frame, another task has rolled back or closed. Until its code has ended, each of its calls
raises RolledBack, and the next transaction does not begin.
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
    """The transaction has not ended; it may be empty."""
    COMMITTING = "committing"
    """COMMIT was sent, and the broker has not answered."""
    IN_DOUBT = "in doubt"
    """The connection was lost during the commit, and the broker has not said yet whether it happened."""
    ROLLBACK_ONLY = "rollback only"
    """The transaction was ended by something other than its own code, which has not noticed yet."""
    COMMITTED = "committed"
    """The whole transaction took effect."""
    ROLLED_BACK = "rolled back"
    """The transaction had no effect."""
    REPEATED = "repeated"
    """The caller's number was used already, so the transaction had no effect."""
    UNKNOWN = "unknown"
    """The outcome cannot be found out: another broker has it, the broker has forgotten it, or the connection was
    lost during a commit under the caller's own number."""


_RESOLVABLE_OUTCOMES = frozenset({Outcome.COMMITTING, Outcome.IN_DOUBT, Outcome.UNKNOWN})
ENDED_OUTCOMES = frozenset({Outcome.COMMITTED, Outcome.ROLLED_BACK, Outcome.REPEATED, Outcome.UNKNOWN})


@dataclass(slots=True, eq=False)
class ProducerNumbers:
    """Numbers of one producer for COMMITs, or for SENDs, without gaps."""

    name: str
    last_number: int = 0
    """Highest number that was used."""
    last_durable_number: int = 0
    """Highest number that no crash of the broker undoes: used for persistent content, or reported by the broker."""
    link_number: int = 0
    """Number of the link on which the broker knew `last_number`."""
    store_id: str = ""
    """Id of the store that knows the numbers."""
    is_retired: bool = False
    """The broker has lost numbers that it had: it was restored from an older copy."""

    def set_last_number(self, highest: int, link_number: int) -> bool:
        """Set the highest number that the broker has reported, which it now keeps. False if the broker has lost a
        number that no crash takes: then the number stays, so that the next COMMIT is refused."""
        self.link_number = link_number
        if highest < self.last_durable_number:
            return False
        self.last_number = self.last_durable_number = highest
        return True


class CallerNumber(NamedTuple):
    """Number of the caller's own, under which only one COMMIT takes effect. Source: docs/contract.md, C18.5"""

    producer: str
    number: int


class TransactionState(AnswerHandler, msgspec.Struct, eq=False):
    """State of a transaction, and answer handler of its ACKs, NACKs and SENDs: a refusal or a lost connection makes an
    open transaction rollback-only."""

    name: str
    """Name of the transaction on the wire."""
    link_number: int
    """Number of the link on which the transaction is."""
    owner: object
    """Task or thread that runs the code of the transaction."""
    has_begun: bool = False
    """BEGIN was sent."""
    has_settled_messages: bool = False
    """ACKs or NACKs were sent in the transaction."""
    is_begin_refused: bool = False
    """BEGIN was refused, so there is nothing to abort."""
    is_commit_refused: bool = False
    """COMMIT was refused, so to the broker the transaction is still open."""
    outcome: Outcome = Outcome.OPEN
    rollback_cause: Exception | None = None
    """Reason of a rollback that the transaction's own code did not request."""
    delivered_messages: list[ReceivedMessage] = []
    is_durable: bool = False
    """The transaction has persistent content of a queue, so its number is on the broker's disk after the commit."""
    last_send_frame: int = 0
    """Number of the last send's frame on its link; 0 if there was none."""
    failed_messages: dict[ReceivedMessage, None] = {}
    """Messages that the transaction's code has marked as failed."""
    producer: ProducerNumbers | None = None
    commit_number: int = 0
    """Number of the COMMIT among those of `producer`; 0 before the commit, and with a caller's number."""
    caller_number: CallerNumber | None = None
    """Producer and number of the COMMIT if they are the caller's own."""
    resolved: Signal = msgspec.field(default_factory=Signal)
    """Set when the outcome of the COMMIT is known, or the connection has ended for good."""

    @property
    def token(self) -> str:
        """Token to ask the broker for the outcome; empty if that is known, or no broker can be asked."""
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
        """Make the error that the transaction's code gets."""
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
    """Answer handler of BEGIN, which also notes a refusal: then there is nothing to abort."""

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
                    "its outcome was queried on another connection before the broker had its COMMIT, so the broker "
                    "has ruled it out: repeat the transaction"
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
            transaction.resolve(Outcome.UNKNOWN, ConnectionLost("the connection was lost while it was committed"))
