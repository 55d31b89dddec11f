"""Salvage of a checkpoint: reads what is readable, wherever the damage is.

The checkpoint is read page by page (lmdb_file.py). Pages to which only a damaged page leads are *unreached*. If the
free pages are known, the entries on unreached pages are found as well; their checksums show to which database they
belong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
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
from truenext.store.lmdb_file import TREE_BYTES, LmdbEntry, LmdbTree, RawLmdbReader, is_uninitialized, read_metas
from truenext.store.salvage.damage import DamageReport, SalvageProgress, describe_lane, find_record_damage
from truenext.store.store_errors import empty_folder_error

UNMATCHED_MARKS_MAX = 100_000
"""Largest number of marks without a message that a salvage keeps in memory, as it may still find their messages."""

UNREACHED_TIMERS_MAX = 1_000_000
"""Largest number of timers that are kept from unreached pages: pages to which only a damaged page leads."""

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
    """Readable part of a checkpoint. Read `timers`, then `messages` of each kind, then `unreached`, each once and to
    its end."""

    def __init__(self, data: Path, damage_report: DamageReport, progress: SalvageProgress, *, may_be_new: bool) -> None:
        """Read all values except messages and timers.

        Raises: StoreError if the checkpoint is empty and may be new, or another version of truenext wrote it; OSError
        if it cannot be read
        """
        self._data = data
        self._damage_report = damage_report
        self._progress = progress
        self._trees: dict[bytes, LmdbTree] = {}
        self._unmatched_marks: dict[bytes, bytes] = {}
        self.unreached_timers: set[bytes] = set()
        """Timers found on unreached pages. `unreached` fills the set."""
        self.undeleted_transients = 0
        """Number of transient messages that were dropped after unclean stops, and that are not deleted yet."""
        self._file = self._open(may_be_new=may_be_new)
        try:
            self._read_values()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _report(self, problem: str) -> None:
        self._damage_report.add_damage(CHECKPOINT, problem)

    # ---- Small values ----

    def _open(self, *, may_be_new: bool) -> RawLmdbReader | None:
        path = self._data / CHECKPOINT
        exists = path.exists()
        if may_be_new and not (exists and path.stat().st_size and not is_uninitialized(path)):
            raise empty_folder_error(self._data)
        if not exists:
            self._report("it is missing")
            return None
        states, problem = read_metas(path)
        if problem:
            self._report(problem)
        return RawLmdbReader(path, states[0], self._report) if states else None

    def _read_values(self) -> None:
        damage_count = self._damage_report.damage_count
        values: dict[bytes, dict[bytes, bytes]] = {name: {} for name in _VALUE_DATABASES}
        if self._file is not None:
            self._file.read_free_pages()
            self._trees = _read_trees(self._file, self._report)
            for name, database_values in values.items():
                database_values.update(self._checksummed_values(name))
            if self._damage_report.damage_count > damage_count:
                for name, database_values in self._unreached_values(self._file).items():
                    values[name] = database_values | values[name]
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

    def _walk(self, name: bytes) -> Iterator[LmdbEntry]:
        tree = self._trees.get(name)
        if self._file is None or tree is None:
            return
        for number, leaf in enumerate(self._file.walk(tree, name.decode())):
            if number % 1000 == 0:
                page_size = self._file.meta.page_size
                self._progress.update("checkpoint", self._file.pages_seen * page_size, self._file.pages * page_size)
            yield leaf

    def _checksummed_values(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        for leaf in self._walk(name):
            # Formats 1 and 2 had no checksums.
            if leaf.key == b"format" and len(leaf.value) == FORMAT.size:
                yield leaf.key, leaf.value
                continue
            try:
                yield leaf.key, remove_checksum(name, leaf.key, leaf.value)
            except DamagedValue as error:
                self._report(f"page {leaf.page}: {error}")

    def _unreached_values(self, file: RawLmdbReader) -> dict[bytes, dict[bytes, bytes]]:
        """Return the small values found on unreached pages, by database. This walks through the whole checkpoint."""
        values: dict[bytes, dict[bytes, bytes]] = {name: {} for name in _VALUE_DATABASES}
        reader = RawLmdbReader(self._data / CHECKPOINT, file.meta, _ignore)
        try:
            reader.read_free_pages()
            for tree in _read_trees(reader, _ignore).values():
                for _ in reader.walk(tree, ""):
                    pass
            for leaf in reader.unreached() if reader.is_free_list_complete else ():
                for name, database_values in values.items():
                    with suppress(DamagedValue):
                        database_values[leaf.key] = remove_checksum(name, leaf.key, leaf.value)
        finally:
            reader.close()
        return values

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
        for leaf in self._walk(kind.messages):
            while mark is not None and mark[0] < leaf.key:
                self._add_unmatched_mark(*mark, kind)
                mark = next(marks, None)
            own = None
            if mark is not None and mark[0] == leaf.key:
                own, mark = mark[1], next(marks, None)
            if not self._is_current(leaf.key, kind):
                self.undeleted_transients += 1
                continue
            key = leaf.key[GENERATION.size :] if kind.is_transient else leaf.key
            if len(key) != MESSAGE_KEY_SIZE:
                self._report(f"page {leaf.page}: {leaf.key.hex()} is not the key of a message")
                continue
            found[key[:LANE_KEY_SIZE]] += 1
            yield CheckpointEntry(key, leaf.value, own, kind.is_transient)
        while mark is not None:
            self._add_unmatched_mark(*mark, kind)
            mark = next(marks, None)
        counts = self._counts[kind]
        for lane in sorted(counts.keys() | found.keys()):
            counted = counts.get(lane, 0)
            if counted != found[lane]:
                problem = f"its count says {counted} {kind.messages.decode()}, and {found[lane]} exist"
                self._report(f"{describe_lane(lane, queues)}: {problem}")

    def unreached(self, is_known_timer: Callable[[bytes], bool]) -> Iterator[CheckpointEntry]:
        """Yield the messages found on unreached pages. Add the timers on these pages to `unreached_timers`, unless
        `is_known_timer` returns True for the timer."""
        file = self._file
        if file is None:
            return
        if not file.is_free_list_complete:
            if file.unreached_pages:
                self._damage_report.notes_besides_damage.append(
                    f"{file.unreached_pages} pages of {CHECKPOINT} were not read: whether they are free is not known"
                )
            return
        # Marks before their messages, on whatever pages they are.
        for leaf in file.unreached():
            for kind in TABLE_NAMES:
                with suppress(DamagedValue):
                    self._add_unmatched_mark(leaf.key, remove_checksum(kind.marks, leaf.key, leaf.value), kind)
        for leaf in file.unreached():
            if len(leaf.key) == TIMER_SIZE and len(self.unreached_timers) < UNREACHED_TIMERS_MAX:
                with suppress(DamagedValue):
                    remove_checksum(b"timers", leaf.key, leaf.value)
                    if not is_known_timer(leaf.key):
                        self.unreached_timers.add(leaf.key)
            kind = TABLE_NAMES[len(leaf.key) == GENERATION.size + MESSAGE_KEY_SIZE]
            key = leaf.key[GENERATION.size :] if kind.is_transient else leaf.key
            if len(key) != MESSAGE_KEY_SIZE or not self._is_current(leaf.key, kind):
                continue
            if not find_record_damage(key, leaf.value):
                yield CheckpointEntry(key, leaf.value, self._unmatched_marks.pop(leaf.key, None), kind.is_transient)

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


def _read_trees(file: RawLmdbReader, on_damage: Callable[[str], None]) -> dict[bytes, LmdbTree]:
    trees: dict[bytes, LmdbTree] = {}
    for leaf in file.walk(file.meta.main, "list of databases"):
        if leaf.key in DATABASES and leaf.key not in trees and len(leaf.value) == TREE_BYTES:
            trees[leaf.key] = LmdbTree.of(leaf.value)
        else:
            on_damage(f"page {leaf.page}: {leaf.key!r} is not a database of a store")
    for name in DATABASES:
        if name not in trees:
            on_damage(f"the database {name.decode()} is missing")
    return trees


def _ignore(_: str) -> None:
    pass
