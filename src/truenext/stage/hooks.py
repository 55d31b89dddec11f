"""What is called once all of a transaction has happened: outside of it, at most once, and not after a crash."""

from __future__ import annotations

import asyncio
import inspect
import logging
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from truenext.stage.cancellation import is_being_cancelled
from truenext.stage.user_code import call_user_function, run_user_coroutine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from truenext.stage.core.output import Output

    RunInThread: TypeAlias = Callable[[Callable[[], object]], Awaitable[object]]

_logger = logging.getLogger("truenext.stage")

HOOK_TIMEOUT_S = 30.0
"""A hook that takes longer is cancelled: its worker waits for it, and takes no messages meanwhile."""


async def call_after_commit(output: Output, fields: Mapping[str, object], in_thread: RunInThread | None) -> None:
    """What a hook raises is logged, with `fields`: nothing can be taken back any more. Plain functions are called
    `in_thread`, if those who have named them run in threads; otherwise here."""
    for hook in output.after_commit:
        try:
            result = (
                call_user_function(hook) if in_thread is None else await in_thread(partial(call_user_function, hook))
            )
            if inspect.isawaitable(result):
                await _run_with_timeout(result)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            _log(error, fields)
        except Exception as error:
            _log(error, fields)


def call_after_commit_sync(output: Output, fields: Mapping[str, object], loop: asyncio.AbstractEventLoop) -> None:
    """The same, by a thread that has nothing else to do; what is `async` is called in `loop`."""
    for hook in output.after_commit:
        try:
            result = call_user_function(hook)
            if inspect.isawaitable(result):
                asyncio.run_coroutine_threadsafe(_run_with_timeout(result), loop).result()
        except Exception as error:
            _log(error, fields)


async def _run_with_timeout(awaitable: Awaitable[object]) -> None:
    """Raises: TimeoutError; what the hook raises"""
    limit = asyncio.timeout(HOOK_TIMEOUT_S)
    try:
        async with limit:
            await run_user_coroutine(awaitable)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"it was cancelled, for it has not ended within {HOOK_TIMEOUT_S:g} seconds") from error


def _log(error: BaseException, fields: Mapping[str, object]) -> None:
    _logger.error("what was to be called after the commit has failed", extra=fields, exc_info=error)
