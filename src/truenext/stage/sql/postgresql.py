"""What is seen to at the connections of PostgreSQL, before somebody works with one.

One that has been idle in its pool may have died there: it is asked. So it is nobody's lost connection. One that was
used a moment ago is not asked, which would cost each message a question and its answer.

psycopg prepares a statement at the server when it has come several times. A pooler such as PgBouncer in transaction
mode gives each transaction another process of the server, which has not prepared it, or has another one under that
name. So nothing is prepared where a pooler is found.

Source: decision 60; https://www.pgbouncer.org/features.html
"""

from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.pool import ConnectionPoolEntry

from truenext.clock import monotonic

IDLE_S = 2.0
"""More than a second, after which the relay looks again: it is not to ask twice."""

_IDLE_SINCE = "truenext: idle since"


def set_up(engine: Engine, *, limits: str = "") -> None:
    """Of all connections of `engine`, which may be the inner one of an AsyncEngine. `limits` is said once to each that
    leads to its own process of the server: to set something of a session behind a pooler would be for others, too."""
    dialect = engine.dialect

    @event.listens_for(engine, "connect")
    def detect_pooler(connection: Any, _: ConnectionPoolEntry) -> None:
        driver = connection.driver_connection if dialect.is_async else connection
        cursor = connection.cursor()
        try:
            cursor.execute("SELECT pg_backend_pid()")
            # A pooler has named a process of its own making when it was connected.
            if cursor.fetchone()[0] != driver.info.backend_pid:
                driver.prepare_threshold = None
            elif limits:
                cursor.execute(limits)
        finally:
            cursor.close()
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
            # The pool makes another one in its place, and gives up the others that are as old.
            raise InvalidatePoolError
