"""Consumer of a stage's messages. It receives messages while the service runs and the database is available."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container

from truenext.client.core.subscriptions import ConsumerOptions
from truenext.clock import monotonic
from truenext.errors import Refused
from truenext.model.service_health import StageStatus
from truenext.stage.context import ServiceContext
from truenext.stage.core.definitions import Stage
from truenext.stage.core.failure import describe_error
from truenext.stage.outbox.exactly_once import ExactlyOnceProcessing
from truenext.stage.pool import PriorityPool
from truenext.stage.user_code import is_being_cancelled
from truenext.stage.worker import StageWorker

_logger = logging.getLogger("truenext.stage")

PAUSE_S, PAUSE_MAX_S = 1.0, 15.0
"""Seconds until a refused subscription is tried again. Each further refusal doubles the pause, up to the second
value."""


class StageConsumer:
    """Consumer of one stage's messages for one pool (interactive messages, or all others). It pauses while the database
    is unavailable."""

    def __init__(
        self, context: ServiceContext, stage: Stage, pool: PriorityPool, exactly_once: ExactlyOnceProcessing | None
    ) -> None:
        self.stage = stage
        self.pool = pool
        self.worker = StageWorker(context, stage, pool, exactly_once)
        self._gate = context.gate if context.plans.uses_database(stage) else None
        self._task: asyncio.Task[None] | None = None
        self._subscribe_error = ""
        self._is_draining = False
        """True after the database was lost, while handlers of earlier messages still run."""

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._consume_for_ever(), name=f"stage {self.stage.queue}")

    @property
    def task(self) -> asyncio.Task[None]:
        assert self._task is not None, "it was started"
        return self._task

    def status(self, subscribed: Container[str]) -> StageStatus:
        """Return the status of the stage. `subscribed` has the destinations to which the pool is subscribed."""
        worker = self.worker
        is_open = self._gate is None or self._gate.is_open
        return StageStatus(
            stage=self.stage.queue,
            pool=self.pool.name,
            active=worker.active_count,
            waits_for_database=not is_open,
            broker_wait_reason=self._unsubscribed_reason(subscribed) if is_open else "",
            without_progress_s=monotonic() - worker.progress_at if worker.active_count else 0.0,
            end_reason=self._end_reason(),
        )

    def _unsubscribed_reason(self, subscribed: Container[str]) -> str:
        if self._is_draining:
            return "messages from before the loss of the database are still being processed"
        if self._end_reason() or self.stage.destination in subscribed:
            return ""
        return self._subscribe_error or "the broker has not answered yet"

    def _end_reason(self) -> str:
        if self._task is None or not self._task.done():
            return ""
        error = None if self._task.cancelled() else self._task.exception()
        return "it was stopped" if error is None else describe_error(error)

    async def _consume_for_ever(self) -> None:
        pause_s = PAUSE_S
        while True:
            if self._gate is not None:
                await self._gate.until_open()
            started_at = monotonic()
            try:
                await self._consume_while_open()
            except (Refused, TimeoutError) as error:
                if self.pool.connection.health().state == "closed":
                    # The connection has ended, such as by a refused login.
                    raise
                # For example, the disk is full, or no broker runs: other stages go on, and this one retries.
                if monotonic() - started_at > PAUSE_MAX_S:
                    # It has consumed messages since the last error.
                    pause_s = PAUSE_S
                self._subscribe_error = str(error)
                _logger.warning(
                    "a stage cannot consume messages, and will try again",
                    extra={"stage": self.stage.queue, "error": str(error)},
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _consume_while_open(self) -> None:
        consuming = asyncio.ensure_future(self._consume())
        if self._gate is None:
            await consuming
            return
        closed = asyncio.ensure_future(self._gate.until_closed())
        try:
            await asyncio.wait({consuming, closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
            # Running handlers are waited for, and buffered messages are released.
            self._is_draining = True
            consuming.cancel()
            try:
                await consuming
            except asyncio.CancelledError:
                if is_being_cancelled():
                    raise
            finally:
                self._is_draining = False

    async def _consume(self) -> None:
        stage = self.stage
        concurrency = stage.settings.concurrency
        assert concurrency is not None, "the service says one"
        # A larger prefetch would only keep messages from other processes.
        options: ConsumerOptions = {"prefetch": concurrency}
        if stage.endpoint.subscribed_topic is None:
            options["selector"] = self.pool.selector
        await self.pool.connection.consume(
            stage.destination, self.worker.handle, transacted=True, ack="commit", concurrency=concurrency, **options
        )
