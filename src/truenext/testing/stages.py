"""A service of stages in a test: a broker in the same process, endpoints that answer as the test says, time that can be
put forward, faults at named points, and an end that is known.

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
from truenext.stage.service_run import ServiceRun
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
"""Of the way of one message: docs/stages-testing.md."""

ASK_TIMEOUT_S = 10.0
ENDED_TIMEOUT_S = 30.0
POLL_S = 0.005
IDLE_POLLS = 3
"""So often in a row nothing must be under way."""
ADVANCE_S = 1.0
"""The first step in time when all that is left waits; each is twice as long as the one before."""
ADVANCE_MAX_S = 8 * 24 * 3600.0
"""No delay of a failed message is longer."""
NO_CONSUMER_TIMEOUT_S = 3.0
"""So long nobody must have taken from the queues that are left: who connects anew is there before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that was given up."""

    queue: str
    """That of the stage that has given it up."""
    trace: str
    message: Any
    """What it said, as JSON has it."""
    attempts: int
    headers: Mapping[str, str]

    @property
    def first_cause(self) -> str:
        """Of the first attempt that said why it failed; empty if none did."""
        return self.headers.get("truenext-original-first-cause", "")

    @property
    def last_cause(self) -> str:
        """Of the last one."""
        return self.headers.get("truenext-original-last-cause", "")

    def __str__(self) -> str:
        return f"{self.queue} has given up {self.trace!r} after {self.attempts} attempts: {self.last_cause}"


class _QueueStatus(msgspec.Struct):
    """What the broker says of one queue."""

    name: str
    waiting: int
    unacknowledged: int
    scheduled: int
    consumers: int

    @property
    def has_work(self) -> bool:
        """Whether something in it is still to be handled. A durable subscription without a consumer keeps it."""
        if self.name.startswith(SUBSCRIPTION_PREFIX) and not self.consumers:
            return False
        return bool(self.waiting or self.unacknowledged or self.scheduled)


_QUEUE_STATUS_DECODER = msgspec.json.Decoder(list[_QueueStatus])


class Stages:
    """What a test can say while a service runs; made by `stages`."""

    def __init__(self, service: Service, running: ServiceRun, local: LocalBroker, control: Connection) -> None:
        self.broker = local
        """Its methods order faults of the broker: docs/testing.md."""
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
        """As `Service.ask`."""
        return await self._service.ask(to, message, trace=trace, timeout=timeout, **options)

    async def send(
        self, to: Endpoint[M, Any], message: M, *, trace: str = "test", **options: Unpack[FlowOptions]
    ) -> str:
        """As `Service.send`."""
        return await self._service.send(to, message, trace=trace, **options)

    async def publish(self, to: Topic[M], message: M, *, trace: str = "test", **options: Unpack[FlowOptions]) -> str:
        """As `Service.publish`."""
        return await self._service.publish(to, message, trace=trace, **options)

    # ---- Others ----

    def mock(self, endpoint: Endpoint[M, R], answer: Callable[[M], R]) -> list[M]:
        """Have an endpoint of another service answer so, or anew so. An exception of `answer` is a failure there.
        Returns what it was asked, as it comes.

        Raises: ValueError if it is one of the service that is tested, or none, or `answer` is no plain function
        """
        if not isinstance(endpoint, Endpoint):
            raise ValueError(
                f"{endpoint!r} is no endpoint of another service: {known_names_hint(endpoint, self._service.remotes)}"
            )
        if isinstance(endpoint, LocalEndpoint):
            raise ValueError(f"{endpoint.name} is an endpoint of the service itself: mock what it asks")
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
        """A session of the test's own, in a transaction that is committed at the end of the block: to make tables and
        rows before, and to see what the stages have done.

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
        """Do something when a message has come to a point of its way, in the stage whose queue this is or in any, so
        many times. What `action` raises is what happens there. If no message ever comes there, the test fails at its
        end, unless `required` is False.

        Raises: ValueError if there is no such point; LookupError if the service has no stage with that queue
        """
        if point not in get_args(Point):
            raise ValueError(f"a message passes no point {point!r}: {known_names_hint(point, get_args(Point))}")
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
        """Put the broker's clock forward: delays are over, what has expired expires."""
        await self.broker.advance(seconds=seconds)

    # ---- The end ----

    async def wait_until_ended(self, *, dead_letters: int = 0, timeout: float = ENDED_TIMEOUT_S) -> list[DeadLetter]:
        """Wait until all flows have ended. What waits for its next try is tried at once: the broker's clock is put
        forward. Returns the dead letters.

        What transactions of the program have begun counts from their commit: the outbox is looked into, too.

        Raises: AssertionError if there are more or fewer dead letters than `dead_letters`, saying why each of them was
        given up; TimeoutError if a message is under way after `timeout` seconds, saying where; ValueError
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
            # It is asked last, since that takes the longest: what leaves it meanwhile is in a queue the next time.
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
                # What is left waits for the clock, or for nobody.
                if advanced_s > ADVANCE_MAX_S or now > consumed_at + NO_CONSUMER_TIMEOUT_S:
                    where = _describe_unfinished(unfinished, busy, await self._describe_unsent())
                    raise TimeoutError(f"nobody takes what waits: {where}; is an endpoint to be mocked?")
                if consumed_at < now:
                    continue
                await self.broker.advance(seconds=step_s)
                advanced_s += step_s
                step_s *= 2
        letters = await self.dead_letters()
        if len(letters) != dead_letters:
            listed = "\n".join(map(str, letters)) or "none"
            raise AssertionError(f"{dead_letters} dead letters were expected, there are {len(letters)}:\n{listed}")
        return letters

    async def dead_letters(self) -> list[DeadLetter]:
        """Those of all stages, and of what was mocked, in the order in which they were given up."""
        letters = []
        for queue in await self._read_queue_statuses(dead_letters=True):
            for message in (await self.broker.queue(queue.name)).messages:
                letters.append(
                    (int(message.headers["truenext-sequence"]), _make_dead_letter(message.body, message.headers))
                )
        return [letter for _, letter in sorted(letters, key=lambda each: each[0])]

    async def _describe_unsent(self) -> str:
        """What the outbox has that is still to be sent; empty if that is nothing."""
        exactly_once = self._service_run.exactly_once
        if exactly_once is None:
            return ""
        try:
            unsent = await exactly_once.count_unsent()
        except DatabaseUnavailable as error:
            return f"the outbox cannot be looked into: {error}"
        count = unsent.numbered + unsent.unnumbered
        return f"the outbox has {count} to be sent" if count else ""

    async def _read_queue_statuses(self, *, dead_letters: bool = False) -> list[_QueueStatus]:
        answer = None
        while answer is None:
            # The test may drop all connections, this one too, which then comes back by itself.
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
    """A service of its own, with one endpoint."""

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
    """Run the stages of a service, with a broker of its own in this event loop. `database` is used instead of its own:
    "sqlite://" is an empty one, in a file that is gone afterwards. `overrides` has other factories for what `Depends`
    names.

    Raises: ConfigurationError if the service is defined as it cannot be; ValueError; NeverReached at the end of a block
    that has raised nothing
    """
    if not isinstance(service, Service):
        raise ValueError(f"what is run is a Service, not {service!r}")
    if not isinstance(database, str | None):
        # Not the value: it may have a password.
        raise ValueError(f"database is a URL of SQLAlchemy, as text, not of the type {type(database).__name__}")
    async with AsyncExitStack() as stack:
        local = await stack.enter_async_context(broker())
        if database == "sqlite://":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="truenext-stages-"))
            file = Path(folder) / "test.db"
            file.touch()
            database = f"sqlite:///{file}"
        plans = service.plans(has_database=database is not None or service.database is not None, overrides=overrides)
        running = ServiceRun(
            service, plans, broker=(local.url,), database=database or service.database, creates_tables=True
        )
        control = await stack.enter_async_context(connect(local.url))
        await stack.enter_async_context(service.bound_to(running))
        t = Stages(service, running, local, control)
        running.context.on_test_point = t.on_point
        stack.push_async_callback(t.close)
        await running.connect()
        await running.start()
        yield t


def _check_plain_function(function: object, name: str) -> None:
    """Raises: ValueError if it cannot be called, or what it does would only be done if it were awaited"""
    if not callable(function) or iscoroutinefunction(function):
        raise ValueError(f"{name} is a plain function, which is called and not awaited, not {function!r}")


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
