"""Test that both ways to assign an entry to a consumer count the same: `Dispatcher.dispatch_entry`, and its lines that
are inlined in `Dispatcher._dispatch_lane` for speed.

Two engines get the same random history. In one, a consumer of the queue has a selector that matches nothing: so each
entry is dispatched by itself.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.unit.test_engine import started
from truenext.engine.dispatch.plain import Deliveries
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.window import AutoWindow
from truenext.model.commands import Ack, AckMode, Nack, Send, Subscribe
from truenext.model.destination import parse_queue_name
from truenext.model.message import SentMessage
from truenext.model.selector import compile_selector

QUEUE = parse_queue_name("orders")
UNSENT_THRESHOLD = 3000
"""Bytes that some steps leave unsent, so that connections then get one message at a time."""
STEPS = 300


class History:
    """Engine with consumers of all kinds, and what its dispatch has done."""

    def __init__(self, seed: int, *, has_selector: bool) -> None:
        self._random = Random(seed)
        self.now_ms = 1_000_000
        self.engine = started()
        self.engine.state.memory.unsent_threshold = UNSENT_THRESHOLD
        self.tick(0)
        self.sender = self.engine.commands.connect("sender")
        self.sessions = [self.engine.commands.connect(name) for name in ("a", "b")]
        for session in self.sessions:
            for number, window in enumerate((None, 3, 20)):
                self.engine.commands.subscribe(session, Subscribe(str(number), QUEUE, AckMode.INDIVIDUAL, window))
        if has_selector:
            selecting = Subscribe("0", QUEUE, AckMode.INDIVIDUAL, selector=compile_selector("colour = 'red'"))
            self.engine.commands.subscribe(self.engine.commands.connect("selecting"), selecting)
        self.log: list[object] = []

    @property
    def consumers(self) -> list[BrokerConsumer]:
        return [consumer for session in self.sessions for consumer in session.consumers.values()]

    def tick(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        self.engine.state.commit_state.tick(self.now_ms * 1000, self.now_ms * 1000)

    def step(self) -> None:
        random = self._random
        holders = [consumer for consumer in self.consumers if consumer.held]
        action = random.choice(("send", "send", "ack", "ack", "nack", "taken", "wait"))
        if action == "send":
            for _ in range(random.randrange(8)):
                self.send()
        elif action == "wait":
            self.tick(random.randrange(100))
        elif action == "taken":
            self.engine.commands.on_all_sent(random.choice(self.sessions))
        elif holders:
            consumer = random.choice(holders)
            sequence = random.choice(list(consumer.held))
            if action == "ack":
                self.engine.commands.acknowledge(consumer.session, Ack(consumer.subscription, sequence))
            else:
                self.engine.commands.nack(
                    consumer.session, Nack(consumer.subscription, sequence, delay_ms=0, cause="c" * 9)
                )
        if random.random() < 0.5 and (batch := self.engine.take_batch()) is not None:
            self.engine.store_results.on_committed(batch)
        self.note(self.engine.turn.run().deliveries)

    def send(self) -> None:
        random = self._random
        body = b"x" * random.randrange(300)
        expires_ms = self.now_ms + random.randrange(1, 300) if random.random() < 0.2 else 0
        header = b"content-length:%d\n" % len(body)
        message = SentMessage(random.randrange(10), random.random() < 0.5, expires_ms, header, body)
        self.engine.commands.send(self.sender, Send(QUEUE, message))

    def note(self, deliveries: Deliveries) -> None:
        """Add to the log all that dispatch has written."""
        memory = self.engine.state.memory
        self.log.append(
            (
                [
                    (consumer.number, [(entry.sequence, entry.deliveries) for entry in entries])
                    for consumer, entries in deliveries.items()
                ],
                [
                    (list(each.held), each.window, each.last_dispatch_number, fields_of(each.auto_window))
                    for each in self.consumers
                ],
                [session.unsent_bytes for session in self.sessions],
                (memory.unsent_bytes, memory.unsent_bytes_max, self.engine.state.clients.dispatch_count),
            )
        )


def fields_of(window: AutoWindow | None) -> list[Any]:
    return [] if window is None else [getattr(window, name) for name in AutoWindow.__slots__]


@pytest.mark.parametrize("seed", range(10))
def test_entries_dispatched_by_lanes_count_as_those_dispatched_one_by_one(seed: int) -> None:
    by_lanes, one_by_one = History(seed, has_selector=False), History(seed, has_selector=True)
    for _ in range(STEPS):
        by_lanes.step()
        one_by_one.step()
        assert by_lanes.log[-1] == one_by_one.log[-1]
    # Otherwise the two were never compared.
    assert by_lanes.engine.state.clients.dispatch_count > STEPS / 3
