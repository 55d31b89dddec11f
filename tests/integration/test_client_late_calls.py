"""Tests of calls on a session, message or transaction that has ended.

Source of what is expected: docs/client.md, "Handlers" and "Transactions".
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from tests.integration.client_here import on_a_connection, remaining
from truenext import blocking
from truenext.client.tasks.connection import Connection, Message, Session
from truenext.errors import ClosedError, InDoubt, LocalProtocolError, TruenextError
from truenext.testing.blocking import BlockingBroker, blocking_broker
from truenext.testing.local import LocalBroker

PATIENCE_S = 60.0

Call = Callable[[Session, Message], Awaitable[object]]


async def _transact(session: Session, message: Message) -> None:
    async with session.transaction():
        pass


LATE: dict[str, Call] = {
    "send": lambda session, message: session.send("/queue/late", "late"),
    "reply": lambda session, message: session.reply(message, "late"),
    "receive": lambda session, message: session.receive(timeout=0),
    "receive_many": lambda session, message: session.receive_many(2, timeout=1),
    "consumer": lambda session, message: session.consumer("/queue/other").__aenter__(),
    "transaction": _transact,
    "flush": lambda session, message: session.flush(),
    "commit": lambda session, message: session.commit(),
    "rollback": lambda session, message: session.rollback(),
    "close": lambda session, message: session.close(),
    "ack": lambda session, message: message.ack(),
    "nack": lambda session, message: message.nack(),
    "reject": lambda session, message: message.reject(),
}
OF_A_MESSAGE = {"ack", "nack", "reject"}


@pytest.mark.parametrize("ack", ["receive", "commit"])
@pytest.mark.parametrize("name", LATE)
def test_call_of_a_handler_that_has_returned_is_refused_while_the_next_message_fails(name: str, ack: str) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", ["first", "second"], reply_to="/queue/late")
        handles: list[tuple[Session, Message]] = []
        raised: list[BaseException] = []

        async def handle(message: Message, session: Session) -> None:
            handles.append((session, message))
            if len(handles) == 1:
                return
            await session.send("/queue/done", message.text)
            try:
                await LATE[name](*handles[0])
            except TruenextError as error:
                raised.append(error)
            await session.send("/queue/done", message.text)
            if len(handles) == 2:
                raise ZeroDivisionError

        consuming = asyncio.create_task(connection.consume("/queue/q", handle, transacted=True, ack=ack))
        async with asyncio.timeout(PATIENCE_S):
            while len(raised) < 2 and not consuming.done():
                await asyncio.sleep(0.002)
        consuming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consuming
        # The second message failed once, came again, and all that it sent is there once.
        assert [message.text for _, message in handles] == ["first", "second", "second"]
        assert await remaining(broker) == []
        assert [body for body, _ in await remaining(broker, "done")] == ["second", "second"]
        assert await remaining(broker, "late") == []
        expected = LocalProtocolError if name in OF_A_MESSAGE else ClosedError
        assert [type(each) for each in raised] == [expected, expected]
        if name not in OF_A_MESSAGE:
            assert "has ended with the call of its handler" in str(raised[0])

    on_a_connection(work)


def test_block_that_a_handler_has_left_running_ends_without_the_next_message() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", ["first", "second"])
        may_continue = asyncio.Event()
        late: list[asyncio.Task[None]] = []
        seen: list[str] = []

        async def leave_open(session: Session) -> None:
            async with session.transaction():
                await may_continue.wait()

        async def handle(message: Message, session: Session) -> None:
            seen.append(message.text)
            if message.text == "first":
                late.append(asyncio.create_task(leave_open(session)))
                await asyncio.sleep(0)
                return
            if len(seen) == 2:
                may_continue.set()
                await asyncio.wait(late)
                raise ZeroDivisionError

        consuming = asyncio.create_task(connection.consume("/queue/q", handle, transacted=True))
        async with asyncio.timeout(PATIENCE_S):
            while len(seen) < 3:
                await asyncio.sleep(0.002)
        consuming.cancel()
        await asyncio.wait([consuming])
        assert isinstance(late[0].exception(), ClosedError)
        assert seen == ["first", "second", "second"]

    on_a_connection(work)


def test_send_that_waits_when_its_handler_returns_is_refused_and_nothing_of_it_arrives() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", ["first", "second"])
        late: list[asyncio.Task[None]] = []
        handled: list[str] = []

        async def handle(message: Message, session: Session) -> None:
            if message.text == "first":
                # While the first transaction is being committed, the send waits for the next one.
                asyncio.get_running_loop().call_soon(
                    lambda: late.append(asyncio.create_task(session.send("/queue/late", "late")))
                )
                broker.slow_disk(0.05)
            handled.append(message.text)

        consuming = asyncio.create_task(connection.consume("/queue/q", handle, transacted=True))
        async with asyncio.timeout(PATIENCE_S):
            while len(handled) < 2 or not late[0].done():
                await asyncio.sleep(0.002)
        broker.slow_disk(0)
        consuming.cancel()
        await asyncio.wait([consuming])
        assert isinstance(late[0].exception(), ClosedError)
        assert await remaining(broker, "late") == []

    on_a_connection(work)


def test_transaction_that_has_ended_names_no_message_of_the_next_one_as_failed() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send_many("/queue/q", ["first", "second"])
        async with connection.session(transacted=True) as session, session.consumer("/queue/q") as consumer:
            before = session.transaction()
            async with before:
                await consumer.receive()
            async with session.transaction():
                second = await consumer.receive()
                assert second is not None and second.text == "second"
                with pytest.raises(LocalProtocolError, match="has not started, or has ended"):
                    before.mark_failed(second)
            assert await remaining(broker) == []

    on_a_connection(work)


def _in_threads(broker: BlockingBroker, late: Callable[[blocking.Session], object]) -> list[BaseException]:
    """Call `late` on the session of the first message while the second one is handled, which then fails once."""
    sessions: list[blocking.Session] = []
    raised: list[BaseException] = []
    with blocking.connect(broker.url) as connection:
        connection.send_many("/queue/q", ["first", "second"])

        def handle(message: blocking.Message, session: blocking.Session) -> None:
            sessions.append(session)
            if len(sessions) == 1:
                return
            session.send("/queue/done", message.text)

            def call() -> None:
                try:
                    late(sessions[0])
                except TruenextError as error:
                    raised.append(error)

            thread = threading.Thread(target=call)
            thread.start()
            thread.join(PATIENCE_S)
            session.send("/queue/done", message.text)
            if len(sessions) == 2:
                raise ZeroDivisionError
            session.commit()
            session.close()

        connection.consume("/queue/q", handle, transacted=True)
        assert len(sessions) == 3
        assert [shown.text for shown in connection.browse("/queue/done")] == ["second", "second"]
        assert [shown.text for shown in connection.browse("/queue/late")] == []
        assert [shown.text for shown in connection.browse("/queue/q")] == []
    return raised


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(lambda session: session.send("/queue/late", "late"), id="send"),
        pytest.param(lambda session: session.commit(), id="commit"),
        pytest.param(lambda session: session.rollback(), id="rollback"),
        pytest.param(lambda session: session.close(), id="close"),
    ],
)
def test_call_of_a_thread_that_its_handler_has_left_running_is_refused(
    late: Callable[[blocking.Session], object],
) -> None:
    with blocking_broker() as broker:
        raised = _in_threads(broker, late)
        assert [type(each) for each in raised] == [ClosedError, ClosedError]


# ---- Exceptions of the program leave their block ----


async def _make_doubtful(broker: LocalBroker, session: Session) -> None:
    await session.send("/queue/out", "1")
    broker.freeze()
    with pytest.raises(InDoubt):
        await session.commit(timeout=0.05)


@pytest.mark.parametrize("ends", ["cancelled", "timeout", "own"])
def test_exception_of_a_block_leaves_it_while_an_earlier_commit_is_in_doubt(ends: str) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            await _make_doubtful(broker, session)
            transaction = session.transaction()

            async def block() -> None:
                async with transaction:
                    if ends == "own":
                        raise ValueError("of the program")
                    async with asyncio.timeout(0.05 if ends == "timeout" else None):
                        await session.send("/queue/out", "2")

            task = asyncio.create_task(block())
            if ends == "cancelled":
                await asyncio.sleep(0.02)
                task.cancel()
                # Nothing of it is being committed: it does not wait for the commit before.
                assert await asyncio.wait([task], timeout=4.0) == ({task}, set())
            await asyncio.wait([task])
            if ends == "cancelled":
                assert task.cancelled()
            else:
                assert type(task.exception()) is (ValueError if ends == "own" else TimeoutError)
            assert transaction.outcome.value == "rolled back"
            broker.thaw()
            async with session.transaction():
                await session.send("/queue/out", "3")
        assert [body for body, _ in await remaining(broker, "out")] == ["1", "3"]

    on_a_connection(work)


def test_commit_in_doubt_inside_a_block_leaves_the_block_as_it_is() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            with pytest.raises(InDoubt):
                async with session.transaction():
                    await session.send("/queue/out", "1")
                    broker.freeze()
                    await session.commit(timeout=0.05)
            broker.thaw()
            # A block in which nothing happens has nothing to wait for, and nothing to tell of the one before.
            async with session.transaction():
                pass

    on_a_connection(work)


@pytest.mark.parametrize("what", ["transaction", "session", "consumer", "process", "connection"])
def test_exception_of_the_program_leaves_each_block_whose_own_end_fails(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send("/queue/q", "1")
        session = await connection.session(transacted=what == "transaction")
        consumer = await session.consumer("/queue/q")
        message = await consumer.receive()
        assert message is not None
        blocks = {
            "transaction": session.transaction() if what == "transaction" else None,
            "session": session,
            "consumer": consumer,
            "process": message.process(),
            "connection": connection,
        }
        block = blocks[what]
        assert block is not None

        async def fail(self: object, *arguments: object) -> None:
            raise ClosedError("of the client")

        error = ValueError("of the program")
        with pytest.raises(ValueError, match="of the program") as raised:
            async with block:
                with monkeypatch.context() as patch:
                    if what == "connection":
                        patch.setattr(Connection, "_close", fail)
                    else:
                        patch.setattr(type(connection._driver), "run_flow", fail)
                    await block.__aexit__(ValueError, error, None)
                raise error
        assert raised.value is error
        assert [each for each in error.__notes__ if "of the client" in each]

    on_a_connection(work)


def test_ctrl_c_ends_a_blocking_loop_of_transactions_while_a_commit_is_in_doubt() -> None:
    with blocking_broker() as broker, blocking.connect(broker.url) as connection:
        session = connection.session(transacted=True)
        session.send("/queue/out", "1")
        broker.freeze()
        with pytest.raises(InDoubt):
            session.commit(timeout=0.05)
        with pytest.raises(KeyboardInterrupt), session.transaction():
            raise KeyboardInterrupt
        with pytest.raises(ValueError, match="of the program"), session.transaction():
            raise ValueError("of the program")
        broker.thaw()
        with session.transaction():
            session.send("/queue/out", "2")
        assert [shown.text for shown in connection.browse("/queue/out")] == ["1", "2"]
