"""Tests of how long commands wait for a broker, and of what they say where none answers. Source: docs/operations.md"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from truenext.cli.exit_status import NO_ANSWER, START_HINT
from truenext.cli.main import main
from truenext.testing.blocking import blocking_broker

RECORDS = pytest.mark.skipif(find_spec("pyarrow") is None, reason="a recording needs what Spark needs")
SPARK = pytest.mark.skipif(find_spec("pyspark") is None, reason="it needs Spark")
WAIT_S = 0.3
PATIENCE_S = 8.0
"""Less than the 10 seconds that a command waits without --timeout."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Socket of a program that has stopped: the kernel accepts connections, and no program answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def run(*arguments: str) -> tuple[Result, float]:
    """Run a command. Return its result, and how long it took in seconds."""
    started = time.monotonic()
    return CliRunner().invoke(main, arguments), time.monotonic() - started


def port_of(listening: socket.socket) -> int:
    port: int = listening.getsockname()[1]
    return port


@pytest.mark.parametrize("scheme", ["stomp", "stomp+ssl"])
@pytest.mark.parametrize(
    "command",
    [
        ["queues"],
        ["status"],
        ["purge", "orders"],
        ["receive", "orders", "--follow"],
        pytest.param(["record", "--count", "1", "--out", "new"], marks=RECORDS),
    ],
    ids=lambda command: command[0],
)
def test_command_at_a_program_that_does_not_answer_says_so_after_its_timeout(
    command: list[str], scheme: str, listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if command[0] == "receive":
        # Its --timeout is for a message, and never less for the broker than usual.
        monkeypatch.setattr("truenext.cli.connection.BrokerOptions.__new__.__defaults__", (WAIT_S,))
    url = f"{scheme}://127.0.0.1:{port_of(listener)}"
    result, took_s = run(*command, "--timeout", str(WAIT_S), "--url", url)
    assert WAIT_S <= took_s < PATIENCE_S
    assert (result.exit_code, result.stdout) == (NO_ANSWER, "")
    assert result.stderr.endswith(
        f"truenext: no broker at {url}: a program listens there, but has not answered as a STOMP broker within "
        f"{WAIT_S:g} s: check the port, or, if its messages are in PostgreSQL, see `truenext store status` and its "
        "log\n"
    )


def test_stages_describe_waits_for_a_broker_as_long_as_its_timeout(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "described.py").write_text("from truenext.stage import Service\napp = Service('shop')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    url = f"stomp://127.0.0.1:{port_of(listener)}"
    result, took_s = run("stages", "describe", "described:app", "--timeout", str(WAIT_S), "--url", url)
    assert result.exit_code == NO_ANSWER and took_s < PATIENCE_S
    assert f"has not answered as a STOMP broker within {WAIT_S:g} s" in result.stderr


@SPARK
def test_spark_command_waits_for_a_broker_as_long_as_its_timeout(listener: socket.socket) -> None:
    result, took_s = run("spark", "list", "--timeout", str(WAIT_S), "--url", f"stomp://127.0.0.1:{port_of(listener)}")
    assert result.exit_code == NO_ANSWER and took_s < PATIENCE_S
    assert f"has not answered CONNECT within {WAIT_S:g} s" in result.stderr
    assert START_HINT not in result.stderr


def test_command_with_a_timeout_above_ten_seconds_waits_as_long(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.client.core.link.ATTEMPT_TIMEOUT_S", 0.1)
    result, took_s = run("queues", "--timeout", "1.5", "--url", f"stomp://127.0.0.1:{port_of(listener)}")
    assert result.exit_code == NO_ANSWER and took_s >= 1.5
    assert "has not answered as a STOMP broker within 1.5 s" in result.stderr


@pytest.mark.parametrize("scheme", ["stomp", "stomp+ssl"])
def test_command_where_no_program_listens_says_how_to_start_a_broker(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"{scheme}://127.0.0.1:{port_of(closed)}"
    result, _ = run("queues", "--url", url)
    assert (result.exit_code, result.stdout) == (NO_ANSWER, "")
    assert result.stderr == f"truenext: no broker at {url}: Connection refused; {START_HINT}\n"


@SPARK
def test_spark_command_where_no_program_listens_says_how_to_start_a_broker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"stomp://127.0.0.1:{port_of(closed)}"
    result, _ = run("spark", "list", "--url", url)
    assert result.exit_code == NO_ANSWER and result.stderr.endswith(f"Connection refused; {START_HINT}\n")


@pytest.fixture
def closed_url() -> str:
    """Address of a standby: nothing listens there."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"stomp://127.0.0.1:{port_of(closed)}"


@pytest.mark.parametrize(
    "command",
    [["queues"], ["failover"], ["send", "q", "body"], pytest.param(["spark", "list"], marks=SPARK)],
    ids=lambda command: command[0],
)
def test_command_with_several_addresses_uses_the_first_broker_that_answers(
    command: list[str], closed_url: str, listener: socket.socket
) -> None:
    silent_url = f"stomp://127.0.0.1:{port_of(listener)}"
    with blocking_broker() as broker:
        urls = [closed_url, silent_url, broker.url]
        result, took_s = run(*command, "--timeout", "1.5", *(word for url in urls for word in ("--url", url)))
    if command == ["failover"]:
        assert result.exit_code == 1 and "no other one can take over" in result.stderr
    else:
        assert result.exit_code == 0, result.stderr
    assert took_s < PATIENCE_S


def test_command_with_several_addresses_says_what_is_wrong_with_each(closed_url: str, listener: socket.socket) -> None:
    silent_url = f"stomp://127.0.0.1:{port_of(listener)}"
    result, _ = run("status", "--timeout", "1", "--url", silent_url, "--url", closed_url)
    assert result.exit_code == NO_ANSWER and START_HINT not in result.stderr
    # Half of the time, and less if the start took some of it.
    assert re.match(
        rf"truenext: no broker at {silent_url}: a program listens there, but has not answered as a STOMP broker within "
        r"0\.[1-5] s: check the port, or",
        result.stderr,
    ), result.stderr
    assert result.stderr.endswith(f"; at {closed_url}: Connection refused\n")


def test_command_with_several_addresses_at_which_no_program_listens_names_all(closed_url: str) -> None:
    result, _ = run("status", "--url", closed_url, "--url", "stomp://127.0.0.1:1")
    assert (
        result.stderr == f"truenext: no broker at {closed_url}, stomp://127.0.0.1:1: Connection refused; {START_HINT}\n"
    )
