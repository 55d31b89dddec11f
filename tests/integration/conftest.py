"""Fixtures of the integration tests: brokers that end with the tests, and unique names of queues."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.contract.postgresql.log_writer import DURABLE
from tests.integration.broker_process import BrokerProcess
from tests.integration.log_broker import make_schema
from tests.stages.postgres import PostgresServer, own_server

_NUMBERS = itertools.count(1)


@pytest.fixture
def options() -> Sequence[str]:
    """Options of the test's brokers; tests and modules override them by a parameter of this name."""
    return ()


@pytest.fixture(scope="session")
def _shared_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Sequence[str], BrokerProcess]]:
    """Running brokers by their options."""
    brokers: dict[Sequence[str], BrokerProcess] = {}
    try:
        yield brokers
        for broker in brokers.values():
            if broker.is_running:
                broker.stop()
    finally:
        for broker in brokers.values():
            broker.clean_up()


@pytest.fixture
def broker(
    _shared_brokers: dict[Sequence[str], BrokerProcess],
    options: Sequence[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[BrokerProcess]:
    """Running broker that tests share: it is not stopped, and its queues are named by `queue`."""
    shared = _shared_brokers.get(options)
    if shared is None:
        shared = _shared_brokers[options] = BrokerProcess(tmp_path_factory.mktemp("shared-broker"), options)
    if not shared.is_running:
        shared.clean_up()
        shared.start()
    yield shared
    shared.close_clients()
    assert shared.is_running, f"the broker has ended, log:\n{shared.log}"
    shared.check_log()


@pytest.fixture
def own_broker(tmp_path: Path, options: Sequence[str]) -> Iterator[BrokerProcess]:
    """Running broker of this test alone, which may stop, kill and start it."""
    yield from _own(BrokerProcess(tmp_path, options))


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """PostgreSQL without a standby, which confirms only what it has synced."""
    with own_server(**DURABLE) as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """As `postgres`, but of this test alone, which may stop the server."""
    with own_server(**DURABLE) as server:
        yield server


@pytest.fixture
def schema(postgres: PostgresServer) -> str:
    """Schema with the tables of a new log."""
    name = f"log_{next(_NUMBERS)}"
    make_schema(postgres, name)
    return name


@pytest.fixture
def held_broker(tmp_path: Path, options: Sequence[str]) -> Iterator[BrokerProcess]:
    """Broker like `own_broker`, whose disk can be held and broken."""
    yield from _own(BrokerProcess(tmp_path, options, can_hold_disk=True))


@pytest.fixture
def new_queue() -> Callable[[], str]:
    return lambda: f"q{next(_NUMBERS)}"


@pytest.fixture
def queue(new_queue: Callable[[], str]) -> str:
    """Name of a queue that no other test uses."""
    return new_queue()


def _own(broker: BrokerProcess) -> Iterator[BrokerProcess]:
    try:
        broker.start()
        yield broker
    finally:
        broker.clean_up()
