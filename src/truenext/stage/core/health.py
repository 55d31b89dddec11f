"""Health of a process that runs a service, as its operators see it.

The process is **live** unless a restart would help. A restart would help if a stage has messages and finishes none, if
the process has lost the broker and does not reconnect, or if a stage has stopped consuming. The process is **ready**
while its stages can work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from truenext.model.service_health import ServiceHealth, ServiceStatus

LOST_S: Final = 60.0
"""Seconds after which a process that has lost the broker counts as not live. Such a process is restarted only once,
since the new process waits for the broker without a limit."""

STALLED_AFTER_S: Final = 300.0
"""Seconds after which a stage counts as stalled if it has messages and completes none, unless a program sets another
time."""

DATABASE_AVAILABLE: Final = "available"


def assess_health(status: ServiceStatus, stalled_after_s: float) -> ServiceHealth:
    """Return whether a process is live and ready, and why not. `stalled_after_s` is the longest time for which a stage
    may have messages and finish none."""
    not_live = list(_liveness_faults(status, stalled_after_s))
    not_ready = list(_readiness_faults(status))
    return ServiceHealth(
        live=not not_live, ready=not (not_live or not_ready), reasons=[*not_live, *not_ready], facts=status
    )


def _liveness_faults(status: ServiceStatus, stalled_after_s: float) -> Iterator[str]:
    if status.state == "stopping":
        # The process is about to end anyway.
        return
    for pool in status.broker:
        if pool.state == "closed":
            yield f"the connection for {pool.pool} messages has ended for good" + (pool.error and f": {pool.error}")
        elif status.state == "running" and pool.state != "connected" and pool.since_s > LOST_S:
            yield f"the connection for {pool.pool} messages has been lost for {pool.since_s:.0f} s"
    if status.state != "running":
        # The process waits for the broker or the database.
        return
    for each in status.stages:
        if each.end_reason:
            yield f"{each.stage} consumes no {each.pool} messages any more: {each.end_reason}"
        elif each.active and each.without_progress_s > stalled_after_s:
            yield (
                f"{each.stage} has {each.active} {each.pool} message{'' if each.active == 1 else 's'} in progress, "
                f"and none was completed for {each.without_progress_s:.0f} s"
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
