"""Tests that this version finds everything in the files of earlier versions, which tests/kept/make.py has made."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.openwire.test_raw_connections import JmsClient
from tests.integration.raw_client import RawClient
from tests.kept.contents import contents_of
from tests.kept.unpacked import each_archive, unpack
from truenext import blocking
from truenext.history.files import chunks_of_file, history_files

ROOT = Path(__file__).parents[2]
OPENWIRE = ("--listen", "openwire://127.0.0.1:0")


@pytest.fixture
def kept(archive: Path, tmp_path: Path) -> Path:
    return unpack(archive, tmp_path)


@pytest.fixture
def kept_broker(kept: Path) -> Iterator[BrokerProcess]:
    """Broker on the kept data folder."""
    with BrokerProcess(kept, OPENWIRE).running() as broker:
        yield broker


@each_archive
def test_kept_data_folder_has_all_its_contents(kept: Path) -> None:
    """C30.2."""
    expected: dict[str, Any] = json.loads((kept / "expected.json").read_text())
    assert expected["clean stop"]
    found = json.loads(json.dumps(contents_of(kept / "data")))
    assert found.keys() == expected.keys()
    for part in expected:
        assert found[part] == expected[part], part


@each_archive
def test_broker_delivers_what_a_kept_data_folder_has(kept_broker: BrokerProcess) -> None:
    """C30.2: order, transients, headers, attempts, causes, pauses, groups, subscriptions, schedules, JMS."""
    broker = kept_broker
    facts = {each["name"]: each for each in broker.control_request("queues")}
    assert facts["filled"]["waiting"] == 550
    assert facts["paused"]["paused"] is True
    assert facts["groups"]["waiting"] == 6
    assert facts["scheduled"]["scheduled"] == 3
    with blocking.connect(broker.url) as connection:
        with connection.consumer("/queue/orders", ack="individual", prefetch=100) as consumer:
            orders = consumer.receive_many(22, 10)
            while len(orders) < 22:
                orders += consumer.receive_many(22 - len(orders), 10)
        expected = [b"%b %d" % (kind, level) for level in range(9, -1, -1) for kind in (b"persistent", b"transient")]
        # Both have priority 4.
        expected[12:12] = [b"expires late", b"\0\xff"]
        assert [each.body for each in orders] == expected
        assert orders[0].headers["Colour"] == "a:b\n"
        with connection.consumer("/queue/DLQ.failing") as dead:
            message = dead.receive(10)
            assert message is not None
            assert (message.text, message.last_cause) == ("rejected", "no such customer")
        # The number was used before, by the version that wrote the folder.
        connection.send("/queue/numbered", "send 7 again", producer="sender", number=7)
        with connection.session(transacted=True) as session:
            session.send("/queue/numbered", "commit 3 again")
            assert not session.commit(producer="committer", number=3)
        assert [each.text for each in connection.browse("/queue/numbered")] == [
            "send 7",
            "commit 1",
            "commit 2",
            "commit 3",
        ]
    for name in ("one", "two"):
        with (
            blocking.connect(broker.url, client_id=name) as connection,
            connection.consumer("/topic/news", durable="news") as news,
        ):
            texts = [message.text.split(" y")[0] for _ in range(6) if (message := news.receive(10)) is not None]
            assert texts == [f"{kind}news {number}" for number in range(3) for kind in ("", "transient ")]
    client = JmsClient(broker)
    client.consume("jms")
    assert [client.message().message is not None for _ in range(3)] == [True] * 3
    client.close()


@each_archive
def test_user_of_a_kept_users_file_logs_in(kept: Path) -> None:
    """C30.7."""
    with BrokerProcess(kept, ["--users", str(kept / "users.toml")]).running() as broker:
        password = (kept / "password").read_text().strip()
        with blocking.connect(broker.url, user="shop", password=password) as connection:
            connection.send("/queue/of.users", "again", producer="till", number=3)
            with connection.consumer("/queue/of.users") as consumer:
                found = [message.text for message in iter(lambda: consumer.receive(1), None)]
        assert found == ["of a user", "without a number"]


@each_archive
def test_broker_goes_on_with_a_kept_history(kept_broker: BrokerProcess, kept: Path) -> None:
    """C30.7."""
    client: RawClient = kept_broker.connect()
    client.send("new", b"body", persistent=True, confirmed=True)
    chunks = [chunk for path in history_files(kept / "data/history") for chunk in chunks_of_file(path)]
    assert [chunk.run for chunk in chunks] == sorted(chunk.run for chunk in chunks)


@each_archive
def test_unsent_units_in_a_kept_outbox_are_sent(own_broker: BrokerProcess, kept: Path) -> None:
    """C30.9."""
    command = [sys.executable, "-m", "tests.kept.flows", "run", f"sqlite:///{kept}/service.db", own_broker.url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "an order was shipped\n", done.stderr


@each_archive
def test_stages_check_compares_with_a_kept_file(kept: Path) -> None:
    """C30.7."""
    command = ["stages", "check", "tests.kept.service:app", "--against", str(kept / "interface.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    run = [sys.executable, "-m", "truenext", *command]
    done = subprocess.run(run, env=environment, cwd=kept, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
