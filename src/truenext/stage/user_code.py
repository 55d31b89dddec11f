"""How a program's own code is run, also behind a commit, so that nothing it raises or does to its task ends a worker or
the process; and which stage runs."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Coroutine
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from truenext.stage.core.errors import BaseExceptionRaised, FlowError
from truenext.stage.core.failure import describe_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from truenext.stage.core.definitions import Endpoint, Stage
    from truenext.stage.core.output import Output

    RunInThread: TypeAlias = Callable[[Callable[[], object]], Awaitable[object]]


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


# ---- Whose cancellation is it: that of the task that runs, or of something that it has waited for? ----


def is_being_cancelled() -> bool:
    """Somebody has cancelled the running task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# ---- What is called once all of a transaction has happened: outside of it, at most once, and not after a crash ----

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


# The stage whose function runs in this task or thread: the calls that would wait for that stage are refused.

CURRENT: Final[ContextVar[Stage | None]] = ContextVar("truenext stage", default=None)
"""Set for the call of the function alone; the tasks that it starts inherit it."""


def check_can_await(call: str, advice: str) -> None:
    """Refuse an async method that a plain function of a stage calls: it cannot await the result.

    Raises: FlowError
    """
    stage = CURRENT.get()
    if stage is None or stage.signature.is_async or _is_in_loop():
        return
    raise FlowError(
        f"{call} must be awaited, and stage {stage.name} of {stage.endpoint.name} is a plain function, which cannot: "
        f"make it an async function, or {advice}"
    )


def check_not_own_endpoint(to: Endpoint[Any, Any], stages: Mapping[str, Stage]) -> None:
    """Refuse an ask of the endpoint whose stage asks: the stage holds one of the workers that the reply needs. `stages`
    are those of the service that asks, by queue: an endpoint of the same name at another broker may be asked.

    Raises: FlowError
    """
    stage = CURRENT.get()
    if stage is None or stages.get(stage.queue) is not stage or to.name != stage.endpoint.name:
        return
    raise FlowError(
        f"stage {stage.name} of {to.name} asks {to.name} itself: while it waits it holds one of the workers that the "
        "reply needs, and if all of them wait, none replies. Request it with the flow: the reply comes to the next "
        "stage, and no worker waits"
    )


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
