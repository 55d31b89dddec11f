"""Events of stages: records of the start, the SQL commit and the end of each execution. Source:
docs/reference/history.md

Each event is a line of JSON in a file (`history/stage_files.py`). Services write them (`stage/events.py`); the audit,
`truenext stages flow` and the console read them.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, get_args

import msgspec

from truenext.model.process_report import Milliseconds

TRACE_MAX = 200
"""Largest number of characters of a flow's human-readable name, its trace, that are recorded."""

OPENED = "opened"
STARTED = "started"
SQL_COMMITTED = "SQL committed"
CLOSED = "closed"

ExecutionOutcome: TypeAlias = Literal["completed", "already processed", "failed", "rejected", "released", "in doubt"]
"""Outcome of an execution.

    completed          the stage has run, and all its effects are committed
    already processed  an exactly-once stage had processed the message before; now it is only acknowledged
    failed             the message counts an attempt: it is redelivered, or after too many attempts a dead letter
    rejected           the message becomes a dead letter at once
    released           the message is redelivered without an attempt: the service stops, or broker or database is down
    in doubt           the client could not find out in time whether the commit happened
"""

GiveUpReason: TypeAlias = Literal["rejected", "attempts exhausted", "unreadable", "wrong call"]
"""Reason why a message was given up.

    rejected            the stage has raised Reject, or an exception with the rule "never"
    attempts exhausted  the stage has failed as often as the stage, or the policy of its queue, allows
    unreadable          the message is not of the type that its stage takes (NotDecoded)
    wrong call          the stage has used its flow wrongly (FlowError)
"""


class StageEvent(msgspec.Struct):
    process: str
    """Id of the process: the time at which the process began to record, and random digits."""
    number: int
    """Number of the event within its process, from 1 on; an `opened` event has 0. A missing number is a lost event."""
    at: int
    """Time of the event in microseconds since the epoch, by the clock of the process."""


class FileOpened(StageEvent, tag_field="kind", tag=OPENED):
    """Beginning of a file: the first event of each file."""

    format: int
    """Version of the format of the events."""
    service: str
    """Name of the service."""
    instance: str
    """Service, host and process id, for people."""


class ExecutionStarted(StageEvent, tag_field="kind", tag=STARTED, omit_defaults=True):
    """Start of an execution: a stage has received a message."""

    stage: str
    """Queue of the stage, which is its name."""
    message: str
    """Id of the message."""
    flow: str
    """Id of the flow."""
    trace: str
    """Human-readable name of the flow: its first 200 characters."""
    sender: str
    """Service that sent the message and, after a blank, its stage."""
    attempt: int
    """Number of the attempt: 1 plus the failures that count against the message."""
    deliveries: int
    """Number of dispatches of the message, this one included."""
    parent: str = ""
    """Id of the message whose stage sent this message; missing if no stage sent it."""
    queue: str | None = None
    """Queue of the message in the broker's history; missing if the message was published to a topic."""
    sequence: int | None = None
    """Sequence of the message in the broker's history; missing if the message was published to a topic."""
    accepted_ms: int | None = None
    """Time at which the broker accepted the message, in milliseconds since the epoch, by the clock of the broker;
    missing if the broker does not send the time."""
    exactly_once: bool = False
    """True if the stage has exactly-once processing, else missing."""
    taken: bool = False
    """True if the message was acknowledged before the stage ran, because a job of Spark keeps its batch; else
    missing."""
    broker: str = ""
    """Identity of the broker's data (`truenext-store`); missing in files of earlier versions."""


class SqlCommitted(StageEvent, tag_field="kind", tag=SQL_COMMITTED):
    """Commit of SQL: the database has confirmed the commit. The message is not acknowledged yet."""

    execution: int
    """Field `number` of the execution's `started` event."""


class ExecutionEnded(StageEvent, omit_defaults=True):
    """End of an execution: its outcome is known."""

    kind: ExecutionOutcome
    execution: int
    total_us: int
    """Microseconds from the arrival of the message in the service until its outcome was known."""
    run_us: int | None = None
    """Microseconds from the arrival of the message until the stage and its dependencies had ended; `total_us` if the
    stage did not return."""
    commit_us: int | None = None
    """Microseconds from the stage's return until the broker confirmed the commit; missing if nothing was committed."""
    error: str | None = None
    """Class of the exception that caused the outcome; missing if there was no exception."""
    given_up_for: GiveUpReason | None = None
    """Reason why the message is given up; missing if it is not. The message then becomes a dead letter, or moves to a
    stage that handles the failure."""


class ProcessClosed(StageEvent, tag_field="kind", tag=CLOSED):
    """End of a process: it has shut down normally, and records nothing more."""


EVENTS: tuple[type[StageEvent], ...] = (FileOpened, ExecutionStarted, SqlCommitted, ExecutionEnded, ProcessClosed)
"""Structs of all events, in the order in which a process records its first ones."""

Integer: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""Number with which a reader can calculate. Services record no other."""
Microseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999_999)]
"""Time since the epoch, up to the year 9999, or a duration. A line with another one is no event."""


class EventLine(msgspec.Struct, gc=False):
    """Event of any kind, as a reader decodes it. The fields are those of all events; a field that the line lacks has
    its default. Unknown fields and kinds are those of a later version, and are skipped."""

    kind: str
    process: str
    number: Integer
    at: Microseconds
    format: Integer = 0
    service: str = ""
    instance: str = ""
    stage: str = ""
    message: str = ""
    flow: str = ""
    trace: str = ""
    sender: str = ""
    attempt: Integer = 0
    deliveries: Integer = 0
    parent: str = ""
    queue: str | None = None
    sequence: Integer | None = None
    accepted_ms: Milliseconds | None = None
    exactly_once: bool = False
    taken: bool = False
    broker: str = ""
    execution: Integer = 0
    total_us: Microseconds | None = None
    run_us: Microseconds | None = None
    commit_us: Microseconds | None = None
    error: str | None = None
    given_up_for: str | None = None


OUTCOMES = frozenset(get_args(ExecutionOutcome))

_DECODER = msgspec.json.Decoder(EventLine)


def decode_line(line: bytes | memoryview) -> EventLine | None:
    """Decode a line of a file with events; None if the line is not an event."""
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, ValueError):
        return None


def decode_lines(lines: bytes) -> list[EventLine | None]:
    """Decode whole lines; None for each line that is not an event."""
    try:
        return list(_DECODER.decode_lines(lines))
    except (msgspec.MsgspecError, ValueError):
        return [decode_line(line) for line in lines.splitlines() if line]
