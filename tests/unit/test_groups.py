"""Tests of message groups: each has one owner, and no other consumer waits for a group.

Random orders of events are in tests/property.
"""

import pytest

from tests.unit.inspection import groups_of, run_stuck_audit
from tests.unit.test_selecting import A, SelectingDriver, numbers
from truenext.engine.selecting import groups as groups_of_engine
from truenext.engine.selecting.groups import GroupOwnership, GroupScanCursor
from truenext.engine.state.queue import Entry
from truenext.engine.stuck import STUCK_MS, StuckQueueDetector
from truenext.model.commands import Abort, Ack, Begin, Commit, Login, Nack, Release, Send, Unsubscribe
from truenext.model.header_lines import closes_group, group_of
from truenext.model.limits import GROUPS_MIN, SCAN_FOUND_MAX, SCAN_PAGE_SIZE
from truenext.model.message import SentMessage
from truenext.model.order import rank
from truenext.model.policy import Policies, Policy, WhileWaiting

STORE_ONLY = pytest.mark.parametrize("is_evicted", [False, True], ids=["in memory", "in the store"])


def send(driver: SelectingDriver, group: str, *bodies: str, closes: bool = False, persistent: bool = True) -> None:
    header = (f"JMSXGroupID:{group}\n" if group else "") + ("JMSXGroupSeq:-1\n" if closes else "")
    for body in bodies:
        message = SentMessage(4, persistent, 0, header.encode(), body.encode(), group=group_of(header.encode()))
        driver.engine.commands.send(driver.session, Send(A, message))


def acknowledge(driver: SelectingDriver, name: str, count: int) -> None:
    for entry in driver.entries[name][:count]:
        driver.engine.commands.acknowledge(driver.session, Ack(name, entry.sequence))
    del driver.entries[name][:count]


@pytest.mark.parametrize(
    ("value", "closes"),
    [("-1", True), ("-20", True), ("0", False), ("-0", False), ("1", False), ("-x", False), ("-", False)],
)
def test_group_is_closed_only_by_a_negative_number(value: str, closes: bool) -> None:
    # C5.4
    assert closes_group(f"JMSXGroupID:g\nJMSXGroupSeq:{value}\n".encode()) is closes


def test_a_queue_that_never_had_a_group_is_dispatched_without_asking_for_any() -> None:
    driver = SelectingDriver()
    driver.subscribe("one")
    driver.send(*numbers(10))
    driver.settle()
    (queue,) = driver.engine.queues.by_name.values()
    assert groups_of(driver.engine, queue) is None and queue not in driver.engine.queues.selections.by_queue


@STORE_ONLY
def test_a_group_is_the_consumers_that_got_its_first_message_and_others_go_to_others(is_evicted: bool) -> None:
    driver = SelectingDriver()
    send(driver, "g", "g1", "g2", "g3")
    send(driver, "h", "h1", "h2")
    send(driver, "", "free")
    if is_evicted:
        driver.evict()
    driver.subscribe("one", window=2)
    driver.subscribe("two", window=2)
    assert driver.settle() == {"one": ["g1", "g2"], "two": ["h1", "h2"]}
    assert [entry.is_first_of_group for entry in driver.entries["one"]] == [True, False]
    acknowledge(driver, "two", 2)
    # Never g3, which is earlier.
    assert driver.settle() == {"two": ["free"]}


@STORE_ONLY
def test_busy_group_with_a_long_backlog_blocks_no_consumer_and_takes_no_memory(is_evicted: bool) -> None:
    # C5.6, C5.8
    driver = SelectingDriver()
    count = 3 * SCAN_FOUND_MAX
    send(driver, "g", *numbers(count))
    driver.settle()
    if is_evicted:
        driver.evict()
    driver.subscribe("slow", window=1)
    assert driver.settle() == {"slow": ["0"]}
    send(driver, "h", "h1")
    send(driver, "", "free")
    driver.subscribe("other")
    assert driver.settle() == {"other": ["h1", "free"]}
    if is_evicted:
        assert driver.engine.state.memory.message_bytes < 500 * (2 * SCAN_FOUND_MAX)


@STORE_ONLY
def test_long_group_is_delivered_in_order_also_after_its_owner_changes(is_evicted: bool) -> None:
    # C5.5
    driver = SelectingDriver()
    count = 3 * SCAN_FOUND_MAX
    for number in range(count):
        send(driver, "g" if number % 3 else "h", str(number))
    driver.settle()
    if is_evicted:
        driver.evict()
    driver.subscribe("one", window=1)
    driver.subscribe("two", window=100)
    got: dict[str, list[int]] = {"one": [], "two": []}
    while news := driver.settle():
        for name, bodies in news.items():
            got[name] += map(int, bodies)
            if len(got["one"]) < 5 or name == "two":
                acknowledge(driver, name, len(bodies))
    assert got["one"] == list(range(0, 15, 3))
    assert got["two"] == [number for number in range(count) if number % 3]
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("one"))
    rest: list[int] = []
    while news := driver.settle():
        rest += map(int, news["two"])
        acknowledge(driver, "two", len(news["two"]))
    assert rest == list(range(12, count, 3))


def test_skipped_messages_are_read_by_pages_and_not_one_by_one() -> None:
    driver = SelectingDriver()
    count = 4 * SCAN_FOUND_MAX
    send(driver, "g", *numbers(count))
    driver.settle()
    driver.evict()
    driver.subscribe("one", window=10)
    driver.subscribe("two", window=10)
    got = 0
    while news := driver.settle():
        got += len(news["one"])
        acknowledge(driver, "one", len(news["one"]))
    assert got == count
    # Once through the lane, and a page more whenever what was found was taken.
    assert driver.pages <= 3 * count // SCAN_PAGE_SIZE + 10


def test_message_requeued_while_its_group_is_refilled_is_the_head_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fixed: a later message was dispatched before the requeued one, since the group was refilled from further on."""
    # C5.5
    monkeypatch.setattr(groups_of_engine, "SCAN_FOUND_MAX", 1)
    monkeypatch.setattr(groups_of_engine, "GROUP_FOUND_MIN", 1)
    driver = SelectingDriver()
    driver.subscribe("one")
    driver.subscribe("two")
    driver.send("in the lane")
    (queue,) = driver.engine.queues.by_name.values()
    lane = queue.lane(rank(4))
    groups = GroupOwnership(lambda: [cursor], driver.engine.state.memory)
    cursor = GroupScanCursor(lane, None, groups)
    g, g_again, h, plain, h_again = (
        Entry(sequence, SentMessage(4, False, 0, b"", b"", group=group), lane, 0, False, None, group=group)
        for sequence, group in enumerate(["g", "g", "h", "", "h"], 1)
    )
    for entry in (g, g_again, h, plain, h_again):
        cursor.test(entry)
        cursor.advance_to(entry.sequence)
    # Of each group one is noted, and what follows it is passed over.
    assert sorted(cursor.found) == [1, 3, 4]
    groups.on_dispatched(g, driver.session.consumer("one"))
    g.is_out_of_lane = h.is_out_of_lane = True
    cursor.refill()
    cursor.test(g_again)
    cursor.advance_to(g_again.sequence)
    h.is_out_of_lane = False
    cursor.on_requeued(h)
    assert cursor.first_for(driver.session.consumer("two")) == (h, False)


def test_a_group_is_free_when_it_is_closed_or_its_consumer_is_gone() -> None:
    # C5.3, C5.4
    driver = SelectingDriver()
    driver.subscribe("one", window=3)
    send(driver, "g", "g1")
    send(driver, "g", "g2", closes=True)
    send(driver, "h", "h1")
    assert driver.settle() == {"one": ["g1", "g2", "h1"]}
    driver.subscribe("two")
    send(driver, "g", "g3")
    send(driver, "h", "h2")
    assert driver.settle() == {"two": ["g3"]}
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("one"))
    assert driver.settle() == {"two": ["g1", "g2", "h1", "h2"]}
    assert [entry.is_first_of_group for entry in driver.entries["two"]] == [True, False, False, True, False]


@pytest.mark.parametrize("while_waiting", WhileWaiting)
def test_a_message_that_waits_for_its_next_try_holds_back_its_group_and_nothing_else(
    while_waiting: WhileWaiting,
) -> None:
    # C3.7, C5.6
    driver = SelectingDriver(Policy(first_delay_ms=50, while_waiting=while_waiting))
    driver.subscribe("one", window=1)
    send(driver, "g", "g1", "g2")
    send(driver, "h", "h1")
    send(driver, "", "free")
    assert driver.settle() == {"one": ["g1"]}
    driver.engine.commands.nack(driver.session, Nack("one", driver.entries.pop("one")[0].sequence))
    for body in ("h1", "free"):
        assert driver.settle() == {"one": [body]}
        acknowledge(driver, "one", 1)
    assert driver.settle() == {}
    driver.engine.state.commit_state.tick(0, 50_000)
    for body in ("g1", "g2"):
        assert driver.settle() == {"one": [body]}
        acknowledge(driver, "one", 1)


def test_the_group_of_a_message_that_was_dead_lettered_or_purged_while_it_waited_goes_on() -> None:
    driver = SelectingDriver(Policy(first_delay_ms=50))
    driver.subscribe("one", window=1)
    send(driver, "g", "g1", "g2")
    driver.settle()
    driver.engine.commands.nack(driver.session, Nack("one", driver.entries.pop("one")[0].sequence))
    assert driver.settle() == {}
    driver.engine.commands.administering.change_policies(Policies(Policy(attempts_max=1)))
    assert driver.settle() == {"one": ["g2"]}


@pytest.mark.parametrize("ends", ["COMMIT", "ABORT"])
def test_group_of_a_suspended_consumer_is_free_once_its_transaction_has_dead_lettered_the_last_message(
    ends: str,
) -> None:
    """Fixed: the queue was not served again until something else happened to it."""
    # C5.3
    driver = SelectingDriver(Policy(attempts_max=1))
    driver.subscribe("one")
    send(driver, "g", "g1")
    driver.settle()
    commands = driver.engine.commands
    commands.log_in(driver.session, Login(number=1))
    commands.begin(driver.session, Begin("t"))
    commands.nack(driver.session, Nack("one", driver.entries["one"][0].sequence, "t"))
    commands.release(driver.session, Release(["one"], [], suspends=True))
    driver.subscribe("two")
    send(driver, "g", "g2")
    assert driver.settle() == {}
    if ends == "COMMIT":
        commands.commit(driver.session, Commit("t"))
    else:
        commands.abort(driver.session, Abort("t"))
    assert driver.settle() == {"two": ["g2"]}


def test_groups_are_counted_and_fewer_of_them_remembered_where_queues_take_all_their_room() -> None:
    """Fixed: forty queues of 10,000 groups with long names took 457 MiB that was not counted."""
    # C5.7
    driver = SelectingDriver()
    driver.subscribe("one", window=1000)
    memory = driver.engine.state.memory
    send(driver, "held", "first")
    driver.settle()
    before = memory.queue_bytes

    def receive(numbers: range) -> None:
        for number in numbers:
            send(driver, f"{'長' * 200}{number}", "")
            driver.settle()
            for entry in driver.entries["one"][1:]:
                driver.engine.commands.acknowledge(driver.session, Ack("one", entry.sequence))
            del driver.entries["one"][1:]
            fewest.append(len(groups.owners))

    (queue,) = driver.engine.queues.by_name.values()
    groups, fewest = driver.engine.queues.selections.existing_groups_of(queue), [0]
    receive(range(300))
    fewest.clear()
    assert len(groups.owners) == 301 and memory.queue_bytes > before + 300 * 400
    memory.queues_limit = memory.queue_bytes
    receive(range(300, 700))
    assert "held" in groups.owners
    assert min(fewest) >= GROUPS_MIN and len(groups.owners) < 3 * GROUPS_MIN
    driver.engine.commands.acknowledge(driver.session, Ack("one", driver.entries["one"][0].sequence))
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("one"))
    driver.settle()
    driver.engine.remove_unused_queues()
    assert memory.queue_bytes < before


def test_group_with_a_held_message_is_remembered_beyond_the_limit_of_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # C5.7
    monkeypatch.setattr(groups_of_engine, "GROUPS_MAX", 8)
    driver = SelectingDriver()
    driver.subscribe("one", window=1000)
    send(driver, "held", "first")
    for number in range(30):
        send(driver, f"g{number}", str(number))
        driver.settle()
        for entry in driver.entries["one"][1:]:
            driver.engine.commands.acknowledge(driver.session, Ack("one", entry.sequence))
        del driver.entries["one"][1:]
    (queue,) = driver.engine.queues.by_name.values()
    groups = driver.engine.queues.selections.existing_groups_of(queue)
    assert "held" in groups.owners
    # Eight, what is held, and a quarter until some are forgotten again.
    assert 8 <= len(groups.owners) <= 8 + 1 + 2
    driver.subscribe("two")
    send(driver, "g29", "to one")
    send(driver, "held", "to one as well")
    send(driver, "g0", "to two")
    assert driver.settle() == {"one": ["to one", "to one as well"], "two": ["to two"]}


def test_the_stuck_audit_does_not_take_a_busy_group_for_stuck_and_sees_one_that_is() -> None:
    driver = SelectingDriver()
    driver.subscribe("one", window=1)
    driver.subscribe("two")
    send(driver, "g", "g1", "g2")
    driver.settle()
    audit = StuckQueueDetector()

    def dispatched_at(now_ms: int) -> list[str]:
        driver.engine.state.commit_state.tick(now_ms * 1000, now_ms * 1000)
        return [queue.name for queue in run_stuck_audit(audit, driver.engine)]

    assert dispatched_at(0) == dispatched_at(2 * STUCK_MS) == []
    acknowledge(driver, "one", 1)
    # Nobody asks for a turn.
    assert dispatched_at(3 * STUCK_MS) == []
    assert dispatched_at(5 * STUCK_MS) == ["a"]
