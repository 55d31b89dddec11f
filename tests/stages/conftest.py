"""Fixtures of the tests of stages: PostgreSQL servers, brokers, and databases that do not outlive their test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drawing import each_one_of
from tests.integration.broker_process import BrokerProcess
from tests.stages.postgres import PostgresServer, own_server, shared_server


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A running PostgreSQL that other tests and processes share: a test must not stop it."""
    # The number of the run, and that of a worker of pytest-xdist below it.
    base = tmp_path_factory.getbasetemp()
    run = base.parent if hasattr(request.config, "workerinput") else base
    with shared_server(f"{run.parent.name}-{run.name}") as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A running PostgreSQL of the test's own, which it may stop, kill and restart."""
    with own_server() as server:
        yield server


@pytest.fixture
def postgres_database(postgres: PostgresServer) -> Iterator[str]:
    """The name of a database of the test's own."""
    with postgres.database() as name:
        yield name


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A running broker of the test's own, in a process of its own."""
    process = BrokerProcess(tmp_path)
    try:
        process.start()
        yield process
        if process.is_running:
            process.stop()
    finally:
        process.clean_up()


KINDS = ["sqlite", "postgresql"]


@pytest.fixture(params=each_one_of(KINDS, ids=KINDS))
def database(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database of the test's own, of either kind."""
    if request.param == "sqlite":
        file: Path = request.getfixturevalue("tmp_path") / "stages.db"
        file.touch()
        return f"sqlite:///{file}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(request.getfixturevalue("postgres_database"))
