"""Run of a service in one process: start, status and stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import msgspec

from truenext.client.core.client import ConnectOptions
from truenext.client.core.credentials import CREDENTIAL_FILES, NO_CREDENTIALS, Credentials
from truenext.client.password_file import absolute_paths
from truenext.client.tasks.connection import connect_with_options
from truenext.errors import ConfigurationError, LocalProtocolError, TruenextError
from truenext.model.grants import Right, User, parse_pattern
from truenext.model.process_report import STAGES_TOPIC
from truenext.model.service_health import ServiceState, ServiceStatus
from truenext.model.url import parse_url
from truenext.stage.consumption import StageConsumer
from truenext.stage.context import ServiceContext
from truenext.stage.core.errors import FlowError
from truenext.stage.core.health import DATABASE_AVAILABLE, STALLED_AFTER_S
from truenext.stage.events import StageEvents
from truenext.stage.gate import DatabaseGate
from truenext.stage.initiator import Initiator
from truenext.stage.introspection.grants import missing_grants, needed_grants
from truenext.stage.kept_replies import KeptReplies
from truenext.stage.outbox.exactly_once import ExactlyOnceProcessing
from truenext.stage.pool import PriorityPool
from truenext.stage.reporter import Reporter
from truenext.stage.responder import Responder
from truenext.stage.sql.errors import DatabaseUnavailable
from truenext.stage.user_code import cancel_all
from truenext.stage.user_grants import request_user

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from truenext.client.tasks.connection import Connection
    from truenext.stage.definition import Definition
    from truenext.stage.planning import DependencyPlans
    from truenext.stage.sql.outbox_table import Outbox
    from truenext.stage.sql.reply_table import ReplyStore
    from truenext.stage.sql.work import AsyncSqlWork

_logger = logging.getLogger("truenext.stage")

STOP_TIMEOUT_S = 30.0
"""Seconds in which running stages may finish when the service stops."""
CONNECT_TIMEOUT_S = 10.0
"""Seconds in which a connection must be made, unless the run waits for its broker without limit."""
FOR_EVER_S = 1e9
OPEN_PAUSE_S, OPEN_PAUSE_MAX_S = 1.0, 60.0
"""Seconds between attempts to open the outbox. In a run without stages, each further pause is twice as long, up to the
second value."""
POLL_S = 0.005
"""Seconds between two checks whether all subscriptions exist."""
CANCEL_TIMEOUT_S = 1.0
"""Seconds that a stop waits for handlers of messages after it has cancelled them."""


class RunResources(msgspec.Struct, frozen=True):
    """Broker, database and folder for events that one run of a service uses."""

    broker: Sequence[str]
    database: str | None
    credentials: Credentials = NO_CREDENTIALS
    events: Path | None = None

    @classmethod
    def of(cls, definition: Definition) -> RunResources:
        return cls(definition.broker, definition.database, definition.credentials, definition.events)


@dataclass(eq=False)
class ServiceRun:
    """One run of a service in one process and event loop."""

    _definition: Definition
    _plans: DependencyPlans
    _resources: RunResources
    _: KW_ONLY
    waits: bool = False
    """True: the run waits without limit for a broker and a database that are not available yet."""
    creates_tables: bool = False
    """True, for tests: the run creates missing tables of exactly-once processing."""
    stalled_after_s: float = STALLED_AFTER_S
    """Seconds after which a stage is not live in reports if it has messages and completes none."""

    def __post_init__(self) -> None:
        """Create a run. Then call `prepare`, `connect` and `start` to run the stages, or `connect` and
        `start_without_stages`."""
        self.process_id = os.getpid()
        self.context = ServiceContext(self._definition, self._plans)
        self.stage_consumers: list[StageConsumer] = []
        self.exactly_once: ExactlyOnceProcessing | None = None
        """Exactly-once processing of this process; None before the outbox is open."""
        self._runs_no_stages = False
        self._relay_opening: asyncio.Task[None] | None = None
        """Task that opens the outbox after a program in this process has started the first flow in a database
        transaction."""
        self._outbox_fault = ""
        """Reason why the last attempt to open the outbox has failed, in a service whose outbox no other process sends;
        empty if no attempt has failed, or the outbox is open."""
        self._responder: Responder | None = None
        """Sender of this process's reports; None before the stages run."""
        self._policy_refresh: asyncio.Task[None] | None = None
        """Task that requests the policies of the stages' queues."""
        self._state: ServiceState = "waiting for the broker"
        self._pools: list[PriorityPool] = []
        self._connects_in_background = False
        self._initiator: Initiator | None = None
        self._kept_replies: KeptReplies | None = None
        self._database_lock = asyncio.Lock()
        self._stack = AsyncExitStack()

    # ---- Start ----

    async def prepare(self) -> None:
        """Open the database, check the tables of the outbox, and open the folder of events. Call this before `connect`,
        so that these errors are found even if no broker is available.

        Raises: ConfigurationError if tables are missing or the folder cannot be written to; DatabaseUnavailable
        """
        stages = self._definition.stages.values()
        if any(map(self._plans.uses_database, stages)) or self._definition.has_outbox:
            self._state = "waiting for the database"
            await self._open_database()
        if self._definition.has_outbox:
            await self._retry_until_reachable(self._check_outbox)
        folder = self._resources.events
        if folder is not None:
            self.context.events = StageEvents(folder, self.context.service, self.context.instance)
        self._state = "waiting for the broker"

    async def connect(self, *, timeout: float | None = CONNECT_TIMEOUT_S) -> None:
        """Connect both pools, each within `timeout` seconds. A run that waits until its broker is available has no such
        limit. With a `timeout` of None the pools connect in the background.

        Raises: ConfigurationError if a URL, a password file or a certificate file is invalid; ConnectionLost if no
        broker is available; Refused if the broker refuses the login
        """
        self._connects_in_background = timeout is None
        plain = [stage for stage in self._definition.stages.values() if not stage.signature.is_async]
        threads = sum(stage.settings.concurrency or 1 for stage in plain)
        for is_interactive in (True, False):
            connection = await connect_with_options(self._connect_options(), FOR_EVER_S if self.waits else timeout)
            self._pools.append(PriorityPool(connection, is_interactive=is_interactive, threads=threads))
        self._initiator = Initiator(self.context, *self._pools)
        self._kept_replies = KeptReplies(self.context.service, self.connection, self._open_reply_store)

    def _connect_options(self) -> ConnectOptions:
        credentials = self._resources.credentials
        # The program may change its folder before a reconnect.
        files = absolute_paths(**{name: getattr(credentials, name) for name in CREDENTIAL_FILES})
        return ConnectOptions(
            addresses=[parse_url(each) for each in self._resources.broker],
            credentials=replace(credentials, **files),
            heartbeat_thread=True,
        )

    async def start(self) -> None:
        """Run the stages, and send the units of the outbox. Call `prepare` and `connect` before.

        Raises: ConfigurationError if tables of the outbox are missing; DatabaseUnavailable; errors of the lifespan
        """
        stages, plans = self._definition.stages.values(), self._plans
        if self._definition.has_outbox:
            self._state = "waiting for the database"
            await self._retry_until_reachable(self._open_outbox)
        if plans.lifespan is not None:
            self.context.lifespan = await self._stack.enter_async_context(plans.lifespan.running())
        for stage in stages:
            # A published message goes to each process once, whatever its priority, so a subscriber has one consumer.
            for pool in self._pools if stage.endpoint.subscribed_topic is None else self._pools[:1]:
                exactly_once = self.exactly_once if stage.settings.exactly_once else None
                self.stage_consumers.append(StageConsumer(self.context, stage, pool, exactly_once))
        user = await self._find_user()
        self._warn_of_missing_grants(user)
        self._start_consumers(user)
        self._policy_refresh = self.context.loop.create_task(
            self.context.queue_policies.refresh_for_ever(self.connection), name="truenext queue policies"
        )
        await self._wait_until_subscribed()
        self._state = "running"
        self._start_responder()

    def _start_responder(self) -> None:
        """Answer requests for the report of this process. The interactive pool is not used, since no caller waits."""
        reporter = Reporter(self._definition, self.context, self.status, self.stalled_after_s, self.exactly_once)
        self._responder = Responder(self._pools[1].connection, reporter.make_report)
        self._responder.start()

    async def _find_user(self) -> User | None:
        """Return the user of this run, with its grants; None if the broker has no users, or does not answer, or the run
        has neither a user name nor a certificate."""
        credentials = self._resources.credentials
        if credentials.user is None and credentials.certificate is None:
            return None
        try:
            return await request_user(self.connection)
        except (TruenextError, TimeoutError) as error:
            _logger.warning("cannot check the grants of the user", extra={"error": str(error)})
            return None

    def _warn_of_missing_grants(self, user: User | None) -> None:
        """Log the grants that the user lacks."""
        if user is None:
            return
        definition = self._definition
        keeper = definition.name if self._keeps_replies else None
        needed = needed_grants(
            definition.endpoints.values(), definition.remotes.values(), definition.topics.values(), keeper
        )
        # The responder logs it if the user may not take from its topic: the service runs without that grant.
        needed[Right.TAKE].remove(parse_pattern(STAGES_TOPIC))
        missing = missing_grants(needed, user)
        if missing:
            facts = {right.value: [str(each) for each in patterns] for right, patterns in missing.items()}
            _logger.warning(
                "the user lacks grants that the service needs: add them with `truenext user grant`, and reload",
                extra={"service": definition.name, "user": user.name, **facts},
            )

    async def start_without_stages(self) -> None:
        """Send the units of the outbox, if the service is defined with `exactly_once`, but no stage has exactly-once
        processing. Otherwise the processes that run the stages send the units. If the pools connect in the background,
        the outbox is opened in the background, too.

        Raises: ConfigurationError if tables are missing; DatabaseUnavailable
        """
        self._runs_no_stages = True
        if self._definition.has_outbox and self._definition.only_initiates:
            if self._connects_in_background and self._resources.database is not None:
                self.wake_relay()
            else:
                await self._open_database()
                await self._open_outbox()
                # No other process of this service runs stages that would keep replies.
                self._start_consumers(await self._find_user())
        self._state = "running"

    @property
    def _keeps_replies(self) -> bool:
        return self.exactly_once is not None and self.exactly_once.keeps_replies

    def _start_consumers(self, user: User | None) -> None:
        """Start the consumers of the stages, and those of replies that are kept. If the table of replies is missing, or
        the user may not consume them, the service runs without kept replies."""
        stage = self._plans.replies_stage
        may_keep = stage is not None and (user is None or user.may(Right.TAKE, parse_pattern(stage.destination)))
        if stage is not None and may_keep and self._keeps_replies:
            self.stage_consumers += (StageConsumer(self.context, stage, pool, None) for pool in self._pools)
        for consumption in self.stage_consumers:
            consumption.start()

    async def _open_reply_store(self) -> ReplyStore:
        """Return the store of kept replies, whose database is opened on demand. Raises: DatabaseUnavailable"""
        async with self._database_lock:
            if self.context.gate is None:
                await self._open_database()
        gate = self.context.gate
        assert gate is not None, "it was opened"
        return gate.database.reply_store()

    def wake_relay(self) -> None:
        """Send flows that were started in this process by a database transaction. Call this in the event loop's
        thread."""
        if self.exactly_once is not None:
            self.exactly_once.wake_relay()
        elif self._runs_no_stages and self._resources.database is not None and self._relay_opening is None:
            # On demand, since a process that starts flows only over the broker may have no access to the database.
            self._relay_opening = self.context.loop.create_task(self._open_relay(), name="truenext outbox")

    async def _open_relay(self) -> None:
        """Open the outbox, and retry after errors. Until the outbox is open, the processes that run the stages send the
        flows that are started here."""
        pause_s = OPEN_PAUSE_S
        while self.exactly_once is None:
            try:
                async with self._database_lock:
                    if self.context.gate is None:
                        await self._open_database()
                await self._open_outbox()
            except Exception as error:
                fields = {"error": str(error), "next_s": pause_s}
                if self._definition.only_initiates:
                    self._outbox_fault = f"the outbox cannot be used: {error}"
                    _logger.warning(
                        "this process cannot use the outbox, and sends no flow of a transaction", extra=fields
                    )
                else:
                    _logger.warning(
                        "this process cannot use the outbox: other processes send the flows that begin in transactions",
                        extra=fields,
                    )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, OPEN_PAUSE_MAX_S)
        self._outbox_fault = ""
        if self._definition.only_initiates:
            self._start_consumers(await self._find_user())

    async def _wait_until_subscribed(self) -> None:
        """Wait until all topics are subscribed: a message that is published before its subscription is not
        delivered."""
        expected = Counter(
            each.stage.destination for each in self.stage_consumers if each.stage.endpoint.subscribed_topic is not None
        )
        while expected - self._pools[0].subscriptions():
            for each in self.stage_consumers:
                if each.task.done():
                    each.task.result()
            await asyncio.sleep(POLL_S)

    async def _open_database(self) -> None:
        from truenext.stage.sql import Database

        url = self._resources.database
        if url is None:
            # The database of stages was checked before.
            raise ConfigurationError(
                f"{self._definition.name} has an outbox, and no database for it: "
                f'Service("{self._definition.name}", database="postgresql+psycopg:///...")'
            )
        stages = [stage for stage in self._definition.stages.values() if self._plans.uses_database(stage)]
        if self._plans.replies_stage is not None:
            stages.append(self._plans.replies_stage)
        workers = sum(stage.settings.concurrency or 1 for stage in stages)
        gate = DatabaseGate(Database(url, interactive=workers, others=workers))
        await gate.open_database(waits=self.waits)
        self.context.gate = gate

    async def _retry_until_reachable(self, step: Callable[[], Awaitable[object]]) -> None:
        """Run `step`. If this run waits for its database, retry while the database is unavailable or the outbox is
        locked.

        Raises: the errors of `step`
        """
        while True:
            try:
                await step()
                return
            except DatabaseUnavailable as error:
                if not self.waits:
                    raise
                _logger.warning("the outbox is not available yet", extra={"error": str(error), "next_s": OPEN_PAUSE_S})
            await asyncio.sleep(OPEN_PAUSE_S)

    async def _check_outbox(self) -> Outbox:
        """Check the tables of the outbox, and return the outbox.

        Raises: ConfigurationError if the tables are missing, or of another version; DatabaseUnavailable
        """
        context, gate = self.context, self.context.gate
        assert gate is not None, "its database was opened"
        outbox = gate.database.outbox(context.service, context.run_id, context.instance)
        if self.creates_tables:
            await outbox.create_tables()
        await outbox.check_tables()
        return outbox

    async def _open_outbox(self) -> None:
        """Check the tables of the outbox, and start exactly-once processing.

        Raises: ConfigurationError if the tables are missing, or of another version; DatabaseUnavailable
        """
        outbox = await self._check_outbox()
        # The relay does not use the interactive pool, since no caller waits for its messages.
        exactly_once = ExactlyOnceProcessing(outbox, self._pools[1], self.context.service)
        await exactly_once.start()
        self.exactly_once = exactly_once

    # ---- State ----

    @property
    def initiator(self) -> Initiator:
        """Initiator of flows. Raises: LocalProtocolError if the run is not connected yet"""
        if self._initiator is None:
            raise LocalProtocolError(f"{self._definition.name} is not connected yet")
        return self._initiator

    @property
    def kept_replies(self) -> KeptReplies:
        """Kept replies of the service, for callers that wait for them. Raises: FlowError if the service can keep no
        replies; LocalProtocolError if the run is not connected yet"""
        if self._plans.replies_stage is None:
            name = self._definition.name
            raise FlowError(
                f"{name} keeps no replies: it needs a database and exactly-once processing, "
                f'Service("{name}", database="postgresql+psycopg:///...", exactly_once=True)'
            )
        if self._kept_replies is None:
            raise LocalProtocolError(f"{self._definition.name} is not connected yet")
        return self._kept_replies

    @property
    def active_stages(self) -> list[str]:
        """Queues of the stages that are processing messages."""
        return [each.stage.queue for each in self.stage_consumers if each.worker.active_count]

    @property
    def waits_for_database(self) -> bool:
        return self.context.gate is not None and not self.context.gate.is_open

    @property
    def connection(self) -> Connection:
        """Connection of the interactive pool, used for control requests."""
        return self._pools[0].connection

    def status(self) -> ServiceStatus:
        """Return the status of connections, database and stages, for health checks."""
        gate = self.context.gate
        subscribed = {pool: pool.subscriptions() for pool in self._pools}
        broker = [each.status() for each in self._pools]
        state = self._state
        if state == "running" and not all(each.has_connected for each in self._pools):
            # The pools connect in the background.
            state = "waiting for the broker"
        database = self._outbox_fault
        if not database and gate is not None:
            database = DATABASE_AVAILABLE if gate.is_open else f"{gate.closed_description}: {gate.closed_reason}"
        stages = [each.status(subscribed[each.pool]) for each in self.stage_consumers]
        name = self._definition.name
        return ServiceStatus(service=name, state=state, broker=broker, database=database, stages=stages)

    async def wait_until_failed(self) -> NoReturn:
        """Wait until a stage stops consuming, and raise the reason. Raises: LocalProtocolError if the stage's
        connection was closed; otherwise the error of the stage's consumer"""
        done, _ = await asyncio.wait({each.task for each in self.stage_consumers}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise LocalProtocolError(f"a connection of {self._definition.name} was closed while it ran")

    def new_async_work(self) -> AsyncSqlWork:
        """Return an SQL transaction in which a test reads or changes the database.

        Raises: LocalProtocolError if the database is not open
        """
        if self.context.gate is None:
            raise LocalProtocolError(f"no stage of {self._definition.name} has a session, so there is no database")
        return self.context.gate.database.new_async_work()

    # ---- Stop ----

    async def stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Stop consuming, wait up to `timeout` seconds for running stages, release all other messages, and close all
        resources. If this call is cancelled, call it again with a shorter timeout. All resources are closed, even if
        closing one of them fails."""
        self._state = "stopping"
        self.context.stopping.set()
        await self._stop_stage_consumers(timeout)
        async with AsyncExitStack() as last_first:
            last_first.push_async_callback(self._stack.aclose)
            if self.context.events is not None:
                last_first.push_async_callback(asyncio.to_thread, self.context.events.close)
            if self.context.gate is not None:
                last_first.push_async_callback(self.context.gate.stop)
            last_first.push_async_callback(self._close_pools)
            await cancel_all((self._policy_refresh, self._relay_opening))
            if self.exactly_once is not None:
                # Closed before the pools, since the relay may be sending.
                last_first.push_async_callback(self.exactly_once.stop)
            if self._initiator is not None:
                last_first.push_async_callback(self._initiator.stop)
            if self._kept_replies is not None:
                last_first.push_async_callback(self._kept_replies.stop)
            if self._responder is not None:
                last_first.push_async_callback(self._responder.stop)

    async def _close_pools(self) -> None:
        """Close both pools concurrently, since closing a pool may wait for a broker that does not answer."""
        closed = await asyncio.gather(*(pool.close() for pool in self._pools), return_exceptions=True)
        for each in closed:
            if isinstance(each, BaseException):
                raise each

    async def _stop_stage_consumers(self, timeout: float) -> None:
        tasks = {each.task for each in self.stage_consumers}
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout)
        if not late:
            return
        _logger.warning(
            "stages are still running, and their messages are released", extra={"stages": self.active_stages}
        )
        # The first cancellation ends the handlers; the second gives up those that do not end.
        for _ in range(2):
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=CANCEL_TIMEOUT_S)
