"""What the integration tests share: brokers that never outlive them, and names that no other test uses."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.broker_process import BrokerProcess

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def _shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(tmp_path_factory.mktemp("shared-broker"))
    try:
        yield broker
        if broker.is_running:
            broker.stop()
    finally:
        broker.clean_up()


@pytest.fixture
def broker(_shared_broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """A running broker that other tests use too: not to be stopped, and its queues are to be named by `queue`."""
    if not _shared_broker.is_running:
        _shared_broker.clean_up()
        _shared_broker.start()
    yield _shared_broker
    _shared_broker.close_clients()
    assert _shared_broker.is_running, f"the broker has ended, log:\n{_shared_broker.log}"
    _shared_broker.check_log()


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A running broker of the test's own, which it may stop, kill and start again."""
    yield from _own(BrokerProcess(tmp_path))


@pytest.fixture
def held_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """As `own_broker`, with a disk that can be held and broken."""
    yield from _own(BrokerProcess(tmp_path, can_hold_disk=True))


@pytest.fixture
def new_queue() -> Callable[[], str]:
    return lambda: f"q{next(_NUMBERS)}"


@pytest.fixture
def queue(new_queue: Callable[[], str]) -> str:
    """The name of a queue that nobody else uses."""
    return new_queue()


def _own(broker: BrokerProcess) -> Iterator[BrokerProcess]:
    try:
        broker.start()
        yield broker
    finally:
        broker.clean_up()
