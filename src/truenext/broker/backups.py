"""Backups: makes backups of a running broker, one at a time, on a thread. Source: docs/backup.md

The event loop only starts and stops the thread, and reads its report. Copying is done by calls that leave the
interpreter to others: reads, writes, hashes, and LMDB's own copy.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event, Thread
from time import gmtime, strftime
from typing import Annotated

import msgspec

from truenext.errors import ConfigurationError, TruenextError
from truenext.history.held import HeldHistory
from truenext.model.limits import BACKUP_RATE, BACKUP_RATE_MIN
from truenext.store.backup import (
    BackupStopped,
    BackupWriter,
    Pace,
    check_backup_folder,
    incomplete_backups,
    new_backup_folder,
)
from truenext.store.embedded import EmbeddedStore
from truenext.store.folder import free_bytes
from truenext.store.held_state import HeldState

logger = logging.getLogger(__name__)


class BackupOptions(msgspec.Struct):
    """Options of one backup."""

    rate: Annotated[int, msgspec.Meta(ge=BACKUP_RATE_MIN)] = BACKUP_RATE
    """Bytes a second that are copied at most; at least 1,048,576."""
    history: bool = False
    """Whether the history is copied, too."""


class BackupReport(msgspec.Struct):
    """Progress of a backup, or its end."""

    state: str = "none"
    """`running`, `done`, `stopped` or `failed`; `none` if there was no backup since the broker was started."""
    folder: str = ""
    """Path of the backup on the broker's machine, once the folder was made."""
    batch: int = 0
    """Number of the last batch in the backup, over all runs of the broker; 0 before that is known."""
    copied: int = 0
    """Number of bytes that were copied."""
    total: int = 0
    """Number of bytes that are to be copied, about; 0 before that is known."""
    growth: int = 0
    """Bytes by which the file of the checkpoint has grown since the state is held. The file keeps this size, and later
    messages use the space."""
    error: str = ""
    """Reason why the backup has failed; else ""."""
    incomplete: list[str] = []
    """Names of folders in `backup_dir` that are no backups, because they were cut short. Those to which a broker still
    writes are not among them."""


class Backups:
    """Backups of one broker. All methods are called on the event loop."""

    def __init__(
        self,
        store: EmbeddedStore | None = None,
        data: Path | None = None,
        backups: Path | None = None,
        *,
        refusal: str = "this broker makes no backups",
        has_users: bool = False,
    ) -> None:
        """Make backups of the store in `data` in the folder `backups`. `refusal` says why this broker makes none; empty
        if it does. `has_users` tells whether the broker has users."""
        self._store = store
        self._data = data
        self._backups = backups
        self._refusal = refusal
        self._has_users = has_users
        self._stop = Event()
        self._thread: Thread | None = None
        self._report = BackupReport()

    def report(self) -> BackupReport:
        return self._report

    def start(self, options: BackupOptions) -> BackupReport:
        """Start a backup.

        Raises: ConfigurationError if this broker makes none, or one runs already
        """
        if self._refusal:
            raise ConfigurationError(self._refusal)
        if self._report.state == "running":
            raise ConfigurationError(
                "a backup runs already: wait until it has ended, or stop it (`truenext backup --stop`)"
            )
        assert self._store is not None and self._data is not None and self._backups is not None
        self._stop.clear()
        self._report = BackupReport("running")
        job = _Backup(self._store, self._data, self._backups, options, self._report, self._stop, self._has_users)
        self._thread = Thread(target=job.run, name="truenext-backup", daemon=True)
        self._thread.start()
        return self._report

    def stop(self) -> BackupReport:
        """Stop the backup that runs. It has ended when the report says so.

        Raises: ConfigurationError if none runs
        """
        if self._report.state != "running":
            raise ConfigurationError("no backup runs, so there is none to stop")
        self._stop.set()
        return self._report

    def close(self) -> None:
        """Stop the backup that runs, and wait for its end. To be called before the store is closed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


class _Backup:
    """One backup, on its thread. Other threads only read its report."""

    def __init__(
        self,
        store: EmbeddedStore,
        data: Path,
        backups: Path,
        options: BackupOptions,
        report: BackupReport,
        stop: Event,
        has_users: bool,
    ) -> None:
        self._store = store
        self._data = data
        self._backups = backups
        self._options = options
        self._report = report
        self._stop = stop
        self._has_users = has_users
        self._disk_space = store.disk_space

    def run(self) -> None:
        report = self._report
        try:
            self._run()
            report.state = "done"
            # Like a stopped or failed one, so that the log has the end of each backup.
            logger.warning(
                "backup made", extra={"folder": report.folder, "batch": report.batch, "bytes": report.copied}
            )
        except BackupStopped:
            report.state = "stopped"
            logger.warning("backup stopped", extra={"folder": report.folder})
        except Exception as error:
            report.error = _reason(error)
            report.state = "failed"
            logger.error("backup failed", extra={"reason": report.error})
        finally:
            self._disk_space.backup_here = self._disk_space.backup_growth = 0

    def _run(self) -> None:
        check_backup_folder(self._backups, self._data)
        self._report.incomplete = incomplete_backups(self._backups)
        self._is_here = self._backups.stat().st_dev == self._data.stat().st_dev
        with ExitStack() as resources:
            state, history = self._store.hold_state(self._hold_history)
            resources.enter_context(closing(state))
            made = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime())
            self._report.batch = state.batch
            self._report.total = state.size()
            if history is not None:
                resources.enter_context(closing(history))
                self._report.total += history.size()
            self._check_space(state)
            path = resources.enter_context(new_backup_folder(self._backups))
            self._report.folder = str(path)
            writer = BackupWriter(
                path,
                Pace(self._options.rate, self._stop),
                check_space=lambda: self._check_space(state),
                on_written=self._on_written,
            )
            with closing(state.files()) as files:
                writer.write(files)
            if history is not None:
                writer.write(history.files())
            writer.finish(
                identity=state.identity,
                batch=state.batch,
                made=made,
                has_history=history is not None,
                has_users=self._has_users,
            )

    def _hold_history(self) -> HeldHistory | None:
        """Return the history as it is now; None if it is not to be copied."""
        return HeldHistory(self._data / "history") if self._options.history else None

    def _on_written(self, size: int) -> None:
        self._report.copied += size

    def _check_space(self, state: HeldState) -> None:
        """Count as used what the backup still needs.

        Raises: ConfigurationError if a disk has too little space for that
        """
        remaining = max(0, self._report.total - self._report.copied)
        here = remaining if self._is_here else 0
        self._report.growth = self._disk_space.backup_growth = state.growth()
        self._disk_space.backup_here = here
        if not self._disk_space.has_space_for_backup(here):
            raise ConfigurationError(
                f"the disk of {self._data} is too full for a backup: free disk space, or set backup_dir to a folder on "
                "another disk"
            )
        if free_bytes(self._backups) < remaining:
            raise ConfigurationError(
                f"the disk of backup_dir {self._backups} has too little space: {remaining:,} bytes more are needed"
            )


def _reason(error: Exception) -> str:
    if isinstance(error, TruenextError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, OSError) else repr(error)
