"""Tests that incomplete large frames stay within their share of the memory, and other senders are served."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from unittest import mock

import pytest

from tests.integration.broker_here import broker_here, port_of
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import RawClient
from truenext.broker import broker as broker_module
from truenext.broker import control_only, incomplete_frames
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import BODY_BYTES_MAX, INCOMPLETE_FRAME_SECONDS, MEMORY_LIMIT_MIN
from truenext.server import connection

MIB = 1024 * 1024
BODY = bytes(15 * MIB)
PRIVATE_BYTES_MAX = MEMORY_LIMIT_MIN + 16 * MIB
LEAST_MEMORY = pytest.mark.parametrize("options", [("--memory-limit", "128MiB")], ids=["128 MiB"])


def await_true(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def send_beginning(client: RawClient, body: bytes, size: int) -> None:
    """Send the beginning of a SEND to the queue `q`, with a content-length of `size`, as far as the broker reads."""
    with suppress(OSError):
        client.write(b"SEND\ndestination:/queue/q\ncontent-length:%d\n\n" % size + body)


@contextmanager
def stalled(*clients: RawClient, body: bytes = BODY, size: int = BODY_BYTES_MAX) -> Iterator[None]:
    """Let each client send the beginning of a frame and nothing more. During the block they may only read."""
    threads = [threading.Thread(target=send_beginning, args=(client, body, size)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for client in clients:
            client.stop_writing()
        for thread in threads:
            thread.join()


@LEAST_MEMORY
def test_connections_that_stall_within_large_frames_take_no_memory_and_let_others_send(
    own_broker: BrokerProcess, queue: str
) -> None:
    # C24.11, C24.12, C24.18
    honest, modest, first, *others = [own_broker.connect() for _ in range(42)]

    def incomplete_bytes() -> int:
        return int(own_broker.status()["memory"]["incomplete"])

    with own_broker.watched_memory() as samples, stalled(first):
        await_true(lambda: incomplete_bytes() >= len(BODY), "the first is not read")
        first_bytes = incomplete_bytes()
        started = time.monotonic()
        sending = threading.Thread(target=honest.send, args=(queue, BODY), kwargs={"persistent": True})
        sending.start()
        # Its turn is the second: each of the others would keep it waiting for as long as the first.
        await_true(lambda: incomplete_bytes() > first_bytes, "the beginning is not read")
        with stalled(*others):
            # What is small is not kept from anything.
            modest.send(f"{queue}-small", b"modest", persistent=True, confirmed=True)
            error = first.error()
            assert time.monotonic() - started > INCOMPLETE_FRAME_SECONDS - 2
            sending.join()
            honest.send(f"{queue}-small", b"behind it", confirmed=True)
            # The others have not had their time yet.
            time.sleep(2.5)
            refused = own_broker.log.count("client refused")
            memory = own_broker.status()["memory"]
            assert memory["incomplete"] < memory["limit"] // 4 + 17 * MIB
    print(f"{max(samples) >> 20} MiB of private memory at most")
    assert max(samples) < PRIVATE_BYTES_MAX
    assert error.headers["truenext-code"] == "too-slow"
    assert "other connections wait for its memory" in error.body.decode()
    assert refused == 1
    assert own_broker.queues()[queue].waiting == 1


def test_stalled_connections_are_ended_one_after_the_other_while_another_waits_and_then_no_more() -> None:
    size = 4 * MIB

    def use(port: int) -> None:
        clients = [RawClient(port) for _ in range(6)]
        for client in clients:
            client.send_connect("1.2", "0,0")
        slow, honest, *others = clients
        with stalled(*others, body=bytes(size - MIB), size=size):
            assert others[0].error().headers["truenext-code"] == "too-slow"
            honest.send("q", bytes(size), confirmed=True)
            for client in others[1:]:
                assert client.error().headers["truenext-code"] == "too-slow"
        # It fills all the room, and nobody waits for that.
        send_beginning(slow, bytes(size - MIB), size)
        time.sleep(0.5)
        honest.send("q", bytes(100), confirmed=True)
        slow.write(bytes(MIB) + b"\0")
        slow.send("q", bytes(100), confirmed=True)
        slow.disconnect()
        honest.disconnect()

    async def run() -> None:
        async with broker_here(memory_limit=4 * MIB) as listener:
            await asyncio.get_running_loop().run_in_executor(None, use, port_of(listener))

    with (
        mock.patch.object(broker_module, "CHECK_INTERVAL_S", 0.02),
        mock.patch.object(incomplete_frames, "INCOMPLETE_FRAME_SECONDS", 10),
    ):
        asyncio.run(run())


def test_connection_that_may_only_ask_is_ended_for_its_idleness_though_its_large_frame_waits() -> None:
    def use(port: int) -> None:
        first, second = RawClient(port), RawClient(port)
        first.send_connect("1.2", "0,0")
        send_beginning(first, bytes(2 * MIB), BODY_BYTES_MAX)
        second.send_connect("1.2", "0,0")
        send_beginning(second, bytes(50_000), BODY_BYTES_MAX)
        assert "this connection may only send control requests, and has sent none" in second.error().body.decode()
        first.reset()

    async def run() -> None:
        async with broker_here(memory_limit=4 * MIB, connections_max=1) as listener:
            await asyncio.get_running_loop().run_in_executor(None, use, port_of(listener))

    with (
        mock.patch.object(connection, "CONTROL_ONLY_IDLE_S", 0.5),
        mock.patch.object(control_only, "CONTROL_ONLY_IDLE_S", 0.5),
        mock.patch.object(incomplete_frames, "INCOMPLETE_FRAME_SECONDS", 1000),
    ):
        asyncio.run(run())


@LEAST_MEMORY
def test_large_frames_of_those_that_wait_for_the_disk_take_no_memory_and_keep_no_consumer_from_sending(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C24.12
    producers = [held_broker.connect() for _ in range(10)]
    for producer in producers:
        producer.send(queue, b"", confirmed=True)
    consumer = held_broker.connect()
    consumer.subscribe(f"{queue}-other")
    early, half = held_broker.connect(), 10 * MIB
    early.send("q", b"", confirmed=True)
    send_beginning(early, BODY[:half], len(BODY))
    await_true(lambda: held_broker.status()["memory"]["incomplete"] >= half, "the beginning is not read")
    held_broker.set_disk_level(DiskLevel.LITTLE)
    with held_broker.watched_memory() as samples:
        threads = [
            threading.Thread(target=producer.send, args=(queue, BODY), kwargs={"confirmed": True})
            for producer in producers
        ]
        end = threading.Thread(target=early.write, args=(BODY[half:] + b"\0",))
        for thread in (end, *threads):
            thread.start()
        consumer.send(f"{queue}-other", BODY, confirmed=True)
        consumer.ack(consumer.message(), confirmed=True)
        time.sleep(0.5)
        assert held_broker.status()["memory"]["incomplete"] < half + 2 * MIB
        assert all(thread.is_alive() for thread in threads)
    assert max(samples) < samples[0] + 5 * len(BODY)
    held_broker.set_disk_level(DiskLevel.PLENTY)
    for thread in (end, *threads):
        thread.join(PATIENCE_SECONDS)
    held_broker.await_facts(queue, waiting=2 * len(producers))
    held_broker.await_facts("q", waiting=2)
