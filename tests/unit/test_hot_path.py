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
from truenext.model.commands import Ack, AckMode, AckRun, Begin, Commit, Send, SendRun, Subscribe
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
    ("persistent", "in_runs", "send", "dispatch", "acknowledge"),
    [(False, False, 5, 4, 6), (True, False, 9, 4, 8), (False, True, 0, 0, 4), (True, True, 2, 0, 6)],
    ids=["transient", "persistent", "transient in runs", "persistent in runs"],
)
def test_a_message_costs_no_more_calls_than_it_did(
    persistent: bool, in_runs: bool, send: float, dispatch: float, acknowledge: float
) -> None:
    engine = started()
    session = engine.commands.connect("s")
    orders = parse_queue_name("orders")
    # A second consumer takes turns, so that none is dispatched a run.
    for name in "1" if in_runs else "12":
        engine.commands.subscribe(session, Subscribe(name, orders, AckMode.INDIVIDUAL, COUNT))
    engine.turn.run()
    messages = [SentMessage(4, persistent, 0, b"", b"body", 0) for _ in range(COUNT)]
    sends = [Send(orders, message) for message in messages]

    def send_all() -> None:
        if in_runs:
            engine.commands.send_run(session, SendRun(orders, messages))
        else:
            for one in sends:
                engine.commands.send(session, one)

    sent = calls_per_message(send_all)
    if persistent:
        commit(engine)
    dispatched = calls_per_message(engine.turn.run)
    acks = {name: [Ack(name, sequence) for sequence in one.held] for name, one in session.consumers.items()}
    assert sum(map(len, acks.values())) == COUNT, "all were dispatched"

    def acknowledge_all() -> None:
        for name, of_one in acks.items():
            if in_runs:
                engine.commands.acknowledge_run(session, AckRun(name, of_one))
            else:
                for one in of_one:
                    engine.commands.acknowledge(session, one)

    acknowledged = calls_per_message(acknowledge_all)
    # If it is less now, note that above.
    assert (sent, dispatched, acknowledged) == (send, dispatch, acknowledge)


@pytest.mark.parametrize("queues", [1, 2])
def test_commit_costs_no_more_calls_for_each_persistent_send_than_it_did(queues: int) -> None:
    engine = started()
    session = engine.commands.connect("s")
    engine.commands.begin(session, Begin("t"))
    for number in range(COUNT):
        message = SentMessage(4, True, 0, b"", b"body", 0)
        engine.commands.send(session, Send(parse_queue_name(f"q{number % queues}"), message, "t"))
    assert round(calls_per_message(lambda: engine.commands.commit(session, Commit("t")))) == 8


@pytest.mark.parametrize(("has_groups", "calls"), [(False, 5), (True, 9)])
def test_end_of_a_connection_costs_no_more_calls_for_each_held_message_than_it_did(
    has_groups: bool, calls: int
) -> None:
    engine = started()
    session = engine.commands.connect("s")
    orders = parse_queue_name("orders")
    engine.commands.subscribe(session, Subscribe("1", orders, AckMode.INDIVIDUAL, COUNT))
    for number in range(COUNT):
        group = f"g{number}" if has_groups else ""
        engine.commands.send(session, Send(orders, SentMessage(4, False, 0, b"", b"body", 0, group=group)))
    while engine.has_work:
        engine.turn.run()
    assert len(session.consumers["1"].held) == COUNT
    # No time is left in this pass to find the places of requeued messages in their groups.
    for _ in range(2):
        engine.queues.selections._arrival_budget.spend(10**9)
    assert round(calls_per_message(lambda: engine.commands.disconnect(session, is_exempt=False))) == calls
