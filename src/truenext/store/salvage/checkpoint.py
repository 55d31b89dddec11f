"""Salvage of a checkpoint: reads all that LMDB can read.

LMDB reads in child processes (lmdb_reader.py), because a damaged page may end the process. The checksums of values and
records, the counts of messages and the sizes of the databases show what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from truenext.model.record import LANE_KEY_SIZE, MESSAGE_KEY_SIZE, TIMER_SIZE
from truenext.store.checkpoint_format import (
    COPY_FORMAT,
    DATA_FILE,
    DATABASES,
    FORMAT,
    FORMAT_VERSION,
    GENERATION,
    META_KEYS,
    NUMBER,
    OLD_COPY_FORMAT,
    PERSISTENT_TABLES,
    POSITION_KEYS,
    SALT,
    TRANSIENT_TABLES,
    UNCLEAN,
    CheckpointPosition,
    MessageTableNames,
    decode_position,
    decode_recovered,
    format_error,
    initial_meta,
)
from truenext.store.checksummed import DamagedValue, remove_checksum
from truenext.store.lmdb_metas import is_uninitialized, read_metas
from truenext.store.salvage.damage import DamageReport, SalvageProgress, describe_lane
from truenext.store.salvage.lmdb_reader import EMPTY, LIST, Entries, find_page_damage, read_database, read_undamaged
from truenext.store.store_errors import empty_folder_error

UNMATCHED_MARKS_MAX = 100_000
"""Largest number of marks without a message that a salvage keeps in memory, as it may still find their messages."""

CHECKPOINT = f"lmdb/{DATA_FILE}"

_VALUE_DATABASES = (b"meta", b"queues", b"producers", b"counts", b"transient counts")
_META_DEFAULTS = initial_meta(b"", b"", 0) | {b"clean stop": UNCLEAN}


TABLE_NAMES = (PERSISTENT_TABLES, TRANSIENT_TABLES)


class CheckpointEntry(NamedTuple):
    """Message as the checkpoint stores it."""

    key: bytes
    record: bytes
    mark: bytes | None
    is_transient: bool


class SalvagedCheckpoint:
    """Readable part of a checkpoint. Read `timers`, then `messages` of each kind, each once and to its end."""

    def __init__(self, data: Path, damage_report: DamageReport, progress: SalvageProgress, *, may_be_new: bool) -> None:
        """Read all values except messages and timers.

        Raises: StoreError if the checkpoint is empty and may be new, or another version of truenext wrote it; OSError
        if it cannot be read
        """
        self._data = data
        self._path = data / CHECKPOINT
        self._damage_report = damage_report
        self._progress = progress
        self._size = self._seen = 0
        self._unmatched_marks: dict[bytes, bytes] = {}
        self.undeleted_transients = 0
        """Number of transient messages that were dropped after unclean stops, and that are not deleted yet."""
        self._names: set[bytes] = set()
        """Databases that are there, and not empty."""
        self._small: dict[bytes, Entries] = {}
        """Entries of small databases, if LMDB has found nothing wrong."""
        if self._has_pages(may_be_new=may_be_new):
            self._find_databases()
        self._read_values()

    def _report(self, problem: str) -> None:
        self._damage_report.add_damage(CHECKPOINT, problem)

    # ---- Small values ----

    def _has_pages(self, *, may_be_new: bool) -> bool:
        """Return whether LMDB can open the file. Report what is wrong with its first pages."""
        exists = self._path.exists()
        if may_be_new and not (exists and self._path.stat().st_size and not is_uninitialized(self._path)):
            raise empty_folder_error(self._data)
        if not exists:
            self._report("it is missing")
            return False
        metas, problem = read_metas(self._path)
        if problem:
            self._report(problem)
        self._size = self._path.stat().st_size
        return bool(metas)

    def _find_databases(self) -> None:
        folder = self._path.parent
        self._small = read_undamaged(folder, (LIST, *_VALUE_DATABASES)) or {}
        if not self._small and (problem := find_page_damage(folder)):
            self._report(problem)
        found = dict(self._small.get(LIST) or read_database(folder, LIST, self._report))
        for name in sorted(found.keys() - set(DATABASES)):
            self._report(f"{name!r} is not a database of a store")
        for name in DATABASES:
            if name not in found:
                self._report(f"the database {name.decode()} is missing")
        self._names = {name for name in found.keys() & set(DATABASES) if not found[name].endswith(EMPTY)}

    def _read_values(self) -> None:
        values = {name: dict(self._checksummed_values(name)) for name in _VALUE_DATABASES}
        meta = values[b"meta"]
        version = int.from_bytes(meta.get(b"format", FORMAT.pack(FORMAT_VERSION)))
        if version not in (FORMAT_VERSION, COPY_FORMAT, OLD_COPY_FORMAT):
            raise format_error(self._data, version, FORMAT_VERSION)
        self.is_copy = version != FORMAT_VERSION
        """True if the folder is a copy of a log."""
        for name in META_KEYS:
            if name not in meta:
                self._report(f"{name.decode()} is missing in meta")
        self.recovered = decode_recovered(
            _META_DEFAULTS | meta, values[b"queues"].items(), values[b"producers"].items()
        )
        """State without the counts of messages. A damaged value is replaced by the value that a new store has; a
        damaged `clean_stop` is replaced by False."""
        self.position: CheckpointPosition | None = (
            decode_position(meta) if all(name in meta for name in POSITION_KEYS) else None
        )
        """Position in the journal up to which the checkpoint has everything; None if damage has destroyed it."""
        self.salt: int | None = SALT.unpack(meta[b"salt"])[0] if b"salt" in meta else None
        self.segment_bytes: int = NUMBER.unpack(meta.get(b"segment bytes", NUMBER.pack(0)))[0]
        self._generation = meta.get(b"generation")
        self._counts = {
            kind: {lane: NUMBER.unpack(value)[0] for lane, value in values[kind.counts].items()} for kind in TABLE_NAMES
        }

    def _read(self, name: bytes, *, keeps_order: bool = True) -> Iterator[tuple[bytes, bytes]]:
        if name not in self._names:
            return
        entries: Iterable[tuple[bytes, bytes]] = self._small.get(name, ())
        if name not in self._small:
            entries = read_database(self._path.parent, name, self._report, keeps_order=keeps_order)
        for number, (key, value) in enumerate(entries):
            self._seen += len(key) + len(value)
            if number % 1000 == 0:
                self._progress.update("checkpoint", min(self._seen, self._size), self._size)
            yield key, value

    def _checksummed_values(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self._read(name):
            # Formats 1 and 2 had no checksums.
            if key == b"format" and len(value) == FORMAT.size:
                yield key, value
                continue
            try:
                yield key, remove_checksum(name, key, value)
            except DamagedValue as error:
                self._report(str(error))

    # ---- Timers and messages ----

    def timers(self) -> Iterator[bytes]:
        """Yield the stored timers, in order and each once, unless the checkpoint is damaged."""
        for timer, _ in self._checksummed_values(b"timers"):
            if len(timer) == TIMER_SIZE:
                yield timer
            else:
                self._report(f"{timer.hex()} is not a timer")

    def messages(self, kind: MessageTableNames, queues: Mapping[int, str]) -> Iterator[CheckpointEntry]:
        """Yield the messages of one kind, persistent or transient. Report marks and counts that do not agree with them.
        `queues` has the queues' names by number."""
        found: Counter[bytes] = Counter()
        marks = self._checksummed_values(kind.marks)
        mark = next(marks, None)
        for stored_key, record in self._read(kind.messages, keeps_order=False):
            while mark is not None and mark[0] < stored_key:
                self._add_unmatched_mark(*mark, kind)
                mark = next(marks, None)
            # Of messages that are read backwards, the marks have been read.
            own = self._unmatched_marks.pop(stored_key, None)
            if mark is not None and mark[0] == stored_key:
                own, mark = mark[1], next(marks, None)
            if not self._is_current(stored_key, kind):
                self.undeleted_transients += 1
                continue
            key = stored_key[GENERATION.size :] if kind.is_transient else stored_key
            if len(key) != MESSAGE_KEY_SIZE:
                self._report(f"{stored_key.hex()} is not the key of a message")
                continue
            found[key[:LANE_KEY_SIZE]] += 1
            yield CheckpointEntry(key, record, own, kind.is_transient)
        while mark is not None:
            self._add_unmatched_mark(*mark, kind)
            mark = next(marks, None)
        counts = self._counts[kind]
        for lane in sorted(counts.keys() | found.keys()):
            counted = counts.get(lane, 0)
            if counted != found[lane]:
                problem = f"its count says {counted} {kind.messages.decode()}, and {found[lane]} exist"
                self._report(f"{describe_lane(lane, queues)}: {problem}")

    def unmatched_marks(self) -> Iterator[bytes]:
        """Yield the keys of messages whose mark was found, but not the message itself. To be called after all messages
        were read."""
        return (key[-MESSAGE_KEY_SIZE:] for key in self._unmatched_marks)

    def _is_current(self, key: bytes, kind: MessageTableNames) -> bool:
        """Return whether an entry is persistent or of the current generation. If the number of the current generation
        is lost, all entries count."""
        return not kind.is_transient or self._generation is None or key[: GENERATION.size] == self._generation

    def _add_unmatched_mark(self, key: bytes, mark: bytes, kind: MessageTableNames) -> None:
        if self._is_current(key, kind) and len(self._unmatched_marks) < UNMATCHED_MARKS_MAX:
            self._unmatched_marks[key] = mark
