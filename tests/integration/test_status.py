"""Tests of the status of the broker, and of its report of a stuck queue."""

import asyncio
import logging
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from unittest import mock

import pytest

from tests.integration.broker_here import broker_here, port_of
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import completed_text
from tests.integration.raw_client import RawClient
from truenext.broker import broker as broker_module
from truenext.engine import stuck
from truenext.engine.dispatch.plain import Deliveries, Dispatcher
from truenext.engine.state.queue import Lane, Queue
from truenext.wire.stomp.speedups import CODEC_LANGUAGE


def status(port: int) -> "subprocess.CompletedProcess[str]":
    """Run `truenext status`."""
    return completed_text("status", "--url", f"stomp://127.0.0.1:{port}")


def test_the_status_has_waiting_messages_and_messages_in_memory(own_broker: BrokerProcess) -> None:
    sender, reader = own_broker.connect(), own_broker.connect()
    for number in range(10):
        sender.send("q", bytes(1000), persistent=number % 2 == 0)
    reader.subscribe("q", prefetch=3)
    sender.begin("t")
    sender.send("q", bytes(5000), transaction="t", confirmed=True)
    reader.begin("t")
    reader.ack(reader.message(), transaction="t")
    reader.messages(3)

    facts = own_broker.status()

    assert facts["stuck"] == []
    assert (facts["queues"], facts["waiting"], facts["in_memory"]) == (1, 6, 10)
    assert (facts["disk_level"], facts["page_reads"]) == ("plenty", 0)
    memory = facts["memory"]
    assert 10 * 1000 < memory["used"] < 20_000 < memory["limit"]
    assert 5000 < memory["open"] < 6000
    assert (memory["leaving"], memory["unsent"]) == (0, 0)
    printed = status(own_broker.port)
    assert printed.returncode == 0
    assert re.search(r"6 waiting in 1 queue, 10 in memory", printed.stdout)
    assert re.search(r"^stuck +none$", printed.stdout, re.MULTILINE)
    assert facts["codec"] == CODEC_LANGUAGE
    assert re.search(rf"^codec +in {CODEC_LANGUAGE}$", printed.stdout, re.MULTILINE)
    assert re.search(r"^topics +0 durable subscriptions, 0 others$", printed.stdout, re.MULTILINE)


def test_the_status_counts_all_scheduled_sends_and_those_to_topics(own_broker: BrokerProcess) -> None:
    def wait_reasons() -> tuple[str, int, int]:
        (line,) = re.findall(r"^scheduled +(.*)$", status(own_broker.port).stdout, re.MULTILINE)
        facts = own_broker.status()
        return line, facts["scheduled"], facts["scheduled_for_topics"]

    assert wait_reasons() == ("0 sends, 0 of them for topics or several destinations", 0, 0)
    client = own_broker.connect()
    later = {"AMQ_SCHEDULED_DELAY": "600000"}
    client.send("q", b"", headers=later, persistent=True, confirmed=True)
    assert wait_reasons() == ("1 send, 0 of them for topics or several destinations", 1, 0)
    client.send("r", b"", headers=later, confirmed=True)
    client.send_frame("SEND", {"destination": "/topic/t", **later}, confirmed=True)
    assert wait_reasons() == ("3 sends, 1 of them for topics or several destinations", 3, 1)
    own_broker.restart(is_clean=True)
    assert wait_reasons() == ("3 sends, 1 of them for topics or several destinations", 3, 1)


def test_the_status_names_connections_whose_waiting_bytes_no_queue_has(own_broker: BrokerProcess) -> None:
    reader, sender = own_broker.connect(sends_connect=False), own_broker.connect()
    reader.send_connect("1.2", "0,0", client_id="billing")
    topic = {"destination": "/topic/news"}
    reader.send_frame("SUBSCRIBE", topic | {"id": "1", "ack": "client", "activemq.prefetchSize": "2"}, confirmed=True)
    for _ in range(10):
        sender.send_frame("SEND", topic, bytes(10_000), confirmed=True)

    facts = own_broker.status()["temporary"]
    (largest,) = facts["largest"]
    assert (largest["destination"], largest["client_id"]) == ("/topic/news", "billing")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", largest["client"])
    for each in (facts, largest):
        assert (each["waiting"], each["unacknowledged"]) == (8, 2)
        assert 100_000 < each["bytes"] < 110_000
    printed = status(own_broker.port).stdout
    said = f"8 waiting, 2 unacknowledged, {facts['bytes']:,} bytes"
    assert f"temporary  {said}, in queues and subscriptions that end with their connection\n" in printed
    assert f"           /topic/news of {largest['client']} (billing): {said}\n" in printed
    reader.unsubscribe("1")
    assert (
        "temporary  0 waiting, 0 unacknowledged, 0 bytes, in queues and subscriptions that end"
        in status(own_broker.port).stdout
    )


def test_answer_reaches_a_subscription_that_follows_its_request(broker: BrokerProcess) -> None:
    client = broker.connect()
    client.send_frame("SEND", {"destination": "/control/status", "reply-to": "/temp-queue/late"})
    client.send_frame("SUBSCRIBE", {"id": "late", "destination": "/temp-queue/late"})
    assert b'"ready":true' in client.message().body


def test_status_without_a_broker_exits_with_status_2() -> None:
    printed = status(1)
    assert (printed.returncode, printed.stdout) == (2, "")
    assert "no broker at" in printed.stderr


class StuckDispatcher(Dispatcher):
    """Dispatcher that forgets a queue."""

    def dispatch(self, queue: Queue, deliveries: Deliveries) -> Lane | None:
        return None if queue.name == "forgotten" else super().dispatch(queue, deliveries)


def test_a_stuck_queue_is_in_the_status_and_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    results: list[subprocess.CompletedProcess[str]] = []

    def use(port: int) -> None:
        with closing(RawClient(port)) as client:
            client.send_connect("1.2", "0,0")
            client.subscribe("forgotten", subscription="1")
            client.subscribe("other", subscription="2")
            client.send("forgotten", b"")
            client.send("other", b"")
            assert client.message().headers["subscription"] == "2"
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not any("stuck" in record.message for record in caplog.records):
                assert time.monotonic() < deadline, "nothing is said"
                time.sleep(0.01)
            results.append(status(port))
            client.unsubscribe("1")
            while (last := status(port)).returncode:
                assert time.monotonic() < deadline, "the queue is still called stuck"
            results.append(last)
            client.disconnect()

    with (
        mock.patch.object(broker_module, "CHECK_INTERVAL_S", 0.02),
        mock.patch.object(stuck, "STUCK_MS", 100),
        mock.patch("truenext.engine.engine.Dispatcher", StuckDispatcher),
        caplog.at_level(logging.ERROR),
    ):
        asyncio.run(use_one(use))

    (said,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert said.__dict__["queue"] == "forgotten"
    assert results[0].returncode == 1
    assert re.search(r"^stuck +forgotten, for \d+\.\d seconds$", results[0].stdout, re.MULTILINE), results[0]
    assert results[1].returncode == 0


async def use_one(use: Callable[[int], None]) -> None:
    async with broker_here() as listener:
        await asyncio.get_running_loop().run_in_executor(None, use, port_of(listener))
