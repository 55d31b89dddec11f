"""Tests of `connected(wait=False)`: a program that starts flows begins without its broker. Source: docs/web.md"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from bench.brokers import free_port
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.login_broker import LoginBroker, login_broker
from tests.stages.flows import Number, until
from truenext.errors import ConfigurationError, LocalProtocolError, NoBroker, Refused, RolledBack
from truenext.stage import Service
from truenext.stage.sql import apply_schema

SHORT_S = 0.3
"""Timeout of calls that no broker answers."""


@pytest.fixture
def absent(tmp_path: Path) -> Iterator[BrokerProcess]:
    """Broker that a test starts later, at a port that is free until then."""
    process = BrokerProcess(tmp_path)
    process.port = free_port()
    try:
        yield process
        if process.is_running:
            process.stop()
    finally:
        process.clean_up()


def url_of(broker: BrokerProcess) -> str:
    return f"stomp://127.0.0.1:{broker.port}"


async def start(broker: BrokerProcess) -> None:
    await asyncio.to_thread(broker.start, broker.port)


@asynccontextmanager
async def doubling(broker: BrokerProcess) -> AsyncIterator[None]:
    """Run the service that replies."""
    shop = Service("shop", broker=url_of(broker))

    @shop.single("double", Number, Number)
    async def double(number: Number) -> Number:
        return Number(2 * number.n)

    async with shop.running():
        yield


def test_block_begins_and_ends_at_once_without_a_broker(absent: BrokerProcess) -> None:
    async def main() -> None:
        web = Service("web", broker=url_of(absent))
        started = time.monotonic()
        async with web.connected(wait=False):
            begun = time.monotonic()
            # Attempts to connect are under way.
            await asyncio.sleep(0.5)
            health = web.health()
            assert (health.live, health.ready) == (True, False)
            assert health.reasons == ["it is waiting for the broker"]
            ending = time.monotonic()
        assert begun - started < 2 and time.monotonic() - ending < 2

    asyncio.run(main())


def test_block_that_waits_is_refused_without_a_broker(absent: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.stage.service.CONNECT_TIMEOUT_S", SHORT_S)

    async def main() -> None:
        with pytest.raises(NoBroker):
            async with Service("web", broker=url_of(absent)).connected():
                pass

    asyncio.run(main())


def test_calls_without_a_broker_end_with_their_timeouts_and_start_nothing(absent: BrokerProcess) -> None:
    async def main() -> None:
        web = Service("web", broker=url_of(absent))
        double = web.remote("double", Number, Number)
        news = web.topic("news", Number)
        async with web.connected(wait=False):
            with pytest.raises(RolledBack, match="not available in time"):
                await web.send(double, Number(1), trace="t", timeout=SHORT_S)
            with pytest.raises(RolledBack, match="not available in time"):
                await web.publish(news, Number(1), trace="t", timeout=SHORT_S)
            with pytest.raises(RolledBack, match="no request was sent"):
                await web.ask(double, Number(1), trace="t", timeout=SHORT_S)
            with pytest.raises(RolledBack, match="not available in time"):
                await asyncio.to_thread(begin_in_thread, web)
            await start(absent)
            async with doubling(absent):
                assert await web.ask(double, Number(3), trace="t", timeout=PATIENCE_SECONDS) == Number(6)
        # Nothing came of the calls that had timed out.
        assert absent.queues()["double"].waiting == 0

    def begin_in_thread(web: Service) -> None:
        with web.initiate(timeout=SHORT_S) as initiation:
            initiation.send(web.remote("double", Number, Number), Number(1), trace="t")

    asyncio.run(main())


def test_call_waits_for_a_broker_that_comes_within_its_timeout(absent: BrokerProcess) -> None:
    async def main() -> None:
        web = Service("web", broker=url_of(absent))
        double = web.remote("double", Number, Number)
        async with web.connected(wait=False):
            asking = asyncio.create_task(web.ask(double, Number(3), trace="t", timeout=PATIENCE_SECONDS))
            await asyncio.sleep(0.3)
            assert not asking.done()
            await start(absent)
            async with doubling(absent):
                assert await asking == Number(6)
            # The other pool may connect a moment later.
            await until(lambda: web.health().ready)
            assert web.health().facts.state == "running"

    asyncio.run(main())


def test_health_with_missing_outbox_tables_is_not_ready_until_the_tables_are_there(
    absent: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.stage.service_run.OPEN_PAUSE_S", 0.1)

    async def main() -> None:
        await start(absent)
        (tmp_path / "web.db").touch()
        url = f"sqlite:///{tmp_path / 'web.db'}"
        web = Service("web", broker=url_of(absent), database=url, exactly_once=True)
        async with web.connected(wait=False):
            await until(lambda: web.health().facts.state == "running" and bool(web.health().reasons))
            health = web.health()
            assert (health.live, health.ready) == (True, False)
            (reason,) = health.reasons
            assert reason.startswith("the outbox cannot be used: the database has no table truenext_")
            assert "`truenext stages schema SERVICE --apply`" in reason
            await asyncio.to_thread(apply_schema, url)
            await until(lambda: web.health().ready)
            assert web.health().facts.database == "available"

    asyncio.run(main())


def test_broker_that_is_lost_after_its_first_connection_is_not_waited_for(
    absent: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart helps then, but not while the process waits for its first connection."""
    monkeypatch.setattr("truenext.stage.core.health.LOST_S", 0.2)

    async def main() -> None:
        web = Service("web", broker=url_of(absent))
        async with web.connected(wait=False):
            await asyncio.sleep(0.4)
            assert web.health().live
            await start(absent)
            await until(lambda: web.health().ready)
            await asyncio.to_thread(absent.stop)
            await until(lambda: not web.health().live)
            assert "has been lost for" in web.health().reasons[0]

    asyncio.run(main())


def test_flow_in_a_session_starts_once_its_broker_has_come(absent: BrokerProcess, database: str) -> None:
    apply_schema(database)

    async def main() -> None:
        web = Service("web", broker=url_of(absent), database=database, exactly_once=True)
        double = web.remote("double", Number, Number)
        engine = create_async_engine(database.replace("sqlite:", "sqlite+aiosqlite:"))
        async with web.connected(wait=False):
            async with AsyncSession(engine) as sql:
                await sql.execute(text("SELECT 1"))
                async with web.initiate(sql, key="o1") as initiation:
                    initiation.send(double, Number(1), trace="t")
                await sql.commit()
            await start(absent)
            await until(lambda: "double" in absent.queues())
        await engine.dispose()
        assert absent.queues()["double"].waiting == 1

    asyncio.run(main())


def test_unavailable_database_of_the_outbox_does_not_delay_the_block(absent: BrokerProcess) -> None:
    async def main() -> None:
        database = f"postgresql+psycopg://nobody@127.0.0.1:{free_port()}/shop"
        web = Service("web", broker=url_of(absent), database=database, exactly_once=True)
        started = time.monotonic()
        async with web.connected(wait=False):
            assert time.monotonic() - started < 2
            await asyncio.sleep(0.3)

    asyncio.run(main())


# ---- A refused login ----


CALLS: dict[str, Callable[[Service], Awaitable[object]]] = {
    "send": lambda web: web.send(web.remote("double", Number, Number), Number(), trace="t", timeout=PATIENCE_SECONDS),
    "publish": lambda web: web.publish(web.topic("news", Number), Number(), trace="t", timeout=PATIENCE_SECONDS),
    "ask": lambda web: web.ask(web.remote("double", Number, Number), Number(), trace="t", timeout=PATIENCE_SECONDS),
    "outcome": lambda web: web.outcome("store producer 1", timeout=PATIENCE_SECONDS),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_known", [False, True])
def test_each_call_raises_wrong_credentials(name: str, *, is_known: bool) -> None:
    """Both a call that waits for the login, and one after it was refused."""

    async def main(broker: LoginBroker) -> None:
        web = Service("web", broker=broker.url, user="web", password="wrong")
        async with web.connected(wait=False):
            if is_known:
                await until(lambda: len(closed(web)) == 2)
            for _ in range(2):
                with pytest.raises(Refused, match="refused here") as raised:
                    await CALLS[name](web)
                assert raised.value.code == "login"

    with login_broker() as broker:
        broker.refusal_codes.extend(["login"] * 2)
        asyncio.run(main(broker))
    # Without a wait the block may end before the other pool logs in.
    assert len(broker.logins) == 2 or (not is_known and len(broker.logins) == 1)


def closed(web: Service) -> list[str]:
    return [each.pool for each in web.health().facts.broker if each.state == "closed"]


def test_process_with_wrong_credentials_is_not_live_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def main(broker: LoginBroker) -> None:
        web = Service("web", broker=broker.url, user="web", password="wrong")
        async with web.connected(wait=False):
            await until(lambda: len(closed(web)) == 2)
            health = web.health()
            assert (health.live, health.ready) == (False, False)
            assert health.reasons == [
                "the connection for interactive messages has ended for good: refused here",
                "the connection for other messages has ended for good: refused here",
                "it is waiting for the broker",
            ]

    with login_broker() as broker:
        broker.refusal_codes.extend(["login"] * 2)
        asyncio.run(main(broker))
    # No call waits for the login that could raise the error.
    assert sum("refused here" in each for each in caplog.messages) == 2


def test_missing_password_file_is_raised_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with Service("web", user="web", password_file=tmp_path / "file").connected(wait=False):
            pass

    with pytest.raises(ConfigurationError, match=r"password file '.*/file' cannot be read"):
        asyncio.run(main())


def test_health_is_told_to_a_thread(absent: BrokerProcess) -> None:
    """Web frameworks call plain handlers in threads."""

    async def main() -> None:
        web = Service("web", broker=url_of(absent))
        async with web.connected(wait=False):
            health = await asyncio.to_thread(web.health)
            assert (health.live, health.ready) == (True, False)

    asyncio.run(main())


def test_health_of_a_service_that_is_not_connected_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="is not connected"):
        Service("web").health()
