"""Tests of sessions that acknowledge their messages at the commit.

Source of what is expected: docs/client.md, "Transactions". test_client_attempts.py tests the attempts when code
raises, test_client_breaks.py lost connections.
"""

import asyncio
from typing import Literal

import pytest

from tests.integration.client_here import on_a_connection, remaining
from truenext import blocking, testing
from truenext.client.tasks.connection import Connection, Message, Session
from truenext.errors import ClosedError, LocalProtocolError, RolledBack
from truenext.testing.local import LocalBroker

PATIENCE_S = 60.0
NOTHING_S = 0.1


async def receive(session: Session, *texts: str) -> list[Message]:
    got = [await session.receive(PATIENCE_S) for _ in texts]
    assert [None if each is None else each.text for each in got] == list(texts)
    return [each for each in got if each is not None]


def test_messages_handed_out_are_acknowledged_with_the_commit_and_not_before() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            await receive(session, "0", "1")
            await session.send("/queue/done", "x")
            assert (await broker.queue("q")).unacknowledged == 4
            await session.commit()
        assert await remaining(broker) == [("2", 0), ("3", 0)]
        assert await remaining(broker, "done") == [("x", 0)]

    on_a_connection(work, waiting="0123")


def test_a_transaction_without_a_send_is_committed_too() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            async with session.transaction():
                await receive(session, "0")
            async with session.transaction():
                await receive(session, "1")
        assert await remaining(broker) == [("2", 0), ("3", 0)]

    on_a_connection(work, waiting="0123")


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_a_message_nacked_in_its_transaction_waits_for_its_delay_and_others_count_no_attempt(
    which: int, sends: bool
) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            got = await receive(session, "0", "1")
            if sends:
                await session.send("/queue/done", "x")
            await got[which].nack(delay=60)
            others = [text for text in "0123" if text != str(which)]
            await receive(session, *others)
            assert await session.receive(NOTHING_S) is None
            await broker.advance(seconds=59)
            assert await session.receive(NOTHING_S) is None
            await broker.advance(seconds=2)
            (again,) = await receive(session, str(which))
            assert again.attempts == 1
            await session.rollback(failed=False)
        assert await remaining(broker) == [(text, int(text == str(which))) for text in "0123"]
        assert await remaining(broker, "done") == []

    on_a_connection(work, waiting="0123")


def test_a_message_nacked_alone_is_the_next_again_at_once() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            (first,) = await receive(session, "0")
            await first.nack()
            (again,) = await receive(session, "0")
            assert again.attempts == 1
            await receive(session, "1", "2", "3")
            await session.commit()
        assert await remaining(broker) == []

    on_a_connection(work, waiting="0123")


def test_a_message_that_is_rejected_in_its_transaction_is_alone_a_dead_letter() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            _, second = await receive(session, "0", "1")
            await session.send("/queue/done", "x")
            await second.reject()
            await receive(session, "0", "2")
            await session.commit()
        assert await remaining(broker) == [("3", 0)]
        assert [body for body, _ in await remaining(broker, "DLQ.q")] == ["1"]
        assert await remaining(broker, "done") == []

    on_a_connection(work, waiting="0123")


def test_a_released_message_rolls_its_transaction_back_and_counts_no_attempt() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            async with session.transaction() as transaction:
                _, second = await receive(session, "0", "1")
                await session.send("/queue/done", "x")
                await second.release()
                # Nothing more can be said of it.
                await second.release()
                with pytest.raises(LocalProtocolError):
                    await second.nack()
            assert transaction.outcome.value == "rolled back"
        assert await remaining(broker) == [("0", 0), ("1", 0), ("2", 0), ("3", 0)]
        assert await remaining(broker, "done") == []

    on_a_connection(work, waiting="0123")


def test_a_message_marked_as_failed_counts_an_attempt_and_the_rest_is_committed() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with (
            connection.session(transacted=True, ack="commit") as session,
            session.consumer("/queue/q"),
            session.transaction() as transaction,
        ):
            _, second, _ = await receive(session, "0", "1", "2")
            transaction.mark_failed(second)
        assert await remaining(broker) == [("1", 1), ("3", 0)]

    on_a_connection(work, waiting="0123")


def test_a_prefetch_counts_what_a_transaction_has_not_acknowledged() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with (
            connection.session(transacted=True, ack="commit") as session,
            session.consumer("/queue/q", prefetch=2),
        ):
            await receive(session, "0", "1")
            assert await session.receive(0) is None
            assert await session.receive(NOTHING_S) is None
            await session.commit()
            await receive(session, "2", "3")
            await session.commit()
        assert await remaining(broker) == []

    on_a_connection(work, waiting="0123")


def test_a_transaction_whose_message_another_task_has_nacked_raises_in_each_call() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            first, second = await receive(session, "0", "1")
            await asyncio.create_task(first.nack(delay=60))
            with pytest.raises(RolledBack):
                await session.send("/queue/done", "x")
            with pytest.raises((RolledBack, LocalProtocolError)):
                await second.nack()
            with pytest.raises(RolledBack):
                await session.commit()
            await receive(session, "1", "2", "3")
            await session.rollback(failed=False)
        assert await remaining(broker) == [("0", 1), ("1", 0), ("2", 0), ("3", 0)]
        assert await remaining(broker, "done") == []

    on_a_connection(work, waiting="0123")


def test_a_transaction_whose_consumer_was_closed_is_rolled_back() -> None:
    """The messages of the consumer were released with its subscription."""

    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session:
            async with session.consumer("/queue/q"):
                (first,) = await receive(session, "0")
                await session.send("/queue/done", "x")
            with pytest.raises(LocalProtocolError):
                await first.nack()
            with pytest.raises(RolledBack) as caught:
                await session.commit()
            assert isinstance(caught.value.__cause__, ClosedError)
            async with session.consumer("/queue/q"):
                await receive(session, "0")
                await session.commit()
        assert await remaining(broker) == [("1", 0), ("2", 0), ("3", 0)]
        assert await remaining(broker, "done") == []

    on_a_connection(work, waiting="0123")


def test_a_lost_connection_rolls_a_transaction_back_and_counts_no_attempt() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            await receive(session, "0", "1")
            await session.send("/queue/done", "x")
            broker.drop(connection)
            while not connection.health().reconnects:
                await asyncio.sleep(0.001)
            with pytest.raises(RolledBack):
                await session.commit()
            got = await receive(session, "0", "1", "2", "3")
            assert [each.attempts for each in got] == [0, 0, 0, 0]
            await session.send("/queue/done", "y")
            await session.commit()
        assert await remaining(broker) == []
        assert await remaining(broker, "done") == [("y", 0)]

    on_a_connection(work, waiting="0123")


def test_a_nack_after_a_lost_connection_ended_the_transaction_counts_at_redelivery() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            first, _ = await receive(session, "0", "1")
            await session.send("/queue/done", "x")
            broker.drop(connection)
            while not connection.health().reconnects:
                await asyncio.sleep(0.001)
            await first.nack(delay=60)
            await receive(session, "1", "2")
            await session.commit()
            await broker.advance(seconds=61)
            (again,) = await receive(session, "0")
            assert again.attempts == 1
            await session.commit()
        assert await remaining(broker) == [("3", 0)]
        assert await remaining(broker, "done") == []

    on_a_connection(work, waiting="0123")


@pytest.mark.parametrize("how", ["nack", "reject", "release"])
def test_a_message_can_be_nacked_when_the_broker_has_refused_a_send_of_its_transaction(how: str) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            first, _ = await receive(session, "0", "1")
            await session.send("/nowhere/x", "x")
            with pytest.raises(RolledBack):
                await session.flush()
            await getattr(first, how)()
            # It has ended, and the next one begins.
            got = await receive(session, *("01" if how != "reject" else "12"))
            assert got[0].attempts == int(how == "nack")
            await session.send("/queue/done", "x")
            await session.commit()
        assert connection.health().reconnects == 0
        assert await remaining(broker) == [(text, 0) for text in ("23" if how != "reject" else "3")]
        assert [body for body, _ in await remaining(broker, "DLQ.q")] == (["0"] if how == "reject" else [])
        assert await remaining(broker, "done") == [("x", 0)]

    on_a_connection(work, waiting="0123")


@pytest.mark.parametrize("when", ["before", "after"])
def test_outcome_of_a_lost_commit_is_known(when: Literal["before", "after"]) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            await receive(session, "0", "1")
            await session.send("/queue/done", "x")
            broker.lose_commit(when)
            if when == "after":
                await session.commit()
            else:
                with pytest.raises(RolledBack):
                    await session.commit()
                got = await receive(session, "0", "1")
                assert [each.attempts for each in got] == [0, 0]
                await session.send("/queue/done", "x")
                await session.commit()
            assert connection.health().reconnects == 1
        assert await remaining(broker) == [("2", 0), ("3", 0)]
        assert await remaining(broker, "done") == [("x", 0)]

    on_a_connection(work, waiting="0123")


def test_messages_of_a_commit_under_way_cannot_be_nacked_or_rejected() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            (first,) = await receive(session, "0")
            broker.freeze(connection)
            committing = asyncio.create_task(session.commit())
            await asyncio.sleep(0)
            with pytest.raises(LocalProtocolError):
                await first.nack()
            await first.release()
            broker.thaw(connection)
            await committing
            with pytest.raises(LocalProtocolError):
                await first.reject()
        assert await remaining(broker) == [("1", 0), ("2", 0), ("3", 0)]

    on_a_connection(work, waiting="0123")


def test_a_handler_can_nack_its_message_with_a_delay() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        seen: list[tuple[str, int]] = []
        done = asyncio.Event()

        async def handle(message: Message, session: Session) -> None:
            seen.append((message.text, message.attempts))
            await session.send("/queue/done", message.body)
            if message.text == "1" and not message.attempts:
                await message.nack(delay=60)
            if message.text == "2":
                await message.reject()
            if len(seen) in (4, 5):
                done.set()

        consuming = asyncio.create_task(
            connection.consume("/queue/q", handle, transacted=True, ack="commit", concurrency=2)
        )
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        done.clear()
        await broker.advance(seconds=61)
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        consuming.cancel()
        await asyncio.wait({consuming})
        assert sorted(seen) == [("0", 0), ("1", 0), ("1", 1), ("2", 0), ("3", 0)]
        assert await remaining(broker) == []
        assert [body for body, _ in await remaining(broker, "DLQ.q")] == ["2"]
        assert sorted(body for body, _ in await remaining(broker, "done")) == ["0", "1", "3"]

    on_a_connection(work, waiting="0123")


def test_a_message_that_its_transaction_acknowledges_cannot_be_settled_otherwise() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session, session.consumer("/queue/q"):
            (first,) = await receive(session, "0")
            for settle in (first.ack, first.nack, first.reject):
                with pytest.raises(LocalProtocolError):
                    await settle()
            await first.release()
            await session.commit()
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            (second,) = await receive(session, "1")
            with pytest.raises(LocalProtocolError):
                await second.ack()
            await session.commit()
        assert await remaining(broker) == [("2", 0), ("3", 0)]

    on_a_connection(work, waiting="0123")


def test_session_refuses_ack_modes_that_do_not_fit_transacted() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        with pytest.raises(ValueError, match="receive"):
            connection.session(transacted=True, ack="auto")
        with pytest.raises(ValueError, match="transacted"):
            connection.session(ack="commit")

    on_a_connection(work)


def test_blocking_session_settles_messages_of_ack_at_commit() -> None:
    with testing.blocking_broker() as broker, blocking.connect(broker.url) as connection:
        connection.send_many("/queue/q", list("0123"))
        with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q", prefetch=2):
            got = session.receive_many(2, PATIENCE_S)
            got += session.receive_many(2 - len(got), PATIENCE_S) if len(got) < 2 else []
            assert [each.text for each in got] == ["0", "1"]
            session.send("/queue/done", "x")
            got[0].nack(delay=60)
            message = session.receive(PATIENCE_S)
            assert message is not None and (message.text, message.attempts) == ("1", 0)
            message.reject()
            message = session.receive(PATIENCE_S)
            assert message is not None and message.text == "2"
            message.release()
            message = session.receive(PATIENCE_S)
            assert message is not None and (message.text, message.attempts) == ("2", 0)
            session.send("/queue/done", "y")
            session.commit()
        assert [each.text for each in connection.browse("/queue/q")] == ["0", "3"]
        assert [each.text for each in connection.browse("/queue/DLQ.q")] == ["1"]
        assert [each.text for each in connection.browse("/queue/done")] == ["y"]
