"""Manifest of a backup: what the backup is of, and size and hash of each file. It is written last.

{"version": 1, ...}        one line of JSON, see Manifest
SHA-256 of this line       64 hexadecimal digits, and the end of the line
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import msgspec

from truenext.errors import ConfigurationError, StoreError
from truenext.store.checkpoint_format import FORMAT_VERSION
from truenext.store.folder import MANIFEST

MANIFEST_VERSION = 1
"""Version of the manifest, and of the layout of a backup."""

_NAME = re.compile(r"lmdb/data\.mdb|journal/[0-9a-f]{16}\.journal|history/(?:[A-Za-z0-9=_-]+/)*[A-Za-z0-9_.-]+")
"""Names that a file of a backup may have. A manifest that was forged must not name files elsewhere."""


class BackupFile(msgspec.Struct, frozen=True):
    """One file of a backup."""

    name: str
    """Path of the file in the backup, and in a data folder."""
    size: int
    sha256: str
    """SHA-256 of the content, as hexadecimal digits."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a manifest."""

    version: int = MANIFEST_VERSION
    truenext: str
    """Version of truenext that made the backup."""
    format: int = FORMAT_VERSION
    """Format of the data folder."""
    identity: str
    """Identity of the store."""
    batch: int
    """Number of the last batch, over all runs of the broker."""
    made: str
    """Time of this batch in UTC, as 2026-11-30T02:50:55Z."""
    history: bool
    """True if the backup has the history."""
    users: bool
    """True if the broker had users."""
    files: list[BackupFile]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class _Version(msgspec.Struct):
    version: int
    truenext: str


def encode_manifest(manifest: Manifest) -> bytes:
    line = msgspec.json.encode(manifest)
    return b"%b\n%b\n" % (line, sha256(line).hexdigest().encode())


def read_manifest(backup: Path) -> Manifest:
    """Read the manifest in the folder of a backup.

    Raises: ConfigurationError if the folder is no backup, or one of a newer version; StoreError if the manifest is
    damaged; OSError if it cannot be read
    """
    if (backup / MANIFEST).exists() and not (backup / MANIFEST).is_file():
        # To open a FIFO would wait for its writer.
        raise StoreError(f"{backup / MANIFEST} is no regular file: restore another backup")
    try:
        content = (backup / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_backup_error(backup) from error
    line, _, rest = content.partition(b"\n")
    if rest != sha256(line).hexdigest().encode() + b"\n":
        raise StoreError(f"{backup / MANIFEST} is damaged: restore another backup")
    return _decode(backup, line)


def _no_backup_error(backup: Path) -> ConfigurationError:
    if not backup.is_dir():
        return ConfigurationError(f"there is no folder {backup}: name the folder of a backup")
    if (backup / f"{MANIFEST}-new").exists():
        return ConfigurationError(
            f"{backup} is no backup: it was cut short, and has no manifest; delete it, and restore another one"
        )
    return ConfigurationError(f"{backup} is no backup: it has no manifest; name a folder that `truenext backup` made")


def _decode(backup: Path, line: bytes) -> Manifest:
    try:
        found = msgspec.json.decode(line, type=_Version)
        if found.version > MANIFEST_VERSION:
            raise _newer_error(backup, found.truenext)
        manifest = msgspec.json.decode(line, type=Manifest)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{backup / MANIFEST} is no manifest of a backup: {error}; restore another backup") from error
    if manifest.format > FORMAT_VERSION:
        raise _newer_error(backup, manifest.truenext)
    foreign = next((file.name for file in manifest.files if not _is_name(file.name)), None)
    if foreign is not None:
        raise StoreError(f"{backup / MANIFEST} names {foreign!r}, which no backup has: restore another backup")
    return manifest


def _newer_error(backup: Path, version: str) -> ConfigurationError:
    return ConfigurationError(
        f"{backup} was made by truenext {version}, which is newer: restore it with that version, or a later one"
    )


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and ".." not in name
