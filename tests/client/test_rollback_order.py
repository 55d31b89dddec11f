"""Test that a message which a dispatcher holds during a rollback is not handed out ahead of the others (document 004).

Interleavings of all parties, up to a depth, all of them in `make simulate`: messages that arrive, a listener that
takes, bytes that its socket takes or not, steps of the broker, and releases. After a rollback the listener gets all
messages again, in their order, none twice.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from random import Random, SystemRandom
from typing import Any

import pytest

from tests.client.machine import MODES
from tests.client.oracle import Ack, Consumer, Letter, Oracle, Sent, Session
from tests.client.simulation import Simulation
from truenext.client.core.buffer import ReceiveBuffer
from truenext.client.core.disposition import ACKED, FAILED, CountedAttempts
from truenext.client.core.session import SessionCore as CoreSession
from truenext.client.core.subscriptions import parse_consumer_options
from truenext.client.core.waiting import Wait
from truenext.errors import ClosedError, RolledBack
from truenext.model.policy import Policies, Policy

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "0"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or SystemRandom().randrange(10**9)
SHARE = 1.0 if EXAMPLES else 1 / 6
"""Share of the interleavings, drawn for each run."""
DEPTH = 5 if EXAMPLES <= 200 else 6 if EXAMPLES <= 2000 else 7
"""Number of steps: a message arrives, is taken, the socket takes bytes, the broker reads, all is released."""
NARROW = 40
"""Bytes that the client's socket takes before they are read: less than a frame."""
ALL = 1 << 30
STEPS = ["arrives", "takes", "is written", "broker", "returns"]


class Situation:
    """Listener, and another task of the same session."""

    def __init__(self, patch: pytest.MonkeyPatch, messages: int, prefetch: int, ack: Ack, how: str) -> None:
        self.simulation = Simulation(Random(1), patch, Policies(Policy(attempts_max=100, delay_ms=0)))
        self.oracle = Oracle(self.simulation, 100)
        self.ack, self.how = ack, how
        raw = self.simulation.raw()
        for number in range(1, messages + 1):
            letter = Letter(f"m{number}", "a", 4, sent=Sent.ACCEPTED)
            self.oracle.letters[letter.token] = letter
            raw.send("SEND", "destination:/queue/a", "receipt:1", body=letter.token.encode())
        self.flow: Any = None
        self.wait: Wait | None = None
        self.got: list[str] = []
        """Messages that the listener got since the last release."""
        self.peer = self.simulation.peer()
        self.peer.connect()
        self._run()
        mode = MODES[ack]
        self.session = Session("s", self.peer, CoreSession(self.peer.client, mode, ReceiveBuffer()), ack)
        self.oracle.sessions.append(self.session)
        self.consumer = self.subscribe(prefetch)
        assert self.peer.wire is not None
        self.wire = self.peer.wire
        if ack is Ack.INDIVIDUAL:
            # One of them the program has already: that is what is given back.
            self._arrives()
            self._takes()
            self._broker()
        self.wire.capacity_up = NARROW

    def subscribe(self, prefetch: int) -> Consumer:
        core = self.session.core
        flow = core.client.subscribe(parse_consumer_options("/queue/a", {"prefetch": prefetch}), core.buffer, None)
        wait = next(flow)
        subscription = core.buffer.subscriptions[-1]
        consumer = Consumer(self.session, subscription, "a", prefetch, self.oracle.incoming(self.peer, subscription.id))
        self.session.consumers.append(consumer)
        self.peer.flush()
        assert self.peer.wire is not None
        # Its messages are dispatched, and still on their way.
        self.peer.wire.deliver_up(ALL)
        self.simulation.run_broker()
        while not wait.signal.is_set:
            self.peer.deliver(self.peer.wire.down.index(b"\0") + 1)
        with pytest.raises(StopIteration):
            flow.send(True)
        return consumer

    def _run(self) -> None:
        """Deliver all bytes."""
        for _ in range(100):
            self.peer.flush_now()
            wire = self.peer.wire
            assert wire is not None
            if self.peer.can_write_on:
                self.peer.write_on()
            wire.deliver_up(ALL)
            self.simulation.run_broker()
            self.peer.deliver(ALL)
            if self.wait is not None and self.wait.signal.is_set:
                self._advance(self.wait.signal.is_set)
        self.oracle.confirm(self.peer)

    # ---- Steps: each says whether it did anything ----

    def step(self, name: str) -> bool:
        done: bool = getattr(self, "_" + name.replace(" ", "_"))()
        return done

    def _arrives(self) -> bool:
        """Deliver the next frame of the broker."""
        end = self.wire.down.find(b"\0") + 1
        if end:
            self.peer.deliver(end)
        return bool(end)

    def _takes(self) -> bool:
        """Let the listener take the next message, or resume its receive."""
        core = self.session.core
        if self.flow is not None:
            if self.wait is None or not self.wait.signal.is_set:
                return False
            self._advance(True)
            return True
        try:
            received = core.try_receive(self.consumer.subscription, "main")
        except (RolledBack, ClosedError) as error:
            self._ended(error)
            return True
        if received is not None:
            self._record_delivered([received])
            return True
        self.flow = core.receive(self.consumer.subscription, 1, None, "main")
        self._advance(None)
        return True

    def _advance(self, result: bool | None) -> None:
        try:
            self.wait = self.flow.send(result)
            while self.wait.signal.is_set:
                self.wait = self.flow.send(True)
        except StopIteration as ended:
            self.flow = self.wait = None
            self._record_delivered(ended.value)
        except (RolledBack, ClosedError) as error:
            self.flow = self.wait = None
            self._ended(error)

    def _ended(self, error: Exception) -> None:
        """End the code of the listener, whose transaction is over."""
        if isinstance(error, RolledBack):
            self.session.core.rollback("main", counted=CountedAttempts.NONE)
            self.oracle.rolls_back(self.session, "main", counts_attempts=False)

    def _record_delivered(self, received: list[Any]) -> None:
        for delivered in self.oracle.deliver(self.session, self.consumer, received, "main", 1):
            self.got.append(delivered.letter.token)

    def _is_written(self) -> bool:
        """Let the client's socket take more bytes."""
        if not self.peer.has_unwritten:
            return False
        self.wire.capacity_up = ALL
        self.peer.write_on()
        self.wire.capacity_up = NARROW
        return True

    def _broker(self) -> bool:
        if not self.wire.up:
            return False
        self.wire.deliver_up(ALL)
        self.simulation.run_broker()
        return True

    def _returns(self) -> bool:
        """Let another task release, nack, roll back or close what the listener has."""
        session, core = self.session, self.session.core
        if self.ack is Ack.AT_COMMIT and self.how == "nack":
            unit = session.unit
            if unit is None or unit.is_rollback_only:
                return False
            delivered = unit.delivered[0]
            core.settle(delivered.received, FAILED, "other")
            self.oracle.is_settled(session, delivered, "other", is_rejected=False)
        elif self.how == "rollback":
            if session.unit is None and core.transaction is None:
                return False
            if session.unit is None and core.transaction is not None:
                self.oracle.unit(session, core.transaction.owner)
            core.rollback("other", counted=CountedAttempts.NONE)
            self.oracle.rolls_back(session, "other", counts_attempts=False)
        elif self.how == "close":
            if session.is_closed:
                return False
            core.close("other")
            session.is_closed = True
            if session.unit is not None:
                self.oracle.is_rolled_back(session, session.unit)
            self.oracle.is_closed(self.consumer)
        else:
            if not session.delivered:
                return False
            delivered = session.delivered[0]
            if self.how == "nack":
                core.settle(delivered.received, FAILED)
                self.oracle.has_failed(delivered)
            else:
                core.release(delivered.received)
                self.oracle.is_released(delivered)
        self.got.clear()
        return True

    # ---- The end ----

    def everything_again(self, messages: int) -> list[str]:
        """Return the messages that a listener gets in the end, which are all, in order."""
        self.wire.capacity_up = ALL
        self._run()
        session, core = self.session, self.session.core
        for delivered in list(session.delivered):
            core.release(delivered.received)
            self.oracle.is_released(delivered)
        if session.is_closed:
            core.close("main")
            self.flow = self.wait = None
            self.session = Session("t", self.peer, CoreSession(self.peer.client, core.mode, ReceiveBuffer()), self.ack)
            self.oracle.sessions.append(self.session)
            self.consumer = self.subscribe(10)
        elif self.ack.is_transacted and (session.unit is not None or core.transaction is not None):
            if self.flow is not None:
                self.flow.close()
                self.flow = self.wait = None
            if session.unit is None and core.transaction is not None:
                self.oracle.unit(session, core.transaction.owner)
            core.rollback("main", counted=CountedAttempts.NONE)
            self.oracle.rolls_back(session, "main", counts_attempts=False)
        self.got.clear()
        while len(self.got) < messages:
            before = len(self.got)
            self._run()
            if self.flow is None:
                self._takes()
            self._run()
            if len(self.got) == before:
                break
            if self.ack is Ack.INDIVIDUAL:
                for delivered in list(self.session.delivered):
                    self.session.core.settle(delivered.received, ACKED)
                    self.oracle.is_done(delivered)
            if self.ack is Ack.AT_COMMIT:
                # What is not committed fills the window.
                self._commit()
        return self.got

    def _commit(self) -> None:
        unit = self.session.unit
        if unit is not None:
            flow = self.session.core.commit(None)
            wait = next(flow)
            self._run()
            assert wait.signal.is_set
            with pytest.raises(StopIteration):
                flow.send(True)
            self.oracle.is_committed(self.session, unit)


def interleavings(depth: int) -> Iterator[tuple[str, ...]]:
    return itertools.product(STEPS, repeat=depth)


SIZES = [(messages, prefetch) for messages in (3, 4, 5) for prefetch in (1, 2, 3, 4, 5) if prefetch <= messages]
FEW_SIZES = [(3, 1), (5, 2)]
CASES = [
    (Ack.TRANSACTED, "rollback"),
    (Ack.TRANSACTED, "close"),
    (Ack.AT_COMMIT, "rollback"),
    (Ack.AT_COMMIT, "close"),
    (Ack.AT_COMMIT, "nack"),
    (Ack.INDIVIDUAL, "nack"),
    (Ack.INDIVIDUAL, "release"),
    (Ack.INDIVIDUAL, "close"),
]


@pytest.mark.alternates("releases")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ack, how", CASES, ids=lambda each: each if isinstance(each, str) else each.value)
@pytest.mark.parametrize("messages, prefetch", SIZES if EXAMPLES > 200 else FEW_SIZES)
def test_a_message_being_handed_out_during_a_release_is_never_ahead_of_the_others(
    monkeypatch: pytest.MonkeyPatch, messages: int, prefetch: int, ack: Ack, how: str
) -> None:
    print(f"TRUENEXT_SEED={SEED}")
    try_all(monkeypatch, messages, prefetch, ack, how, DEPTH, SHARE)


def try_all(
    patch: pytest.MonkeyPatch, messages: int, prefetch: int, ack: Ack, how: str, depth: int, share: float = 1.0
) -> None:
    random = Random(SEED)
    idle: set[tuple[str, ...]] = set()
    for steps in interleavings(depth):
        if random.random() >= share:
            continue
        if any(steps[:length] in idle for length in range(1, depth)):
            # A step that did nothing: the same as without it.
            continue
        with patch.context() as here:
            situation = Situation(here, messages, prefetch, ack, how)
            for number, step in enumerate(steps, 1):
                if not situation.step(step):
                    idle.add(steps[:number])
                    break
            got = situation.everything_again(messages)
            assert got == [f"m{each}" for each in range(1, messages + 1)], steps
