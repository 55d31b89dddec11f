"""How the rows of what was sent go from the outbox, and how the inbox learns which acknowledgements are final: many at
a time, behind the messages.

What is not said before the process ends is harmless: the units are sent once more under their numbers, which does
nothing, and the rows of the inbox are kept.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from truenext.stage.exactly_once.periodic_task import PeriodicTask
from truenext.stage.sql.errors import DatabaseUnavailable

if TYPE_CHECKING:
    from truenext.stage.sql.outbox import Outbox

_logger = logging.getLogger("truenext.stage")

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
        self._pause_s = PAUSE_S
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
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_MAX_S)
            _logger.info("rows of the outbox cannot go now", extra={"error": str(error), "next_s": pause_s})
            return pause_s
        self._pause_s = PAUSE_S
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
