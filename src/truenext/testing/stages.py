"""Test kit for a service of stages. It runs the service with a broker in the test's own process. A test can mock
endpoints of other services, advance the clock, request faults at named points, and wait until all flows have ended.

    async with stages(app, database="sqlite://") as t:
        t.mock(stock, lambda asked: Reserved(ok=True))
        assert await t.ask(place, Order("o1", "tea")) == Placed("o1")
        await t.wait_until_ended()
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, get_args

import msgspec

from truenext.client.tasks.connection import Connection, connect
from truenext.client.tasks.driver import check_clock_runs
from truenext.errors import ConnectionLost, Refused
from truenext.flows.envelope import NotDecoded, decode_envelope
from truenext.model.destination import DEAD_LETTER_PREFIX, SUBSCRIPTION_PREFIX
from truenext.model.schedule import FOR_EVER
from truenext.stage.core.definitions import Endpoint, LocalEndpoint, Stage, Topic
from truenext.stage.core.failure import failure_of
from truenext.stage.service import Service
from truenext.stage.service_run import RunResources, ServiceRun
from truenext.stage.sql.errors import DatabaseUnavailable
from truenext.stage.user_code import cancel_all
from truenext.testing.checks import checked_count, checked_seconds, known_names_hint
from truenext.testing.faults import OrderedFault
from truenext.testing.local import LocalBroker, broker

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from truenext.stage.core.flow_start import FlowOptions
    from truenext.stage.dependencies.depends import Overrides

M = TypeVar("M")
R = TypeVar("R")

Point = Literal["received", "run", "checked", "sent", "SQL committed", "committed"]
"""Point in the processing of a message by a stage.

    received       the stage has received the message; its function has not run
    run            the function, and stages that followed by `next_direct`, have returned; nothing is sent or committed
    checked        the database has confirmed that the SQL transaction can be committed
    sent           the broker has accepted all messages that the stage sends; they are not visible yet
    SQL committed  the SQL transaction is committed; the message is not acknowledged, and sent messages are not visible
    committed      everything is committed; the functions of `after_commit` have not run

A stage that has not used its session passes only received, run and committed. An exception at one of the first four
points is a failure of the stage, and both transactions are rolled back. An exception at "SQL committed" is a failure in
the commit gap: the message is redelivered, and SQL stays committed. Raise no exception at "committed", since nothing
can be rolled back there.
"""

ASK_TIMEOUT_S = 10.0
ENDED_TIMEOUT_S = 30.0
POLL_S = 0.005
IDLE_POLLS = 3
"""Number of successive polls without unfinished work after which all flows have ended."""
ADVANCE_S = 1.0
"""Seconds by which the clock is advanced first, when all unfinished messages wait for their time. Each further advance
is twice as long."""
ADVANCE_MAX_S = 8 * 24 * 3600.0
"""Total of advances, in seconds, after which the kit gives up waiting. No delay of a retry is longer."""
NO_CONSUMER_TIMEOUT_S = 3.0
"""Seconds after which the kit gives up waiting if no unfinished queue has a consumer. A client that reconnects takes
less time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """Dead letter: a message that a stage has given up."""

    queue: str
    """Queue of the stage that gave up the message."""
    trace: str
    """Name of the flow; empty if the message belongs to no flow."""
    message: Any
    """Message of the flow, decoded from JSON; the raw body if the message belongs to no flow."""
    attempts: int
    """Number of attempts of the message before it was given up."""
    headers: Mapping[str, str]
    """Headers of the dead letter's MESSAGE."""

    @property
    def first_cause(self) -> str:
        """Cause of the first failure that reported a cause; empty if no failure did."""
        return self.headers.get("truenext-original-first-cause", "")

    @property
    def last_cause(self) -> str:
        """Cause of the last failure that reported a cause; empty if no failure did."""
        return self.headers.get("truenext-original-last-cause", "")

    def __str__(self) -> str:
        attempts = f"{self.attempts} attempt{'' if self.attempts == 1 else 's'}"
        return f"{self.queue} has given up {self.trace!r} after {attempts}: {self.last_cause}"


class _QueueStatus(msgspec.Struct):
    """Status of one queue, as the broker answers the control request `queues`."""

    name: str
    waiting: int
    unacknowledged: int
    scheduled: int
    consumers: int

    @property
    def has_work(self) -> bool:
        """True if the queue has messages that are still to be processed. A durable subscription without a consumer does
        not count."""
        if self.name.startswith(SUBSCRIPTION_PREFIX) and not self.consumers:
            return False
        return bool(self.waiting or self.unacknowledged)


_QUEUE_STATUS_DECODER = msgspec.json.Decoder(list[_QueueStatus])


class Stages:
    """Service under test with its broker, and the methods for the test. `stages` creates it."""

    def __init__(self, service: Service, running: ServiceRun, local: LocalBroker, control: Connection) -> None:
        self.broker = local
        """Broker of the test. A test calls the broker's methods to make faults happen (docs/testing.md)."""
        self._service = service
        self._service_run = running
        self._control_connection = control
        self._mocks: dict[str, _Mock] = {}
        self._point_actions: list[_PointAction] = []

    # ---- Beginning ----

    async def ask(
        self,
        to: Endpoint[M, R],
        message: M,
        *,
        trace: str = "test",
        timeout: float = ASK_TIMEOUT_S,
        key: str | None = None,
        **options: Unpack[FlowOptions],
    ) -> R:
        """Start a flow, wait for its reply, and return the reply.

        Args:
            to: Endpoint that replies.
            message: Message of the type that the endpoint takes.
            trace: Name of the flow.
            timeout: Seconds to wait for the reply.
            key: Key under which the flow is started once; None starts a flow with each call.
            **options: Options of the flow (`FlowOptions`).

        Raises: the errors of `Service.ask`
        """
        return await self._service.ask(to, message, trace=trace, timeout=timeout, key=key, **options)

    async def send(
        self, to: Endpoint[M, Any], message: M, *, trace: str = "test", **options: Unpack[FlowOptions]
    ) -> str:
        """Start a flow, and return its id after the broker has committed the first message.

        Args:
            to: Endpoint that handles the flow first.
            message: Message of the type that the endpoint takes.
            trace: Name of the flow.
            **options: Options of the flow (`FlowOptions`).

        Raises: the errors of `Service.send`
        """
        return await self._service.send(to, message, trace=trace, **options)

    async def publish(self, to: Topic[M], message: M, *, trace: str = "test", **options: Unpack[FlowOptions]) -> str:
        """Start a flow with each connected subscriber of a topic, and return the id that these flows share.

        Args:
            to: Topic to which the message is published.
            message: Message of the type that the topic takes.
            trace: Name of the flow.
            **options: Options of the flow (`FlowOptions`).

        Raises: the errors of `Service.publish`
        """
        return await self._service.publish(to, message, trace=trace, **options)

    # ---- Others ----

    def mock(self, endpoint: Endpoint[M, R], answer: Callable[[M], R]) -> list[M]:
        """Answer requests in place of an endpoint of another service. Return the list of the received requests, to
        which each new request is added. A further call for the endpoint replaces the answer, and returns a new list.

        Args:
            endpoint: Endpoint that `Service.remote` has returned.
            answer: Plain function that gets each message and returns the reply. If the function raises an exception,
                the mock fails and retries the message, as any stage does.

        Raises: ValueError if `endpoint` is not an endpoint, or belongs to the tested service, or if `answer` is not a
        plain function
        """
        if not isinstance(endpoint, Endpoint):
            raise ValueError(
                f"{endpoint!r} is not an endpoint of another service: "
                f"{known_names_hint(endpoint, self._service.remotes)}"
            )
        if isinstance(endpoint, LocalEndpoint):
            raise ValueError(
                f"{endpoint.name} is an endpoint of the service itself: mock the endpoints that it sends to"
            )
        _check_plain_function(answer, "answer")
        mock = self._mocks.get(endpoint.name)
        if mock is None:
            mock = self._mocks[endpoint.name] = _Mock(endpoint, answer)
            mock.task = asyncio.get_running_loop().create_task(mock.run(self.broker.url))
        mock.answer = answer
        mock.requests = []
        return mock.requests

    @asynccontextmanager
    async def sql(self) -> AsyncIterator[AsyncSession]:
        """Open a session for the test, to create tables and rows, or to read what the stages have written. Its
        transaction is committed at the end of the block.

        Raises: LocalProtocolError if no stage of the service uses the database
        """
        work = self._service_run.new_async_work()
        try:
            yield work.session
            await work.commit()
        finally:
            await work.rollback()

    # ---- Faults and time ----

    def at(
        self,
        point: Point,
        action: Callable[[], object],
        *,
        stage: str | None = None,
        times: int = 1,
        required: bool = True,
    ) -> None:
        """Call `action` when a message reaches `point`.

        Args:
            point: Point in the processing of a message: `Point`.
            action: Plain function without arguments, called in the event loop. An exception of `action` is raised at
                that point.
            stage: Queue of the stage, such as order.place.stage.reserve; None means any stage.
            times: Number of messages for which `action` is called, 1 or more.
            required: True if the test fails with NeverReached when no message has reached the point before its end.

        Raises: ValueError if an argument is invalid; LookupError if the service has no stage with that queue
        """
        if point not in get_args(Point):
            raise ValueError(
                f"there is no point {point!r} in the processing of a message: "
                f"{known_names_hint(point, get_args(Point))}"
            )
        _check_plain_function(action, "action")
        queues = self._service.stages
        if stage is not None and stage not in queues:
            raise LookupError(
                f"{self._service.name} has no stage whose queue is {stage!r}: {known_names_hint(stage, queues)}"
            )
        checked_count(times, "times", 1)
        call = f'at("{point}"' + ("" if stage is None else f', stage="{stage}"') + ")"
        self._point_actions.append(
            _PointAction(point, action, stage, times, self.broker.faults.order_fault(call, required))
        )

    def on_point(self, point: str, stage: Stage) -> None:
        for each in self._point_actions:
            if each.times and each.point == point and each.stage in (None, stage.queue):
                each.times -= 1
                each.fault.was_reached = True
                each.action()

    async def advance(self, *, seconds: float) -> None:
        """Advance the broker's clock. Delays that end in this time are over afterwards, and messages whose time to live
        ends have expired.

        Args:
            seconds: Seconds to advance, 0 or more.
        """
        await self.broker.advance(seconds=seconds)

    # ---- The end ----

    async def wait_until_ended(self, *, dead_letters: int = 0, timeout: float = ENDED_TIMEOUT_S) -> list[DeadLetter]:
        """Wait until all flows have ended, and return the dead letters. Retries and delays take no real time, since the
        broker's clock is advanced until they are due. It is not advanced for cron flows, nor for sends that repeat
        without an end: these are not waited for.

        A flow that the program starts in a database transaction counts from the commit, since the outbox is read, too.
        Messages in a durable subscription without a consumer, and retries of a subscriber, do not count.

        Args:
            dead_letters: Total number of dead letters that the test expects.
            timeout: Seconds, more than 0, within which all flows must have ended.

        Raises: AssertionError, with the causes, if the number of dead letters is not `dead_letters`; TimeoutError, with
        the queues, if messages are left after `timeout` seconds or have no consumer; ValueError if an argument is
        invalid
        """
        checked_count(dead_letters, "dead_letters", 0)
        checked_seconds(timeout, "timeout", may_be_zero=False)
        loop = asyncio.get_running_loop()
        check_clock_runs(loop)
        deadline = loop.time() + timeout
        idle_polls, step_s, advanced_s, consumed_at = 0, ADVANCE_S, 0.0, loop.time()
        while idle_polls < IDLE_POLLS:
            await asyncio.sleep(POLL_S)
            queues = await self._read_queue_statuses()
            busy = self._service_run.active_stages
            unfinished = [each for each in queues if each.has_work]
            # The outbox is read last, as this takes longest: a message that leaves it is in a queue at the next poll.
            unsent = "" if unfinished or busy else await self._describe_unsent()
            if not (unfinished or busy or unsent):
                due_ms = await self._next_delay_ms(queues)
                if due_ms is None:
                    idle_polls += 1
                    continue
                # Nothing else is under way, so no timer in between has anything to do.
                idle_polls = 0
                await self.broker._leap_to(due_ms)
                continue
            idle_polls = 0
            now = loop.time()
            if now > deadline:
                where = _describe_unfinished(unfinished, busy, unsent or await self._describe_unsent())
                raise TimeoutError(f"flows have not ended within {timeout:g} s: {where}")
            is_waiting = self._service_run.waits_for_database
            if busy or is_waiting or unsent or any(each.consumers for each in unfinished):
                consumed_at = now
            if unsent:
                continue
            if not busy and not is_waiting and not any(each.unacknowledged for each in unfinished):
                # The rest waits for the clock, or has no consumer.
                if advanced_s > ADVANCE_MAX_S or now > consumed_at + NO_CONSUMER_TIMEOUT_S:
                    where = _describe_unfinished(unfinished, busy, await self._describe_unsent())
                    raise TimeoutError(
                        f"messages wait without a consumer: {where}; mock the endpoint that they are for"
                    )
                if consumed_at < now:
                    continue
                await self.broker.advance(seconds=step_s)
                advanced_s += step_s
                step_s *= 2
        letters = await self.dead_letters()
        if len(letters) != dead_letters:
            listed = "\n".join(map(str, letters)) or "none"
            raise AssertionError(f"expected {dead_letters} dead letters, there are {len(letters)}:\n{listed}")
        return letters

    async def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters of all stages and mocks, in the order in which they were given up."""
        queues = [each.name for each in await self._read_queue_statuses(dead_letters=True)]
        messages = [message for queue in queues for message in (await self.broker.queue(queue)).messages]
        messages.sort(key=lambda message: int(message.headers["truenext-sequence"]))
        return [_make_dead_letter(message.body, message.headers) for message in messages]

    async def _describe_unsent(self) -> str:
        """Return a text about the unsent messages in the outbox; empty if there are none."""
        exactly_once = self._service_run.exactly_once
        if exactly_once is None:
            return ""
        try:
            unsent = await exactly_once.count_unsent()
        except DatabaseUnavailable as error:
            return f"the outbox cannot be read: {error}"
        count = unsent.numbered + unsent.unnumbered
        return f"the outbox has {count} unsent message{'s' * (count > 1)}" if count else ""

    async def _next_delay_ms(self, queues: list[_QueueStatus]) -> int | None:
        """Return the earliest due time of a delayed flow; None if no flow is delayed."""
        dues: list[int] = []
        # The queue "" stands for topics.
        for name in ["", *(each.name for each in queues if each.scheduled)]:
            after: list[int] | None = [0, 0]
            until: dict[str, int] = {}
            while after is not None:
                request = {"queue": name, "after": after} | until
                try:
                    answer = await self._control_connection.control_request("scheduled", request)
                except (ConnectionLost, Refused):
                    # The test drops connections, or the queue has just ended: the next poll sees what is left.
                    return None
                page = msgspec.json.decode(answer)
                dues += [each["due_ms"] for each in page["sends"] if not each["cron"] and each["repeat"] != FOR_EVER]
                after, until = page["next"], {"until": page["until"]}
        return min(dues, default=None)

    async def _read_queue_statuses(self, *, dead_letters: bool = False) -> list[_QueueStatus]:
        answer = None
        while answer is None:
            # The test may drop all connections, also this one, which reconnects.
            with suppress(ConnectionLost):
                answer = await self._control_connection.control_request("queues")
        queues = _QUEUE_STATUS_DECODER.decode(answer)
        return [each for each in queues if each.name.startswith(DEAD_LETTER_PREFIX) is dead_letters]

    async def close(self) -> None:
        await cancel_all(mock.task for mock in self._mocks.values())


@dataclass(slots=True, eq=False)
class _PointAction:
    point: Point
    action: Callable[[], object]
    stage: str | None
    times: int
    fault: OrderedFault


class _Mock:
    """Service with one endpoint, which answers requests in place of an endpoint of another service."""

    def __init__(self, endpoint: Endpoint[Any, Any], answer: Callable[[Any], Any]) -> None:
        self._endpoint = endpoint
        self.answer = answer
        self.requests: list[Any] = []
        self.task: asyncio.Task[None] | None = None

    async def run(self, url: str) -> None:
        async def handle(message: Any) -> Any:
            self.requests.append(message)
            return self.answer(message)

        endpoint = self._endpoint
        replies = None if endpoint.replies is None else endpoint.replies.type
        handle.__annotations__ = {"message": endpoint.takes.type, "return": replies}
        service = Service("mock", broker=url)
        service.endpoint(endpoint.name, endpoint.takes.type, replies).stage(handle)
        async with service.running():
            await asyncio.Event().wait()


@asynccontextmanager
async def stages(
    service: Service, *, database: str | None = None, overrides: Overrides | None = None
) -> AsyncIterator[Stages]:
    """Run the stages of a service for the duration of the block, with a test broker in this event loop. The service's
    own lifespan and interceptors are used. Missing tables of exactly-once processing are created.

    Args:
        service: Service to test.
        database: URL of SQLAlchemy that replaces the service's own; "sqlite://" is an empty database, in a file that is
            deleted afterwards.
        overrides: Replacements of factories: each key is a factory in `Depends`, and its value is the factory that
            replaces it.

    Raises: ConfigurationError if the definition of the service is incomplete or wrong; ValueError if an argument is
    invalid; at the end of the block, NeverReached if a required fault was not reached and the block has raised nothing
    """
    if not isinstance(service, Service):
        raise ValueError(f"service must be a Service, not {service!r}")
    if not isinstance(database, str | None):
        # Without the value: it may have a password.
        raise ValueError(f"database must be a URL of SQLAlchemy, as text, not of the type {type(database).__name__}")
    async with AsyncExitStack() as stack:
        local = await stack.enter_async_context(broker())
        if database == "sqlite://":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="truenext-stages-"))
            file = Path(folder) / "test.db"
            file.touch()
            database = f"sqlite:///{file}"
        plans = service.plans(has_database=database is not None or service.database is not None, overrides=overrides)
        resources = RunResources((local.url,), database or service.database)
        running = ServiceRun(service, plans, resources, creates_tables=True)
        control = await stack.enter_async_context(connect(local.url))
        await stack.enter_async_context(service.bound_to(running))
        t = Stages(service, running, local, control)
        running.context.on_test_point = t.on_point
        stack.push_async_callback(t.close)
        await running.prepare()
        await running.connect()
        await running.start()
        yield t


def _check_plain_function(function: object, name: str) -> None:
    """Check that `function` is a plain function or another plain callable. Raises: ValueError if it is async, or cannot
    be called"""
    if not callable(function) or iscoroutinefunction(function):
        raise ValueError(f"{name} must be a plain function, not async, not {function!r}")


def _describe_unfinished(unfinished: list[_QueueStatus], busy: list[str], unsent: str) -> str:
    queues = [f"{each.name} has {each.waiting + each.unacknowledged + each.scheduled}" for each in unfinished]
    return ", ".join([*queues, *(f"{each} is at work" for each in busy), *([unsent] if unsent else [])])


def _make_dead_letter(body: bytes, headers: Mapping[str, str]) -> DeadLetter:
    try:
        envelope = decode_envelope(body)
        trace, message = envelope.flow.trace, msgspec.json.decode(envelope.message)
    except NotDecoded:
        trace, message = "", body
    failure = failure_of(headers)
    return DeadLetter(queue=failure.stage, trace=trace, message=message, attempts=failure.attempts, headers=headers)
