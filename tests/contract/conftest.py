import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.disk import COPIES, KINDS, Disk, NewLog
from tests.contract.postgresql.log_writer import DURABLE, make_log, open_compacted
from tests.contract.simulated_disk import quick_folder
from tests.drawing import each_one_of
from tests.stages.postgres import PostgresServer, shared_server
from truenext.store.postgresql import kept
from truenext.store.postgresql.layout import Connection

_NUMBERS = itertools.count(1)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Temporary folder where syncs are fast; a simulated disk, or brokers on real disks, test the syncs."""
    with tempfile.TemporaryDirectory(prefix="truenext-contract-", dir=quick_folder()) as folder:
        yield Path(folder)


@pytest.fixture
def any_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder be made from bytes that are no records of messages, and from sequences above the limit."""
    monkeypatch.setattr(kept._PostgresqlSnapshot, "_raise_damage", lambda *_: None)


@pytest.fixture(params=[*KINDS, *each_one_of(COPIES, ids=COPIES)])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(request.param, tmp_path / "data", new_log_for(request.param, request))
    yield disk
    if request.param in COPIES and "damage" not in request.keywords:
        disk.check_new_copy()
    disk.store.close()


def new_log_for(kind: str, request: pytest.FixtureRequest) -> NewLog | None:
    """Return what `Disk` needs for a log in PostgreSQL; None for other kinds."""
    if not kind.endswith("postgresql"):
        return None
    request.getfixturevalue("any_records")
    return open_compacted(request.getfixturevalue("log_server"), request.getfixturevalue("schema"))


@pytest.fixture
def embedded_disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk("embedded", tmp_path / "data")
    yield disk
    disk.store.close()


@pytest.fixture
def memory_disk(tmp_path: Path) -> Disk:
    return Disk("memory", tmp_path)


# ---- A server that keeps what it confirms, as a log demands ----


@pytest.fixture(scope="session")
def log_server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A running PostgreSQL with fsync that other tests and processes share: a test must not stop it."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if hasattr(request.config, "workerinput") else base
    with shared_server(f"synced-{run.parent.name}-{run.name}", **DURABLE) as server:
        yield server


@pytest.fixture
def admin(log_server: PostgresServer) -> Iterator[Connection]:
    """Connection of the administrator of `log_server`."""
    with log_server.connect() as connection:
        yield connection


@pytest.fixture
def schema(admin: Connection) -> Iterator[str]:
    """Schema of `log_server` with an empty log."""
    name = f"log_{os.getpid()}_{next(_NUMBERS)}"
    make_log(admin, schema=name)
    yield name
    admin.execute(f"DROP SCHEMA {name} CASCADE")
