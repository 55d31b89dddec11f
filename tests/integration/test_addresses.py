"""Tests of programs that name two brokers, of which one hangs or does not answer.

Source: docs/client.md, "Connect" and "Lost connections"; docs/failover.md, "Programs".
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import truenext
from tests.integration.broker_process import BrokerProcess
from truenext import blocking
from truenext.errors import NoBroker

HEART_BEAT_S = 1.0
SILENCE_S = 0.8
"""Time after which a client with this heart-beat notices that its broker hangs."""
RECONNECT_S = 2.0
"""Time within which the client has the next broker, on a busy machine."""


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[list[BrokerProcess]]:
    made = [BrokerProcess(tmp_path / name) for name in ("a", "b")]
    try:
        for each in made:
            each.data.parent.mkdir()
            each.start()
        yield made
    finally:
        for each in made:
            if each.is_running:
                each.send_signal(signal.SIGCONT)
            each.clean_up()


def urls(brokers: list[BrokerProcess]) -> list[str]:
    return [f"stomp://127.0.0.1:{each.port}" for each in brokers]


def test_program_with_threads_goes_on_at_the_next_broker_when_the_first_hangs(brokers: list[BrokerProcess]) -> None:
    with blocking.connect(*urls(brokers), heart_beat=HEART_BEAT_S) as connection:
        connection.send("/queue/a", "before")
        brokers[0].send_signal(signal.SIGSTOP)
        hung_at = time.monotonic()
        while not connection.health().reconnects:
            time.sleep(0.01)
        took_s = time.monotonic() - hung_at
        connection.send("/queue/a", "after")
    assert took_s < SILENCE_S + RECONNECT_S
    with blocking.connect(urls(brokers)[1]) as other:
        assert [each.text for each in other.browse("/queue/a")] == ["after"]


def test_program_with_tasks_goes_on_at_the_next_broker_when_the_first_hangs(brokers: list[BrokerProcess]) -> None:
    async def run() -> float:
        async with truenext.connect(*urls(brokers), heart_beat=HEART_BEAT_S) as connection:
            await connection.send("/queue/a", "before")
            brokers[0].send_signal(signal.SIGSTOP)
            hung_at = time.monotonic()
            while not connection.health().reconnects:
                await asyncio.sleep(0.01)
            took_s = time.monotonic() - hung_at
            await connection.send("/queue/a", "after")
            return took_s

    assert asyncio.run(run()) < SILENCE_S + RECONNECT_S


@pytest.fixture
def silent_url() -> Iterator[str]:
    """Address of a program that hangs: the kernel accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"stomp://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def closed_url() -> str:
    """Address of a broker that stands by: nothing listens there."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"stomp://127.0.0.1:{closed.getsockname()[1]}"


@pytest.mark.parametrize("reconnect", [True, False])
def test_connect_without_a_broker_says_what_is_wrong_with_each_address(
    reconnect: bool, silent_url: str, closed_url: str
) -> None:
    with pytest.raises(NoBroker) as caught:
        blocking.connect(closed_url, silent_url, timeout=1, reconnect=reconnect)
    assert str(caught.value).startswith(
        f"no broker at {closed_url}: Connection refused; at {silent_url}: a program listens there, but has not "
        f"answered as a STOMP broker within {'0.5' if reconnect else '1'} s: "
    )
