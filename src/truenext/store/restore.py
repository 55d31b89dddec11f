"""Restore: makes a data folder of a backup, checked and with an identity of its own.

    NEW/restoring/     the data folder while it is made; its files go to NEW when all is well

No broker starts on a folder with `restoring`: it has a file that is not a broker's.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path

from truenext.errors import ConfigurationError, StoreError
from truenext.model.record import verify_record
from truenext.store import folder
from truenext.store.changes import PUT_HEADER_BYTES, PUTS_OFFSET, decode_changes
from truenext.store.check import check
from truenext.store.checkpoint import Checkpoint
from truenext.store.journal import Journal, describe_lost_tail
from truenext.store.manifest import BackupFile, Manifest, read_manifest
from truenext.store.renewal import renew
from truenext.store.salvage.damage import Damage
from truenext.store.store_errors import STORAGE_ERRORS, damage_error, is_no_space
from truenext.store.upgrade.upgrade import upgrade

RESTORING = "restoring"

COPY_BYTES = 1024 * 1024

PIECES_MAX = 8
"""Number of pieces that may wait for their hash."""


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a restore."""

    manifest: Manifest
    identity: str
    """New identity of the folder."""
    foreign: list[str]
    """The first few files in the backup that are not in its manifest, and were left out."""


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
        _check_store(backup, data, last_history_chunk(data / "history"))
        identity = renew(data)
        (data / "lock").unlink()
        for parent, _, _ in os.walk(data):
            folder.sync_folder(Path(parent))
        # In this order: without `lmdb`, a journal is refused.
        for name in ("history", "journal", "lmdb"):
            if (data / name).exists():
                (data / name).rename(new / name)
    folder.sync_folder(new)
    return Restored(manifest, identity, _foreign_files(backup, manifest))


def _foreign_files(backup: Path, manifest: Manifest) -> list[str]:
    own = {folder.MANIFEST, *(file.name for file in manifest.files)}
    files = (str(path.relative_to(backup)) for path in backup.rglob("*") if not path.is_dir())
    return sorted(name for name in files if name not in own)[: folder.FOREIGN_FILES_SHOWN]


def _check_target(backup: Path, new: Path) -> None:
    if new.resolve().is_relative_to(backup.resolve()):
        raise ConfigurationError(f"{new} is inside the backup: name a new folder elsewhere")
    if not new.absolute().parent.is_dir():
        raise ConfigurationError(f"{new.parent} is not there: make this folder, or name a new one in another")
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
    source_path = backup / file.name
    if not source_path.is_file():
        # To open a FIFO would wait for its writer.
        problem = "is no regular file" if source_path.exists() else "is missing"
        raise StoreError(f"{backup} is damaged: {file.name} {problem}; restore another backup")
    # Hashes are computed beside the copy, and take longer.
    with (
        source_path.open("rb", buffering=0) as source,
        path.open("xb", buffering=0) as target,
        ThreadPoolExecutor(1) as hashing,
    ):
        os.fchmod(target.fileno(), 0o600)
        pending: deque[Future[None]] = deque()
        while piece := source.read(COPY_BYTES):
            pending.append(hashing.submit(digest.update, piece))
            folder.write(target.fileno(), piece, size)
            size += len(piece)
            if len(pending) > PIECES_MAX:
                pending.popleft().result()
            yield len(piece)
        os.fsync(target.fileno())
    if size != file.size:
        problem = f"{file.name} has {size:,} bytes instead of {file.size:,}"
        raise StoreError(f"{backup} is damaged: {problem}; restore another backup")
    if digest.hexdigest() != file.sha256:
        raise StoreError(f"{backup} is damaged: {file.name} was changed; restore another backup")


def _check_store(backup: Path, data: Path, last_history_chunk: tuple[int, int] | None) -> None:
    """Read everything in the store, and compare it with its checksums.

    Raises: StoreError if the store is damaged: it was when the backup was made
    """
    try:
        _read_store(data, last_history_chunk)
    except (StoreError, *STORAGE_ERRORS) as error:
        # Slower, and names all that is damaged.
        found: list[Damage] = []
        check(data, found.append, lambda done, total: None, last_history_chunk=last_history_chunk)
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        what = f"{found[0]}{others}" if found else str(error)
        raise StoreError(
            f"the store in {backup} was damaged when it was copied: {what}; restore an earlier backup"
        ) from error


def _read_store(data: Path, last_history_chunk: tuple[int, int] | None) -> None:
    # A backup may be older than this version.
    with closing(Checkpoint(data / "lmdb", may_be_new=False, upgrade=lambda env: upgrade(env, data))) as checkpoint:
        checkpoint.verify(verify_record)
        position = checkpoint.read()[1]
        (data / "journal").mkdir(mode=0o700, exist_ok=True)
        journal = Journal(data / "journal", salt=checkpoint.salt, segment_bytes=checkpoint.segment_bytes)
    history = b""
    with closing(journal):
        for _, _, payload in journal.replay(position):
            history = _verify_frame(payload) or history
        lost = describe_lost_tail(journal.last_frame_number, position.durable_frame, history, last_history_chunk)
    if lost:
        raise damage_error("journal", lost, data)


def _verify_frame(payload: memoryview) -> bytes:
    """Verify the records in a frame, and return its history."""
    changes = decode_changes(payload)
    at = PUTS_OFFSET
    for key, size in chain(changes.puts, changes.transient_puts):
        at += PUT_HEADER_BYTES
        verify_record(key, bytes(payload[at : at + size]))
        at += size
    return changes.history
