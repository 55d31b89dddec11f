"""Tests of the logins of commands at a broker that records them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.login_broker import LoginBroker, login_broker
from truenext.cli.connection import LOGIN_HINT
from truenext.cli.main import main

RECORDS = pytest.mark.skipif(find_spec("pyarrow") is None, reason="a recording needs what Spark needs")
COMMANDS = [
    ["queues"],
    ["purge", "orders"],
    pytest.param(["record", "--count", "1", "--out", "new"], marks=RECORDS),
]
"""Commands that connect in different ways."""


@pytest.fixture
def broker() -> Iterator[LoginBroker]:
    with login_broker() as running:
        yield running


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_command_with_user_and_password_in_the_environment_logs_in_with_them(
    command: list[str], broker: LoginBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    broker.refusal_codes.append("login")
    environment = {"TRUENEXT_URL": broker.url, "TRUENEXT_USER": "shop", "TRUENEXT_PASSWORD": "wrong"}
    result = CliRunner().invoke(main, command, env=environment)
    assert broker.credentials() == [("shop", "wrong")]
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith("truenext: refused here\n") and "wrong" not in result.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_command_without_a_user_that_is_refused_says_how_to_name_one(
    command: list[str], broker: LoginBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    broker.refusal_codes.append("login")
    result = CliRunner().invoke(main, [*command, "--url", broker.url])
    assert broker.credentials() == [(None, None)]
    assert result.exit_code == 1
    assert result.stderr.endswith(f"truenext: refused here; {LOGIN_HINT}\n")


def test_command_with_a_password_file_logs_in_with_its_first_line(broker: LoginBroker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("secret\n")
    broker.refusal_codes.append("login")
    options = ["--url", broker.url, "--user", "till", "--password-file", str(tmp_path / "file")]
    CliRunner().invoke(main, ["queues", *options], env={"TRUENEXT_USER": "shop", "TRUENEXT_PASSWORD": "x"})
    assert broker.credentials() == [("till", "secret")]


def test_command_with_a_password_file_that_is_missing_names_it_and_exits_2(broker: LoginBroker, tmp_path: Path) -> None:
    file = tmp_path / "file"
    result = CliRunner().invoke(main, ["queues", "--url", broker.url, "--user", "a", "--password-file", str(file)])
    assert broker.logins == []
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"truenext: password file '{file}' cannot be read: No such file or directory\n"


def test_command_at_a_busy_broker_logs_in_again(broker: LoginBroker) -> None:
    broker.refusal_codes.extend(["busy", "busy", "login"])
    result = CliRunner().invoke(main, ["queues", "--url", broker.url])
    assert len(broker.logins) == 3
    assert result.exit_code == 1


def test_stages_describe_with_a_url_logs_in_as_the_user(broker: LoginBroker, tmp_path: Path) -> None:
    done = run_stages(broker, tmp_path, "describe", "--url", broker.url, TRUENEXT_USER="till", TRUENEXT_PASSWORD="b")
    assert broker.credentials() == [("till", "b")]
    assert (done.returncode, done.stderr) == (1, "truenext: refused here\n")


@pytest.mark.parametrize(
    ("options", "credentials", "variables", "expected"),
    [
        ([], "user='shop', password='a'", {"TRUENEXT_USER": "till", "TRUENEXT_PASSWORD": "b"}, ("shop", "a")),
        ([], "user='shop', password='a'", {"TRUENEXT_PASSWORD": "b"}, ("shop", "b")),
        ([], "", {"TRUENEXT_USER": "till", "TRUENEXT_PASSWORD": "b"}, ("till", "b")),
        (["--user", "ops"], "user='shop', password='a'", {"TRUENEXT_PASSWORD": "b"}, ("ops", "b")),
        (["--user", "ops"], "", {"TRUENEXT_USER": "till", "TRUENEXT_PASSWORD": "b"}, ("ops", None)),
        (
            ["--user", "ops", "--password-file", "file"],
            "user='shop', password='a'",
            {"TRUENEXT_USER": "till", "TRUENEXT_PASSWORD": "b"},
            ("ops", "secret"),
        ),
        (
            ["--password-file", "file"],
            "user='shop', password='a'",
            {"TRUENEXT_USER": "till", "TRUENEXT_PASSWORD": "b"},
            ("shop", "secret"),
        ),
    ],
)
def test_stages_run_logs_in_as_the_first_user_that_is_named(
    options: list[str],
    credentials: str,
    variables: dict[str, str],
    expected: tuple[str | None, str | None],
    broker: LoginBroker,
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("secret\n")
    done = run_stages(broker, tmp_path, "run", *options, credentials=credentials, **variables)
    assert broker.credentials() == [expected]
    assert done.returncode == 1
    assert done.stderr == "truenext: refused here\n"


def test_stages_run_without_credentials_uses_those_of_the_service(broker: LoginBroker, tmp_path: Path) -> None:
    run_stages(broker, tmp_path, "run", TRUENEXT_USER=" ", TRUENEXT_PASSWORD="")
    assert broker.credentials() == [("shop", "a")]


def test_stages_run_without_any_user_that_is_refused_says_how_to_name_one(broker: LoginBroker, tmp_path: Path) -> None:
    done = run_stages(broker, tmp_path, "run", credentials="")
    assert broker.credentials() == [(None, None)]
    assert done.returncode == 1
    assert done.stderr == f"truenext: refused here; {LOGIN_HINT}\n"


def run_stages(
    broker: LoginBroker,
    folder: Path,
    command: str,
    *options: str,
    credentials: str = "user='shop', password='a'",
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command of `truenext stages` for a service with `credentials`; the broker refuses its login."""
    broker.refusal_codes.append("login")
    (folder / "shop.py").write_text(
        "from truenext.stage import Service\n"
        f"app = Service('shop', broker='{broker.url}', {credentials})\n"
        "@app.terminator('order.place', str)\n"
        "async def place(order: str) -> None: ...\n"
    )
    return subprocess.run(
        [sys.executable, "-m", "truenext", "stages", command, "shop:app", *options],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
