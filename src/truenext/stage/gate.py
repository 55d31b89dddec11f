"""The database of a service, and whether it is there: when it is not, stages rest, and go on once it is.

Nobody's message has failed because a database was away. What a stage holds goes back without an attempt, and the
database is looked for, with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from typing import TYPE_CHECKING

from truenext.stage.sql.errors import DatabaseErrorKind, DatabaseUnavailable, first_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from truenext.stage.sql.database import Database

_logger = logging.getLogger("truenext.stage")

PAUSE_S = 0.5
"""Until the first look; each pause is twice as long as the one before."""
PAUSE_MAX_S = 30.0
STABLE_S = 60.0
"""A database that goes away again sooner is looked for with the pauses of before: no look sees that a disk is full."""
ERROR_COUNTS_MAX = 1000
"""Messages of which it is remembered what trouble they had."""
UNCOUNTED_RETRIES = {DatabaseErrorKind.LOST: 1, DatabaseErrorKind.RETRYABLE: 5, DatabaseErrorKind.UNAVAILABLE: 5}
"""So often it is no attempt, while the database is there."""

_DESCRIPTIONS = {
    DatabaseErrorKind.UNAVAILABLE: "the database is away",
    DatabaseErrorKind.FULL: "the database has no room, or its disk fails",
    DatabaseErrorKind.TABLES: "the tables of exactly-once processing cannot be used",
}
_WAITING = {
    DatabaseErrorKind.UNAVAILABLE: "the database is away: its stages rest until it is back",
    DatabaseErrorKind.FULL: "the database has no room, or its disk fails: its stages rest, and try again",
    DatabaseErrorKind.TABLES: "the tables of exactly-once processing cannot be used: the stages rest, and try again",
}


class DatabaseGate:
    """Open while the database is there."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._opened = asyncio.Event()
        self._opened.set()
        self._closed = asyncio.Event()
        self._reopening: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._retry_pause_s = PAUSE_S
        self._opened_at = -STABLE_S
        self.closed_error_kind = DatabaseErrorKind.UNAVAILABLE
        """For which it was closed last."""
        self.closed_reason = ""
        """Why it is closed."""
        self._error_counts_by_message: OrderedDict[tuple[DatabaseErrorKind, str], int] = OrderedDict()
        """How often a message had trouble that may be its own."""

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def until_open(self) -> None:
        await self._opened.wait()

    async def until_closed(self) -> None:
        await self._closed.wait()

    @property
    def closed_description(self) -> str:
        """What is the matter when it is closed, for people."""
        return _DESCRIPTIONS.get(self.closed_error_kind, _DESCRIPTIONS[DatabaseErrorKind.UNAVAILABLE])

    def close_on_error(self, error: BaseException, kind: DatabaseErrorKind = DatabaseErrorKind.UNAVAILABLE) -> None:
        """The stages of the database rest."""
        if not self.is_open:
            return
        self.closed_error_kind, self.closed_reason = kind, first_line(error)
        self._opened.clear()
        self._closed.set()
        _logger.warning(
            _WAITING.get(kind, _WAITING[DatabaseErrorKind.UNAVAILABLE]),
            extra={"database": str(self.database), "reason": self.closed_reason},
        )
        loop = asyncio.get_running_loop()
        if loop.time() - self._opened_at > STABLE_S:
            self._retry_pause_s = PAUSE_S
        self._reopening = loop.create_task(self._reopen(), name="truenext database")

    async def open_database(self, *, waits: bool) -> None:
        """The service begins. `waits`: for a database that is not there yet, as long as it takes.

        Raises: DatabaseUnavailable
        """
        if waits:
            await self._retry_until_available(self.database.open, "the database is not there yet")
            self.closed_reason = ""
        else:
            await self.database.open()

    async def _reopen(self) -> None:
        await self._back_off()
        await self._retry_until_available(self.database.probe, "the database is away still")
        self.closed_reason = ""
        self._opened_at = asyncio.get_running_loop().time()
        self._closed.clear()
        self._opened.set()
        database = {"database": str(self.database)}
        if self.closed_error_kind in (DatabaseErrorKind.FULL, DatabaseErrorKind.TABLES):
            # The look has not seen whether that is over.
            _logger.warning("the stages that rested try again", extra=database)
        else:
            _logger.warning("the database is back: its stages go on", extra=database)

    async def _retry_until_available(self, probe: Callable[[], Awaitable[None]], warning: str) -> None:
        while True:
            try:
                await probe()
                return
            except DatabaseUnavailable as error:
                self.closed_reason = first_line(error)
                _logger.warning(warning, extra={"reason": self.closed_reason, "next_s": self._retry_pause_s})
            await self._back_off()

    async def _back_off(self) -> None:
        # Not all processes at once.
        await asyncio.sleep(self._retry_pause_s * random.uniform(0.75, 1.0))
        self._retry_pause_s = min(2 * self._retry_pause_s, PAUSE_MAX_S)

    async def is_uncounted_error(self, kind: DatabaseErrorKind, error: BaseException, message_id: str) -> bool:
        """The database is not there; or is full, or its tables of what happens once cannot be used, which no look sees:
        no message's failure. While it is there, what else it may be is none for the first times, for it may be the
        message that brings it about: a lost connection, another transaction in the way at the commit, a database of its
        own that is away."""
        if kind in (DatabaseErrorKind.FULL, DatabaseErrorKind.TABLES):
            self.close_on_error(error, kind)
            return True
        if kind in (DatabaseErrorKind.UNAVAILABLE, DatabaseErrorKind.LOST):
            try:
                await self._probe()
            except DatabaseUnavailable as why:
                self.close_on_error(why)
                return True
        return kind in UNCOUNTED_RETRIES and self._count_error(kind, message_id) <= UNCOUNTED_RETRIES[kind]

    async def _probe(self) -> None:
        """One look serves all who ask meanwhile. Raises: DatabaseUnavailable"""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.get_running_loop().create_task(self.database.probe(), name="truenext database")
        await asyncio.shield(self._probing)

    def _count_error(self, kind: DatabaseErrorKind, message_id: str) -> int:
        """How often it had this, this time included."""
        key = kind, message_id
        times = self._error_counts_by_message.pop(key, 0) + 1
        self._error_counts_by_message[key] = times
        if len(self._error_counts_by_message) > ERROR_COUNTS_MAX:
            self._error_counts_by_message.popitem(last=False)
        return times

    async def stop(self) -> None:
        tasks = {each for each in (self._reopening, self._probing) if each is not None}
        for each in tasks:
            each.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.database.close()
