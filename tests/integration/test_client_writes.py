"""Tests of the writes of both clients to a real socket, when they acknowledge messages.

Source of what is expected: docs/client.md, "Receive". tests/client/test_writes.py tests which ACKs wait.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import truenext
from tests.integration.broker_process import BrokerProcess
from truenext import blocking
from truenext.client.tasks.driver import Driver as TasksDriver
from truenext.client.threads import driver as threads_driver

COUNT = 100
TRIES = 20
SOON_S = 0.02
"""Seconds within which the quickest of some ACKs leaves, though the machine is busy."""


class RecordingSocket:
    """Socket that records its writes."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.writes: list[bytes] = []

    def send(self, data: bytes) -> int:
        written: int = self._sock.send(data)
        self.writes.append(bytes(data[:written]))
        return written

    def fileno(self) -> int:
        number: int = self._sock.fileno()
        return number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    @classmethod
    def record(cls, driver: TasksDriver | threads_driver.Driver) -> list[bytes]:
        """Return the list of the writes that the driver makes from now on."""
        recording = cls(driver._sock)
        driver._sock = recording  # type: ignore[assignment]
        return recording.writes


def test_asyncio_program_receives_and_acknowledges_each_message_in_one_write(broker: BrokerProcess, queue: str) -> None:
    async def program() -> None:
        async with truenext.connect(f"stomp://127.0.0.1:{broker.port}") as connection:
            await connection.send_many(f"/queue/{queue}", [b""] * (COUNT + 1))
            async with connection.consumer(f"/queue/{queue}", ack="individual", prefetch=COUNT + 1) as consumer:
                message = await consumer.receive()
                while len(consumer._subscription) < COUNT:
                    await asyncio.sleep(0.001)
                writes = RecordingSocket.record(connection._driver)
                for _ in range(COUNT):
                    assert message is not None, "one is buffered"
                    await message.ack()
                    message = await consumer.receive()
                assert len(writes) == COUNT
                assert all(each.count(b"ACK\n") == each.count(b"\ntruenext-started:") == 1 for each in writes)

    asyncio.run(program())


def test_blocking_program_receives_and_acknowledges_each_message_in_one_write(
    broker: BrokerProcess, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a slow machine more than the real delay may pass between two calls.
    monkeypatch.setattr(threads_driver, "ACK_DELAY_S", 60.0)
    with blocking.connect(f"stomp://127.0.0.1:{broker.port}") as connection:
        connection.send_many(f"/queue/{queue}", [b""] * (COUNT + 1))
        with connection.consumer(f"/queue/{queue}", ack="individual", prefetch=COUNT + 1) as consumer:
            message = consumer.receive()
            while len(consumer._subscription) < COUNT:
                time.sleep(0.001)
            writes = RecordingSocket.record(connection._driver)
            for _ in range(COUNT):
                assert message is not None, "one is buffered"
                message.ack()
                message = consumer.receive()
            assert len(writes) == COUNT
            assert all(each.count(b"ACK\n") == each.count(b"\ntruenext-started:") == 1 for each in writes)


def test_ack_of_an_asyncio_program_leaves_soon_without_another_receive(broker: BrokerProcess, queue: str) -> None:
    async def program() -> list[float]:
        durations = []
        async with truenext.connect(f"stomp://127.0.0.1:{broker.port}") as connection:
            await connection.send_many(f"/queue/{queue}", [b""] * (TRIES + 1))
            async with connection.consumer(f"/queue/{queue}", ack="individual", prefetch=TRIES + 1) as consumer:
                for _ in range(TRIES):
                    message = await consumer.receive()
                    assert message is not None, "without a timeout it waits"
                    while not len(consumer._subscription):
                        await asyncio.sleep(0.001)
                    writes = RecordingSocket.record(connection._driver)
                    await message.ack()
                    acked_at = time.monotonic()
                    assert not writes
                    while not writes:
                        await asyncio.sleep(0)
                    durations.append(time.monotonic() - acked_at)
        return durations

    assert min(asyncio.run(program())) < SOON_S


def test_ack_of_a_blocking_program_leaves_soon_without_another_receive(broker: BrokerProcess, queue: str) -> None:
    durations = []
    with blocking.connect(f"stomp://127.0.0.1:{broker.port}") as connection:
        connection.send_many(f"/queue/{queue}", [b""] * (TRIES + 1))
        with connection.consumer(f"/queue/{queue}", ack="individual", prefetch=TRIES + 1) as consumer:
            for _ in range(TRIES):
                message = consumer.receive()
                assert message is not None, "without a timeout it waits"
                while not len(consumer._subscription):
                    time.sleep(0.001)
                writes = RecordingSocket.record(connection._driver)
                message.ack()
                acked_at = time.monotonic()
                while not writes:
                    time.sleep(0.0001)
                durations.append(time.monotonic() - acked_at)
    assert min(durations) < SOON_S
