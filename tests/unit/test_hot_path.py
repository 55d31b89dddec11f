"""Tests of the number of Python functions called for one message, from its SEND to its ACK.

A call costs 50 to 100 ns, and a broker handles a hundred thousand messages a second: no timed test shows an additional
call, but every benchmark does. The counts are of the engine alone, without history, selectors and groups.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.unit.test_engine import commit, started
from truenext.model.commands import Ack, AckMode, Send, Subscribe
from truenext.model.destination import parse_queue_name
from truenext.model.message import SentMessage

COUNT = 1000


def calls_per_message(work: Callable[[], object]) -> float:
    calls = 0

    def note(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    # Of `work` itself, and of what a turn does once.
    return round((calls - 1) / COUNT, 1)


@pytest.mark.parametrize(
    ("persistent", "send", "dispatch", "acknowledge"),
    [(False, 5, 3, 6), (True, 9, 3, 8)],
    ids=["transient", "persistent"],
)
def test_a_message_costs_no_more_calls_than_it_did(
    persistent: bool, send: float, dispatch: float, acknowledge: float
) -> None:
    engine = started()
    session = engine.commands.connect("s")
    orders = parse_queue_name("orders")
    engine.commands.subscribe(session, Subscribe("1", orders, AckMode.INDIVIDUAL, COUNT))
    engine.turn.run()
    sends = [Send(orders, SentMessage(4, persistent, 0, b"", b"body", 0)) for _ in range(COUNT)]

    def send_all() -> None:
        for one in sends:
            engine.commands.send(session, one)

    sent = calls_per_message(send_all)
    if persistent:
        commit(engine)
    dispatched = calls_per_message(engine.turn.run)
    acks = [Ack("1", sequence) for sequence in session.consumers["1"].held]
    assert len(acks) == COUNT, "all were dispatched"

    def acknowledge_all() -> None:
        for one in acks:
            engine.commands.acknowledge(session, one)

    acknowledged = calls_per_message(acknowledge_all)
    # If it is less now, note that above.
    assert (sent, dispatched, acknowledged) == (send, dispatch, acknowledge)
