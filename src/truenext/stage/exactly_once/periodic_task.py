"""Work in the background, one step after the other, that ends between two of them: what is said to a database
is not to be interrupted, for its connection would keep its locks for a while."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_logger = logging.getLogger("truenext.stage")

RETRY_S = 5.0
"""After what nobody has foreseen."""
STOP_TIMEOUT_S = 5.0
"""For the step that is under way when the service stops."""


class PeriodicTask:
    def __init__(self, name: str, step: Callable[[], Awaitable[float]]) -> None:
        """`step` does what there is to do, and says after how many seconds to do it again."""
        self._name = name
        self._step = step
        self._woken = asyncio.Event()
        self._idle = asyncio.Event()
        """A step has ended, and nothing has come meanwhile."""
        self.is_stopping = False
        """No step begins any more; one that is long may look."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    def wake(self) -> None:
        """There is something to do now."""
        self._woken.set()
        self._idle.clear()

    async def _run(self) -> None:
        while not self.is_stopping:
            self._woken.clear()
            self._idle.clear()
            try:
                wait_s = await self._step()
            except Exception:
                # Whatever it is, it is not to be the end of it.
                _logger.exception("work in the background has failed, and goes on", extra={"what": self._name})
                wait_s = RETRY_S
            if not self._woken.is_set():
                self._idle.set()
            try:
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def stop(self) -> None:
        """What it was woken for is done before, if that does not take long."""
        if self._task is None or self._task.done():
            return
        # Another thread may just have said so.
        await asyncio.sleep(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._idle.wait()
        self.is_stopping = True
        self.wake()
        _, late = await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
        if late:
            self._task.cancel()
            await asyncio.wait(late)
