"""Tests that the broker's log reports each event once, and names its object."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.test_cut_connections import client_with_one_started, cut
from tests.integration.test_wire import RECEIPT_BYTES, request_receipts
from truenext.model.limits import UNSENT_ANSWER_BYTES_MAX


@pytest.fixture
def logging_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """Broker that logs events of clients too."""
    broker = BrokerProcess(tmp_path, ("--log-level", "info"))
    broker.start()
    try:
        yield broker
        broker.stop()
    finally:
        broker.clean_up()


def about_clients(broker: BrokerProcess) -> list[str]:
    """Return the log lines about lost or refused clients, without time and level."""
    lines = [line.partition(" client ")[2] for line in broker.log.splitlines()]
    return [line for line in lines if line.startswith(("lost", "refused"))]


def test_client_that_reads_no_answers_is_logged_once(logging_broker: BrokerProcess) -> None:
    client = logging_broker.connect(receive_buffer=4096)
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        for _ in range(0, 2 * UNSENT_ANSWER_BYTES_MAX + 32 * 1024 * 1024, 1000 * RECEIPT_BYTES):
            request_receipts(client, 1000)
    (line,) = about_clients(logging_broker)
    assert line.startswith("refused client='127.0.0.1:")
    assert "bytes of unread answers" in line


def test_clients_that_read_no_answers_end_one_by_one_when_all_have_too_many(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, ("--memory-limit", "128MiB"))
    broker.start()
    try:
        clients, reading = [broker.connect(receive_buffer=4096) for _ in range(6)], broker.connect()
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            # The sockets take some, too.
            for _ in range(0, UNSENT_ANSWER_BYTES_MAX + 16 * 1024 * 1024, 1000 * RECEIPT_BYTES):
                for client in clients:
                    request_receipts(client, 1000)
                # Else a loaded machine reads one client so far ahead that it alone has too many.
                reading.send("q", b"", confirmed=True)
        reading.send("q", b"", confirmed=True)
        (line, *_) = about_clients(broker)
        assert "the most of all, and those of all clients take more than 8388608 bytes (--memory-limit)" in line
        broker.stop()
    finally:
        broker.clean_up()


def test_client_that_does_not_come_back_is_logged_as_lost(logging_broker: BrokerProcess) -> None:
    client = client_with_one_started(logging_broker, "q")
    cut(client)
    logging_broker.await_facts("q", consumers=0, unacknowledged=0)
    # The connections of `await_facts` take their leave.
    maybe, lost = about_clients(logging_broker)
    assert maybe.startswith("lost; its messages are kept for a takeover client='127.0.0.1:")
    assert lost.startswith("lost client='127.0.0.1:") and "no takeover within 1 s" in lost
