"""What all workers of one run share: what stages are given, and whom to tell of what they do."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from truenext.clock import time_ns
from truenext.stage.core.names import RANDOM_BYTES, first_id
from truenext.stage.interceptors.chain import InterceptorChain
from truenext.stage.planning import FLOW, LIFESPAN, SESSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from truenext.stage.core.definitions import Stage
    from truenext.stage.core.flow import Flow
    from truenext.stage.definition import Definition
    from truenext.stage.events import StageEvents
    from truenext.stage.gate import DatabaseGate
    from truenext.stage.planning import DependencyPlans
    from truenext.stage.sql.work import AsyncSqlWork, ThreadSqlWork


class ServiceContext:
    def __init__(self, definition: Definition, plans: DependencyPlans) -> None:
        """To be made in the event loop in which all runs."""
        self.loop = asyncio.get_running_loop()
        self.service = definition.name
        self.stages: Mapping[str, Stage] = definition.stages
        """By queue."""
        self.instance = f"{definition.name} on {platform.node()} pid {os.getpid()}"
        """Which process this is, for people."""
        self.run_id = secrets.token_hex(8)
        """Which run of which process this is, for ids."""
        self.stopping = asyncio.Event()
        self.chain = InterceptorChain(definition.interceptors)
        self.plans = plans
        self.interactive_priority = InteractivePriority(self.loop)
        self.lifespan: object = None
        """What the lifespan of the service has made."""
        self.gate: DatabaseGate | None = None
        """The database, if a stage uses it."""
        self.events: StageEvents | None = None
        """Where what the stages do is written down, if it is."""
        self.on_test_point: Callable[[str, Stage], None] = _do_nothing
        """Called at each named point of a message's way; for tests."""

    def new_sql_work(
        self, stage: Stage, inbox_id: str | None, *, is_interactive: bool
    ) -> AsyncSqlWork | ThreadSqlWork | None:
        """What one message is about to do in the database; None if the stage uses none. `inbox_id` is the id by which
        the inbox is to know it, if its effects happen once."""
        if self.gate is None or not self.plans.uses_database(stage):
            return None
        database = self.gate.database
        make = database.new_async_work if stage.signature.is_async else database.new_thread_work
        return make(is_interactive=is_interactive, inbox_id=inbox_id, stage=stage.queue)

    def provided_values(self, flow: Flow, work: AsyncSqlWork | ThreadSqlWork | None) -> Mapping[str, object]:
        """What a stage can ask for, by the names of its plan."""
        provided: dict[str, object] = {FLOW: flow, LIFESPAN: self.lifespan}
        if work is not None:
            provided[SESSION] = work.session
        return provided

    async def wait_or_stopping(self, seconds: float) -> None:
        """Until then, or until the service stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    @classmethod
    def new_id(cls) -> str:
        """Of what is sent in no stage."""
        return first_id(cls.now_ms(), secrets.token_bytes(RANDOM_BYTES))

    @staticmethod
    def now_ms() -> int:
        """Since the epoch."""
        return time_ns() // 1_000_000


def _do_nothing(point: str, stage: Stage) -> None:
    pass


# Who goes first in an event loop that all share: while an interactive message is in hand, no other one begins.
#
# All that has begun takes its share of each pass of the loop, and of each turn of the broker, and an interactive flow
# has a pass and a turn in front of it for every stage. So the others wait, but for a moment at most, and only for what
# began a moment ago: a stage that waits for something else holds up nobody.
#
# Source: decision 65

WAIT_MAX_S: Final = 0.02
"""So long one interactive message holds up others, and so long one of the others is held up."""


class InteractivePriority:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._interactive: dict[object, float] = {}
        """When each of those in hand began; the last one is the newest."""
        self._is_idle = asyncio.Event()
        """Nothing is ahead any more."""

    @contextmanager
    def running_interactive(self) -> Iterator[None]:
        """An interactive message is in hand."""
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
        """Another one may begin."""
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
