"""Tests of the notifications to a service manager, read from a real datagram socket as systemd does."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from asyncio import Runner
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import Forked
from tests.integration.notifications import Receiver
from truenext.broker.broker import Broker
from truenext.cli import broker_health, serve, service_manager
from truenext.cli.loops import new_event_loop
from truenext.cli.main import main as truenext
from truenext.cli.service_manager import ServiceManager, find_service_manager

WATCHDOG_S = 1.5
"""Period of the watchdog in these tests."""


@pytest.fixture
def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", receiver.address)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    with receiver.socket:
        yield receiver


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    broker = ControlledBroker(tmp_path)
    try:
        yield broker
    finally:
        broker.clean_up()


class ControlledBroker(BrokerProcess):
    """Broker whose event loop is held while the file `hold-loop` exists, and busy while `busy-loop` does."""

    def _started(self, command: list[str]) -> Forked:
        return Forked([str(self.data.parent), *command], stdout=self._out, stderr=self._log, run=run_controlled)


def run_controlled(arguments: Sequence[str]) -> None:
    folder, *command = arguments
    original = Broker._periodic_checks

    def keep_busy(broker: Broker) -> None:
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            pass
        if Path(folder, "busy-loop").exists():
            broker._loop.call_soon(keep_busy, broker)

    def check(broker: Broker) -> None:
        original(broker)
        while Path(folder, "hold-loop").exists():
            time.sleep(0.01)
        if Path(folder, "busy-loop").exists():
            keep_busy(broker)

    with mock.patch.object(Broker, "_periodic_checks", check):
        truenext(command)


# ---- A broker ----


def test_broker_reports_that_it_is_ready_once_it_listens_and_its_stop_before_it_ends(
    receiver: Receiver, broker: BrokerProcess
) -> None:
    broker.begin_start()
    ready = receiver.receive()
    broker.await_start()
    assert ready == f"READY=1\nSTATUS=listening on {broker.url}"
    broker.connect().disconnect()
    broker.stop()
    assert receiver.receive() == "STOPPING=1"
    with pytest.raises(TimeoutError):
        receiver.receive(0.01)


def test_broker_with_two_addresses_is_ready_once_it_listens_on_both(receiver: Receiver, tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, ("--listen", "openwire://127.0.0.1:0"))
    try:
        broker.begin_start()
        urls = receiver.receive().partition("=listening on ")[2].split(", ")
        assert [url.partition(":")[0].removesuffix("+ssl") for url in urls] == ["stomp", "openwire"]
        broker.await_start()
        broker.stop()
    finally:
        broker.clean_up()


def test_broker_that_cannot_listen_never_reports_that_it_is_ready(receiver: Receiver, broker: BrokerProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        broker.begin_start(taken.getsockname()[1])
        assert broker.wait_for_end() == 2
    assert receiver.receive() == "STOPPING=1"
    with pytest.raises(TimeoutError):
        receiver.receive(0.01)


def test_watchdog_notices_a_held_event_loop_and_no_busy_one(
    receiver: Receiver, broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1_000_000)))
    broker.start()
    receiver.receive_first("READY=1")
    assert receiver.longest_pause(WATCHDOG_S) < WATCHDOG_S, "an idle loop"
    (tmp_path / "busy-loop").touch()
    assert receiver.longest_pause(1.0 + WATCHDOG_S) < WATCHDOG_S, "a busy loop"
    (tmp_path / "busy-loop").unlink()
    (tmp_path / "hold-loop").touch()
    # The loop is held at its next check, a second later at most.
    assert receiver.longest_pause(1.2 + 1.2 * WATCHDOG_S) > WATCHDOG_S, "a held loop"
    (tmp_path / "hold-loop").unlink()
    assert receiver.receive() == "WATCHDOG=1"
    broker.send_signal(signal.SIGTERM)
    receiver.receive_first("STOPPING=1")
    assert broker.wait_for_end() == 0


def test_broker_without_a_service_manager_serves(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    broker.start()
    broker.connect().disconnect()
    broker.stop()
    assert "service manager not reached" in broker.log


# ---- A broker that stands by ----


def test_broker_that_stands_by_is_ready_and_feeds_the_watchdog(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    manager = find_service_manager()
    serve._report_standing_by(manager, broker_health.BrokerProcess(), "main")
    assert receiver.receive() == "READY=1\nSTATUS=standing by for main"
    serve._while_standing_by(None, manager)
    assert receiver.receive() == "WATCHDOG=1"
    manager.close()


# ---- Sockets ----


def test_name_with_an_at_sign_is_one_of_the_abstract_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = Receiver(f"@truenext-test-{os.getpid()}")
    with receiver.socket:
        manager = find_service_manager({"NOTIFY_SOCKET": receiver.address})
        manager.stopping()
        assert receiver.receive() == "STOPPING=1"
        manager.close()


@pytest.mark.parametrize(
    ("variables", "is_fed"),
    [
        ({}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({"WATCHDOG_USEC": "1000"}, True),
        ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, False),
    ],
)
def test_watchdog_is_fed_only_if_it_is_that_of_this_process(
    receiver: Receiver, variables: dict[str, str], is_fed: bool
) -> None:
    manager = find_service_manager({"NOTIFY_SOCKET": receiver.address, **variables})
    manager.feed_watchdog()
    manager.stopping()
    assert receiver.receive() == ("WATCHDOG=1" if is_fed else "STOPPING=1")
    manager.close()


def fill(receiver: Receiver) -> None:
    """Fill the queue of a socket that does not read."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                other.sendto(b"WATCHDOG=1", receiver.address)


def test_watchdog_does_not_wait_for_a_service_manager_that_does_not_read(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_manager, "SEND_TIMEOUT_S", PATIENCE_SECONDS)
    manager = find_service_manager({"NOTIFY_SOCKET": receiver.address, "WATCHDOG_USEC": "1000"})
    fill(receiver)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        manager.feed_watchdog()
    assert time.monotonic() - began < PATIENCE_SECONDS / 2
    assert "service manager not notified" in caplog.text
    manager.close()


def test_readiness_waits_for_a_service_manager_that_does_not_read(receiver: Receiver) -> None:
    manager = find_service_manager({"NOTIFY_SOCKET": receiver.address})
    fill(receiver)
    sender = threading.Thread(target=manager.ready, args=("waiting",))
    sender.start()
    assert receiver.receive_first("READY=1") == "READY=1\nSTATUS=waiting"
    sender.join()
    manager.close()


def test_feeding_ends_with_the_event_loop(receiver: Receiver) -> None:
    manager = find_service_manager({"NOTIFY_SOCKET": receiver.address, "WATCHDOG_USEC": "20000"})

    async def feed(wait: Callable[[], object]) -> None:
        manager.feed_watchdog_from(runner.get_loop())
        wait()

    with Runner(loop_factory=new_event_loop) as runner:
        runner.run(feed(lambda: None))
    assert receiver.receive() == "WATCHDOG=1"
    with pytest.raises(TimeoutError):
        receiver.receive(0.1)
    manager.close()


def test_process_without_a_service_manager_sends_nothing() -> None:
    manager = find_service_manager({})
    manager.ready("listening")
    manager.feed_watchdog()
    manager.stopping()
    manager.close()
    assert isinstance(manager, ServiceManager)
