"""Translation of errors of LMDB and of the system into a StoreError. The text of a StoreError says what failed and what
to do."""

from __future__ import annotations

import errno
import os
import pwd
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

import lmdb

from truenext.errors import ConfigurationError, StoreError

STORAGE_ERRORS = (lmdb.Error, OSError, struct.error, ValueError)
"""Errors that `store_error` can translate."""

_DAMAGE = (
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.ProblemError,
    lmdb.VersionMismatchError,
)
"""Errors with which LMDB reports damaged pages."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def is_no_space(error: BaseException) -> bool:
    """Return whether an error says that the disk is full, or the user's quota on it."""
    return isinstance(error, lmdb.DiskError) or (isinstance(error, OSError) and error.errno in _NO_SPACE)


def is_short_write(error: BaseException) -> bool:
    """Return whether an error is LMDB's I/O error: either a full disk has taken only a part of a write, or the disk is
    broken."""
    return isinstance(error, lmdb.Error) and os.strerror(errno.EIO) in str(error)


def is_denied(error: BaseException) -> bool:
    """Return whether an error says that the user of this process lacks a permission."""
    return isinstance(error, PermissionError) or (
        isinstance(error, lmdb.Error) and os.strerror(errno.EACCES) in str(error)
    )


def store_error(action: str, error: Exception, data: Path) -> StoreError:
    """Return `error` as a StoreError. Its text begins with "cannot" and `action`. `data` is the data folder."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, lmdb.MapFullError):
        return StoreError(
            f"cannot {action}: the checkpoint is as large as its map_size allows; open the store with a larger map_size"
        )
    if is_no_space(error):
        return StoreError(f"cannot {action}: the disk is full; free disk space, then start the broker again")
    if isinstance(error, _DAMAGE):
        return damage_error("checkpoint", f"LMDB says {str(error)[str(error).find('MDB_') :]}", data)
    if is_denied(error):
        filename = getattr(error, "filename", None)
        return StoreError(
            f"cannot {action}: {error}; {_permission_advice(data if filename is None else Path(filename), data)}"
        )
    if isinstance(error, lmdb.Error | OSError):
        return StoreError(f"cannot {action}: {error}; check the disk, then start the broker again")
    return StoreError(
        f"cannot {action}: a value is damaged or does not fit its field ({error}). {repair_advice(str(data))}"
    )


class DamagedFolderError(StoreError):
    """A data folder is damaged."""


@contextmanager
def translated_errors(action: str, data: Path) -> Iterator[None]:
    """Return a context manager that raises errors of STORAGE_ERRORS as StoreError. The text begins with "cannot" and
    `action`."""
    try:
        yield
    except STORAGE_ERRORS as error:
        raise store_error(action, error, data) from error


def _permission_advice(path: Path, data: Path) -> str:
    """Return a text that says which permission on `path`, or on its folder, is missing, and who owns that. For a path
    in the folder `data` it says what to do."""
    # Creating a file needs the permission on its folder. Path.exists raises where that folder may not be read.
    existing = next((each for each in (path, *path.absolute().parents) if os.access(each, os.F_OK)), path)
    user = user_name(os.geteuid())
    text = f"the user {user} needs the right to read and write {existing}"
    with suppress(OSError):
        text += f", which belongs to {user_name(existing.stat().st_uid)}"
    # Another folder may be that of other programs.
    if existing.absolute().is_relative_to(data.absolute()):
        text += f": start the command as the owner, or give {user} the folder (`chown -R {user} {quote(str(data))}`)"
    return text


def user_name(number: int) -> str:
    """Return the name of a user; the number if the machine has no such user, as usual in a container."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def damage_error(part: str, problem: str, data: Path) -> StoreError:
    """Make the error for a damaged `part` of the store in the folder `data`."""
    return DamagedFolderError(
        f"the {part} in {data} is damaged: {problem}. Messages may be missing; restore the folder from a backup. "
        f"{repair_advice(str(data))}"
    )


def no_data_folder_error(data: Path) -> StoreError:
    return StoreError(f"{data} is not a data folder of a broker: it has neither lmdb nor journal in it")


def empty_folder_error(data: Path) -> StoreError:
    return StoreError(
        f"the data folder {data} is empty: the first start of its broker was interrupted. Delete it, and start the "
        "broker again"
    )


def copy_error(data: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{data} is a copy of a log in a database: name the database, too (--store), or make it an ordinary folder "
        f"(`truenext store detach {data}`)"
    )


def no_copy_error(data: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{data} has messages of its own, and is no copy of a log in a database: name another folder, or take its "
        f"messages into a new log (`truenext store init URL --schema NAME --from {data}`)"
    )


def repair_advice(data: str) -> str:
    """Return advice to the operator for damage in the folder `data`."""
    return (
        f"`truenext store check {data}` shows the damage, `truenext store export {data} NEW` saves all that is readable"
    )


def disagreement_error(batch: int, problem: str) -> StoreError:
    return StoreError(
        f"store and broker disagree: batch {batch} {problem}. Either the store is damaged (`truenext store check DIR` "
        "shows that), or this is a bug of truenext"
    )
