"""A connection that has been idle in its pool may have died there: it is asked before somebody works with it.

So it is nobody's lost connection. One that was used a moment ago is not asked, which would cost each message a question
and its answer. Source: decision 60
"""

import time
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.pool import ConnectionPoolEntry

IDLE_S = 1.0

_SINCE = "truenext: idle since"


def watch(engine: Engine) -> None:
    """All connections of `engine`, which may be the inner one of an AsyncEngine."""
    dialect = engine.dialect

    @event.listens_for(engine, "checkin")
    def rest(_: object, entry: ConnectionPoolEntry) -> None:
        entry.info[_SINCE] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def ask(connection: Any, entry: ConnectionPoolEntry, _: object) -> None:
        since = entry.info.get(_SINCE)
        if since is None or time.monotonic() - since < IDLE_S:
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
