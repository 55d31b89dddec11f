"""Connections of PostgreSQL: pings idle ones before use, and prepares no statements behind a pooler.

A connection that has been idle in its pool may have died there, so it is pinged: then no work has lost it. One that
was used a moment ago is not pinged, as that would cost each message a round trip.

psycopg prepares a statement at the server when it was used several times. A pooler such as PgBouncer in transaction
mode gives each transaction another process of the server, which has not prepared it, or has another one under that
name.

Source: decision 60; https://www.pgbouncer.org/features.html
"""

from contextlib import closing
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.pool import ConnectionPoolEntry

from truenext.clock import monotonic

IDLE_S = 2.0
"""Idle time after which a connection is pinged: more than the second between two checks of the relay."""

_IDLE_SINCE = "truenext: idle since"


def set_up(engine: Engine, *, limits: str = "") -> None:
    """Set up all connections of `engine`, which may be the inner one of an AsyncEngine. `limits` is executed once on
    each that has its own process of the server: behind a pooler, settings of a session would be for others, too."""
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
