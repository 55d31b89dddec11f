"""Tests of the grants that a service needs: as a command, and as a warning at the start. Source: docs/security.md"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration import over_tls
from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT, BrokerProcess, dying_with_us
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient

SERVICE = """
from truenext.stage import Failure, Flow, Service

app = Service("shop", user="shop", password="open sesame")
stock = app.remote("stock.reserve", str, str)
app.remote("mail.send", str)
news = app.topic("news", str)
audit = app.topic("audit", str)
events = app.topic("events", str)
bill = app.endpoint("bill", str)
place = app.endpoint("order.place", str, str)

@bill.stage
async def write(order: str) -> None:
    pass

@place.stage
async def check(order: str, flow: Flow) -> None:
    flow.request(stock, order)

@place.on_failure
async def failed(failure: Failure, flow: Flow) -> None:
    flow.send(bill, failure.stage)

@place.stage
async def finish(reply: str, flow: Flow) -> str:
    flow.send(bill, reply)
    flow.publish(news, reply)
    return reply

@app.subscriber(events)
async def seen(event: str) -> None:
    pass
"""
NEEDED = {
    "send": [
        *("bill", "mail.send", "order.place.stage.finish", "order.place.stage.on_failure", "stock.reserve"),
        *("/topic/audit", "/topic/news"),
    ],
    "take": [
        *("bill", "order.place", "order.place.stage.finish", "order.place.stage.on_failure"),
        *("/topic/events", "/topic/truenext.stages"),
    ],
}
PASSWORD = "open sesame"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SERVICE)
    return tmp_path


def write_users(folder: Path, **grants: list[str]) -> Path:
    """Write the users file of a broker: the service's user with these grants, and one that may ask for nothing."""
    lines = []
    for name, rights in (("shop", grants), ("other", {})):
        secret, file = folder / f"{name}.password", folder / "users.toml"
        for path in (secret, file):
            path.touch(0o600)
        secret.write_text(PASSWORD)
        lines += [f"[user.{name}]", f'password_file = "{name}.password"']
        lines += [f"{right} = {json.dumps(patterns)}" for right, patterns in rights.items()]
    file.write_text("\n".join(lines) + "\n")
    return file


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [TRUENEXT, "stages", "grants", *arguments]
    variables = os.environ | environment
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def printed(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    return {right: sorted(names) for right, names in tomllib.loads(done.stdout).items()}


def test_grants_of_a_service_are_the_queues_and_topics_that_its_code_names(folder: Path) -> None:
    done = run(folder, "shop:app")
    assert (done.returncode, done.stderr) == (0, "")
    assert printed(done) == {right: sorted(names) for right, names in NEEDED.items()}
    assert "# Replies of order.place: `send` also to the stages that get them" in done.stdout
    assert "# Programs of shop that use `ask`, and the command `truenext stages send --ask`:" in done.stdout
    assert "`take` and `send` also for /topic/replies.shop.*" in done.stdout
    assert "and their queues CALLER.replies and ENDPOINT.stage.on_failure" in done.stdout


def test_grants_that_a_user_lacks_are_printed_with_exit_status_1(folder: Path) -> None:
    file = write_users(folder, send=["bill", "stock.>", "order.place.>", "/topic/>"], take=[">"])
    done = run(folder, "shop:app", "--users", str(file), "--user", "shop")
    assert (done.returncode, done.stderr) == (1, "")
    assert printed(done) == {"send": ["mail.send"], "take": ["/topic/events", "/topic/truenext.stages"]}
    assert "# Replies of order.place: `send` also to the stages that get them" in done.stdout


def test_user_with_all_grants_lacks_none_with_exit_status_0(folder: Path) -> None:
    file = write_users(folder, **NEEDED)
    done = run(folder, "shop:app", "--users", str(file), "--user", "shop")
    assert (done.returncode, done.stderr, printed(done)) == (0, "", {})
    assert "# User shop has the grants that the code of shop shows. Not checked:" in done.stdout
    assert "# Replies of order.place: `send` also to the stages that get them" in done.stdout


def test_grants_take_the_users_file_from_the_environment_if_a_user_is_named(folder: Path) -> None:
    file = str(write_users(folder, **NEEDED))
    done = run(folder, "shop:app", "--user", "shop", TRUENEXT_USERS=file)
    assert (done.returncode, done.stderr, printed(done)) == (0, "", {})
    assert "# User shop has the grants" in done.stdout
    plain = run(folder, "shop:app", TRUENEXT_USERS=file)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert printed(plain) == {right: sorted(names) for right, names in NEEDED.items()}
    blank = run(folder, "shop:app", "--user", "shop", TRUENEXT_USERS=" ")
    assert blank.returncode == 2 and "--users and --user need one another" in blank.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--users", "users.toml"], "--users and --user need one another"),
        (["--user", "shop"], "--users and --user need one another"),
        (["--users", "users.toml", "--user", "shpo"], "users.toml has no user 'shpo'; is 'shop' meant?"),
        (["--users", "none.toml", "--user", "shop"], "cannot read none.toml: No such file or directory"),
    ],
)
def test_grants_that_cannot_be_checked_are_exit_status_2(folder: Path, arguments: list[str], error: str) -> None:
    write_users(folder)
    done = run(folder, "shop:app", *arguments)
    assert (done.returncode, done.stdout) == (2, "") and error in done.stderr


# ---- At a broker ----


@contextmanager
def running_broker(folder: Path, users: Path | None) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(folder, [] if users is None else ["--users", str(users)])
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()


def output_of_a_service(folder: Path, broker: BrokerProcess, *options: str, **variables: str) -> tuple[str, str]:
    """Run the service until it takes messages, and stop it. Return its standard output and its log."""
    url = f"{over_tls.SCHEME}://127.0.0.1:{broker.port}"
    command = [TRUENEXT, "stages", "run", "shop:app", "--url", url, *options]
    out, log = folder / "service.out", folder / "service.log"
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            dying_with_us(command), cwd=folder, env=os.environ | variables, stdout=stdout, stderr=stderr
        )
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while "shop runs" not in out.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    return out.read_text(), log.read_text()


def test_service_says_once_at_its_start_what_its_user_may_not_do(folder: Path) -> None:
    users = write_users(folder, send=["bill", "order.place.>", "/topic/>"], take=NEEDED["take"])
    with running_broker(folder, users) as broker:
        out, log = output_of_a_service(folder, broker, TRUENEXT_USER="other")
    url = f"{over_tls.SCHEME}://127.0.0.1:{broker.port}"
    assert out == (
        f"shop runs 5 stages of 3 endpoints at {url} as user 'shop' (from its code); TRUENEXT_USER is unused\n"
    )
    (warning,) = [line for line in log.splitlines() if "WARNING" in line]
    assert "the user lacks grants that the service needs" in warning
    assert "user='shop' send=['/queue/mail.send', '/queue/stock.reserve']" in warning and "take=" not in warning


def test_service_with_all_grants_warns_of_nothing(folder: Path) -> None:
    with running_broker(folder, write_users(folder, **NEEDED)) as broker:
        assert output_of_a_service(folder, broker)[1] == ""


def test_service_with_a_user_at_a_broker_without_users_warns_of_nothing(folder: Path) -> None:
    with running_broker(folder, None) as broker:
        assert output_of_a_service(folder, broker)[1] == ""


def test_report_of_a_connection_lists_the_grants_of_its_own_user(folder: Path) -> None:
    (folder / "shop.password").touch(0o600)
    (folder / "shop.password").write_text(PASSWORD)
    users = folder / "users.toml"
    users.touch(0o600)
    users.write_text(
        '[role.readers]\nbrowse = [">", "DLQ.>"]\nmonitor = true\n'
        '[user.shop]\npassword_file = "shop.password"\nroles = ["readers"]\nsend = ["orders.>", "/topic/news"]\n'
        'client_ids = ["till 1"]\n[user.other]\ncertificates = ["DNS:a"]\nmanage = [">"]\nadmin = true\n'
    )
    with running_broker(folder, users) as broker:
        client = RawClient(broker.port)
        client.send_connect("1.2", "0,0", headers=TRUENEXT_CLIENT | {"login": "shop", "passcode": PASSWORD})
        client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"})
        client.send_frame("SEND", {"destination": "/control/connection", "reply-to": "/temp-queue/answers"})
        assert json.loads(client.message().body)["user"] == {
            "name": "shop",
            "send": ["/queue/orders.>", "/topic/news"],
            "take": [],
            "browse": ["/queue/>", "/queue/DLQ.>"],
            "manage": [],
            "monitor": True,
            "admin": False,
            "client_ids": ["till 1"],
        }
        client.disconnect()
