from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg import sql

from tests.contract.postgresql.log_writer import DURABLE, LogWriter, open_log, url_of
from tests.contract.postgresql.rows import SCHEMA, empty_state
from tests.stages.postgres import PostgresServer, own_server, shared_server
from truenext.store.postgresql.layout import Connection, create_layout


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A running PostgreSQL that other tests and processes share: a test must not stop it."""
    # The number of the run, and that of a worker of pytest-xdist below it.
    base = tmp_path_factory.getbasetemp()
    run = base.parent if hasattr(request.config, "workerinput") else base
    with shared_server(f"log-{run.parent.name}-{run.name}") as server:
        yield server


@pytest.fixture(scope="session")
def shared_database(postgres: PostgresServer) -> Iterator[str]:
    with postgres.database() as name:
        yield name


@pytest.fixture
def postgres_database(postgres: PostgresServer, shared_database: str) -> Iterator[str]:
    """The name of a database without schemas of an earlier test. To make a new one takes a second."""
    yield shared_database
    with postgres.connect(shared_database) as connection:
        schemas = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_|public)'")
        for (schema,) in schemas.fetchall():
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(str(schema))))


@pytest.fixture
def connection(postgres: PostgresServer, postgres_database: str) -> Iterator[Connection]:
    with postgres.connect(postgres_database) as connection:
        yield connection


@pytest.fixture
def tables(connection: Connection) -> Connection:
    """A connection to a database with the tables of a log, without any row."""
    connection.execute(f"CREATE SCHEMA {SCHEMA}")
    create_layout(connection, SCHEMA)
    return connection


@pytest.fixture
def own_log_server() -> Iterator[PostgresServer]:
    """A running PostgreSQL with fsync of the test's own, which it may stop, kill and configure."""
    with own_server(**DURABLE) as server:
        yield server


OpenWriter = Callable[..., LogWriter]


@pytest.fixture(params=["waiting", "begun"])
def open_writer(log_server: PostgresServer, schema: str, request: pytest.FixtureRequest) -> Iterator[OpenWriter]:
    """Function that opens the log in `schema` for a broker, takes it over and follows it. Its arguments are those of
    PostgresqlLog, and `server` for another one."""
    opened = []
    begins = request.param == "begun"

    def open_one(server: PostgresServer = log_server, schema: str = schema, **options: object) -> LogWriter:
        writer = LogWriter(open_log(url_of(server), schema, **options), empty_state().position, begins=begins)
        opened.append(writer)
        writer.take_over()
        return writer

    yield open_one
    for writer in opened:
        writer.log.close()


TESTS_IN_GROUP = 5
"""Number of tests of this folder of which each run has one, as each takes half a second or more on a real server."""

_ALWAYS = {"test_forgotten.py", "test_outcome.py", "test_standing_by.py", "test_log_model.py", "test_proxy.py"}
"""Files whose tests need no server, or draw themselves."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    heavy = [each for each in items if each.path.parent == folder and each.path.name not in _ALWAYS]
    for number, each in enumerate(heavy):
        each.add_marker(pytest.mark.alternates(f"PostgreSQL {number // TESTS_IN_GROUP}"))
