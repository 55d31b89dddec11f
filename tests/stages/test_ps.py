"""Tests of `truenext stages ps` with processes of services and brokers of their own. Source: docs/contract.md, 34"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import truenext
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import Forked, completed_text
from tests.stages.flows import Number, until
from tests.stages.service_process import ServiceProcess
from truenext.model.process_report import STAGES_TOPIC
from truenext.stage import Service, responder

SERVICES = ("working", "killing", "poisoned")


class WatchingPs:
    """`truenext stages ps --watch --json` in a process of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self._out, self._log = folder / "ps.out", folder / "ps.log"
        command = ["stages", "ps", "--watch", "--json", "--url", url]
        self._process = Forked(command, stdout=self._out, stderr=self._log)

    def views(self) -> list[dict[str, dict[str, Any]]]:
        """Return all views until now, each with its processes by service."""
        lines = [line for line in self._out.read_bytes().split(b"\n")[:-1] if line]
        return [{each["service"]: each for each in json.loads(line)} for line in lines]

    def await_view(self, **states: str) -> dict[str, dict[str, Any]]:
        """Wait for a view with these services in these states, and no others. Return it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        shown = len(self.views()) if self._out.exists() else 0
        while True:
            for view in self.views()[shown:] if self._out.exists() else []:
                if {service: each["state"] for service, each in view.items()} == states:
                    return view
            assert time.monotonic() < deadline and self._process.poll() is None, (self.views()[-1:], self.log)
            time.sleep(0.05)

    def await_log(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.log:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        assert self._process.wait(PATIENCE_SECONDS) == 130, self.log

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def watching(folder: Path, url: str) -> Iterator[WatchingPs]:
    ps = WatchingPs(folder, url)
    try:
        yield ps
    finally:
        ps.kill()


@contextmanager
def services(folder: Path, url: str) -> Iterator[list[ServiceProcess]]:
    """Run three services, until they take messages."""
    processes = [ServiceProcess(folder, f"tests.stages.services.{name}:app", url) for name in SERVICES]
    try:
        for each in processes:
            each.await_lines(" runs ")
        yield processes
    finally:
        for each in processes:
            each.kill()


def ps(broker: BrokerProcess, *options: str) -> subprocess.CompletedProcess[str]:
    return completed_text("stages", "ps", "--url", broker.url, *options)


def test_processes_are_shown_until_they_end_and_a_killed_one_is_silent(tmp_path: Path, broker: BrokerProcess) -> None:
    with services(tmp_path, broker.url) as (working, killing, _), watching(tmp_path, broker.url) as shown:
        view = shown.await_view(work="answers", killing="answers", poisoned="answers")
        assert all(each["health"]["ready"] and each["graph"]["endpoints"] for each in view.values())
        killing.kill()
        assert working.stop() == 0
        shown.await_view(work="ended", killing="silent", poisoned="answers")
        done = ps(broker)
        assert (done.returncode, done.stderr) == (0, "")
        (header, line) = done.stdout.splitlines()
        assert header.split()[:2] == ["process", "state"] and line.strip().startswith("poisoned on ")
        assert " ready " in line
        # After a restart of the broker the silent process is still known, and the others answer again.
        broker.kill()
        broker.start(broker.port)
        shown.await_log("connected again")
        while view["poisoned"]["health"]["facts"]["broker"][1]["reconnects"] == 0:
            view = shown.await_view(killing="silent", poisoned="answers", work="ended")
        shown.stop()
        queues = json.loads(completed_text("queues", "--json", "--url", broker.url).stdout)
        assert not [each for each in queues if "truenext.stages" in each["name"] or "processes" in each["name"]]


# ---- Users ----

PASSWORD = "open sesame"
GRANTS: dict[str, dict[str, list[str]]] = {
    "shop": {"take": ["shop.double"], "send": ["shop.double"]},
    "till": {"take": ["till.double", STAGES_TOPIC]},
    "operator": {"send": [STAGES_TOPIC]},
    "other": {"send": ["shop.double"]},
}


def write_users(folder: Path, grants: dict[str, dict[str, list[str]]]) -> Path:
    secret, file = folder / "password", folder / "users.toml"
    for path in (secret, file):
        path.touch(0o600)
    secret.write_text(PASSWORD)
    lines = ['[user.admin]\npassword_file = "password"\nadmin = true']
    for name, rights in grants.items():
        lines.append(f'[user.{name}]\npassword_file = "password"')
        lines += [f"{right} = {json.dumps(patterns)}" for right, patterns in rights.items()]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def broker_with_users(tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path, ["--users", str(write_users(tmp_path, GRANTS))])
    try:
        process.start()
        yield process
        process.stop()
    finally:
        process.clean_up()


def doubling(broker: BrokerProcess, name: str) -> Service:
    app = Service(name, broker=broker.url, user=name, password=PASSWORD)

    @app.terminator(".double", Number)
    async def double(number: Number) -> None:
        pass

    return app


def test_service_reports_once_its_user_may_take_from_the_topic(
    tmp_path: Path,
    broker_with_users: BrokerProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C34.1."""
    monkeypatch.setattr(responder, "RETRY_S", 0.2)
    broker = broker_with_users

    async def names() -> set[str]:
        """Return the services that report to an operator."""
        async with (
            truenext.connect(broker.url, user="operator", password=PASSWORD) as operator,
            operator.consumer("/temp-queue/a") as replies,
        ):
            await operator.send(STAGES_TOPIC, b"", persistent=False, reply_to="/temp-queue/a")
            found = set()
            while (message := await replies.receive(0.5)) is not None:
                found.add(json.loads(message.body)["service"])
            return found

    async def reload(grants: dict[str, dict[str, list[str]]]) -> None:
        write_users(tmp_path, grants)
        async with truenext.connect(broker.url, user="admin", password=PASSWORD) as admin:
            await admin.control_request("reload")

    async def main() -> None:
        shop, till = doubling(broker, "shop"), doubling(broker, "till")
        async with shop.running(), till.running():
            await until(lambda: "the user may not take from the topic of processes" in caplog.text)
            # Time for more checks of the grant.
            await asyncio.sleep(0.6)
            assert await names() == {"till"}
            # The service has asked for its grants, and tried nothing that is refused.
            assert "refused" not in broker.log
            login = ["--password-file", str(tmp_path / "password")]
            done = await asyncio.to_thread(ps, broker, "--user", "operator", *login)
            assert (done.returncode, done.stderr) == (0, "") and "till on " in done.stdout
            done = await asyncio.to_thread(ps, broker, "--user", "other", *login)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == f"truenext: user 'other' may not send to {STAGES_TOPIC}\n"
            more = GRANTS["shop"]["take"] + [STAGES_TOPIC]
            await reload(GRANTS | {"shop": GRANTS["shop"] | {"take": more}})
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await names() != {"shop", "till"}:
                    pass
            await reload(GRANTS)
            assert await names() == {"till"}
            await shop.send(shop.endpoints["shop.double"], Number(1), trace="t")
            await until(lambda: bool(shop.metrics.snapshot()))

    asyncio.run(main())
    warnings = [each for each in caplog.records if each.name == "truenext.stage" and each.levelname == "WARNING"]
    assert [vars(each)["take"] for each in warnings] == [STAGES_TOPIC]
