"""Tests of clients and producers at a broker that was restored from a copy, and so has another identity.

Source of what is expected: docs/contract.md, C29.12 and C29.13.
"""

import asyncio

import pytest

from tests.integration.client_here import on_a_connection
from tests.restored import renewed_copy, replace_store
from truenext.client.tasks.connection import Connection
from truenext.errors import ConnectionLost, InDoubt, Refused, RolledBack
from truenext.testing.local import LocalBroker


async def bodies(broker: LocalBroker, queue: str = "q") -> list[str]:
    return [each.body.decode() for each in (await broker.queue(queue)).messages]


def test_send_in_doubt_at_the_original_is_not_repeated_to_the_restored_broker() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        await connection.send("/queue/q", "1")
        backup = renewed_copy(broker._store)
        await connection.send("/queue/q", "2")
        broker.freeze()
        in_doubt = connection.send_nowait("/queue/q", "3")
        await asyncio.sleep(0.05)
        await replace_store(broker, backup)
        with pytest.raises(ConnectionLost):
            await in_doubt
        await connection.send("/queue/q", "4")
        assert await bodies(broker) == ["1", "4"]

    on_a_connection(work)


def test_broker_that_kept_the_identity_of_the_original_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the client repeats what the original may have accepted."""
    keep_identity(monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_send_in_doubt_at_the_original_is_not_repeated_to_the_restored_broker()


def keep_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.restored.new_identity", lambda: "0000000a")
    monkeypatch.setattr("truenext.store.memory.new_identity", lambda: "0000000a")


def test_commit_in_doubt_at_the_original_stays_unknown_at_the_restored_broker() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            await session.send("/queue/q", "1")
            await session.commit()
            backup = renewed_copy(broker._store)
            await session.send("/queue/q", "2")
            broker.freeze()
            committing = asyncio.create_task(session.commit())
            await asyncio.sleep(0.05)
            await replace_store(broker, backup)
            with pytest.raises(InDoubt) as raised:
                await committing
            assert await connection.outcome(raised.value) == "unknown"
            await session.send("/queue/q", "3")
            # With a number of its own from 1 on: those of the original do not count.
            assert await session.commit()
        assert await bodies(broker) == ["1", "3"]

    on_a_connection(work)


def test_numbers_of_a_producer_are_those_of_the_copy() -> None:
    """C18.5: what the copy has is a repeat. What was sent since then is not in the copy, and is accepted."""

    async def work(broker: LocalBroker, connection: Connection) -> None:
        async def send(number: int) -> None:
            await connection.send("/queue/q", f"{number}", producer="shop", number=number)

        async def commit(number: int) -> bool:
            async with connection.session(transacted=True) as session:
                await session.send("/queue/c", f"{number}")
                return await session.commit(producer="till", number=number)

        await send(5)
        assert await commit(1)
        backup = renewed_copy(broker._store)
        await send(7)
        assert await commit(2)
        await replace_store(broker, backup)
        while not connection.health().reconnects:
            await asyncio.sleep(0.001)
        for number in (5, 7, 8):
            await send(number)
        assert await bodies(broker) == ["5", "7", "8"]
        assert not await commit(1)
        # The numbers of commits have no gaps: the copy lacks the second.
        with pytest.raises(RolledBack) as raised:
            await commit(3)
        assert isinstance(raised.value.__cause__, Refused) and raised.value.__cause__.code == "gap"
        assert await commit(2)
        assert await bodies(broker, "c") == ["1", "2"]

    on_a_connection(work)
