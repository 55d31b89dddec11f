"""Kept replies: the table `truenext_replies`, with a row for each flow that was started with `keep_reply`. Source:
docs/stages-database.md, "Kept replies"
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from sqlalchemy import ColumnElement, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from truenext.stage.sql.exactly_once_writer import CLOCK
from truenext.stage.sql.outbox_table import mapped_errors
from truenext.stage.sql.sqlite import READ_ONLY
from truenext.stage.sql.syntax import plain_id
from truenext.stage.sql.tables import replies


class KeptReply(NamedTuple):
    endpoint: str
    """Name of the endpoint to which the request of the flow was sent."""
    reply: bytes | None
    """Reply as JSON; None without one."""
    failure: bytes | None
    """Last failure, as JSON of a `Failure`; None without one."""


async def keep_reply(session: AsyncSession, flow: str, message: bytes, *, is_failure: bool) -> str | None:
    """Write the reply or failure of a flow. The first reply stays, and replaces failures. Return the id of the row;
    None if the flow has a reply already, or no row."""
    kept_ms: ColumnElement[int] = literal_column(CLOCK[(await session.connection()).dialect.name])
    row = update(replies).where(replies.c.flow == flow, replies.c.reply.is_(None)).returning(replies.c.id)
    written = await session.execute(
        row.values(failure=message, kept_ms=kept_ms) if is_failure else row.values(reply=message, kept_ms=kept_ms)
    )
    id = written.scalar_one_or_none()
    return None if id is None else plain_id(id)


class ReplyStore:
    """Reader of kept replies, and transactions that start their flows. Each call has a connection of its own."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._read_only_engine = engine.execution_options(**READ_ONLY)

    async def find(self, id: str) -> KeptReply | None:
        """Return the row with this id; None if there is none. Raises: OutboxUnusable if the table is missing;
        DatabaseUnavailable"""
        query = select(replies.c.endpoint, replies.c.reply, replies.c.failure).where(replies.c.id == id)
        with mapped_errors("the kept replies"):
            async with self._read_only_engine.begin() as connection:
                row = (await connection.execute(query)).first()
        return None if row is None else KeptReply(*row)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """Open a session, and commit it at the end of the block.

        Raises: OutboxBusy after a conflict with another transaction; OutboxUnusable if the table is missing;
        DatabaseUnavailable, and then the transaction may have been committed
        """
        with mapped_errors("the kept replies"):
            async with AsyncSession(self._engine) as session, session.begin():
                yield session
