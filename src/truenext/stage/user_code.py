"""How a program's own code is run, so that nothing it raises or does to its task ends a worker or the process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, TypeVar

from truenext.stage.core.errors import BaseExceptionRaised
from truenext.stage.core.failure import describe_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


def call_user_function(function: Callable[[], T]) -> T:
    """What it returns. Raises: what it raises; BaseExceptionRaised for what would end the thread; RuntimeError instead
    of StopIteration, of which no task can be told"""
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError("StopIteration was raised") from error
    except Exception:
        raise
    except BaseException as error:
        raise _base_exception_raised(error) from error


async def run_user_coroutine(awaitable: Awaitable[T]) -> T:
    """What it returns. Whoever is cancelled here cancels it. But a watchdog in it that cancels "the current task" ends
    it alone, and not the worker that waits: `is_being_cancelled` tells one from the other.

    Raises: what it raises; BaseExceptionRaised for what would end the event loop, or look like the end of who waits
    """
    task = asyncio.ensure_future(_result_of(awaitable))
    try:
        result = await task
    finally:
        if task.cancelled() and isinstance(awaitable, Coroutine):
            # One that was cancelled before it began would be said to be "never awaited"; any other has ended.
            awaitable.close()
        # Otherwise an error and this frame would keep each other, until the garbage is collected.
        del task
    if isinstance(result, _RaisedError):
        raise _base_exception_raised(result.error) from result.error
    return result


class _RaisedError:
    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _result_of(awaitable: Awaitable[T]) -> T | _RaisedError:
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        # A task hands SystemExit on to the event loop, and throws GeneratorExit at who awaits it. It is returned, since
        # GeneratorExit may also be the end of this coroutine in an event loop that has ended: then nobody looks at it.
        return _RaisedError(error)


def _base_exception_raised(error: BaseException) -> BaseExceptionRaised:
    """It would end the process, and the next one that gets the message, and so on."""
    return BaseExceptionRaised(f"{describe_error(error)} was raised, which is no Exception")
