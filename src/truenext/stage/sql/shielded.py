"""Calls that a cancellation does not interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_TIMEOUT_S = 5.0
"""Seconds for which a call may go on after a cancellation. Then the call is cancelled, too."""


async def run_to_completion(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine. If the caller is cancelled meanwhile, the coroutine may still finish within CANCEL_TIMEOUT_S;
    then the cancellation is raised."""
    task = asyncio.ensure_future(coroutine)
    cancellation: asyncio.CancelledError | None = None
    deadline: float | None = None
    loop = asyncio.get_running_loop()
    while not task.done():
        try:
            remaining_s = None if deadline is None else deadline - loop.time()
            await asyncio.wait({task}, timeout=remaining_s)
        except asyncio.CancelledError as error:
            cancellation = error
        if cancellation is not None and deadline is None:
            deadline = loop.time() + CANCEL_TIMEOUT_S
        elif deadline is not None and loop.time() >= deadline and not task.done():
            # A network may stand still, and drivers wait for it once more when they are cancelled.
            task.cancel()
            deadline = loop.time() + 1
    if cancellation is not None:
        if not task.cancelled():
            # Mark the exception as retrieved: a cancelled caller finds out the outcome by itself.
            task.exception()
        raise cancellation
    return task.result()
