"""Statements on the rows of a log."""

from __future__ import annotations

import struct
from typing import LiteralString

from psycopg import pq

from truenext.store.log import LogPosition
from truenext.store.postgresql.connection import Connection
from truenext.store.postgresql.layout import PART_BYTES_MAX, statement
from truenext.store.postgresql.outcome import NewRow, Row

PIECE_BYTES = 4 * 1024 * 1024
"""Number of payload bytes that are read at once; one more row may exceed it."""
PIECE_ROWS = 1024

_APPEND = b"append"
_APPEND_PART = b"append part"
_INT8, _INT4, _BYTEA = 20, 23, 17
_BIGINT = struct.Struct(">q")
_INT = struct.Struct(">i")

_APPEND_STATEMENT = """
INSERT INTO {log} (number, part, epoch, digest, payload) SELECT $1, 0, $2, $3, $4
WHERE EXISTS (SELECT FROM {log} WHERE number = $1 - 1 AND part = 0 AND epoch = $2 AND digest = $5)
RETURNING current_setting('synchronous_standby_names') <> ''
"""
_APPEND_PART_STATEMENT = "INSERT INTO {log} (number, part, epoch, digest, payload) VALUES ($1, $2, $3, $4, $5)"


def has_one_part(new: NewRow) -> bool:
    return len(new.payload) <= PART_BYTES_MAX


def prepare_append(connection: Connection, schema: str) -> None:
    """Prepare the statements of `append_row` for the time of the session."""
    _prepare(connection, schema, _APPEND, _APPEND_STATEMENT, [_INT8, _INT4, _BYTEA, _BYTEA, _BYTEA])
    _prepare(connection, schema, _APPEND_PART, _APPEND_PART_STATEMENT, [_INT8, _INT4, _INT4, _BYTEA, _BYTEA])
    connection.has_prepared_append = True


def _prepare(connection: Connection, schema: str, name: bytes, text: LiteralString, types: list[int]) -> None:
    connection.prepare(name, statement(schema, text).as_string(connection), types)


_FIVE_BINARY = [pq.Format.BINARY] * 5


def append_row(connection: Connection, new: NewRow) -> bool | None:
    """Append a row if the row before it has the digest `new.before` and the epoch. The row is durable on return.

    Return whether PostgreSQL names synchronous standbys; None if no row was appended. Raises: psycopg.Error
    """
    return _append_first(connection, new, new.payload) if has_one_part(new) else _append_parts(connection, new)


def begin_append(connection: Connection, new: NewRow) -> None:
    """Begin to append a row of one part, without waiting. Raises: psycopg.Error"""
    _begin_first(connection, new, new.payload)


def finish_append(connection: Connection) -> bool | None:
    """Return what `append_row` does, for the row that was begun. Raises: psycopg.Error"""
    found = connection.finish_prepared()
    return found[0] == b"\1" if found else None


def _append_first(connection: Connection, new: NewRow, payload: bytes) -> bool | None:
    _begin_first(connection, new, payload)
    return finish_append(connection)


def _begin_first(connection: Connection, new: NewRow, payload: bytes) -> None:
    values = [_BIGINT.pack(new.number), _INT.pack(new.epoch), new.digest, payload, new.before]
    connection.begin_prepared(_APPEND, values, _FIVE_BINARY)


def _append_parts(connection: Connection, new: NewRow) -> bool | None:
    with connection.transaction():
        is_replicated = _append_first(connection, new, new.payload[:PART_BYTES_MAX])
        if is_replicated is None:
            return None
        for part, at in enumerate(range(PART_BYTES_MAX, len(new.payload), PART_BYTES_MAX), 1):
            piece = new.payload[at : at + PART_BYTES_MAX]
            values = [_BIGINT.pack(new.number), _INT.pack(part), _INT.pack(new.epoch), new.digest, piece]
            connection.execute_prepared(_APPEND_PART, values, _FIVE_BINARY)
    return is_replicated


_LAST_ROW = "SELECT number, epoch, digest FROM {log} ORDER BY number DESC, part DESC LIMIT 1"


def last_row(connection: Connection, schema: str) -> Row | None:
    found = connection.execute(statement(schema, _LAST_ROW), binary=True).fetchone()
    return None if found is None else Row(*found)


def rows_near(connection: Connection, schema: str, number: int) -> tuple[list[Row], bool]:
    """Return the row with this number, the row before it, and the last row of the log, as of one moment; and whether
    PostgreSQL names synchronous standbys."""
    found = connection.execute(
        statement(
            schema,
            "SELECT rows.*, current_setting('synchronous_standby_names') <> '' FROM ("
            "SELECT number, epoch, digest FROM {log} WHERE number IN (%s::bigint, %s::bigint) AND part = 0 "
            f"UNION ALL ({_LAST_ROW})) AS rows",
        ),
        (number - 1, number),
        binary=True,
    ).fetchall()
    return [Row(*each[:3]) for each in found], any(each[3] for each in found)


def read_piece(
    connection: Connection, schema: str, first: tuple[int, int], last: int
) -> list[tuple[int, int, int | None, bytes, bytes]]:
    """Return number, part, format, digest and payload of the next rows: from the part `first` up to row `last`. They
    have about PIECE_BYTES at most; the piece is empty if there are none."""
    number, part = first
    return connection.execute(
        statement(
            schema,
            """
            SELECT number, part, format, digest, payload FROM (
                SELECT *, sum(octet_length(payload)) OVER (ORDER BY number, part) AS size FROM {log}
                WHERE number BETWEEN %s::bigint AND %s::bigint AND (number, part) >= (%s::bigint, %s::int)
            ) AS rows WHERE size - octet_length(payload) < %s::bigint ORDER BY number, part
            """,
        ),
        (number, min(last, number + PIECE_ROWS - 1), number, part, PIECE_BYTES),
        binary=True,
    ).fetchall()


def read_relation(connection: Connection, schema: str, number: int) -> tuple[bytes | None, LogPosition, int] | None:
    """Return the digest of the row with this number, the position, and the number of the last row, as of one moment;
    None if the log has no row at all."""
    found = connection.execute(
        statement(
            schema,
            """
            SELECT (SELECT digest FROM {log} WHERE number = %s::bigint AND part = 0), number, digest,
                (SELECT max(number) FROM {log}) FROM {position}
            """,
        ),
        (number,),
        binary=True,
    ).fetchone()
    if found is None or found[3] is None:
        return None
    digest, position, position_digest, last = found
    return digest, LogPosition(position, position_digest), last


def newer_format(connection: Connection, schema: str, after: int, known: int) -> int | None:
    """Return the highest format of the rows after row `after` if it is higher than `known`; else None."""
    found = connection.execute(
        statement(schema, "SELECT max(format) FROM {log} WHERE number > %s::bigint AND format > %s"), (after, known)
    ).fetchone()
    return None if found is None else found[0]


OF_WRITERS: LiteralString = """
WHERE locktype = 'relation' AND relation = %s::regclass AND granted
    AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND mode NOT IN ('AccessShareLock', 'RowShareLock')
"""
"""Condition on `pg_locks`: the session has written to the log, or locks the log for writers. Its parameter is
`relation_parameter`."""

WAITS_FOR_STANDBY: LiteralString = f"""
SELECT state_change FROM pg_locks JOIN pg_stat_activity AS session USING (pid)
{OF_WRITERS} AND wait_event = 'SyncRep'
"""
"""Statement that returns the begin of each wait for a synchronous standby, of a session that has written to the log.

Its parameter is `relation_parameter`. PostgreSQL shows waits of other roles only to a role that may read all
statistics."""


def relation_parameter(schema: str) -> str:
    return f'"{schema}"."log"'


def waiting_since_ms(connection: Connection, schema: str) -> int | None:
    """Return since when rows wait for a synchronous standby, in milliseconds since 1970; None if none has waited for
    more than a second, as far as this role may see it. Raises: psycopg.Error"""
    found = connection.execute(
        f"""
        SELECT (extract(epoch FROM min(state_change)) * 1000)::bigint FROM ({WAITS_FOR_STANDBY}) AS waits
        WHERE state_change < clock_timestamp() - interval '1 second'
        """,
        (relation_parameter(schema),),
    ).fetchone()
    return None if found is None else found[0]


def waits_for_standby(connection: Connection) -> bool:
    """Return whether a session of this role has waited for more than a second for a synchronous standby."""
    found = connection.execute(
        """
        SELECT EXISTS (SELECT FROM pg_stat_activity
            WHERE datname = current_database() AND usename = current_user AND wait_event = 'SyncRep'
                AND state_change < clock_timestamp() - interval '1 second')
        """
    ).fetchone()
    return found is not None and bool(found[0])
