"""Upgrade of a data folder of an earlier format, in transactions of a bounded size.

    first transaction    `format` gets the mark UNFINISHED, so that no other version reads the folder; `upgrade` gets
                         the position
    each transaction     converts the next entries, and moves the position
    last transaction     converts `meta`, sets `format`, and deletes `upgrade`

So a crash leaves either the earlier format, whole, or a position from which the next start goes on. The journal is not
touched (steps.py). Before the first transaction all entries are converted once without writing, so that damage is found
while the folder is still whole.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from pathlib import Path

import lmdb
import msgspec
from msgspec.structs import replace

from truenext.clock import monotonic
from truenext.errors import StoreError
from truenext.model.numerals import format_size
from truenext.store import folder
from truenext.store.checkpoint_format import FORMAT, PERSISTENT_TABLES, TRANSIENT_TABLES, UNFINISHED
from truenext.store.checksummed import ChecksummedDatabase, add_checksum, remove_checksum
from truenext.store.pieces import split_into_pieces
from truenext.store.store_errors import damage_error
from truenext.store.upgrade import steps
from truenext.store.upgrade.steps import Conversion, Entry, Step

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 5.0
"""Seconds between two lines in the log about an upgrade."""

PIECE_BYTES = 4 * 1024 * 1024
"""Largest number of bytes of keys and values in one transaction. LMDB keeps its changed pages in memory."""

PIECE_ENTRIES = 50_000
"""Largest number of entries in one transaction. Their keys follow each other, and so do their pages."""

SPACE_FACTOR = 2
"""Free space that an upgrade needs, as a multiple of the pages of all databases that it converts. Mostly it takes the
pages of two transactions: freed pages are used again."""

POSITION = b"upgrade"
"""Key in `meta` of the position of an upgrade."""

_RECORDS = (PERSISTENT_TABLES.messages, TRANSIENT_TABLES.messages)


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Position of an upgrade: all entries before it are converted."""

    source: int
    """Format before the upgrade."""
    conversion: int = 0
    """Index of the conversion that goes on."""
    after: bytes = b""
    """Last key that this conversion has converted."""
    done: int = 0
    """Number of entries that all conversions have converted."""
    total: int = 0
    """Number of entries of all conversions."""


_decode_position = msgspec.msgpack.Decoder(Position).decode


def upgrade(env: lmdb.Environment, data: Path) -> None:
    """Convert the checkpoint `env` of the data folder `data`, as far as STEPS lead on from its format. To be called
    before anything else reads the checkpoint.

    Raises: StoreError if the disk has too little space, or a value is damaged; lmdb.Error, OSError if LMDB or the disk
    fails
    """
    while (found := _find_step(env, data)) is not None:
        step, is_begun = found
        run = _StepRun(env, data, step)
        extra = {"folder": str(data), "before": step.source, "after": step.target}
        # Warnings, because an upgrade takes time, and the version before refuses the folder from now on.
        logger.warning("converting the data folder to another format", extra=extra)
        if not is_begun:
            _check_space(env, data, [each for each in steps.STEPS if each.source >= step.source])
            run.check()
            run.begin()
        run.go_on()
        logger.warning("the data folder was converted to another format", extra=extra)


def _find_step(env: lmdb.Environment, data: Path) -> tuple[Step, bool] | None:
    """Return the step that the folder needs next, and whether it has begun; None if there is none."""
    # A transaction that may write, as everywhere here: LMDB closes databases that a read transaction has opened.
    with env.begin(write=True) as txn:
        try:
            meta = ChecksummedDatabase(env.open_db(b"meta", txn=txn, create=False), b"meta", data)
        except lmdb.NotFoundError:
            return None
        stored = meta.cursor(txn).get(b"format", b"")
        # The first formats had no checksums.
        if len(stored) <= FORMAT.size:
            return None
        number = int.from_bytes(meta.need(txn, b"format"))
        source = _decode_position(meta.need(txn, POSITION)).source if number & UNFINISHED else number
    for step in steps.STEPS:
        if step.source == source and number in (source, step.target | UNFINISHED):
            return step, number != source
    return None


def _check_space(env: lmdb.Environment, data: Path, needed_steps: list[Step]) -> None:
    with env.begin(write=True) as txn:
        pages = 0
        for name in {conversion.database for step in needed_steps for conversion in step.conversions}:
            if txn.get(name) is not None:
                stat = txn.stat(env.open_db(name, txn=txn, create=False))
                pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        needed = SPACE_FACTOR * (pages * txn.stat()["psize"] + 2 * PIECE_BYTES)
    free = folder.free_bytes(data)
    if free < needed:
        before, after = needed_steps[0].source, needed_steps[-1].target
        raise StoreError(
            f"the data folder {data} has format {before}, and must be converted to format {after}: this needs "
            f"{format_size(needed)} of free disk space, and {format_size(free)} are free. Nothing was changed: free "
            "disk space, then start the broker again"
        )


class _StepRun:
    """Run of one step. All methods raise StoreError if a value is damaged."""

    def __init__(self, env: lmdb.Environment, data: Path, step: Step) -> None:
        self._env = env
        self._data = data
        self._step = step
        with env.begin(write=True) as txn:
            self._meta = ChecksummedDatabase(self._open(txn, b"meta"), b"meta", data)

    def check(self) -> None:
        """Convert all entries without writing."""
        with self._env.begin(write=True) as txn:
            for conversion in self._step.conversions:
                for _ in self._converted(txn, conversion, b""):
                    pass
            self._step.convert_meta(self._read_meta(txn))

    def begin(self) -> None:
        """Mark the folder, so that only an upgrade goes on with it."""
        with self._env.begin(write=True) as txn:
            for name in self._step.added:
                self._env.open_db(name, txn=txn, create=True)
            self._meta.put(txn, b"format", FORMAT.pack(self._step.target | UNFINISHED))
            total = sum(txn.stat(self._open(txn, each.database))["entries"] for each in self._step.conversions)
            self._put_position(txn, Position(self._step.source, total=total))

    def go_on(self) -> None:
        """Convert the entries behind the position, and end the step."""
        shown = monotonic()
        while (position := self._convert_piece()) is not None:
            if monotonic() - shown >= PROGRESS_INTERVAL_S:
                shown = monotonic()
                logger.warning("converting entries", extra={"done": position.done, "total": position.total})
        with self._env.begin(write=True) as txn:
            before = self._read_meta(txn)
            after = self._step.convert_meta(before)
            for name in before.keys() - after.keys():
                self._meta.delete(txn, name)
            for name, value in after.items():
                self._meta.put(txn, name, value)
            for name in self._step.removed:
                txn.drop(self._open(txn, name))
            self._meta.delete(txn, POSITION)
            self._meta.put(txn, b"format", FORMAT.pack(self._step.target))

    def _convert_piece(self) -> Position | None:
        """Convert the next entries in one transaction, and return the position after them. Return None if all
        conversions have ended."""
        with self._env.begin(write=True) as txn:
            position = _decode_position(self._meta.need(txn, POSITION))
            if position.conversion == len(self._step.conversions):
                return None
            conversion = self._step.conversions[position.conversion]
            entries = self._converted(txn, conversion, position.after)
            piece = next(split_into_pieces(entries, _size, PIECE_BYTES, PIECE_ENTRIES), [])
            if piece:
                self._write(txn, conversion, piece)
                position = replace(position, after=piece[-1][0], done=position.done + len(piece))
            else:
                position = replace(position, conversion=position.conversion + 1, after=b"")
            self._put_position(txn, position)
        return position

    def _write(self, txn: lmdb.Transaction[bytes], conversion: Conversion, piece: list[tuple[bytes, Entry]]) -> None:
        """Write converted entries. Each comes with its earlier key."""
        into = self._open(txn, conversion.into or conversion.database)
        txn.cursor(into).putmulti([entry for _, entry in piece])
        if conversion.into:
            source = self._open(txn, conversion.database)
            for key, _ in piece:
                txn.delete(key, db=source)

    def _converted(
        self, txn: lmdb.Transaction[bytes], conversion: Conversion, after: bytes
    ) -> Iterator[tuple[bytes, Entry]]:
        """Yield the earlier key of each entry behind the key `after`, and the converted entry as it is stored."""
        database, into = conversion.database, conversion.into or conversion.database
        cursor = txn.cursor(self._open(txn, database))
        if not cursor.set_range(after):
            return
        for key, stored in cursor.iternext():
            if key == after:
                continue
            try:
                value = stored if database in _RECORDS else remove_checksum(database, key, stored)
                new_key, new = conversion.convert(key, value)
            except (ValueError, struct.error, msgspec.MsgspecError) as error:
                problem = f"{key.hex()} in {database.decode()} cannot be converted ({error})"
                raise damage_error("checkpoint", problem, self._data) from error
            yield key, (new_key, new if into in _RECORDS else add_checksum(into, new_key, new))

    def _read_meta(self, txn: lmdb.Transaction[bytes]) -> dict[bytes, bytes]:
        return {name: value for name, value in self._meta.items(txn) if name not in (b"format", POSITION)}

    def _put_position(self, txn: lmdb.Transaction[bytes], position: Position) -> None:
        self._meta.put(txn, POSITION, msgspec.msgpack.encode(position))

    def _open(self, txn: lmdb.Transaction[bytes], name: bytes) -> lmdb._Database:
        try:
            return self._env.open_db(name, txn=txn, create=False)
        except lmdb.NotFoundError as error:
            raise damage_error("checkpoint", f"the database {name.decode()} is missing", self._data) from error


def _size(entry: tuple[bytes, Entry]) -> int:
    _, (key, value) = entry
    return len(key) + len(value)
