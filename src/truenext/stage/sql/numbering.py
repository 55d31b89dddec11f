"""How what programs have begun in transactions of their own gets numbers: many units become one, in one row.

So a number, a COMMIT of the broker and a row that goes are for a thousand of them. PostgreSQL does that by itself, in
one statement: what is to be sent comes back in one piece.

Source: docs/stages-outbox.md; decision 67
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from truenext.stage.core.numbers import Number
from truenext.stage.core.unit import HEAD, HEAD_OF_TOGETHER, HEAD_OF_WRITTEN, together
from truenext.stage.sql.wording import Wording

MESSAGES_MAX = 10_000
"""Of them, unless it is a single row: a fifth of what the broker takes in one transaction."""
BYTES_MAX = 2 * 1024 * 1024
"""Of them, unless it is a single row."""

IS_READABLE = {
    "postgresql": f"substr(unit, 1, 2) = '\\x{HEAD.hex()}'",
    "sqlite": f"substr(unit, 1, 2) = x'{HEAD.hex()}'",
}
"""This process can read it: what a newer one has written another way is left to those."""


def _taken(kind: str, skip_locked: str) -> str:
    """Those that were written first, whose rows go."""
    return f"""
        WITH first_rows AS (
            SELECT id, written_ms, length(unit) AS size, messages FROM truenext_outbox
            WHERE producer IS NULL AND service = :service AND interactive = :interactive AND {IS_READABLE[kind]}
            ORDER BY written_ms, id LIMIT :most{skip_locked}),
        counted AS (
            SELECT id, row_number() OVER in_order AS place, sum(size) OVER in_order AS size,
                sum(messages) OVER in_order AS messages
            FROM first_rows WINDOW in_order AS (ORDER BY written_ms, id)),
        fitting AS (
            SELECT id FROM counted WHERE place = 1 OR (size <= {BYTES_MAX} AND messages <= {MESSAGES_MAX}))"""


_ROW = "id, service, producer, number, interactive, messages, written_ms, unit"
_IN_ONE = f"""{_taken("postgresql", " FOR UPDATE SKIP LOCKED")},
    taken AS (
        DELETE FROM truenext_outbox WHERE id IN (SELECT id FROM fitting) RETURNING id, written_ms, messages, unit)
    INSERT INTO truenext_outbox ({_ROW})
    SELECT CAST(:id AS uuid), :service, :producer, :number, :interactive, sum(messages), min(written_ms),
        '\\x{HEAD_OF_TOGETHER.hex()}' || int4send(CAST(count(*) AS int)) || string_agg(
            '\\x{HEAD_OF_WRITTEN.hex()}' || int8send(written_ms) || unit, CAST('' AS bytea) ORDER BY written_ms, id)
    FROM taken HAVING count(*) > 0
    RETURNING written_ms, unit"""

_TAKE_OUT = f"""{_taken("sqlite", "")}
    DELETE FROM truenext_outbox WHERE id IN (SELECT id FROM fitting) RETURNING written_ms, messages, unit"""
_PUT_BACK = f"""
    INSERT INTO truenext_outbox ({_ROW})
    VALUES (:id, :service, :producer, :number, :interactive, :messages, :written_ms, :unit)"""


async def make_one(
    wording: Wording,
    connection: AsyncConnection,
    service: str,
    number: Number,
    id: str,
    most: int,
    *,
    is_interactive: bool,
) -> tuple[int, bytes] | None:
    """Of what has no number `most` rows that were written first become one unit, with this number and id: when its
    first part was written, and its bytes. None if there is nothing."""
    names: dict[str, Any] = {
        "service": service,
        "interactive": is_interactive,
        "producer": number.producer.name,
        "number": number.number,
        "id": id,
        "most": most,
    }
    if not wording.is_sqlite:
        made = (await wording.say(connection, _IN_ONE, names)).first()
        if made is None:
            return None
        written_ms, unit = tuple(made)
        return written_ms, unit
    rows = [tuple(row) for row in (await wording.say(connection, _TAKE_OUT, names)).all()]
    if not rows:
        return None
    first_ms, unit = min(rows)[0], together(sorted((written_ms, unit) for written_ms, _, unit in rows))
    messages = sum(count for _, count, _ in rows)
    await wording.say(connection, _PUT_BACK, names | {"messages": messages, "written_ms": first_ms, "unit": unit})
    return first_ms, unit
