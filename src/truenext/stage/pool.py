"""Pools of a service: one for interactive messages, and one for all other messages. Each pool has its own connection to
the broker and its own threads, so that interactive messages do not wait for others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from truenext.client.tasks.connection import Connection
from truenext.flows.envelope import PRIORITY_INTERACTIVE
from truenext.model.limits import TRANSACTION_BYTES_MAX, TRANSACTIONS_MAX
from truenext.model.service_health import PoolStatus
from truenext.stage.interceptors.interceptor import PoolName

_logger = logging.getLogger("truenext.stage")

INTERACTIVE_SELECTOR: Final = f"JMSPriority = {PRIORITY_INTERACTIVE}"
OTHERS_SELECTOR: Final = f"JMSPriority < {PRIORITY_INTERACTIVE}"

PAUSE_S, PAUSE_MAX_S = 0.5, 30.0
THREAD_NAME_PREFIX: Final = "truenext stage"


class PriorityPool:
    def __init__(self, connection: Connection, *, is_interactive: bool, threads: int) -> None:
        """Create a pool. `threads` is the largest number of plain functions that run at once."""
        self.connection = connection
        self.is_interactive = is_interactive
        self.selector = INTERACTIVE_SELECTOR if is_interactive else OTHERS_SELECTOR
        self.name: PoolName = "interactive" if is_interactive else "other"
        self.executor = ThreadPoolExecutor(max(threads, 1), thread_name_prefix=f"{THREAD_NAME_PREFIX} {self.name}")
        self.has_connected = connection.health().state == "connected"
        """True once a check has found the connection connected."""
        self.disk_full_pause_s = 0.0
        """Length in seconds of the last pause because of a full disk of the broker; 0 again after each commit."""
        self._disk_full_until = 0.0
        self.transaction_permits = FairSemaphore(TRANSACTIONS_MAX)
        """Permits for open transactions of the connection, as many as the broker allows (docs/reference/limits.md)."""
        self.transaction_byte_permits = FairSemaphore(TRANSACTION_BYTES_MAX)

    def back_off_disk_full_s(self, now: float) -> float:
        """Return the seconds for which a worker pauses after an error because the broker's disk is full. All workers of
        the pool share one pause. Each further pause is twice as long, up to PAUSE_MAX_S, until a commit succeeds."""
        if now >= self._disk_full_until:
            self.disk_full_pause_s = min(max(2 * self.disk_full_pause_s, PAUSE_S), PAUSE_MAX_S)
            self._disk_full_until = now + self.disk_full_pause_s
            _logger.warning(
                "the broker has no disk space: stages that send are suspended",
                extra={"pool": self.name, "next_s": self.disk_full_pause_s},
            )
        return self._disk_full_until - now

    def status(self) -> PoolStatus:
        health = self.connection.health()
        self.has_connected |= health.state == "connected"
        return PoolStatus(
            pool=self.name,
            state=health.state,
            error=health.error,
            since_s=health.since_s,
            reconnects=health.reconnects,
            has_disk_space=asyncio.get_running_loop().time() >= self._disk_full_until,
        )

    def subscriptions(self) -> Counter[str]:
        """Return the number of open subscriptions by destination."""
        consumers = self.connection.health().consumers
        return Counter(each.destination for each in consumers if each.state not in ("opening", "ended"))

    async def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        await self.connection.close()


# ---- Semaphore for the broker's limits of open transactions ----
# First come, first served, so that requests for few permits do not starve requests for many.


class FairSemaphore:
    def __init__(self, total: int) -> None:
        self._available = self.total = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def acquired(self, count: int) -> AcquiredPermits:
        """Hold `count` permits during a block: `async with semaphore.acquired(3):`. A request for more permits than the
        semaphore has gets all of them."""
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
                # The permits were already granted.
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
    """Permits that are held during one block. This is a class instead of a generator because a class is faster, and
    each message needs two such objects."""

    __slots__ = ("_count", "_semaphore")

    def __init__(self, semaphore: FairSemaphore, count: int) -> None:
        self._semaphore = semaphore
        self._count = count

    async def __aenter__(self) -> None:
        await self._semaphore.acquire(self._count)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._semaphore.release(self._count)
