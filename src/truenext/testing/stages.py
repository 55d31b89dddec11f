"""Test kit for a service of stages: a broker in the same process, mocked endpoints of other services, a clock that
can be put forward, faults at named points, and a wait until all flows have ended.

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
from truenext.errors import ConnectionLost
from truenext.model.destination import DEAD_LETTER_PREFIX, SUBSCRIPTION_PREFIX
from truenext.stage.core.definitions import Endpoint, LocalEndpoint, Stage, Topic
from truenext.stage.core.envelope import decode_envelope
from truenext.stage.core.errors import NotDecoded
from truenext.stage.service import Service
from truenext.stage.service_run import RunResources, ServiceRun
from truenext.stage.sql.errors import DatabaseUnavailable
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
"""Point on the way of a message through a stage.

    received       the message is received; its function has not run
    run            the function, and those that follow directly, have returned; nothing is sent or committed
    checked        the database has confirmed that its transaction can be committed
    sent           the broker has all messages that the stage sends; no consumer can see them
    SQL committed  the database has committed; the message is not acknowledged, and no sent message is visible
    committed      everything is committed; only the functions of `after_commit` have not run

A stage that has not used its session passes received, run and committed only. An exception at the first four is a
failure of the stage, which takes back everything. At "SQL committed" it is the commit gap: the message is redelivered,
and SQL stays committed. At "committed" nothing can be taken back: raise nothing there.
"""

ASK_TIMEOUT_S = 10.0
ENDED_TIMEOUT_S = 30.0
POLL_S = 0.005
IDLE_POLLS = 3
"""Polls in a row that must find nothing in progress."""
ADVANCE_S = 1.0
"""Seconds of the first advance of the clock when all that is left waits; each further one is twice as long."""
ADVANCE_MAX_S = 8 * 24 * 3600.0
"""Seconds advanced in all at which waiting ends: no retry delay is longer."""
NO_CONSUMER_TIMEOUT_S = 3.0
"""Seconds without a consumer of the unfinished queues until waiting ends; a client that reconnects is back earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """Message that a stage has given up."""

    queue: str
    """Queue of the stage that gave up the message."""
    trace: str
    """Name of the flow; empty if the message has no envelope."""
    message: Any
    """Message of the envelope, decoded from JSON; the raw body if it has no envelope."""
    attempts: int
    """Number of attempts at which the message was given up."""
    headers: Mapping[str, str]
    """Headers of the dead letter."""

    @property
    def first_cause(self) -> str:
        """Cause of the first failure that had one; empty if none did."""
        return self.headers.get("truenext-original-first-cause", "")

    @property
    def last_cause(self) -> str:
        """Cause of the last failure that had one; empty if none did."""
        return self.headers.get("truenext-original-last-cause", "")

    def __str__(self) -> str:
        return f"{self.queue} has given up {self.trace!r} after {self.attempts} attempts: {self.last_cause}"


class _QueueStatus(msgspec.Struct):
    """Status of one queue, from the broker's answer to `queues`."""

    name: str
    waiting: int
    unacknowledged: int
    scheduled: int
    consumers: int

    @property
    def has_work(self) -> bool:
        """True if messages are still to be handled; a durable subscription without a consumer does not count."""
        if self.name.startswith(SUBSCRIPTION_PREFIX) and not self.consumers:
            return False
        return bool(self.waiting or self.unacknowledged or self.scheduled)


_QUEUE_STATUS_DECODER = msgspec.json.Decoder(list[_QueueStatus])


class Stages:
    """Service that a test runs with a broker of its own, and the methods for that test; made by `stages`."""

    def __init__(self, service: Service, running: ServiceRun, local: LocalBroker, control: Connection) -> None:
        self.broker = local
        """Broker of the test, with methods to order faults: docs/testing.md."""
        self._service = service
        self._service_run = running
        self._control_connection = control
        self._stack = AsyncExitStack()
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
        **options: Unpack[FlowOptions],
    ) -> R:
        """Call `Service.ask`, and return the reply.

        Args:
            to: Endpoint with a reply.
            message: Message of the type that the endpoint takes.
            trace: Name of the flow.
            timeout: Seconds to wait for the reply.
            **options: Options of the flow: `FlowOptions`.

        Raises: as `Service.ask`
        """
        return await self._service.ask(to, message, trace=trace, timeout=timeout, **options)

    async def send(
        self, to: Endpoint[M, Any], message: M, *, trace: str = "test", **options: Unpack[FlowOptions]
    ) -> str:
        """Call `Service.send`, and return the id of the flow.

        Args:
            to: Endpoint that handles the flow first.
            message: Message of the type that the endpoint takes.
            trace: Name of the flow.
            **options: Options of the flow: `FlowOptions`.

        Raises: as `Service.send`
        """
        return await self._service.send(to, message, trace=trace, **options)

    async def publish(self, to: Topic[M], message: M, *, trace: str = "test", **options: Unpack[FlowOptions]) -> str:
        """Call `Service.publish`, and return the id that the flows share.

        Args:
            to: Topic.
            message: Message of the type that the topic takes.
            trace: Name of the flow.
            **options: Options of the flow: `FlowOptions`.

        Raises: as `Service.publish`
        """
        return await self._service.publish(to, message, trace=trace, **options)

    # ---- Others ----

    def mock(self, endpoint: Endpoint[M, R], answer: Callable[[M], R]) -> list[M]:
        """Answer for an endpoint of another service; a further call replaces the answer. Return the list of the
        requests, which grows as they come.

        Args:
            endpoint: Endpoint of `Service.remote`.
            answer: Plain function that gets each message and returns the reply. Its exception is a failure of that
                endpoint, which is retried there.

        Raises: ValueError if `endpoint` is one of the tested service, or none, or `answer` is no plain function
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
        """Open a session of the test's own, in a transaction that is committed at the end of the block: to make
        tables and rows beforehand, and to see what the stages have done.

        Raises: LocalProtocolError if no stage of the service asks for a session
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
            point: Point on the way of a message: `Point`.
            action: Plain function without arguments, called in the event loop. Its exception is raised at that point.
            stage: Queue of the stage, such as order.place.stage.reserve; None is any stage.
            times: Number of messages for which `action` is called, 1 or more.
            required: True if the test fails at its end, with NeverReached, when no message has reached the point.

        Raises: ValueError if there is no such point; LookupError if the service has no stage with that queue
        """
        if point not in get_args(Point):
            raise ValueError(
                f"there is no point {point!r} in the way of a message: {known_names_hint(point, get_args(Point))}"
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
        """Put the broker's clock forward, past delays and expiry times.

        Args:
            seconds: Seconds, 0 or more.
        """
        await self.broker.advance(seconds=seconds)

    # ---- The end ----

    async def wait_until_ended(self, *, dead_letters: int = 0, timeout: float = ENDED_TIMEOUT_S) -> list[DeadLetter]:
        """Wait until all flows have ended, and return the dead letters. Retries are due at once: the broker's clock
        is put forward.

        Flows that transactions of the program initiate count from their commit: the outbox is read, too. Messages in a
        durable subscription without a consumer, and retries of a subscriber, do not count.

        Args:
            dead_letters: Number of dead letters that the test expects, in all.
            timeout: Seconds, more than 0, after which unfinished flows are an error.

        Raises: AssertionError if there are more or fewer dead letters than `dead_letters`, with the causes;
        TimeoutError, with the queues, if messages are left after `timeout` seconds or have no consumer; ValueError
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
                idle_polls += 1
                continue
            idle_polls = 0
            now = loop.time()
            if now > deadline:
                where = _describe_unfinished(unfinished, busy, unsent or await self._describe_unsent())
                raise TimeoutError(f"flows have not ended within {timeout:g} seconds: {where}")
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
        letters = []
        for queue in await self._read_queue_statuses(dead_letters=True):
            for message in (await self.broker.queue(queue.name)).messages:
                letters.append(
                    (int(message.headers["truenext-sequence"]), _make_dead_letter(message.body, message.headers))
                )
        return [letter for _, letter in sorted(letters, key=lambda each: each[0])]

    async def _describe_unsent(self) -> str:
        """Return a text on the unsent messages of the outbox; empty if there are none."""
        exactly_once = self._service_run.exactly_once
        if exactly_once is None:
            return ""
        try:
            unsent = await exactly_once.count_unsent()
        except DatabaseUnavailable as error:
            return f"the outbox cannot be read: {error}"
        count = unsent.numbered + unsent.unnumbered
        return f"the outbox has {count} unsent messages" if count else ""

    async def _read_queue_statuses(self, *, dead_letters: bool = False) -> list[_QueueStatus]:
        answer = None
        while answer is None:
            # The test may drop all connections, also this one, which reconnects.
            with suppress(ConnectionLost):
                answer = await self._control_connection.control_request("queues")
        queues = _QUEUE_STATUS_DECODER.decode(answer)
        return [each for each in queues if each.name.startswith(DEAD_LETTER_PREFIX) is dead_letters]

    async def close(self) -> None:
        for mock in self._mocks.values():
            await mock.stop()


@dataclass(slots=True, eq=False)
class _PointAction:
    point: Point
    action: Callable[[], object]
    stage: str | None
    times: int
    fault: OrderedFault


class _Mock:
    """Service with one endpoint, which answers in place of an endpoint of another service."""

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

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})


@asynccontextmanager
async def stages(
    service: Service, *, database: str | None = None, overrides: Overrides | None = None
) -> AsyncIterator[Stages]:
    """Run the stages of a service, with a broker of its own in this event loop, for the duration of the block. Lifespan
    and interceptors are those of the service; missing tables of exactly-once processing are created.

    Args:
        service: Service to test.
        database: URL of SQLAlchemy in place of the service's own; "sqlite://" is an empty database, in a file that is
            deleted afterwards.
        overrides: Factories by the factories that they replace in `Depends`.

    Raises: ConfigurationError if the service is defined as it cannot be; ValueError; NeverReached at the end of a
    block that has raised nothing
    """
    if not isinstance(service, Service):
        raise ValueError(f"service must be a Service, not {service!r}")
    if not isinstance(database, str | None):
        # Without the value: it may have a password.
        raise ValueError(f"database is a URL of SQLAlchemy, as text, not of the type {type(database).__name__}")
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
    """Raises: ValueError if `function` cannot be called, or is a coroutine function"""
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
    return DeadLetter(
        queue=headers.get("truenext-original-destination", "").removeprefix("/queue/"),
        trace=trace,
        message=message,
        attempts=int(headers.get("truenext-original-attempts", "0")),
        headers=headers,
    )
