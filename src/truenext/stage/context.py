"""Context of one run of a service: values that all workers use, and the rule that delays other messages while an
interactive message (a caller waits for its flow) is being processed."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from truenext.clock import time_ns
from truenext.flows.message_ids import RANDOM_BYTES, first_id
from truenext.stage.planning import FLOW, LIFESPAN, SESSION
from truenext.stage.queue_policies import QueuePolicies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from truenext.stage.core.definitions import Stage
    from truenext.stage.core.flow import Flow
    from truenext.stage.definition import Definition
    from truenext.stage.events import StageEvents
    from truenext.stage.gate import DatabaseGate
    from truenext.stage.planning import DependencyPlans
    from truenext.stage.sql.work import AnySqlWork


class ServiceContext:
    def __init__(self, definition: Definition, plans: DependencyPlans) -> None:
        """Create the context of one run of a service. Call this in the event loop of the run."""
        self.loop = asyncio.get_running_loop()
        self.service = definition.name
        self.stages: Mapping[str, Stage] = definition.stages
        self.instance = f"{definition.name} on {platform.node()} pid {os.getpid()}"
        """Service, host and process id, for people who read the causes of failures and the recorded events."""
        self.run_id = secrets.token_hex(8)
        """Random id of this run. Ids of messages are derived from this id. In the outbox, this id is the owner of the
        run's producers."""
        self.stopping = asyncio.Event()
        self.chain = definition.interceptor_chain()
        self.counters = definition.direct_counters
        """Counters with which the run counts itself; None if a subclass of `Metrics` counts, as an interceptor."""
        self.plans = plans
        self.interactive_priority = InteractivePriority(self.loop)
        self.lifespan: object = None
        """Value that the service's lifespan has yielded; None before that."""
        self.gate: DatabaseGate | None = None
        """Gate that stops stages while the database is unavailable; None if no database is open."""
        self.events: StageEvents | None = None
        """Recorder of executions; None if the service has no folder for events."""
        self.queue_policies = QueuePolicies(definition.stages)
        self.on_test_point: Callable[[str, Stage], None] = _do_nothing
        """Function that the test kit sets. It is called at each `Point` of the processing of a message
        (`truenext.testing.stages`)."""

    def new_sql_work(self, stage: Stage, inbox_id: str | None, *, is_interactive: bool) -> AnySqlWork | None:
        """Return the SQL transaction for one message; None if the stage uses no database. `inbox_id` is the message's
        id in the inbox; None if the stage is not exactly-once."""
        if self.gate is None or not self.plans.uses_database(stage):
            return None
        database = self.gate.database
        make = database.new_async_work if stage.signature.is_async else database.new_thread_work
        return make(is_interactive=is_interactive, inbox_id=inbox_id, stage=stage.queue)

    def provided_values(self, flow: Flow, work: AnySqlWork | None) -> Mapping[str, object]:
        """Return the values that the parameters of a stage may get: flow, lifespan value and session, by the names
        FLOW, LIFESPAN and SESSION."""
        provided: dict[str, object] = {FLOW: flow, LIFESPAN: self.lifespan}
        if work is not None:
            provided[SESSION] = work.session
        return provided

    async def wait_or_stopping(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    @classmethod
    def new_id(cls) -> str:
        """Return a new random id. The ids of an initiation's messages are derived from such an id."""
        return first_id(cls.now_ms(), secrets.token_bytes(RANDOM_BYTES))

    @staticmethod
    def now_ms() -> int:
        """Return the time in milliseconds since the epoch."""
        return time_ns() // 1_000_000


def _do_nothing(point: str, stage: Stage) -> None:
    pass


# Precedence in the event loop of a run: while an interactive message is being processed, no other message starts.
#
# Each running message takes a share of every pass of the loop and every turn of the broker, and an interactive flow
# waits for one pass and one turn at every stage. So other messages are delayed, but only for a moment, and only by
# interactive messages that have just started: a stage that waits for something else delays no message.
#
# Source: decision 65

WAIT_MAX_S: Final = 0.02
"""Longest time in seconds for which an interactive message delays other messages. Also the longest time for which one
message is delayed, however many interactive messages there are."""


class InteractivePriority:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._interactive: dict[object, float] = {}
        """Start time of each interactive message that is being processed, in the order of the starts."""
        self._is_idle = asyncio.Event()
        """Set when the last interactive message ends, and cleared when the next one starts."""

    @contextmanager
    def running_interactive(self) -> Iterator[None]:
        """Count an interactive message as being processed, for the duration of the block."""
        token = object()
        self._interactive[token] = self._loop.time()
        self._is_idle.clear()
        try:
            yield
        finally:
            del self._interactive[token]
            if not self._interactive:
                self._is_idle.set()

    async def yield_to_interactive(self) -> None:
        """Delay another message while the newest interactive message is younger than WAIT_MAX_S. The whole delay is at
        most WAIT_MAX_S."""
        if not self._interactive:
            return
        deadline = self._loop.time() + WAIT_MAX_S
        while self._interactive:
            until = min(deadline, next(reversed(self._interactive.values())) + WAIT_MAX_S)
            if self._loop.time() >= until:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._is_idle.wait()
