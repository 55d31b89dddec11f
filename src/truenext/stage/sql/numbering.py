"""How what programs have begun in transactions of their own gets numbers: many units become one, in one row.

So a number, a COMMIT of the broker and a row that goes are for a thousand of them.

Source: docs/stages-outbox.md; decision 67
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from truenext.stage.core.unit import Finished, Unit, UnreadableUnit, decode_unit
from truenext.stage.sql.wording import Wording, plain_id

ROWS_MAX = 1000
"""That become one."""
MESSAGES_MAX = 10_000
"""Of them, unless it is a single row: a fifth of what the broker takes in one transaction."""
BYTES_MAX = 2 * 1024 * 1024
"""Of them, unless it is a single row."""


class Begun(NamedTuple):
    """What one transaction of a program's own has begun."""

    written_ms: int
    messages: list[Finished]


class Unreadable(Exception):
    """Some of it only a newer process can read."""

    def __init__(self, ids: Collection[str]) -> None:
        super().__init__("units that this process cannot read")
        self.ids = ids


async def take_out(
    wording: Wording, connection: AsyncConnection, service: str, *, is_interactive: bool, without: Collection[str]
) -> list[Begun]:
    """What was written first, in order; its rows are there no more. Raises: Unreadable"""
    found = await wording.say(
        connection,
        f"""WITH first_rows AS (
            SELECT id, written_ms, length(unit) AS size, messages FROM truenext_outbox
            WHERE producer IS NULL AND service = :service AND interactive = :interactive
            {"" if not without else f"AND NOT {wording.one_of_ids}"}
            ORDER BY written_ms, id LIMIT :rows{wording.skip_locked}),
        counted AS (
            SELECT id, row_number() OVER in_order AS place, sum(size) OVER in_order AS size,
                sum(messages) OVER in_order AS messages
            FROM first_rows WINDOW in_order AS (ORDER BY written_ms, id))
        DELETE FROM truenext_outbox
        WHERE id IN (SELECT id FROM counted WHERE place = 1 OR (size <= :bytes AND messages <= :messages))
        RETURNING written_ms, id, unit""",
        {
            "service": service,
            "interactive": is_interactive,
            "ids": wording.ids(without),
            "rows": ROWS_MAX,
            "bytes": BYTES_MAX,
            "messages": MESSAGES_MAX,
        },
    )
    begun: list[Begun] = []
    unreadable: list[str] = []
    for written_ms, id, unit in sorted(map(tuple, found.all())):
        try:
            begun.append(Begun(written_ms, decode_unit(unit)))
        except UnreadableUnit:
            unreadable.append(plain_id(id))
    if unreadable:
        raise Unreadable(unreadable)
    return begun


def together(begun: Collection[Begun], *, is_interactive: bool) -> tuple[int, Unit]:
    """All of it as one unit, and when the first of it was written."""
    first_ms = min(each.written_ms for each in begun)
    messages = [_since(first_ms, each, message) for each in begun for message in each.messages]
    return first_ms, Unit(messages, is_interactive)


def _since(first_ms: int, begun: Begun, message: Finished) -> Finished:
    """Its time to live counts from then on."""
    if message.ttl_s is None or begun.written_ms == first_ms:
        return message
    return msgspec.structs.replace(message, ttl_s=message.ttl_s + (begun.written_ms - first_ms) / 1000)
