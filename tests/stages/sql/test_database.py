"""Tests of `Database`: its URLs, its probe and its pools. Source: docs/stages-database.md, "Connection pools" """

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.stages.postgres import PostgresServer
from tests.stages.sql.shop import Loop, Shop, execute_sql, insert
from truenext.errors import ConfigurationError
from truenext.stage.gate import DatabaseGate
from truenext.stage.sql import Database
from truenext.stage.sql.errors import DatabaseErrorKind, DatabaseUnavailable
from truenext.stage.sql.url import address_of


@pytest.mark.parametrize(
    "url", ["postgresql:///shop", "postgresql+psycopg://me@here/shop", "postgresql+psycopg_async:///shop"]
)
def test_psycopg_speaks_to_postgresql_for_both_kinds(url: str) -> None:
    address = address_of(url)
    assert address.for_tasks.drivername == address.for_threads.drivername == "postgresql+psycopg"
    assert address.file is None


@pytest.mark.parametrize("url", ["sqlite:////tmp/shop.db", "sqlite+pysqlite:////tmp/shop.db"])
def test_sqlite_has_a_driver_for_each_kind(url: str) -> None:
    address = address_of(url)
    assert (address.for_tasks.drivername, address.for_threads.drivername) == ("sqlite+aiosqlite", "sqlite+pysqlite")
    assert address.file == Path("/tmp/shop.db")


@pytest.mark.parametrize(
    "url",
    ["sqlite://", "sqlite:///:memory:", "sqlite:///file::memory:?uri=true", "sqlite:///file:x?mode=memory&uri=true"],
)
def test_a_database_in_memory_is_refused_with_what_to_do(url: str) -> None:
    with pytest.raises(ConfigurationError, match="Name a file"):
        Database(url, interactive=1, others=1)


@pytest.mark.parametrize("url", ["mysql://x", "postgresql+asyncpg:///shop", "oracle://x", "no url: secret"])
def test_url_of_another_database_is_refused_with_the_urls_to_write(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"write postgresql\+psycopg") as raised:
        Database(url, interactive=1, others=1)
    assert "secret" not in str(raised.value)


def test_a_database_names_itself_without_its_password() -> None:
    database = Database("postgresql+psycopg://me:secret@here/shop", interactive=1, others=1)
    assert str(database) == "postgresql+psycopg://me:***@here/shop"


def test_a_probe_finds_a_server_that_was_stopped_and_is_back(own_postgres: PostgresServer) -> None:
    with Shop(own_postgres.url("postgres"), "tasks") as shop:
        own_postgres.stop()
        with pytest.raises(DatabaseUnavailable, match="is not available"):
            shop.run(shop.database.probe())
        own_postgres.start()
        shop.run(shop.database.probe())


def test_a_database_that_is_not_there_is_not_opened(tmp_path: Path, postgres: PostgresServer) -> None:
    for url in (f"sqlite:///{tmp_path / 'none.db'}", postgres.url("nonesuch"), "postgresql:///x?host=/nowhere"):
        loop = Loop()
        try:
            with pytest.raises(DatabaseUnavailable):
                loop.run(Database(url, interactive=1, others=1).open())
        finally:
            loop.close()
    assert list(tmp_path.iterdir()) == []


def test_a_probe_finds_a_database_that_can_no_longer_be_written_to(postgres_url: str) -> None:
    with Shop(postgres_url, "tasks") as shop:
        name = shop.url.partition("///")[2].partition("?")[0]
        _make_read_only(shop, name, "on")
        with pytest.raises(DatabaseUnavailable, match="is read-only"):
            shop.run(shop.database.probe())
        # One that never could is there.
        only_read = Database(shop.url, interactive=1, others=1)
        shop.run(only_read.open())
        shop.run(only_read.probe())
        shop.run(only_read.close())
        _make_read_only(shop, name, "off")
        shop.run(shop.database.probe())


def _make_read_only(shop: Shop, name: str, to: str) -> None:
    with shop.second_engine() as engine, engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute("SET default_transaction_read_only = off")
        driver.commit()
        driver.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {to}")
        driver.commit()


def test_probe_of_sqlite_does_not_wait_for_a_writer_and_changes_nothing(sqlite_shop: Shop) -> None:
    work = sqlite_shop.work()
    work.do(insert(1))
    sqlite_shop.run(sqlite_shop.database.probe())
    work.commit()
    sqlite_shop.run(sqlite_shop.database.probe())
    assert sqlite_shop.orders() == [1]


def test_interactive_work_never_waits_for_the_connections_of_the_others(postgres_url: str, face: str) -> None:
    with Shop(postgres_url, face, workers=2) as shop:
        others = [shop.work(), shop.work()]
        for work in others:
            work.do(execute_sql("SELECT 1"))
        interactive = shop.work(is_interactive=True)
        interactive.do(insert(1))
        interactive.commit()
        assert shop.orders() == [1]


def test_connections_are_no_more_than_workers(url: str, face: str) -> None:
    with Shop(url, face, workers=1) as shop:
        first = shop.work()
        first.do(insert(1))
        waiting = shop.work().start(insert(2))
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        assert shop.in_use() == 1
        first.commit()
        waiting.result(30)


def test_pool_without_workers_has_one_connection(sqlite_url: str) -> None:
    database = Database(sqlite_url, interactive=0, others=3)
    sizes = [pools.for_threads.pool.size() for pools in database._sql_engines.values()]  # type: ignore[attr-defined]
    assert sizes == [1, 3]


def test_a_connection_keeps_no_prepared_answer_of_another_work(shop: Shop) -> None:
    # Statements that psycopg prepares by itself survive the return of a connection.
    for number in range(12):
        work = shop.work()
        work.do(insert(number))
        work.do(lambda session: session.execute(text("SELECT count(*) FROM orders")).scalar_one())
        work.commit()
    assert shop.orders() == list(range(12))


def test_without_sqlalchemy_the_errors_are_there_and_the_rest_says_what_to_install() -> None:
    program = """
import sys
sys.modules["sqlalchemy"] = None
import truenext.stage.sql.errors
from truenext.errors import ConfigurationError
from truenext.stage.gate import DatabaseGate
try:
    from truenext.stage.sql import Database
except ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'truenext[sql]'" in done.stdout


def test_without_its_driver_a_database_says_what_to_install() -> None:
    program = """
import sys
sys.modules[sys.argv[1]] = None
from truenext.errors import ConfigurationError
from truenext.stage.gate import DatabaseGate
from truenext.stage.sql import Database
try:
    Database(sys.argv[2], interactive=1, others=1)
except ConfigurationError as error:
    print(error)
"""
    for module, url, extra in (
        ("psycopg", "postgresql:///shop", "truenext[postgresql]"),
        ("aiosqlite", "sqlite:////tmp/shop.db", "truenext[sql]"),
    ):
        done = subprocess.run([sys.executable, "-c", program, module, url], capture_output=True, text=True, check=True)
        assert f"pip install '{extra}'" in done.stdout, done.stderr


def test_a_folder_that_cannot_be_looked_into_is_a_database_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: it ended the probing of the database, which then stayed unavailable."""

    def exists(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    async def run() -> None:
        database = Database(f"sqlite:///{tmp_path / 'shop.db'}", interactive=1, others=1)
        monkeypatch.setattr(Path, "exists", exists)
        with pytest.raises(DatabaseUnavailable, match="Permission denied"):
            await database.probe()
        monkeypatch.undo()
        await database.close()

    asyncio.run(run())


def test_concurrent_losses_of_the_database_share_one_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checks = 0

    async def probe(self: Database) -> None:
        nonlocal checks
        checks += 1
        await asyncio.sleep(0)
        raise DatabaseUnavailable("gone")

    async def run() -> None:
        monkeypatch.setattr(Database, "probe", probe)
        gate = DatabaseGate(Database(f"sqlite:///{tmp_path / 'shop.db'}", interactive=8, others=8))
        uncounted = [gate.is_uncounted_error(DatabaseErrorKind.LOST, ConnectionError(), str(n)) for n in range(16)]
        assert await asyncio.gather(*uncounted) == [True] * 16
        assert not gate.is_open
        await gate.stop()

    with caplog.at_level(logging.WARNING, "truenext.stage"):
        asyncio.run(run())
    assert checks == 1
    assert str(tmp_path / "shop.db") in vars(caplog.records[0])["database"]
