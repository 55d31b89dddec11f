"""Tests of the order in which connections are read while the gathering batch is full."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from truenext.broker.capacity import BATCHES_WITHOUT_SHARE, SHARE_BYTES, SHARES_BYTES, Capacity
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import EventLog
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import GATHERING_BYTES_MAX, INCOMPLETE_FRAME_BYTES, READ_NS_PER_PASS, SEQUENCE_BLOCK


class Loop:
    """Event loop whose soon calls run with `run_soon`; its timer is kept."""

    def __init__(self) -> None:
        self._soon: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self.timer: Callable[[], object] | None = None

    def call_soon(self, action: Callable[..., object], *arguments: object) -> None:
        self._soon.append((action, arguments))

    def call_later(self, _: float, action: Callable[[], object]) -> object:
        self.timer = action
        return SimpleNamespace(cancel=lambda: None)

    def run_soon(self) -> None:
        calls, self._soon = self._soon, []
        for action, arguments in calls:
            action(*arguments)


class Connection:
    stays_after_refusal = False


def connection() -> ConnectionState:
    return cast(ConnectionState, Connection())


class Setup:
    def __init__(self) -> None:
        self.state = CommitState(EventLog(), sequence_limit=1)
        self.state.sequence_limit = SEQUENCE_BLOCK
        self.loop = Loop()
        self.resumed: list[ConnectionState] = []
        self.waits_for_disk = False
        self.store = SimpleNamespace(disk_level=DiskLevel.PLENTY)
        engine = SimpleNamespace(
            state=SimpleNamespace(commit_state=self.state, memory=MemoryBudget(1 << 28)),
            commands=SimpleNamespace(sending=SimpleNamespace(waits_with_send=lambda _: self.waits_for_disk)),
        )
        self.now_ns = 1
        self.capacity = Capacity(
            cast(Any, engine),
            cast(Any, self.store),
            cast(Any, self.loop),
            lambda: self.now_ns,
            user_name_of=lambda _: "",
            resume=self.resumed.append,
            schedule_turn=lambda: None,
        )
        self.connections = [connection() for _ in range(2)]

    def fill(self) -> None:
        self.state.batch.size = GATHERING_BYTES_MAX

    def close(self) -> None:
        self.state.close_batch()
        self.capacity.on_batch_closed()
        self.loop.run_soon()


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_connection_that_adds_little_is_read_while_the_batch_is_full(setup: Setup) -> None:
    heavy, light = setup.connections
    setup.fill()
    assert not setup.state.has_capacity and setup.capacity.may_read(heavy)
    setup.capacity.count_added(heavy, SHARE_BYTES)
    for _ in range(100):
        assert setup.capacity.may_read(light)
        setup.capacity.count_added(light, 100)
    assert not setup.capacity.may_read(heavy)


def test_shares_of_all_connections_used_up_let_none_be_read(setup: Setup) -> None:
    setup.fill()
    count = SHARES_BYTES // SHARE_BYTES
    for _ in range(count):
        one = connection()
        assert setup.capacity.may_read(one)
        setup.capacity.count_added(one, SHARE_BYTES)
    assert not setup.capacity.may_read(setup.connections[0])


def test_closed_batch_gives_new_shares_though_the_next_one_is_full(setup: Setup) -> None:
    first, second = setup.connections
    setup.fill()
    assert setup.capacity.may_read(first)
    setup.capacity.count_added(first, SHARE_BYTES - 1)
    setup.capacity.count_added(second, SHARES_BYTES)
    assert not setup.capacity.may_read(first)
    setup.capacity.wait(first)
    setup.capacity.wait(second)
    setup.state.close_batch()
    setup.capacity.on_batch_closed()
    # Eviction fills the next batch before any connection is read.
    setup.state.is_eviction_behind = True
    setup.loop.run_soon()
    assert setup.resumed == [first]


def test_memory_freed_by_a_command_is_no_share_for_more(setup: Setup) -> None:
    heavy = setup.connections[0]
    setup.fill()
    assert setup.capacity.may_read(heavy)
    setup.capacity.count_added(heavy, SHARE_BYTES)
    setup.capacity.count_added(heavy, -SHARES_BYTES)
    assert not setup.capacity.may_read(heavy)


def test_connections_without_sequences_wait_without_a_share(setup: Setup) -> None:
    setup.state.sequence_limit = setup.state.next_sequence
    assert not setup.capacity.may_read(setup.connections[0])


def test_connection_that_waits_for_the_disk_is_resumed_once_it_has_space(setup: Setup) -> None:
    first, second = setup.connections
    setup.store.disk_level = DiskLevel.LITTLE
    setup.capacity.wait(first, needs_disk=True)
    setup.capacity.wait(second)
    setup.capacity.resume_waiting()
    assert setup.resumed == [second]
    setup.store.disk_level = DiskLevel.PLENTY
    assert setup.loop.timer is not None
    setup.loop.timer()
    assert setup.resumed == [second, first]


def test_connection_that_waits_for_the_disk_and_its_large_frame_wait_for_the_end_of_a_drain(setup: Setup) -> None:
    # C31.2
    setup.waits_for_disk = True
    setup.state.is_draining = True
    first, second = setup.connections
    setup.capacity.wait(first, needs_disk=True)
    assert setup.capacity.bytes_to_read(second, INCOMPLETE_FRAME_BYTES) == 0
    setup.capacity.resume_waiting()
    assert not setup.resumed
    setup.state.is_draining = False
    setup.capacity.resume_waiting()
    assert setup.resumed == [first, second]


def test_removed_connection_is_not_resumed(setup: Setup) -> None:
    first, second = setup.connections
    setup.capacity.read_turns.wait(first)
    setup.capacity.wait(second)
    setup.capacity.remove(first)
    setup.capacity.remove(second)
    setup.capacity.read_turns.on_turn_done()
    setup.capacity.resume_waiting()
    setup.loop.run_soon()
    assert not setup.resumed


def test_connection_that_gave_way_waits_for_capacity_if_there_is_none(setup: Setup) -> None:
    first, second = setup.connections
    setup.state.sequence_limit = setup.state.next_sequence
    setup.capacity.read_turns.wait(first)
    setup.capacity.read_turns.wait(second)
    setup.capacity.read_turns.on_turn_done()
    setup.loop.run_soon()
    assert not setup.resumed and not setup.capacity.read_turns.has_waiting
    setup.state.sequence_limit = SEQUENCE_BLOCK
    setup.capacity.resume_waiting()
    assert setup.resumed == [first, second]


def test_connection_that_has_capacity_again_waits_for_its_turn_if_the_pass_has_no_time(setup: Setup) -> None:
    first, second = setup.connections
    setup.capacity.wait(first)
    setup.capacity.wait(second)
    assert setup.capacity.read_turns.has_time(first)
    setup.now_ns += READ_NS_PER_PASS
    setup.capacity.resume_waiting()
    assert not setup.resumed
    setup.capacity.read_turns.on_turn_done()
    setup.loop.run_soon()
    assert setup.resumed == [first, second]


def test_connection_whose_command_took_all_shares_has_none_in_the_next_batches(setup: Setup) -> None:
    # A SEND to thousands of subscriptions took more than all shares of each batch, so that others waited for seconds.
    heavy, light = setup.connections
    setup.fill()
    assert setup.capacity.may_read(heavy)
    setup.capacity.count_added(heavy, SHARES_BYTES)
    for _ in range(BATCHES_WITHOUT_SHARE):
        assert not setup.capacity.may_read(heavy)
        setup.state.close_batch()
        setup.fill()
        assert setup.capacity.may_read(light)
    assert setup.capacity.may_read(heavy)
    setup.state.batch.size = 0
    setup.capacity.count_added(heavy, SHARES_BYTES)
    assert setup.capacity.may_read(heavy), "there is capacity"


def test_large_frame_of_a_connection_that_would_wait_for_the_disk_is_not_read_on(setup: Setup) -> None:
    setup.waits_for_disk = True
    setup.store.disk_level = DiskLevel.LITTLE
    assert setup.capacity.bytes_to_read(setup.connections[0], INCOMPLETE_FRAME_BYTES) == 0
    setup.capacity.resume_waiting()
    assert not setup.resumed
    setup.store.disk_level = DiskLevel.PLENTY
    setup.capacity.resume_waiting()
    assert setup.resumed == [setup.connections[0]]


def test_large_frame_is_read_on_if_its_connection_stays_after_a_refusal(setup: Setup) -> None:
    # C23.6
    setup.waits_for_disk = True
    setup.store.disk_level = DiskLevel.LITTLE
    vars(setup.connections[0])["stays_after_refusal"] = True
    assert setup.capacity.bytes_to_read(setup.connections[0], INCOMPLETE_FRAME_BYTES) > 0
