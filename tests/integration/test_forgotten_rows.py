"""Test that no broker goes on without rows that a promoted standby of PostgreSQL lacks, until the loss is accepted.

TRUENEXT_PAIRS=100 TRUENEXT_SEED=7 pytest -s tests/integration/test_forgotten_rows.py
"""

import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.contract.postgresql.log_writer import DURABLE, url_of
from tests.integration.broker_process import PATIENCE_SECONDS
from tests.integration.forked import completed
from tests.integration.log_broker import LogBroker, delete_folder, make_schema
from tests.integration.postgres_pair import PostgresPair, own_pair
from tests.stages.postgres import Server, own_server

ROUNDS = int(os.environ.get("TRUENEXT_PAIRS", "1"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)
NUMBERS = itertools.count(1)

QUEUE = "orders"


@pytest.fixture(scope="module")
def pair() -> Iterator[PostgresPair]:
    with own_pair(is_synchronous=False) as pair:
        yield pair


class Brokers:
    """Two brokers on a schema of its own, the second of which stands by."""

    def __init__(self, server: Server, folder: Path, fault: str = "") -> None:
        self.server = server
        self.schema = f"forgotten_{next(NUMBERS)}"
        make_schema(server, self.schema)
        self.active, self.heir = (
            LogBroker(
                folder / self.schema / name,
                server,
                self.schema,
                ["--member", name],
                failover_after_ms=2_000,
                fault=fault,
            )
            for name in ("first", "second")
        )
        self._sent = 0

    def __enter__(self) -> "Brokers":
        self.active.start()
        self.heir.begin_start()
        self.heir.await_standing_by()
        return self

    def __exit__(self, *_: object) -> None:
        self.active.clean_up()
        self.heir.clean_up()

    def send(self, count: int) -> None:
        """Send messages, each of which is confirmed."""
        client = self.active.connect()
        for _ in range(count):
            self._sent += 1
            client.send(QUEUE, b"%d" % self._sent, persistent=True, confirmed=True)
        client.disconnect()

    def lose_rows(self, pair: PostgresPair, chance: random.Random) -> None:
        """Let PostgreSQL fail over without the rows of the last messages, after a kill -9 of the active broker."""
        self.send(20)
        time.sleep(chance.uniform(0, 0.5))
        pair.standby.hold_back()
        self.send(20)
        time.sleep(chance.uniform(0, 0.5))
        self.active.kill()
        self.active.close_clients()
        pair.fail_over()

    def store(self, command: str, typed: bytes = b"") -> str:
        """Run a command of `truenext store`, and return its output."""
        done = completed("store", command, url_of(self.server), "--schema", self.schema, stdin_bytes=typed)
        return (done.stdout + done.stderr).decode()


def end_of(broker: LogBroker) -> int | None:
    """Return the exit status of a broker that ends, or None if it listens first."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while broker.is_running and not broker.is_listening:
        assert time.monotonic() < deadline, f"the broker stands by for ever:\n{broker.log}"
        time.sleep(0.02)
    return None if broker.is_listening else broker.wait_for_end()


def waiting(broker: LogBroker, *, is_redelivered: bool = True) -> list[int]:
    """Return the messages that wait, all of which must be redelivered, or none."""
    client = broker.connect()
    count = broker.queues()[QUEUE].waiting
    client.subscribe(QUEUE, prefetch=1000)
    messages = client.messages(count)
    assert {each.headers.get("redelivered") == "true" for each in messages} == {is_redelivered}
    client.disconnect()
    return [int(each.body) for each in messages]


def identity_of(broker: LogBroker) -> str:
    client = broker.connect(headers={"truenext-client": "1"})
    client.disconnect()
    return client.connected.headers["truenext-store"]


@pytest.mark.alternates("promoted standbys")
@pytest.mark.timeout(60 + 60 * ROUNDS)
def test_broker_that_stands_by_says_what_a_promoted_standby_may_lack(pair: PostgresPair, tmp_path: Path) -> None:
    """C28.13, C28.14, C28.17"""
    print(f"\nseed {SEED}, {ROUNDS} losses", flush=True)
    lose_and_judge(pair, tmp_path, random.Random(SEED), ROUNDS)


def lose_and_judge(pair: PostgresPair, folder: Path, chance: random.Random, count: int, fault: str = "") -> None:
    """Lose rows with a promoted standby again and again. Raises: AssertionError if no broker says so"""
    for _ in range(count):
        with Brokers(pair, folder, fault) as brokers:
            name = identity_of(brokers.active)
            brokers.lose_rows(pair, chance)
            assert end_of(brokers.heir) == 4, brokers.heir.log
            line = brokers.heir.log.splitlines()[-1]
            assert "have lost rows" in line and "accept-loss" in line and "Traceback" not in brokers.heir.log, line
            assert "missing" in brokers.store("status")
            brokers.store("accept-loss", f"{brokers.schema}\n".encode())
            brokers.heir.start()
            found = waiting(brokers.heir)
            assert found == list(range(1, len(found) + 1)) and len(found) >= 20, found
            assert identity_of(brokers.heir) != name
            brokers.active.begin_start()
            brokers.heir.stop()
            brokers.active.await_start()
            assert waiting(brokers.active) == found
            assert list(brokers.active.data.glob("aside-*"))
            brokers.active.check_database()
        pair.follow()


@pytest.mark.alternates("promoted standbys")
@pytest.mark.timeout(60 + 60 * ROUNDS)
def test_broker_without_a_folder_says_what_a_promoted_standby_may_lack(pair: PostgresPair, tmp_path: Path) -> None:
    """C28.14"""
    chance = random.Random(SEED)
    for _ in range(ROUNDS):
        with ExitStack() as resources:
            brokers = resources.enter_context(Brokers(pair, tmp_path))
            brokers.heir.kill()
            brokers.lose_rows(pair, chance)
            delete_folder(brokers.heir.data)
            delete_folder(brokers.active.data)
            brokers.active.begin_start()
            assert end_of(brokers.active) == 4, brokers.active.log
            assert "the former primary alone may have had rows" in brokers.active.log
        pair.follow()


@pytest.mark.alternates("promoted standbys")
@pytest.mark.parametrize("is_killed", [False, True], ids=["active", "killed"])
def test_rows_behind_a_restored_backup_are_put_back_by_a_broker_that_has_them(tmp_path: Path, is_killed: bool) -> None:
    """C28.12"""
    with own_server(**DURABLE) as server, Brokers(server, tmp_path) as brokers:
        brokers.send(20)
        server.back_up(server.folder / "backup")
        brokers.send(20)
        # So that it has no session while the folder is exchanged.
        brokers.heir.kill()
        if is_killed:
            brokers.active.kill()
        server.restore(server.folder / "backup")
        if is_killed:
            brokers.active.start()
        else:
            brokers.send(1)
        assert waiting(brokers.active, is_redelivered=is_killed) == list(range(1, 41 if is_killed else 42))
        assert "put back" in brokers.active.log
        brokers.active.check_database()
