"""Status and health of a process that runs a service of stages, as its operators see them.

`truenext.stage.core.health` concludes the health from the status.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ServiceState = Literal["waiting for the broker", "waiting for the database", "running", "stopping"]


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of the broker connection of one pool."""

    pool: str
    """Name of the pool: `interactive` or `other`."""
    state: str
    """State of the connection: `connected`, `connecting` or `closed`."""
    error: str
    """Reason why the connection has ended for good, such as wrong credentials; empty if it has not."""
    since_s: float
    """Seconds since the connection has entered this state."""
    reconnects: int
    """Number of times that the connection was lost and opened again."""
    has_disk_space: bool
    """False while the pool's stages wait because the broker's disk is full."""


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one stage in one pool."""

    stage: str
    """Queue of the stage."""
    pool: str
    """Name of the pool: `interactive` or `other`."""
    active: int
    """Number of messages that the stage processes now."""
    waits_for_database: bool
    """True while the stage takes no messages because the database is unavailable."""
    broker_wait_reason: str
    """Reason why the broker does not deliver messages yet; empty if it delivers, or if the stage waits for the
    database."""
    without_progress_s: float
    """Seconds since the stage last finished a message, or received one while it was idle; 0 while it processes no
    message."""
    end_reason: str
    """Reason why the stage has stopped consuming; empty while it consumes."""


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a process that runs a service, or is only connected."""

    service: str
    """Name of the service."""
    state: ServiceState
    """`waiting for the broker`, `waiting for the database`, `running` or `stopping`."""
    broker: list[PoolStatus]
    """Status of the connections to the broker."""
    database: str
    """`available`, or the reason why the database or the outbox is not available; empty if no stage uses a database."""
    stages: list[StageStatus]
    """Status of each stage in each pool; empty if the process runs no stages."""


class ServiceHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a process that runs a service is live and ready, and why not."""

    live: bool
    """False if a restart would help."""
    ready: bool
    """False while the process is not live, or lacks its broker, its database or a subscription."""
    reasons: list[str]
    """Reasons why the process is not live, or not ready."""
    facts: ServiceStatus
    """Status from which live and ready were concluded."""
