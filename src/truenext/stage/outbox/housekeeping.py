"""How rows go that are not needed any more: those of what was sent, and those that were kept for long enough."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from truenext.stage.sql.errors import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from truenext.stage.sql.outbox_table import Outbox


# Work in the background, one step after the other, that ends between two of them: what is said to a database is not to
# be interrupted, for its connection would keep its locks for a while.

_logger = logging.getLogger("truenext.stage")

RETRY_S = 5.0
"""After what nobody has foreseen."""
STOP_TIMEOUT_S = 5.0
"""For the step that is under way when the service stops."""


class PeriodicTask:
    def __init__(self, name: str, step: Callable[[], Awaitable[float]]) -> None:
        """`step` does what there is to do, and says after how many seconds to do it again."""
        self._name = name
        self._step = step
        self._woken = asyncio.Event()
        self._idle = asyncio.Event()
        """A step has ended, and nothing has come meanwhile."""
        self.is_stopping = False
        """No step begins any more; one that is long may look."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    def wake(self) -> None:
        """There is something to do now."""
        self._woken.set()
        self._idle.clear()

    async def _run(self) -> None:
        while not self.is_stopping:
            self._woken.clear()
            self._idle.clear()
            try:
                wait_s = await self._step()
            except Exception:
                # Whatever it is, it is not to be the end of it.
                _logger.exception("work in the background has failed, and goes on", extra={"what": self._name})
                wait_s = RETRY_S
            if not self._woken.is_set():
                self._idle.set()
            try:
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def stop(self) -> None:
        """What it was woken for is done before, if that does not take long."""
        if self._task is None or self._task.done():
            return
        # Another thread may just have said so.
        await asyncio.sleep(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._idle.wait()
        self.is_stopping = True
        self.wake()
        _, late = await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
        if late:
            self._task.cancel()
            await asyncio.wait(late)


# ---- What was kept for long enough ----
#
# Rows of the inbox and the keys go after 7 days, and those of processes that are gone. In each process, behind the
# messages.

CHECK_INTERVAL_S = 60.0
"""Until it is looked again, when nothing is left to go."""
TIME_SHARE = 0.1
"""Of the time, at most: as much as comes must be able to go, and messages wait for neither."""


class OutboxCleaner:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._steps = PeriodicTask("truenext cleaning", self._step)

    def start(self) -> None:
        self._steps.start()

    def wake(self) -> None:
        """Look now."""
        self._steps.wake()

    async def _step(self) -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            is_more = await self._outbox.delete_expired()
        except DatabaseUnavailable as error:
            _logger.info("rows that were kept for long enough cannot go now", extra={"error": str(error)})
            return CHECK_INTERVAL_S
        return (loop.time() - started) * (1 / TIME_SHARE - 1) if is_more else CHECK_INTERVAL_S

    async def stop(self) -> None:
        await self._steps.stop()


# How the rows of what was sent go from the outbox, and how the inbox learns which acknowledgements are final: many at
# a time, behind the messages.
#
# What is not said before the process ends is harmless: the units are sent once more under their numbers, which does
# nothing, and the rows of the inbox are kept.

GATHER_S = 0.2
"""So long rows are gathered."""
ROWS_MAX = 1000
"""Of each kind at a time."""
PAUSE_S, PAUSE_MAX_S = 0.5, 30.0
PENDING_ROWS_MAX = 100_000
"""Rows of each kind that are remembered while the database is away; the rest is left to those who come later."""


class OutboxConfirmer:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._sent: list[str] = []
        self._acknowledged: list[str] = []
        self._retry_pause_s = PAUSE_S
        self._steps = PeriodicTask("truenext outbox", self._step)

    def start(self) -> None:
        self._steps.start()

    def add(self, id: str, *, was_sent: bool, is_acknowledged: bool) -> None:
        """`was_sent`: the unit with this id. `is_acknowledged`: the message with this id, for good."""
        if was_sent and len(self._sent) < PENDING_ROWS_MAX:
            self._sent.append(id)
        if is_acknowledged and len(self._acknowledged) < PENDING_ROWS_MAX:
            self._acknowledged.append(id)
        if len(self._sent) >= ROWS_MAX or len(self._acknowledged) >= ROWS_MAX:
            self._steps.wake()

    async def _step(self) -> float:
        try:
            await self._write()
        except DatabaseUnavailable as error:
            pause_s, self._retry_pause_s = self._retry_pause_s, min(2 * self._retry_pause_s, PAUSE_MAX_S)
            _logger.info("rows of the outbox cannot go now", extra={"error": str(error), "next_s": pause_s})
            return pause_s
        self._retry_pause_s = PAUSE_S
        # What has come meanwhile is gathered: each time is a transaction, for which SQLite has messages wait.
        return 0.0 if max(len(self._sent), len(self._acknowledged)) >= ROWS_MAX else GATHER_S

    async def _write(self) -> None:
        """Raises: DatabaseUnavailable"""
        sent, acknowledged = self._sent[:ROWS_MAX], self._acknowledged[:ROWS_MAX]
        if sent or acknowledged:
            await self._outbox.confirm_rows(sent, acknowledged)
            del self._sent[: len(sent)], self._acknowledged[: len(acknowledged)]

    async def stop(self) -> None:
        """What is left is said, if the database is there."""
        await self._steps.stop()
        with suppress(DatabaseUnavailable):
            while self._sent or self._acknowledged:
                await self._write()
