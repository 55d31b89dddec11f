"""Events of stages: records each execution in this process. The audit joins them to the broker's history.

Each event is a line of JSON (docs/reference/history.md). The worker appends it in memory, and a thread writes, so that
no stage waits for the disk. A crash of the process loses the events of the last tenth of a second at most, and
perhaps the end of the last line. If the disk fails, events are lost and stages go on; events are numbered, so that
readers detect gaps.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from threading import Event, Lock, Thread

import msgspec

from truenext.client.tasks.connection import Message
from truenext.clock import monotonic, time_ns
from truenext.errors import ConfigurationError
from truenext.history.stage_files import FILE_BYTES_MAX, FILE_SECONDS_MAX, FORMAT, delete_old_files, stage_file
from truenext.stage.core.definitions import Stage
from truenext.stage.core.envelope import Envelope
from truenext.stage.interceptors.interceptor import ExecutionOutcome, ExecutionResult

_logger = logging.getLogger("truenext.stage")

UNWRITTEN_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of events that wait in memory for the disk; further events are lost. A busy process makes 2 MiB a second."""
GATHER_S = 0.05
"""Seconds from the first unwritten event until the next write."""
RETRY_S = 5.0
"""Seconds between attempts to write to a disk that fails."""
TRACE_MAX = 200
"""Characters of a trace that are recorded."""
_QUEUE = "/queue/"
_SEQUENCE = "truenext-sequence"


class StageEvent(msgspec.Struct):
    process: str
    """Id of the process: the time at which it began to write, and random digits."""
    number: int
    """Number of the event: 1 for the first of a process, one more for each; 0 with `opened`. A missing number is a lost
    event."""
    at: int
    """Microseconds since the epoch, by the clock of the process."""


class FileOpened(StageEvent, tag_field="kind", tag="opened"):
    """A file begins. It is the first event of each file."""

    format: int
    """Version of the format."""
    service: str
    """Name of the service."""
    instance: str
    """Name of the service with its host and process."""


class ExecutionStarted(StageEvent, tag_field="kind", tag="started", omit_defaults=True):
    """A stage is about to run with a message."""

    stage: str
    """Queue of the stage, which is its name."""
    message: str
    """Id of the message."""
    flow: str
    """Id of the flow."""
    trace: str
    """Name of the flow for people, its first 200 characters."""
    sender: str
    """Service that sent the message and, after a blank, its stage."""
    attempt: int
    """Number of the attempt; 1 if no consumer has failed with the message."""
    deliveries: int
    """Number of dispatches of the message, this one included."""
    parent: str = ""
    """Id of the message whose stage sent this one; missing if none did."""
    queue: str | None = None
    """Queue of the message in the broker's history; missing if it was published."""
    sequence: int | None = None
    """Sequence of the message in the broker's history; missing if it was published."""
    exactly_once: bool = False
    """True if the stage is an exactly-once stage, else missing."""


class SqlCommitted(StageEvent, tag_field="kind", tag="SQL committed"):
    """The database has confirmed the commit, and the message is not acknowledged yet."""

    execution: int
    """Field `number` of the `started` that it belongs to."""


class ExecutionEnded(StageEvent, omit_defaults=True):
    """An execution has an outcome."""

    kind: ExecutionOutcome
    execution: int
    total_us: int
    """Microseconds from the arrival of the message in the service until its outcome was known."""
    run_us: int | None = None
    """Microseconds of these in the stage with its dependencies."""
    commit_us: int | None = None
    """Microseconds from there until the commit was confirmed; 0 if it was not."""
    error: str | None = None
    """Class of the exception; missing with `completed` and `already processed`."""


class ProcessClosed(StageEvent, tag_field="kind", tag="closed"):
    """The process has ended in order, and writes nothing more."""


class StageEvents:
    """Recorder of events. Methods but `close` are for the event loop's thread, and neither wait nor raise."""

    def __init__(self, folder: Path, service: str, instance: str) -> None:
        """Create the folder and its first file, and start the thread that writes.

        Raises: ConfigurationError if `folder` cannot be written to
        """
        self._folder = folder
        self._service = service
        self._instance = instance
        self.process = f"{time_ns() // 1_000_000:012x}{secrets.token_hex(4)}"
        """Unique id of the process, in all its events."""
        self._encoder = msgspec.json.Encoder()
        self._last_event_number = 0
        self._unwritten = bytearray()
        self._lost_count = 0
        self._lock = Lock()
        self._has_events = Event()
        self._is_closing = Event()
        self._file = -1
        self._file_number = 0
        self._file_size = 0
        self._file_since = 0.0
        self._is_failing = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._start_file()
        except OSError as error:
            raise ConfigurationError(f"the events of stages cannot be written to {folder}: {error}") from error
        self._thread = Thread(target=self._run_writer, name="truenext stage events", daemon=True)
        self._thread.start()

    # ---- Recording ----

    def add_started(self, stage: Stage, message: Message, envelope: Envelope) -> int:
        """Record the start of an execution, and return its number, to which later events refer."""
        destination, flow = message.destination, envelope.flow
        is_queue = destination.startswith(_QUEUE)
        headers = message.headers
        self._last_event_number = number = self._last_event_number + 1
        self._append(
            ExecutionStarted(
                process=self.process,
                number=number,
                at=time_ns() // 1000,
                stage=stage.queue,
                message=envelope.id,
                flow=flow.id,
                trace=flow.trace[:TRACE_MAX],
                sender=envelope.sender,
                attempt=message.attempts + 1,
                deliveries=message.deliveries,
                parent=envelope.parent,
                # A published message is in a queue of its connection, which the broker's history does not have.
                queue=destination[len(_QUEUE) :] if is_queue else None,
                sequence=message.sequence if is_queue and _SEQUENCE in headers else None,
                exactly_once=bool(stage.settings.exactly_once),
            )
        )
        return number

    def add_sql_committed(self, execution: int) -> None:
        self._last_event_number = number = self._last_event_number + 1
        self._append(SqlCommitted(process=self.process, number=number, at=time_ns() // 1000, execution=execution))

    def add_ended(self, execution: int, result: ExecutionResult) -> None:
        error = result.error
        self._last_event_number = number = self._last_event_number + 1
        self._append(
            ExecutionEnded(
                process=self.process,
                number=number,
                at=time_ns() // 1000,
                kind=result.outcome,
                execution=execution,
                total_us=round(result.total * 1e6),
                run_us=_in_us(result.run),
                commit_us=_in_us(result.commit),
                error=None if error is None else type(error).__qualname__,
            )
        )

    def _append(self, event: StageEvent) -> None:
        with self._lock:
            unwritten = self._unwritten
            if len(unwritten) >= UNWRITTEN_BYTES_MAX:
                self._lost_count += 1
                return
            is_first = not unwritten
            self._encoder.encode_into(event, unwritten, -1)
            unwritten += b"\n"
        if is_first:
            self._has_events.set()

    # ---- Stop ----

    def close(self) -> None:
        """Write all recorded events, unless the disk fails, and end the thread."""
        self._last_event_number += 1
        self._append(ProcessClosed(process=self.process, number=self._last_event_number, at=time_ns() // 1000))
        self._is_closing.set()
        self._has_events.set()
        self._thread.join()

    # ---- Writer thread ----

    def _run_writer(self) -> None:
        while not self._is_closing.is_set():
            self._has_events.wait()
            self._is_closing.wait(GATHER_S)
            self._write_pending()
        # Events that came during the last write.
        self._write_pending()
        if self._file >= 0:
            os.close(self._file)

    def _write_pending(self) -> None:
        with self._lock:
            content, self._unwritten = self._unwritten, bytearray()
            lost, self._lost_count = self._lost_count, 0
            self._has_events.clear()
        if not content:
            return
        try:
            if self._needs_new_file():
                self._start_file()
            self._write(content)
        except OSError as error:
            if not self._is_failing:
                facts = {"folder": str(self._folder), "error": str(error)}
                _logger.warning("events of stages cannot be written, and are lost", extra=facts)
            self._is_failing = True
            # The file may end with half a line, so nothing more is written to it.
            self._close_file()
            self._is_closing.wait(RETRY_S)
            return
        if lost or self._is_failing:
            _logger.warning("events of stages are written again; earlier ones were lost, as the disk was too slow")
        self._is_failing = False

    def _needs_new_file(self) -> bool:
        return (
            self._file < 0
            or self._file_size >= FILE_BYTES_MAX
            or monotonic() - self._file_since >= FILE_SECONDS_MAX
            # Another process has deleted it, to keep within the limits.
            or not os.fstat(self._file).st_nlink
        )

    def _start_file(self) -> None:
        """Start the next file, and delete old ones. Raises: OSError"""
        self._close_file()
        self._file_number += 1
        path = stage_file(self._folder, self.process, self._file_number)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file_since = monotonic()
        # Number 0, since it is in each file and is not counted as an event.
        opened = FileOpened(self.process, 0, time_ns() // 1000, FORMAT, self._service, self._instance)
        try:
            self._write(self._encoder.encode(opened) + b"\n")
        except OSError:
            # A full disk still takes empty files, any number of them.
            path.unlink()
            raise
        delete_old_files(self._folder)

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._file_size = 0

    def _write(self, content: bytes | bytearray) -> None:
        """Write all of `content`, with several calls if the system takes only a part. Raises: OSError"""
        view = memoryview(content)
        while view:
            written = os.write(self._file, view)
            self._file_size += written
            view = view[written:]


def _in_us(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)
