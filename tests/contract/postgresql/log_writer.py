"""A broker's use of a log in PostgreSQL, for tests: the position is kept, payloads are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from sys import maxsize
from typing import Any

import psycopg

from tests.contract.disk import is_applied
from tests.contract.postgresql.rows import SCHEMA, State, empty_state
from tests.stages.postgres import PostgresServer, Server
from truenext.store.log import EMPTY_PAYLOAD, LogPosition, MemberSettings, next_digest
from truenext.store.postgresql.compaction import compact
from truenext.store.postgresql.kept import write_snapshot
from truenext.store.postgresql.layout import Connection, attach_partitions, create_layout, statement
from truenext.store.postgresql.log import PostgresqlLog

DURABLE = {"fsync": "on", "full_page_writes": "on"}
"""Settings of a server for a log: without them, a log refuses it."""

DATABASE_LIMIT = 1 << 40


def url_of(server: Server, database: str = "postgres", **parameters: object) -> str:
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


def member_settings(name: str, folder: Path, failover_after_s: float = 5.0) -> MemberSettings:
    return MemberSettings(name=name, folder=folder, failover_after_s=failover_after_s)


def open_log(url: str, schema: str = SCHEMA, **options: Any) -> PostgresqlLog:
    """`options` are those of PostgresqlLog; or `name`, `folder` and `failover_after_s` of its member."""
    folder = options.pop("folder", Path("/data"))
    member = member_settings(options.pop("name", "here"), folder, options.pop("failover_after_s", 5.0))
    defaults: dict[str, Any] = {"take_over": False, "is_replicated": False, "database_limit": DATABASE_LIMIT}
    defaults |= {"patience_s": 10.0, "member": member}
    return PostgresqlLog(url, schema, **(defaults | options))


def refuse_members(connection: psycopg.Connection[Any], schema: str) -> None:
    """Let the server refuse the descriptions of brokers, as it does when its disk is full."""
    connection.execute(
        f"CREATE FUNCTION {schema}.refuse_member() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION 'planted error' USING ERRCODE = 'disk_full'; END $$"
    )
    connection.execute(
        f"CREATE TRIGGER refuse BEFORE INSERT ON {schema}.member FOR EACH ROW EXECUTE FUNCTION {schema}.refuse_member()"
    )


def open_compacted(server: PostgresServer, schema: str) -> Callable[[], PostgresqlLog]:
    """Return a function that opens the log in `schema` for one broker after another, compacted as far as possible."""

    def open_one() -> PostgresqlLog:
        with server.connect() as connection:
            compact(connection, schema, maxsize)
        return open_log(url_of(server), schema)

    return open_one


def take_over(log: PostgresqlLog, position: LogPosition) -> None:
    """Stand by until the log can be taken over, and take it over."""
    while log.stands_by(position) or not log.take_over(position):
        pass


class LogWriter:
    """Broker that has taken over a log, and appends to it."""

    def __init__(self, log: PostgresqlLog, position: LogPosition, *, begins: bool = False) -> None:
        """`position` is that of a folder of this log. With `begins`, an append is begun before it is waited for."""
        self.log = log
        self.position = position
        self._payloads: dict[int, bytes] = {}
        """Payload of each row that this broker has, by number."""
        self.oldest_frame = position.number + 1
        log.frames = self
        self.begins = begins
        self.begun_count = 0
        """Number of appends that ended without waiting."""
        self._is_certain = True

    def frames_after(self, number: int) -> Iterator[bytes]:
        for each in range(number + 1, self.position.number + 1):
            yield self._payloads[each]

    def take_over(self) -> None:
        take_over(self.log, self.position)
        self.follow()
        if self.begins:
            # The first append would prepare the statements, and wait for that.
            self.log._database.call(self.log._appender._prepare_append)

    def follow(self) -> list[bytes]:
        """Read all rows that are new, and return their payloads."""
        return list(self._following())

    def _following(self) -> Iterator[bytes]:
        for payload in self.log.rows_after(self.position):
            self._add(payload)
            yield payload

    def append(self, payload: bytes = b"payload") -> bool:
        new = self._next(payload)
        row = (new.number, self.position.digest, new.digest, [payload[:3], payload[3:]])
        # Behind a row that is not certain, a store waits for each further one.
        if self.begins and self._is_certain and is_applied(self.log.begin_append(*row)):
            self.begun_count += 1
        else:
            self._is_certain = self.log.append(*row)
        self._add(payload)
        return self._is_certain

    def _add(self, payload: bytes) -> None:
        self.position = self._next(payload)
        self._payloads[self.position.number] = payload

    def _next(self, payload: bytes) -> LogPosition:
        return LogPosition(self.position.number + 1, next_digest(self.position.digest, [payload]))


def rows_of(connection: Connection, schema: str = SCHEMA) -> list[tuple[int, int, bytes]]:
    """Return number, epoch and payload of all rows."""
    found = connection.execute(
        statement(schema, "SELECT number, epoch, payload FROM {log} ORDER BY number, part"), binary=True
    )
    return [(number, epoch, payload) for number, epoch, payload in found]
