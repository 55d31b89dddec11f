"""Renewal of a data folder: a new identity for the folder of a stopped broker.

For clients, outboxes and Spark, a broker with another identity is another broker. So a folder that was copied, such as
by a snapshot or a backup, may be used beside the original.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from truenext.errors import ConfigurationError
from truenext.store import folder
from truenext.store.checkpoint import Checkpoint
from truenext.store.store_errors import no_data_folder_error, translated_errors


def renew(path: Path) -> str:
    """Give the data folder of a stopped broker a new identity, and return that. The new identity is durable on return.
    A crash leaves the old one or the new one, and nothing else in the folder changes.

    Raises: StoreInUseError if a broker uses the folder; ConfigurationError if it is a copy of a log; StoreError if it
    is no data folder, its checkpoint is damaged, or the disk fails
    """
    with locked(path), closing(_open(path)) as checkpoint:
        return checkpoint.renew()


def _open(path: Path) -> Checkpoint:
    try:
        return Checkpoint(path / "lmdb", may_be_new=False)
    except ConfigurationError:
        raise ConfigurationError(
            f"{path} is a copy of a log in a database, and has the identity of that log: make it an ordinary folder, "
            f"which gives it a new identity (`truenext store detach {path}`)"
        ) from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the data folder of a stopped broker in a `with` statement, and translate errors of the disk in it.

    Raises: StoreInUseError if a broker uses the folder; StoreError if it is no data folder, or the disk fails
    """
    if not folder.is_data_folder(path):
        raise no_data_folder_error(path)
    with translated_errors(f"open the store in {path}", path):
        lock = folder.lock(path)
        try:
            yield
        finally:
            os.close(lock)
