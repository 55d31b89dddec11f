"""Tests of the health server of `truenext serve`, in processes of their own. Source: docs/contract.md, "Health and
metrics" """

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import Forked
from tests.integration.test_standing_by import two_brokers
from tests.prometheus_samples import parse
from tests.stages.postgres import PostgresServer
from truenext.broker import health, metrics
from truenext.broker.broker import Broker
from truenext.cli import health_server
from truenext.cli.main import main as truenext
from truenext.model.disk_level import DiskLevel
from truenext.store.embedded import EmbeddedStore

SOON_S = 10.0
"""Time within which a busy broker must answer, on a loaded machine."""


class HeldBroker(BrokerProcess):
    """Broker whose recovery takes as long as the file `hold-recovery` exists, and whose event loop is held while
    `hold-loop` does. Both keep the interpreter busy."""

    def _started(self, command: list[str]) -> Forked:
        return Forked([str(self.data.parent), *command], stdout=self._out, stderr=self._log, run=run_held)


def run_held(arguments: Sequence[str]) -> None:
    folder, *command = arguments
    recover, check = EmbeddedStore.recover, Broker._periodic_checks

    def wait_while(name: str) -> None:
        while Path(folder, name).exists():
            sum(range(10_000))

    def held_recover(store: EmbeddedStore) -> Any:
        wait_while("hold-recovery")
        return recover(store)

    def held_check(broker: Broker) -> None:
        check(broker)
        wait_while("hold-loop")

    with (
        mock.patch.object(EmbeddedStore, "recover", held_recover),
        mock.patch.object(Broker, "_periodic_checks", held_check),
        mock.patch.object(health, "LOOP_SLOW_S", 0.2),
        mock.patch.object(health, "LOOP_HELD_S", 0.6),
        mock.patch.object(metrics, "COLLECT_S", 0.2),
        mock.patch.object(health_server, "METRICS_AGE_S", 0.0),
    ):
        truenext(command)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[HeldBroker]:
    broker = HeldBroker(tmp_path, ["--health", "0"])
    try:
        yield broker
    finally:
        broker.clean_up()


def get(url: str, path: str) -> tuple[int, Any]:
    """Return status and body of an answer. JSON is decoded."""
    try:
        with urlopen(url + path, timeout=PATIENCE_SECONDS) as answer:
            status, body = answer.status, answer.read()
    except HTTPError as error:
        status, body = error.code, error.read()
    return status, json.loads(body) if body.startswith(b"{") else body.decode()


def scrape(url: str) -> dict[str, float]:
    return parse(get(url, "/metrics")[1])


def await_answer(url: str, path: str, is_expected: Callable[[int, Any], bool]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        status, body = get(url, path)
        if is_expected(status, body):
            return body
        assert time.monotonic() < deadline, (status, body)
        time.sleep(0.02)


def await_log(broker: BrokerProcess, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while text not in broker.log:
        assert time.monotonic() < deadline, broker.log
        time.sleep(0.02)


def test_broker_is_live_and_not_ready_during_a_long_recovery(broker: HeldBroker, tmp_path: Path) -> None:
    # C33.1, C33.2
    hold = tmp_path / "hold-recovery"
    hold.touch()
    broker.begin_start()
    url = broker.health_url
    started = time.monotonic()
    assert get(url, "/live")[0] == 200
    status, facts = get(url, "/ready")
    assert (status, facts["state"], facts["live"]) == (503, "restoring", True)
    assert facts["reasons"] == ["restoring: it opens its folder, and clients cannot connect yet"]
    samples = scrape(url)
    assert samples['truenext_broker_state{state="restoring"}'] == 1
    assert samples["truenext_broker_ready"] == 0
    assert time.monotonic() - started < SOON_S
    hold.unlink()
    broker.await_start()
    assert get(url, "/ready")[0] == 200
    broker.stop()


def test_scrape_does_not_wait_for_an_event_loop_that_is_held(broker: HeldBroker, tmp_path: Path) -> None:
    # C33.4
    broker.start()
    url = broker.health_url
    before = scrape(url)
    assert before["truenext_broker_figures_age_seconds"] < SOON_S
    (tmp_path / "hold-loop").touch()
    body = await_answer(url, "/ready", lambda status, _: status == 503)
    assert re.fullmatch(r"the event loop has stood still for \d+ s", body["reasons"][0])
    started = time.monotonic()
    assert scrape(url)["truenext_broker_queues"] == 0
    assert time.monotonic() - started < SOON_S
    await_answer(url, "/live", lambda status, _: status == 503)
    (tmp_path / "hold-loop").unlink()
    await_answer(url, "/ready", lambda status, _: status == 200)
    assert get(url, "/live")[0] == 200
    after = scrape(url)
    late = 'truenext_broker_event_loop_delay_seconds_bucket{le="0.25"}'
    assert after["truenext_broker_event_loop_delay_seconds_count"] > after[late], "a delay above 0.25 s was measured"
    broker.stop()


def test_reasons_and_figures_of_a_running_broker(tmp_path: Path) -> None:
    file = tmp_path / "truenext.toml"
    file.write_text('[broker]\nhealth = "0"\nmetrics_queues = ["orders.*"]\n')
    broker = BrokerProcess(tmp_path, ["--config", str(file)], can_hold_disk=True)
    try:
        broker.start()
        url = broker.health_url
        client = broker.connect()
        for queue in ("orders.new", "orders.new", "other"):
            client.send(queue, b"x", confirmed=True)
        samples = scrape(url)
        assert samples['truenext_broker_messages{state="waiting"}'] == 3
        assert samples['truenext_queue_messages{queue="orders.new",state="waiting"}'] == 2
        assert not any("other" in name for name in samples)
        assert samples["truenext_broker_connections"] == 1
        assert samples["truenext_broker_commit_seconds_count"] > 0
        file.write_text('[broker]\nhealth = "0"\nmetrics_queues = ["oth*er", "other"]\n')
        broker.send_signal(signal.SIGHUP)
        await_log(broker, "configuration not reloaded")
        assert "'oth*er', which is no pattern of queue names" in broker.log
        file.write_text('[broker]\nhealth = "0"\nmetrics_queues = ["other"]\n')
        broker.send_signal(signal.SIGHUP)
        name = 'truenext_queue_messages{queue="other",state="waiting"}'
        await_answer(url, "/metrics", lambda _, text: name in parse(text))
        broker.set_disk_level(DiskLevel.NONE)
        facts = await_answer(url, "/ready", lambda _, facts: facts["disk_level"] == "none")
        assert (facts["ready"], facts["reasons"]) == (True, ["disk level none: sends are refused, consumers go on"])
        broker.set_disk_level(DiskLevel.PLENTY)
        await_answer(url, "/ready", lambda _, facts: not facts["reasons"])
        # A drain does not wait for paused queues.
        for queue in ("orders.new", "other"):
            broker.output_of("pause", queue)
        client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"})
        begin = {"destination": "/control/drain", "reply-to": "/temp-queue/answers"}
        client.send_frame("SEND", begin, b'{"draining":true}')
        reasons = ["draining: it takes no new clients"]
        await_answer(url, "/ready", lambda status, facts: (status, facts["reasons"]) == (503, reasons))
    finally:
        broker.clean_up()


def test_port_of_health_that_is_taken_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        broker = BrokerProcess(tmp_path, ["--health", str(port)])
        broker.begin_start()
        assert broker.wait_for_end() == 2
        assert f"cannot listen on 127.0.0.1:{port} for --health: Address already in use" in broker.log


def test_port_of_health_that_a_listener_has_is_refused_with_a_sentence(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, ["--listen", "stomp://127.0.0.1:61999", "--health", "61999"])
    broker.begin_start()
    assert broker.wait_for_end() == 2
    assert "two addresses of --listen or --health name 127.0.0.1:61999: give each a port of its own" in broker.log


def test_broker_that_stands_by_is_live_and_ready_once_it_has_taken_over(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    with two_brokers(postgres, tmp_path, "health", options=["--health", "0"]) as (active, standby):
        url = standby.health_url
        facts = await_answer(url, "/ready", lambda _, facts: facts["state"] == "standing by")
        assert (facts["live"], facts["ready"], facts["reasons"]) == (
            True,
            False,
            ["standing by: another broker is active"],
        )
        assert get(url, "/live")[0] == 200
        active.kill()
        await_answer(url, "/ready", lambda status, _: status == 200)
        assert scrape(url)["truenext_broker_log_row"] > 0
