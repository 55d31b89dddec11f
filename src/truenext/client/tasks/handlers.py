"""Handlers of `Connection.consume`, in tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from truenext.client import log
from truenext.client.core.buffer import SubscriptionOptions
from truenext.client.core.consume_call import ConsumeCall, HandlerWorker
from truenext.client.core.session import SessionCore, SessionMode
from truenext.client.tasks.driver import Driver


class Handlers:
    """Handlers of all `consume` calls on one connection. Each call runs its handlers in its own tasks."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._consume_calls: dict[ConsumeCall, set[asyncio.Task[None]]] = {}
        """Running calls of `consume`, each with the tasks in which its handlers run."""

    async def run(
        self,
        options: SubscriptionOptions,
        mode: SessionMode,
        handler: Callable[[Any, Any], Awaitable[None]],
        concurrency: int,
        make_session: Callable[[SessionCore], Any],
    ) -> None:
        """Run handlers until the call is stopped. Raises: the errors of `Connection.consume`"""
        if not asyncio.iscoroutinefunction(handler) and not asyncio.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004
        ):
            raise TypeError("handler is not an async function: use truenext.blocking, which runs handlers in threads")
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        driver = self._driver
        call = ConsumeCall(driver.client, mode, driver.isolation)
        tasks = self._consume_calls[call] = set()
        caller = asyncio.current_task()
        assert caller is not None, "a coroutine runs in one"
        cancelled = caller.cancelling()

        def is_stopped() -> bool:
            # The caller may have swallowed a cancellation before.
            return call.is_stopped or caller.cancelling() > cancelled

        try:
            await driver.run_flow(call.subscribe(options))
            for _ in range(concurrency):
                work = self._run_worker(HandlerWorker(call), handler, make_session, is_stopped)
                tasks.add(driver.loop.create_task(work))
            await driver.run_flow(call.wait_until_stopped())
        finally:
            call.stop()
            try:
                await driver.run_flow(call.wait_until_handled())
            finally:
                for task in tasks:
                    task.cancel()
                try:
                    if tasks:
                        await asyncio.wait(tasks)
                finally:
                    call.abandon_handlers()
                    del self._consume_calls[call]
        if call.first_error is not None:
            raise call.first_error

    async def _run_worker(
        self,
        worker: HandlerWorker,
        handler: Callable[[Any, Any], Awaitable[None]],
        make_session: Callable[[SessionCore], Any],
        is_stopped: Callable[[], bool],
    ) -> None:
        """Call `handler` for one message after the other, in this task, until `worker` has no more. `is_stopped`
        returns whether the call of `consume` is ending."""
        driver = self._driver
        session = make_session(worker.session)
        owner = asyncio.current_task()
        ended: BaseException | None = None
        try:
            while (received := await driver.run_flow(worker.next_message(owner))) is not None:
                if session._source.core is not worker.session:
                    session = make_session(worker.session)
                message: Any = received
                message._session = session._source
                try:
                    await handler(message, session)
                    await driver.run_flow(worker.on_processed(message))
                except Exception as error:
                    worker.on_handler_failed(message, error)
                    if worker.is_handler_failure(error):
                        log.log_handler_failed(message, error)
                except asyncio.CancelledError as error:
                    worker.on_handler_failed(message, error)
                    if is_stopped():
                        raise
                    # `consume` goes on: the handler has cancelled itself, or a task that it waited for.
                    log.log_handler_failed(message, error)
                    while owner is not None and owner.uncancel():
                        pass
                except BaseException as error:
                    worker.on_handler_failed(message, error)
                    raise
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # The caller of `consume` gets the error.
            ended = error
        finally:
            worker.on_ended(ended)

    def stop(self) -> None:
        """Let no further handler start."""
        for call in self._consume_calls:
            call.stop()

    async def wait(self, deadline: float) -> None:
        """Wait until no handler runs, except a handler that is the caller itself. At the deadline, cancel the
        handlers."""
        current = asyncio.current_task()
        for call, tasks in list(self._consume_calls.items()):
            if not await self._driver.run_flow(call.wait_until_handled(deadline, current)):
                for task in tasks - {current}:
                    task.cancel()

    def abandon(self) -> None:
        """Do nothing: `run` waits for its tasks. The method exists because the handlers in threads have it."""
