"""Tests of drains without sockets: what counts as left when messages move between two steps of a count, and rights."""

import json
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.test_control_queries import ReportDriver, finished
from truenext.broker.access import VERB_CHECKS, ForbiddenError
from truenext.broker.drain import BEGIN, RESTRICTION, VERB, Drain
from truenext.cli.drain import left_text
from truenext.engine import remainder
from truenext.engine.lifecycle import settlement
from truenext.engine.remainder import QUEUES_PER_STEP, Remainder, count_remainder
from truenext.engine.state.queue import Entry
from truenext.model.commands import Ack, Begin, Commit, ControlRequest, Nack, Send, Unsubscribe
from truenext.model.destination import parse_address
from truenext.model.disk_level import DiskLevel
from truenext.model.grants import User
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy, WhileWaiting


class DrainDriver(ReportDriver):
    """Engine with a stage: a connection that takes from `first`, and sends to `zero`, which is counted before."""

    def __init__(self) -> None:
        super().__init__()
        self.engine.queues.get_or_create(parse_address("/queue/zero", "s"))
        self.stage = self.engine.commands.connect("stage")
        self.subscribe("/queue/first", self.stage)
        self.send("first")
        (self.entry,) = self.dispatched()
        self.drain = Drain(self.engine, tuple, lambda queue: (queue.name, ""))

    def dispatched(self) -> list[Entry]:
        return [entry for entries in self.engine.turn.run().deliveries.values() for entry in entries]

    def acknowledge(self, transaction: str | None = None) -> None:
        self.engine.commands.acknowledge(
            self.stage, Ack(None, self.entry.sequence, transaction=transaction, dispatch=self.entry.deliveries)
        )

    def send_on(self) -> None:
        """Take the message from `first`, and send one to `zero`, in one step."""
        commands = self.engine.commands
        commands.begin(self.stage, Begin("t"))
        self.acknowledge("t")
        message = SentMessage(4, False, 0, b"content-length:0\n", b"")
        commands.send(self.stage, Send(parse_address("/queue/zero", "s"), message, transaction="t"))
        commands.commit(self.stage, Commit("t"))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> DrainDriver:
    monkeypatch.setattr(remainder, "QUEUES_PER_STEP", 1)
    monkeypatch.setattr(remainder, "ENTRIES_PER_STEP", 1)
    return DrainDriver()


def rest_of(counting: Generator[None, None, Remainder]) -> Remainder:
    while True:
        try:
            next(counting)
        except StopIteration as end:
            result: Remainder = end.value
            return result


def steps_of(driver: DrainDriver) -> int:
    return sum(1 for _ in count_remainder(driver.engine))


def test_message_sent_on_to_a_queue_that_was_counted_before_is_never_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # C31.5
    monkeypatch.setattr(remainder, "QUEUES_PER_STEP", 1)
    misses = 0
    for steps in range(steps_of(DrainDriver())):
        driver = DrainDriver()
        counting = count_remainder(driver.engine)
        for _ in range(steps):
            next(counting)
        driver.send_on()
        found = rest_of(counting)
        misses += found.is_empty
        assert not (found.is_empty and found.is_certain)
    assert misses, "without the two numbers the message is missed"


def test_message_that_comes_back_to_a_queue_that_was_counted_before_is_never_taken_for_gone(
    driver: DrainDriver,
) -> None:
    # C31.5
    counting = count_remainder(driver.engine)
    next(counting)
    next(counting)
    driver.engine.commands.disconnect(driver.stage, is_exempt=True)
    found = rest_of(counting)
    assert not (found.is_empty and found.is_certain)


@pytest.mark.parametrize("change", ["resume", "end of a delay", "reload"])
def test_message_that_begins_to_be_left_after_its_queue_was_counted_is_never_taken_for_gone(
    driver: DrainDriver, change: str
) -> None:
    # C31.5
    engine = driver.engine
    if change == "resume":
        engine.commands.administering.pause("zero")
        driver.send("zero")
    if change == "end of a delay":
        nack = Nack("/queue/first", driver.entry.sequence, delay_ms=1000)
        engine.commands.nack(driver.stage, nack)
        engine.commands.unsubscribe(driver.stage, Unsubscribe("/queue/first"))
    else:
        driver.acknowledge()
    counting = count_remainder(engine)
    for _ in range(4):
        next(counting)
    if change == "resume":
        engine.commands.administering.resume("zero")
    elif change == "reload":
        engine.commands.administering.change_policies(Policies(Policy(attempts_max=1)))
    else:
        state = engine.state.commit_state
        state.tick(state.now_us + 2_000_000, state.now_us + 2_000_000)
        engine.turn.run()
    found = rest_of(counting)
    assert found.is_empty, "it is missed"
    assert not found.is_certain


def test_message_in_a_transaction_is_left_until_the_commit(driver: DrainDriver) -> None:
    # C31.4
    driver.engine.commands.begin(driver.stage, Begin("t"))
    driver.acknowledge("t")
    found = rest_of(count_remainder(driver.engine))
    assert {queue.name: (each.waiting, each.held) for queue, each in found.queues.items()} == {"first": (0, 1)}
    driver.engine.commands.commit(driver.stage, Commit("t"))
    found = rest_of(count_remainder(driver.engine))
    assert (found.is_empty, found.is_certain) == (True, True)


def test_message_on_its_way_to_the_dead_letters_is_left(driver: DrainDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    # C31.4
    monkeypatch.setattr(settlement, "DEAD_LETTERS_PER_TURN", 1)
    for _ in range(2):
        driver.send("first")
    entries = [driver.entry, *driver.dispatched()]
    for entry in entries:
        nack = Nack("/queue/first", entry.sequence, is_rejected=True, dispatch=entry.deliveries)
        driver.engine.commands.nack(driver.stage, nack)
    found = rest_of(count_remainder(driver.engine))
    assert {queue.name: (each.waiting, each.held) for queue, each in found.queues.items()} == {"first": (2, 0)}
    assert found.dead == 1
    for left in (1, 0):
        driver.engine.turn.run()
        found = rest_of(count_remainder(driver.engine))
        assert (sum(each.waiting for each in found.queues.values()), found.dead) == (left, 3 - left)


def test_delayed_message_on_its_way_to_the_dead_letters_is_left_once(
    driver: DrainDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C31.4: it waits for its next try at its place in its queue, and a new policy gives it up.
    monkeypatch.setattr(settlement, "DEAD_LETTERS_PER_TURN", 0)
    policy = Policy(while_waiting=WhileWaiting.BLOCK, first_delay_ms=1000)
    driver.engine.commands.administering.change_policies(Policies(policy))
    driver.engine.commands.nack(driver.stage, Nack("/queue/first", driver.entry.sequence))
    found = rest_of(count_remainder(driver.engine))
    assert (found.is_empty, found.delayed) == (True, 1)
    driver.engine.turn.run()
    driver.engine.commands.administering.change_policies(Policies(replace(policy, attempts_max=1)))
    found = rest_of(count_remainder(driver.engine))
    assert (found.delayed, [each.waiting for each in found.queues.values()]) == (0, [1])


def test_message_that_was_sent_in_part_is_left(driver: DrainDriver) -> None:
    # C31.4
    driver.acknowledge()
    found = rest_of(count_remainder(driver.engine, lambda: [driver.entry]))
    assert [each.held for each in found.queues.values()] == [1]


def report_of(driver: DrainDriver, name: str) -> dict[str, Any]:
    if name == BEGIN:
        driver.drain.execute(request(b'{"draining": true}'))
    report: dict[str, Any] = json.loads(finished(driver.drain.report(name)))
    return report


def test_report_says_drained_only_if_the_drain_had_begun_before(driver: DrainDriver) -> None:
    # C31.1, C31.5
    driver.acknowledge()
    assert not report_of(driver, VERB)["drained"]
    first = report_of(driver, BEGIN)
    assert (first["draining"], first["drained"]) == (True, False)
    assert report_of(driver, BEGIN)["drained"]
    assert report_of(driver, VERB)["drained"]


def test_drain_that_ends_while_it_is_counted_is_not_drained(driver: DrainDriver) -> None:
    driver.acknowledge()
    report_of(driver, BEGIN)
    making = driver.drain.report(VERB)
    next(making)
    driver.drain.execute(request(b'{"draining": false}'))
    with pytest.raises(StopIteration) as end:
        while True:
            next(making)
    report = json.loads(end.value.value)
    assert (report["draining"], report["drained"]) == (False, False)


def test_drain_that_another_request_ends_while_its_messages_are_counted_does_not_begin(driver: DrainDriver) -> None:
    """Fixed: the drain began although the request to end it came later."""
    driver.acknowledge()
    driver.drain.execute(request(b'{"draining": true}'))
    report = driver.drain.report(BEGIN)
    next(report)
    assert driver.drain.execute(request(b'{"draining": false}')) == VERB
    with pytest.raises(StopIteration) as end:
        while True:
            next(report)
    assert json.loads(end.value.value)["error"].startswith("another request has ended the drain before it began")
    assert not driver.drain.is_active


def test_drain_that_another_request_ends_before_its_messages_are_counted_does_not_begin(driver: DrainDriver) -> None:
    """Fixed: the drain began after the answer to the request to end it, because another answer was made first."""
    # C31.6
    driver.acknowledge()
    assert driver.drain.execute(request(b'{"draining": true}')) == BEGIN
    report = driver.drain.report(BEGIN)
    driver.drain.execute(request(b'{"draining": false}'))
    error: str = json.loads(finished(report))["error"]
    assert error.startswith("another request has ended the drain before it began")
    assert not driver.drain.is_active
    driver.drain.execute(request(b'{"draining": true}'))
    assert report_of(driver, BEGIN)["draining"]


def test_report_does_not_say_drained_if_a_message_moved_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    # C31.5
    monkeypatch.setattr(remainder, "QUEUES_PER_STEP", 1)
    for steps in range(steps_of(DrainDriver())):
        driver = DrainDriver()
        driver.engine.state.commit_state.is_draining = True
        making = driver.drain.report(VERB)
        for _ in range(steps):
            next(making)
        driver.send_on()
        with pytest.raises(StopIteration) as end:
            while True:
                next(making)
        assert not json.loads(end.value.value)["drained"]


def request(body: bytes) -> ControlRequest:
    return ControlRequest(VERB, body, parse_address("/temp-queue/a", "s"), None)


def test_restriction_is_for_new_connections_during_a_drain_alone(driver: DrainDriver) -> None:
    # C31.3
    drain = driver.drain
    assert drain.restriction("", is_takeover=False) is None
    driver.acknowledge()
    report_of(driver, BEGIN)
    assert drain.restriction("", is_takeover=False) == RESTRICTION
    assert drain.restriction("Spark.mine", is_takeover=False) == RESTRICTION
    assert drain.restriction("Spark", is_takeover=False) is None
    assert drain.restriction("", is_takeover=True) is None


def test_only_admins_may_drain() -> None:
    check = VERB_CHECKS[VERB]
    check(User("a", {}, is_admin=True), request(b""))
    with pytest.raises(ForbiddenError, match="this needs the right admin"):
        check(User("m", {}, is_monitor=True), request(b""))


@pytest.mark.parametrize("level", DiskLevel)
def test_disk_level_of_sends_is_little_at_least_during_a_drain(driver: DrainDriver, level: DiskLevel) -> None:
    # C31.2: C24.14 goes by the disk itself.
    state = driver.engine.state.commit_state
    state.set_disk_level(level)
    assert (state.disk_level, state.is_disk_short) == (level, level is not DiskLevel.PLENTY)
    state.is_draining = True
    state.set_disk_level(level)
    assert (state.disk_level, state.is_disk_short) == (max(level, DiskLevel.LITTLE), level is not DiskLevel.PLENTY)


def test_report_names_the_ten_largest_of_many_queues(driver: DrainDriver) -> None:
    # C31.6
    for number in range(12):
        for _ in range(number + 1):
            driver.send(f"lonely{number}")
    report = report_of(driver, BEGIN)
    assert [each["queue"] for each in report["no_consumer"]] == [f"lonely{number}" for number in range(11, 1, -1)]
    assert (report["queues_total"], report["no_consumer_total"], report["waiting"], report["held"]) == (13, 12, 78, 1)
    assert not driver.drain.is_active
    assert report["error"].startswith(
        "messages wait in 12 queues without a consumer, and none could come during a drain"
    )
    assert "'lonely2', ...; start a consumer" in report["error"]
    text = left_text(report)
    assert text.startswith("78 wait and 1 are held, in lonely11 (12 waiting, 0 held, 0 consumers); lonely10")
    assert "and 3 other queues; no consumer is left for lonely11, lonely10" in text
    assert text.endswith("lonely2 and 2 other queues")


def test_report_about_many_queues_is_made_in_many_steps() -> None:
    driver = DrainDriver()
    for number in range(20 * QUEUES_PER_STEP):
        driver.send(f"queue{number}")
    # The queues are visited twice: to count their messages, and to find the largest and those without a consumer.
    assert sum(1 for _ in driver.drain.report(VERB)) >= 40
