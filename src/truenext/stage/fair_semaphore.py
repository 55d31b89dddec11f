"""How something is shared of which there is only so much: room in open transactions.

First come, first served, so that whoever needs much is not passed for ever by those who need little.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


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
