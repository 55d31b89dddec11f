"""Tests that a COMMIT under the program's own number takes effect once, however often and from wherever it is sent.

Source of what is expected: docs/client.md, "Transactions"; docs/contract.md, C18.5 to C18.7.
"""

import asyncio
from typing import Any, Literal

import pytest

from tests.integration.client_here import on_a_connection, remaining
from truenext import blocking
from truenext.client.tasks.connection import Connection, connect
from truenext.errors import InDoubt, LocalProtocolError, Refused, RolledBack
from truenext.testing.local import LocalBroker

PATIENCE_S = 60.0


async def bodies(broker: LocalBroker, queue: str) -> list[str]:
    return [each.body.decode() for each in (await broker.queue(queue)).messages]


def test_a_commit_under_a_used_number_does_nothing_and_returns_false() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            await session.send("/queue/done", "first")
            assert await session.commit(producer="p", number=1) is True
            await session.send("/queue/done", "second")
            assert await session.commit(producer="p", number=1) is False
            await session.send("/queue/done", "third")
            assert await session.commit(producer="p", number=2) is True
            await session.send("/queue/done", "fourth")
            assert await session.commit() is True
        async with connect(broker.url) as other, other.session(transacted=True) as session:
            await session.send("/queue/done", "of another connection")
            assert await session.commit(producer="p", number=2) is False
        assert await bodies(broker, "done") == ["first", "third", "fourth"]

    on_a_connection(work)


def test_messages_of_a_repeated_commit_come_again_without_an_attempt() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            await session.send("/queue/done", "x")
            assert await session.commit(producer="p", number=1)
            message = await session.receive(PATIENCE_S)
            assert message is not None and message.text == "0"
            await session.send("/queue/done", "y")
            assert not await session.commit(producer="p", number=1)
            again = await session.receive(PATIENCE_S)
            assert again is not None and (again.text, again.attempts, again.redelivered) == ("0", 0, True)
            assert await session.commit()
        assert await remaining(broker) == [("1", 0)]
        assert await remaining(broker, "done") == [("x", 0)]

    on_a_connection(work, waiting="01")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_numbered_commit_whose_answer_is_lost_is_in_doubt_and_can_be_repeated(
    when: Literal["before", "after"],
) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True, ack="commit") as session, session.consumer("/queue/q"):
            assert await session.receive(PATIENCE_S) is not None
            await session.send("/queue/done", "x")
            broker.lose_commit(when)
            with pytest.raises(InDoubt) as doubt:
                await session.commit(producer="p", number=1)
            # Asking would settle the number.
            assert doubt.value.token == ""
            await session.send("/queue/done", "x")
            assert await session.commit(producer="p", number=1) is (when == "before")
        assert await remaining(broker) == ([("0", 0)] if when == "before" else [])
        assert await remaining(broker, "done") == [("x", 0)]

    on_a_connection(work, waiting="0")


def test_a_number_that_is_too_far_on_is_refused_and_the_transaction_rolled_back() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            await session.send("/queue/done", "x")
            with pytest.raises(RolledBack) as raised:
                await session.commit(producer="p", number=2)
            assert isinstance(raised.value.__cause__, Refused) and raised.value.__cause__.code == "gap"
            await session.send("/queue/done", "y")
            assert await session.commit(producer="p", number=1)
        assert await remaining(broker, "done") == [("y", 0)]

    on_a_connection(work)


@pytest.mark.parametrize(
    "options",
    [
        {"producer": "p"},
        {"number": 1},
        {"producer": "", "number": 1},
        {"producer": "p", "number": -1},
        {"producer": "p" * 256, "number": 1},
        {"producer": "p", "number": True},
        {"producer": 7, "number": 1},
    ],
)
def test_commit_refuses_an_invalid_producer_or_number_before_it_sends(options: dict[str, Any]) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            await session.send("/queue/done", "x")
            with pytest.raises(ValueError):
                await session.commit(**options)
            await session.commit()
        assert await remaining(broker, "done") == [("x", 0)]

    on_a_connection(work)


def test_an_empty_transaction_has_no_number() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            with pytest.raises(LocalProtocolError):
                await session.commit(producer="p", number=1)

    on_a_connection(work)


def test_blocking_session_commits_under_a_number_once() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        def threaded() -> None:
            with blocking.connect(broker.url) as own, own.session(transacted=True) as session:
                session.send("/queue/done", "x")
                assert session.commit(producer="p", number=1) is True
                session.send("/queue/done", "x")
                assert session.commit(producer="p", number=1) is False

        await asyncio.to_thread(threaded)
        assert await remaining(broker, "done") == [("x", 0)]

    on_a_connection(work)
