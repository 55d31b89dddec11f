"""Sessions for what is begun outside of stages: as many as are needed at once, used again and again."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from truenext.client.tasks.connection import Connection, Session


class BrokerSessionPool:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[Session] = []

    @asynccontextmanager
    async def acquired(self) -> AsyncIterator[Session]:
        """A transacted session that nobody else uses meanwhile. One whose block has raised is not used again."""
        session = self._idle.pop() if self._idle else await self._connection.session(transacted=True)
        try:
            yield session
        except BaseException:
            await session.close()
            raise
        self._idle.append(session)
