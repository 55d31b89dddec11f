"""How rows go that were kept for long enough: those of the inbox and the keys after 7 days, those of processes that are
gone. In each process, behind the messages."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from truenext.stage.exactly_once.periodic_task import PeriodicTask
from truenext.stage.sql.errors import DatabaseUnavailable

if TYPE_CHECKING:
    from truenext.stage.sql.outbox import Outbox

_logger = logging.getLogger("truenext.stage")

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
