"""Service: endpoints that a program defines, runs, and uses to start flows and to ask.

    app = Service("shop", broker="stomp://127.0.0.1:61613", database="postgresql+psycopg:///shop")
    place = app.endpoint("order.place", Order, Placed, state=Memo)

    @place.stage
    async def check(order: Order, memo: Memo, flow: Flow) -> None: ...

`truenext stages run shop:app` runs its stages. `async with app.connected():` is for a program that only starts flows
and asks, such as a web server.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack, cast, overload

from truenext.errors import ConfigurationError, InDoubt, LocalProtocolError
from truenext.stage.core.errors import FlowError
from truenext.stage.core.flow_start import FlowOptions, check_endpoint
from truenext.stage.definition import Definition
from truenext.stage.initiation_contexts import InitiationContext, OutboxInitiationContext
from truenext.stage.interceptors.chain import InterceptorChain
from truenext.stage.planning import DependencyPlans
from truenext.stage.service_run import STOP_TIMEOUT_S, RunResources, ServiceRun
from truenext.stage.user_code import check_can_await, check_not_own_endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from truenext.stage.core.definitions import Endpoint, Topic
    from truenext.stage.dependencies.depends import Overrides
    from truenext.stage.initiator import Initiator

M = TypeVar("M")
R = TypeVar("R")

TIMEOUT_S = 60.0


class Service(Definition):
    """Definition of a service, with methods that run its stages, start flows, and ask endpoints."""

    _current_run: ServiceRun | None = None

    # ---- Running ----

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Self]:
        """Connect this process for the duration of the block, which can start flows and ask. The stages do not run.
        The process also sends the units of the outbox, if the service has one but no exactly-once stage.

        Raises: ConfigurationError, DefinitionError; ConnectionLost without a broker; Refused; DatabaseUnavailable if
        the process sends units and the database is not available
        """
        async with self._while_running(with_stages=False):
            yield self

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Run the stages in this process and event loop for the duration of the block, which can also start flows
        and ask. At the end, running stages may finish within 30 seconds; all other messages are released.

        Raises: as `connected`; errors of the lifespan; DatabaseUnavailable
        """
        async with self._while_running(with_stages=True):
            yield self

    @asynccontextmanager
    async def _while_running(self, *, with_stages: bool) -> AsyncIterator[None]:
        running = ServiceRun(self, self.plans(), RunResources.of(self))
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
        """Start flows and ask through `running` for the duration of the block, and then stop `running`.

        Raises: LocalProtocolError if the service runs already
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
        """Whether the service runs in this process: a forked child has no connection or event loop of its parent."""
        return self._current_run is not None and self._current_run.process_id == os.getpid()

    @property
    def _initiator(self) -> Initiator:
        if self._current_run is None:
            raise LocalProtocolError(f"{self.name} is not connected: use async with {self.name}.connected()")
        if not self.is_running:
            raise LocalProtocolError(
                f"{self.name} was connected before this process was forked: connect in each process, with "
                f"async with {self.name}.connected()"
            )
        return self._current_run.initiator

    def plans(self, *, has_database: bool | None = None, overrides: Overrides | None = None) -> DependencyPlans:
        """Return the dependencies of all stages. A test may have another database, and other factories.

        Raises: ConfigurationError if a definition is missing or wrong
        """
        self.check()
        if has_database is None:
            has_database = self.database is not None
        return DependencyPlans(self, has_database=has_database, overrides=overrides)

    # ---- Starting flows ----

    @overload
    def initiate(self, *, timeout: float = TIMEOUT_S) -> InitiationContext: ...

    @overload
    def initiate(self, session: Session | AsyncSession, *, key: str | None = None) -> OutboxInitiationContext: ...

    def initiate(
        self, session: Session | AsyncSession | None = None, *, key: str | None = None, timeout: float = TIMEOUT_S
    ) -> InitiationContext | OutboxInitiationContext:
        """Start flows, all or none, with `async with app.initiate() as initiation:`; `initiation` is an `Initiation`.
        They are sent in one transaction, which commits at the end of the block, independently of a stage's transaction.
        In a function that is not async, outside of the event loop, `with` does the same.

        Args:
            session: Open transaction of the program in the service's database. The flows start when that transaction
                commits, and never if it is rolled back; neither a broker nor a connection of this process is necessary
                (docs/stages-database.md). The block is `async with` for an AsyncSession, `with` for a Session.
            key: Text that names the initiation, such as the number of an order; needs `session`. For 7 days all calls
                with the same key start the flows once; the block queries the key at its beginning.
            timeout: Seconds, more than 0, for the whole transaction: for a broker that is not available, and for the
                commit. Not with `session`.

        Raises: LocalProtocolError if the service is not connected; ClosedError in another event loop than the
        service's; ValueError if `timeout` is not more than 0. At the end of the block: RolledBack if nothing was
        sent, InDoubt if that is not known after `timeout` seconds. With a session: ConfigurationError if the service
        has no exactly-once processing, and so no process that sends the flows, if tables are missing, or if the
        session commits each statement by itself; FlowError if the flows are too large, or others were started under
        the key; errors of SQLAlchemy
        """
        if session is None:
            if key is not None:
                raise FlowError("a key needs a session, as the database stores it: initiate(session, key=...)")
            return InitiationContext(self._initiator, timeout)
        if timeout != TIMEOUT_S:
            raise FlowError("initiate with a session has no timeout, as it does not wait for the broker")
        if not self.has_outbox:
            raise ConfigurationError(
                f"{self.name} has no outbox, so flows that begin in a database transaction would not be sent: use "
                f'Service("{self.name}", ..., exactly_once=True), or exactly_once of a stage'
            )
        from truenext.stage.sql import SessionOutbox

        return OutboxInitiationContext(
            self, InterceptorChain(self.interceptors), SessionOutbox(session), key, self._wake_relay
        )

    def _wake_relay(self) -> None:
        """Wake the relay of this process, from any thread. Without one, another process polls within a second."""
        running = self._current_run if self.is_running else None
        if running is not None:
            with suppress(RuntimeError):
                # The event loop may just have closed.
                running.context.loop.call_soon_threadsafe(running.wake_relay)

    # These four are not async functions, so that a stage that cannot await them is refused at the call.

    def send(
        self,
        to: Endpoint[M, Any],
        message: M,
        *,
        trace: str,
        timeout: float = TIMEOUT_S,
        **options: Unpack[FlowOptions],
    ) -> Coroutine[Any, Any, str]:
        """Start one flow, and return its id once the broker has committed it. Await the call.

        Args:
            to: Endpoint that handles the flow first.
            message: Message of the type that the endpoint takes.
            trace: Name of the flow for people, such as the number of an order; not empty.
            timeout: Seconds, more than 0, as in `initiate`.
            **options: Options of the flow: `FlowOptions`.

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
        """Start a flow with each connected subscriber of a topic, and return the id that they share. Await the call.

        Args:
            to: Topic.
            message: Message of the type that the topic takes.
            trace: Name of the flow for people; not empty.
            timeout: Seconds, more than 0, as in `initiate`.
            **options: Options of the flow: `FlowOptions`.

        Raises: as `send`
        """
        check_can_await(f"{self.name}.publish", _SEND_INSTEAD)
        return self._publish(to, message, trace, timeout, options)

    async def _publish(self, to: Topic[M], message: M, trace: str, timeout: float, options: FlowOptions) -> str:
        async with self.initiate(timeout=timeout) as initiation:
            return initiation.publish(to, message, trace=trace, **options)

    def ask(
        self, to: Endpoint[M, R], message: M, *, trace: str, timeout: float = TIMEOUT_S, **options: Unpack[FlowOptions]
    ) -> Coroutine[Any, Any, R]:
        """Start a flow, and return its reply. Await the call. A stage that uses `ask` holds its worker while it waits;
        `Flow.request` holds none.

        Args:
            to: Endpoint with a reply.
            message: Message of the type that the endpoint takes.
            trace: Name of the flow for people; not empty.
            timeout: Seconds, more than 0, for all of it: for a broker that is not available, for the commit, and for
                the reply.
            **options: Options of the flow: `FlowOptions`.

        Raises: TimeoutError without a reply in `timeout` seconds, while the flow goes on; NotDecoded if the reply
        cannot be decoded; FlowError, also if a stage asks its own endpoint; as `initiate`
        """
        check_can_await(f"{self.name}.ask", "request the endpoint with the flow: the reply comes to the next stage")
        return self._ask(to, message, trace, timeout, options)

    async def _ask(self, to: Endpoint[M, R], message: M, trace: str, timeout: float, options: FlowOptions) -> R:
        check_endpoint(to)
        check_not_own_endpoint(to, self.stages)
        return cast("R", await self._initiator.ask(to, message, trace, timeout, options))

    def outcome(self, doubt: InDoubt | str, *, timeout: float = TIMEOUT_S) -> Coroutine[Any, Any, str]:
        """Return the outcome of an initiation in doubt: "committed", "rolled back" or "unknown". An initiation that has
        not happened by then never does. The broker remembers outcomes for a week. Await the call.

        Args:
            doubt: The InDoubt error, or its token; any process of the service may ask.
            timeout: Seconds, more than 0, to wait for the broker.

        Raises: TimeoutError, ConnectionLost
        """
        check_can_await(f"{self.name}.outcome", "call it in an async stage")
        return self._resolve(doubt, timeout)

    async def _resolve(self, doubt: InDoubt | str, timeout: float) -> str:
        return await self._initiator.outcome(doubt, timeout)


_SEND_INSTEAD: Final = (
    "use the flow, which sends when the stage has returned, or a block "
    "`with service.initiate() as initiation:`, "
    "which sends at its end"
)


async def _stop(running: ServiceRun) -> None:
    """Stop the run completely; a cancellation only ends the wait for stages. Raises: CancelledError, at the end"""
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
