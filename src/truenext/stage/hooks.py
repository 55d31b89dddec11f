"""What is called once all of a transaction has happened: outside of it, at most once, and not after a crash."""

from __future__ import annotations

import asyncio
import inspect
import logging
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from truenext.stage.cancelling import is_being_cancelled
from truenext.stage.core.errors import NoException
from truenext.stage.core.failure import said_of
from truenext.stage.own_task import in_own_task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from truenext.stage.core.said import Said

    InThread: TypeAlias = Callable[[Callable[[], object]], Awaitable[object]]

_logger = logging.getLogger("truenext.stage")

HOOK_S = 30.0
"""A hook that takes longer is cancelled: its worker waits for it, and takes no messages meanwhile."""


async def call_hooks(
    said: Said,
    fields: Mapping[str, object],
    in_thread: InThread | None,
) -> None:
    """What a hook raises is logged, with `fields`: nothing can be taken back any more. Plain functions are called
    `in_thread`, if those who have named them run in threads; otherwise here."""
    for hook in said.after_commit:
        try:
            made = _call(hook) if in_thread is None else await in_thread(partial(_call, hook))
            if inspect.isawaitable(made):
                await _in_time(made)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            _logger.error("what was to be called after the commit was cancelled", extra=fields, exc_info=error)
        except GeneratorExit:
            raise
        except BaseException as error:
            # Such as SystemExit: nobody is to end the process for that.
            _logger.error("what was to be called after the commit has failed", extra=fields, exc_info=error)


def call_hooks_here(said: Said, fields: Mapping[str, object], loop: asyncio.AbstractEventLoop) -> None:
    """The same, by a thread that has nothing else to do; what is `async` is called in `loop`."""
    for hook in said.after_commit:
        try:
            made = _call(hook)
            if inspect.isawaitable(made):
                asyncio.run_coroutine_threadsafe(_in_time(made), loop).result()
        except Exception as error:
            _logger.error("what was to be called after the commit has failed", extra=fields, exc_info=error)


def _call(hook: Callable[[], object]) -> object:
    """What is no Exception would end the process, or the thread."""
    try:
        return hook()
    except Exception as error:
        if isinstance(error, StopIteration):
            # No task can be told of it.
            raise RuntimeError("StopIteration was raised") from error
        raise
    except BaseException as error:
        raise NoException(f"{said_of(error)} was raised, which is no Exception") from error


async def _in_time(made: Awaitable[object]) -> None:
    """Raises: TimeoutError; what the hook raises"""
    limit = asyncio.timeout(HOOK_S)
    try:
        async with limit:
            await in_own_task(made)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"it was cancelled, for it has not ended within {HOOK_S:g} seconds") from error
