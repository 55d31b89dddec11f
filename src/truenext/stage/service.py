"""A service: the endpoints that a program defines, and what it begins and asks while it is connected.

    app = Service("shop", broker="stomp://127.0.0.1:61613", database="postgresql+psycopg:///shop")
    place = app.endpoint("order.place", Order, Placed, state=Memo)

    @place.stage
    async def check(order: Order, memo: Memo, flow: Flow) -> None: ...

`truenext stages run shop:app` runs its stages. `async with app.connected():` is for a program that only begins flows
and asks, such as a web server.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack, cast, overload

from truenext.errors import ConfigurationError, LocalProtocolError
from truenext.stage.core.errors import FlowError
from truenext.stage.core.flow_start import check_endpoint
from truenext.stage.definition import Definition
from truenext.stage.initiation_contexts import InitiationContext, OutboxInitiationContext
from truenext.stage.interceptors.chain import InterceptorChain
from truenext.stage.planning import DependencyPlans
from truenext.stage.service_run import STOP_TIMEOUT_S, ServiceRun
from truenext.stage.user_code import check_can_await, check_not_own_endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from truenext.errors import InDoubt
    from truenext.stage.core.definitions import Endpoint, Topic
    from truenext.stage.core.flow_start import FlowOptions
    from truenext.stage.dependencies.depends import Overrides
    from truenext.stage.initiator import Initiator

M = TypeVar("M")
R = TypeVar("R")

TIMEOUT_S = 60.0


class Service(Definition):
    """A definition, and what the program does with it: runs its stages, begins flows, asks."""

    _current_run: ServiceRun | None = None

    # ---- Running ----

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Self]:
        """For as long as the block lasts this process can begin flows and ask. No stage runs. If the service has none
        that happens once, and begins flows in transactions of its own, they are sent meanwhile.

        Raises: ConfigurationError, DefinitionError; ConnectionLost without a broker; Refused; DatabaseUnavailable if it
        has such flows to send, and the database is not there
        """
        async with self._while_running(with_stages=False):
            yield self

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """For as long as the block lasts the stages run in this process and event loop; it can begin flows and ask,
        too. At its end what is being handled is finished, 30 seconds at most, and the rest goes back.

        Raises: as `connected`; what the lifespan raises; DatabaseUnavailable if the database is not there
        """
        async with self._while_running(with_stages=True):
            yield self

    @asynccontextmanager
    async def _while_running(self, *, with_stages: bool) -> AsyncIterator[None]:
        running = ServiceRun(self, self.plans(), broker=self.broker, database=self.database, events=self.events)
        async with self.bound_to(running):
            if with_stages:
                await running.prepare()
            await running.connect()
            if with_stages:
                await running.start()
            else:
                await running.start_without_stages()
            yield

    @asynccontextmanager
    async def bound_to(self, running: ServiceRun) -> AsyncIterator[None]:
        """What this service begins and asks goes through `running`, which is stopped at the end; for tests.

        Raises: LocalProtocolError if it runs already
        """
        if self.is_running:
            raise LocalProtocolError(f"{self.name} runs already in this process")
        self._current_run = running
        try:
            yield
        finally:
            try:
                await _stop(running)
            finally:
                self._current_run = None

    @property
    def is_running(self) -> bool:
        """In this process: a child that was forked has neither the connection nor the event loop of its parent."""
        return self._current_run is not None and self._current_run.process_id == os.getpid()

    @property
    def _initiator(self) -> Initiator:
        if self._current_run is None:
            raise LocalProtocolError(f"{self.name} is not connected: async with {self.name}.connected()")
        if not self.is_running:
            raise LocalProtocolError(
                f"{self.name} was connected before this process was forked: each process connects itself, with "
                f"async with {self.name}.connected()"
            )
        return self._current_run.initiator

    def plans(self, *, has_database: bool | None = None, overrides: Overrides | None = None) -> DependencyPlans:
        """What its stages are given, once all is defined; a test may have another database, and other factories.

        Raises: ConfigurationError if something is missing or wrong
        """
        self.check()
        if has_database is None:
            has_database = self.database is not None
        return DependencyPlans(self, has_database=has_database, overrides=overrides)

    # ---- Beginning flows ----

    @overload
    def initiate(self, *, timeout: float = TIMEOUT_S) -> InitiationContext: ...

    @overload
    def initiate(self, session: Session | AsyncSession, *, key: str | None = None) -> OutboxInitiationContext: ...

    def initiate(
        self, session: Session | AsyncSession | None = None, *, key: str | None = None, timeout: float = TIMEOUT_S
    ) -> InitiationContext | OutboxInitiationContext:
        """`async with app.initiate() as initiation:` begins flows, all or none, in one transaction that commits at
        the end of the block, by itself, in a stage too. In a function that is not async, and not in the event loop,
        `with` does the same.

        With the `session` of a transaction of the program's own, in the service's database, the flows begin when that
        is committed, and never if it is rolled back; the broker need not be there, nor this process be connected
        (docs/stages-outbox.md). For 7 days all calls with the same `key` begin them once; the key is asked for when the
        block begins.

        Raises: LocalProtocolError if the service is not connected; ClosedError in another event loop than that in which
        it was connected; ValueError if `timeout` is not more than 0. At the
        end of the block: RolledBack if nothing was sent, InDoubt if that is not known after `timeout` seconds. With a
        session: ConfigurationError if nothing of the service happens once, so that nobody would send it, if the
        tables are missing, or the session commits each statement by itself; FlowError if it is too much, or something
        else was begun under its key; what SQLAlchemy raises
        """
        if session is None:
            if key is not None:
                raise FlowError("a key is remembered by the database: initiate(session, key=...)")
            return InitiationContext(self._initiator, timeout)
        if timeout != TIMEOUT_S:
            raise FlowError("with a session nothing is waited for but its database: there is no timeout")
        if not self.has_outbox:
            raise ConfigurationError(
                f"nobody would send what {self.name} begins in a transaction of its own: say "
                f'Service("{self.name}", ..., exactly_once=True), or exactly_once of a stage'
            )
        from truenext.stage.sql import SessionOutbox

        return OutboxInitiationContext(
            self, InterceptorChain(self.interceptors), SessionOutbox(session), key, self._wake_relay
        )

    def _wake_relay(self) -> None:
        """That of this process, from any thread; if it has none, that of another looks within a second."""
        running = self._current_run if self.is_running else None
        if running is not None:
            with suppress(RuntimeError):
                # Its loop may just end.
                running.context.loop.call_soon_threadsafe(running.wake_relay)

    # These four are no async functions themselves: a stage that cannot await them is refused when it calls them.

    def send(
        self,
        to: Endpoint[M, Any],
        message: M,
        *,
        trace: str,
        timeout: float = TIMEOUT_S,
        **options: Unpack[FlowOptions],
    ) -> Coroutine[Any, Any, str]:
        """Begin one flow, and return its id once the broker has it as safe as it will be. To be awaited. As
        `Initiation.send`.

        Raises: as `initiate`; FlowError
        """
        check_can_await(f"{self.name}.send", _SEND_INSTEAD)
        return self._send(to, message, trace, timeout, options)

    async def _send(self, to: Endpoint[M, Any], message: M, trace: str, timeout: float, options: FlowOptions) -> str:
        async with self.initiate(timeout=timeout) as initiation:
            return initiation.send(to, message, trace=trace, **options)

    def publish(
        self, to: Topic[M], message: M, *, trace: str, timeout: float = TIMEOUT_S, **options: Unpack[FlowOptions]
    ) -> Coroutine[Any, Any, str]:
        """Begin a flow with each subscriber of a topic; as `send`."""
        check_can_await(f"{self.name}.publish", _SEND_INSTEAD)
        return self._publish(to, message, trace, timeout, options)

    async def _publish(self, to: Topic[M], message: M, trace: str, timeout: float, options: FlowOptions) -> str:
        async with self.initiate(timeout=timeout) as initiation:
            return initiation.publish(to, message, trace=trace, **options)

    def ask(
        self, to: Endpoint[M, R], message: M, *, trace: str, timeout: float = TIMEOUT_S, **options: Unpack[FlowOptions]
    ) -> Coroutine[Any, Any, R]:
        """Begin a flow, and return its reply when it comes. To be awaited.

        Raises: TimeoutError if none comes within `timeout` seconds: the flow goes on all the same; NotDecoded if what
        comes is none; FlowError, also if a stage asks its own endpoint; as `initiate`
        """
        check_can_await(f"{self.name}.ask", "request the endpoint with the flow: the reply comes to the next stage")
        return self._ask(to, message, trace, timeout, options)

    async def _ask(self, to: Endpoint[M, R], message: M, trace: str, timeout: float, options: FlowOptions) -> R:
        check_endpoint(to)
        check_not_own_endpoint(to, self.stages)
        return cast("R", await self._initiator.ask(to, message, trace, timeout, options))

    def outcome(self, doubt: InDoubt | str, *, timeout: float = TIMEOUT_S) -> Coroutine[Any, Any, str]:
        """Return what became of an initiation that was in doubt, by its error or the token of that: "committed",
        "rolled back" or "unknown". What has not happened by now never will. To be awaited.

        Raises: TimeoutError, ConnectionLost
        """
        check_can_await(f"{self.name}.outcome", "ask in an async stage")
        return self._resolve(doubt, timeout)

    async def _resolve(self, doubt: InDoubt | str, timeout: float) -> str:
        return await self._initiator.outcome(doubt, timeout)


_SEND_INSTEAD: Final = (
    "say it with the flow, which sends when the stage has returned, or in a block "
    "`with service.initiate() as initiation:`, "
    "which sends at its end"
)


async def _stop(running: ServiceRun) -> None:
    """However often it is cancelled, all is closed: from then on at once. Raises: CancelledError, at its end"""
    timeout = STOP_TIMEOUT_S
    cancellation: asyncio.CancelledError | None = None
    while True:
        try:
            await running.stop(timeout)
            break
        except asyncio.CancelledError as error:
            cancellation, timeout = error, 0.0
    if cancellation is not None:
        raise cancellation
