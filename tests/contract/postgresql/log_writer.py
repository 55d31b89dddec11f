"""A broker's use of a log in PostgreSQL, for tests: the position is kept, payloads are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from sys import maxsize
from typing import Any

from tests.contract.disk import is_applied
from tests.contract.postgresql.rows import SCHEMA, State, empty_state
from tests.stages.postgres import PostgresServer
from truenext.store.log import EMPTY_PAYLOAD, LogPosition, next_digest
from truenext.store.postgresql.compaction import compact
from truenext.store.postgresql.kept import write_snapshot
from truenext.store.postgresql.layout import Connection, attach_partitions, create_layout, statement
from truenext.store.postgresql.log import PostgresqlLog
from truenext.store.postgresql.log_rows import last_row

DURABLE = {"fsync": "on", "full_page_writes": "on"}
"""Settings of a server for a log: without them, a log refuses it."""

DATABASE_LIMIT = 1 << 40


def url_of(server: PostgresServer, database: str = "postgres", **parameters: object) -> str:
    query = "&".join(f"{name}={value}" for name, value in ({"host": server.folder} | parameters).items())
    return f"postgresql://postgres@/{database}?{query}"


def make_log(connection: Connection, state: State | None = None, schema: str = SCHEMA) -> LogPosition:
    """Make an empty log, and return its position."""
    state = state or empty_state()
    with connection.transaction():
        connection.execute(f"CREATE SCHEMA {schema}")
        create_layout(connection, schema)
        write_snapshot(connection, schema, state, (1, 1), lambda _: None)
        attach_partitions(connection, schema, state.position.number)
        connection.execute(
            statement(schema, "INSERT INTO {log} (number, part, epoch, digest, payload) VALUES (%s, 0, 0, %s, %s)"),
            (*state.position, EMPTY_PAYLOAD),
        )
    return state.position


def open_log(url: str, schema: str = SCHEMA, **options: Any) -> PostgresqlLog:
    defaults = {"take_over": False, "is_replicated": False, "database_limit": DATABASE_LIMIT, "patience_s": 10.0}
    return PostgresqlLog(url, schema, **(defaults | options))


def open_compacted(server: PostgresServer, schema: str) -> Callable[[], PostgresqlLog]:
    """Return a function that opens the log in `schema` for one broker after another, compacted as far as possible."""

    def open_one() -> PostgresqlLog:
        with server.connect() as connection:
            compact(connection, schema, maxsize)
        return open_log(url_of(server), schema)

    return open_one


class LogWriter:
    """Broker that has taken over a log, and appends to it."""

    def __init__(self, log: PostgresqlLog, position: LogPosition, *, begins: bool = False) -> None:
        """`position` is that of a folder of this log. With `begins`, an append is begun before it is waited for."""
        self.log = log
        self.position = position
        self.begins = begins
        self.begun_count = 0
        """Number of appends that ended without waiting."""

    def take_over(self) -> None:
        self.log.take_over()
        self.follow()
        if self.begins:
            # The first append would prepare the statements, and wait for that.
            self.log._call(self.log._prepare_append)

    def follow(self) -> list[bytes]:
        """Read all rows that are new, and return their payloads."""
        return list(self._following())

    def _following(self) -> Iterator[bytes]:
        for payload in self.log.rows_after(self.position):
            self.position = self._next(payload)
            yield payload

    def append(self, payload: bytes = b"payload") -> bool:
        new = self._next(payload)
        row = (new.number, self.position.digest, new.digest, [payload[:3], payload[3:]])
        if self.begins and is_applied(self.log.begin_append(*row)):
            self.begun_count += 1
            is_certain = True
        else:
            is_certain = self.log.append(*row)
        self.position = new
        return is_certain

    def _next(self, payload: bytes) -> LogPosition:
        return LogPosition(self.position.number + 1, next_digest(self.position.digest, [payload]))


def rows_of(connection: Connection, schema: str = SCHEMA) -> list[tuple[int, int, bytes]]:
    """Return number, epoch and payload of all rows."""
    found = connection.execute(
        statement(schema, "SELECT number, epoch, payload FROM {log} ORDER BY number, part"), binary=True
    )
    return [(number, epoch, payload) for number, epoch, payload in found]


__all__ = ["DURABLE", "LogWriter", "last_row", "make_log", "open_log", "rows_of", "url_of"]
