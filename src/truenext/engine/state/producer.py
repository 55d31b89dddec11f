"""Numbers that one producer has used, and the outcomes of its COMMITs.

SENDs and COMMITs are numbered separately, in rising order. With its first SEND or COMMIT, a producer may declare that
its numbers have no gaps. Source: docs/contract.md, C18.5 and "In doubt"
"""

from __future__ import annotations

from enum import Enum
from typing import Self

import msgspec

from truenext.errors import Code, RemoteProtocolError
from truenext.model.batch import NO_NUMBER, ProducerState
from truenext.model.limits import RESOLVED_MAX

_USER_END = "\0"


def user_producer(user: str, name: str) -> str:
    """Return the key of a producer of one user; without users the key is the name."""
    return f"{user}{_USER_END}{name}" if user else name


def producer_name(key: str) -> str:
    """Return the name that the client gave its producer.

    >>> producer_name(user_producer("shop", "p")), producer_name("p")
    ('p', 'p')
    """
    return key.rpartition(_USER_END)[2]


class CommitOutcome(Enum):
    """Answer to a client that asks, after a lost connection, what became of its COMMIT with a producer's number."""

    COMMITTED = "committed"
    """The COMMIT was accepted: its number is the highest, or it is lower and the numbers have no gaps."""
    ROLLED_BACK = "rolled back"
    """The COMMIT was resolved as rolled back, and can never be accepted."""
    NOT_YET_COMMITTED = "not so far"
    """The number is higher than that of every COMMIT of the producer that was accepted or resolved; or it is 1, and the
    producer is not known. The COMMIT may still come."""
    UNKNOWN = "unknown"
    """The broker does not know: the producer is not known and the number is not 1; or the number is lower than the
    highest, and may have been left out, or resolved and forgotten."""


class Producer(msgspec.Struct, gc=False):
    used_ms: int
    batch: int = 0
    """Batch that makes the numbers durable. A repeat is answered when this batch is durable."""
    highest_send: int = NO_NUMBER
    """Highest number of a SEND."""
    highest_commit: int = NO_NUMBER
    """Highest number of a COMMIT that was accepted or resolved."""
    highest_unknown_commit: int = NO_NUMBER
    """Highest resolved COMMIT that was forgotten: up to this number the outcomes of COMMITs are unknown."""
    is_gapless: bool | None = None
    """Whether the numbers have no gaps. None if COMMITs were resolved before the first SEND or COMMIT."""
    resolved: tuple[int, ...] = ()
    """Numbers of COMMITs resolved as rolled back, in rising order; at most the RESOLVED_MAX highest."""

    @classmethod
    def from_state(cls, state: ProducerState) -> Self:
        return cls(
            state.last_used_ms,
            0,
            state.highest_send,
            state.highest_commit,
            state.highest_unknown_commit,
            state.is_gapless,
            state.resolved,
        )

    def state(self, *, is_used_once: bool) -> ProducerState:
        return ProducerState(
            self.highest_send,
            self.used_ms,
            is_used_once,
            self.highest_commit,
            self.highest_unknown_commit,
            self.is_gapless,
            self.resolved,
        )

    @property
    def is_unused(self) -> bool:
        """Whether no number of the producer is known. Such a producer stands for a user's producer that was forgotten,
        so that a new producer of this name does not copy the numbers that the name had before the broker had users."""
        return self.highest_send == self.highest_commit == NO_NUMBER and not self.resolved

    # ---- SENDs and COMMITs ----

    def has_used(self, name: str, number: int, *, is_commit: bool, declares_gapless: bool) -> bool:
        """Return whether a SEND or COMMIT of this number is a repeat.

        Raises: RemoteProtocolError if the COMMIT was resolved as rolled back, or a gapless producer leaves out a
        number; also if a producer declares gapless numbers after it has used other numbers.
        """
        if is_commit:
            if self.resolved and number in self.resolved:
                raise RemoteProtocolError(
                    f"COMMIT {number} of producer {producer_name(name)!r} was resolved as rolled back: commit it under "
                    "another number",
                    Code.ROLLED_BACK,
                )
            highest = self.highest_commit
        else:
            highest = self.highest_send
        is_gapless = self.is_gapless
        if declares_gapless and is_gapless is not True:
            if is_gapless is False:
                raise RemoteProtocolError(
                    f"truenext-gapless: producer {producer_name(name)!r} has used numbers without this header; "
                    f"leave the header out, or use another producer name"
                )
            is_gapless = True
        if is_gapless:
            check_gap(name, number, highest)
        return number <= highest

    def record_use(self, number: int, *, is_commit: bool, declares_gapless: bool) -> None:
        """Record the number of an accepted SEND or COMMIT."""
        if is_commit:
            self.highest_commit = number
        else:
            self.highest_send = number
        if self.is_gapless is None:
            self.is_gapless = declares_gapless

    def is_use_unknown(self, number: int, *, is_commit: bool) -> bool:
        """Return whether a number counts as used although the producer may never have used it."""
        if is_commit and number <= self.highest_unknown_commit:
            return True
        return not self.is_gapless and number < (self.highest_commit if is_commit else self.highest_send)

    # ---- COMMITs in doubt ----

    def outcome(self, number: int) -> CommitOutcome:
        """Return the outcome of COMMIT `number`."""
        if number in self.resolved:
            return CommitOutcome.ROLLED_BACK
        if not number and self.is_gapless is not False:
            # Numbers without gaps begin with 1.
            return CommitOutcome.UNKNOWN
        if number > self.highest_commit:
            return CommitOutcome.NOT_YET_COMMITTED
        return CommitOutcome.UNKNOWN if self.is_use_unknown(number, is_commit=True) else CommitOutcome.COMMITTED

    def resolve(self, number: int) -> bool:
        """Resolve COMMIT `number` as rolled back, if its outcome is NOT_YET_COMMITTED.

        Unless the numbers are known to have gaps, it must also be the producer's next number. Returns False if the
        number was not resolved; then nothing changes.
        """
        if self.outcome(number) is not CommitOutcome.NOT_YET_COMMITTED:
            return False
        if self.is_gapless is not False and number != max(self.highest_commit, 0) + 1:
            return False
        self.highest_commit = number
        self.resolved = (*self.resolved, number)
        if len(self.resolved) > RESOLVED_MAX:
            self.highest_unknown_commit = max(self.highest_unknown_commit, self.resolved[0])
            self.resolved = self.resolved[1:]
        return True


def check_gap(name: str, number: int, highest: int) -> None:
    """Raise RemoteProtocolError if a gapless producer's number is 0, or greater than the next one."""
    if number > max(highest, 0) + 1:
        raise RemoteProtocolError(
            f"truenext-number {number} of producer {producer_name(name)!r}, whose numbers have no gaps: the next is "
            f"{max(highest, 0) + 1}",
            Code.GAP,
        )
    if not number:
        raise RemoteProtocolError(
            f"truenext-number 0 of producer {producer_name(name)!r}: numbers without gaps begin with 1"
        )
