"""A unit of work: one transaction, from its first message to its end.

    OPEN ──commit──▶ COMMITTING ──RECEIPT──▶ COMMITTED
      │                  ├──ERROR───────▶ ROLLED_BACK
      │                  ├──RECEIPT of a repeat──▶ REPEATED
      │                  └──connection lost──▶ IN_DOUBT ──the broker was asked──▶ COMMITTED, ROLLED_BACK, UNKNOWN
      ├──rollback──▶ ROLLED_BACK
      └──ended from elsewhere──▶ ROLLBACK_ONLY ──its code has ended──▶ ROLLED_BACK

A unit is *rollback-only* when something but its own code has ended it: the connection was lost, the broker has refused
a frame, another task has rolled back or closed. Until its code has ended, whatever that does raises RolledBack, and the
next unit does not begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from truenext.client.core.buffer import ReceivedMessage
from truenext.client.core.waiting import Signal
from truenext.errors import Code, ConnectionLost, Refused, RolledBack, TruenextError
from truenext.wire.stomp.frame import Frame


class Outcome(Enum):
    """What became of a transaction, or is about to."""

    OPEN = "open"
    """It has not ended, or not begun."""
    COMMITTING = "committing"
    """The broker was told, and has not answered."""
    IN_DOUBT = "in doubt"
    """The connection was lost meanwhile, and the broker has not said yet whether it happened."""
    ROLLBACK_ONLY = "rollback only"
    """Something but its own code has ended it, and its code has not noticed yet."""
    COMMITTED = "committed"
    """All of it has happened."""
    ROLLED_BACK = "rolled back"
    """Nothing of it has happened."""
    REPEATED = "repeated"
    """Its caller's number was used already, so nothing of it has happened now."""
    UNKNOWN = "unknown"
    """Nobody will ever know: it is another broker's, or the broker has forgotten it."""


_RESOLVABLE_OUTCOMES = frozenset({Outcome.COMMITTING, Outcome.IN_DOUBT, Outcome.UNKNOWN})
ENDED_OUTCOMES = frozenset({Outcome.COMMITTED, Outcome.ROLLED_BACK, Outcome.REPEATED, Outcome.UNKNOWN})


@dataclass(slots=True, eq=False)
class ProducerNumbers:
    """Numbers of COMMITs, or of SENDs, without gaps."""

    name: str
    last_number: int = 0
    """The highest that was used."""
    last_durable_number: int = 0
    """The highest that no crash of the broker makes it forget: its transaction had something persistent, or the
    broker has said what became of it."""
    link_number: int = 0
    """The connection on which the broker knew `number`."""
    store_id: str = ""
    """Of the broker that knows it."""
    is_retired: bool = False
    """The broker does not know some of its numbers, though it had them: it was restored from an older copy."""

    def set_last_number(self, highest: int, link_number: int) -> bool:
        """The broker has said on this connection which number is the highest that it knows; it keeps that. False if it
        has lost what no crash takes: the number stays, so that its next COMMIT is refused."""
        self.link_number = link_number
        if highest < self.last_durable_number:
            return False
        self.last_number = self.last_durable_number = highest
        return True


class CallerNumber(NamedTuple):
    """A number of the caller's own, under which a COMMIT happens once, whoever says it and however often. Source:
    docs/contract.md, L5"""

    producer: str
    number: int


class TransactionState:
    __slots__ = (
        "answer_handler",
        "caller_number",
        "commit_number",
        "delivered_messages",
        "failed_messages",
        "has_begun",
        "has_settled_messages",
        "is_begin_refused",
        "is_commit_refused",
        "is_durable",
        "last_send_frame",
        "link_number",
        "name",
        "outcome",
        "owner",
        "producer",
        "resolved",
        "rollback_cause",
    )

    def __init__(self, name: str, link_number: int, owner: object) -> None:
        self.name = name
        """Of the transaction."""
        self.link_number = link_number
        """The number of the connection on which it is."""
        self.owner = owner
        """The task or thread whose code it is."""
        self.has_begun = False
        """The broker was told of it."""
        self.has_settled_messages = False
        """The broker was told of messages that are acknowledged or refused in it."""
        self.is_begin_refused = False
        """There is nothing to abort."""
        self.is_commit_refused = False
        """So to the broker it is open still."""
        self.outcome = Outcome.OPEN
        self.rollback_cause: Exception | None = None
        """Why it was doomed or rolled back, if its own code did not want that."""
        self.delivered_messages: list[ReceivedMessage] = []
        """Messages that it was given."""
        self.is_durable = False
        """Something persistent of a queue is in it, so that its number is on the broker's disk once it is committed."""
        self.last_send_frame = 0
        """Which frame of its connection was its last send; 0 if there was none."""
        self.failed_messages: dict[ReceivedMessage, None] = {}
        """Those that its code has named as failed."""
        self.producer: ProducerNumbers | None = None
        self.commit_number = 0
        """That of its COMMIT."""
        self.caller_number: CallerNumber | None = None
        """The same, if it is its caller's own."""
        self.answer_handler = TransactionAnswerHandler(self)
        """Hears of each of its frames."""
        self.resolved = Signal()
        """The outcome of its COMMIT is known."""

    @property
    def token(self) -> str:
        """What the broker is asked for its outcome with; empty if that is known, or nobody can be asked."""
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
        """What its code gets to see."""
        reason = "" if self.rollback_cause is None else f": {self.rollback_cause}"
        error = RolledBack(f"the transaction was rolled back, and nothing of it happened{reason}")
        error.__cause__ = self.rollback_cause
        return error


class TransactionAnswerHandler:
    """A frame that is part of a transaction."""

    __slots__ = ("_transaction",)

    def __init__(self, transaction: TransactionState) -> None:
        self._transaction = transaction

    def on_confirmed(self, frame: Frame) -> None:
        pass

    def on_refused(self, error: Refused) -> None:
        transaction = self._transaction
        transaction.mark_rollback_only(error)
        if transaction.outcome is Outcome.COMMITTING and transaction.rollback_cause is None:
            # That of the COMMIT says only that something was refused before.
            transaction.rollback_cause = error

    def on_connection_lost(self) -> None:
        self._transaction.mark_rollback_only(ConnectionLost("the connection was lost"))


class BeginAnswerHandler(TransactionAnswerHandler):
    """The BEGIN of a unit."""

    __slots__ = ()

    def on_refused(self, error: Refused) -> None:
        self._transaction.is_begin_refused = True
        super().on_refused(error)


class CommitAnswerHandler:
    """The COMMIT of a unit."""

    __slots__ = ("_transaction",)

    def __init__(self, transaction: TransactionState) -> None:
        self._transaction = transaction

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
                # The transaction was open, so its number was settled, and counts as used. Source: docs/contract.md,
                # "Did it happen?"
                cause = TruenextError(
                    "its outcome was asked for on another connection before the broker had its COMMIT, and what has "
                    "not happened by then never will: do it again"
                )
            else:
                transaction.producer.last_number = transaction.commit_number - 1
            if error.code == Code.GAP:
                transaction.producer.is_retired = True
                cause = TruenextError(
                    "the broker was restored from an older copy, and has lost transactions that it had confirmed: see "
                    f"what is missing, and commit again ({error})"
                )
        transaction.resolve(Outcome.ROLLED_BACK, transaction.rollback_cause or cause)

    def on_connection_lost(self) -> None:
        transaction = self._transaction
        if transaction.outcome is not Outcome.COMMITTING:
            return
        if transaction.caller_number is None:
            transaction.outcome = Outcome.IN_DOUBT
        else:
            # The broker is not asked: an answer would settle the number, and its caller is to say it again.
            transaction.resolve(Outcome.UNKNOWN, ConnectionLost("the connection was lost while it was committed"))
