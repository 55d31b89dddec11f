"""Two earlier formats of the data folder that no truenext has written, made to test upgrades.

    format 11    marks have their deliveries first; `meta` calls the limit of sequences "next sequence", and has no list
                 of paused queues
    format 10    as format 11, but timers are in a database `due`, whose keys are reversed, and producers have a null
                 byte before them

`STEPS` leads to format 12, and `make_earlier` leads back.
"""

import struct
from pathlib import Path

import lmdb
import pytest

from truenext.store.checkpoint_format import DATABASES, FORMAT, FORMAT_VERSION
from truenext.store.checksummed import add_checksum, remove_checksum
from truenext.store.upgrade import steps
from truenext.store.upgrade.steps import Conversion, Entry, Step

MARK = struct.Struct(">II")
RECORDS = (b"messages", b"transients")

Database = dict[bytes, bytes]
"""Values by key, without checksums."""

Contents = dict[bytes, Database]
"""Databases of a checkpoint by name."""


def swap_mark(key: bytes, value: bytes) -> Entry:
    """Convert a mark of format 11, or one of format 12 back."""
    attempts, deliveries = MARK.unpack_from(value)
    return key, MARK.pack(deliveries, attempts) + value[MARK.size :]


def add_paused(meta: Database) -> Database:
    meta = dict(meta)
    meta[b"sequence limit"] = meta.pop(b"next sequence")
    return {**meta, b"paused": b""}


def reverse_key(key: bytes, value: bytes) -> Entry:
    return key[::-1], value


def strip_producer(key: bytes, value: bytes) -> Entry:
    if value[:1] != b"\0":
        raise ValueError("no null byte")
    return key, value[1:]


FIRST_STEP = Step(
    source=10,
    target=11,
    conversions=(Conversion(b"due", reverse_key, into=b"timers"), Conversion(b"producers", strip_producer)),
    added=(b"timers",),
    removed=(b"due",),
)

LAST_STEP = Step(
    source=11,
    target=12,
    conversions=(Conversion(b"marks", swap_mark), Conversion(b"transient marks", swap_mark)),
    convert_meta=add_paused,
)

STEPS = (FIRST_STEP, LAST_STEP)

assert LAST_STEP.target == FORMAT_VERSION


def read_made_formats(patch: pytest.MonkeyPatch) -> None:
    """Let a broker read folders of the made formats."""
    patch.setattr(steps, "STEPS", STEPS)


def read_all(folder: Path) -> Contents:
    """Return the content of the checkpoint, of whatever format. The numbers of transactions and pages are not in it."""
    with lmdb.open(str(folder / "lmdb"), max_dbs=20, lib_version=0, readonly=True, lock=False) as env:
        with env.begin() as txn:
            names = [name for name, _ in txn.cursor()]
        databases = {name: env.open_db(name, create=False) for name in names}
        with env.begin() as txn:
            return {
                name: {
                    key: stored if name in RECORDS else remove_checksum(name, key, stored)
                    for key, stored in txn.cursor(db)
                }
                for name, db in databases.items()
            }


def format_of(folder: Path) -> int:
    return int.from_bytes(read_all(folder)[b"meta"][b"format"])


def make_earlier(folder: Path, format_number: int) -> None:
    """Convert a folder of format 12, which no broker uses and without paused queues, to format 11 or 10."""
    databases = read_all(folder)
    assert set(databases) == set(DATABASES)
    meta = databases[b"meta"]
    assert not meta.pop(b"paused")
    meta[b"next sequence"] = meta.pop(b"sequence limit")
    for name in (b"marks", b"transient marks"):
        databases[name] = dict(swap_mark(key, value) for key, value in databases[name].items())
    if format_number == FIRST_STEP.source:
        databases[b"due"] = dict(reverse_key(key, value) for key, value in databases.pop(b"timers").items())
        databases[b"producers"] = {key: b"\0" + value for key, value in databases[b"producers"].items()}
    meta[b"format"] = FORMAT.pack(format_number)
    write_all(folder, databases)


def write_all(folder: Path, databases: Contents) -> None:
    """Replace the content of the checkpoint."""
    with lmdb.open(str(folder / "lmdb"), max_dbs=20, lib_version=0) as env, env.begin(write=True) as txn:
        for name in [name for name, _ in txn.cursor()]:
            txn.drop(env.open_db(name, txn=txn, create=False), delete=name not in databases)
        for name, entries in databases.items():
            db = env.open_db(name, txn=txn)
            for key, value in entries.items():
                txn.put(key, value if name in RECORDS else add_checksum(name, key, value), db=db)
