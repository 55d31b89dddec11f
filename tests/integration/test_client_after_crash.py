"""Tests that sessions go on after a crash of the broker, which forgets the numbers of commits without persistent
messages.

Source of what is expected: docs/contract.md, chapter 19; docs/client.md, "Transactions".
"""

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.client_here import on_a_connection
from tests.integration.log_broker import delete_folder
from truenext.client.tasks.connection import Connection, Session, connect
from truenext.errors import InDoubt, RolledBack
from truenext.testing.local import LocalBroker

PATIENCE_S = 60.0


async def bodies(connection: Connection, queue: str) -> list[str]:
    return [shown.text async for shown in connection.browse(f"/queue/{queue}")]


async def commit(session: Session, body: str, *, persistent: bool) -> None:
    async with session.transaction():
        await session.send("/queue/out", body, persistent=persistent)


async def reconnected(connection: Connection, times: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while connection.health().reconnects < times or connection.health().state != "connected":
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("first", [[], [True], [True, False, True]])
@pytest.mark.parametrize("transients", [1, 3])
@pytest.mark.parametrize("waits", [True, False])
def test_session_whose_last_commits_had_transients_alone_goes_on_after_a_crash(
    first: list[bool], transients: int, waits: bool
) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            sent = []
            for number, persistent in enumerate([*first, *[False] * transients]):
                await commit(session, f"{number}", persistent=persistent)
                if persistent:
                    sent.append(f"{number}")
            for crash in (1, 2):
                await broker.crash()
                if waits:
                    await reconnected(connection, crash)
                else:
                    # It sees that the connection is lost, and waits for the next one.
                    while connection.health().state == "connected" and connection.health().reconnects < crash:
                        await asyncio.sleep(0)
                await commit(session, f"after {crash}", persistent=True)
                await commit(session, f"and {crash}", persistent=False)
                sent.append(f"after {crash}")
                assert await bodies(connection, "out") == [*sent, f"and {crash}"]

    on_a_connection(work)


def test_consume_whose_last_commits_had_transients_alone_goes_on_after_a_crash() -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        seen: list[str] = []

        async def handle(message: object, session: Session) -> None:
            seen.append("a message")
            await session.send("/queue/out", "answer", persistent=False)

        consuming = asyncio.create_task(connection.consume("/queue/q", handle, transacted=True, concurrency=3))
        for count in (4, 8):
            await connection.send_many("/queue/q", ["x"] * 4, persistent=False)
            async with asyncio.timeout(PATIENCE_S):
                while len(seen) < count or connection.health().transactions:
                    await asyncio.sleep(0.002)
            if count == 4:
                await broker.crash()
                await reconnected(connection, 1)
        assert await bodies(connection, "out") == ["answer"] * 4
        consuming.cancel()
        await asyncio.wait([consuming])
        # No commit was rolled back: no message came a second time.
        assert len(seen) == 8

    on_a_connection(work)


@pytest.mark.parametrize("persistent", [True, False])
def test_commit_in_doubt_after_transients_is_known_after_a_crash_if_it_had_persistent_messages(
    persistent: bool,
) -> None:
    async def work(broker: LocalBroker, connection: Connection) -> None:
        async with connection.session(transacted=True) as session:
            await commit(session, "kept", persistent=True)
            for number in range(3):
                await commit(session, f"{number}", persistent=False)
            await session.send("/queue/out", "in doubt", persistent=persistent)
            broker.lose_commit("before")
            committing = asyncio.create_task(session.commit())
            while connection.health().state == "connected" and not committing.done():
                await asyncio.sleep(0)
            await broker.crash()
            with pytest.raises(RolledBack if persistent else InDoubt):
                await committing
            await commit(session, "after", persistent=True)
            assert await bodies(connection, "out") == ["kept", "after"]

    on_a_connection(work)


async def _to_an_older_copy(broker: BrokerProcess, folder: Path, session: Session) -> None:
    """Commit, copy the data folder, commit something that the copy does not have, and go on with the copy."""
    loop = asyncio.get_running_loop()
    await commit(session, "kept", persistent=True)
    port = broker.port
    await loop.run_in_executor(None, broker.kill)
    shutil.copytree(broker.data, folder / "copy")
    await loop.run_in_executor(None, broker.start, port)
    await commit(session, "lost", persistent=True)
    await commit(session, "transient", persistent=False)
    await loop.run_in_executor(None, broker.kill)
    delete_folder(broker.data)
    (folder / "copy").rename(broker.data)
    await loop.run_in_executor(None, broker.start, port)


def test_session_with_a_broker_restored_from_an_older_copy_raises_once(
    own_broker: BrokerProcess, tmp_path: Path
) -> None:
    async def main() -> None:
        async with (
            connect(f"stomp://127.0.0.1:{own_broker.port}") as connection,
            connection.session(transacted=True) as session,
        ):
            await _to_an_older_copy(own_broker, tmp_path, session)
            with pytest.raises(RolledBack, match="restored from an older copy"):
                await commit(session, "after", persistent=True)
            await commit(session, "after", persistent=True)
            assert await bodies(connection, "out") == ["kept", "after"]

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_session_whose_last_commits_had_transients_alone_goes_on_when_the_broker_is_killed(
    own_broker: BrokerProcess,
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with (
            connect(f"stomp://127.0.0.1:{own_broker.port}") as connection,
            connection.session(transacted=True) as session,
        ):
            await commit(session, "kept", persistent=True)
            await commit(session, "transient", persistent=False)
            port = own_broker.port
            await loop.run_in_executor(None, own_broker.kill)
            await loop.run_in_executor(None, own_broker.start, port)
            await commit(session, "after", persistent=True)
            assert await bodies(connection, "out") == ["kept", "after"]

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
