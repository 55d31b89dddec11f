"""Tests of the reason why a consumer is idle: found in short steps, and without side effects."""

import json
from collections.abc import Generator
from typing import Any

import pytest

from tests.unit.inspection import evict_all
from truenext.broker import connection_request
from truenext.engine.background.bulk import Purge
from truenext.engine.dispatch.heads import WaitReason
from truenext.engine.engine import Engine
from truenext.engine.idle import ITEMS_PER_STEP, find_next
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.pages import PageMessage, PageResult
from truenext.engine.state.queue import Entry
from truenext.model.commands import Ack, AckMode, Credit, Nack, Send, Subscribe
from truenext.model.destination import parse_address
from truenext.model.limits import JOIN_QUEUES_PER_TURN, SCAN_MESSAGES_PER_TURN, UNSENT_BYTES_MAX
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy, WhileWaiting
from truenext.model.selector import compile_selector


class IdleDriver:
    def __init__(self, policy: Policy | None = None) -> None:
        self.engine = Engine(policies=Policies(policy or Policy()))
        self.engine.lifespan.start()
        self.commit()
        self.session = self.engine.commands.connect("s")

    def commit(self) -> None:
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.store_results.on_committed(batch)

    def send(self, queue: str, *, priority: int = 4, persistent: bool = False, group: str = "") -> None:
        message = SentMessage(priority, persistent, 0, b"content-length:0\n", b"")
        if group:
            message.group = group
        self.engine.commands.send(self.session, Send(parse_address(f"/queue/{queue}", "s"), message))

    def subscribe(
        self, queue: str, *, window: int = 1000, selector: str = "", is_pulling: bool = False
    ) -> BrokerConsumer:
        name = str(len(self.session.consumers))
        destination = parse_address(f"/queue/{queue}", "s")
        subscribe = Subscribe(name, destination, AckMode.INDIVIDUAL, window, is_pulling=is_pulling)
        if selector:
            subscribe.selector = compile_selector(selector)
        self.engine.commands.subscribe(self.session, subscribe)
        return self.session.consumers[name]

    def fail_first(self, consumer: BrokerConsumer) -> None:
        """Let the first message that a consumer holds fail: its next try is due in a minute."""
        first = next(iter(consumer.held))
        self.engine.commands.nack(self.session, Nack(consumer.subscription, first, delay_ms=60_000))

    def turn(self) -> None:
        while self.engine.has_work:
            self.engine.turn.run()

    def find_next(self, consumer: BrokerConsumer) -> Entry | WaitReason:
        found, _ = finished(find_next(self.engine, consumer))
        assert isinstance(found, Entry | WaitReason)
        return found

    def answer(self) -> tuple[dict[str, Any], int]:
        body, steps = finished(connection_request.make_connection_report(self.engine, self.session, None))
        return json.loads(body), steps


def finished(work: Generator[None, None, Any]) -> tuple[Any, int]:
    """Run the generator; return its result and the number of steps."""
    steps = 1
    while True:
        try:
            next(work)
            steps += 1
        except StopIteration as end:
            return end.value, steps


@pytest.mark.parametrize("queue", ["a", "*"])
@pytest.mark.parametrize("selector", ["", "JMSPriority > 2"])
def test_consumer_is_not_idle_if_the_next_turn_will_dispatch_to_it(queue: str, selector: str) -> None:
    driver = IdleDriver()
    consumer = driver.subscribe(queue, selector=selector)
    driver.turn()
    assert driver.find_next(consumer) is WaitReason.EMPTY
    driver.send("a")
    assert isinstance(driver.find_next(consumer), Entry)
    assert not consumer.held
    driver.turn()
    assert len(consumer.held) == 1
    assert driver.find_next(consumer) is WaitReason.EMPTY


def test_a_full_socket() -> None:
    driver = IdleDriver()
    consumer = driver.subscribe("a")
    driver.session.unsent_bytes = UNSENT_BYTES_MAX
    assert driver.find_next(consumer) is WaitReason.UNREAD


def test_a_pattern_that_has_not_joined_all_its_queues() -> None:
    driver = IdleDriver()
    for number in range(3 * JOIN_QUEUES_PER_TURN):
        driver.send(f"q.{number}", priority=number % 10)
    driver.turn()
    consumer = driver.subscribe("q.*", window=1)
    driver.engine.turn.run()
    assert driver.find_next(consumer) is WaitReason.JOINING
    driver.turn()
    assert driver.find_next(consumer) is WaitReason.NO_CREDIT


def test_idle_reason_of_a_wildcard_is_that_of_the_queue_whose_message_is_next() -> None:
    driver = IdleDriver()
    consumer = driver.subscribe("q.*")
    driver.turn()
    driver.send("q.a", persistent=True)
    driver.turn()
    assert driver.find_next(consumer) is WaitReason.COMMITTING
    driver.send("q.b")
    driver.turn()
    # It must not overtake its equal, and so nothing comes.
    assert driver.find_next(consumer) is WaitReason.COMMITTING and not consumer.held
    driver.send("q.c", priority=3)
    assert isinstance(driver.find_next(consumer), Entry)
    driver.turn()
    assert len(consumer.held) == 1
    driver.engine.commands.administering.pause("q.a")
    driver.turn()
    # A paused queue is none of its queues.
    assert len(consumer.held) == 2 and driver.find_next(consumer) is WaitReason.PAUSED


def test_idle_reason_of_a_wildcard_is_committing_also_behind_a_message_that_blocks_another_queue() -> None:
    # C7.5: it waits for the commit, although the retry holds that message back as well.
    driver = IdleDriver(Policy(while_waiting=WhileWaiting.BLOCK))
    consumer = driver.subscribe("q.*")
    driver.send("q.a")
    driver.turn()
    driver.fail_first(consumer)
    driver.send("q.a", persistent=True)
    driver.send("q.b")
    driver.turn()
    assert driver.find_next(consumer) is WaitReason.COMMITTING and not consumer.held
    driver.commit()
    driver.turn()
    assert [entry.address for entry in consumer.held.values()] == ["/queue/q.b"]


def test_idle_reason_of_a_wildcard_is_scanning_while_a_page_of_an_emptied_queue_is_read() -> None:
    driver = IdleDriver()
    driver.send("q.a", persistent=True)
    driver.commit()
    evict_all(driver.engine)
    (queue,) = driver.engine.queues.by_name.values()
    (lane,) = queue.lanes
    found = [PageMessage(lane.horizon + 1, SentMessage(4, True, 0, b"", b""))]
    consumer = driver.subscribe("q.*", selector="JMSPriority > 2")
    (scan_read,) = driver.engine.turn.run().reads
    purge = Purge("q.a")
    read = driver.engine.tasks.bulk_pieces.next_read(purge)
    assert read is not None
    assert driver.engine.tasks.bulk_pieces.execute(purge, read, PageResult(found, as_of=2, is_end=True)).count == 1
    driver.send("q.b")
    driver.turn()
    assert driver.find_next(consumer) is WaitReason.SCANNING and not consumer.held
    driver.engine.store_results.on_page_read(scan_read, PageResult(found, as_of=2, is_end=True))
    driver.turn()
    assert [entry.address for entry in consumer.held.values()] == ["/queue/q.b"]
    driver.engine.commands.administering.pause("q.a")
    assert driver.find_next(consumer) is WaitReason.EMPTY


def test_idle_reason_of_a_delayed_group_is_delayed_for_its_owner_and_group_for_others() -> None:
    driver = IdleDriver()
    first, second = driver.subscribe("a"), driver.subscribe("a")
    for _ in range(2):
        driver.send("a", group="g")
    driver.turn()
    driver.fail_first(first)
    driver.turn()
    assert (driver.find_next(first), driver.find_next(second)) == (WaitReason.DELAYED, WaitReason.GROUP)


def test_pulling_consumer_that_acknowledged_all_it_requested_has_no_credit() -> None:
    driver = IdleDriver()
    consumer = driver.subscribe("a", is_pulling=True)
    driver.engine.commands.pull(driver.session, Credit(consumer.subscription, 1))
    driver.send("a")
    driver.turn()
    (sequence,) = consumer.held
    driver.engine.commands.acknowledge(driver.session, Ack(consumer.subscription, sequence))
    assert not consumer.held and driver.find_next(consumer) is WaitReason.NO_CREDIT


def test_idle_reason_is_committing_although_less_urgent_messages_are_not_compared_yet() -> None:
    driver = IdleDriver()
    for _ in range(2 * SCAN_MESSAGES_PER_TURN):
        driver.send("a")
    consumer = driver.subscribe("a", selector="JMSPriority = 9 OR colour = 'red'")
    assert driver.find_next(consumer) is WaitReason.SCANNING
    driver.send("a", priority=9, persistent=True)
    assert driver.find_next(consumer) is WaitReason.COMMITTING


def test_idle_reason_of_a_blocked_lane_needs_no_body_of_the_blocking_message() -> None:
    driver = IdleDriver(Policy(while_waiting=WhileWaiting.BLOCK))
    consumer = driver.subscribe("a")
    driver.send("a")
    driver.turn()
    driver.fail_first(consumer)
    driver.turn()
    head = consumer.all_queues()[0].lanes[0].head()
    assert head is not None
    head.message = None
    assert driver.find_next(consumer) is WaitReason.DELAYED


def test_finding_the_idle_reason_starts_no_scan() -> None:
    """Skipped messages of a group are scanned again by a dispatch only."""
    driver = IdleDriver()
    consumer = driver.subscribe("a", window=1)
    for _ in range(30_000):
        driver.send("a", group="g")
    driver.turn()
    selecting = driver.engine.queues.selections.by_queue[consumer.all_queues()[0]]
    cursors = list(selecting.group_cursors())
    for cursor in cursors:
        for sequence in list(cursor.found):
            entry = cursor.found[sequence]
            entry.is_out_of_lane = True
    consumer.window = 2
    assert driver.find_next(consumer) is WaitReason.SCANNING
    assert not any(cursor.needs_refill for cursor in cursors) and not selecting.unfinished_cursors


def test_idle_reasons_of_many_queues_and_subscriptions_are_found_in_steps() -> None:
    driver = IdleDriver()
    queues = 1000
    for number in range(queues):
        driver.send(f"q.{number}")
    driver.subscribe("q.*", window=queues + 1)
    for number in range(100):
        driver.subscribe(f"other.{number}")
    driver.turn()
    answer, steps = driver.answer()
    assert len(answer["subscriptions"]) == 101 and {row["idle"] for row in answer["subscriptions"]} == {"empty"}
    assert steps >= 2 * queues // ITEMS_PER_STEP + 100


def test_a_subscription_that_ends_meanwhile_is_left_out() -> None:
    driver = IdleDriver()
    for number in range(200):
        driver.send(f"q.{number}")
    driver.subscribe("q.*")
    driver.subscribe("other")
    driver.turn()
    answer = connection_request.make_connection_report(driver.engine, driver.session, None)
    next(answer)
    driver.engine.commands.disconnect(driver.session, is_exempt=True)
    assert json.loads(finished(answer)[0])["subscriptions"] == []
