"""Health of a process that runs a service, as reported to its operators.

The process is **live** unless a restart would help: it handles messages and finishes none of them, it has lost the
broker and does not reconnect, or a stage no longer takes messages. It is **ready** while its stages can work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

LOST_S: Final = 60.0
"""Seconds without the broker after which a process that was connected counts as not live. That is one restart only:
the new process waits for the broker without a limit."""

DATABASE_AVAILABLE: Final = "available"

ServiceState = Literal["waiting for the broker", "waiting for the database", "running", "stopping"]


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one pool's connection to the broker."""

    pool: str
    state: str
    """`connected`, `connecting` or `closed`."""
    since_s: float
    reconnects: int
    has_disk_space: bool
    """False while the pool's stages wait because the broker's disk is full."""


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one stage in one pool."""

    stage: str
    """Queue of the stage."""
    pool: str
    active: int
    """Number of messages that the stage handles now."""
    waits_for_database: bool
    broker_wait_reason: str
    """Reason why the broker delivers no messages yet; empty if it does, or if the stage waits for the database."""
    without_progress_s: float
    """Seconds since the last progress; 0 while the stage handles no message."""
    end_reason: str
    """Reason why the stage no longer takes messages; empty while it does."""


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    service: str
    state: ServiceState
    broker: list[PoolStatus]
    database: str
    """`available`, or the reason why the database is not; empty if no stage uses a database."""
    stages: list[StageStatus]


class ServiceHealth(msgspec.Struct, frozen=True, kw_only=True):
    live: bool
    ready: bool
    reasons: list[str]
    """Reasons why the process is not live, or not ready."""
    facts: ServiceStatus


def assess_health(status: ServiceStatus, stalled_after_s: float) -> ServiceHealth:
    """Assess a process. `stalled_after_s` is the longest time that a stage may have messages and finish none."""
    not_live = list(_liveness_faults(status, stalled_after_s))
    not_ready = list(_readiness_faults(status))
    return ServiceHealth(
        live=not not_live, ready=not (not_live or not_ready), reasons=[*not_live, *not_ready], facts=status
    )


def _liveness_faults(status: ServiceStatus, stalled_after_s: float) -> Iterator[str]:
    if status.state != "running":
        # The process waits for the broker or the database, or is about to end anyway.
        return
    for pool in status.broker:
        if pool.state == "closed":
            yield f"the connection for {pool.pool} messages has ended for good"
        elif pool.state != "connected" and pool.since_s > LOST_S:
            yield f"the connection for {pool.pool} messages has been lost for {pool.since_s:.0f} seconds"
    for each in status.stages:
        if each.end_reason:
            yield f"{each.stage} consumes no {each.pool} messages any more: {each.end_reason}"
        elif each.active and each.without_progress_s > stalled_after_s:
            yield (
                f"{each.stage} has {each.active} {each.pool} message{'' if each.active == 1 else 's'} in progress, "
                f"and none was completed for {each.without_progress_s:.0f} seconds"
            )


def _readiness_faults(status: ServiceStatus) -> Iterator[str]:
    if status.state != "running":
        yield f"it is {status.state}"
        return
    for pool in status.broker:
        if pool.state != "connected":
            yield f"the connection for {pool.pool} messages is {pool.state}"
        elif not pool.has_disk_space:
            yield f"the broker has no disk space for the sends of stages with {pool.pool} messages"
    for each in status.stages:
        if each.broker_wait_reason:
            yield f"{each.stage} consumes no {each.pool} messages yet: {each.broker_wait_reason}"
    if status.database not in ("", DATABASE_AVAILABLE):
        yield status.database
