"""Backup: writes the files of a held state into a new folder, at a bounded rate, and a manifest at the end.

backup_dir/20261130T025055Z-1a2b/
    manifest-new       from the start, empty and locked; renamed to `manifest` when all is durable
    journal/           as in a data folder (embedded.py)
    lmdb/
    history/           if it was asked for
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from threading import Event
from time import gmtime, strftime

from truenext.clock import monotonic
from truenext.errors import ConfigurationError, StoreError
from truenext.store import folder
from truenext.store.folder import MANIFEST
from truenext.store.manifest import BackupFile, Manifest, encode_manifest
from truenext.store.store_errors import is_no_space
from truenext.version import VERSION

_BACKUP_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4}")

SYNC_BYTES = 4 * 1024 * 1024
"""Bytes after which a file is synced. A sync of very many would delay those of the journal."""

Files = Iterable[tuple[str, Iterator[bytes]]]
"""Name and content of each file."""


class BackupStopped(Exception):
    """A backup was stopped."""


class Pace:
    """Bound on the rate of a copy."""

    def __init__(self, rate: int, stop: Event) -> None:
        """`rate` is bytes a second. `stop` ends the copy."""
        self._rate = rate
        self._stop = stop
        self._due = monotonic()

    def wait(self, size: int) -> None:
        """Wait until `size` further bytes may be copied. Raises: BackupStopped if the copy is to end"""
        now = monotonic()
        # Time that was not used is lost: the disk would be busy with a burst.
        self._due = max(self._due, now) + size / self._rate
        if self._stop.wait(max(0.0, self._due - now)):
            raise BackupStopped


def check_backup_folder(backups: Path, data: Path) -> None:
    """Check the folder in which backups are made.

    Raises: ConfigurationError if it cannot be used, or is not safe; OSError if it cannot be read
    """
    check_place_of_backups(backups, data)
    if backups.stat().st_uid != os.geteuid():
        raise ConfigurationError(
            f"backup_dir {backups} belongs to another user, who could change backups: name one of the broker's user"
        )
    if folder.is_writable_by_others(backups):
        raise ConfigurationError(
            f"other users of this machine can write to backup_dir {backups}: run `chmod go-w` on it"
        )
    if os.statvfs(backups).f_flag & os.ST_RDONLY:
        raise ConfigurationError(
            f"backup_dir {backups} is read-only for the broker: let it write there, in a unit of systemd by "
            f"`ReadWritePaths={backups.absolute()}`, in a container by a volume, else by mounting the disk for writing"
        )
    if not os.access(backups, os.W_OK | os.X_OK):
        raise ConfigurationError(f"backup_dir {backups} is not writable for the broker's user: give it the right")


def check_place_of_backups(backups: Path, data: Path) -> None:
    """Check that the folder for backups is there, and outside the data folder.

    Raises: ConfigurationError if not; OSError if it cannot be read
    """
    if not backups.is_dir():
        raise ConfigurationError(f"backup_dir {backups} is not there: make this folder, for the broker's user alone")
    if backups.resolve().is_relative_to(data.resolve()):
        raise ConfigurationError(f"backup_dir {backups} is inside the data folder {data}: name a folder outside")


def incomplete_backups(backups: Path) -> list[str]:
    """Return the names of folders that a backup has left without a manifest, in order. A folder to which a broker still
    writes is not among them, nor one without the name of a backup. Raises: OSError"""
    return sorted(
        each.name
        for each in backups.iterdir()
        if _BACKUP_NAME.fullmatch(each.name) and os.access(each, os.W_OK | os.X_OK) and _is_cut_short(each)
    )


def _is_cut_short(backup: Path) -> bool:
    return not _is_being_written(backup) and not (backup / MANIFEST).exists()


def _is_being_written(backup: Path) -> bool:
    try:
        file = os.open(backup / f"{MANIFEST}-new", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


@contextmanager
def new_backup_folder(backups: Path) -> Iterator[Path]:
    """Make a folder for a backup, and remove it if the block raises an error.

    Raises: OSError if it cannot be made
    """
    path = backups / f"{strftime('%Y%m%dT%H%M%SZ', gmtime())}-{secrets.token_hex(2)}"
    path.mkdir(mode=0o700)
    try:
        # First of all, so that a cut backup is known as one. The lock tells other brokers that this one is not cut.
        with open(_create(path / f"{MANIFEST}-new")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


class BackupWriter:
    """Writer of one backup."""

    def __init__(
        self, path: Path, pace: Pace, *, check_space: Callable[[], None], on_written: Callable[[int], None]
    ) -> None:
        """`check_space` is called every few megabytes, and raises an error if the backup may not go on. `on_written`
        gets the size of each piece that was written."""
        self.path = path
        self._pace = pace
        self._check_space = check_space
        self._on_written = on_written
        self._files: list[BackupFile] = []

    def write(self, files: Files) -> None:
        """Write files, and make them durable.

        Raises: BackupStopped; StoreError if the disk is full; OSError if it fails
        """
        try:
            for name, content in files:
                self._files.append(self._write_file(name, content))
        except OSError as error:
            if is_no_space(error):
                raise StoreError(f"the disk of {self.path.parent} is full: free disk space") from error
            raise

    def _write_file(self, name: str, content: Iterable[bytes]) -> BackupFile:
        path = self.path / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _create(path)
        digest = sha256()
        size = synced = 0
        try:
            for chunk in content:
                self._pace.wait(len(chunk))
                digest.update(chunk)
                folder.write(file, chunk, size)
                size += len(chunk)
                if size - synced >= SYNC_BYTES:
                    self._check_space()
                    _sync(file, synced, size)
                    synced = size
                self._on_written(len(chunk))
            _sync(file, synced, size)
        finally:
            os.close(file)
        return BackupFile(name, size, digest.hexdigest())

    def finish(self, *, identity: str, batch: int, made: str, has_history: bool, has_users: bool) -> None:
        """Write the manifest, after which the folder is a backup. Raises: OSError if the disk fails"""
        manifest = Manifest(
            truenext=VERSION,
            identity=identity,
            batch=batch,
            made=made,
            history=has_history,
            users=has_users,
            files=self._files,
        )
        for parent, _, _ in os.walk(self.path):
            folder.sync_folder(Path(parent))
        new = self.path / f"{MANIFEST}-new"
        file = os.open(new, os.O_WRONLY | os.O_CLOEXEC)
        try:
            folder.write(file, encode_manifest(manifest), 0)
            os.fsync(file)
        finally:
            os.close(file)
        new.rename(self.path / MANIFEST)
        folder.sync_folder(self.path)
        folder.sync_folder(self.path.parent)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _sync(file: int, start: int, end: int) -> None:
    os.fdatasync(file)
    if hasattr(os, "posix_fadvise"):
        # They are not read again soon; the pages of the checkpoint are.
        os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)
