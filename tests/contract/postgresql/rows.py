"""Rows of a log in PostgreSQL for tests, and the state that a snapshot of it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from truenext.model.batch import Batch, Causes, Mark
from truenext.store.changes import changes_of, encode_batch
from truenext.store.log import EMPTY_PAYLOAD, KeptMessage, LogPosition, Snapshot, next_digest
from truenext.store.postgresql.kept import decode_kept_mark, open_snapshot, read_numbers, write_snapshot
from truenext.store.postgresql.layout import Connection, attach_partitions, statement
from truenext.store.store import Recovered

SCHEMA = "main"


@dataclass
class State:
    """Snapshot in memory."""

    position: LogPosition
    recovered: Recovered
    kept: list[KeptMessage] = field(default_factory=list)
    set_timers: list[bytes] = field(default_factory=list)

    def messages(self) -> Iterator[KeptMessage]:
        return iter(self.kept)

    def timers(self) -> Iterator[bytes]:
        return iter(self.set_timers)


def empty_state(number: int = 0) -> State:
    return State(LogPosition(number, bytes(16)), Recovered(identity="0123abcd", clean_stop=True))


def read_state(connection: Connection, schema: str = SCHEMA) -> State:
    """Return the state of the compacted rows, whose records need not be those of messages."""
    with open_snapshot(connection, schema) as snapshot:
        return state_of(connection, schema, snapshot)


def state_of(connection: Connection, schema: str, snapshot: Snapshot) -> State:
    """Return the state that a snapshot on this connection has, without a check of the records."""
    rows = connection.execute(
        statement(
            schema,
            "SELECT key, record, generation IS NOT NULL, mark FROM {kept} "
            "WHERE generation IS NULL OR generation = %s ORDER BY key",
        ),
        (read_numbers(connection, schema)["generation"],),
        binary=True,
    )
    messages = [
        KeptMessage(key, record, is_transient, *decode_kept_mark(mark)) for key, record, is_transient, mark in rows
    ]
    return State(snapshot.position, snapshot.recovered, messages, list(snapshot.timers()))


class Rows:
    """Appends rows to a log, as a broker does."""

    def __init__(self, connection: Connection, schema: str = SCHEMA, state: State | None = None) -> None:
        self.connection = connection
        self.schema = schema
        self.epoch = 0
        state = state or empty_state()
        self.last = state.position
        with connection.transaction():
            write_snapshot(connection, schema, state, (1, 1), lambda _: None)
        attach_partitions(connection, schema, self.last.number)
        self._insert(self.last, [EMPTY_PAYLOAD])

    def append(self, **changes: Any) -> LogPosition:
        batch = Batch(1)
        for name, value in changes.items():
            setattr(batch, name, value)
        batch.marks = {key: Mark(*mark) for key, mark in batch.marks.items()}
        batch.causes = {key: Causes(*causes) for key, causes in batch.causes.items()}
        return self.append_payload(b"".join(encode_batch(batch, changes_of(batch).rare)))

    def append_payload(self, *parts: bytes) -> LogPosition:
        self.last = LogPosition(self.last.number + 1, next_digest(self.last.digest, parts))
        attach_partitions(self.connection, self.schema, self.last.number)
        self._insert(self.last, parts)
        return self.last

    def _insert(self, row: LogPosition, parts: tuple[bytes, ...] | list[bytes]) -> None:
        for part, payload in enumerate(parts):
            self.connection.execute(
                statement(self.schema, "INSERT INTO {log} VALUES (%s, %s, %s, NULL, %s, %s)"),
                (row.number, part, self.epoch, row.digest, payload),
            )
