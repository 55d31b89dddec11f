"""Data of the pages about stages: services and processes, and flows."""

import msgspec

from truenext.console.pages.overview import Figure


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a service."""

    service: str
    version: str
    instance: str
    state: str
    """`ready`, `not ready`, or `silent` if it has answered before and does not now."""
    why: str
    """Reasons why it is not ready; may be empty."""
    answered_s: float
    """Seconds since its last answer."""
    figures: list[Figure]
    run: str = ""
    """Id by which the user may dismiss the process; "" if the user may not, or the process answers."""


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a service: its queue, and what its processes count."""

    endpoint: str
    stage: str
    queue: str
    queue_link: str
    waiting: int | None
    oldest_s: float | None
    consumers: int | None
    completed: int | None
    """Number of messages completed by the processes that have reported. None if the stage has had none; so are the two
    below."""
    failed: int | None
    """Number of executions that failed; each attempt counts."""
    given_up: int | None
    """Number of messages that were given up."""
    dead_letters: str
    """Link to its dead letters; "" if there are none."""
    sends_to: list[str]


class ServiceRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    level: str
    processes: list[ProcessRow]
    stages: list[StageRow]
    outbox: list[Figure]


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    services: list[ServiceRow]
    note: str
    """Sentence on why there are none; may be empty."""


class FlowRow(msgspec.Struct, frozen=True, kw_only=True):
    trace: str
    link: str
    state: str
    """`ended`, `failed`, `given up` or `open`."""
    started_ms: int | None
    duration_s: float | None
    executions: int
    attempts: int
    error: str


class Flows(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[FlowRow]
    order: str
    """`failed`, `slowest` or `last`."""
    orders: dict[str, str]
    trace: str
    """Part of the traces that are shown; "" shows all."""
    note: str
    """Sentence on folders that are missing, cut or newer; may be empty."""
    figures: list[Figure]


class FlowPage(msgspec.Struct, frozen=True, kw_only=True):
    """One flow."""

    trace: str
    state: str
    drawing: str
    """Waterfall as HTML that is escaped already; "" if the flow is not known."""
    text: str
    """The same as text."""
    note: str
    dead_letters: list[tuple[str, str]]
    """Queue and link of each dead letter of the flow."""
    others: list[tuple[str, str]]
    """Other flows of the same trace: text and link."""
