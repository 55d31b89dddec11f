"""Service: definition of endpoints and stages, with methods that run the stages, start flows, and ask endpoints.

    app = Service("shop", broker="stomp://127.0.0.1:61613", database="postgresql+psycopg:///shop")
    place = app.endpoint("order.place", Order, Placed, state=Memo)

    @place.stage
    async def check(order: Order, memo: Memo, flow: Flow) -> None: ...

`truenext stages run shop:app` runs the stages. A program that only starts flows and asks, such as a web server, uses
`async with app.connected():`.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack, cast, overload

from truenext.errors import ConfigurationError, InDoubt, LocalProtocolError
from truenext.model.service_health import ServiceHealth, ServiceStatus
from truenext.stage.core.errors import FlowError
from truenext.stage.core.flow_start import FlowOptions, check_endpoint
from truenext.stage.core.health import STALLED_AFTER_S, assess_health
from truenext.stage.definition import Definition
from truenext.stage.initiation_contexts import InitiationContext, OutboxInitiationContext, checked_key_id
from truenext.stage.initiator import EXPIRY_GRACE_S, checked_timeout
from truenext.stage.planning import DependencyPlans
from truenext.stage.service_run import CONNECT_TIMEOUT_S, STOP_TIMEOUT_S, RunResources, ServiceRun
from truenext.stage.user_code import check_can_await, check_not_own_endpoint, running_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from truenext.stage.core.definitions import Endpoint, Topic
    from truenext.stage.dependencies.depends import Overrides
    from truenext.stage.kept_replies import KeptReplies

M = TypeVar("M")
R = TypeVar("R")

TIMEOUT_S = 60.0


class Service(Definition):
    """Definition of a service, with methods that run its stages, start flows, and ask endpoints."""

    _current_run: ServiceRun | None = None

    # ---- Running ----

    @asynccontextmanager
    async def connected(self, *, wait: bool = True) -> AsyncIterator[Self]:
        """Connect this process to the broker for the duration of the block. In the block the process can start flows
        and ask, and runs no stages. If the service is defined with `exactly_once`, but no stage has exactly-once
        processing, the process also sends the units of the outbox.

        Args:
            wait: True to begin the block when the broker has accepted the login, within 10 seconds. False to begin it
                at once, and to connect in the background: then `initiate(session)` works without a broker, other
                calls wait for it within their timeouts, and each call raises Refused if the broker refuses the login.
                `health` tells whether the process is connected.

        Raises: ConfigurationError or DefinitionError if the definition is incomplete or wrong, or a file of the
        credentials cannot be used. With `wait`: ConnectionLost if no broker is available; Refused if the broker refuses
        the login; DatabaseUnavailable if the process sends units and the database is not available
        """
        async with self._bound_run() as running:
            await running.connect(timeout=CONNECT_TIMEOUT_S if wait else None)
            await running.start_without_stages()
            yield self

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Run the stages in this process and event loop for the duration of the block. In the block the process can
        also start flows and ask. At the end of the block, running stages may finish within 30 seconds, and all other
        messages are released.

        Raises: ConfigurationError or DefinitionError if the definition is incomplete or wrong; ConnectionLost if no
        broker is available; Refused if the broker refuses the login; DatabaseUnavailable if the database is not
        available; errors of the lifespan
        """
        async with self._bound_run() as running:
            await running.prepare()
            await running.connect()
            await running.start()
            yield self

    @asynccontextmanager
    async def _bound_run(self) -> AsyncIterator[ServiceRun]:
        running = ServiceRun(self, self.plans(), RunResources.of(self))
        async with self.bound_to(running):
            yield running

    @asynccontextmanager
    async def bound_to(self, running: ServiceRun) -> AsyncIterator[None]:
        """Let the service start flows and send requests through `running` during the block. Stop `running` at its end.

        Raises: LocalProtocolError if the service runs already in this process
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

    def health(self, *, stalled_after: float = STALLED_AFTER_S) -> ServiceHealth:
        """Return whether this process is live and ready, and why not. `truenext stages run --health` serves this
        result. A web application can serve it under its own addresses. A thread may call this, and waits until the
        service's event loop has answered.

        Args:
            stalled_after: Seconds after which a stage is not live if it has messages and completes none.

        Raises: LocalProtocolError if the service is not connected
        """
        running = self._run_here
        loop = running.context.loop
        if running_loop() is loop:
            status = running.status()
        else:

            async def read_status() -> ServiceStatus:
                return running.status()

            status = asyncio.run_coroutine_threadsafe(read_status(), loop).result()
        return assess_health(status, stalled_after)

    @property
    def is_running(self) -> bool:
        """Whether the service runs in this process. After a fork, it does not run in the child process."""
        return self._current_run is not None and self._current_run.process_id == os.getpid()

    @property
    def _run_here(self) -> ServiceRun:
        """Run of the service in this process. Raises: LocalProtocolError if the service is not connected"""
        if self._current_run is None:
            raise LocalProtocolError(f"{self.name} is not connected: use async with {self.name}.connected()")
        if not self.is_running:
            raise LocalProtocolError(
                f"{self.name} was connected before this process was forked: connect in each process: "
                f"async with {self.name}.connected()"
            )
        return self._current_run

    def plans(self, *, has_database: bool | None = None, overrides: Overrides | None = None) -> DependencyPlans:
        """Return the dependencies of all stages. For tests, `has_database` and `overrides` replace the database setting
        and factories.

        Raises: DefinitionError or ConfigurationError if a definition is incomplete or wrong
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
        """Start flows with `async with app.initiate() as initiation:`; `initiation` is an `Initiation`. All flows are
        sent, or none: they are one transaction of the broker, which commits at the end of the block. It is independent
        of a stage's transaction. A function that is not async, and does not run in the event loop, uses `with`.

        Args:
            session: Open transaction of the program in the service's database. The flows start when that transaction
                commits, and never if it is rolled back. This needs no broker and no connection of this process
                (docs/stages-database.md). The block is `async with` for an AsyncSession, `with` for a Session.
            key: Text that names the initiation, such as the number of an order; needs `session`. For 7 days, all calls
                with the same key start the flows only once. The block reads the key from the database at its beginning.
            timeout: Seconds, more than 0, for the whole transaction, including the wait for an unavailable broker and
                the commit. Cannot be combined with `session`.

        Raises: LocalProtocolError if the service is not connected; ClosedError in another event loop than the
        service's; ValueError if `timeout` is not more than 0. At the end of the block: RolledBack if no flow was sent;
        InDoubt if the client could not find out within `timeout` seconds whether the flows were sent. With a session:
        ConfigurationError if the service has no exactly-once processing, if tables are missing, or if the session
        commits each statement by itself; FlowError if the flows are too large, or other flows were started under the
        key; errors of SQLAlchemy
        """
        if session is None:
            if key is not None:
                raise FlowError("a key needs a session, as the database stores it: initiate(session, key=...)")
            return InitiationContext(self._run_here.initiator, timeout)
        if timeout != TIMEOUT_S:
            raise FlowError("initiate with a session has no timeout, as it does not wait for the broker")
        if not self.has_outbox:
            raise ConfigurationError(
                f"{self.name} has no outbox, so flows that begin in a database transaction would not be sent: use "
                f'Service("{self.name}", ..., exactly_once=True), or exactly_once of a stage'
            )
        from truenext.stage.sql import SessionOutbox

        chain, transaction = self.interceptor_chain(), SessionOutbox(session)
        key_id = None if key is None else checked_key_id(self.name, key)
        return OutboxInitiationContext(self, chain, transaction, key_id, self._wake_relay)

    def _wake_relay(self) -> None:
        """Wake the relay of this process, from any thread. If this process has no relay, the relay of another process
        finds the flows within a second."""
        running = self._current_run if self.is_running else None
        if running is not None:
            with suppress(RuntimeError):
                # The event loop may just have closed.
                running.context.loop.call_soon_threadsafe(running.wake_relay)

    # The following public methods are not async functions, so that the call itself fails in a stage that cannot await.

    def send(
        self,
        to: Endpoint[M, Any],
        message: M,
        *,
        trace: str,
        timeout: float = TIMEOUT_S,
        **options: Unpack[FlowOptions],
    ) -> Coroutine[Any, Any, str]:
        """Start one flow, and return its id after the broker has committed the first message. Await the call.

        Args:
            to: Endpoint that handles the flow first.
            message: Message of the type that the endpoint takes.
            trace: Human-readable name of the flow, such as the number of an order. It must not be empty.
            timeout: Seconds, more than 0, for the whole call, including the wait for an unavailable broker.
            **options: Options of the flow (`FlowOptions`).

        Raises: RolledBack if the message was not sent; InDoubt if the client could not find out within `timeout`
        seconds whether it was sent; FlowError if an argument or the message is invalid; LocalProtocolError if the
        service is not connected; ClosedError in another event loop than the service's; ValueError if `timeout` is not
        more than 0
        """
        check_can_await(f"{self.name}.send", _SEND_INSTEAD)
        return self._send(to, message, trace, timeout, options)

    async def _send(self, to: Endpoint[M, Any], message: M, trace: str, timeout: float, options: FlowOptions) -> str:
        async with self.initiate(timeout=timeout) as initiation:
            return initiation.send(to, message, trace=trace, **options)

    def publish(
        self, to: Topic[M], message: M, *, trace: str, timeout: float = TIMEOUT_S, **options: Unpack[FlowOptions]
    ) -> Coroutine[Any, Any, str]:
        """Start a flow with each connected subscriber of a topic, and return the id that these flows share. Await the
        call.

        Args:
            to: Topic to which the message is published.
            message: Message of the type that the topic takes.
            trace: Human-readable name of the flow. It must not be empty.
            timeout: Seconds, more than 0, for the whole call, including the wait for an unavailable broker.
            **options: Options of the flow (`FlowOptions`).

        Raises: the errors of `send`
        """
        check_can_await(f"{self.name}.publish", _SEND_INSTEAD)
        return self._publish(to, message, trace, timeout, options)

    async def _publish(self, to: Topic[M], message: M, trace: str, timeout: float, options: FlowOptions) -> str:
        async with self.initiate(timeout=timeout) as initiation:
            return initiation.publish(to, message, trace=trace, **options)

    def ask(
        self,
        to: Endpoint[M, R],
        message: M,
        *,
        trace: str,
        timeout: float = TIMEOUT_S,
        key: str | None = None,
        **options: Unpack[FlowOptions],
    ) -> Coroutine[Any, Any, R]:
        """Start a flow, wait for its reply, and return the reply. Await the call. A stage that uses `ask` occupies its
        worker until the reply comes. `Flow.request` occupies no worker.

        Args:
            to: Endpoint that replies.
            message: Message of the type that the endpoint takes.
            trace: Human-readable name of the flow. It must not be empty.
            timeout: Seconds, more than 0, for the whole call: for the wait for an unavailable broker, the commit and
                the reply. The call waits no longer than the flow's `ttl`.
            key: Text that names the flow, such as the number of an order. For 7 days, all calls with the same key, in
                any process, start the flow only once, and return the same reply (docs/stages-database.md). It needs a
                database and exactly-once processing. None starts a flow with each call.
            **options: Options of the flow (`FlowOptions`).

        Raises: FlowFailed if the flow has failed; TimeoutError if no reply comes within `timeout` seconds (the flow
        continues); NotDecoded if the reply is not of the endpoint's type; FlowError if an argument is invalid, a
        stage asks its own endpoint, or another flow was started under the key; also the errors of `send`. With a key:
        no InDoubt, but DatabaseUnavailable, after which the flow may have started: call again
        """
        for name in ("delay", "at"):
            if key is None and name in options:
                raise FlowError(
                    f"ask waits for the reply, so {name} needs a key: use ask(key=...), or send with reply_to"
                )
        check_can_await(f"{self.name}.ask", "request the endpoint with the flow: the reply comes to the next stage")
        if key is None:
            return self._ask(to, message, trace, timeout, options)
        return self._ask_kept(to, message, trace, timeout, options, key)

    async def _ask(self, to: Endpoint[M, R], message: M, trace: str, timeout: float, options: FlowOptions) -> R:
        check_endpoint(to)
        check_not_own_endpoint(to, self.stages)
        return cast("R", await self._run_here.initiator.ask(to, message, trace, timeout, options))

    async def _ask_kept(
        self, to: Endpoint[M, R], message: M, trace: str, timeout: float, options: FlowOptions, key: str
    ) -> R:
        check_endpoint(to)
        check_not_own_endpoint(to, self.stages)
        self._run_here.initiator.check_loop()
        id, kept = checked_key_id(self.name, key), self._kept_replies
        deadline = asyncio.get_running_loop().time() + checked_timeout(timeout)

        async def start(session: AsyncSession) -> None:
            async with self.initiate(session, key=key) as initiation:
                initiation.send(to, message, trace=trace, keep_reply=True, **options)

        try:
            async with asyncio.timeout_at(deadline):
                await kept.run_in_transaction(start)
        except TimeoutError:
            raise TimeoutError(
                f"the database of {self.name} has not answered within {timeout:g} s; the flow may have started: "
                "ask again with the same key"
            ) from None
        ttl = options.get("ttl")
        if ttl is not None and not options.keys() & {"delay", "at"}:
            deadline = min(deadline, asyncio.get_running_loop().time() + ttl + EXPIRY_GRACE_S)
        return cast("R", await kept.wait(to, key, id, deadline))

    def reply(self, to: Endpoint[Any, R], *, key: str, timeout: float = TIMEOUT_S) -> Coroutine[Any, Any, R]:
        """Wait for the reply of a flow that `ask(key=...)` or `keep_reply` has started, and return it. Any process of
        the service may call this, any number of times, within 7 days. Await the call.

        Args:
            to: Endpoint that the flow has asked.
            key: Key under which the flow was started.
            timeout: Seconds to wait for the reply. With 0, the row is read once.

        Raises: FlowFailed if the flow has failed; TimeoutError if there is no reply within `timeout` seconds; FlowError
        if no flow was started under the key, or it has asked another endpoint; NotDecoded if the reply is not of the
        endpoint's type; OutboxUnusable if the table of replies is missing; DatabaseUnavailable; LocalProtocolError if
        the service is not connected; ClosedError in another event loop than the service's
        """
        check_can_await(f"{self.name}.reply", "request the endpoint with the flow: the reply comes to the next stage")
        return self._reply(to, key, timeout)

    async def _reply(self, to: Endpoint[Any, R], key: str, timeout: float) -> R:
        check_endpoint(to)
        if to.replies is None:
            raise FlowError(f"{to.name} replies nothing, so there is no reply to wait for")
        self._run_here.initiator.check_loop()
        id, kept = checked_key_id(self.name, key), self._kept_replies
        wait_s = 0.0 if timeout == 0 else checked_timeout(timeout)
        return cast("R", await kept.wait(to, key, id, asyncio.get_running_loop().time() + wait_s))

    @property
    def _kept_replies(self) -> KeptReplies:
        run = self._current_run
        assert run is not None, "its initiator was used"
        return run.kept_replies

    def outcome(self, doubt: InDoubt | str, *, timeout: float = TIMEOUT_S) -> Coroutine[Any, Any, str]:
        """Return the outcome of an initiation in doubt: "committed", "rolled back" or "unknown". If the initiation is
        not committed when the broker answers, it never will be. The broker remembers outcomes for a week. Await the
        call.

        Args:
            doubt: The InDoubt error, or its token. Any process of the service may call this with the token.
            timeout: Seconds, more than 0, to wait for the broker.

        Raises: TimeoutError or ConnectionLost if the broker has not answered; ValueError if the text is not a token
        """
        check_can_await(f"{self.name}.outcome", "call it in an async stage")
        return self._resolve(doubt, timeout)

    async def _resolve(self, doubt: InDoubt | str, timeout: float) -> str:
        return await self._run_here.initiator.outcome(doubt, timeout)


_SEND_INSTEAD: Final = (
    "use the flow, which sends when the stage has returned, or a block "
    "`with service.initiate() as initiation:`, "
    "which sends at its end"
)


async def _stop(running: ServiceRun) -> None:
    """Stop the run completely. A cancellation ends only the wait for running stages, not the rest of the stop.

    Raises: CancelledError after the stop, if this call was cancelled
    """
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
