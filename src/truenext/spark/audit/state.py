"""State of an audit that goes on: a folder with the cut at the end of the audited history.

    STATE/lock             held by the audit that uses the folder
    STATE/state.json       AuditState
    STATE/cut-NUMBER/      Parquet: the rows of the cut before the event NUMBER, with the columns SAVED_COLUMNS
    STATE/name             of `--follow`: name under which findings are sent to a queue
    STATE/checkpoint/      of `--follow`: Spark's checkpoint of the query

The cut is written first, and `state.json` renamed into place. So the folder always has the state of one audit.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from truenext.errors import ConfigurationError
from truenext.model.events import HISTORY_VERSION
from truenext.spark.audit.model import TimelineRow
from truenext.spark.output import make_durable, sync

STATE_FORMAT = 2
"""Version of the files of a state."""
_STATE = "state.json"
_LOCK = "lock"
_NAME = "name"
_OWN = re.compile(r"state\.json(\.unfinished)?|lock|cut-\d+|checkpoint|name(\.unfinished)?")
"""Names of the files and folders in a folder of a state, with those of `--follow`."""


class AuditSummary(msgspec.Struct, frozen=True):
    """Result of one audit: the events from one cut to the next."""

    first_event: int
    last_event: int
    last_at: int
    """Time of the last event in microseconds."""
    events: int
    findings: dict[str, tuple[int, str]]
    """Number and sentence of each kind of finding."""
    notes: tuple[str, ...]


class AuditState(msgspec.Struct, frozen=True, kw_only=True):
    """Audited history up to the cut, in short."""

    format: int = STATE_FORMAT
    history_version: int = HISTORY_VERSION
    store: str | None
    """Identity of the broker's data; None if the history does not name it."""
    queue: str | None
    """Queue that is audited alone."""
    run: int
    """Run of the last event."""
    last_event: int
    last_at: int
    """Time of the last event in microseconds."""
    is_recovered: bool
    """True if that run has finished its recovery."""
    is_whole: bool
    """True if the history has the first event ever, and every run since."""
    first_event: int
    """First event of the audited history."""
    marks: tuple[TimelineRow, ...]
    """Starts of runs, and gaps."""
    audits: tuple[AuditSummary, ...] = ()

    @property
    def next_event(self) -> int:
        """First event that is not audited yet."""
        return self.last_event + 1

    def check_queue(self, queue: str | None) -> None:
        """Check that an audit of one queue, or of all (None), can go on from this state.

        Raises: ConfigurationError if the state is of another queue
        """
        if queue != self.queue:
            what = "all queues" if self.queue is None else f"the queue {self.queue!r} alone"
            raise ConfigurationError(
                f"the state is that of an audit of {what}: audit the same, or name an empty folder"
            )


def check_apart(state: Path, out: Path) -> None:
    """Check that the tables of an audit get another folder than its state, which has no other files.

    Raises: ConfigurationError if they do not
    """
    if out.resolve().is_relative_to(state.resolve()):
        raise ConfigurationError(f"--out {out} is the folder of --state, or is in it: name a folder outside")


class StateFolder:
    """Folder of a state, used by one audit at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    @contextmanager
    def locked(cls, folder: Path) -> Iterator[StateFolder]:
        """Make the folder if it is missing, and lock it for the duration of a `with` block.

        Raises: ConfigurationError if another audit uses the folder, it has other files, or it cannot be written
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if others := [each.name for each in folder.iterdir() if _OWN.fullmatch(each.name) is None]:
                raise ConfigurationError(
                    f"{folder} has other files than a state, such as {min(others)}: name an empty folder, or one that "
                    "an audit with --state has made"
                )
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigurationError(f"cannot write to {folder}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(
                    f"another audit uses the state in {folder}: wait until it ends, or name another folder"
                ) from None
            yield cls(folder)
        finally:
            os.close(descriptor)

    def read(self) -> AuditState | None:
        """Return the state; None if no audit has left one here.

        Raises: ConfigurationError if the state is damaged, or of another version
        """
        path = self._folder / _STATE
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        try:
            versions = msgspec.json.decode(content, type=_Versions)
            if versions == _Versions(STATE_FORMAT, HISTORY_VERSION):
                state = msgspec.json.decode(content, type=AuditState)
                if not self.cut_folder(state.next_event).is_dir():
                    raise msgspec.DecodeError(f"{self.cut_folder(state.next_event).name} is missing")
                return state
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"the state in {self._folder} is damaged ({error}): name an empty folder, and audit from the beginning"
            ) from error
        raise ConfigurationError(
            f"the state in {self._folder} is of history version {versions.history_version} and format "
            f"{versions.format}; this truenext goes on from {HISTORY_VERSION} and {STATE_FORMAT}: name an empty "
            f"folder, and audit from the beginning"
        )

    def cut_folder(self, event: int) -> Path:
        """Return the folder of the cut before an event."""
        return self._folder / f"cut-{event:016}"

    def write(self, state: AuditState) -> None:
        """Replace the state. The cut before the event after its last one must be in its folder; others are deleted."""
        cut = self.cut_folder(state.next_event)
        make_durable(cut)
        self._replace(_STATE, msgspec.json.format(msgspec.json.encode(state)))
        for each in self._folder.glob("cut-*"):
            if each != cut:
                shutil.rmtree(each, ignore_errors=True)

    def name(self) -> str:
        """Return the name under which the findings of this state are sent to a queue, once each. It stays the same."""
        path = self._folder / _NAME
        with suppress(FileNotFoundError):
            if name := path.read_text().strip():
                return name
        name = f"audit-{secrets.token_hex(8)}"
        self._replace(_NAME, f"{name}\n".encode())
        return name

    def _replace(self, name: str, content: bytes) -> None:
        """Replace a file: whenever the power fails, the folder has the old one or the new one."""
        unfinished = self._folder / f"{name}.unfinished"
        unfinished.write_bytes(content)
        sync(unfinished)
        unfinished.replace(self._folder / name)
        sync(self._folder)


class _Versions(msgspec.Struct):
    format: int
    history_version: int
