"""Takeover of a log: the row with the next epoch, which fences the broker before.

The lock waits for appends that are in progress, and no further append can begin. So the takeover row comes behind all
rows of earlier epochs. A late append of an earlier broker finds its number in use, or the row before it with another
epoch.

The lock is no fence. It is a hint for a second broker which finds that another broker is active, and exits.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from hashlib import blake2b

import psycopg

from truenext.errors import ConfigurationError, StoreError
from truenext.store.checkpoint_format import FORMAT_VERSION
from truenext.store.log import EMPTY_PAYLOAD, next_digest
from truenext.store.postgresql.connection import Connection
from truenext.store.postgresql.layout import statement
from truenext.store.postgresql.log_rows import last_row, newer_format
from truenext.store.postgresql.outcome import Row

logger = logging.getLogger(__name__)

NO_STANDBYS = (
    'durability = "replicated" needs a synchronous standby, but PostgreSQL names none (synchronous_standby_names): '
    'name one, or set durability = "local"'
)

LOCK_TIMEOUT_S = 2
"""Time after which a session that keeps the takeover from its lock is ended."""


def check_fsync(connection: Connection) -> None:
    """Raises: ConfigurationError if the server may lose what it has confirmed; psycopg.Error"""
    row = connection.execute("SELECT current_setting('fsync')").fetchone()
    if row != ("on",):
        raise ConfigurationError(
            f"PostgreSQL at {connection.where} has fsync = off, and may lose what it has confirmed: set fsync = on"
        )


def insert_takeover(connection: Connection, schema: str, *, is_replicated: bool) -> Row:
    """Insert the takeover row in one transaction, and return it.

    Raises: StoreError if the log is empty, was written in a newer format, or `is_replicated` and PostgreSQL names no
    synchronous standby; psycopg.errors.LockNotAvailable if a session is in the way for LOCK_TIMEOUT_S; psycopg.Error
    """
    # Before the lock, because there may be many rows: under it only later rows are checked.
    checked = last_row(connection, schema)
    _check_formats(connection, schema, 0)
    with connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'")
        connection.execute(statement(schema, "LOCK TABLE ONLY {log} IN SHARE ROW EXCLUSIVE MODE"))
        # A statement that begins after the lock sees all rows of the transactions that had it.
        last = last_row(connection, schema)
        if last is None:
            raise empty_log_error(schema)
        _check_formats(connection, schema, last.number if checked is None else checked.number)
        row = Row(last.number + 1, last.epoch + 1, next_digest(last.digest, [EMPTY_PAYLOAD]))
        names_standbys = connection.execute(
            statement(
                schema,
                "INSERT INTO {log} (number, part, epoch, format, digest, payload) VALUES (%s, 0, %s, %s, %s, %s) "
                "RETURNING current_setting('synchronous_standby_names') <> ''",
            ),
            (row.number, row.epoch, FORMAT_VERSION, row.digest, EMPTY_PAYLOAD),
        ).fetchone()
        if is_replicated and (names_standbys is None or not names_standbys[0]):
            raise StoreError(NO_STANDBYS)
    return row


def empty_log_error(schema: str) -> StoreError:
    return StoreError(f"the log in schema {schema!r} has no row: restore the database from a backup")


def _check_formats(connection: Connection, schema: str, after: int) -> None:
    """Check that this truenext can read all rows after row `after`. Raises: StoreError"""
    newer = newer_format(connection, schema, after, FORMAT_VERSION)
    if newer is not None:
        raise format_error(schema, newer)


def format_error(schema: str, found: int) -> StoreError:
    return StoreError(
        f"the log in schema {schema!r} has rows of format {found}; this truenext reads format {FORMAT_VERSION}: use "
        "the version that wrote them"
    )


def end_sessions_in_the_way(connection: Connection, schema: str) -> None:
    """End the sessions that have kept a takeover from its lock for LOCK_TIMEOUT_S.

    Raises: StoreError if this role may not end a session; psycopg.Error
    """
    blocking = connection.execute(
        statement(
            schema,
            """
            SELECT DISTINCT pid, coalesce(application_name, '') FROM pg_locks
            LEFT JOIN pg_stat_activity AS session USING (pid)
            WHERE locktype = 'relation' AND relation = %s::regclass AND granted AND pid <> pg_backend_pid()
                AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                AND mode NOT IN ('AccessShareLock', 'RowShareLock')
                AND coalesce(xact_start < clock_timestamp() - %s * interval '1 second', true)
            """,
        ),
        (f'"{schema}"."log"', LOCK_TIMEOUT_S),
    ).fetchall()
    for process, name in blocking:
        logger.warning("ended a session that kept a takeover waiting", extra={"session": process, "application": name})
        _end_session(connection, process, f"the session {process} ({name})" if name else f"the session {process}")


def _end_session(connection: Connection, process: int, name: str) -> None:
    try:
        _terminate(connection, process)
    except psycopg.errors.InsufficientPrivilege as error:
        raise StoreError(
            f"cannot take over: {name} holds a lock on the log, and this role may not end it: end that session, or "
            "grant pg_signal_backend to the role"
        ) from error


def _terminate(connection: Connection, process: int) -> None:
    connection.execute("SELECT pg_terminate_backend(%s)", (process,))


# ---- The hint ----


def lock_hint(connection: Connection, schema: str) -> bool:
    """Mark this session as that of the active broker. Return False if another session is marked."""
    found = connection.execute("SELECT pg_try_advisory_lock(%s)", (_hint_key(schema),)).fetchone()
    return found is not None and bool(found[0])


def describe_active_broker(connection: Connection, schema: str) -> str:
    """Return name, address and start of the session of the active broker; "" if there is none."""
    found = _active_session(connection, schema)
    if found is None:
        return ""
    _, name, address, start = found
    return f"{name or 'an unknown session'}{f' at {address}' if address else ''}{f', since {start}' if start else ''}"


def end_active_session(connection: Connection, schema: str) -> None:
    """End the session that is marked as that of the active broker, if this role may end it."""
    found = _active_session(connection, schema)
    if found is not None:
        with suppress(psycopg.errors.InsufficientPrivilege):
            _terminate(connection, found[0])


def _active_session(connection: Connection, schema: str) -> tuple[int, str | None, str | None, str | None] | None:
    key = _hint_key(schema) % 2**64
    found = connection.execute(
        """
        SELECT pid, application_name, host(client_addr), to_char(backend_start, 'YYYY-MM-DD HH24:MI:SS TZ')
        FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND classid::bigint = %s AND objid::bigint = %s
            AND datname = current_database() AND pid <> pg_backend_pid()
        """,
        (key >> 32, key % 2**32),
    ).fetchone()
    return None if found is None else (found[0], found[1], found[2], found[3])


def _hint_key(schema: str) -> int:
    return int.from_bytes(blake2b(f"truenext log {schema}".encode(), digest_size=8).digest(), signed=True)
