"""Housekeeping of the outbox: deletes rows of sent units, marks acknowledgements in the inbox, and deletes rows whose
retention has ended."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from truenext.stage.sql.errors import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from truenext.stage.sql.outbox_table import Outbox


# A periodic task runs step by step, and ends only between two steps: a call to a database must not be interrupted, as
# its connection would keep its locks for a while.

_logger = logging.getLogger("truenext.stage")

RETRY_S = 5.0
"""Seconds until the next step after an unexpected error."""
STOP_TIMEOUT_S = 5.0
"""Longest time in seconds that `stop` waits for pending work. Afterwards it waits as long again for the end of the
current step."""


class PeriodicTask:
    def __init__(self, name: str, step: Callable[[], Awaitable[float]]) -> None:
        """Create a task that calls `step` again and again. `step` does the pending work, and returns the seconds until
        its next call."""
        self._name = name
        self._step = step
        self._woken = asyncio.Event()
        self._idle = asyncio.Event()
        """Set when a step has ended, unless the task was woken during the step."""
        self.is_stopping = False
        """True when no further step begins. A long step may check this, and end early."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    def wake(self) -> None:
        """Run the next step now, or right after the current step."""
        self._woken.set()
        self._idle.clear()

    async def _run(self) -> None:
        while not self.is_stopping:
            self._woken.clear()
            self._idle.clear()
            try:
                wait_s = await self._step()
            except Exception:
                # No exception may end the task.
                _logger.exception("a background task has failed, and will run again", extra={"task": self._name})
                wait_s = RETRY_S
            if not self._woken.is_set():
                self._idle.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()

    async def stop(self) -> None:
        """Stop the task. If the task was woken, this waits up to STOP_TIMEOUT_S for the end of that work."""
        if self._task is None or self._task.done():
            return
        # Another thread may just have scheduled a call of `wake`.
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


# ---- Rows whose retention has ended ----
#
# Each process deletes rows of the inbox and of keys after 7 days, and those of dead processes after a day, in the
# background.

CHECK_INTERVAL_S = 60.0
"""Seconds until the next check after all expired rows were deleted."""
TIME_SHARE = 0.1
"""Largest share of time that is spent on deletions. This share suffices to delete as many rows as are added, and hardly
delays messages."""


class OutboxCleaner(PeriodicTask):
    def __init__(self, outbox: Outbox) -> None:
        super().__init__("truenext cleaning", self.delete_expired)
        self._outbox = outbox

    async def delete_expired(self) -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            is_more = await self._outbox.delete_expired()
        except DatabaseUnavailable as error:
            _logger.info("expired rows of inbox and keys cannot be deleted now", extra={"error": str(error)})
            return CHECK_INTERVAL_S
        return (loop.time() - started) * (1 / TIME_SHARE - 1) if is_more else CHECK_INTERVAL_S


# The confirmer deletes rows of sent units from the outbox, and marks acknowledgements as final in the inbox: many at a
# time, in the background.
#
# Rows that are not written before the process ends do no harm: the units are sent once more under their numbers, which
# has no effect, and the rows of the inbox are kept.

GATHER_S = 0.2
"""Seconds for which rows are gathered, before they are written together."""
ROWS_MAX = 1000
"""Largest number of sent units, and of acknowledged messages, in one write."""
PAUSE_S, PAUSE_MAX_S = 0.5, 30.0
PENDING_ROWS_MAX = 100_000
"""Largest number of sent units, and of acknowledged messages, whose rows wait in memory while the database is
unavailable. Further rows are dropped; the relay of a later process finds their units."""


class OutboxConfirmer(PeriodicTask):
    def __init__(self, outbox: Outbox) -> None:
        super().__init__("truenext outbox", self._write_or_back_off)
        self._outbox = outbox
        self._sent: list[str] = []
        self._acknowledged: list[str] = []
        self._retry_pause_s = PAUSE_S

    def add(self, id: str, *, was_sent: bool, is_acknowledged: bool) -> None:
        """Record that the unit with this id was sent, or that the acknowledgement of its message is final. The
        database is changed later."""
        if was_sent and len(self._sent) < PENDING_ROWS_MAX:
            self._sent.append(id)
        if is_acknowledged and len(self._acknowledged) < PENDING_ROWS_MAX:
            self._acknowledged.append(id)
        if len(self._sent) >= ROWS_MAX or len(self._acknowledged) >= ROWS_MAX:
            self.wake()

    async def _write_or_back_off(self) -> float:
        try:
            await self._write()
        except DatabaseUnavailable as error:
            pause_s, self._retry_pause_s = self._retry_pause_s, min(2 * self._retry_pause_s, PAUSE_MAX_S)
            _logger.info(
                "sent rows of the outbox cannot be deleted now", extra={"error": str(error), "next_s": pause_s}
            )
            return pause_s
        self._retry_pause_s = PAUSE_S
        # Rows are gathered meanwhile: each write is a transaction, for which messages wait on SQLite.
        return 0.0 if max(len(self._sent), len(self._acknowledged)) >= ROWS_MAX else GATHER_S

    async def _write(self) -> None:
        """Write at most ROWS_MAX rows of each kind, the oldest first. Raises: DatabaseUnavailable"""
        sent, acknowledged = self._sent[:ROWS_MAX], self._acknowledged[:ROWS_MAX]
        if sent or acknowledged:
            await self._outbox.confirm_rows(sent, acknowledged)
            del self._sent[: len(sent)], self._acknowledged[: len(acknowledged)]

    async def stop(self) -> None:
        """Stop the task, and write the remaining rows if the database is available."""
        await super().stop()
        with suppress(DatabaseUnavailable):
            while self._sent or self._acknowledged:
                await self._write()
