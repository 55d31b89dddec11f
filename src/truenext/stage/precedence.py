"""Who goes first in an event loop that all share: while an interactive message is in hand, no other one begins.

All that has begun takes its share of each pass of the loop, and of each turn of the broker, and an interactive flow has
a pass and a turn in front of it for every stage. So the others wait, but for a moment at most, and only for what began
a moment ago: a stage that waits for something else holds up nobody.

Source: decision 65
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

MOMENT_S: Final = 0.02
"""So long one interactive message holds up others, and so long one of the others is held up."""


class Precedence:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ahead: dict[object, float] = {}
        """When each of those in hand began; the last one is the newest."""
        self._is_free = asyncio.Event()
        """Nothing is ahead any more."""

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """An interactive message is in hand."""
        this = object()
        self._ahead[this] = self._loop.time()
        self._is_free.clear()
        try:
            yield
        finally:
            del self._ahead[this]
            if not self._ahead:
                self._is_free.set()

    async def turn(self) -> None:
        """Another one may begin."""
        if not self._ahead:
            return
        late = self._loop.time() + MOMENT_S
        while self._ahead:
            until = min(late, next(reversed(self._ahead.values())) + MOMENT_S)
            if self._loop.time() >= until:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._is_free.wait()
