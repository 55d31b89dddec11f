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

WAIT_MAX_S: Final = 0.02
"""So long one interactive message holds up others, and so long one of the others is held up."""


class InteractivePriority:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._interactive: dict[object, float] = {}
        """When each of those in hand began; the last one is the newest."""
        self._is_idle = asyncio.Event()
        """Nothing is ahead any more."""

    @contextmanager
    def running_interactive(self) -> Iterator[None]:
        """An interactive message is in hand."""
        token = object()
        self._interactive[token] = self._loop.time()
        self._is_idle.clear()
        try:
            yield
        finally:
            del self._interactive[token]
            if not self._interactive:
                self._is_idle.set()

    async def yield_to_interactive(self) -> None:
        """Another one may begin."""
        if not self._interactive:
            return
        deadline = self._loop.time() + WAIT_MAX_S
        while self._interactive:
            until = min(deadline, next(reversed(self._interactive.values())) + WAIT_MAX_S)
            if self._loop.time() >= until:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._is_idle.wait()
