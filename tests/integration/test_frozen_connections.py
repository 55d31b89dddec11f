"""Test that nothing is lost, doubled or done late when connections freeze at any byte, are taken over, and thaw later.

A client sends, acknowledges, commits, releases and pulls through a network that freezes at a random byte. It takes its
connection over, sometimes several times as CONNECT or CONNECTED freeze as well, repeats unconfirmed frames, and goes
on. Sooner or later the old connection thaws. All frames that come are compared with the possible contents of the broker
(possible_states.py). Source of what is expected: docs/contract.md, docs/protocol.md.

    TRUENEXT_FREEZES=1000 TRUENEXT_SEED=7 pytest -s tests/integration/test_frozen_connections.py
"""

import contextlib
import functools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.freezing_proxy import ENDLESS, FreezingProxy, Link
from tests.integration.possible_states import (
    Abort,
    Acknowledge,
    Begin,
    Commit,
    Life,
    NackAfterAll,
    NoOp,
    Operation,
    PossibleState,
    Release,
    Seen,
    Send,
    Started,
)
from tests.integration.raw_client import RECEIVE_SECONDS, TRUENEXT_CLIENT, RawClient, numbered
from truenext.wire.stomp.frame import Frame

FREEZES = int(os.environ.get("TRUENEXT_FREEZES", "40"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

PATIENCE = 0.01
"""Seconds that the client waits for a frozen network."""


@dataclass
class Letter:
    priority: int
    persistent: bool
    written: int
    """Time of its SEND, or of the COMMIT of its transaction, on the test's clock of events."""
    confirmed: int | None = None
    number: int | None = None
    sequence: int | None = None
    sightings: int = 0

    @property
    def key(self) -> tuple[int, int]:
        assert self.sequence is not None
        return 9 - self.priority, self.sequence


@dataclass
class OrderCheck:
    """First messages that a subscription got while no other client acted."""

    subscription: str
    states: list[tuple[PossibleState, frozenset[str]]]
    """Possible states, with the letters that waited in each."""
    got: list[str] = field(default_factory=list)


class Case:
    """Client with all its connections, and the possible states of the broker after its actions."""

    def __init__(self, seed: str, queue: str, proxy: FreezingProxy, other: "Other") -> None:
        self.chance = random.Random(seed)
        self.queue = queue
        self.out = f"{queue}.out"
        self.proxy = proxy
        self.other = other
        self.producer = f"producer of {queue}"
        self.gapless = self.chance.random() < 0.5
        self.letters: dict[str, Letter] = {}
        self.states = [PossibleState()]
        self.now = 0
        self.sent_to_other: set[str] = set()
        """Letters for the other queue."""
        self.sends = 0
        self.commits = 0
        self.to_repeat: list[Send] = []
        self.in_doubt: list[Commit] = []
        self.connections = 0
        self.secret = ""
        self.checks: list[OrderCheck] = []
        self.abandoned: list[tuple[RawClient, Link]] = []
        self.connection: Connection | None = None

    # ---- The whole story ----

    def run(self) -> None:
        chance = self.chance
        for _ in range(chance.randrange(3)):
            self.send_from_outside()
        for _ in range(chance.randrange(2, 6)):
            connection = self.connect(freezes=True)
            if connection.resume():
                for _ in range(chance.randrange(1, 25)):
                    connection.do_something()
                    if chance.random() < 0.03:
                        connection.link.freeze()
                    if connection.seems_frozen() and chance.random() < 0.3:
                        break
            if chance.random() < 0.3:
                self.unfreeze_one()
        connection = self.connect(freezes=False)
        assert connection.resume()
        for _ in range(5):
            connection.do_something()
        connection.send_last()
        self.unfreeze_all()
        self.check_remaining()
        self.check_order()

    def send_from_outside(self) -> None:
        letter = self.write("o", number=None)
        self.other.send(self, letter)
        self.letters[letter].confirmed = self.tick()
        for state in self.states:
            state.waiting[letter] = (0, False)

    def tick(self) -> int:
        self.now += 1
        return self.now

    def write(self, kind: str, number: int | None) -> str:
        chance = self.chance
        name = f"{kind}{len(self.letters)}"
        self.letters[name] = Letter(
            chance.choice([0, 4, 4, 4, 9]), chance.random() < 0.6, written=self.tick(), number=number
        )
        return name

    def body_of(self, letter: str) -> bytes:
        return f"{letter} ".encode() + b"x" * self.chance.choice([0, 10, 100, 2000])

    # ---- Connections ----

    def connect(self, *, freezes: bool) -> "Connection":
        chance = self.chance
        old, self.connection = self.connection, None
        exempt = {True}
        was_closed = False
        if old is not None and freezes and chance.random() < 0.15:
            # The client has noticed, and hangs up; the broker may hear of it or not.
            old.raw.close()
            was_closed = True
            exempt.add(False)
        for attempt in range(4):
            up, down = self.freezing() if freezes and attempt < 3 else (ENDLESS, ENDLESS)
            self.proxy.expect(up, down)
            raw = RawClient(self.proxy.port)
            link = self.proxy.newest()
            self.connections += chance.randrange(1, 4)
            headers = {"truenext-client": str(self.connections)}
            if self.secret:
                headers["truenext-secret"] = self.secret
            fields = {"accept-version": "1.2", "host": "test", "heart-beat": "0,0"}
            raw.send_frame("CONNECT", fields | headers)
            if chance.random() < 0.1:
                self.unfreeze_one()
            if self.is_greeted(raw, link):
                break
            if self.secret:
                # What it says may arrive yet, and be late then.
                self.abandoned.append((raw, link))
            else:
                raw.close()
        else:
            raise AssertionError("a network that does not freeze is frozen")
        connected = raw.connected.headers
        if self.secret:
            assert connected["truenext-secret"] == self.secret
            if not was_closed:
                assert connected["truenext-taken-over"] == "true"
        self.secret = connected["truenext-secret"]
        if old is not None:
            old.is_over(exempt)
            old.speak_too_late()
            self.abandoned.append((old.raw, old.link))
            if chance.random() < 0.3:
                old.link.unfreeze()
        self.connection = Connection(self, raw, link)
        return self.connection

    def freezing(self) -> tuple[int, int]:
        """Return the numbers of bytes that pass in each direction before it freezes."""
        chance = self.chance

        def some() -> int:
            return chance.randrange(300) if chance.random() < 0.2 else chance.randrange(300, 8000)

        kind = chance.randrange(4)
        return (some() if kind in (1, 3) else ENDLESS, some() if kind in (2, 3) else ENDLESS)

    def is_greeted(self, raw: RawClient, link: Link) -> bool:
        until = time.monotonic() + RECEIVE_SECONDS
        quiet_since: float | None = None
        while time.monotonic() < until:
            try:
                raw.await_connected(0.002)
                return True
            except TimeoutError:
                if not link.is_frozen:
                    quiet_since = None
                elif quiet_since is None:
                    quiet_since = time.monotonic()
                elif time.monotonic() - quiet_since > PATIENCE:
                    return False
        raise AssertionError("no CONNECTED came")

    def unfreeze_one(self) -> None:
        if self.abandoned:
            self.chance.choice(self.abandoned)[1].unfreeze()

    def unfreeze_all(self) -> None:
        for raw, link in self.abandoned:
            link.unfreeze()
            # All of them were taken over or came late, so the broker ends them.
            try:
                raw.await_silent_end()
            except TimeoutError:
                raise
            except OSError:
                raw.close()
        self.proxy.close_links()

    # ---- Worlds ----

    def rule_out(self, is_possible: Callable[[PossibleState], bool], what: str) -> None:
        remaining = [state for state in self.states if is_possible(state)]
        assert remaining, f"{what} is not possible in any of {self.states}"
        self.states = remaining

    def merge(self) -> None:
        self.states = list({state.identity(): state for state in self.states}.values())

    def note(self, frame: Frame) -> str:
        """Check the parts of a message that do not depend on the possible states, and return its letter."""
        name = frame.body.split(b" ", 1)[0].decode()
        letter = self.letters[name]
        sequence = int(frame.headers["truenext-sequence"])
        assert letter.sequence in (None, sequence), f"{name} came as two messages"
        letter.sequence = sequence
        letter.sightings += 1
        deliveries = int(frame.headers["truenext-deliveries"])
        assert deliveries >= letter.sightings
        # C10.14: a message that was released before it was started is dispatched again without this header.
        assert frame.headers.get("redelivered") is None or deliveries > 1
        assert frame.headers.get("priority", "4") == str(letter.priority)
        return name

    # ---- The end ----

    def check_remaining(self) -> None:
        remaining: dict[str, tuple[int, bool]] = {}
        for frame in self.other.drain(self.queue):
            name = self.note(frame)
            attempts, lost = int(frame.headers["truenext-attempts"]), "truenext-lost" in frame.headers
            remaining[name] = attempts, lost
            self.rule_out(
                functools.partial(PossibleState.expects, letter=name, attempts=attempts, lost=lost),
                f"{name} with {attempts} attempts, lost {lost}, at the end",
            )
        self.rule_out(lambda state: state.waiting.keys() == remaining.keys(), f"that {sorted(remaining)} is left")
        out = [self.note(frame) for frame in self.other.drain(self.out)]
        assert len(set(out)) == len(out)
        self.rule_out(lambda state: state.out == set(out), f"that {sorted(out)} has gone out")
        for drained in (list(remaining), out):
            keys = [self.letters[name].key for name in drained]
            assert keys == sorted(keys)

    def check_order(self) -> None:
        known = [letter for letter in self.letters.values() if letter.sequence is not None]
        for before in known:
            for after in known:
                if before.confirmed is not None and before.confirmed < after.written:
                    assert before.sequence < after.sequence, (before, after)  # type: ignore[operator]
        in_order = sorted((letter.number, letter.sequence) for letter in known if letter.number is not None)
        assert [sequence for _, sequence in in_order] == sorted(sequence for _, sequence in in_order)  # type: ignore[type-var]
        for check in self.checks:
            assert not check.states or any(self.agrees(check.got, waiting) for _, waiting in check.states), check

    def agrees(self, got: list[str], waiting: frozenset[str]) -> bool:
        letters = {name: self.letters[name] for name in waiting}
        if any(letter.sequence is None for letter in letters.values()):
            # It was never there; this world was not ruled out by anything else.
            return True
        return got == sorted(waiting, key=lambda name: letters[name].key)[: len(got)]


class Connection:
    """Connection of the client."""

    def __init__(self, case: Case, raw: RawClient, link: Link) -> None:
        self.case = case
        self.chance = case.chance
        self.raw = raw
        self.link = link
        self.frames = 1
        self.operations: list[Operation] = []
        self.carried_out = 0
        """Smallest number of operations that the broker has carried out."""
        self.receipts: dict[str, tuple[int, Callable[[bool], None] | None]] = {}
        self.refusals: dict[int, Callable[[], None]] = {}
        """Handlers of possible refusals, by the number of the refused frame."""
        self.seen: list[Seen] = []
        self.available: list[Seen] = []
        """Dispatches that the client holds, as far as it knows."""
        self.subscriptions: dict[str, str] = {}
        """Acknowledgement modes by subscription."""
        self.pulls = False
        self.round = 0
        self.rounds: dict[str, int] = {}
        """Last round of each subscription."""
        self.transactions: dict[str, list[str]] = {}
        """Dispatches that were acknowledged or nacked in each transaction."""
        self.uncommitted: dict[str, list[str]] = {}
        """Letters that were sent in each transaction."""
        self.counting_nacks: set[str] = set()
        """Transactions that count their NACKs alone."""
        self.names = 0
        self.sent: dict[str, tuple[int, int | None]] = {}
        """Letters that were sent on this connection, with operation and number."""
        self.failures: dict[str, int] = {}
        """Attempts that were added on this connection, by letter."""
        self.requeued: dict[str, int] = {}
        """Number of operations when a letter was requeued last."""
        self.check: OrderCheck | None = None
        self.quiet_since: float | None = None

    # ---- Frames out ----

    def send_frame(
        self,
        operation: Operation,
        command: str,
        headers: dict[str, str],
        body: bytes = b"",
        *,
        receipt: bool | None = None,
        then: Callable[[bool], None] | None = None,
    ) -> None:
        self.frames += 1
        self.operations.append(operation)
        if receipt or (receipt is None and self.chance.random() < 0.5):
            name = self.raw.new_receipt()
            headers = headers | {"receipt": name}
            self.receipts[name] = (len(self.operations), then)
        with contextlib.suppress(OSError):
            self.raw.send_frame(command, headers, body)

    def numbered(self, number: int) -> dict[str, str]:
        return numbered(self.case.producer, number) | ({"truenext-gapless": "true"} if self.case.gapless else {})

    def send_message(
        self, send: Send, *, receipt: bool | None = None, then: Callable[[bool], None] | None = None
    ) -> None:
        case = self.case
        letter = case.letters[send.letter]
        headers = {
            "destination": f"/queue/{case.out if send.to_other else case.queue}",
            "priority": str(letter.priority),
        }
        if letter.persistent:
            headers["persistent"] = "true"
        if send.number is not None:
            headers |= self.numbered(send.number)
        if send.transaction is not None:
            headers["transaction"] = send.transaction
        self.send_frame(send, "SEND", headers, case.body_of(send.letter), receipt=receipt, then=then)

    # ---- Frames in ----

    def listen(self, seconds: float = 0.0005) -> None:
        until = time.monotonic() + seconds
        while True:
            try:
                frame = self.raw.next_frame(max(until - time.monotonic(), 0.0001))
            except TimeoutError:
                return
            self.quiet_since = None
            self.handle(frame)

    def seems_frozen(self) -> bool:
        """Return whether the network is frozen and no frame has come for a while."""
        if not self.link.is_frozen:
            self.quiet_since = None
            return False
        if self.quiet_since is None:
            self.quiet_since = time.monotonic()
        return time.monotonic() - self.quiet_since > PATIENCE

    def await_receipts(self) -> bool:
        until = time.monotonic() + RECEIVE_SECONDS
        while self.receipts or self.refusals:
            self.listen(0.002)
            if self.seems_frozen():
                return False
            assert time.monotonic() < until, f"no answer to {self.receipts} {self.refusals}"
        return True

    def handle(self, frame: Frame) -> None:
        if frame.command == "RECEIPT":
            name = frame.headers["receipt-id"]
            assert name == next(iter(self.receipts)), f"{name} is not the next receipt of {list(self.receipts)}"
            count, then = self.receipts.pop(name)
            self.at_least(count)
            if then is not None:
                then(frame.headers.get("truenext-repeat") == "true")
        elif frame.command == "ERROR":
            frame_number = int(frame.headers.get("truenext-frame", "0"))
            assert frame_number in self.refusals, f"{frame} {frame.body!r} at {frame_number} of {self.frames}"
            self.receipts.pop(next(iter(self.receipts)))
            self.refusals.pop(frame_number)()
        else:
            assert frame.command == "MESSAGE"
            if "truenext-unused" not in frame.headers:
                self.handle_message(frame)

    def at_least(self, count: int) -> None:
        if count > self.carried_out:
            for operation in self.operations[self.carried_out : count]:
                self.confirm(operation)
            self.carried_out = count

    def confirm(self, operation: Operation) -> None:
        case = self.case
        if isinstance(operation, Send) and operation.transaction is None:
            case.letters[operation.letter].confirmed = case.tick()
            if operation in case.to_repeat:
                case.to_repeat.remove(operation)
        elif isinstance(operation, Commit):
            for letter in self.uncommitted[operation.transaction]:
                case.letters[letter].confirmed = case.tick()
            if operation in case.in_doubt:
                case.in_doubt.remove(operation)

    def handle_message(self, frame: Frame) -> None:
        case, headers = self.case, frame.headers
        name = case.note(frame)
        seen = Seen(headers["ack"], name, headers["subscription"], int(headers["truenext-round"]))
        if seen.round:
            releases = [n + 1 for n, each in enumerate(self.operations) if isinstance(each, Release)]
            self.at_least(releases[seen.round - 1])
        if name in self.requeued:
            self.at_least(self.requeued[name])
        attempts = int(headers["truenext-attempts"])
        lost = "truenext-lost" in headers
        others = self.failures.get(name, 0)
        frame_number, number = self.sent.get(name, (0, None))
        if frame_number and number is None:
            self.at_least(frame_number)

        def is_possible(state: PossibleState) -> bool:
            if frame_number and name not in state.waiting:
                return attempts == others and not lost and (number is None or number > state.sends)
            return state.expects(name, attempts, lost=lost, others=others)

        case.rule_out(is_possible, f"{name} with {attempts} attempts, {others} of them of this connection, lost {lost}")
        self.seen.append(seen)
        # What was dispatched before the last release was on its way when that was said: it has gone back since.
        if seen.round >= self.rounds.get(seen.subscription, 0):
            self.available.append(seen)
            if self.check is not None and self.check.subscription == seen.subscription:
                self.check.got.append(name)

    # ---- Looks ----

    def start_check(self, subscription: str, missing: set[str]) -> None:
        """Start to check the order of a subscription, which gets the true next of all letters but `missing`."""
        states = []
        for state in self.case.states:
            repeated = {letter for letter, (_, number) in self.sent.items() if number is None or number > state.sends}
            states.append((state, frozenset((state.waiting.keys() | repeated - self.case.sent_to_other) - missing)))
        self.check = OrderCheck(subscription, states)

    def end_check(self) -> None:
        if self.check is not None:
            remaining = {id(state) for state in self.case.states}
            self.check.states = [pair for pair in self.check.states if id(pair[0]) in remaining]
            self.case.checks.append(self.check)
            self.check = None

    # ---- The beginning ----

    def resume(self) -> bool:
        """Repeat unconfirmed frames, and subscribe again. Return False if the network is frozen."""
        case = self.case
        resolves = self.chance.random() < 0.5
        for send in list(case.to_repeat):
            self.repeat(send)
        for commit in list(case.in_doubt):
            if resolves:
                self.settle(commit)
                continue
            self.repeat_commit(commit)
            if not self.await_receipts():
                return False
        case.in_doubt.clear()
        case.commits = max((state.commits for state in case.states), default=0)
        if not self.await_receipts():
            return False
        assert len({(state.sends, state.commits) for state in case.states}) == 1
        case.other.flush()
        case.merge()
        return self.subscribe()

    def repeat(self, send: Send) -> None:
        assert send.number is not None
        number = send.number

        def answered(is_repeat: bool) -> None:
            self.case.rule_out(
                lambda state: is_repeat == (number <= state.sends), f"that SEND {number} is a repeat: {is_repeat}"
            )

        self.send_message(send, receipt=True, then=answered)
        self.sent[send.letter] = (len(self.operations), number)

    def repeat_commit(self, commit: Commit) -> None:
        number = commit.number
        assert number is not None
        case = self.case

        def answered(is_repeat: bool) -> None:
            assert is_repeat
            self.refusals.clear()
            case.rule_out(lambda state: number <= state.commits, f"that COMMIT {number} was carried out")

        def refused() -> None:
            case.rule_out(lambda state: number > state.commits, f"that COMMIT {number} was not carried out")

        self.refusals[self.frames + 1] = refused
        self.send_frame(
            NoOp(), "COMMIT", {"transaction": "nothing"} | self.numbered(number), receipt=True, then=answered
        )

    def settle(self, commit: Commit) -> None:
        """Resolve a COMMIT in doubt."""
        case, number = self.case, commit.number
        assert number is not None
        answer = case.other.control_request({"producer": case.producer, "commit": number, "resolve": True})
        outcome = answer["outcome"]
        what = f"that COMMIT {number} is {outcome}, and {answer['commits']} the highest"
        if outcome == "unknown":
            assert not case.gapless
            case.rule_out(lambda state: number < state.commits, what)
        elif outcome == "committed":
            case.rule_out(lambda state: number <= state.commits, what)
        else:
            assert outcome == "rolled back", answer
            case.rule_out(lambda state: number > state.commits, what)
            for state in case.states:
                state.commits = number
        case.rule_out(lambda state: state.commits == answer["commits"], what)

    def subscribe(self) -> bool:
        case, chance = self.case, self.chance
        self.pulls = chance.random() < 0.3
        count = 1 if chance.random() < 0.7 else 2
        for number in range(count):
            name = f"s{number}"
            mode = chance.choice(["client", "client-individual"])
            headers = {"id": name, "destination": f"/queue/{case.queue}", "ack": mode}
            if self.pulls:
                headers["truenext-pull"] = "true"
            else:
                headers["activemq.prefetchSize"] = str(chance.choice([1, 2, 3, 10, 1000]))
            if count == 1:
                self.start_check(name, set())
            self.send_frame(NoOp(), "SUBSCRIBE", headers)
            self.subscriptions[name] = mode
        return True

    # ---- What it does ----

    def do_something(self) -> None:
        chance, case = self.chance, self.case
        self.listen(chance.choice([0.0, 0.001, 0.003]))
        if chance.random() < 0.3:
            return
        choices: list[Callable[[], None]] = [self.send, self.send, self.send_outside, self.release]
        choices += [self.begin] if len(self.transactions) < 3 else []
        choices += [self.send_in, self.send_in, self.end, self.end] if self.transactions else []
        if self.available:
            choices += [self.acknowledge] * 4
            choices += [self.started] * 3
        choices += [self.change_mind] if any(self.transactions.values()) else []
        choices += [self.pull] * 4 if self.pulls else []
        choices += [self.wake]
        chosen = chance.choice(choices)
        if chosen != self.pull and chosen != self.started:
            self.end_check()
        chosen()
        assert len(case.states) < 5000

    def send(self) -> None:
        case, chance = self.case, self.chance
        number = None
        if chance.random() < 0.7:
            number = case.sends = case.sends + 1
        letter = case.write("n" if number else "u", number)
        send = Send(letter, number, to_other=self.to_other(letter, 0.2))
        if number is not None:
            case.to_repeat.append(send)
        self.send_message(send)
        self.sent[letter] = (len(self.operations), None)

    def to_other(self, letter: str, share: float) -> bool:
        to_other = self.chance.random() < share
        if to_other:
            self.case.sent_to_other.add(letter)
        return to_other

    def send_outside(self) -> None:
        self.case.send_from_outside()

    def begin(self) -> None:
        self.names += 1
        name = f"t{self.names}"
        self.transactions[name] = []
        self.uncommitted[name] = []
        headers = {"transaction": name}
        if self.chance.random() < 0.3:
            self.counting_nacks.add(name)
            headers["truenext-count-attempts"] = "nacked"
        self.send_frame(Begin(name, counts_all=name not in self.counting_nacks), "BEGIN", headers)

    def any_transaction(self) -> str:
        return self.chance.choice(list(self.transactions))

    def send_in(self) -> None:
        name = self.any_transaction()
        letter = self.case.write("t", None)
        self.uncommitted[name].append(letter)
        self.send_message(Send(letter, to_other=self.to_other(letter, 0.6), transaction=name))

    def acknowledge(self) -> None:
        chance = self.chance
        seen = chance.choice(self.available)
        covered = [seen]
        if self.subscriptions[seen.subscription] == "client":
            of_it = [each for each in self.available if each.subscription == seen.subscription]
            covered = of_it[: of_it.index(seen) + 1]
        self.available = [each for each in self.available if each not in covered]
        name = self.any_transaction() if self.transactions and chance.random() < 0.6 else None
        is_nack = chance.random() < 0.2
        headers = {"id": seen.ack} | ({} if name is None else {"transaction": name})
        started = None
        if name is None and not is_nack and self.available and chance.random() < 0.6:
            started = headers["truenext-started"] = chance.choice(self.available).ack
        acks = [each.ack for each in covered]
        self.send_frame(Acknowledge(acks, is_nack, name, started), "NACK" if is_nack else "ACK", headers)
        if name is not None:
            self.transactions[name] += [("-" if is_nack else "+") + each.ack for each in covered]
        elif is_nack:
            self.fails(covered)

    def change_mind(self) -> None:
        """NACK a message that its transaction has acknowledged. In `client` mode the NACK would cover others."""
        name = self.any_transaction()
        acks = [
            ack[1:]
            for ack in self.transactions[name]
            if ack[0] == "+" and self.subscriptions[self.of(ack[1:]).subscription] == "client-individual"
        ]
        if not acks:
            return
        ack = self.chance.choice(acks)
        known = self.transactions[name]
        known[known.index(f"+{ack}")] = f"-{ack}"
        self.send_frame(NackAfterAll(self.of(ack).letter, name), "NACK", {"id": ack, "transaction": name})

    def of(self, ack: str) -> Seen:
        return next(seen for seen in self.seen if seen.ack == ack)

    def fails(self, covered: list[Seen]) -> None:
        for each in covered:
            self.failures[each.letter] = self.failures.get(each.letter, 0) + 1
            self.requeued[each.letter] = len(self.operations)

    def end(self) -> None:
        case, chance = self.case, self.chance
        name = self.any_transaction()
        if chance.random() < 0.25:
            counted = chance.choice(["all", "nacked"])
            self.send_frame(Abort(name, counted), "ABORT", {"transaction": name, "truenext-count-attempts": counted})
            self.forget(name, counted)
            return
        headers = {"transaction": name}
        number = None
        if chance.random() < 0.7:
            number = case.commits = case.commits + 1
            headers |= self.numbered(number)
        commit = Commit(name, number)
        if number is not None:
            case.in_doubt.append(commit)
        written = case.tick()
        self.send_frame(commit, "COMMIT", headers)
        for letter in self.uncommitted[name]:
            case.letters[letter].written = written
            self.sent[letter] = (len(self.operations), None)
        self.fails([self.of(ack[1:]) for ack in self.transactions.pop(name) if ack[0] == "-"])

    def forget(self, name: str, counted: str) -> None:
        """Record that a transaction was aborted."""
        for ack in self.transactions.pop(name):
            seen = self.of(ack[1:])
            if (counted == "all" and name not in self.counting_nacks) or ack[0] == "-":
                self.fails([seen])
            self.requeued[seen.letter] = len(self.operations)

    def started(self) -> None:
        seen = self.chance.choice(self.available)
        self.send_frame(Started(seen.ack), "SEND", {"destination": "/control/started", "id": seen.ack})

    def pull(self) -> None:
        chance = self.chance
        headers = {"destination": "/control/credit", "id": chance.choice(list(self.subscriptions))}
        headers |= {"messages": str(chance.choice([0, 1, 1, 2, 5])), "wait": chance.choice(["true", "false"])}
        self.send_frame(NoOp(), "SEND", headers)

    def wake(self) -> None:
        self.send_frame(
            NoOp(), "SEND", {"destination": "/control/wake", "id": self.chance.choice(list(self.subscriptions))}
        )

    def release(self) -> None:
        chance = self.chance
        names = [name for name in self.subscriptions if chance.random() < 0.8]
        keep = [seen.ack for seen in self.available if seen.subscription in names and chance.random() < 0.2]
        request: dict[str, Any] = {"subscriptions": names, "keep": keep, "suspend": chance.random() < 0.2}
        abort = self.any_transaction() if self.transactions and chance.random() < 0.6 else None
        counted = chance.choice(["all", "nacked"])
        if abort is not None:
            request |= {"abort": abort, "count_attempts": counted}
        is_settled = self.carried_out == len(self.operations)
        self.round += 1
        self.send_frame(
            Release(self.round, names, keep, abort, counted),
            "SEND",
            {"destination": "/control/release"},
            json.dumps(request).encode(),
        )
        self.rounds |= dict.fromkeys(names, self.round)
        self.available = [each for each in self.available if each.subscription not in names or each.ack in keep]
        if abort is not None:
            self.forget(abort, counted)
        if is_settled and len(self.subscriptions) == 1 and names and not self.operations_that_send():
            missing = {self.of(ack).letter for ack in keep}
            missing |= {self.of(ack[1:]).letter for acks in self.transactions.values() for ack in acks}
            self.check_after_release(missing)

    def operations_that_send(self) -> bool:
        """Return whether operations may have added letters since the connection began."""
        return any(isinstance(each, (Send, Acknowledge, Commit)) for each in self.operations)

    def check_after_release(self, missing: set[str]) -> None:
        self.start_check(next(iter(self.subscriptions)), missing)

    # ---- The end ----

    def send_last(self) -> None:
        assert self.await_receipts()
        self.send_frame(NoOp(), "BEGIN", {"transaction": "last"}, receipt=True)
        assert self.await_receipts()
        # DISCONNECT charges nobody.
        self.is_over({True})
        with contextlib.suppress(OSError):
            self.raw.disconnect()
        self.case.connection = None

    def is_over(self, exempt: set[bool]) -> None:
        """Compute the possible states after the loss of the connection: the broker has carried out a first part of the
        operations."""
        self.end_check()
        states: dict[object, PossibleState] = {}
        for state in self.case.states:
            for count in range(self.carried_out, len(self.operations) + 1):
                for is_exempt in exempt:
                    life = Life(state.copy(), self.seen)
                    for operation in self.operations[:count]:
                        operation.do(life)
                    after = life.lose(is_exempt=is_exempt)
                    states[after.identity()] = after
        self.case.states = list(states.values())

    def speak_too_late(self) -> None:
        """Send frames that the broker must not carry out."""
        case, chance, raw = self.case, self.chance, self.raw
        destination = f"/queue/{case.queue}"
        with contextlib.suppress(OSError):
            for seen in self.available:
                raw.send_frame(chance.choice(["ACK", "NACK"]), {"id": seen.ack})
            for name in self.transactions:
                raw.send_frame("COMMIT", {"transaction": name} | self.numbered(case.commits + 1))
            raw.send_frame("SEND", {"destination": destination, "persistent": "true", "priority": "9"}, b"late ")
            raw.send_frame("SEND", {"destination": destination} | self.numbered(case.sends + 1), b"late ")
            raw.send_frame("SUBSCRIBE", {"id": "late", "destination": destination, "activemq.exclusive": "true"})
            if chance.random() < 0.3:
                raw.send_frame("DISCONNECT", {})


class Other:
    """Client that never freezes, for all cases: it sends from outside, asks, and takes the remaining messages."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.client = broker.connect(headers=TRUENEXT_CLIENT)
        self.client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"}, confirmed=True)

    def send(self, case: Case, name: str) -> None:
        letter = case.letters[name]
        self.client.send(
            case.queue, case.body_of(name), persistent=letter.persistent, priority=letter.priority, confirmed=True
        )

    def flush(self) -> None:
        """Wait until all earlier sends of all clients are durable and visible."""
        self.client.send("barrier", b"", persistent=True, confirmed=True, headers={"truenext-ttl": "1"})

    def control_request(self, arguments: dict[str, Any]) -> dict[str, Any]:
        headers = {"destination": "/control/producer", "reply-to": "/temp-queue/answers"}
        self.client.send_frame("SEND", headers, json.dumps(arguments).encode())
        answer: dict[str, Any] = json.loads(self.client.message().body)
        return answer

    def drain(self, queue: str) -> list[Frame]:
        self.flush()
        self.client.subscribe(queue, ack="client", subscription=queue)
        frames = self.client.arrived()
        if frames:
            self.client.ack(frames[-1], confirmed=True)
        self.client.unsubscribe(queue)
        return frames


@pytest.fixture
def patient_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """Broker that dispatches failed messages again at once, up to 1000 attempts."""
    broker = BrokerProcess(tmp_path, policy={"delay_ms": 0, "attempts_max": 1000})
    try:
        broker.start()
        yield broker
    finally:
        broker.clean_up()


@pytest.mark.timeout(60 + FREEZES * 5)
def test_frozen_connections_lose_double_or_delay_nothing(patient_broker: BrokerProcess) -> None:
    print(f"TRUENEXT_SEED={SEED}")
    broker = patient_broker
    other = Other(broker)
    with FreezingProxy(broker.port) as proxy:
        for number in range(FREEZES):
            case = Case(f"{SEED} {number}", f"q{number}", proxy, other)
            try:
                case.run()
            except BaseException:
                print(f"example {number} of TRUENEXT_SEED={SEED}")
                raise
    broker.stop()
