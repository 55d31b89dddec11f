"""Compacted rows of a log in PostgreSQL: the tables `kept`, `fact` and `position` (layout.py), read and written as a
whole.

The rows stream through this process by COPY, so that it needs memory for one message, however many there are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from inspect import GEN_SUSPENDED, getgeneratorstate
from typing import Any, NamedTuple, NoReturn

from psycopg import sql

from truenext.errors import StoreError
from truenext.model.batch import NO_CAUSES, NO_MARK, Causes, Mark, ProducerState
from truenext.model.record import MESSAGE_KEY_SIZE, sequence_of
from truenext.store.checkpoint_format import (
    CLEAN,
    GENERATION,
    NUMBER,
    QUEUE,
    UNCLEAN,
    decode_mark,
    decode_producer,
    encode_mark,
    encode_producer,
    producer_key,
)
from truenext.store.log import KeptMessage, LogPosition, Snapshot
from truenext.store.postgresql.layout import (
    KEPT_ROW_BYTES,
    LAYOUT_FACT,
    LAYOUT_VERSION,
    Connection,
    keep_partitions,
    statement,
)
from truenext.store.postgresql.standing_by import Origin
from truenext.store.salvage.damage import describe_message, find_record_damage
from truenext.store.store import Recovered

HISTORY = struct.Struct(">QQ")
ORIGIN = struct.Struct(">QI")
_ACTIVE = struct.Struct(">I?Q")

PROGRESS_MESSAGES = 1000
"""Number of messages after which a progress is reported."""


class ActiveBroker(NamedTuple):
    """The last active broker, as its takeover has described it."""

    failover_after_ms: int = 0
    is_replicated: bool = False
    """True if it has confirmed only what a synchronous standby had, too."""
    place: str = ""
    takeover_number: int = 0
    """Number of the row of its takeover."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a log, except its timers."""

    generation: int
    next_history: tuple[int, int]
    """Lowest run and lowest event that no compacted row has used."""
    kept_bytes: int
    """Bytes that `kept` uses."""
    recovered: Recovered
    origin: Origin | None
    """Origin that the last takeover has named; None if none has."""
    later_origin: Origin | None
    """Later origin that a broker has followed before it refused this server; None if none has."""
    active: ActiveBroker
    earlier: dict[str, int]
    """Number of the last row by each earlier identity."""


# ---- Reading ----


def read_position(connection: Connection, schema: str) -> LogPosition:
    """Return the position: the last row that was compacted.

    Raises: StoreError if it is missing; psycopg.Error
    """
    rows = connection.execute(statement(schema, "SELECT number, digest FROM {position}"), binary=True).fetchall()
    if len(rows) != 1:
        raise_damage(schema, f"`position` has {len(rows)} rows instead of 1")
    return LogPosition(*rows[0])


def read_identity(connection: Connection, schema: str) -> str:
    """Return the identity of the log; "" if it is missing. Raises: psycopg.Error"""
    row = connection.execute(
        statement(schema, "SELECT value FROM {fact} WHERE kind = 'identity'"), binary=True
    ).fetchone()
    return "" if row is None else bytes(row[0]).decode()


def read_facts(connection: Connection, schema: str) -> Facts:
    """Return all facts but the timers. Raises: StoreError if one is missing or damaged; psycopg.Error"""
    rows = connection.execute(
        statement(schema, "SELECT kind, name, value FROM {fact} WHERE kind <> 'timer'"), binary=True
    )
    kinds: dict[str, dict[bytes, bytes]] = {}
    for kind, name, value in rows:
        kinds.setdefault(kind, {})[name] = value
    try:
        return _decode_facts(kinds)
    except KeyError as error:
        raise_damage(schema, f"the fact {error} is missing")
    except (ValueError, struct.error) as error:
        raise_damage(schema, f"a fact is damaged: {error}", error)


def read_numbers(connection: Connection, schema: str) -> dict[str, int]:
    """Return the facts that each compaction needs: `generation`, `sequence limit` and `kept bytes`.

    Raises: StoreError if one is missing; psycopg.Error
    """
    kinds = ["generation", "sequence limit", "kept bytes"]
    rows = connection.execute(
        statement(schema, "SELECT kind, value FROM {fact} WHERE kind = ANY(%s) AND name = ''"), (kinds,), binary=True
    )
    numbers = {kind: int.from_bytes(value) for kind, value in rows}
    for kind in kinds:
        if kind not in numbers:
            raise_damage(schema, f"the fact '{kind}' is missing")
    return numbers


def _decode_facts(kinds: dict[str, dict[bytes, bytes]]) -> Facts:
    producers = dict(decode_producer(value) for value in kinds.get("producer", {}).values())
    by_use = sorted(producers.items(), key=lambda item: (item[1].last_used_ms, item[0]))
    recovered = Recovered(
        identity=kinds["identity"][b""].decode(),
        clean_stop=kinds["clean stop"][b""] == CLEAN,
        sequence_limit=NUMBER.unpack(kinds["sequence limit"][b""])[0],
        redelivered_below=NUMBER.unpack(kinds["redelivered below"][b""])[0],
        queues={QUEUE.unpack(number)[0]: name.decode() for number, name in sorted(kinds.get("queue", {}).items())},
        paused={QUEUE.unpack(number)[0] for number in kinds.get("paused", {})},
        producers=dict(by_use),
    )
    run, event = HISTORY.unpack(kinds["history"][b""])
    return Facts(
        generation=GENERATION.unpack(kinds["generation"][b""])[0],
        next_history=(run, event),
        kept_bytes=NUMBER.unpack(kinds["kept bytes"][b""])[0],
        recovered=recovered,
        origin=Origin(*ORIGIN.unpack(kinds["origin"][b""])) if "origin" in kinds else None,
        later_origin=Origin(*ORIGIN.unpack(kinds["later origin"][b""])) if "later origin" in kinds else None,
        active=decode_active(kinds.get("active", {}).get(b"")),
        earlier={name.decode(): NUMBER.unpack(value)[0] for name, value in kinds.get("earlier identity", {}).items()},
    )


@contextmanager
def open_snapshot(connection: Connection, schema: str) -> Iterator[Snapshot]:
    """Open a snapshot of the compacted rows, for the time of the context. The connection is used by nothing else
    meanwhile. One of the snapshot's iterators must end before the next one starts.

    Raises: StoreError if the rows are damaged; psycopg.Error
    """
    with open_reader(connection, schema) as reader:
        yield _PostgresqlSnapshot(reader, schema)


@contextmanager
def open_reader(connection: Connection, schema: str) -> Iterator[CopyReader]:
    """Begin a transaction that reads one snapshot by COPY, for the time of the context. Meanwhile no partition is
    dropped: the rows after the position will be needed, too. Raises: psycopg.Error"""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        # The primary keys have the order already. A sort would have to end before it returns the first row.
        connection.execute("SET LOCAL enable_sort = off")
        keep_partitions(connection, schema)
        with closing(CopyReader(connection)) as reader:
            yield reader


class CopyReader:
    """Reads rows in a stream. Nothing else may use the connection while a stream is open."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._stream: Generator[tuple[Any, ...]] | None = None

    def read(self, copy: sql.Composed, types: list[str]) -> Iterator[tuple[Any, ...]]:
        """Return the rows of a COPY ... TO STDOUT (FORMAT binary). `types` are the types of its columns."""
        is_open = self._stream is not None and getgeneratorstate(self._stream) == GEN_SUSPENDED
        assert not is_open, "the stream before has not ended"
        self._stream = self._rows(copy, types)
        return self._stream

    def _rows(self, copy: sql.Composed, types: list[str]) -> Generator[tuple[Any, ...]]:
        with self.connection.cursor() as cursor, cursor.copy(copy) as rows:
            rows.set_types(types)
            yield from rows.rows()

    def close(self) -> None:
        """Close a stream that was not read to its end. Until then, not even a rollback would be answered."""
        if self._stream is not None:
            self._stream.close()


class _PostgresqlSnapshot:
    def __init__(self, reader: CopyReader, schema: str) -> None:
        self._reader = reader
        self._schema = schema
        connection = reader.connection
        self.position = read_position(connection, schema)
        self._facts = read_facts(connection, schema)
        self.recovered = self._facts.recovered

    def messages(self) -> Iterator[KeptMessage]:
        """Yield the messages, and check them on the way. At the end all of them must add up to the fact `kept bytes`.

        Raises: DamagedLogError
        """
        current, limit = self._facts.generation, self.recovered.sequence_limit
        size = 0
        for key, generation, record, mark in self._rows():
            size += KEPT_ROW_BYTES + len(record) + len(mark or b"")
            is_transient = generation is not None
            if is_transient and generation < current:
                # Dropped after an unclean stop, and not deleted yet.
                continue
            damage = find_record_damage(key, record)
            if damage or sequence_of(key) >= limit or (is_transient and generation > current):
                self._raise_damage(key, damage, generation or 0)
            yield KeptMessage(key, record, is_transient, *self._decode_mark(key, mark))
        expected = self._facts.kept_bytes
        if size != expected:
            raise_damage(self._schema, f"the fact 'kept bytes' is {expected}, but `kept` uses {size} bytes")

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        query = "COPY (SELECT key, generation, record, mark FROM {kept} ORDER BY key) TO STDOUT (FORMAT binary)"
        return self._reader.read(statement(self._schema, query), KEPT_TYPES)

    def _decode_mark(self, key: bytes, mark: bytes | None) -> tuple[Mark, Causes]:
        try:
            return decode_kept_mark(mark)
        except (ValueError, struct.error) as error:
            raise_damage(self._schema, f"{self._describe(key)}: its mark cannot be decoded: {error}", error)

    def _raise_damage(self, key: bytes, damage: str, generation: int) -> NoReturn:
        if len(key) != MESSAGE_KEY_SIZE:
            raise_damage(self._schema, f"{key.hex()} is not the key of a message")
        if damage:
            problem = f"it is damaged: {damage}"
        elif generation > self._facts.generation:
            problem = "it has a generation that does not exist yet"
        else:
            problem = f"all sequences should be below {self.recovered.sequence_limit}"
        raise_damage(self._schema, f"{self._describe(key)}: {problem}")

    def _describe(self, key: bytes) -> str:
        return describe_message(key, self.recovered.queues)

    def timers(self) -> Iterator[bytes]:
        rows = self._reader.read(
            statement(
                self._schema,
                "COPY (SELECT name FROM {fact} WHERE kind = 'timer' ORDER BY kind, name) TO STDOUT (FORMAT binary)",
            ),
            ["bytea"],
        )
        return (timer for (timer,) in rows)


def decode_kept_mark(mark: bytes | None) -> tuple[Mark, Causes]:
    return (NO_MARK, NO_CAUSES) if mark is None else decode_mark(mark)


def encode_kept_mark(mark: Mark, causes: Causes) -> bytes | None:
    """Encode a mark for `kept`; None if there is nothing to store. `decode_kept_mark` is the reverse."""
    if causes == NO_CAUSES:
        return None if mark == NO_MARK else encode_mark(mark)
    return encode_mark(mark, causes)


# ---- Writing ----


def write_snapshot(
    connection: Connection,
    schema: str,
    snapshot: Snapshot,
    next_history: tuple[int, int],
    on_progress: Callable[[int], None],
) -> None:
    """Write a snapshot into the empty tables `kept`, `fact` and `position`. Call it in a transaction. `next_history` is
    the lowest run and the lowest event that the snapshot's history has not used. `on_progress` gets the number of
    messages written so far.

    Raises: psycopg.Error; errors of the snapshot
    """
    connection.execute(statement(schema, "INSERT INTO {position} VALUES (%s, %s)"), snapshot.position)
    with connection.cursor() as cursor, cursor.copy(_copy_facts(schema)) as copy:
        copy.set_types(["text", "bytea", "bytea"])
        for fact in _encode_facts(snapshot.recovered, next_history):
            copy.write_row(fact)
        for timer in snapshot.timers():
            copy.write_row(("timer", timer, b""))
    kept_bytes = _write_messages(connection, schema, snapshot.messages(), on_progress)
    connection.execute(
        statement(schema, "INSERT INTO {fact} VALUES ('kept bytes', '', %s)"), (NUMBER.pack(kept_bytes),)
    )


def _write_messages(
    connection: Connection, schema: str, messages: Iterable[KeptMessage], on_progress: Callable[[int], None]
) -> int:
    size = count = 0
    with connection.cursor() as cursor, cursor.copy(copy_kept(schema)) as copy:
        copy.set_types(KEPT_TYPES)
        for count, message in enumerate(messages, 1):
            mark = encode_kept_mark(message.mark, message.causes)
            size += KEPT_ROW_BYTES + len(message.record) + len(mark or b"")
            copy.write_row((message.key, 0 if message.is_transient else None, message.record, mark))
            if count % PROGRESS_MESSAGES == 0:
                on_progress(count)
    on_progress(count)
    return size


KEPT_TYPES = ["bytea", "int4", "bytea", "bytea"]


def copy_kept(schema: str) -> sql.Composed:
    """Return the COPY that writes rows of KEPT_TYPES into `kept`."""
    return statement(schema, "COPY {kept} (key, generation, record, mark) FROM STDIN (FORMAT binary)")


def _copy_facts(schema: str) -> sql.Composed:
    return statement(schema, "COPY {fact} (kind, name, value) FROM STDIN (FORMAT binary)")


def _encode_facts(recovered: Recovered, next_history: tuple[int, int]) -> Iterator[tuple[str, bytes, bytes]]:
    yield "identity", b"", recovered.identity.encode()
    yield "layout", b"", LAYOUT_FACT.pack(LAYOUT_VERSION)
    yield "generation", b"", GENERATION.pack(0)
    yield "sequence limit", b"", NUMBER.pack(recovered.sequence_limit)
    yield "redelivered below", b"", NUMBER.pack(recovered.redelivered_below)
    yield "clean stop", b"", CLEAN if recovered.clean_stop else UNCLEAN
    yield "history", b"", HISTORY.pack(*next_history)
    for number, name in recovered.queues.items():
        yield "queue", QUEUE.pack(number), name.encode()
    for number in sorted(recovered.paused):
        yield "paused", QUEUE.pack(number), b""
    for producer, state in recovered.producers.items():
        yield encode_producer_fact(producer, state)


def encode_producer_fact(name: str, state: ProducerState) -> tuple[str, bytes, bytes]:
    return "producer", producer_key(name), encode_producer(name, state)


def encode_active(active: ActiveBroker) -> bytes:
    head = _ACTIVE.pack(active.failover_after_ms, active.is_replicated, active.takeover_number)
    return head + active.place.encode()


def decode_active(value: bytes | None) -> ActiveBroker:
    """Return the broker that a fact `active` describes. None: the log has no such fact."""
    if value is None:
        return ActiveBroker()
    failover_after_ms, is_replicated, number = _ACTIVE.unpack_from(value)
    return ActiveBroker(failover_after_ms, is_replicated, value[_ACTIVE.size :].decode(), number)


def write_fact(connection: Connection, schema: str, kind: str, value: bytes, name: bytes = b"") -> None:
    """Set one fact. Raises: psycopg.Error"""
    connection.execute(
        statement(
            schema,
            "INSERT INTO {fact} VALUES (%s, %s, %s) ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value",
        ),
        (kind, name, value),
    )


def write_later_origin(connection: Connection, schema: str, origin: Origin) -> None:
    """Note for `store status` that a broker has followed a later origin than that of this server, without a wait for
    the standby, which a former primary has not. Raises: psycopg.Error"""
    with connection.transaction():
        connection.execute("SET LOCAL synchronous_commit = off")
        write_fact(connection, schema, "later origin", ORIGIN.pack(*origin))


class DamagedLogError(StoreError):
    """The tables of a log are damaged."""

    def __init__(self, schema: str, problem: str) -> None:
        super().__init__(
            f"the log in schema {schema!r} is damaged: {problem}. Messages may be missing; restore the database from a "
            f"backup. `truenext store check URL --schema {schema}` shows the damage"
        )
        self.problem = problem


def raise_damage(schema: str, problem: str, cause: Exception | None = None) -> NoReturn:
    """Raises: DamagedLogError for the log in `schema`"""
    raise DamagedLogError(schema, problem) from cause
