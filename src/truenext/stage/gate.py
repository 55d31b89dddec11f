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

from truenext.stage.sql.errors import DatabaseAway, Trouble, first_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from truenext.stage.sql.database import Database

_logger = logging.getLogger("truenext.stage")

PAUSE_S = 0.5
"""Until the first look; each pause is twice as long as the one before."""
PAUSE_MAX_S = 30.0
STEADY_S = 60.0
"""A database that goes away again sooner is looked for with the pauses of before: no look sees that a disk is full."""
REMEMBERED_MAX = 1000
"""Messages of which it is remembered what trouble they had."""
FREE = {Trouble.LOST: 1, Trouble.AGAIN: 5, Trouble.AWAY: 5}
"""So often it is no attempt, while the database is there."""

_WHAT = {
    Trouble.AWAY: "the database is away",
    Trouble.FULL: "the database has no room, or its disk fails",
    Trouble.TABLES: "the tables of exactly-once processing cannot be used",
}
_WAITING = {
    Trouble.AWAY: "the database is away: its stages rest until it is back",
    Trouble.FULL: "the database has no room, or its disk fails: its stages rest, and try again",
    Trouble.TABLES: "the tables of exactly-once processing cannot be used: the stages rest, and try again",
}


class Gate:
    """Open while the database is there."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._opened = asyncio.Event()
        self._opened.set()
        self._closed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._pause_s = PAUSE_S
        self._opened_at = -STEADY_S
        self.trouble = Trouble.AWAY
        """For which it was closed last."""
        self.reason = ""
        """Why it is closed."""
        self._remembered: OrderedDict[tuple[Trouble, str], int] = OrderedDict()
        """How often a message had trouble that may be its own."""

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def until_open(self) -> None:
        await self._opened.wait()

    async def until_closed(self) -> None:
        await self._closed.wait()

    @property
    def what(self) -> str:
        """What is the matter when it is closed, for people."""
        return _WHAT.get(self.trouble, _WHAT[Trouble.AWAY])

    def close(self, error: BaseException, trouble: Trouble = Trouble.AWAY) -> None:
        """The stages of the database rest."""
        if not self.is_open:
            return
        self.trouble, self.reason = trouble, first_line(error)
        self._opened.clear()
        self._closed.set()
        _logger.warning(
            _WAITING.get(trouble, _WAITING[Trouble.AWAY]),
            extra={"database": str(self.database), "reason": self.reason},
        )
        loop = asyncio.get_running_loop()
        if loop.time() - self._opened_at > STEADY_S:
            self._pause_s = PAUSE_S
        self._looking = loop.create_task(self._look(), name="truenext database")

    async def open(self, *, waits: bool) -> None:
        """The service begins. `waits`: for a database that is not there yet, as long as it takes.

        Raises: DatabaseAway
        """
        if waits:
            await self._until_there(self.database.open, "the database is not there yet")
            self.reason = ""
        else:
            await self.database.open()

    async def _look(self) -> None:
        await self._back_off()
        await self._until_there(self.database.probe, "the database is away still")
        self.reason = ""
        self._opened_at = asyncio.get_running_loop().time()
        self._closed.clear()
        self._opened.set()
        database = {"database": str(self.database)}
        if self.trouble in (Trouble.FULL, Trouble.TABLES):
            # The look has not seen whether that is over.
            _logger.warning("the stages that rested try again", extra=database)
        else:
            _logger.warning("the database is back: its stages go on", extra=database)

    async def _until_there(self, look: Callable[[], Awaitable[None]], said: str) -> None:
        while True:
            try:
                await look()
                return
            except DatabaseAway as error:
                self.reason = first_line(error)
                _logger.warning(said, extra={"reason": self.reason, "next_s": self._pause_s})
            await self._back_off()

    async def _back_off(self) -> None:
        # Not all processes at once.
        await asyncio.sleep(self._pause_s * random.uniform(0.75, 1.0))
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    async def is_no_failure(self, trouble: Trouble, error: BaseException, message_key: str) -> bool:
        """The database is not there; or is full, or its tables of what happens once cannot be used, which no look sees:
        no message's failure. While it is there, what else it may be is none for the first times, for it may be the
        message that brings it about: a lost connection, another transaction in the way at the commit, a database of its
        own that is away."""
        if trouble in (Trouble.FULL, Trouble.TABLES):
            self.close(error, trouble)
            return True
        if trouble in (Trouble.AWAY, Trouble.LOST):
            try:
                await self._probe()
            except DatabaseAway as why:
                self.close(why)
                return True
        return trouble in FREE and self._times(trouble, message_key) <= FREE[trouble]

    async def _probe(self) -> None:
        """One look serves all who ask meanwhile. Raises: DatabaseAway"""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.get_running_loop().create_task(self.database.probe(), name="truenext database")
        await asyncio.shield(self._probing)

    def _times(self, trouble: Trouble, message_key: str) -> int:
        """How often it had this, this time included."""
        key = trouble, message_key
        times = self._remembered.pop(key, 0) + 1
        self._remembered[key] = times
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)
        return times

    async def stop(self) -> None:
        looking = {each for each in (self._looking, self._probing) if each is not None}
        for each in looking:
            each.cancel()
        if looking:
            await asyncio.wait(looking)
        await self.database.close()
