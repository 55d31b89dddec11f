"""Check of a log in PostgreSQL: finds out whether all rows are there and unchanged, and whether the later rows fit what
the compacted rows add up to. It reads one snapshot, and changes nothing: a broker may append rows meanwhile.

It needs the memory of the index of all rows after the position (overlay.py), and 16 bytes for each content.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, LiteralString, NamedTuple

from truenext.model.record import (
    CONTENTS_LANE_KEY,
    LANE_KEY_SIZE,
    MESSAGE_KEY_SIZE,
    TIMER_SIZE,
    referenced_content_number,
    sequence_of,
    split_lane_key,
)
from truenext.store.changes import PUT_HEADER_BYTES, PUTS_OFFSET, Changes, Takeover, decode_changes, takeover_of
from truenext.store.check import SalvageSummary
from truenext.store.checkpoint_format import LOG_FORMAT, decode_producer, producer_key
from truenext.store.log import EMPTY_PAYLOAD, LogPosition, next_digest
from truenext.store.overlay import Overlay, SegmentIndex, apply_journal
from truenext.store.postgresql.connection import Connection
from truenext.store.postgresql.initialization import connected
from truenext.store.postgresql.kept import (
    CopyReader,
    DamagedLogError,
    Facts,
    decode_kept_mark,
    open_reader,
    read_facts,
    read_position,
)
from truenext.store.postgresql.layout import (
    KEPT_ROW_BYTES,
    PART_BYTES_MAX,
    check_readable_layout,
    partitions_in,
    statement,
    tables_in,
    unlogged_tables,
)
from truenext.store.postgresql.takeover import describe_active_broker, format_error
from truenext.store.salvage.damage import Damage, DamageReport, describe_message, find_record_damage
from truenext.store.salvage.references import ReferenceCounts
from truenext.store.store import Recovered

PROGRESS_ROWS = 1000
"""Number of rows after which a progress is reported."""

_SEGMENT = 1

_NAMED_KINDS = {"queue", "paused", "producer", "timer", "earlier identity"}
_KINDS = _NAMED_KINDS | {
    "identity",
    "layout",
    "generation",
    "sequence limit",
    "redelivered below",
    "clean stop",
    "history",
    "kept bytes",
    "origin",
    "later origin",
    "active",
    "stop",
}


def check_log(
    url: str, schema: str, on_damage: Callable[[Damage], None], on_progress: Callable[[int, int], None]
) -> SalvageSummary:
    """Check all rows in `schema` of the database at `url`, and return the content as of the last row. `on_damage` gets
    each damage, `on_progress` the numbers of rows checked and of all rows.

    Raises: ConfigurationError if the schema has no log, or the role may not read it; StoreError if another version of
    truenext has written it, or the database fails
    """
    with connected(url, Connection.open_for_reading) as connection:
        check_readable_layout(connection, schema)
        is_active = bool(describe_active_broker(connection, schema))
        with open_reader(connection, schema) as reader:
            return _LogCheck(reader, schema, on_damage, on_progress).run(is_active=is_active)


class _Progress:
    def __init__(self, on_progress: Callable[[int, int], None], total: int) -> None:
        self._on_progress = on_progress
        self._total = total
        self._done = 0

    def count(self) -> None:
        self._done += 1
        if self._done % PROGRESS_ROWS == 0:
            # The total is an estimate.
            self._on_progress(self._done, max(self._done, self._total))

    def finish(self) -> None:
        self._on_progress(self._done, self._done)


class _LogCheck:
    def __init__(
        self,
        reader: CopyReader,
        schema: str,
        on_damage: Callable[[Damage], None],
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._reader = reader
        self._connection = reader.connection
        self._schema = schema
        self._report = DamageReport(on_damage)
        self._progress = _Progress(on_progress, self._estimate())

    def run(self, *, is_active: bool) -> SalvageSummary:
        """Check everything. `is_active` is True if a broker uses the log."""
        self._check_partitions()
        position, facts = self._read_position(), self._read_facts()
        later = _LaterRows(self._report)
        chain = _RowChain(position, self._report)
        for row in self._rows():
            changes = chain.check(row)
            # Without a position no row can be applied.
            if changes is not None and position is not None and row.number > position.number:
                later.apply(row, changes)
        chain.check_end()
        recovered = facts.recovered if facts is not None else Recovered(identity="", clean_stop=False)
        state = _State(apply_journal(recovered, later.overlay.indexes), later, self._report)
        state.summary.timers = sum(1 for _ in later.overlay.timer_view().iter_after(b"", self._timers()))
        self._check_kept(state, facts)
        state.finish(is_active=is_active)
        self._progress.finish()
        return state.summary

    def _estimate(self) -> int:
        found = self._connection.execute(
            statement(
                self._schema,
                """
                SELECT coalesce((SELECT max(number) - min(number) + 1 FROM {log}), 0)
                    + coalesce((SELECT sum(greatest(reltuples, 0))::bigint FROM pg_catalog.pg_class
                        WHERE oid IN (%s::regclass, %s::regclass)), 0)
                """,
            ),
            (f'"{self._schema}"."kept"', f'"{self._schema}"."fact"'),
        ).fetchone()
        return 0 if found is None else int(found[0])

    def _copy(self, query: LiteralString, types: list[str]) -> Iterator[tuple[Any, ...]]:
        for row in self._reader.read(statement(self._schema, query), types):
            yield row
            self._progress.count()

    # ---- Small tables ----

    def _check_partitions(self) -> None:
        attached = {f"log_{partition}" for partition in partitions_in(self._connection, self._schema)}
        for table in sorted(tables_in(self._connection, self._schema) - attached):
            if re.fullmatch(r"log_\d+", table):
                self._report.add_damage("log", f"table {table} is no partition of the log any more")
        for table in unlogged_tables(self._connection, self._schema):
            self._report.add_damage("log", f"table {table!r} is UNLOGGED: PostgreSQL empties it after a crash")

    def _read_position(self) -> LogPosition | None:
        try:
            return read_position(self._connection, self._schema)
        except DamagedLogError as error:
            self._report.add_damage("position", error.problem)
            return None

    def _read_facts(self) -> Facts | None:
        try:
            return read_facts(self._connection, self._schema)
        except DamagedLogError as error:
            self._report.add_damage("fact", error.problem)
            return None

    def _timers(self) -> Iterator[bytes]:
        """Yield the timers in `fact`, in order. All facts are checked on the way."""
        query = "COPY (SELECT kind, name, value FROM {fact} ORDER BY kind, name) TO STDOUT (FORMAT binary)"
        for kind, name, value in self._copy(query, ["text", "bytea", "bytea"]):
            problem = _fact_damage(kind, name, value)
            if problem:
                self._report.add_damage("fact", problem)
            elif kind == "timer":
                yield name

    # ---- Large tables ----

    def _rows(self) -> Iterator[_Row]:
        query = (
            "COPY (SELECT number, part, epoch, format, digest, payload FROM {log} ORDER BY number, part) "
            "TO STDOUT (FORMAT binary)"
        )
        parts = self._copy(query, ["int8", "int4", "int4", "int4", "bytea", "bytea"])
        for number, group in groupby(parts, itemgetter(0)):
            _, numbers, epochs, formats, digests, payloads = zip(*group, strict=True)
            if numbers != tuple(range(len(numbers))):
                self._report.add_damage("log", f"row {number} has the parts {', '.join(map(str, numbers))}")
            elif len(set(zip(epochs, formats, digests, strict=True))) > 1:
                self._report.add_damage("log", f"the parts of row {number} are not those of one row")
            elif not _are_whole(sizes := [len(payload) for payload in payloads]):
                found_sizes = ", ".join(map(str, sizes))
                self._report.add_damage("log", f"the parts of row {number} have {found_sizes} bytes, which cannot be")
            found = formats[0]
            if found is not None and found > LOG_FORMAT:
                raise format_error(self._schema, found)
            yield _Row(number, epochs[0], found is not None, digests[0], payloads)

    def _check_kept(self, state: _State, facts: Facts | None) -> None:
        state.add_later_contents()
        size = 0
        query = "COPY (SELECT key, generation, record, mark FROM {kept} ORDER BY key) TO STDOUT (FORMAT binary)"
        for key, generation, record, mark in self._copy(query, ["bytea", "int4", "bytea", "bytea"]):
            size += KEPT_ROW_BYTES + len(record) + len(mark or b"")
            if len(key) != MESSAGE_KEY_SIZE:
                self._report.add_damage("kept", f"{key.hex()} is not the key of a message")
            elif generation is not None and facts is not None and generation != facts.generation:
                state.add_dropped(key, is_older=generation < facts.generation)
            else:
                state.add_kept(key, record, mark, is_transient=generation is not None)
        if facts is not None and size != facts.kept_bytes:
            self._report.add_damage("fact", f"it counts {facts.kept_bytes} bytes of `kept`, which has {size}")


def _are_whole(sizes: list[int]) -> bool:
    """Return whether the parts of a row have these sizes: all but the last are full, and none but an only one is
    empty."""
    return all(size == PART_BYTES_MAX for size in sizes[:-1]) and (len(sizes) == 1 or sizes[-1] > 0)


def _fact_damage(kind: str, name: bytes, value: bytes) -> str:
    """Return what is wrong with a fact; empty if it is undamaged, or `read_facts` finds the damage."""
    if kind not in _KINDS:
        return f"{kind!r} is no kind of facts"
    if name and kind not in _NAMED_KINDS:
        return f"{kind!r} has the name {name.hex()}"
    if kind == "timer" and (len(name) != TIMER_SIZE or value):
        return f"{name.hex()} is not a timer"
    try:
        if kind == "producer" and producer_key(decode_producer(value)[0]) != name:
            return f"the key of a producer is {name.hex()}, which is not that of its name"
    except ValueError as error:
        return f"producer {name.hex()} cannot be decoded: {error}"
    return ""


# ---- Rows of the log ----


class _Row(NamedTuple):
    number: int
    epoch: int
    is_takeover: bool
    digest: bytes
    payloads: tuple[bytes, ...]


class _RowChain:
    """Checks each row by itself and with the row before it."""

    def __init__(self, position: LogPosition | None, report: DamageReport) -> None:
        self._position = position
        self._report = report
        self._last: _Row | None = None

    def _damage(self, problem: str) -> None:
        self._report.add_damage("log", problem)

    def check(self, row: _Row) -> Changes | None:
        """Check the next row. Return its changes; None if it cannot be decoded."""
        before = self._check_number(row)
        if before is not None and next_digest(before, row.payloads) != row.digest:
            self._damage(f"row {row.number} does not have the digest of its payload and the row before it")
        position = self._position
        if position is not None and row.number == position.number and row.digest != position.digest:
            self._report.add_damage("position", f"it has another digest than row {row.number}, where it is")
        changes = self._decode(row)
        self._check_epoch(row, takeover_of(changes))
        self._last = row
        return changes

    def _decode(self, row: _Row) -> Changes | None:
        try:
            return decode_changes(memoryview(b"".join(row.payloads)))
        except ValueError as error:
            self._damage(f"row {row.number} cannot be decoded: {error}")
            return None

    def _check_number(self, row: _Row) -> bytes | None:
        """Return the digest of the row before; None if it is not known."""
        if self._last is not None:
            expected, digest = self._last.number + 1, self._last.digest
        elif self._position is not None and row.number > self._position.number:
            expected, digest = self._position.number + 1, self._position.digest
        else:
            return None
        if row.number == expected:
            return digest
        last = row.number - 1
        self._damage(f"row {expected} is missing" if expected == last else f"rows {expected} to {last} are missing")
        return None

    def _check_epoch(self, row: _Row, takeover: Takeover | None) -> None:
        # The takeovers of an earlier version are empty.
        if row.is_takeover and takeover is None and b"".join(row.payloads) != EMPTY_PAYLOAD:
            self._damage(f"row {row.number} is that of a takeover, and has changes")
        if self._last is None:
            return
        expected = self._last.epoch + row.is_takeover if takeover is None else takeover.epoch
        if row.epoch != expected:
            self._damage(f"row {row.number} has epoch {row.epoch}, and the row before it {self._last.epoch}")

    def check_end(self) -> None:
        """Check the end of the log, after its last row."""
        if self._last is None:
            self._damage("it has no row")
        elif self._position is not None and self._last.number < self._position.number:
            self._damage(f"its last row is {self._last.number}, before the position {self._position.number}")


class _LaterRows:
    """Rows after the position, applied to an overlay. The overlay does not need the positions of their records."""

    def __init__(self, report: DamageReport) -> None:
        self._report = report
        self.overlay = Overlay()
        self.damages: dict[bytes, str] = {}
        """Damage of records in these rows, by message key."""
        self.contents: dict[bytes, int] = {}
        """Number of the content to which a record in these rows refers, by message key."""
        self.removed: set[bytes] = set()
        """Keys of all messages that these rows remove."""
        self.drops_transients = False
        """True if the transient messages in `kept` are dropped."""

    @property
    def index(self) -> SegmentIndex:
        indexes = self.overlay.indexes
        return indexes[0] if indexes else SegmentIndex(_SEGMENT)

    def apply(self, row: _Row, changes: Changes) -> None:
        if changes.rare is not None and changes.rare.drops_transients:
            self.drops_transients = True
        self._check_removes(row, changes)
        self._check_puts(row, changes)
        self.overlay.apply_changes(changes, _SEGMENT, 0)
        self.removed.update(changes.removes, changes.transient_removes)

    def _check_removes(self, row: _Row, changes: Changes) -> None:
        removes = [*changes.removes, *changes.transient_removes]
        already = self.index.removed
        for key, found in zip(removes, self.overlay.find(removes), strict=True):
            if found is None and key in already:
                self._report.add_damage("log", f"row {row.number} removes {key.hex()}, which is removed already")

    def _check_puts(self, row: _Row, changes: Changes) -> None:
        removed = {*changes.removes, *changes.transient_removes}
        puts = [*changes.puts, *changes.transient_puts]
        payload = memoryview(row.payloads[0] if len(row.payloads) == 1 else b"".join(row.payloads))
        at = PUTS_OFFSET
        for (key, length), found in zip(puts, self.overlay.find(key for key, _ in puts), strict=True):
            at += PUT_HEADER_BYTES
            self._note_record(key, bytes(payload[at : at + length]))
            at += length
            if found is not None and key not in removed:
                self._report.add_damage("log", f"row {row.number} puts {key.hex()}, which exists already")

    def _note_record(self, key: bytes, record: bytes) -> None:
        damage = find_record_damage(key, record)
        if damage:
            self.damages[key] = damage
        elif number := referenced_content_number(record):
            self.contents[key] = number


# ---- The state as of the last row ----


class _State:
    """Counts the messages of `kept` and of later rows, and checks that they fit together."""

    def __init__(self, recovered: Recovered, later: _LaterRows, report: DamageReport) -> None:
        self._recovered = recovered
        self._later = later
        self._index = later.index
        self._report = report
        self.summary = SalvageSummary(queues={}, names=recovered.queues)
        self._references = ReferenceCounts()
        self._not_found = dict(self._index.removed)
        """Messages that later rows remove, and that were not found in `kept` yet; True for a transient one."""
        self._unmatched_marks = {
            key
            for key, found in zip(self._index.marks, later.overlay.find(self._index.marks), strict=True)
            if found is None and key not in later.removed
        }
        """Messages that later rows mark, and that were not found in `kept` yet."""
        self._unnamed_queues: set[int] = set()
        self._highest_sequence = 0
        self._undeleted = 0
        for number in sorted(recovered.paused - recovered.queues.keys()):
            report.add_damage("fact", f"queue {number} is paused, and has no name")

    def add_later_contents(self) -> None:
        """Add the contents of later rows, to which messages in `kept` may refer."""
        for key, _ in self._later.overlay.messages():
            if key.startswith(CONTENTS_LANE_KEY) and key not in self._later.damages:
                self._references.add(sequence_of(key), self._references_to(key, 0))

    def add_dropped(self, key: bytes, *, is_older: bool) -> None:
        """Add a message of `kept` that has another generation than the current one."""
        self._undeleted += 1
        if not is_older:
            self._damage("kept", key, "it has a generation that does not exist yet")

    def add_kept(self, key: bytes, record: bytes, mark: bytes | None, *, is_transient: bool) -> None:
        """Add a message of `kept`, whose keys rise."""
        try:
            attempts = decode_kept_mark(mark)[0].attempts
        except (ValueError, struct.error) as error:
            self._damage("kept", key, f"its mark cannot be decoded: {error}")
            attempts = 0
        self._unmatched_marks.discard(key)
        if key in self._not_found:
            if self._not_found.pop(key) is not is_transient:
                self._damage("kept", key, "a later row removes it as a message of the other kind")
            return
        if is_transient and self._later.drops_transients:
            self._undeleted += 1
            return
        if self._later.overlay.is_transient(key) is not None:
            self._damage("kept", key, "a later row puts it, too")
            return
        damage = find_record_damage(key, record)
        if damage:
            self._damage("kept", key, f"it is damaged: {damage}")
        elif key.startswith(CONTENTS_LANE_KEY):
            self._references.add(sequence_of(key), self._references_to(key, attempts))
        number = 0 if damage else referenced_content_number(record)
        self._add("kept", key, len(record), number, is_transient=is_transient, is_damaged=bool(damage))

    def _references_to(self, key: bytes, attempts: int) -> int:
        mark = self._index.marks.get(key)
        return attempts if mark is None else mark.attempts

    def _add(self, table: str, key: bytes, size: int, content: int, *, is_transient: bool, is_damaged: bool) -> None:
        if content and not self._references.count_reference(content):
            self._damage(table, key, f"its content, number {content}, is missing or damaged")
            is_damaged = True
        self.summary.add(key, size, is_transient=is_transient, is_damaged=is_damaged)
        self._highest_sequence = max(self._highest_sequence, sequence_of(key))
        number = split_lane_key(key[:LANE_KEY_SIZE])[0]
        if not key.startswith(CONTENTS_LANE_KEY) and number not in self._recovered.queues:
            self._unnamed_queues.add(number)

    def finish(self, *, is_active: bool) -> None:
        """Add the messages of later rows, check what is left, and complete the summary."""
        later = self._later
        for key, span in later.overlay.messages():
            damage = later.damages.get(key, "")
            if damage:
                self._damage("log", key, f"it is damaged: {damage}")
            content = 0 if damage else later.contents.get(key, 0)
            self._add("log", key, span.length, content, is_transient=span.is_transient, is_damaged=bool(damage))
        for key in self._not_found:
            self._damage("kept", key, "it is missing, but a later row removes it")
        for key in sorted(self._unmatched_marks):
            self._damage("kept", key, "it is missing, but a later row marks it")
        for number, expected, found in self._references.mismatches():
            self._report.add_damage(
                "kept", f"content {number}: its mark says {expected} references, and {found} were found"
            )
        for number in sorted(self._unnamed_queues):
            self._report.add_damage("fact", f"the name of queue {number} is lost, and the queue has messages")
        limit = self._recovered.sequence_limit
        if self._highest_sequence >= limit:
            self._report.add_damage(
                "kept", f"a message has sequence {self._highest_sequence}, but all sequences should be below {limit}"
            )
        self.summary.damage_count = self._report.damage_count
        self.summary.notes_besides_damage = [*self._notes(is_active=is_active)]

    def _notes(self, *, is_active: bool) -> Iterator[str]:
        if self._undeleted:
            yield f"{self._undeleted} transient messages that were dropped after unclean stops are not deleted yet"
        transients = sum(queue.transient for queue in self.summary.queues.values())
        if transients and not self._recovered.clean_stop and not is_active:
            yield f"the last run did not stop cleanly: the next start drops {transients} transient messages"

    def _damage(self, table: str, key: bytes, problem: str) -> None:
        self._report.add_damage(table, f"{describe_message(key, self._recovered.queues)}: {problem}")
