"""How what programs have begun in transactions of their own gets numbers: many units become one, in one row.

So a number, a COMMIT of the broker and a row that goes are for a thousand of them. PostgreSQL does that by itself, in
one statement: what is to be sent comes back in one piece. To SQLite all is said in the same process, and what is simple
is quick.

Rows are named by where they are, which is quicker than their key: nobody else changes them now.

Source: docs/stages-outbox.md; decision 67
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from truenext.stage.core.numbers import CommitNumber
from truenext.stage.core.outbox_unit import COMBINED_PREFIX, PART_PREFIX, UNIT_PREFIX, combine_units
from truenext.stage.sql.syntax import SqlSyntax

MESSAGES_MAX = 10_000
"""Of one unit, unless it was written as one: a fifth of what the broker takes in one transaction."""
BYTES_MAX = 2 * 1024 * 1024
"""The same."""

IS_READABLE = {
    "postgresql": f"substr(unit, 1, 2) = '\\x{UNIT_PREFIX.hex()}'",
    "sqlite": f"substr(unit, 1, 2) = x'{UNIT_PREFIX.hex()}'",
}
"""This process can read it: what a newer one has written another way is left to those."""

_ROW = "id, service, producer, number, interactive, messages, written_ms, unit"

_COMBINE = f"""
    WITH first_rows AS (
        SELECT ctid AS place, id, written_ms, length(unit) AS size, messages FROM truenext_outbox
        WHERE producer IS NULL AND service = :service AND interactive = :interactive AND {IS_READABLE["postgresql"]}
        ORDER BY written_ms, id LIMIT :most FOR UPDATE SKIP LOCKED),
    counted AS (
        SELECT place, row_number() OVER in_order AS nth, sum(size) OVER in_order AS size,
            sum(messages) OVER in_order AS messages
        FROM first_rows WINDOW in_order AS (ORDER BY written_ms, id)),
    taken AS (
        DELETE FROM truenext_outbox WHERE ctid = ANY(ARRAY(
            SELECT place FROM counted WHERE nth = 1 OR (size <= {BYTES_MAX} AND messages <= {MESSAGES_MAX})))
        RETURNING id, written_ms, messages, unit)
    INSERT INTO truenext_outbox ({_ROW})
    SELECT CAST(:id AS uuid), :service, :producer, :number, :interactive, sum(messages), min(written_ms),
        '\\x{COMBINED_PREFIX.hex()}' || int4send(CAST(count(*) AS int)) || string_agg(
            '\\x{PART_PREFIX.hex()}' || int8send(written_ms) || unit, CAST('' AS bytea) ORDER BY written_ms, id)
    FROM taken HAVING count(*) > 0
    RETURNING written_ms, unit"""

_FIRST = f"""
    SELECT rowid, length(unit), messages FROM truenext_outbox
    WHERE producer IS NULL AND service = :service AND interactive = :interactive AND {IS_READABLE["sqlite"]}
    ORDER BY written_ms, rowid LIMIT :most"""
_THESE = "FROM truenext_outbox WHERE rowid IN (SELECT value FROM json_each(:places))"
_INSERT = f"""
    INSERT INTO truenext_outbox ({_ROW})
    VALUES (:id, :service, :producer, :number, :interactive, :messages, :written_ms, :unit)"""


async def combine_rows(
    syntax: SqlSyntax,
    connection: AsyncConnection,
    service: str,
    number: CommitNumber,
    id: str,
    rows_max: int,
    *,
    is_interactive: bool,
) -> tuple[int, bytes] | None:
    """Of what has no number `rows_max` rows that were written first become one unit, with this number and id: when its
    first part was written, and its bytes. None if there is nothing."""
    names: dict[str, Any] = {
        "service": service,
        "interactive": is_interactive,
        "producer": number.producer.name,
        "number": number.number,
        "id": id,
        "most": rows_max,
    }
    if syntax.is_sqlite:
        return await _combine_in_steps(syntax, connection, names)
    combined = (await syntax.execute(connection, _COMBINE, names)).first()
    if combined is None:
        return None
    written_ms, unit = tuple(combined)
    return written_ms, unit


async def _combine_in_steps(
    syntax: SqlSyntax, connection: AsyncConnection, names: dict[str, Any]
) -> tuple[int, bytes] | None:
    rowids: list[int] = []
    size = messages = 0
    for rowid, length, count in map(tuple, (await syntax.execute(connection, _FIRST, names)).all()):
        if rowids and (size + length > BYTES_MAX or messages + count > MESSAGES_MAX):
            break
        rowids.append(rowid)
        size += length
        messages += count
    if not rowids:
        return None
    these = {"places": json.dumps(rowids)}
    rows = await syntax.execute(connection, f"SELECT written_ms, rowid, unit {_THESE}", these)
    written = [(written_ms, unit) for written_ms, _, unit in sorted(map(tuple, rows.all()))]
    await syntax.execute(connection, f"DELETE {_THESE}", these)
    first_ms, unit = written[0][0], combine_units(written)
    await syntax.execute(connection, _INSERT, names | {"messages": messages, "written_ms": first_ms, "unit": unit})
    return first_ms, unit
