"""Report of a process that runs a service of stages: its answer to a request on the topic STAGES_TOPIC.

A requester sends an empty message with a `reply-to`, a temporary queue of its connection, and each process sends its
report there. Any client with the right to consume from the topic can answer, so a requester checks each report.

Source: docs/protocol.md, "Requests to processes of stages"
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from truenext.model.service_graph import ServiceGraph
from truenext.model.service_health import ServiceHealth

STAGES_TOPIC = "/topic/truenext.stages"
"""Topic to which each process of a service is subscribed."""
REPLIES = "/temp-queue/processes"
"""Temporary queue of a requester's connection for the reports."""
REPORT_BYTES_MAX = 256 * 1024
"""Largest number of bytes of a report. A process leaves out parts that do not fit."""
REPORT_TTL_S = 10.0
"""Seconds after which a request, and a report, expire in the broker."""

Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]
"""Time in milliseconds since the epoch, up to the year 9999."""


class Sum(msgspec.Struct, frozen=True):
    """Number and sum of measured values. Durations are in seconds."""

    count: int
    sum: float


class StageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one stage in one pool, counted since the process started."""

    endpoint: str
    stage: str
    pool: str
    """Pool of workers: `interactive` or `other`."""
    running: int
    """Number of runs that are under way."""
    outcomes: dict[str, int]
    """Number of executions by outcome, such as `completed` or `failed`."""
    given_up: dict[str, int]
    """Number of messages that were given up, by reason."""
    sent: int
    """Number of messages that the stage sent, including messages whose transaction was rolled back."""
    attempts: Sum
    """Attempts that messages took until they were completed or given up."""
    waited: Sum
    """Durations from the arrival of a message in its queue until its execution began."""
    run: Sum
    """Durations from the receipt of a message until its stage returned."""
    total: Sum
    """Durations from the receipt of a message until its outcome was known."""


class OutboxFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of exactly-once processing: counters of the process since its start, and messages of the whole service
    that wait in the database."""

    already_processed: int
    """Number of messages that were found in the inbox, since they were already processed."""
    in_doubt: int
    """Number of producers that the process claimed again, because an answer about them was missing."""
    claimed: int
    """Number of producers claimed from processes that have ended."""
    renumbered: int
    """Number of units sent under new numbers, because the broker did not know their old numbers."""
    refused: int
    """Number of messages in the queue `SERVICE.refused`."""
    unsent: int | None
    """Number of messages that all processes of the service have written to the outbox, and that are not known to be
    sent; None if the database has not answered in time."""
    oldest_s: float | None
    """Age of the oldest of these messages in seconds, 0 without one; None if the database has not answered in time."""


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one process about itself."""

    service: str
    """Name of the service."""
    version: str
    """Version of truenext in the process."""
    instance: str
    """Service, host and process id, for people."""
    run: str
    """Random id of this run of the service. A process that is started again has another id."""
    started_at: Milliseconds
    """Time in milliseconds since the epoch at which the run began, by the clock of the process."""
    at: Milliseconds
    """Time of the report in milliseconds since the epoch, by the clock of the process."""
    has_ended: bool = False
    """True in the last report of a process that stops in order."""
    health: ServiceHealth
    graph: ServiceGraph | None
    """Endpoints and stages, as `truenext stages describe --json` prints them; None if they are too large."""
    metrics: list[StageFigures] | None
    """Figures of each stage that has received messages; None if they are too large."""
    outbox: OutboxFigures | None
    """Figures of exactly-once processing; None if the process has none."""
    omitted: list[str] = []
    """Parts of the report that are left out or cut because of their size: `graph`, `metrics` or `health`."""
