"""Which numbers of one producer are used, and what became of its COMMITs.

SENDs and COMMITs count by themselves. Numbers rise. A producer may have declared that they have no gaps; whether it
has is known from its first SEND or COMMIT on. Source: docs/contract.md, L5 and "Did it happen?"
"""

from __future__ import annotations

from enum import Enum
from typing import Self

import msgspec

from truenext.errors import Code, RemoteProtocolError
from truenext.model.batch import NO_NUMBER, ProducerState
from truenext.model.limits import RESOLVED_MAX


class CommitOutcome(Enum):
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    NOT_YET_COMMITTED = "not so far"
    UNKNOWN = "unknown"


class Producer(msgspec.Struct, gc=False):
    used_ms: int
    batch: int = 0
    """The batch that makes its numbers durable; a repeat is answered once it is."""
    highest_send: int = NO_NUMBER
    """The highest number of a SEND."""
    highest_commit: int = NO_NUMBER
    """The highest number of a COMMIT that was accepted or resolved."""
    highest_unknown_commit: int = NO_NUMBER
    """Whether the COMMIT of this number, or of any below it, was accepted or resolved is not known."""
    is_gapless: bool | None = None
    """None until its first SEND or COMMIT: so far its COMMITs were resolved, one after the other."""
    resolved: tuple[int, ...] = ()
    """COMMITs that were resolved as rolled back and are remembered, rising."""

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

    # ---- SENDs and COMMITs ----

    def has_used(self, name: str, number: int, *, is_commit: bool, declares_gapless: bool) -> bool:
        """Whether a SEND or COMMIT of this number is a repeat.

        Raises: RemoteProtocolError if it may not be used, by what the producer has declared or what was resolved
        """
        if is_commit:
            if self.resolved and number in self.resolved:
                raise RemoteProtocolError(
                    f"COMMIT {number} of producer {name!r} was resolved as rolled back: commit it under another number",
                    Code.ROLLED_BACK,
                )
            highest = self.highest_commit
        else:
            highest = self.highest_send
        is_gapless = self.is_gapless
        if declares_gapless and is_gapless is not True:
            if is_gapless is False:
                raise RemoteProtocolError(
                    f"truenext-gapless: producer {name!r} had numbers before it said so; leave it out, or call the "
                    "producer something else"
                )
            is_gapless = True
        if is_gapless:
            check_gap(name, number, highest)
        return number <= highest

    def record_use(self, number: int, *, is_commit: bool, declares_gapless: bool) -> None:
        """The SEND or COMMIT was accepted."""
        if is_commit:
            self.highest_commit = number
        else:
            self.highest_send = number
        if self.is_gapless is None:
            self.is_gapless = declares_gapless

    def is_use_unknown(self, number: int, *, is_commit: bool) -> bool:
        """Whether a number that counts as used ever was is not known."""
        if is_commit and number <= self.highest_unknown_commit:
            return True
        return not self.is_gapless and number < (self.highest_commit if is_commit else self.highest_send)

    # ---- Questions ----

    def outcome(self, number: int) -> CommitOutcome:
        """What became of COMMIT `number`."""
        if number in self.resolved:
            return CommitOutcome.ROLLED_BACK
        if not number and self.is_gapless is not False:
            # Those without gaps begin with 1.
            return CommitOutcome.UNKNOWN
        if number > self.highest_commit:
            return CommitOutcome.NOT_YET_COMMITTED
        return CommitOutcome.UNKNOWN if self.is_use_unknown(number, is_commit=True) else CommitOutcome.COMMITTED

    def resolve(self, number: int) -> bool:
        """COMMIT `number` is rolled back, if it has not happened so far. False if it has, or nobody knows, or if it is
        not the next one of a producer that may not leave one out."""
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
    """Raises: RemoteProtocolError if a number without gaps is neither used nor the next"""
    if number > max(highest, 0) + 1:
        raise RemoteProtocolError(
            f"truenext-number {number} of producer {name!r}, whose numbers have no gaps: the next is "
            f"{max(highest, 0) + 1}",
            Code.GAP,
        )
    if not number:
        raise RemoteProtocolError(f"truenext-number 0 of producer {name!r}: numbers without gaps begin with 1")
