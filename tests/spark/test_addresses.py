"""Tests of Spark's connection to one of several brokers, of which one hangs. Source: docs/failover.md, "Programs"."""

from __future__ import annotations

import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from tests.integration.broker_process import BrokerProcess
from truenext.errors import ConnectionLost, NoBroker
from truenext.model.url import Address, parse_url
from truenext.spark.broker import connection as spark
from truenext.spark.broker.connection import BrokerConnection

TIMEOUT_S = 2.0


@pytest.fixture(autouse=True)
def _nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "_failed_at", {})


@pytest.fixture
def silent() -> Iterator[Address]:
    """Address of a program that hangs: the kernel accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield parse_url(f"stomp://127.0.0.1:{listening.getsockname()[1]}")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path)
    try:
        process.start()
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.clean_up()


def address_of(broker: BrokerProcess) -> Address:
    return parse_url(f"stomp://127.0.0.1:{broker.port}")


def opening_s(addresses: list[Address]) -> float:
    """Return the seconds until a connection to one of the addresses is open."""
    started = time.monotonic()
    BrokerConnection(addresses, timeout_s=TIMEOUT_S).close()
    return time.monotonic() - started


def test_silent_address_gets_its_share_of_the_time_and_comes_last_in_the_next_minute(
    silent: Address, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [silent, address_of(broker)]
    assert TIMEOUT_S / 2 <= opening_s(addresses) < TIMEOUT_S
    assert opening_s(addresses) < TIMEOUT_S / 2
    monkeypatch.setattr(spark, "FAILED_LAST_SECONDS", 0.0)
    assert opening_s(addresses) >= TIMEOUT_S / 2


def test_broker_that_falls_silent_comes_last(
    broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark, "HEART_BEAT_SECONDS", 1.0)
    second = BrokerProcess(tmp_path / "second")
    second.data.parent.mkdir()
    try:
        second.start()
        addresses = [address_of(broker), address_of(second)]
        first = BrokerConnection(addresses)
        broker.send_signal(signal.SIGSTOP)
        with pytest.raises(ConnectionLost, match="has sent nothing, not even a heart-beat"):
            first.next_message("none", 5.0)
        first.close()
        started = time.monotonic()
        with BrokerConnection(addresses) as connection:
            assert connection.url == addresses[1].url
        assert time.monotonic() - started < 1.0
    finally:
        second.clean_up()


def test_address_that_refuses_leaves_its_time_to_the_other(silent: Address) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = parse_url(f"stomp://127.0.0.1:{closed.getsockname()[1]}")
    with pytest.raises(NoBroker, match=r"Connection refused; .* has not answered CONNECT within 2 s"):
        BrokerConnection([refusing, silent], timeout_s=TIMEOUT_S)


@contextmanager
def answering(answer: bytes | None) -> Iterator[Address]:
    """Address of a program that sends `answer` to each CONNECT and closes the connection; with None it resets the
    connection."""

    def serve() -> None:
        while True:
            try:
                accepted, _ = listening.accept()
            except OSError:
                return
            with accepted:
                accepted.recv(1 << 16)
                if answer is None:
                    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    accepted.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = Thread(target=serve)
        serving.start()
        try:
            yield parse_url(f"stomp://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            serving.join()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "the broker URL has closed the connection"),
        (None, r"the connection to URL was lost: .*reset by peer"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "URL: .+"),
        (b"MESSAGE\n\n\0", "URL: .+"),
    ],
    ids=["closes", "resets", "other protocol", "no CONNECTED"],
)
def test_address_where_the_login_fails_is_left_for_the_other(
    answer: bytes | None, reason: str, broker: BrokerProcess
) -> None:
    with answering(answer) as faulty:
        with pytest.raises(NoBroker, match=f"^no broker: {reason.replace('URL', faulty.url)}$") as caught:
            BrokerConnection([faulty], timeout_s=TIMEOUT_S)
        assert caught.value.is_listening
        spark._failed_at.clear()
        with BrokerConnection([faulty, address_of(broker)], timeout_s=TIMEOUT_S) as connection:
            assert connection.url == address_of(broker).url
        assert list(spark._failed_at) == [faulty.url]
