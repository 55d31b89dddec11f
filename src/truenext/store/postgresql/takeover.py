"""Takeover of a log: the row with the next epoch, which fences the broker before.

The lock waits for appends that are in progress, and no further append can begin. So the takeover row comes behind all
rows of earlier epochs. A late append of an earlier broker finds its number in use, or the row before it with another
epoch.

The lock is no fence. It is a hint for a second broker which finds that another broker is active, and exits.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import LiteralString

import psycopg
from msgspec.structs import replace

from truenext.errors import ConfigurationError, StoreError, StoreForgottenError
from truenext.model.batch import Batch
from truenext.store.changes import RareChanges, Takeover, encode_batch
from truenext.store.checkpoint_format import LOG_FORMAT
from truenext.store.log import next_digest
from truenext.store.postgresql.connection import Connection, StandbyWaitError
from truenext.store.postgresql.kept import ORIGIN, write_fact
from truenext.store.postgresql.layout import statement
from truenext.store.postgresql.log_rows import OF_WRITERS, last_row, newer_format, relation_parameter
from truenext.store.postgresql.outcome import Row

logger = logging.getLogger(__name__)

NO_STANDBYS = (
    'durability = "replicated" needs a synchronous standby, but PostgreSQL names none (synchronous_standby_names): '
    'name one, or set durability = "local" (--durability local)'
)

NONCE_SIZE = 8

LOCK_TIMEOUT_S = 2
"""Time after which a session that keeps the takeover from its lock is ended."""

REPAIR_SILENCE_S = 60.0
"""Time that a takeover or a repair may take, because it may put back many rows. Its session is ended later."""


def check_fsync(connection: Connection) -> None:
    """Raises: ConfigurationError if the server may lose what it has confirmed; psycopg.Error"""
    row = connection.execute("SELECT current_setting('fsync')").fetchone()
    if row != ("on",):
        raise ConfigurationError(
            f"PostgreSQL at {connection.where} has fsync = off, and may lose what it has confirmed: set fsync = on"
        )


@contextmanager
def locked(connection: Connection, schema: str) -> Iterator[Row]:
    """Keep all brokers from appending, for the time of the context, which is one transaction. Yield the last row.

    Raises: StoreError if the log is empty, or was written in a newer format; psycopg.errors.LockNotAvailable if a
    session was in the way for LOCK_TIMEOUT_S, and is ended unless it takes over or repairs; StandbyWaitError if it
    waits for a synchronous standby; psycopg.Error
    """
    # Before the lock, because there may be many rows: under it only later rows are checked.
    checked = last_row(connection, schema)
    _check_formats(connection, schema, 0)
    try:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'")
            connection.execute(statement(schema, "LOCK TABLE ONLY {log} IN SHARE ROW EXCLUSIVE MODE"))
            # A statement that begins after the lock sees all rows of the transactions that had it.
            last = last_row(connection, schema)
            if last is None:
                raise empty_log_error(schema)
            _check_formats(connection, schema, last.number if checked is None else checked.number)
            yield last
    except psycopg.errors.LockNotAvailable:
        end_sessions_in_the_way(connection, schema)
        raise


def insert_takeover(
    connection: Connection, schema: str, last: Row, changes: RareChanges, member: str, *, epochs: int = 1
) -> tuple[Row, bool]:
    """Insert the takeover row behind `last`, under the lock. It has `changes`, and an epoch that is higher by `epochs`.

    Return the row, and whether PostgreSQL names synchronous standbys. Raises: psycopg.Error
    """
    system, timeline = connection.origin or (0, 0)
    epoch = last.epoch + epochs
    takeover = Takeover(epoch, member, system, timeline, secrets.token_bytes(NONCE_SIZE))
    payload = b"".join(encode_batch(Batch(0), replace(changes, takeover=takeover)))
    row = Row(last.number + 1, epoch, next_digest(last.digest, [payload]))
    names_standbys = connection.execute(
        statement(
            schema,
            "INSERT INTO {log} (number, part, epoch, format, digest, payload) VALUES (%s, 0, %s, %s, %s, %s) "
            "RETURNING current_setting('synchronous_standby_names') <> ''",
        ),
        (row.number, row.epoch, LOG_FORMAT, row.digest, payload),
    ).fetchone()
    if connection.origin is not None:
        write_fact(connection, schema, "origin", ORIGIN.pack(*connection.origin))
    return row, names_standbys is not None and bool(names_standbys[0])


def empty_log_error(schema: str) -> StoreForgottenError:
    return StoreForgottenError(f"the log in schema {schema!r} has no row: restore the database from a backup")


def _check_formats(connection: Connection, schema: str, after: int) -> None:
    """Check that this truenext can read all rows after row `after`. Raises: StoreError"""
    newer = newer_format(connection, schema, after, LOG_FORMAT)
    if newer is not None:
        raise format_error(schema, newer)


def format_error(schema: str, found: int) -> StoreError:
    return StoreError(
        f"the log in schema {schema!r} has rows of format {found}; this truenext reads format {LOG_FORMAT}: use "
        "the version that wrote them"
    )


def end_sessions_in_the_way(connection: Connection, schema: str) -> None:
    """End the sessions that have kept a takeover from its lock for LOCK_TIMEOUT_S, but those that take over or repair
    themselves only after REPAIR_SILENCE_S. End none if one of them waits for the synchronous standby: others wait for
    that one, and the takeover itself could not be confirmed.

    Raises: StandbyWaitError if a session waits for the synchronous standby; StoreError if this role may not end a
    session; psycopg.Error
    """
    blocking = connection.execute(
        statement(
            schema,
            f"""
            SELECT pid, coalesce(application_name, ''), coalesce(wait_event = 'SyncRep', false) FROM pg_locks
            LEFT JOIN pg_stat_activity AS session USING (pid)
            {OF_WRITERS} AND pid <> pg_backend_pid()
            GROUP BY pid, application_name, xact_start, wait_event
            HAVING coalesce(xact_start < clock_timestamp() - interval '1 second'
                * CASE WHEN bool_or(mode = 'ShareRowExclusiveLock') AND wait_event IS DISTINCT FROM 'SyncRep'
                    THEN %s ELSE %s END, true)
            """,
        ),
        (relation_parameter(schema), REPAIR_SILENCE_S, LOCK_TIMEOUT_S),
    ).fetchall()
    if any(waits for _, _, waits in blocking):
        raise StandbyWaitError(
            "a session that has written to the log waits for the synchronous standby: start the standby, or change "
            "synchronous_standby_names"
        )
    for process, name, _ in blocking:
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
    # With a time: otherwise the locks of the session would be there for a moment.
    connection.execute("SELECT pg_terminate_backend(%s, 1000)", (process,))


# ---- The hint ----

IS_MARKED: LiteralString = """
SELECT pid FROM pg_locks
WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND classid::bigint = %s AND objid::bigint = %s
    AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid <> pg_backend_pid()
"""
"""Statement that returns the process of the session that is marked as that of the active broker, unless it is the own
one. Its parameters are `hint_parameters`."""


def hint_parameters(schema: str) -> tuple[int, int]:
    key = _hint_key(schema) % 2**64
    return key >> 32, key % 2**32


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
    found = connection.execute(
        f"""
        SELECT pid, application_name, host(client_addr), to_char(backend_start, 'YYYY-MM-DD HH24:MI:SS TZ')
        FROM pg_stat_activity WHERE pid IN ({IS_MARKED})
        """,
        hint_parameters(schema),
    ).fetchone()
    return None if found is None else (found[0], found[1], found[2], found[3])


def _hint_key(schema: str) -> int:
    return int.from_bytes(blake2b(f"truenext log {schema}".encode(), digest_size=8).digest(), signed=True)
