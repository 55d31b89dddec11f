"""Tests of the log messages about a connection. Source: docs/client.md, "Lost connections"."""

import logging
from collections.abc import Iterator

import pytest

from tests.client.scripted import ADDRESS, Script, receive
from truenext.cli.logs import FieldFormatter
from truenext.client import log
from truenext.client.core.client import REPORT_INTERVAL_S
from truenext.errors import ClosedError

REFUSED = ConnectionRefusedError(111, "Connection refused")
URL = "stomp://127.0.0.1:61613"


def test_failures_to_connect_are_reported_once_a_minute_and_then_how_many_there_were() -> None:
    script = Script()
    for _ in range(20):
        script.client.on_connect_failed(REFUSED)
        script.now += 1
    assert script.reports == [f"cannot connect to {URL}: Connection refused"]
    script.now = REPORT_INTERVAL_S
    script.client.on_connect_failed(REFUSED)
    script.client.on_connect_failed(OSError(113, "No route to host"))
    assert script.reports[1:] == [
        f"cannot connect to {URL}: Connection refused",
        f"cannot connect to {URL}: No route to host",
    ]
    script.now = 75.5
    script.connect()
    assert script.reports[3:] == [f"connected to {URL}, after 75.5 s, in attempt 23"]


def test_client_that_is_closed_before_it_is_connected_reports_nothing() -> None:
    script = Script()
    script.client.on_socket_connected(ADDRESS)
    script.client.fail_permanently(ClosedError("the connection was never opened"))
    assert script.client.link is None
    assert script.reports == []


def test_lost_connection_is_reported_and_so_is_the_next_one() -> None:
    script = Script()
    script.connect()
    script.now = 10
    script.lose()
    script.client.on_connect_failed(REFUSED)
    script.now = 12
    script.connect()
    script.lose()
    script.client.on_connect_failed(REFUSED)
    assert script.reports == [
        f"connected to {URL}",
        f"connection lost to {URL}: cut",
        f"cannot connect to {URL}: Connection refused",
        f"connected to {URL}, after 2 s, in attempt 2",
        f"connection lost to {URL}: cut",
        f"cannot connect to {URL}: Connection refused",
    ]


def test_message_that_cannot_be_read_is_reported_with_its_name_and_destination() -> None:
    script = Script()
    script.connect()
    session = script.session()
    consumer = script.consumer(session, "/queue/a")
    receive(session)
    script.message(consumer, 7, priority="high")
    (reported,) = script.reports[1:]
    assert reported.startswith("cannot read message truenext-here-7 of /queue/a: ValueError")


@pytest.fixture
def reported() -> Iterator[list[str]]:
    """Lines of the client's log, as `truenext` commands print them."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(FieldFormatter("%(levelname)s %(message)s").format(record))

    logger = logging.getLogger("truenext.client")
    keep, level = Keep(), logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(keep)
    logger.setLevel(level)


def test_log_with_fields_shows_no_value_twice(reported: list[str]) -> None:
    log.report("connected to %(url)s", {"url": URL, "session": "1"})
    log.report("cannot connect to %(url)s: %(error)s", {"url": URL, "error": "x", "attempts": 3})
    # A name that a log record has itself is none for a fact: logging refuses it.
    log.report("cannot read message %(message_id)s of %(destination)s: %(error)s", dict.fromkeys(_OF_MESSAGE, "y"))
    assert reported == [
        f"INFO connected to {URL} session='1'",
        f"WARNING cannot connect to {URL}: x attempts=3",
        "WARNING cannot read message y of y: y",
    ]


_OF_MESSAGE = ("message_id", "destination", "error")
