"""Calls of a program's stages and `after_commit` functions. Their errors and cancellations never end a worker or the
process."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from truenext.stage.core.definitions import Endpoint, Stage
from truenext.stage.core.errors import BaseExceptionRaised, FlowError
from truenext.stage.core.failure import describe_error
from truenext.stage.core.output import Output

RunInThread: TypeAlias = Callable[[Callable[[], object]], Awaitable[object]]

T = TypeVar("T")


def call_user_function(function: Callable[[], T]) -> T:
    """Call a function, and return its result.

    Raises: the function's error if it is an `Exception`; BaseExceptionRaised for other errors, such as SystemExit,
    which would end the thread; RuntimeError for StopIteration, which a future cannot hold
    """
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration: raise another exception") from error
    except Exception:
        raise
    except BaseException as error:
        raise _base_exception_raised(error) from error


async def run_user_coroutine(awaitable: Awaitable[T]) -> T:
    """Await an object in a task of its own, and return its result. A cancellation of the caller cancels that task. If a
    watchdog in the awaited code cancels its current task, only that task ends, and not the caller.

    Raises: the object's error if it is an `Exception` or CancelledError; BaseExceptionRaised for other errors, such as
    SystemExit, which would end the event loop
    """
    task = asyncio.ensure_future(_result_of(awaitable))
    try:
        result = await task
    finally:
        if task.cancelled() and isinstance(awaitable, Coroutine):
            # Avoids the warning "never awaited" for a coroutine that was cancelled before its start.
            awaitable.close()
        # Otherwise an error and this frame would refer to each other until garbage is collected.
        del task
    if isinstance(result, _RaisedError):
        raise _base_exception_raised(result.error) from result.error
    return result


class _RaisedError(NamedTuple):
    error: BaseException


async def _result_of(awaitable: Awaitable[T]) -> T | _RaisedError:
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        # A task would also raise SystemExit in the event loop, and GeneratorExit in its awaiter, so both are returned.
        # When a coroutine is closed after the end of its event loop, it gets GeneratorExit too; the result is unused.
        return _RaisedError(error)


def _base_exception_raised(error: BaseException) -> BaseExceptionRaised:
    """Wrap an error such as SystemExit. Raised unwrapped, the error would end this process, and after each redelivery
    the next process."""
    return BaseExceptionRaised(f"{describe_error(error)} was raised, which is not an Exception")


# ---- Cancellation: of the running task, or of something that it awaits ----


def is_being_cancelled() -> bool:
    """Whether the running task itself was cancelled. A cancellation of a task that it awaits does not count."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel_all(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel all tasks, and wait until they have ended. None stands for a task that was not made, and is ignored."""
    made = {each for each in tasks if each is not None}
    for each in made:
        each.cancel()
    if made:
        await asyncio.wait(made)


# ---- Hooks after a commit: called outside of the transaction, at most once, and not after a crash ----

_logger = logging.getLogger("truenext.stage")

HOOK_TIMEOUT_S = 30.0
"""Seconds after which an `async` function of `after_commit` is cancelled. The stage's worker waits that long, and
processes no other message meanwhile."""


async def call_after_commit(output: Output, fields: Mapping[str, object], in_thread: RunInThread | None) -> None:
    """Call the `after_commit` functions of a committed output. An error is logged, with `fields`, since the commit
    cannot be undone. If `in_thread` is given, it runs the functions in a thread, otherwise they are called in the event
    loop."""
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
    """Call the `after_commit` functions in this thread, which may block. The result of an `async` function is awaited
    in `loop`. An error is logged, with `fields`."""
    for hook in output.after_commit:
        try:
            result = call_user_function(hook)
            if inspect.isawaitable(result):
                asyncio.run_coroutine_threadsafe(_run_with_timeout(result), loop).result()
        except Exception as error:
            _log(error, fields)


async def _run_with_timeout(awaitable: Awaitable[object]) -> None:
    """Await the result of an `after_commit` function. Raises: TimeoutError after HOOK_TIMEOUT_S; errors of the
    function"""
    limit = asyncio.timeout(HOOK_TIMEOUT_S)
    try:
        async with limit:
            await run_user_coroutine(awaitable)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(
            f"the function of after_commit was cancelled, as it had not ended within {HOOK_TIMEOUT_S:g} seconds"
        ) from error


def _log(error: BaseException, fields: Mapping[str, object]) -> None:
    _logger.error("a function of after_commit has failed; the commit is not affected", extra=fields, exc_info=error)


# The stage whose function runs in this task or thread: calls that would make the stage wait for itself are refused.

CURRENT: Final[ContextVar[Stage | None]] = ContextVar("truenext stage", default=None)
"""Stage whose function runs in this task or thread; None outside of stages. Tasks that the function starts inherit the
value."""


def check_can_await(call: str, advice: str) -> None:
    """Refuse the call of an async method in a plain function of a stage, which cannot await the result. `advice` says
    what to do instead.

    Raises: FlowError if a plain function of a stage makes the call
    """
    stage = CURRENT.get()
    if stage is None or stage.signature.is_async or running_loop() is not None:
        return
    raise FlowError(
        f"{call} must be awaited, but stage {stage.name} of {stage.endpoint.name} is a plain function, which cannot "
        f"await: make it an async function, or {advice}"
    )


def check_not_own_endpoint(to: Endpoint[Any, Any], stages: Mapping[str, Stage]) -> None:
    """Refuse an `ask` of the endpoint whose stage asks: the waiting stage would occupy a worker that the reply needs.
    `stages` are the stages of the service, by queue. A stage of another service is not refused, because its broker may
    have a different endpoint of the same name.

    Raises: FlowError if a stage asks its own endpoint
    """
    stage = CURRENT.get()
    if stage is None or stages.get(stage.queue) is not stage or to.name != stage.endpoint.name:
        return
    raise FlowError(
        f"stage {stage.name} of {to.name} asks {to.name} itself: while it waits it occupies a worker that the reply "
        "needs, and if all workers wait, none replies. Request it with the flow: the reply comes to the next stage, "
        "and no worker waits"
    )


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
