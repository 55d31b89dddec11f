"""Tests that the automatic window fits the speed of any kind of consumer.

Consumers are simulated, millisecond by millisecond, on the real engine: threads that take a while for each message, a
network that takes a while each way, acknowledgements one by one or many together.
"""

from collections import deque
from dataclasses import dataclass, field

import pytest

from truenext.engine.engine import Engine
from truenext.engine.state.window import AutoWindow
from truenext.model.commands import Ack, AckMode, Login, Nack, Release, Send, Subscribe, Wake
from truenext.model.destination import parse_address
from truenext.model.limits import HELD_MAX, WINDOW_DEFAULT
from truenext.model.message import SentMessage

QUEUE = parse_address("/queue/a", "s")


@dataclass
class Simulated:
    """A consumer: `threads` work at once, each for `work_ms` a message; every `together` messages are acknowledged."""

    threads: int = 1
    work_ms: float = 1
    network_ms: int = 0
    together: int = 1
    has_stalled: bool = False
    handled: list[tuple[int, int]] = field(default_factory=list)
    """Time and priority of each handled message."""
    held_max: int = 0

    def __post_init__(self) -> None:
        self.coming: deque[tuple[int, int, int]] = deque()
        self.here: deque[tuple[int, int]] = deque()
        self.busy: list[tuple[float, int, int]] = []
        self.done: list[int] = []
        self.acknowledged: deque[tuple[int, list[int]]] = deque()


class WindowDriver:
    def __init__(self, *consumers: Simulated, start_ms: int = 1_000_000) -> None:
        self.engine = Engine()
        self.engine.state.commit_state.now_ms = start_ms
        self.engine.lifespan.start()
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.store_results.on_committed(batch)
        self.sender = self.engine.commands.connect("sender")
        self.consumers = dict(zip(map(str, range(len(consumers))), consumers, strict=True))
        self.sessions = {name: self.engine.commands.connect(name) for name in self.consumers}
        for session in self.sessions.values():
            self.engine.commands.subscribe(session, Subscribe("c", QUEUE, AckMode.INDIVIDUAL))
        self.start_ms = start_ms

    def send(self, count: int = 1, priority: int = 4) -> None:
        for _ in range(count):
            message = SentMessage(priority, False, 0, b"content-length:0\n", b"")
            self.engine.commands.send(self.sender, Send(QUEUE, message))

    def held(self, name: str = "0") -> int:
        return len(self.sessions[name].consumers["c"].held)

    def window(self, name: str = "0") -> int:
        return self.sessions[name].consumers["c"].window

    def run(self, milliseconds: int, *, backlog: int = 3000) -> None:
        """Let time pass while there is always enough to do."""
        for _ in range(milliseconds):
            self.engine.state.commit_state.now_ms += 1
            if (self.engine.state.commit_state.now_ms - self.start_ms) % 1000 == 0:
                list(self.engine.stretch_windows())
            (queue,) = self.engine.queues.by_name.values()
            self.send(max(0, backlog - queue.waiting_count()))
            for name, consumer in self.consumers.items():
                self._work(name, consumer)
            self.turn()

    def turn(self) -> None:
        for got, entries in self.engine.turn.run().deliveries.items():
            consumer = self.consumers[got.session.id]
            for entry in entries:
                assert entry.message is not None
                arrives = self.engine.state.commit_state.now_ms + consumer.network_ms
                consumer.coming.append((arrives, entry.sequence, entry.message.priority))
            self.engine.commands.on_all_sent(got.session)
            consumer.held_max = max(consumer.held_max, len(got.held))

    def _work(self, name: str, consumer: Simulated) -> None:
        now = self.engine.state.commit_state.now_ms
        while consumer.coming and consumer.coming[0][0] <= now:
            consumer.here.append(consumer.coming.popleft()[1:])
        if consumer.has_stalled:
            return
        finished = [each for each in consumer.busy if each[0] <= now]
        consumer.busy = [each for each in consumer.busy if each[0] > now]
        free_at = [each[0] for each in finished] + [now - 1.0] * (consumer.threads - len(finished) - len(consumer.busy))
        for _, sequence, priority in finished:
            consumer.done.append(sequence)
            consumer.handled.append((now, priority))
        for free in free_at:
            at = free
            while consumer.here:
                sequence, priority = consumer.here.popleft()
                at += consumer.work_ms
                if at > now:
                    consumer.busy.append((at, sequence, priority))
                    break
                consumer.done.append(sequence)
                consumer.handled.append((now, priority))
        while len(consumer.done) >= consumer.together:
            some, consumer.done = consumer.done[: consumer.together], consumer.done[consumer.together :]
            consumer.acknowledged.append((now + consumer.network_ms, some))
        while consumer.acknowledged and consumer.acknowledged[0][0] <= now:
            for sequence in consumer.acknowledged.popleft()[1]:
                self.engine.commands.acknowledge(self.sessions[name], Ack("c", sequence))

    def handled_lately(self, milliseconds: int, name: str = "0") -> int:
        return sum(
            when > self.engine.state.commit_state.now_ms - milliseconds for when, _ in self.consumers[name].handled
        )


def test_a_consumer_of_ten_messages_a_second_holds_at_most_ten_and_is_never_idle() -> None:
    consumer = Simulated(work_ms=100)
    driver = WindowDriver(consumer)
    driver.run(20_000)
    assert consumer.held_max <= 10
    assert driver.window() < 10
    assert driver.handled_lately(10_000) >= 95


def test_quick_consumer_gets_the_full_default_window() -> None:
    driver = WindowDriver(Simulated(work_ms=0.02))
    driver.run(500)
    assert driver.window() == WINDOW_DEFAULT
    assert driver.handled_lately(100) >= 0.95 * 100 * 50


def test_a_consumer_behind_a_slow_network_does_not_wait_for_it() -> None:
    driver = WindowDriver(Simulated(work_ms=1, network_ms=50))
    driver.run(5000)
    assert driver.handled_lately(2000) >= 0.95 * 2000


def test_fifty_threads_that_take_five_seconds_for_a_message_all_have_work() -> None:
    driver = WindowDriver(Simulated(threads=50, work_ms=5000))
    driver.run(60_000)
    assert driver.handled_lately(20_000) >= 0.9 * 50 * 4


def test_a_consumer_that_waits_until_it_has_two_hundred_gets_them() -> None:
    # C4.10
    driver = WindowDriver(Simulated(work_ms=0.1, together=200))
    driver.run(20_000)
    assert driver.handled_lately(10_000) >= 10_000


def test_a_consumer_that_becomes_slow_holds_less_soon() -> None:
    consumer = Simulated(work_ms=0.1)
    driver = WindowDriver(consumer)
    driver.run(1000)
    assert driver.window() > 400
    consumer.work_ms = 100
    driver.run(120_000)
    assert driver.window() <= 10


def test_urgent_messages_are_handled_by_another_consumer_if_one_has_stalled() -> None:
    # C4.11
    stalled = Simulated(has_stalled=True)
    driver = WindowDriver(stalled, Simulated(work_ms=10), Simulated(work_ms=10))
    driver.run(5000)
    assert driver.window("0") > 100
    for _ in range(20):
        driver.send(priority=9)
        driver.run(100)
    urgent = [when for each in driver.consumers.values() for when, priority in each.handled if priority == 9]
    assert len(urgent) == 20


def test_full_window_is_stretched_only_after_a_pause_and_up_to_the_limit() -> None:
    # C4.10
    driver = WindowDriver(Simulated(has_stalled=True))
    driver.send(3000)
    driver.turn()
    sizes = [driver.window()]
    for _ in range(10):
        driver.engine.state.commit_state.now_ms += 999
        list(driver.engine.stretch_windows())
        assert driver.window() == sizes[-1]
        driver.engine.state.commit_state.now_ms += 1
        list(driver.engine.stretch_windows())
        driver.turn()
        sizes.append(driver.window())
    assert sizes == [10, 20, 40, 80, 160, 320, 640, 1000, 1000, 1000, 1000]
    assert driver.held() == 1000


def test_a_refusal_is_an_answer_too() -> None:
    driver = WindowDriver(Simulated(has_stalled=True))
    driver.send(3000)
    driver.turn()
    session = driver.sessions["0"]
    for _ in range(300):
        driver.engine.state.commit_state.now_ms += 1
        for sequence in list(session.consumers["c"].held):
            driver.engine.commands.nack(session, Nack("c", sequence))
        driver.turn()
    assert driver.window() > 100


@pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000])
def test_a_clock_that_is_set_does_no_harm(jump_ms: int) -> None:
    driver = WindowDriver(Simulated(work_ms=1, network_ms=5))
    driver.run(1000)
    driver.engine.state.commit_state.now_ms += jump_ms
    driver.consumers["0"].coming = deque((at + jump_ms, *rest) for at, *rest in driver.consumers["0"].coming)  # type: ignore[misc]
    driver.consumers["0"].busy = [(at + jump_ms, *rest) for at, *rest in driver.consumers["0"].busy]  # type: ignore[misc]
    driver.consumers["0"].acknowledged = deque((at + jump_ms, rest) for at, rest in driver.consumers["0"].acknowledged)
    driver.run(3000)
    assert driver.handled_lately(1000) >= 950
    assert 2 <= driver.window() <= WINDOW_DEFAULT


def test_the_first_answer_of_many_after_a_silence_is_not_taken_for_a_slow_consumer() -> None:
    window = AutoWindow(0)
    window.settled_count = 1
    window.update({}, 6000)
    window.settled_count += 199
    assert not window.stretch(6999)
    assert window.stretch(7000)


@pytest.mark.parametrize("size", [1, 2, WINDOW_DEFAULT + 1, HELD_MAX])
@pytest.mark.parametrize("mode", [AckMode.CLIENT, AckMode.INDIVIDUAL])
def test_a_window_that_is_named_is_exact(size: int, mode: AckMode) -> None:
    # C4.9
    engine = Engine()
    engine.lifespan.start()
    batch = engine.take_batch()
    assert batch is not None
    engine.store_results.on_committed(batch)
    session = engine.commands.connect("reader")
    engine.commands.subscribe(session, Subscribe("c", QUEUE, mode, size))
    for _ in range(size + 1):
        engine.commands.send(session, Send(QUEUE, SentMessage(4, False, 0, b"content-length:0\n", b"")))
    while engine.turn.run()[1]:
        engine.commands.on_all_sent(session)
    assert len(session.consumers["c"].held) == size


@pytest.mark.parametrize("suspended_ms", [0, 60_000])
def test_automatic_window_is_unchanged_by_a_release_and_by_a_suspension(suspended_ms: int) -> None:
    # C20.3
    driver = WindowDriver(Simulated(work_ms=0.1))
    driver.run(500)
    session = driver.sessions["0"]
    consumer = session.consumers["c"]
    driver.turn()
    before = driver.window()
    kept = list(consumer.held.values())[:3]
    assert before > 10 and len(kept) == 3
    driver.engine.commands.log_in(session, Login(number=1))
    names = [("c", entry.sequence, entry.deliveries) for entry in kept]
    driver.engine.commands.release(session, Release(["c"], names, suspends=True))
    for entry in kept:
        driver.engine.commands.acknowledge(session, Ack("c", entry.sequence))
    driver.engine.state.commit_state.now_ms += suspended_ms
    driver.engine.commands.wake(session, Wake("c"))
    # The same of what it has answered since it goes on.
    driver.engine.state.commit_state.now_ms += 20
    consumer.adjust_window(driver.engine.state.commit_state.now_ms)
    assert driver.window() == before
