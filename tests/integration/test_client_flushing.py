"""Tests of the flush of a transaction: it reports refusals of the broker, and makes nothing visible before the commit.

Source of what is expected: docs/client.md, "Transactions". tests/client/test_flushing.py tests the frames of a flush.
"""

import asyncio

import pytest

from tests.integration.client_here import on_a_connection, remaining
from truenext import blocking, testing
from truenext.client.tasks.connection import Connection, Session
from truenext.errors import Code, ConnectionLost, Refused, RolledBack
from truenext.testing.local import LocalBroker

PATIENCE_S = 60.0
ACKS = pytest.mark.parametrize("ack", ["receive", "commit"])
NOWHERE = "/nowhere/q"
MANY_BYTES = b"x" * (9 * 1024 * 1024)


@ACKS
def test_flushed_sends_are_invisible_before_the_commit(ack: str) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack=ack) as session, session.consumer("/queue/q"):
            for text in "01":
                message = await session.receive(PATIENCE_S)
                assert message is not None and message.text == text
                await session.send("/queue/done", message.body)
                await session.flush()
            assert await remaining(broker, "done") == []
            await session.commit()
            await session.flush()
        assert await remaining(broker, "done") == [("0", 0), ("1", 0)]
        assert await remaining(broker) == [("2", 0)]

    on_a_connection(work, waiting="012")


async def refused_at_flush(session: Session) -> str:
    with pytest.raises(RolledBack) as caught:
        await session.flush()
    with pytest.raises(RolledBack):
        await session.commit()
    cause = caught.value.__cause__
    assert isinstance(cause, Refused)
    return cause.code


@ACKS
def test_sends_that_the_broker_refuses_raise_at_the_flush_and_count_no_attempt(ack: str) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack=ack) as session, session.consumer("/queue/q"):
            assert await session.receive(PATIENCE_S)
            await session.send(NOWHERE, "x")
            assert await refused_at_flush(session) == Code.DESTINATION
            assert await session.receive(PATIENCE_S)
            await session.send("/queue/done", MANY_BYTES)
            await session.flush()
            await session.send("/queue/done", MANY_BYTES)
            assert await refused_at_flush(session) == Code.LIMIT
            broker.fill_disk()
            assert await session.receive(PATIENCE_S)
            await session.send("/queue/done", "x")
            assert await refused_at_flush(session) == Code.NO_SPACE
            broker.free_disk()
            await session.send("/queue/done", "y")
            await session.flush()
            await session.commit()
        assert connection.health().reconnects == 0
        assert await remaining(broker) == [("0", 0)]
        assert await remaining(broker, "done") == [("y", 0)]

    on_a_connection(work, waiting="0")


@ACKS
def test_a_connection_lost_between_flush_and_commit_rolls_the_transaction_back(ack: str) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack=ack) as session, session.consumer("/queue/q"):
            assert await session.receive(PATIENCE_S)
            await session.send("/queue/done", "x")
            await session.flush()
            broker.drop(connection)
            while not connection.health().reconnects:
                await asyncio.sleep(0.001)
            with pytest.raises(RolledBack) as caught:
                await session.commit()
            assert isinstance(caught.value.__cause__, ConnectionLost)
            message = await session.receive(PATIENCE_S)
            assert message is not None and message.attempts == 0
            await session.send("/queue/done", "y")
            await session.flush()
            await session.commit()
        assert await remaining(broker) == []
        assert await remaining(broker, "done") == [("y", 0)]

    on_a_connection(work, waiting="0")


def test_a_connection_that_is_lost_while_a_flush_waits_is_known_at_once() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            await session.send("/queue/done", "x")
            broker.freeze(connection)
            flushing = asyncio.create_task(session.flush())
            await asyncio.sleep(0.01)
            broker.thaw(connection)
            broker.drop(connection)
            with pytest.raises(RolledBack) as caught:
                await flushing
            assert isinstance(caught.value.__cause__, ConnectionLost)

    on_a_connection(work)


def test_a_flush_that_is_cancelled_or_takes_too_long_leaves_the_transaction_open() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            await session.send("/queue/done", "x")
            broker.freeze(connection)
            with pytest.raises(TimeoutError):
                await session.flush(timeout=0.01)
            flushing = asyncio.create_task(session.flush())
            await asyncio.sleep(0.01)
            flushing.cancel()
            await asyncio.wait({flushing})
            assert flushing.cancelled()
            broker.thaw(connection)
            await session.flush()
            await session.commit()
        assert await remaining(broker, "done") == [("x", 0)]

    on_a_connection(work)


def test_blocking_session_flushes_and_learns_refusals() -> None:
    with (
        testing.blocking_broker() as broker,
        blocking.connect(broker.url) as connection,
        connection.session(transacted=True, ack="commit") as session,
    ):
        for number in range(100):
            session.send("/queue/done", str(number))
            session.flush()
        session.commit()
        session.send(NOWHERE, "x")
        with pytest.raises(RolledBack) as caught:
            session.flush()
        assert isinstance(caught.value.__cause__, Refused)
        session.rollback()
        assert [each.text for each in connection.browse("/queue/done")] == [str(number) for number in range(100)]
