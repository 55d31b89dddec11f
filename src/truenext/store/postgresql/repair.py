"""Repair: puts back rows that PostgreSQL has forgotten, from the frames of a folder (forgotten.py)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

from truenext.errors import StoreFencedError, StoreForgottenError
from truenext.store.checkpoint_format import LOG_FORMAT
from truenext.store.log import Frames, LogPosition, Member
from truenext.store.postgresql.connection import Connection
from truenext.store.postgresql.forgotten import End, Fault, chain, fault_of_folder
from truenext.store.postgresql.layout import PART_BYTES_MAX, PARTITION_ROWS, attach_partitions, statement
from truenext.store.postgresql.log_rows import last_row
from truenext.store.postgresql.member import read_members
from truenext.store.postgresql.outcome import NewRow, Row

logger = logging.getLogger(__name__)

_TYPES = ["int8", "int4", "int4", "int4", "bytea", "bytea"]


def attach_missing(connection: Connection, schema: str, position: LogPosition) -> None:
    """Attach the partitions of the rows up to `position` that the log lacks. Call it before the transaction of
    `put_back`. Raises: psycopg.Error"""
    last = last_row(connection, schema)
    if last is not None:
        for number in range(last.number + 1, position.number + PARTITION_ROWS, PARTITION_ROWS):
            attach_partitions(connection, schema, number)


def put_back(
    connection: Connection,
    schema: str,
    last: Row,
    position: LogPosition,
    frames: Frames,
    uncertain: Iterable[NewRow] = (),
) -> Row:
    """Put back the rows between `last`, the last row of the log, and `position`, the end of the folder that has
    `frames`, or of the rows `uncertain`, which follow these frames. Call it under the lock of a takeover. Return the
    last row then.

    Raises: StoreForgottenError if the folder no longer has the rows; StoreFencedError if another broker has gone on
    without them: `last` is not in the folder; psycopg.Error
    """
    if position.number <= last.number:
        return last
    fault = fault_of_folder(End(last, position, frames.oldest_frame))
    if fault is not None:
        raise forgotten_error(schema, fault, read_members(connection, schema))
    following = (row.payload for row in uncertain if row.number > last.number)
    # Once only: the checkpointer may free the oldest frames meanwhile. An error undoes the insertion.
    payloads = itertools.chain(frames.frames_after(last.number), following)
    rows_end = _insert(connection, schema, last, chain(last, payloads))
    if rows_end.digest != position.digest:
        raise overtaken_error(schema, last)
    logger.warning(
        "rows that the database had forgotten were put back",
        extra={"schema": schema, "first": last.number + 1, "last": rows_end.number},
    )
    return rows_end


def _insert(connection: Connection, schema: str, last: Row, rows: Iterable[NewRow]) -> Row:
    """Insert rows behind `last`, and return the last one then."""
    copy = statement(schema, "COPY {log} (number, part, epoch, format, digest, payload) FROM STDIN (FORMAT binary)")
    with connection.cursor() as cursor, cursor.copy(copy) as writer:
        writer.set_types(_TYPES)
        for row in rows:
            found_format = LOG_FORMAT if row.epoch != last.epoch else None
            for part, at in enumerate(range(0, len(row.payload), PART_BYTES_MAX)):
                piece = row.payload[at : at + PART_BYTES_MAX]
                writer.write_row((row.number, part, row.epoch, found_format, row.digest, piece))
            last = row.row
    return last


def overtaken_error(schema: str, last: Row) -> StoreFencedError:
    """Return the error for rows of a broker without which another one has gone on, after `last`."""
    return StoreFencedError(
        f"another broker has gone on with the log in schema {schema!r} from an older state of the database (row "
        f"{last.number}, epoch {last.epoch}), without the last rows of this one: messages are served by that broker; "
        "start this one again, so that it says which rows it alone has, and stands by"
    )


def forgotten_error(schema: str, fault: Fault, members: Sequence[Member]) -> StoreForgottenError:
    """Return the error for rows that are missing, or may be, and cannot be repaired."""
    lost = f"may have lost rows from {fault.first} on"
    if fault.last is not None:
        lost = f"has lost rows {fault.first} to {fault.last}"
    had = [f"; member {each.name!r} had rows up to {each.number}" for each in members if each.number >= fault.first]
    return StoreForgottenError(
        f"the database {lost} of the log in schema {schema!r}, which it had confirmed: {fault.reason}{''.join(had)}. "
        f"{fault.advice}. To go on without the missing rows: `truenext store accept-loss URL --schema {schema}`"
    )
