"""Test that a client gets the true next message after each rollback, whatever arrives and whichever other clients read.

Document 004: a dispatcher that still held one message when a rollback was complete handed it out before those that had
been rolled back. Here a client has a buffer, from which it hands out by (9 - priority, sequence). It acknowledges in
transactions and rolls back by one request, or ends its connection. Every MESSAGE of a new round is compared with the
messages that the test knows to wait. Source of what is expected: docs/contract.md, C10.2, C20.1, C20.2, C20.7.

    TRUENEXT_ROLLBACKS=1000 TRUENEXT_SEED=7 pytest -s tests/integration/test_rollback_order.py
"""

import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.drawing import each_one_of
from tests.integration.broker_process import PATIENCE_SECONDS, TINY_LIMITS, BrokerProcess
from truenext.wire.stomp.frame import Frame

ROLLBACKS = int(os.environ.get("TRUENEXT_ROLLBACKS", "40"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

PULLS = 0
"""Window that stands for a pulling subscription."""
BACKLOG_MAX = 100


class Stream:
    """Connection that sends all the time, and numbers its messages in the order of their sequences."""

    def __init__(self, broker: BrokerProcess, queue: str, chance: random.Random) -> None:
        self._client = broker.connect()
        self._queue = queue
        self._chance = chance
        self._thread = threading.Thread(target=self._run)
        self._is_over = threading.Event()
        self.error: BaseException | None = None
        self.priorities: list[int] = []
        self.confirmed = 0
        """Number of messages that are visible, and durable if they are persistent."""
        self.done = 0
        """Number of messages that were taken for good."""

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def key(self, number: int) -> tuple[int, int]:
        return 9 - self.priorities[number], number

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                for _ in range(self._chance.randrange(1, 8)):
                    if len(self.priorities) - self.done < BACKLOG_MAX:
                        self._send()
                while self.confirmed < len(self.priorities):
                    self._client.await_receipt(str(self.confirmed))
                    self.confirmed += 1
                self._is_over.wait(self._chance.choice([0, 0.001, 0.003]))
            self._client.disconnect()
        except BaseException as error:
            self.error = error

    def _send(self) -> None:
        number = len(self.priorities)
        priority = self._chance.choice([0, 4, 4, 4, 4, 9])
        self.priorities.append(priority)
        self._client.send(
            self._queue,
            b"%d" % number,
            persistent=self._chance.random() < 0.5,
            priority=priority,
            headers={"receipt": str(number)},
        )


class Session:
    """Connection that reads, with the buffer of a client."""

    def __init__(self, case: "Case", name: str) -> None:
        self.case = case
        self.name = name
        self.connections = 0
        self.secret = ""
        self.arrived: deque[Frame] = deque()
        self.buffer: dict[int, Frame] = {}
        """Messages that were not handed out, in the order of dispatch."""
        self.started: set[int] = set()
        """Messages of the buffer that are started."""
        self.transaction: dict[int, Frame] = {}
        self.nacked: set[int] = set()
        self.round = 0
        self.sure: set[int] = set()
        """Messages that certainly waited when the round began, and have not come since."""
        self.is_suspended = False
        self.requested = 0
        self.connect({})

    # ---- Connections ----

    def connect(self, headers: dict[str, str]) -> None:
        case = self.case
        self.connections += 1
        self.client = case.broker.connect(headers=headers | {"truenext-client": str(self.connections)})
        self.secret = self.client.connected.headers["truenext-secret"]
        if "truenext-secret" in headers:
            assert self.client.connected.headers["truenext-taken-over"] == "true"
        self.forget()
        self.round = 0
        self.is_suspended = False
        self.start_round()
        pulls = case.window == PULLS
        self.client.subscribe(
            case.queue,
            prefetch=None if pulls else case.window,
            headers={"truenext-pull": "true"} if pulls else None,
        )
        self.client.begin("t")
        self.pull()

    def forget(self) -> None:
        self.arrived.clear()
        self.buffer.clear()
        self.transaction.clear()
        self.nacked.clear()
        self.started.clear()
        self.requested = 0

    def start_round(self) -> None:
        """Begin a round, in which all confirmed messages come in order, without those that other sessions hold."""
        case = self.case
        # What others have given back is back once their connections answer something.
        held = case.held_by_others(self)
        self.sure = set(range(case.stream.confirmed)) - case.done - held

    # ---- What comes ----

    def pull(self) -> None:
        if self.case.window == PULLS and not self.requested:
            self.requested = self.case.chance.choice([1, 1, 3, 20])
            self.client.pull(self.requested, waits=self.case.chance.random() < 0.5)

    def handle(self, frame: Frame) -> None:
        headers = frame.headers
        if "truenext-unused" in headers:
            self.requested = 0
            return
        number, case = int(frame.body), self.case
        if not self.is_held(frame):
            return
        assert number not in case.done
        assert not self.is_suspended, f"{number} came to {self.name}, which rests"
        assert number not in self.buffer and number not in self.transaction
        assert int(headers["truenext-attempts"]) == case.attempts.get(number, 0), (number, headers, case.attempts)
        self.requested = max(self.requested - 1, 0)
        self.sure.discard(number)
        key = case.stream.key(number)
        overtaken = {other for other in self.sure if case.stream.key(other) < key}
        if overtaken:
            # They were dispatched before it, to others.
            overtaken -= case.held_by_others(self)
        assert not overtaken, f"{number} came to {self.name} before {sorted(overtaken)}, in round {self.round}"
        self.buffer[number] = frame

    def collect(self) -> set[int]:
        """Return the numbers of all messages that the session holds."""
        self.arrived.extend(self.client.arrived())
        new = {int(frame.body) for frame in self.arrived if self.is_held(frame)}
        return new | self.buffer.keys() | self.transaction.keys()

    def read(self) -> None:
        self.collect()
        while self.arrived:
            self.handle(self.arrived.popleft())

    def is_held(self, frame: Frame) -> bool:
        return "truenext-unused" not in frame.headers and int(frame.headers["truenext-round"]) >= self.round

    def await_something(self) -> None:
        """Wait for the true next message, if one certainly waits that no other session holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.buffer:
            self.pull()
            self.read()
            if not self.buffer and not (self.sure - self.case.held_by_others(self)):
                return
            assert time.monotonic() < deadline, f"{self.sure} do not come to {self.name}"

    # ---- What it does ----

    def deliver(self) -> None:
        """Hand out the first message of the buffer; the program acknowledges or nacks it."""
        case, chance = self.case, self.case.chance
        number = min(self.buffer, key=case.stream.key)
        frame = self.buffer[number]
        self.client.started(frame)
        self.started.add(number)
        if chance.random() < 0.1:
            return
        self.transaction[number] = self.buffer.pop(number)
        self.started.discard(number)
        if chance.random() < 0.1:
            self.client.nack(frame, transaction="t")
            self.nacked.add(number)
        else:
            self.client.ack(frame, transaction="t")
            if chance.random() < 0.1:
                self.client.nack(frame, transaction="t")
                self.nacked.add(number)

    def commit(self) -> None:
        case = self.case
        for session in case.sessions:
            session.read()
            session.sure -= self.transaction.keys()
        for number in self.transaction:
            if number in self.nacked:
                case.fails(number)
            else:
                case.done.add(number)
                case.stream.done += 1
        self.transaction.clear()
        self.nacked.clear()
        self.client.commit("t", confirmed=case.chance.random() < 0.5)
        self.client.begin("t")

    def roll_back(self) -> None:
        """Roll back in one request, which keeps some of the buffer at times."""
        case, chance = self.case, self.case.chance
        case.returns(self)
        counted = chance.choice(["all", "nacked"])
        kept = [number for number in self.buffer if chance.random() < 0.1] if chance.random() < 0.3 else []
        suspends = chance.random() < 0.3
        for number in self.transaction if counted == "all" else self.nacked:
            case.fails(number)
        self.round += 1
        self.start_round()
        self.sure -= set(kept)
        self.client.release(
            "1", keep=[self.buffer[number] for number in kept], abort="t", count_attempts=counted, suspend=suspends
        )
        self.client.begin("t")
        remaining = {number: self.buffer[number] for number in kept}
        started = self.started & remaining.keys()
        self.forget()
        self.buffer, self.started = remaining, started
        if suspends:
            self.is_suspended = True
            time.sleep(chance.choice([0, 0.002, 0.01]))
            self.read()
            self.is_suspended = False
            self.start_round()
            self.sure -= remaining.keys()
            if self.case.window != PULLS or chance.random() < 0.5:
                self.client.wake()
        self.pull()

    def close(self) -> None:
        """End the connection instead, in one of the ways that a client knows to be over."""
        case, chance = self.case, self.case.chance
        self.read()
        case.returns(self)
        if chance.random() < 0.5:
            self.client.disconnect()
            self.connect({})
            return
        old = self.client
        self.connect({"truenext-secret": self.secret})
        old.close()


class Case:
    """Sessions on one queue, to which a stream sends all the time."""

    def __init__(self, broker: BrokerProcess, queue: str, window: int, sessions: int, seed: str) -> None:
        self.chance = random.Random(seed)
        self.broker = broker
        self.queue = queue
        self.window = window
        self.attempts: dict[int, int] = {}
        self.done: set[int] = set()
        self.stream = Stream(broker, queue, random.Random(f"stream {seed}"))
        self.sessions: list[Session] = []
        for number in range(sessions):
            self.sessions.append(Session(self, f"session {number}"))

    def fails(self, number: int) -> None:
        self.attempts[number] = self.attempts.get(number, 0) + 1

    def held_by_others(self, session: Session) -> set[int]:
        held: set[int] = set()
        for other in self.sessions:
            if other is not session:
                held |= other.collect()
        return held

    def returns(self, session: Session) -> None:
        """Record that the messages of a session are requeued, among them unread ones: the others are sure of none."""
        for other in self.sessions:
            if other is not session:
                other.read()
                other.sure.clear()

    def run(self) -> None:
        chance = self.chance
        self.stream.start()
        try:
            for _ in range(ROLLBACKS):
                session = chance.choice(self.sessions)
                for _ in range(chance.randrange(1, 6)):
                    session.await_something()
                    if not session.buffer:
                        break
                    session.deliver()
                what = chance.random()
                if what < 0.3:
                    session.commit()
                elif what < 0.85:
                    session.roll_back()
                else:
                    session.close()
        finally:
            self.stream.end()
        for session in self.sessions:
            session.client.disconnect()
        remaining = self.broker.remaining_messages(self.queue)
        expected = set(range(len(self.stream.priorities))) - self.done
        assert [int(frame.body) for frame in remaining] == sorted(expected, key=self.stream.key)
        for frame in remaining:
            assert int(frame.headers["truenext-attempts"]) == self.attempts.get(int(frame.body), 0), frame


@pytest.fixture(scope="module", params=each_one_of([(), TINY_LIMITS], ["default limits", "tiny limits"]))
def patient_broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Broker that dispatches failed messages again at once, without a limit of attempts."""
    options: Sequence[str] = request.param
    broker = BrokerProcess(
        Path(tmp_path_factory.mktemp("patient")), options, policy={"delay_ms": 0, "attempts_max": 1_000_000}
    )
    with broker.running():
        yield broker


@pytest.mark.timeout(60 + ROLLBACKS)
@pytest.mark.parametrize("sessions", [1, 2])
@pytest.mark.parametrize("window", [PULLS, 1, 10, 1000])
def test_the_true_next_comes_after_every_rollback(
    patient_broker: BrokerProcess, queue: str, window: int, sessions: int
) -> None:
    print(f"TRUENEXT_SEED={SEED}")
    Case(patient_broker, queue, window, sessions, f"{SEED} {window} {sessions}").run()
    patient_broker.check_log()
