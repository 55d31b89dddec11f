"""Compaction of a log in PostgreSQL: moves what its oldest rows add up to into `kept` and `fact` (layout.py), so that
the partitions of these rows can be dropped.

    position N    rows N + 1 to M are read, and their net effect is computed (net_effect.py)
    position M    one transaction applies the net effect, and moves the position from N to M

Rows and position are read in one snapshot, and the position is moved only if it is still N. So each row is applied
once, however many brokers compact, and whichever of them is active.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate, chain, groupby, islice, takewhile
from operator import itemgetter
from typing import Any, LiteralString, TypeVar

from psycopg import errors

from truenext.model.batch import Causes, Mark
from truenext.store.checkpoint_format import CLEAN, GENERATION, NUMBER, QUEUE, UNCLEAN, producer_key
from truenext.store.log import KeptMessage, LogPosition, next_digest
from truenext.store.overlay import SegmentIndex
from truenext.store.pieces import split_into_pieces
from truenext.store.postgresql.kept import (
    HISTORY,
    decode_kept_mark,
    encode_kept_mark,
    encode_producer_fact,
    raise_damage,
    read_numbers,
    read_position,
)
from truenext.store.postgresql.layout import (
    KEPT_ROW_BYTES,
    PARTITION_ROWS,
    Connection,
    keep_partitions,
    size_of_compacted_partitions,
    size_of_compacted_rows,
    statement,
)
from truenext.store.postgresql.net_effect import NetEffect

T = TypeVar("T")

WINDOW_ROWS = 4 * PARTITION_ROWS
WINDOW_BYTES = 128 * 1024 * 1024
"""Number of rows and bytes of payload that one transaction compacts, at most about. They are many, because a message
that one of these rows puts and another one removes never gets into `kept`."""

CHANGES_MAX = 50_000
RECORD_BYTES_MAX = 32 * 1024 * 1024
"""Largest number of changes to `kept` and `fact` in one transaction, and of bytes of records. A single row may have
more."""

UNCOMPACTED_ROWS = 12 * PARTITION_ROWS
UNCOMPACTED_BYTES = 256 * 1024 * 1024
"""Number of the newest rows, and their bytes of payload, that are not compacted, whichever is less. A folder that is
behind by less catches up from the rows."""

READ_BYTES = 1024 * 1024
"""Largest number of bytes of payload that one statement reads. A single row may have more."""

WRITE_BYTES = 4 * 1024 * 1024
"""Largest number of bytes of records that one statement writes. A single message may have more."""

WRITE_KEYS = 10_000
"""Largest number of messages or facts that one statement changes."""

DROPPED_KEYS = 1000
"""Largest number of dropped transient messages that one transaction deletes."""

LOG_ROW_BYTES = 150
"""Estimated bytes of a row of the log beside its payload."""

MEASURED_ROWS = 16 * PARTITION_ROWS
"""Largest number of rows whose sizes one step reads."""

IDLE_TIMEOUT_S = 30
"""Time after which PostgreSQL ends a compaction whose broker does nothing, for example because it was stopped. Other
brokers could not compact meanwhile."""


_NOTHING = (-1, b"")
"""Generation and key before those of all messages."""


class Compactor:
    """Compacts the log in one schema, step by step. One thread uses it, with its own connection in autocommit mode.

    All methods raise StoreError if the log is damaged, and psycopg.Error.
    """

    def __init__(self, connection: Connection, schema: str) -> None:
        self._connection = connection
        self._schema = schema
        self._sizes: deque[tuple[int, int]] = deque()
        """Number and bytes of payload of each row after the position, as far as they are known."""
        self._bytes = 0
        """Bytes of payload of the rows in `_sizes`."""
        self._last_deleted: tuple[int, bytes] | None = _NOTHING
        """Generation and key of the last dropped transient message that was deleted; None if all are deleted."""

    def step(self, uncompacted_bytes: int = UNCOMPACTED_BYTES) -> bool:
        """Compact the oldest rows, or delete some dropped transient messages. Return whether there is more to do now.

        The newest rows are left, up to `uncompacted_bytes`. Half of that is compacted at once. If the database is
        nearly full, it should be 0: rows of acknowledged messages take space, too.
        """
        self._measure()
        number = self._end_of_window(uncompacted_bytes)
        position = None if number is None else self.compact(number)
        if position is not None and position.number < self._sizes[-1][0]:
            return True
        # Rows that come meanwhile wait for the next step: a transaction for each of them would cost a sync of its own.
        return self._delete_dropped()

    def compact(self, up_to: int) -> LogPosition | None:
        """Compact the rows up to `up_to`, or fewer, and return the new position. Return None if another broker compacts
        the log at the same time: then nothing was changed."""
        position = compact(self._connection, self._schema, up_to)
        self._last_deleted = self._last_deleted or _NOTHING
        return position

    def _delete_dropped(self) -> bool:
        if self._last_deleted is None:
            return False
        try:
            self._last_deleted = delete_dropped(self._connection, self._schema, self._last_deleted)
        except (errors.SerializationFailure, errors.LockNotAvailable):
            return False
        return self._last_deleted is not None

    def used_bytes(self) -> int:
        """Return the bytes that the log uses. Space of deleted messages is not counted: PostgreSQL has their files, but
        uses the space again."""
        self._measure()
        position = read_position(self._connection, self._schema).number
        rows = self._connection.execute("SELECT pg_total_relation_size(%s)", (f'"{self._schema}"."fact"',)).fetchone()
        facts = 0 if rows is None else rows[0]
        kept = read_numbers(self._connection, self._schema)["kept bytes"]
        compacted = size_of_compacted_partitions(self._connection, self._schema, position)
        compacted += size_of_compacted_rows(self._connection, self._schema)
        return int(facts + kept + compacted + self._bytes + LOG_ROW_BYTES * len(self._sizes))

    def _measure(self) -> None:
        """Read the sizes of the rows that were appended since the last step."""
        position = read_position(self._connection, self._schema).number
        while self._sizes and self._sizes[0][0] <= position:
            self._bytes -= self._sizes.popleft()[1]
        last = self._sizes[-1][0] if self._sizes else position
        rows = read_sizes(self._connection, self._schema, last, last + MEASURED_ROWS)
        for number, size in rows:
            self._sizes.append((number, size))
            self._bytes += size

    def _end_of_window(self, uncompacted_bytes: int) -> int | None:
        """Return the last row to compact now; None if there are too few rows. Many rows are compacted together: most of
        their messages are acknowledged by one of the others."""
        compacted_bytes = self._bytes - uncompacted_bytes
        compacted_rows = len(self._sizes) - UNCOMPACTED_ROWS
        if not self._sizes or (compacted_bytes < uncompacted_bytes // 2 and compacted_rows < WINDOW_ROWS):
            return None
        bytes_so_far = accumulate(size for _, size in islice(self._sizes, WINDOW_ROWS))
        count = sum(1 for _ in takewhile(lambda size: size <= WINDOW_BYTES, bytes_so_far))
        return self._sizes[max(count, 1) - 1][0]


# ---- One transaction ----


def compact(connection: Connection, schema: str, up_to: int) -> LogPosition | None:
    """Compact rows after the position, up to row `up_to` at most, in one transaction. Return the new position. Return
    None if there is no such row, or another broker compacts the log at the same time: then nothing was changed.

    Raises: StoreError if the log is damaged; psycopg.Error
    """
    effect = NetEffect()
    try:
        with connection.transaction():
            _begin(connection)
            keep_partitions(connection, schema)
            before = read_position(connection, schema)
            after = _read_window(connection, schema, before, up_to, effect)
            if after == before:
                return None
            _lock(connection, schema)
            _Application(connection, schema, effect).apply()
            _move_position(connection, schema, before, after)
            return after
    except (errors.SerializationFailure, errors.LockNotAvailable):
        return None
    finally:
        effect.clear()


def _begin(connection: Connection) -> None:
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    connection.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_S}s'")
    # A few of very many entries are looked up by their keys, whatever the statistics say.
    connection.execute("SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off")


def _lock(connection: Connection, schema: str) -> None:
    """Lock the tables against other compactions, before anything is changed. Without the lock, this compaction would
    find changes of another one, and take these for damage.

    Raises: psycopg.Error if another broker compacts the log
    """
    connection.execute(statement(schema, "SELECT 1 FROM {position} FOR UPDATE NOWAIT"))


def _read_window(
    connection: Connection, schema: str, before: LogPosition, up_to: int, effect: NetEffect
) -> LogPosition:
    """Add the rows after `before`, up to row `up_to` at most, to the net effect, and return the last of these rows."""
    last = before
    for row, payload in read_rows(connection, schema, before, min(up_to, before.number + WINDOW_ROWS)):
        is_large = effect.record_bytes + len(payload) > RECORD_BYTES_MAX or effect.change_count >= CHANGES_MAX
        if is_large and effect.row_count:
            break
        try:
            if not effect.add(payload):
                break
        except ValueError as error:
            raise_damage(schema, f"row {row.number} cannot be decoded: {error}", error)
        last = row
    return last


def read_rows(
    connection: Connection, schema: str, after: LogPosition, up_to: int
) -> Iterator[tuple[LogPosition, bytes]]:
    """Yield the rows after `after` up to row `up_to`, or to the last row, with their payloads.

    Raises: StoreError if a row is missing or changed; psycopg.Error
    """
    last = after
    for first, end in _pieces_of_rows(connection, schema, after.number, up_to):
        parts_of_rows = connection.execute(
            statement(
                schema,
                "SELECT number, digest, payload FROM {log} WHERE number >= %s AND number <= %s ORDER BY number, part",
            ),
            (first, end),
            binary=True,
        )
        for number, group in groupby(parts_of_rows, itemgetter(0)):
            _, digests, parts = zip(*group, strict=True)
            if number != last.number + 1:
                raise_damage(schema, f"row {last.number + 1} is missing or changed")
            row = LogPosition(number, next_digest(last.digest, parts))
            if any(digest != row.digest for digest in digests):
                raise_damage(schema, f"row {number} does not have the digest of its payload and the row before it")
            yield row, parts[0] if len(parts) == 1 else b"".join(parts)
            last = row


def _pieces_of_rows(connection: Connection, schema: str, after: int, up_to: int) -> Iterator[tuple[int, int]]:
    """Yield first and last number of the rows after row `after`, in pieces of READ_BYTES at most."""
    while sizes := read_sizes(connection, schema, after, min(up_to, after + WINDOW_ROWS)):
        for piece in split_into_pieces(sizes, itemgetter(1), READ_BYTES, WINDOW_ROWS):
            yield piece[0][0], piece[-1][0]
        after = sizes[-1][0]


def read_sizes(connection: Connection, schema: str, after: int, up_to: int) -> list[tuple[int, int]]:
    """Return number and bytes of payload of the rows after row `after` up to row `up_to`, in order."""
    return connection.execute(
        statement(
            schema,
            """
            SELECT number, sum(octet_length(payload)) FROM {log} WHERE number > %s AND number <= %s
            GROUP BY number ORDER BY number
            """,
        ),
        (after, up_to),
        binary=True,
    ).fetchall()


def _move_position(connection: Connection, schema: str, before: LogPosition, after: LogPosition) -> None:
    moved = connection.execute(
        statement(
            schema, "UPDATE {position} SET number = %s, digest = %s WHERE number = %s AND digest = %s RETURNING number"
        ),
        (*after, *before),
    )
    if moved.fetchone() is None:
        raise errors.SerializationFailure(f"the position is not at row {before.number} any more")


class _Application:
    """Applies one net effect to `kept` and `fact`, within a transaction."""

    def __init__(self, connection: Connection, schema: str, effect: NetEffect) -> None:
        self._connection = connection
        self._schema = schema
        self._effect = effect
        facts = read_numbers(connection, schema)
        self._generation = facts["generation"] + effect.drops_transients
        self._sequence_limit = facts["sequence limit"]
        self._kept_bytes = facts["kept bytes"]

    def apply(self) -> None:
        self._remove()
        self._set_marks()
        for messages in split_into_pieces(
            self._effect.puts(), lambda message: len(message.record), WRITE_BYTES, WRITE_KEYS
        ):
            self._put(messages)
        index = self._effect.index
        for facts in split_into_pieces(cleared_facts(index), lambda fact: len(fact[1]), WRITE_BYTES, WRITE_KEYS):
            self._clear_facts(facts)
        changed = chain(set_facts(index), self._set_numbers())
        for values in split_into_pieces(changed, lambda fact: len(fact[2]), WRITE_BYTES, WRITE_KEYS):
            self._set_facts(values)

    def _execute(self, text: LiteralString, *parameters: object) -> list[Any]:
        cursor = self._connection.execute(statement(self._schema, text), parameters, binary=True)
        return cursor.fetchall() if cursor.description else []

    # ---- Messages ----

    def _remove(self) -> None:
        removed = self._effect.index.removed
        persistent = (key for key, is_transient in removed.items() if not is_transient)
        for keys in split_into_pieces(persistent, len, WRITE_BYTES, WRITE_KEYS):
            self._delete(
                "DELETE FROM {kept} WHERE key = ANY(%b) AND generation IS NULL RETURNING octet_length(record) + "
                "coalesce(octet_length(mark), 0)",
                keys,
            )
        transient = (key for key, is_transient in removed.items() if is_transient)
        for keys in split_into_pieces(transient, len, WRITE_BYTES, WRITE_KEYS):
            self._delete(
                "DELETE FROM {kept} WHERE key = ANY(%b) AND generation = %s RETURNING octet_length(record) + "
                "coalesce(octet_length(mark), 0)",
                keys,
                self._generation,
            )

    def _delete(self, text: LiteralString, keys: list[bytes], *parameters: object) -> None:
        sizes = self._execute(text, keys, *parameters)
        if len(sizes) != len(keys):
            raise_damage(
                self._schema, f"{len(keys) - len(sizes)} of {len(keys)} removed messages are missing in `kept`"
            )
        self._kept_bytes -= sum(KEPT_ROW_BYTES + size for (size,) in sizes)

    def _set_marks(self) -> None:
        for marks in split_into_pieces(
            self._effect.marks().items(), lambda each: sum(map(len, each[1][1])), WRITE_BYTES, WRITE_KEYS
        ):
            self._set_some_marks(dict(marks))

    def _set_some_marks(self, marks: dict[bytes, tuple[Mark, Causes]]) -> None:
        stored = dict(
            self._execute(
                "SELECT key, mark FROM {kept} WHERE key = ANY(%b) AND (generation IS NULL OR generation = %s)",
                list(marks),
                self._generation,
            )
        )
        if len(stored) != len(marks):
            raise_damage(
                self._schema, f"{len(marks) - len(stored)} of {len(marks)} marked messages are missing in `kept`"
            )
        changed = {}
        for key, before in stored.items():
            mark, causes = marks[key]
            changed[key] = encode_kept_mark(mark, causes.merged_onto(decode_kept_mark(before)[1]))
            self._kept_bytes += len(changed[key] or b"") - len(before or b"")
        self._execute(
            "UPDATE {kept} SET mark = new.mark FROM unnest(%b::bytea[], %b::bytea[]) AS new (key, mark) "
            "WHERE kept.key = new.key",
            list(changed),
            list(changed.values()),
        )

    def _put(self, messages: list[KeptMessage]) -> None:
        marks = [encode_kept_mark(message.mark, message.causes) for message in messages]
        try:
            self._execute(
                "INSERT INTO {kept} (key, generation, record, mark) "
                "SELECT * FROM unnest(%b::bytea[], %b::integer[], %b::bytea[], %b::bytea[])",
                [message.key for message in messages],
                [self._generation if message.is_transient else None for message in messages],
                [message.record for message in messages],
                marks,
            )
        except errors.UniqueViolation as error:
            raise_damage(self._schema, f"a new message is in `kept` already: {error.diag.message_detail}", error)
        self._kept_bytes += sum(KEPT_ROW_BYTES + len(message.record) for message in messages)
        self._kept_bytes += sum(len(mark or b"") for mark in marks)

    # ---- Facts ----

    def _clear_facts(self, facts: list[tuple[str, bytes]]) -> None:
        kinds, names = zip(*facts, strict=True)
        self._execute(
            "DELETE FROM {fact} USING unnest(%b::text[], %b::bytea[]) AS old (kind, name) "
            "WHERE fact.kind = old.kind AND fact.name = old.name",
            list(kinds),
            list(names),
        )

    def _set_facts(self, facts: list[tuple[str, bytes, bytes]]) -> None:
        kinds, names, values = zip(*facts, strict=True)
        self._execute(
            "INSERT INTO {fact} (kind, name, value) SELECT * FROM unnest(%b::text[], %b::bytea[], %b::bytea[]) "
            "ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value",
            list(kinds),
            list(names),
            list(values),
        )

    def _set_numbers(self) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield the new values of facts without a name. To be called when everything else is applied."""
        index = self._effect.index
        yield "generation", b"", GENERATION.pack(self._generation)
        yield "kept bytes", b"", NUMBER.pack(max(self._kept_bytes, 0))
        if index.sequence_limit > self._sequence_limit:
            yield "sequence limit", b"", NUMBER.pack(index.sequence_limit)
        if index.redelivered_below:
            yield "redelivered below", b"", NUMBER.pack(index.redelivered_below)
        if index.clean_stop is not None:
            yield "clean stop", b"", CLEAN if index.clean_stop else UNCLEAN
        if self._effect.next_history is not None:
            yield "history", b"", HISTORY.pack(*map(max, self._effect.next_history, self._read_next_history()))

    def _read_next_history(self) -> tuple[int, ...]:
        # A renewal may have raised it above that of all rows before.
        return HISTORY.unpack(self._execute("SELECT value FROM {fact} WHERE kind = 'history'")[0][0])


def cleared_facts(index: SegmentIndex) -> Iterator[tuple[str, bytes]]:
    """Yield kind and name of each fact to delete, before others are set."""
    for number, name in index.queues.items():
        if not name:
            yield "queue", QUEUE.pack(number)
    for number, is_paused in index.paused.items():
        if not is_paused:
            yield "paused", QUEUE.pack(number)
    for producer in index.forgotten_producers:
        yield "producer", producer_key(producer)
    for timer, is_set in index.timers.items():
        if not is_set:
            yield "timer", timer


def set_facts(index: SegmentIndex) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield kind, name and value of each fact with a name to set."""
    for number, name in index.queues.items():
        if name:
            yield "queue", QUEUE.pack(number), name.encode()
    for number, is_paused in index.paused.items():
        if is_paused:
            yield "paused", QUEUE.pack(number), b""
    for producer, state in index.producers.items():
        yield encode_producer_fact(producer, state)
    for timer, is_set in index.timers.items():
        if is_set:
            yield "timer", timer, b""


# ---- Transient messages that were dropped ----


def delete_dropped(
    connection: Connection, schema: str, after: tuple[int, bytes] = _NOTHING
) -> tuple[int, bytes] | None:
    """Delete up to DROPPED_KEYS transient messages of earlier generations, in the order of generation and key. `after`
    has generation and key of the last one that an earlier call has deleted. Return those of the last one that this call
    has deleted; None if there is none.

    Raises: psycopg.Error
    """
    with connection.transaction():
        _begin(connection)
        _lock(connection, schema)
        numbers = read_numbers(connection, schema)
        deleted = connection.execute(
            statement(
                schema,
                """
                DELETE FROM {kept} WHERE key = ANY(ARRAY(
                    SELECT key FROM {kept} WHERE generation < %s AND (generation, key) > (%s, %s)
                    ORDER BY generation, key LIMIT %s
                )) RETURNING generation, key, octet_length(record) + coalesce(octet_length(mark), 0)
                """,
            ),
            (numbers["generation"], *after, DROPPED_KEYS),
            binary=True,
        ).fetchall()
        if not deleted:
            return None
        kept_bytes = numbers["kept bytes"] - sum(KEPT_ROW_BYTES + size for _, _, size in deleted)
        connection.execute(
            statement(schema, "UPDATE {fact} SET value = %s WHERE kind = 'kept bytes'"),
            (NUMBER.pack(max(kept_bytes, 0)),),
        )
        return max((generation, key) for generation, key, _ in deleted)
