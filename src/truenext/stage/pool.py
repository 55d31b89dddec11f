"""What interactive messages have of their own, and the others: a connection to the broker, threads, connections to the
database. So none of them waits for what the others do."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from truenext.model.limits import TRANSACTION_BYTES_MAX, TRANSACTIONS_MAX
from truenext.stage.core.health import PoolStatus
from truenext.stage.core.output import PRIORITY_INTERACTIVE
from truenext.stage.fair_semaphore import FairSemaphore

if TYPE_CHECKING:
    from truenext.client.tasks.connection import Connection

_logger = logging.getLogger("truenext.stage")

INTERACTIVE_SELECTOR: Final = f"JMSPriority = {PRIORITY_INTERACTIVE}"
OTHERS_SELECTOR: Final = f"JMSPriority < {PRIORITY_INTERACTIVE}"

PAUSE_S, PAUSE_MAX_S = 0.5, 30.0
THREAD_NAME_PREFIX: Final = "truenext stage"
"""What the names of their threads begin with."""


class PriorityPool:
    def __init__(self, connection: Connection, *, is_interactive: bool, threads: int) -> None:
        """`threads` is the most that plain functions may need at once."""
        self.connection = connection
        self.is_interactive = is_interactive
        self.selector = INTERACTIVE_SELECTOR if is_interactive else OTHERS_SELECTOR
        self.name = "interactive" if is_interactive else "other"
        self.executor = ThreadPoolExecutor(max(threads, 1), thread_name_prefix=f"{THREAD_NAME_PREFIX} {self.name}")
        self.disk_full_pause_s = 0.0
        """The last one since the broker has no room; 0 while it has."""
        self._disk_full_until = 0.0
        self.transaction_permits = FairSemaphore(TRANSACTIONS_MAX)
        """Who would be refused for what is open on the connection waits instead. Source: docs/limits.md"""
        self.transaction_byte_permits = FairSemaphore(TRANSACTION_BYTES_MAX)

    def back_off_disk_full_s(self, now: float) -> float:
        """For how many seconds a worker for whose messages the broker has no room rests; all of them together, and each
        time twice as long, until something was committed."""
        if now >= self._disk_full_until:
            self.disk_full_pause_s = min(max(2 * self.disk_full_pause_s, PAUSE_S), PAUSE_MAX_S)
            self._disk_full_until = now + self.disk_full_pause_s
            _logger.warning(
                "the broker has no room on its disk: stages that send rest",
                extra={"pool": self.name, "next_s": self.disk_full_pause_s},
            )
        return self._disk_full_until - now

    def status(self) -> PoolStatus:
        health = self.connection.health()
        return PoolStatus(
            pool=self.name,
            state=health.state,
            since_s=health.since_s,
            reconnects=health.reconnects,
            has_disk_space=asyncio.get_running_loop().time() >= self._disk_full_until,
        )

    def subscriptions(self) -> Counter[str]:
        """Of which destinations it gets messages, and over how many subscriptions."""
        consumers = self.connection.health().consumers
        return Counter(each.destination for each in consumers if each.state not in ("opening", "ended"))

    async def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        await self.connection.close()
