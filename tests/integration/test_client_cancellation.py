"""Tests of calls that are cancelled, at each moment at which they can be.

Each call is made anew and cancelled at its first suspension, its second, and so on, until it ends before: as it begins
to wait, and (*late*) as it is about to go on with the result. Source of what is expected: docs/client.md, "Cancelled
calls".
"""

import asyncio
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.drawing import one_of
from tests.integration.broker_process import PATIENCE_SECONDS
from truenext import testing
from truenext.client.tasks.connection import Connection, Consumer, Message, Session, Transaction, connect
from truenext.errors import ClosedError, RolledBack
from truenext.testing.local import LocalBroker

PATIENCE_S = 60.0
STEPS_MAX = 60
"""Number of suspensions that no call reaches."""


class Cancels:
    """Cancellation of a call at one of its suspensions."""

    def __init__(self, at: int, *, late: bool) -> None:
        self._at = at
        self._late = late
        self.has_reached = False

    @types.coroutine
    def _drive(self, call: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        value: Any = None
        step = 0
        try:
            waits = call.send(None)
            while True:
                if step == self._at:
                    self.has_reached = True
                    if self._late:
                        yield waits
                    elif waits is not None:
                        waits._asyncio_future_blocking = False
                    step += 1
                    waits = call.throw(asyncio.CancelledError())
                else:
                    step += 1
                    value = yield waits
                    waits = call.send(value)
        except StopIteration as ended:
            return ended.value

    async def run(self, call: Coroutine[Any, Any, Any]) -> None:
        try:
            await self._drive(call)
        except asyncio.CancelledError:
            assert self.has_reached
        else:
            assert not self.has_reached, "a cancelled call has returned"


class CaseSetup:
    """Broker, a connection to it, and the case's own queue in which messages 0 to 4 wait."""

    def __init__(self, broker: LocalBroker, connection: Connection, queue: str) -> None:
        self.broker = broker
        self.connection = connection
        self.name = queue
        self.queue = f"/queue/{queue}"

    async def remaining(self) -> list[tuple[str, int]]:
        contents = await self.broker.queue(self.name)
        return [(each.body.decode(), int(each.headers["truenext-attempts"])) for each in contents.messages]

    async def all_are_there(self, numbers: str = "01234", attempts: dict[str, int] | None = None) -> None:
        """Check that the unsettled messages are in the queue, each once, in order, with their attempts."""
        expected = [(each, (attempts or {}).get(each, 0)) for each in numbers]
        assert await self.remaining() == expected
        assert (await self.broker.queue(self.name)).unacknowledged == 0

    async def is_usable(self) -> None:
        """Check that the first connection still works."""
        await self.connection.send("/queue/usable", "x", timeout=PATIENCE_S)
        assert self.connection.health().reconnects == 0


Case = Callable[[CaseSetup, Cancels], Awaitable[None]]


@asynccontextmanager
async def new_setup(queue: str) -> AsyncIterator[CaseSetup]:
    async with testing.broker() as broker, connect(broker.url) as connection:
        await connection.send_many(f"/queue/{queue}", list("01234"))
        yield CaseSetup(broker, connection, queue)


async def at_every_suspension(case: Case) -> None:
    tasks = len(asyncio.all_tasks())
    for late in (False, True):
        for step in range(STEPS_MAX):
            cancels = Cancels(step, late=late)
            async with new_setup("q") as setup:
                await case(setup, cancels)
            if not cancels.has_reached:
                break
        else:
            raise AssertionError(f"it has more than {STEPS_MAX} suspensions")
        assert step, "it has none"
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) == tasks, "tasks are left behind"


def check(case: Case) -> None:
    asyncio.run(asyncio.wait_for(at_every_suspension(case), PATIENCE_SECONDS))


async def texts(receive: Callable[[float], Awaitable[Message | None]], count: int) -> list[str]:
    got = []
    for _ in range(count):
        message = await receive(PATIENCE_S)
        assert message is not None and message.attempts == 0
        got.append(message.text)
    return got


PREFETCHES = one_of("prefetch", [0, 1, 10, None], ["prefetch 0", "prefetch 1", "prefetch 10", "default prefetch"])


# ---- Receiving ----


@PREFETCHES
@pytest.mark.parametrize("ack", ["auto", "individual"])
@pytest.mark.parametrize("how", ["receive", "receive(0)", "receive(1)", "receive_many", "iteration"])
def test_a_cancelled_receive_has_taken_nothing(prefetch: int | None, ack: str, how: str) -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async with setup.connection.consumer(setup.queue, ack=ack, prefetch=prefetch) as consumer:
            await nothing_is_here(setup, consumer)
            calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
                "receive": consumer.receive,
                "receive(0)": lambda: consumer.receive(0),
                "receive(1)": lambda: consumer.receive(PATIENCE_S),
                "receive_many": lambda: consumer.receive_many(3),
                "iteration": lambda: _next(consumer),
            }
            await cancels.run(calls[how]())
            if not cancels.has_reached:
                return
            got = []
            for _ in range(5):
                message = await consumer.receive(PATIENCE_S)
                assert message is not None and message.attempts == 0
                got.append(message.text)
                if ack == "individual":
                    await message.ack()
            assert got == list("01234")
            assert await consumer.receive(0) is None
        await setup.all_are_there("")
        await setup.is_usable()

    check(case)


async def nothing_is_here(setup: CaseSetup, consumer: Consumer) -> None:
    """Release the buffer of a consumer, so that its next receive has to wait."""
    await consumer.pause()
    await setup.all_are_there()
    await consumer.resume()


async def _next(consumer: Consumer) -> Message:
    return await anext(consumer)


@PREFETCHES
def test_a_receive_cancelled_on_an_empty_queue_takes_no_message_that_comes_later(prefetch: int | None) -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async with setup.connection.consumer("/queue/later", prefetch=prefetch) as consumer:
            asyncio.get_running_loop().call_soon(setup.connection.send_nowait, "/queue/later", "0")
            await cancels.run(consumer.receive())
            if cancels.has_reached:
                async with setup.connection.consumer("/queue/later", prefetch=prefetch) as other:
                    await consumer.pause()
                    assert await texts(other.receive, 1) == ["0"]
        await setup.is_usable()

    check(case)


@pytest.mark.parametrize(
    ("ack", "prefetch"), [*(("receive", prefetch) for prefetch in (0, 1, 10, None)), ("commit", 0), ("commit", 10)]
)
@pytest.mark.parametrize("many", [False, True])
def test_a_cancelled_receive_in_a_transaction_leaves_nothing_in_it(ack: str, prefetch: int | None, many: bool) -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async with (
            setup.connection.session(transacted=True, ack=ack) as session,
            session.consumer(setup.queue, prefetch=prefetch) as consumer,
        ):
            await nothing_is_here(setup, consumer)
            await cancels.run(session.receive_many(3) if many else consumer.receive())
            if cancels.has_reached:
                await session.send("/queue/done", "x")
                await session.commit()
                assert await texts(session.receive, 5) == list("01234")
                await session.commit()
                await setup.all_are_there("")
        await setup.is_usable()

    check(case)


@PREFETCHES
def test_a_cancelled_subscribe_leaves_no_consumer(prefetch: int | None) -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async def subscribe() -> None:
            await setup.connection.consumer(setup.queue, prefetch=prefetch)

        await cancels.run(subscribe())
        if cancels.has_reached:
            assert not setup.connection.health().consumers
            await setup.all_are_there()
        await setup.is_usable()

    check(case)


def test_a_cancelled_subscribe_that_would_be_refused_ends_nothing() -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async def subscribe() -> None:
            try:
                await setup.connection.consumer(setup.queue, selector="((")
            except asyncio.CancelledError:
                raise
            except Exception:
                assert not cancels.has_reached

        await cancels.run(subscribe())
        await setup.all_are_there()
        await setup.is_usable()

    check(case)


# ---- What becomes of a message ----


@pytest.mark.parametrize("how", ["ack", "nack", "reject", "release"])
@PREFETCHES
def test_settling_a_message_holds_though_the_call_is_cancelled(prefetch: int | None, how: str) -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async with setup.connection.consumer(setup.queue, ack="individual", prefetch=prefetch) as consumer:
            message = await consumer.receive(PATIENCE_S)
            assert message is not None
            flush, setup.connection._driver.flush = (  # type: ignore[method-assign]
                setup.connection._driver.flush,
                lambda: False,
            )
            asyncio.get_running_loop().call_later(0.01, _restore, setup.connection, flush)
            await cancels.run(getattr(message, how)())
            _restore(setup.connection, flush)
        is_redelivered = how in ("nack", "release")
        await setup.all_are_there("01234" if is_redelivered else "1234", {"0": 1 if how == "nack" else 0})
        await setup.is_usable()

    asyncio.run(asyncio.wait_for(_at_the_first(case), PATIENCE_SECONDS))


def _restore(connection: Connection, flush: Callable[[], bool]) -> None:
    client, driver = connection._driver.client, connection._driver
    driver.flush = flush  # type: ignore[method-assign]
    if flush():
        client.on_drained()


async def _at_the_first(case: Case) -> None:
    """Cancel calls at their first suspension. Most wait only while the socket takes nothing."""
    for late in (False, True):
        async with new_setup("q") as setup:
            await case(setup, Cancels(0, late=late))


# ---- Transactions ----


@pytest.mark.parametrize("is_block", [False, True])
def test_a_commit_that_is_cancelled_keeps_its_outcome(is_block: bool) -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async with setup.connection.session(transacted=True) as session, session.consumer(setup.queue):
            transaction = session.transaction()

            async def block() -> None:
                async with transaction:
                    assert await texts(session.receive, 2) == list("01")
                    await session.send("/queue/done", "x")
                    if not is_block:
                        await cancels.run(session.commit())
                        if cancels.has_reached:
                            raise asyncio.CancelledError

            if is_block:
                await cancels.run(block())
            else:
                try:
                    await block()
                except asyncio.CancelledError:
                    assert cancels.has_reached
            outcome = transaction.outcome.value
            # The next one begins.
            async with session.transaction():
                message = await session.receive(PATIENCE_S)
                assert message is not None and message.attempts == 0
                assert message.text == ("2" if outcome == "committed" else "0")
        done = (await setup.broker.queue("done")).bodies
        assert (outcome, done) in [("committed", [b"x"]), ("rolled back", [])]
        await setup.all_are_there("34" if outcome == "committed" else "1234")
        await setup.is_usable()

    check(case)


def committing_on_a_slow_disk(setup: CaseSetup, session: Session) -> tuple[Transaction, "asyncio.Task[None]"]:
    transaction = session.transaction()

    async def block() -> None:
        async with transaction:
            await session.send("/queue/done", "x")

    setup.broker.slow_disk(1000)
    return transaction, asyncio.create_task(block())


def test_outcome_of_a_commit_cancelled_twice_is_known_as_soon_as_the_broker_has_answered() -> None:
    """Regression: a second cancellation ends the waiting at once, and the outcome stayed "committing"."""

    async def main() -> None:
        async with new_setup("q") as setup, setup.connection.session(transacted=True) as session:
            transaction, task = committing_on_a_slow_disk(setup, session)
            for _ in range(2):
                await asyncio.sleep(0.1)
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert transaction.outcome.value == "committing"
            setup.broker.slow_disk(0)
            async with asyncio.timeout(PATIENCE_S):
                while transaction.outcome.value == "committing":
                    await asyncio.sleep(0.01)
            assert transaction.outcome.value == "committed"

    asyncio.run(main())


def test_a_cancelled_commit_is_waited_for() -> None:
    async def main() -> None:
        async with new_setup("q") as setup, setup.connection.session(transacted=True) as session:
            transaction, task = committing_on_a_slow_disk(setup, session)
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.sleep(0.1)
            assert not task.done()
            setup.broker.slow_disk(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert transaction.outcome.value == "committed"
            assert (await setup.broker.queue("done")).bodies == [b"x"]

    asyncio.run(main())


@PREFETCHES
def test_a_cancelled_rollback_has_rolled_back(prefetch: int | None) -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async with (
            setup.connection.session(transacted=True) as session,
            session.consumer(setup.queue, prefetch=prefetch),
        ):
            assert await texts(session.receive, 2) == list("01")
            flush, setup.connection._driver.flush = (  # type: ignore[method-assign]
                setup.connection._driver.flush,
                lambda: False,
            )
            asyncio.get_running_loop().call_later(0.01, _restore, setup.connection, flush)
            await cancels.run(session.rollback())
            _restore(setup.connection, flush)
            message = await session.receive(PATIENCE_S)
            assert message is not None and message.text == "0" and message.attempts == 1
        await setup.all_are_there("01234", {"0": 1, "1": 1})
        await setup.is_usable()

    asyncio.run(asyncio.wait_for(_at_the_first(case), PATIENCE_SECONDS))


def test_a_transaction_whose_block_is_cancelled_counts_no_attempt() -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async with setup.connection.session(transacted=True) as session, session.consumer(setup.queue):

            async def block() -> None:
                async with session.transaction():
                    await session.receive()
                    await session.send("/queue/done", "x")
                    async with setup.connection.consumer("/queue/none") as none:
                        await none.receive(0.01)
                    raise asyncio.CancelledError

            try:
                await cancels.run(block())
            except AssertionError:
                assert not cancels.has_reached
            message = await session.receive(PATIENCE_S)
            assert message is not None and message.text == "0" and message.attempts == 0
        assert (await setup.broker.queue("done")).bodies == []
        await setup.all_are_there()
        await setup.is_usable()

    check(case)


# ---- Sending ----


@pytest.mark.parametrize("how", ["send", "send_many", "flush", "request", "in a transaction"])
def test_a_cancelled_send_arrives_once_or_not_and_holds_up_nothing(how: str) -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        connection = setup.connection
        async with connection.session(transacted=True) as session:

            async def flush() -> None:
                connection.send_nowait("/queue/new", "1")
                await connection.flush()

            async def in_transaction() -> None:
                async with session.transaction():
                    await session.send("/queue/new", "1")

            calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
                "send": lambda: connection.send("/queue/new", "1"),
                "send_many": lambda: connection.send_many("/queue/new", ["1"]),
                "flush": flush,
                "request": lambda: connection.control_request("queues"),
                "in a transaction": in_transaction,
            }
            await cancels.run(calls[how]())
            await connection.send("/queue/new", "2", timeout=PATIENCE_S)
            assert await connection.control_request("queues", timeout=PATIENCE_S)
        bodies = (await setup.broker.queue("new")).bodies
        if how == "request":
            assert bodies == [b"2"]
        else:
            assert bodies in ([b"1", b"2"], [b"2"])
            if not cancels.has_reached:
                assert bodies == [b"1", b"2"]
        await setup.is_usable()

    check(case)


def test_a_cancelled_request_gets_no_other_requests_reply() -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async def answer(message: Message, session: Session) -> None:
            await session.reply(message, message.body + b"!")

        answering = asyncio.create_task(setup.connection.consume("/queue/requests", answer))
        await cancels.run(setup.connection.request("/queue/requests", "1"))
        reply = await setup.connection.request("/queue/requests", "2", timeout=PATIENCE_S)
        assert reply.text == "2!"
        answering.cancel()
        await asyncio.wait({answering})
        await setup.is_usable()

    check(case)


# ---- Browsing, connecting, the end ----


def test_a_cancelled_browse_leaves_no_connection() -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async def browse() -> None:
            shown = [message.text async for message in setup.connection.browse(setup.queue)]
            assert shown == list("01234")

        await cancels.run(browse())
        await setup.all_are_there()
        await setup.is_usable()
        async with asyncio.timeout(PATIENCE_S):
            while len(setup.broker._broker_run.connections) > 1:
                await asyncio.sleep(0.001)

    check(case)


def test_a_cancelled_connect_leaves_nothing() -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        async def connecting() -> None:
            await (await connect(setup.broker.url)).close()

        await cancels.run(connecting())
        async with asyncio.timeout(PATIENCE_S):
            while len(setup.broker._broker_run.connections) > 1:
                await asyncio.sleep(0.001)
        await setup.is_usable()

    check(case)


@pytest.mark.parametrize("what", ["connection", "session", "consumer", "connection of a handler"])
def test_a_cancelled_close_has_closed_and_counts_no_attempt(what: str) -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        connection = await connect(setup.broker.url)
        consuming = None
        if what == "connection of a handler":
            started = asyncio.Event()

            async def handle(message: Message, session: Session) -> None:
                started.set()
                await asyncio.sleep(0.01)
                raise asyncio.CancelledError

            consuming = asyncio.create_task(connection.consume(setup.queue, handle))
            await started.wait()
            await cancels.run(connection.close())
            await asyncio.wait({consuming})
        elif what == "session":
            session = await connection.session(transacted=True)
            await session.consumer(setup.queue)
            assert await texts(session.receive, 2) == list("01")
            await cancels.run(session.close())
            with pytest.raises(ClosedError):
                await session.receive()
        else:
            consumer = await connection.consumer(setup.queue)
            assert await texts(consumer.receive, 1) == list("0")
            await cancels.run(consumer.close() if what == "consumer" else connection.close())
            with pytest.raises(ClosedError):
                await consumer.receive()
        if what in ("consumer", "session"):
            await connection.send("/queue/usable", "x", timeout=PATIENCE_S)
            await connection.close()
        with pytest.raises(ClosedError):
            await connection.send("/queue/usable", "x")
        await setup.all_are_there()
        await setup.is_usable()

    if what in ("consumer", "session"):
        # They do not wait while the socket takes everything.
        asyncio.run(asyncio.wait_for(_at_the_first(case), PATIENCE_SECONDS))
    else:
        check(case)


def test_a_cancelled_consume_settles_the_messages_that_its_handlers_have_started() -> None:
    async def case(setup: CaseSetup, cancels: Cancels) -> None:
        seen: list[str] = []

        async def handle(message: Message, session: Session) -> None:
            await session.send("/queue/done", message.body)
            seen.append(message.text)
            if len(seen) == 5:
                await session.close()

        await cancels.run(setup.connection.consume(setup.queue, handle, transacted=True, concurrency=2))
        done = [body.decode() for body in (await setup.broker.queue("done")).bodies]
        left = [body for body, _ in await setup.remaining()]
        assert sorted(done + left) == list("01234")
        await setup.is_usable()

    check(case)


def test_a_transaction_rolled_back_by_another_task_raises_and_leaks_nothing_into_the_next() -> None:
    async def main() -> None:
        async with new_setup("q") as setup, setup.connection.session(transacted=True) as session:
            await session.consumer(setup.queue)
            with pytest.raises(RolledBack):
                async with session.transaction():
                    assert await texts(session.receive, 2) == list("01")
                    await asyncio.create_task(session.rollback())
                    with pytest.raises(RolledBack):
                        await session.send("/queue/done", "x")
                    with pytest.raises(RolledBack):
                        await session.receive()
            message = await session.receive(PATIENCE_S)
            assert message is not None and message.text == "0" and message.attempts == 1
            await session.commit()
            assert (await setup.broker.queue("done")).bodies == []

    asyncio.run(main())
