"""Tests that producers that sent one message are forgotten for new ones, over sockets and restarts."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.integration.broker_here import broker_here, port_of
from tests.integration.broker_process import PATIENCE_SECONDS
from tests.integration.raw_client import RawClient, bodies, numbered
from truenext.broker import broker as broker_module
from truenext.engine.writing import producers

FEW = 3
SHORT_MS = 300


@pytest.fixture(autouse=True)
def _few_producers_are_remembered_for_a_short_time() -> Iterator[None]:
    with (
        mock.patch.object(producers, "PRODUCERS_MAX", FEW),
        mock.patch.object(producers, "PRODUCER_RETENTION_MS_MIN", SHORT_MS),
        mock.patch.object(broker_module, "CHECK_INTERVAL_S", 0.02),
    ):
        yield


def run(data: Path, use: Callable[[RawClient], None]) -> None:
    """Run a broker from its start to its clean stop, with one client."""

    def connect_and_use(port: int) -> None:
        client = RawClient(port)
        try:
            client.send_connect("1.2", "0,0")
            use(client)
        finally:
            client.close()

    async def here() -> None:
        async with broker_here(data) as listener:
            await asyncio.get_running_loop().run_in_executor(None, connect_and_use, port_of(listener))

    asyncio.run(here())


def send(client: RawClient, producer: str, number: int = 1) -> None:
    client.send(
        "q", f"{producer}{number}".encode(), persistent=True, headers=numbered(producer, number), confirmed=True
    )


def commit(client: RawClient, producer: str) -> None:
    client.begin("t")
    client.send("q", f"{producer} committed".encode(), persistent=True, transaction="t")
    client.commit("t", headers=numbered(producer, 1))


def remaining(client: RawClient, count: int) -> list[str]:
    client.subscribe("q")
    return bodies(client.only(count))


def test_a_producer_of_an_earlier_run_that_sent_once_is_forgotten_for_a_new_one_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(client: RawClient) -> None:
        commit(client, "committer")
        send(client, "once")
        send(client, "twice", 1)
        send(client, "twice", 2)

    def repeat_too_soon(client: RawClient) -> None:
        client.send("q", b"refused", persistent=True, headers=numbered("new", 1))
        assert f"there are {FEW} producers with numbers" in client.error().body.decode()

    def send_more(client: RawClient) -> None:
        send(client, "new")
        # What is remembered is a repeat, and no message.
        send(client, "twice", 1)
        client.commit("t", headers=numbered("committer", 1))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not any("producers forgotten" in record.message for record in caplog.records):
            assert time.monotonic() < deadline, "nothing is said"
            time.sleep(0.01)

    def repeat_the_forgotten(client: RawClient) -> None:
        time.sleep(SHORT_MS / 1000)
        send(client, "once")
        assert remaining(client, 6) == ["committer committed", "once1", "twice1", "twice2", "new1", "once1"]

    with mock.patch.object(producers, "PRODUCER_RETENTION_MS_MIN", 3600_000):
        run(tmp_path, fill)
        run(tmp_path, repeat_too_soon)
    time.sleep(SHORT_MS / 1000)
    with caplog.at_level(logging.WARNING):
        run(tmp_path, send_more)
    (entry,) = [record for record in caplog.records if "producers forgotten" in record.message]
    assert (entry.__dict__["producers"], entry.__dict__["last"]) == (1, "once")
    run(tmp_path, repeat_the_forgotten)


def test_hundreds_of_processes_that_send_one_message_each_are_all_served(tmp_path: Path) -> None:
    def fill(client: RawClient) -> None:
        commit(client, "committer")
        for number in range(500):
            send(client, f"process {number}")
        client.commit("t", headers=numbered("committer", 1))
        remaining(client, 501)

    with mock.patch.object(producers, "PRODUCER_RETENTION_MS_MIN", 0):
        run(tmp_path, fill)
