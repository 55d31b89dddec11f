"""Fixtures of the console's tests: brokers with and without users."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.broker_process import BrokerProcess

PASSWORD = "open sesame"
_ROOT = Path(__file__).parents[2]
_ROLES = re.compile(r"## Roles for the console\n.*?```toml\n(.*?)```", re.DOTALL)
ALL = "\n".join(f'{right} = [">", "DLQ.>", "Spark.>", "/topic/>"]' for right in ("send", "take", "browse", "manage"))

USERS = f"""
[user.admin]
password_file = "password"
monitor = true
admin = true
{ALL}

[user.clerk]
password_file = "password"
browse = ["orders.>"]

[user.monitor]
password_file = "password"
monitor = true

[user.mover]
password_file = "password"
manage = ["orders.>"]
browse = ["orders.>"]
send = ["archive"]

[user.nobody]
password_file = "password"
"""


def users_file(folder: Path) -> Path:
    """Write a users file with the roles and users of docs/security.md, and with more users."""
    found = _ROLES.search((_ROOT / "docs/security.md").read_text())
    assert found is not None, "the page has the roles"
    file = folder / "users.toml"
    for name in (file, *(folder / f"{each}password" for each in ("", "rita.", "otto."))):
        name.touch(mode=0o600)
        name.write_text(PASSWORD)
    file.write_text(found[1] + USERS)
    return file


@pytest.fixture(scope="session")
def _users_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("console-users")
    yield from _running(BrokerProcess(folder, ["--users", str(users_file(folder))]))


@pytest.fixture(scope="session")
def _open_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    yield from _running(BrokerProcess(tmp_path_factory.mktemp("console-open")))


@pytest.fixture
def users_broker(_users_broker: BrokerProcess) -> BrokerProcess:
    """Broker with the users of docs/security.md, and those of USERS; all have PASSWORD. Tests share it."""
    return _users_broker


@pytest.fixture
def open_broker(_open_broker: BrokerProcess) -> BrokerProcess:
    """Broker without users, which tests share."""
    return _open_broker


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """Broker without users of this test alone."""
    yield from _running(BrokerProcess(tmp_path))


def _running(broker: BrokerProcess) -> Iterator[BrokerProcess]:
    try:
        broker.start()
        yield broker
    finally:
        broker.clean_up()
