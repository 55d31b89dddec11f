"""Counts of what became of the messages of a queue since the broker has started.

A message is accepted once into each queue, and leaves each queue once: acknowledged, expired, dead-lettered, handled,
moved or purged. What else `accepted` counts is still in the queue. Source: docs/contract.md, "What the broker tells"
"""

from __future__ import annotations

import msgspec


class Counts(msgspec.Struct, gc=False):
    accepted: int = 0
    acknowledged: int = 0
    returned: int = 0
    """Number of times that a message was requeued, by any RequeueReason."""
    expired: int = 0
    handled: int = 0
    moved: int = 0
    purged: int = 0
    dead_lettered: dict[str, int] | None = None
    """Number of dead letters by reason (lifecycle/redelivery.py); None if there are none."""

    def add_dead_letter(self, reason: str, count: int = 1) -> None:
        reasons = self.dead_lettered
        if reasons is None:
            reasons = self.dead_lettered = {}
        reasons[reason] = reasons.get(reason, 0) + count

    def add(self, other: Counts) -> None:
        self.accepted += other.accepted
        self.acknowledged += other.acknowledged
        self.returned += other.returned
        self.expired += other.expired
        self.handled += other.handled
        self.moved += other.moved
        self.purged += other.purged
        if other.dead_lettered is not None:
            for reason, count in other.dead_lettered.items():
                self.add_dead_letter(reason, count)
