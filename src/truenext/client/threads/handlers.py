"""Handlers of `Connection.consume`, in threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from threading import Thread, current_thread
from typing import Any

from truenext.client import log
from truenext.client.core.buffer import SubscriptionOptions
from truenext.client.core.consume_call import ConsumeCall, HandlerWorker
from truenext.client.core.session import SessionCore, SessionMode
from truenext.client.threads.driver import Driver


class Handlers:
    """Handlers of all `consume` calls on one connection. Each call runs its handlers in its own threads."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._consume_calls: set[ConsumeCall] = set()

    def run(
        self,
        options: SubscriptionOptions,
        mode: SessionMode,
        handler: Callable[[Any, Any], None],
        concurrency: int,
        make_session: Callable[[SessionCore], Any],
    ) -> None:
        """Run handlers until the call is stopped. Raises: the errors of `Connection.consume`"""
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004
        ):
            raise TypeError("handler is an async function: use truenext.connect, which runs handlers in tasks")
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        driver = self._driver
        call = ConsumeCall(driver.client, mode, driver.isolation)
        self._consume_calls.add(call)
        try:
            driver.run_flow(call.subscribe(options))
            for number in range(concurrency):
                worker = driver.run_step(HandlerWorker, call)
                name = f"truenext handler {number}"
                # A running handler does not keep the program from ending.
                Thread(target=self._run_worker, args=(worker, handler, make_session), name=name, daemon=True).start()
            driver.run_flow(call.wait_until_stopped())
        finally:
            try:
                driver.run_step(call.stop)
                driver.run_flow(call.wait_until_handled())
            finally:
                driver.run_step(call.abandon_handlers)
                self._consume_calls.discard(call)
        if call.first_error is not None:
            raise call.first_error

    def _run_worker(
        self,
        worker: HandlerWorker,
        handler: Callable[[Any, Any], None],
        make_session: Callable[[SessionCore], Any],
    ) -> None:
        driver = self._driver
        session = make_session(worker.session)
        owner = current_thread()
        ended: BaseException | None = None
        try:
            while (received := driver.run_flow(worker.next_message(owner))) is not None:
                if session._source.core is not worker.session:
                    session = make_session(worker.session)
                message: Any = received
                message._session = session._source
                try:
                    handler(message, session)
                    driver.run_flow(worker.on_processed(message))
                except BaseException as error:
                    driver.run_step(worker.on_handler_failed, message, error)
                    if not isinstance(error, Exception):
                        raise
                    if worker.is_handler_failure(error):
                        log.log_handler_failed(message, error)
        except BaseException as error:
            # The caller of `consume` gets the error.
            ended = error
        finally:
            driver.run_step(worker.on_ended, ended)

    def stop(self) -> None:
        """Let no further handler start."""
        for call in list(self._consume_calls):
            self._driver.run_step(call.stop)

    def wait(self, deadline: float) -> None:
        """Wait until no handler runs, except a handler that is the caller itself. At the deadline, release the
        handlers' messages."""
        current = current_thread()
        for call in list(self._consume_calls):
            if not self._driver.run_flow(call.wait_until_handled(deadline, current)):
                self._driver.run_step(call.abandon_handlers)

    def abandon(self) -> None:
        """Release the messages of all running handlers, without waiting for the handlers."""
        for call in list(self._consume_calls):
            self._driver.run_step(call.abandon_handlers)
