"""Is a process that runs a service well? What it says to those who look after it.

It is **live** unless a restart would help: it has messages in hand and ends none of them, it has lost the broker and
does not find it again, or a stage takes nothing any more. It is **ready** while all is there that its stages need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

LOST_S: Final = 60.0
"""So long a broker that was there may be away before a restart is asked for: one restart, as a process that has just
begun waits for its broker as long as it takes."""

DATABASE_AVAILABLE: Final = "available"

ServiceState = Literal["waiting for the broker", "waiting for the database", "running", "stopping"]


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One connection to the broker."""

    pool: str
    state: str
    """`connected`, `connecting` or `closed`."""
    since_s: float
    reconnects: int
    has_disk_space: bool
    """False while its stages rest because the broker has none on its disk."""


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage in one lane."""

    stage: str
    """Its queue."""
    pool: str
    active: int
    """Messages that it handles now."""
    waits_for_database: bool
    broker_wait_reason: str
    """Why the broker gives it no messages yet; empty if it does, or the database is waited for."""
    without_progress_s: float
    """Since when none has ended, if there are any."""
    end_reason: str
    """Why it takes no messages any more; empty as long as it does."""


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    service: str
    state: ServiceState
    broker: list[PoolStatus]
    database: str
    """Empty if no stage uses one; `available`, or why it is not."""
    stages: list[StageStatus]


class ServiceHealth(msgspec.Struct, frozen=True, kw_only=True):
    live: bool
    ready: bool
    reasons: list[str]
    """Why it is not."""
    facts: ServiceStatus


def assess_health(status: ServiceStatus, stalled_after_s: float) -> ServiceHealth:
    """`stalled_after_s`: so long may a stage have messages in hand and end none."""
    not_live = list(_liveness_faults(status, stalled_after_s))
    not_ready = list(_readiness_faults(status))
    return ServiceHealth(
        live=not not_live, ready=not (not_live or not_ready), reasons=[*not_live, *not_ready], facts=status
    )


def _liveness_faults(status: ServiceStatus, stalled_after_s: float) -> Iterator[str]:
    if status.state != "running":
        # It waits for others, or is about to end anyway.
        return
    for pool in status.broker:
        if pool.state == "closed":
            yield f"the connection for {pool.pool} messages has ended for good"
        elif pool.state != "connected" and pool.since_s > LOST_S:
            yield f"the connection for {pool.pool} messages has been lost for {pool.since_s:.0f} seconds"
    for each in status.stages:
        if each.end_reason:
            yield f"{each.stage} takes no {each.pool} messages any more: {each.end_reason}"
        elif each.active and each.without_progress_s > stalled_after_s:
            yield (
                f"{each.stage} has {each.active} {each.pool} message{'' if each.active == 1 else 's'} in hand, "
                f"and none has ended for {each.without_progress_s:.0f} seconds"
            )


def _readiness_faults(status: ServiceStatus) -> Iterator[str]:
    if status.state != "running":
        yield f"it is {status.state}"
        return
    for pool in status.broker:
        if pool.state != "connected":
            yield f"the connection for {pool.pool} messages is {pool.state}"
        elif not pool.has_disk_space:
            yield f"the broker has no room on its disk for what stages send of {pool.pool} messages"
    for each in status.stages:
        if each.broker_wait_reason:
            yield f"{each.stage} takes no {each.pool} messages yet: {each.broker_wait_reason}"
    if status.database not in ("", DATABASE_AVAILABLE):
        yield status.database
