"""How something is shared of which there is only so much: room in open transactions.

First come, first served, so that whoever needs much is not passed for ever by those who need little.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class Shares:
    def __init__(self, total: int) -> None:
        self._left = self.total = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def taken(self, share: int) -> Taken:
        """`async with shares.taken(3):` waits for its turn. Who asks for more than there is gets all of it."""
        return Taken(self, min(share, self.total))

    async def take(self, share: int) -> None:
        if not self._waiting and share <= self._left:
            self._left -= share
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((share, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was its turn already.
                self._left += share
            self._hand_on()
            raise

    def release(self, share: int) -> None:
        self._left += share
        self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting:
            share, turn = self._waiting[0]
            if not turn.cancelled():
                if share > self._left:
                    return
                self._left -= share
                turn.set_result(None)
            self._waiting.popleft()


class Taken:
    """A share, for the time of one block. No generator: each message that a stage handles has two."""

    __slots__ = ("_share", "_shares")

    def __init__(self, shares: Shares, share: int) -> None:
        self._shares = shares
        self._share = share

    async def __aenter__(self) -> None:
        await self._shares.take(self._share)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shares.release(self._share)
