"""What interactive messages have of their own, and the others: a connection to the broker, threads, connections to the
database. So none of them waits for what the others do."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final

from truenext.client.tasks.connection import Connection
from truenext.model.limits import TRANSACTION_BYTES_MAX, TRANSACTIONS_MAX
from truenext.stage.core.health import PoolStatus
from truenext.stage.core.output import PRIORITY_INTERACTIVE

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


# ---- How something is shared of which there is only so much: room in open transactions ----
#
# First come, first served, so that whoever needs much is not passed for ever by those who need little.


class FairSemaphore:
    def __init__(self, total: int) -> None:
        self._available = self.total = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def acquired(self, count: int) -> AcquiredPermits:
        """`async with semaphore.acquired(3):` waits for its turn. Who asks for more than there is gets all of it."""
        return AcquiredPermits(self, min(count, self.total))

    async def acquire(self, count: int) -> None:
        if not self._waiting and count <= self._available:
            self._available -= count
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                # It was its turn already.
                self._available += count
            self._grant()
            raise

    def release(self, count: int) -> None:
        self._available += count
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            count, granted = self._waiting[0]
            if not granted.cancelled():
                if count > self._available:
                    return
                self._available -= count
                granted.set_result(None)
            self._waiting.popleft()


class AcquiredPermits:
    """A share, for the time of one block. No generator: each message that a stage handles has two."""

    __slots__ = ("_count", "_semaphore")

    def __init__(self, semaphore: FairSemaphore, count: int) -> None:
        self._semaphore = semaphore
        self._count = count

    async def __aenter__(self) -> None:
        await self._semaphore.acquire(self._count)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._semaphore.release(self._count)
