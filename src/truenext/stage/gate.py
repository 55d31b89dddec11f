"""Gate of a service's database: while the database is unavailable, the gate is closed, and stages that use the database
wait.

Waiting stages release their messages, which counts no attempt. The gate probes the database with growing pauses, and
opens when a probe succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from typing import TYPE_CHECKING

from truenext.stage.sql.errors import DatabaseErrorKind, DatabaseUnavailable, first_line
from truenext.stage.user_code import cancel_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from truenext.stage.sql.database import Database

_logger = logging.getLogger("truenext.stage")

PAUSE_S = 0.5
"""Seconds until the first probe of an unavailable database. Each further pause is twice as long, up to PAUSE_MAX_S."""
PAUSE_MAX_S = 30.0
STABLE_S = 60.0
"""Seconds for which the gate must stay open before the pauses between probes start again at PAUSE_S. If the gate closes
earlier, the pauses continue to grow: a probe does not detect a full disk, so the gate may have opened too early."""
ERROR_COUNTS_MAX = 1000
"""Largest number of entries in the counts of errors by message. Older entries are dropped."""
UNCOUNTED_RETRIES = {DatabaseErrorKind.LOST: 1, DatabaseErrorKind.RETRYABLE: 5, DatabaseErrorKind.UNAVAILABLE: 5}
"""Number of errors of one kind, for one message, that count no attempt although the database is available."""

_DESCRIPTIONS = {
    DatabaseErrorKind.UNAVAILABLE: "the database is unavailable",
    DatabaseErrorKind.FULL: "the database has no free space, or its disk fails",
    DatabaseErrorKind.TABLES: "the tables of exactly-once processing cannot be used",
}
_WAITING = {
    DatabaseErrorKind.UNAVAILABLE: "the database is unavailable: its stages are suspended",
    DatabaseErrorKind.FULL: "the database has no free space, or its disk fails: its stages are suspended for a while",
    DatabaseErrorKind.TABLES: "the tables of exactly-once processing cannot be used: stages are suspended for a while",
}


class DatabaseGate:
    """Gate for stages that use the database. While the database is unavailable, the gate is closed: the stages wait,
    and the gate probes the database."""

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
        self.closed_reason = ""
        """Last error of the database; empty while the gate is open."""
        self._error_counts_by_message: OrderedDict[tuple[DatabaseErrorKind, str], int] = OrderedDict()
        """Number of errors that the message itself may have caused, by kind of error and message."""

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def until_open(self) -> None:
        await self._opened.wait()

    async def until_closed(self) -> None:
        await self._closed.wait()

    @property
    def closed_description(self) -> str:
        """Human-readable reason why the gate was last closed."""
        return _DESCRIPTIONS.get(self.closed_error_kind, _DESCRIPTIONS[DatabaseErrorKind.UNAVAILABLE])

    def close_on_error(self, error: BaseException, kind: DatabaseErrorKind = DatabaseErrorKind.UNAVAILABLE) -> None:
        """Close the gate, so that stages of the database wait. Then probe the database until it is available, and open
        the gate."""
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
        """Open the database when the service starts. If `waits`, retry until the database is available.

        Raises: DatabaseUnavailable if the database is not available and `waits` is False
        """
        if waits:
            await self._retry_until_available(self.database.open, "the database is not available yet")
            self.closed_reason = ""
        else:
            await self.database.open()

    async def _reopen(self) -> None:
        await self._back_off()
        await self._retry_until_available(self.database.probe, "the database is still unavailable")
        self.closed_reason = ""
        self._opened_at = asyncio.get_running_loop().time()
        self._closed.clear()
        self._opened.set()
        database = {"database": str(self.database)}
        if self.closed_error_kind in (DatabaseErrorKind.FULL, DatabaseErrorKind.TABLES):
            # The probe does not show whether the error is over.
            _logger.warning("the suspended stages try again", extra=database)
        else:
            _logger.warning("the database is available again: its stages continue", extra=database)

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
        # Random, so that processes do not probe at the same time.
        await asyncio.sleep(self._retry_pause_s * random.uniform(0.75, 1.0))
        self._retry_pause_s = min(2 * self._retry_pause_s, PAUSE_MAX_S)

    async def is_uncounted_error(self, kind: DatabaseErrorKind, error: BaseException, message_id: str) -> bool:
        """Return whether an error counts no attempt of its message. An error caused by the database closes the gate,
        and counts no attempt. A full disk and unusable tables are such errors. After a lost connection, or if the
        database seems unavailable, a probe decides: the database is the cause if the probe fails. If the probe
        succeeds, the message may have caused the error, or its stage may use another database. Then the first
        UNCOUNTED_RETRIES errors of each kind count no attempt. The same limit holds for conflicts with other
        transactions, without a probe.
        """
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
        """Probe the database. Concurrent callers share one probe. Raises: DatabaseUnavailable if the probe fails"""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.get_running_loop().create_task(self.database.probe(), name="truenext database")
        await asyncio.shield(self._probing)

    def _count_error(self, kind: DatabaseErrorKind, message_id: str) -> int:
        key = kind, message_id
        times = self._error_counts_by_message.pop(key, 0) + 1
        self._error_counts_by_message[key] = times
        if len(self._error_counts_by_message) > ERROR_COUNTS_MAX:
            self._error_counts_by_message.popitem(last=False)
        return times

    async def stop(self) -> None:
        await cancel_all((self._reopening, self._probing))
        await self.database.close()
