"""Connections to PostgreSQL: tests a connection before use if it was idle, and turns off prepared statements if there
is a pooler.

A connection may have been lost while it was idle in its pool. So an idle connection is tested with a ping when it
leaves the pool, and replaced if it was lost. A connection used a moment ago is not tested, because a ping would cost
each message a round trip.

psycopg prepares a statement at the server when the statement was used several times. A pooler such as PgBouncer in
transaction mode may give each transaction another server process. That process has not prepared the statement, or has
another statement under its name. So behind a pooler, psycopg must not prepare statements.

Source: decision 60; https://www.pgbouncer.org/features.html
"""

from contextlib import closing
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.pool import ConnectionPoolEntry

from truenext.clock import monotonic

IDLE_S = 2.0
"""Seconds after which an idle connection is tested before use. This is more than the second between two checks of the
relay, so that the relay's connection is not tested."""

_IDLE_SINCE = "truenext: idle since"


def set_up(engine: Engine, *, limits: str = "") -> None:
    """Set up all connections of `engine`; for an AsyncEngine pass its `sync_engine`. `limits` is SQL that sets the
    session's timeouts, executed once for each new connection. Behind a pooler this SQL is not executed, because other
    clients would then get these timeouts, too."""
    dialect = engine.dialect

    @event.listens_for(engine, "connect")
    def detect_pooler(connection: Any, _: ConnectionPoolEntry) -> None:
        driver = connection.driver_connection if dialect.is_async else connection
        with closing(connection.cursor()) as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            # A pooler reports a process id of its own making when it is connected.
            if cursor.fetchone()[0] != driver.info.backend_pid:
                driver.prepare_threshold = None
            elif limits:
                cursor.execute(limits)
        connection.commit()

    @event.listens_for(engine, "checkin")
    def record_idle(_: object, entry: ConnectionPoolEntry) -> None:
        entry.info[_IDLE_SINCE] = monotonic()

    @event.listens_for(engine, "checkout")
    def ping(connection: Any, entry: ConnectionPoolEntry, _: object) -> None:
        since = entry.info.get(_IDLE_SINCE)
        if since is None or monotonic() - since < IDLE_S:
            return
        try:
            is_alive = dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as error:
            if not dialect.is_disconnect(error, connection, None):
                raise
            is_alive = False
        if not is_alive:
            # The pool makes a new connection in its place, and drops the others that are as old.
            raise InvalidatePoolError


def read_binary(engine: Engine) -> None:
    """Let an engine with psycopg's asynchronous driver read results in the binary format. Units of an outbox are long,
    and would be twice as long in the text format. Call this after `set_up`, whose SQL has several statements: the
    binary format allows only one."""
    from psycopg.pq import Format

    @event.listens_for(engine, "connect")
    def set_format(connection: Any, _: ConnectionPoolEntry) -> None:
        driver = connection.driver_connection
        make_cursor = driver.cursor_factory

        def make_binary_cursor(*args: Any, **options: Any) -> Any:
            cursor = make_cursor(*args, **options)
            cursor.format = Format.BINARY
            return cursor

        driver.cursor_factory = make_binary_cursor
