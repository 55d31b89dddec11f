"""Tests that the stuck audit finds every queue that keeps a ready message from a consumer with credit."""

from collections.abc import Callable
from unittest import mock

import pytest

from tests.unit.inspection import run_stuck_audit
from truenext.engine import stuck
from truenext.engine.dispatch.plain import Dispatcher
from truenext.engine.dispatch.wildcard import WildcardDispatch
from truenext.engine.engine import Engine
from truenext.engine.memory.reading import PageReader
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.pages import PageMessage, PageResult, StoreRead
from truenext.engine.state.queue import Lane
from truenext.engine.stuck import STUCK_MS, StuckQueueDetector
from truenext.model.batch import Batch
from truenext.model.commands import Ack, AckMode, Send, Subscribe
from truenext.model.destination import parse_address
from truenext.model.limits import UNSENT_BYTES_MAX
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy

CHECK_INTERVAL_MS = 1000


class StuckDriver:
    """An engine, and an audit that looks at it each second. What the engine wants to be read is in `reads`."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.engine = Engine(policies=Policies(policy or Policy()))
        self.engine.lifespan.start()
        self.commit()
        self.audit = StuckQueueDetector()
        self.session = self.engine.commands.connect("s")
        self.reads: list[StoreRead] = []

    def connect(self) -> ConnectionState:
        return self.engine.commands.connect("other")

    def send(self, *, persistent: bool = False, priority: int = 4, expires_ms: int = 0, size: int = 0) -> None:
        message = SentMessage(priority, persistent, expires_ms, b"content-length:0\n", bytes(size))
        self.engine.commands.send(self.session, Send(parse_address("/queue/a", "s"), message))

    def subscribe(self, *, window: int = 1000, session: ConnectionState | None = None) -> None:
        session = session or self.session
        name = str(len(session.consumers))
        self.engine.commands.subscribe(
            session, Subscribe(name, parse_address("/queue/a", "s"), AckMode.INDIVIDUAL, window)
        )

    def turn(self) -> list[int]:
        effects = self.engine.turn.run()
        self.reads += effects.reads
        return [entry.sequence for entries in effects.deliveries.values() for entry in entries]

    def commit(self) -> Batch:
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.store_results.on_committed(batch)
        return batch

    def stuck_within(self, checks: int) -> list[str]:
        """Return the queues reported as stuck in `checks` checks, one per interval."""
        stuck = []
        for _ in range(checks):
            stuck += [queue.name for queue in run_stuck_audit(self.audit, self.engine, self.read_lanes)]
            self.engine.state.commit_state.now_ms += CHECK_INTERVAL_MS
        return stuck

    def read_lanes(self) -> set[Lane]:
        return {read.lane for read in self.reads}


def without_dispatch() -> "mock._patch[mock.Mock]":
    return mock.patch.object(Dispatcher, "dispatch", mock.Mock(return_value=None))


LONG = 3 * STUCK_MS // CHECK_INTERVAL_MS


def test_queue_whose_ready_message_is_not_dispatched_is_reported_once_after_the_limit() -> None:
    driver = StuckDriver()
    driver.subscribe()
    driver.send()
    with without_dispatch():
        driver.turn()
    assert driver.stuck_within(STUCK_MS // CHECK_INTERVAL_MS + 1) == []
    assert driver.audit.stuck_queues(driver.engine.state.commit_state.now_ms) == []
    assert driver.stuck_within(LONG) == ["a"]
    ((queue, waiting_ms),) = driver.audit.stuck_queues(driver.engine.state.commit_state.now_ms)
    assert (queue.name, waiting_ms) == ("a", driver.engine.state.commit_state.now_ms)


def test_time_in_which_no_turn_is_run_does_not_count() -> None:
    driver = StuckDriver()
    driver.subscribe()
    driver.send()
    with without_dispatch():
        driver.turn()
    assert driver.stuck_within(STUCK_MS // CHECK_INTERVAL_MS) == []
    driver.engine.state.commit_state.now_ms += 2 * STUCK_MS
    driver.audit.forget()
    assert driver.stuck_within(STUCK_MS // CHECK_INTERVAL_MS + 1) == []
    assert driver.stuck_within(2) == ["a"]


@pytest.mark.parametrize("queues_at_once", [1, 2, 3, 100])
def test_stuck_audit_checks_a_few_queues_at_once_and_reports_each_stuck_queue_once(
    monkeypatch: pytest.MonkeyPatch, queues_at_once: int
) -> None:
    monkeypatch.setattr(stuck, "QUEUES_MAX", queues_at_once)
    driver = StuckDriver()
    for name in "abcde":
        driver.engine.commands.subscribe(
            driver.session, Subscribe(name, parse_address(f"/queue/{name}", "s"), AckMode.INDIVIDUAL, 10)
        )
    message = SentMessage(4, False, 0, b"content-length:0\n", b"")
    with without_dispatch():
        for name in "be":
            driver.engine.commands.send(driver.session, Send(parse_address(f"/queue/{name}", "s"), message))
        driver.turn()
    assert sorted(driver.stuck_within(5 * LONG)) == ["b", "e"]
    assert [queue.name for queue, _ in driver.audit.stuck_queues(driver.engine.state.commit_state.now_ms)] == ["b", "e"]


def of_many(driver: StuckDriver, pattern: str = "/queue/*") -> None:
    driver.engine.commands.subscribe(
        driver.session, Subscribe("many", parse_address(pattern, "s"), AckMode.INDIVIDUAL, 10)
    )


def test_queue_is_stuck_for_a_wildcard_consumer_that_gets_nothing() -> None:
    driver = StuckDriver()
    of_many(driver)
    with mock.patch.object(WildcardDispatch, "run", mock.Mock(return_value=[])):
        driver.send()
        driver.turn()
        assert driver.stuck_within(LONG) == ["a"]


def test_stuck_queues_are_told_while_a_check_that_has_removed_one_goes_on() -> None:
    """A status request during such a check ended the broker."""
    driver = StuckDriver()
    driver.subscribe()
    with without_dispatch():
        driver.send()
        driver.turn()
    assert driver.stuck_within(LONG) == ["a"]
    driver.send()
    assert driver.turn() == [1, 2]
    check = driver.audit.check(driver.engine, driver.read_lanes)
    next(check)
    now_ms = driver.engine.state.commit_state.now_ms
    assert [queue.name for queue, _ in driver.audit.stuck_queues(now_ms)] == ["a"]
    assert list(check) == []
    assert driver.audit.stuck_queues(now_ms) == []


def test_queue_is_not_stuck_while_a_wildcard_consumer_waits_for_a_scan_of_groups_in_another() -> None:
    driver = StuckDriver()
    of_many(driver)
    message = SentMessage(4, False, 0, b"content-length:0\n", b"", group="g")
    with mock.patch.object(WildcardDispatch, "run", mock.Mock(return_value=[])):
        driver.engine.commands.send(driver.session, Send(parse_address("/queue/b", "s"), message))
        driver.send()
        driver.turn()
        (selection,) = driver.engine.queues.selections.by_queue.values()
        selection.unfinished_cursors.update(dict.fromkeys(selection.group_cursors()))
        assert driver.stuck_within(LONG) == []
        selection.unfinished_cursors.clear()
        assert driver.stuck_within(LONG)


def test_queue_is_not_stuck_while_a_wildcard_consumer_waits_for_a_commit_in_another() -> None:
    driver = StuckDriver()
    of_many(driver)
    message = SentMessage(4, True, 0, b"content-length:0\n", b"")
    driver.engine.commands.send(driver.session, Send(parse_address("/queue/b", "s"), message))
    driver.send()
    assert driver.turn() == []
    assert driver.stuck_within(LONG) == []
    driver.commit()
    assert driver.turn() == [1, 2]


def test_stuck_queue_that_recovers_is_reported_again_if_it_is_stuck_again() -> None:
    driver = StuckDriver()
    driver.subscribe()
    with without_dispatch():
        driver.send()
        driver.turn()
        assert driver.stuck_within(LONG) == ["a"]
    driver.send()
    assert driver.turn() == [1, 2]
    assert driver.stuck_within(1) == []
    assert driver.audit.stuck_queues(driver.engine.state.commit_state.now_ms) == []
    with without_dispatch():
        driver.send()
        driver.turn()
        assert driver.stuck_within(STUCK_MS // CHECK_INTERVAL_MS) == []
        assert driver.stuck_within(LONG) == ["a"]


def test_a_look_at_which_all_is_well_starts_the_time_anew() -> None:
    driver = StuckDriver()
    driver.subscribe(window=1)
    driver.send()
    assert driver.turn() == [1]
    for _ in range(4):
        driver.send()
        (sequence,) = driver.session.consumers["0"].held
        driver.engine.commands.acknowledge(driver.session, Ack("0", sequence, None))
        assert driver.stuck_within(STUCK_MS // CHECK_INTERVAL_MS) == [], "it has credit, and nobody has dispatched yet"
        driver.turn()
        assert driver.stuck_within(1) == []


def no_consumer(driver: StuckDriver) -> None:
    driver.send()


def a_full_window(driver: StuckDriver) -> None:
    driver.subscribe(window=1)
    driver.send()
    driver.send()


def a_full_socket(driver: StuckDriver) -> None:
    driver.subscribe()
    driver.send(size=UNSENT_BYTES_MAX)
    driver.send()


def all_sockets_together_full(driver: StuckDriver) -> None:
    for number in range(5):
        session = driver.engine.commands.connect(f"full {number}")
        driver.subscribe(window=1, session=session)
        driver.send(size=UNSENT_BYTES_MAX)
    driver.subscribe()
    driver.send()
    driver.send()
    driver.engine.state.memory.unsent_threshold = 4 * UNSENT_BYTES_MAX


def a_commit_under_way(driver: StuckDriver) -> None:
    driver.subscribe()
    driver.send(persistent=True)


def an_equal_behind_a_commit_under_way(driver: StuckDriver) -> None:
    driver.subscribe()
    driver.send(persistent=True)
    driver.send()


def nothing_but_expired(driver: StuckDriver) -> None:
    driver.engine.state.commit_state.now_ms = 10
    driver.send(expires_ms=5)
    with without_dispatch():
        driver.subscribe()
        driver.turn()


@pytest.mark.parametrize(
    "how",
    [
        no_consumer,
        a_full_window,
        a_full_socket,
        all_sockets_together_full,
        a_commit_under_way,
        an_equal_behind_a_commit_under_way,
        nothing_but_expired,
    ],
)
def test_a_queue_that_rightly_waits_is_not_stuck(how: Callable[[StuckDriver], None]) -> None:
    driver = StuckDriver()
    if how is all_sockets_together_full:
        driver.engine.state.memory.limit = 1
    how(driver)
    driver.turn()
    assert driver.stuck_within(LONG) == []


def test_a_lower_priority_that_is_ready_is_not_excused_by_a_higher_one_in_flight() -> None:
    driver = StuckDriver()
    driver.subscribe()
    driver.send(persistent=True, priority=9)
    driver.send(priority=4)
    with without_dispatch():
        driver.turn()
    assert driver.stuck_within(LONG) == ["a"]


def test_a_window_that_the_broker_wrongly_believes_shut_is_found() -> None:
    driver = StuckDriver()
    driver.engine.state.memory.unsent_bytes_max = 0
    driver.subscribe()
    driver.send()
    assert driver.turn() == []
    assert driver.stuck_within(LONG) == ["a"]


def test_a_subscription_that_its_queue_has_forgotten_is_found() -> None:
    driver = StuckDriver()
    driver.subscribe()
    queue = driver.session.consumers["0"].queue
    assert queue is not None
    driver.engine.state.clients.receivers_of(queue).consumers.clear()
    driver.send()
    assert driver.turn() == []
    assert driver.stuck_within(LONG) == ["a"]


# ---- What has left memory ----


def evicted(count: int) -> StuckDriver:
    """Messages that only the store has."""
    driver = StuckDriver(Policy(memory_limit=1))
    for _ in range(count):
        driver.send(persistent=True)
    driver.turn()
    driver.commit()
    assert not driver.engine.evict()
    lane = next(iter(driver.engine.queues.by_name.values())).lane(5)
    assert (lane.unread, len(lane.unread_in_memory), len(lane.arrived)) == (count, 0, 0)
    return driver


def test_queue_is_not_stuck_while_a_page_of_its_highest_priority_is_read_and_more_of_it_is_written() -> None:
    """Messages that were being written hid that the page before them was awaited: a lower priority was reported."""
    driver = evicted(2)
    driver.send(persistent=True, priority=0)
    driver.turn()
    driver.commit()
    driver.engine.evict()
    driver.subscribe()
    assert driver.turn() == []
    assert [read.lane.rank for read in driver.reads] == [5]
    driver.send(persistent=True)
    assert driver.turn() == []
    assert driver.stuck_within(LONG) == []
    driver.reads.clear()
    assert driver.stuck_within(LONG) == ["a"]


def test_a_queue_whose_page_is_being_read_is_not_stuck() -> None:
    driver = evicted(2)
    driver.subscribe()
    assert driver.turn() == []
    assert len(driver.reads) == 1
    assert driver.stuck_within(LONG) == []


def test_queue_whose_page_was_not_requested_is_stuck() -> None:
    driver = evicted(2)
    driver.subscribe()
    with mock.patch.object(PageReader, "request_page"):
        assert driver.turn() == []
    assert driver.stuck_within(LONG) == ["a"]


def test_a_page_that_is_never_read_although_the_lane_believes_so_is_found() -> None:
    driver = evicted(2)
    driver.subscribe()
    driver.turn()
    driver.reads.clear()
    assert next(iter(driver.engine.queues.by_name.values())).lane(5).pending_read is not None
    assert driver.stuck_within(LONG) == ["a"]


def test_a_higher_priority_in_memory_does_not_wait_for_the_page_of_a_lower_one() -> None:
    driver = evicted(2)
    driver.subscribe()
    driver.turn()
    driver.send(priority=9)
    with without_dispatch():
        driver.turn()
    assert driver.stuck_within(LONG) == ["a"]


def test_queue_is_stuck_if_a_message_requeued_without_its_body_is_not_read() -> None:
    driver = StuckDriver(Policy(memory_limit=1))
    driver.send(persistent=True)
    driver.commit()
    reader = driver.connect()
    driver.subscribe(session=reader)
    assert driver.turn() == [1]
    driver.engine.evict()
    driver.engine.commands.disconnect(reader, is_exempt=True)
    driver.subscribe()
    with mock.patch.object(PageReader, "request_page"):
        assert driver.turn() == []
    assert driver.stuck_within(LONG) == ["a"]


def test_queue_is_stuck_if_a_message_was_read_and_not_dispatched() -> None:
    driver = evicted(1)
    driver.subscribe()
    driver.turn()
    (read,) = driver.reads
    driver.reads.clear()
    message = SentMessage(4, True, 0, b"content-length:0\n", b"")
    driver.engine.store_results.on_page_read(read, PageResult([PageMessage(1, message)], 2, is_end=True))
    with without_dispatch():
        driver.turn()
    assert driver.stuck_within(LONG) == ["a"]


def test_an_equal_in_flight_above_the_horizon_is_waited_for() -> None:
    """A slow commit is no fault: consumers wait for it rightly."""
    driver = evicted(1)
    driver.send(persistent=True)
    driver.turn()
    driver.subscribe()
    driver.turn()
    (read,) = driver.reads
    driver.reads.clear()
    message = SentMessage(4, True, 0, b"content-length:0\n", b"")
    driver.engine.store_results.on_page_read(read, PageResult([PageMessage(1, message)], 2, is_end=True))
    assert driver.turn() == [1]
    assert driver.stuck_within(LONG) == []


def test_queue_is_not_stuck_while_a_later_message_waits_for_the_page_being_read() -> None:
    driver = evicted(1)
    driver.subscribe()
    driver.turn()
    driver.send(persistent=True)
    driver.turn()
    driver.commit()
    assert driver.turn() == []
    assert driver.stuck_within(LONG) == []
