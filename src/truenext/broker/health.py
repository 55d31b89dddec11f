"""Health of a broker's process, as its operators see it.

The process is **live** unless a restart would help: its event loop has stood still for LOOP_HELD_S. A recovery and a
broker that stands by have no event loop yet, and are live however long they take. The process is **ready** while new
clients can work with it. A full disk does not end that: consumers must come in, as they free it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import msgspec

from truenext.model.disk_level import DiskLevel

LOOP_HELD_S: Final = 60.0
"""Seconds for which the event loop of a live process may stand still, as with the watchdog of systemd's unit."""

LOOP_SLOW_S: Final = 5.0
"""Seconds for which the event loop of a ready process may stand still."""


class BrokerState(StrEnum):
    RESTORING = "restoring"
    """It opens its folder, and restores its queues."""
    STANDING_BY = "standing by"
    """Another broker is active on its log."""
    RUNNING = "running"
    """It serves clients."""
    STOPPING = "stopping"
    """It has begun its stop."""


class BrokerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts from which live and ready are concluded. All but `state` are those of a running broker."""

    state: BrokerState
    loop_held_s: float = 0.0
    """Seconds for which the event loop has stood still."""
    draining: bool = False
    silent: bool = False
    """True while another broker may have taken over, as far as this one knows, so that it dispatches nothing."""
    awaited: str = ""
    """Cause for which nothing becomes durable in PostgreSQL: `database`, `standby` or `space`; empty if none."""
    disk_level: str = "plenty"
    """Free space for new messages: `plenty`, `little`, `none` or `full`."""


class BrokerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a broker's process is live and ready, and why not."""

    live: bool
    ready: bool
    reasons: list[str]
    """Reasons why the process is not live or not ready, or why it refuses sends."""
    facts: BrokerFacts


_NOT_RUNNING = {
    BrokerState.RESTORING: "restoring: it opens its folder, and clients cannot connect yet",
    BrokerState.STANDING_BY: "standing by: another broker is active",
    BrokerState.STOPPING: "stopping",
}

_AWAITED = {
    "database": "nothing is confirmed: PostgreSQL does not answer",
    "standby": "nothing is confirmed: the synchronous standby of PostgreSQL does not confirm",
    "space": "nothing is confirmed: the disk of PostgreSQL is full",
}

_REFUSES_SENDS = {each.name.lower() for each in (DiskLevel.NONE, DiskLevel.FULL)}


def assess_health(facts: BrokerFacts) -> BrokerHealth:
    """Return whether a broker's process is live and ready, and why not."""
    is_held = facts.loop_held_s > LOOP_HELD_S
    not_ready = list(_readiness_faults(facts))
    limits = []
    if facts.disk_level in _REFUSES_SENDS:
        limits.append(f"disk level {facts.disk_level}: sends are refused, consumers go on")
    return BrokerHealth(live=not is_held, ready=not not_ready, reasons=not_ready + limits, facts=facts)


def _readiness_faults(facts: BrokerFacts) -> Iterator[str]:
    if facts.state is not BrokerState.RUNNING:
        yield _NOT_RUNNING[facts.state]
        return
    if facts.loop_held_s > LOOP_SLOW_S:
        yield f"the event loop has stood still for {facts.loop_held_s:.0f} s"
    if facts.draining:
        yield "draining: it takes no new clients"
    if facts.silent:
        yield "silent: another broker may have taken over"
    if facts.awaited:
        yield _AWAITED[facts.awaited]
