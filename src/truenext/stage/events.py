"""Recorder of events of stages: the start, the SQL commit and the end of each execution. The audit joins these events
to the broker's history.

Each event is a line of JSON (docs/reference/history.md). The worker appends events in memory, and a thread writes them,
so that no stage waits for the disk. A crash of the process loses the events of the last tenth of a second at most, and
may leave the last line incomplete. If the disk fails, events are lost, but stages continue. Events are numbered, so
that a reader detects gaps.
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
from truenext.flows.envelope import Envelope
from truenext.flows.events import (
    TRACE_MAX,
    ExecutionEnded,
    ExecutionStarted,
    FileOpened,
    ProcessClosed,
    SqlCommitted,
    StageEvent,
)
from truenext.history.stage_files import FILE_BYTES_MAX, FILE_SECONDS_MAX, FORMAT, delete_old_files, stage_file
from truenext.stage.core.definitions import Stage
from truenext.stage.interceptors.interceptor import ExecutionResult

_logger = logging.getLogger("truenext.stage")

UNWRITTEN_BYTES_MAX = 16 * 1024 * 1024
"""Largest number of bytes of events that wait in memory for the disk. Further events are lost. A busy process makes 2
MiB a second."""
GATHER_S = 0.05
"""Seconds from the first unwritten event until the next write. Events of this time are written together."""
RETRY_S = 5.0
"""Seconds between attempts to write to a disk that fails."""
_QUEUE = "/queue/"
_SEQUENCE = "truenext-sequence"


class StageEvents:
    """Recorder of events. All methods except `close` are called in the event loop's thread, never wait, and never
    raise."""

    def __init__(self, folder: Path, service: str, instance: str) -> None:
        """Create the folder and its first file, and start the thread that writes.

        Raises: ConfigurationError if `folder` cannot be written to
        """
        self._folder = folder
        self._service = service
        self._instance = instance
        self.process = f"{time_ns() // 1_000_000:012x}{secrets.token_hex(4)}"
        """Unique id of the process. Each of its events has this id."""
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

    def add_started(self, stage: Stage, message: Message, envelope: Envelope, broker: str = "") -> int:
        """Record the start of an execution, and return the event's number, by which later events name the execution.
        `broker` is the identity of the broker that the message is from."""
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
                accepted_ms=message.timestamp_ms or None,
                exactly_once=bool(stage.settings.exactly_once),
                broker=broker,
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
                given_up_for=result.given_up_for,
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
        """Start the next file, and delete old files. Raises: OSError if the file cannot be made or written"""
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
        """Write all of `content`. The system may take only a part of it at each call. Raises: OSError if the disk
        fails"""
        view = memoryview(content)
        while view:
            written = os.write(self._file, view)
            self._file_size += written
            view = view[written:]


def _in_us(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)
