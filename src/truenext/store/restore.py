"""Restore: makes a data folder of a backup, checked and with an identity of its own.

    NEW/restoring/     the data folder while it is made; its files go to NEW when all is well

No broker starts on a folder with `restoring`: it has a file that is not a broker's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from truenext.errors import ConfigurationError, StoreError
from truenext.store import folder
from truenext.store.check import SalvageSummary, check
from truenext.store.manifest import BackupFile, Manifest, read_manifest
from truenext.store.renewal import renew
from truenext.store.salvage.damage import Damage
from truenext.store.store_errors import is_no_space

RESTORING = "restoring"

COPY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a restore."""

    manifest: Manifest
    identity: str
    """New identity of the folder."""
    summary: SalvageSummary
    """Content of the folder."""


def restore(
    backup: Path,
    new: Path,
    on_progress: Callable[[int, int], None],
    last_history_chunk: Callable[[Path], tuple[int, int] | None],
) -> Restored:
    """Make the data folder `new` of a backup. On return it is complete, durable and checked; after an error there is
    nothing in it.

    `on_progress` gets the bytes copied and their total. `last_history_chunk` returns run and first event of the last
    chunk of a batch in a folder of history.

    Raises: ConfigurationError if the backup is none, or `new` cannot be used; StoreError if the backup is damaged;
    OSError if the disk fails
    """
    manifest = read_manifest(backup)
    _check_target(backup, new)
    with _restoring_folder(new) as data:
        _check_space(new, manifest.size)
        copied = 0
        for file in manifest.files:
            for size in _copy(backup, file, data):
                copied += size
                on_progress(copied, manifest.size)
        summary = _check_store(backup, data, last_history_chunk(data / "history"))
        identity = renew(data)
        (data / "lock").unlink()
        for parent, _, _ in os.walk(data):
            folder.sync_folder(Path(parent))
        # In this order: without `lmdb`, a journal is refused.
        for name in ("history", "journal", "lmdb"):
            if (data / name).exists():
                (data / name).rename(new / name)
    folder.sync_folder(new)
    return Restored(manifest, identity, summary)


def _check_target(backup: Path, new: Path) -> None:
    if new.resolve().is_relative_to(backup.resolve()):
        raise ConfigurationError(f"{new} is inside the backup: name a new folder elsewhere")
    if new.exists() and not new.is_dir():
        raise ConfigurationError(f"{new} is not a folder: name a new one")
    if new.is_dir() and {each.name for each in new.iterdir()} - folder.IGNORED_FILES:
        raise ConfigurationError(f"{new} is not empty: name a new folder")


@contextmanager
def _restoring_folder(new: Path) -> Iterator[Path]:
    """Make the folder in which a data folder is made, and remove all of it after an error."""
    is_new = not new.exists()
    folder.make(new)
    data = new / RESTORING
    data.mkdir(mode=0o700)
    try:
        yield data
    except BaseException as error:
        for name in (RESTORING, "history", "journal", "lmdb"):
            shutil.rmtree(new / name, ignore_errors=True)
        if is_new:
            new.rmdir()
        if is_no_space(error):
            raise ConfigurationError(f"the disk of {new} is full: free disk space, or name another folder") from error
        raise
    data.rmdir()


def _check_space(new: Path, size: int) -> None:
    if (free := folder.free_bytes(new)) < size:
        raise ConfigurationError(
            f"the disk of {new} has too little space: the backup has {size:,} bytes, and {free:,} are free"
        )


def _copy(backup: Path, file: BackupFile, data: Path) -> Iterator[int]:
    """Copy a file, and yield the size of each piece. Raises: StoreError if it is not what the manifest says"""
    path = data / file.name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = sha256()
    size = 0
    try:
        source = (backup / file.name).open("rb", buffering=0)
    except FileNotFoundError as error:
        raise StoreError(f"{backup} is damaged: {file.name} is missing; restore another backup") from error
    with source, path.open("xb", buffering=0) as target:
        os.fchmod(target.fileno(), 0o600)
        while piece := source.read(COPY_BYTES):
            digest.update(piece)
            folder.write(target.fileno(), piece, size)
            size += len(piece)
            yield len(piece)
        os.fsync(target.fileno())
    if size != file.size:
        problem = f"{file.name} has {size:,} bytes instead of {file.size:,}"
        raise StoreError(f"{backup} is damaged: {problem}; restore another backup")
    if digest.hexdigest() != file.sha256:
        raise StoreError(f"{backup} is damaged: {file.name} was changed; restore another backup")


def _check_store(backup: Path, data: Path, last_history_chunk: tuple[int, int] | None) -> SalvageSummary:
    """Check the store.

    Raises: StoreError if it is damaged: it was when the backup was made
    """
    found: list[Damage] = []
    summary = check(data, found.append, lambda done, total: None, last_history_chunk=last_history_chunk)
    if found:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise StoreError(
            f"the store in {backup} was damaged when it was copied: {found[0]}{others}; restore an earlier backup"
        )
    return summary
