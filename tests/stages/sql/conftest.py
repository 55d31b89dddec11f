"""Fixtures: a shop on each database with each kind of work, and shops on PostgreSQL or SQLite alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drawing import each_one_of
from tests.stages.postgres import PostgresServer
from tests.stages.sql.shop import Shop


@pytest.fixture(params=each_one_of(["tasks", "threads"], ["tasks", "threads"]))
def face(request: pytest.FixtureRequest) -> str:
    """Kind of the functions: tasks or threads."""
    return str(request.param)


@pytest.fixture(params=each_one_of(["postgresql", "sqlite"], ["postgresql", "sqlite"]))
def url(request: pytest.FixtureRequest) -> str:
    """URL of an empty database of the test's own."""
    return str(request.getfixturevalue("postgres_url" if request.param == "postgresql" else "sqlite_url"))


@pytest.fixture
def postgres_url(postgres: PostgresServer, postgres_database: str) -> str:
    return postgres.url(postgres_database)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}"


@pytest.fixture
def shop(url: str, face: str) -> Iterator[Shop]:
    with Shop(url, face) as made:
        yield made


@pytest.fixture
def postgres_shop(postgres_url: str, face: str) -> Iterator[Shop]:
    with Shop(postgres_url, face) as made:
        yield made


@pytest.fixture
def sqlite_shop(sqlite_url: str, face: str) -> Iterator[Shop]:
    with Shop(sqlite_url, face) as made:
        yield made
