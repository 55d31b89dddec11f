"""Counts of what became of the messages of a queue since the broker has started.

A message is accepted once into each queue, and leaves each queue once: acknowledged, expired, dead-lettered, handled,
moved or purged. What else `accepted` counts is still in the queue. Source: docs/contract.md, "What the broker tells"
"""

from __future__ import annotations

import msgspec


class RareCounts(msgspec.Struct, gc=False):
    """Counts of what happens to few messages."""

    returned: int = 0
    """Number of times that a message was requeued, by any RequeueReason."""
    failed_again: int = 0
    """Number of requeueings that counted a second or later attempt."""
    expired: int = 0
    handled: int = 0
    moved: int = 0
    purged: int = 0
    dead_lettered: dict[str, int] = {}
    """Number of dead letters by reason (lifecycle/redelivery.py)."""

    def add_dead_letter(self, reason: str, count: int = 1) -> None:
        self.dead_lettered[reason] = self.dead_lettered.get(reason, 0) + count


NO_RARE_COUNTS = RareCounts()


class Counts:
    """Counts of a queue, or sums of such counts."""

    # No Struct: adding to a field of a Struct takes twice as long, and each message does so.
    __slots__ = ("accepted", "acknowledged", "known_rare")

    def __init__(self) -> None:
        self.accepted = 0
        self.acknowledged = 0
        self.known_rare: RareCounts | None = None
        """Other counts; None while all of them are 0, as in most queues."""

    @property
    def rare(self) -> RareCounts:
        """Other counts, to be increased."""
        found = self.known_rare
        if found is None:
            found = self.known_rare = RareCounts()
        return found

    def add(self, other: Counts) -> None:
        self.accepted += other.accepted
        self.acknowledged += other.acknowledged
        if other.known_rare is not None:
            self._add_rare(other.known_rare)

    def _add_rare(self, other: RareCounts) -> None:
        rare = self.rare
        rare.returned += other.returned
        rare.failed_again += other.failed_again
        rare.expired += other.expired
        rare.handled += other.handled
        rare.moved += other.moved
        rare.purged += other.purged
        for reason, count in other.dead_lettered.items():
            rare.add_dead_letter(reason, count)
