"""Tests of wildcard consumers: their queues, the order of messages, and the cost."""

from sys import maxsize

import pytest

from tests.property import targets
from tests.unit.inspection import run_stuck_audit
from tests.unit.test_selecting import SelectingDriver as StoreDriver
from truenext.engine.dispatch.selective import QueueDispatch
from truenext.engine.engine import Engine
from truenext.engine.queues import wildcards
from truenext.engine.state import wildcard
from truenext.engine.state.memory import JOIN_BYTES
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.stuck import STUCK_MS, StuckQueueDetector
from truenext.model.commands import Ack, AckMode, Nack, Send, Subscribe, Unsubscribe
from truenext.model.destination import parse_address
from truenext.model.limits import JOIN_QUEUES_PER_TURN
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy, WhileWaiting
from truenext.model.selector import compile_selector


class WildcardDriver:
    def __init__(self, policies: Policies | None = None) -> None:
        self.engine = Engine(policies=policies)
        self.engine.lifespan.start()
        self.commit()
        self.session = self.engine.commands.connect("s")

    def commit(self) -> None:
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.store_results.on_committed(batch)

    def send(self, queue: str, priority: int = 4, *, persistent: bool = False, topic: bool = False) -> None:
        message = SentMessage(priority, persistent, 0, b"content-length:0\n", b"")
        self.engine.commands.send(
            self.session, Send(parse_address(f"/{'topic' if topic else 'queue'}/{queue}", "s"), message)
        )

    def subscribe(self, pattern: str, *, window: int = 1000, name: str = "w", is_exclusive: bool = False) -> None:
        address = parse_address(f"/queue/{pattern}", "s")
        self.engine.commands.subscribe(
            self.session, Subscribe(name, address, AckMode.INDIVIDUAL, window, is_exclusive=is_exclusive)
        )

    def turn(self) -> list[tuple[str, str, int]]:
        """Return the dispatched messages: subscription, queue and sequence."""
        deliveries = self.engine.turn.run().deliveries
        return [
            (to.subscription, each.lane.queue.name, each.sequence) for to, got in deliveries.items() for each in got
        ]

    def join_all(self) -> list[tuple[str, str, int]]:
        """Turns until everybody has joined his queues; who got what in the last of them."""
        got = self.turn()
        while self.engine.has_work:
            assert not got, "nothing before all are joined"
            got = self.turn()
        return got

    def receive_from(self, pattern: str) -> list[str]:
        self.subscribe(pattern)
        consumer = self.session.consumers["w"]
        return sorted(queue.name for queue in consumer.all_queues())


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        (">", ["Spark", "Sparks.orders", "orders", "orders.eu"]),
        ("*", ["Spark", "orders"]),
        ("orders.*", ["orders.eu"]),
        ("*.*", ["Sparks.orders", "orders.eu"]),
        ("DLQ.>", ["DLQ.Spark.x", "DLQ.orders"]),
        ("*.orders", ["Sparks.orders"]),
        ("Consumer.>", ["Consumer.a.VirtualTopic.t"]),
        ("Spark.>", ["Spark.orders", "Spark.source.s.1.0"]),
        ("Spark.*", ["Spark.orders"]),
        ("Spark.source.>", ["Spark.source.s.1.0"]),
        ("*.source.>", []),
        ("failed.>", []),
    ],
)
def test_wildcard_matches_dlq_virtual_topic_and_spark_queues_only_by_name(pattern: str, meant: list[str]) -> None:
    # C7.3
    by_pattern = {"special": Policy(dead_letters="failed.orders"), "other": Policy(dead_letters="Spark.failed")}
    driver = WildcardDriver(Policies(Policy(), by_pattern))
    for queue in ("orders", "orders.eu", "DLQ.orders", "Consumer.a.VirtualTopic.t", "failed.orders"):
        driver.send(queue)
    for queue in ("Spark", "Spark.orders", "Spark.source.s.1.0", "Spark.failed", "Sparks.orders", "DLQ.Spark.x"):
        driver.send(queue)
    for address in ("/temp-queue/private", "/topic/news"):
        driver.engine.commands.subscribe(
            driver.session, Subscribe(address, parse_address(address, "s"), AckMode.INDIVIDUAL, 1)
        )
    news = Subscribe("d", parse_address("/topic/news.>", "s"), AckMode.INDIVIDUAL, 1, durable_key="me,d")
    driver.engine.commands.subscribe(driver.session, news)
    assert driver.receive_from(pattern) == meant


def test_a_queue_that_a_dead_letter_makes_is_taken_from_in_the_same_turn_as_that_is_durable() -> None:
    driver = WildcardDriver()
    driver.subscribe("DLQ.*")
    driver.subscribe("*", name="all")
    driver.send("a")
    assert driver.turn() == [("all", "a", 1)]
    driver.engine.commands.nack(driver.session, Nack("all", 1, is_rejected=True))
    assert driver.turn() == []
    driver.commit()
    assert driver.turn() == [("w", "DLQ.a", 2)]


def test_only_messages_of_equal_priority_wait_for_a_commit_in_another_queue() -> None:
    # C7.5
    driver = WildcardDriver()
    driver.subscribe("*")
    driver.send("a", persistent=True)
    driver.send("b")
    driver.send("b", 3)
    driver.send("b", 5)
    assert driver.turn() == [("w", "b", 4), ("w", "b", 3)]
    driver.commit()
    assert driver.turn() == [("w", "a", 1), ("w", "b", 2)]


def test_wildcard_consumer_waits_for_a_commit_that_started_before_its_subscription() -> None:
    driver = WildcardDriver()
    driver.send("a", persistent=True)
    driver.send("b")
    driver.subscribe("*")
    assert driver.turn() == []
    driver.commit()
    assert driver.turn() == [("w", "a", 1), ("w", "b", 2)]


def test_consumer_of_a_single_queue_waits_for_no_other_queue() -> None:
    driver = WildcardDriver()
    driver.subscribe("*")
    driver.subscribe("b", name="one")
    driver.send("a", persistent=True)
    driver.send("b")
    assert driver.turn() == [("one", "b", 2)]


def test_express_dispatch_reads_evicted_messages_although_a_wildcard_has_the_queue_too() -> None:
    driver = StoreDriver()
    driver.subscribe("express", window=2, has_express=True)
    driver.engine.commands.subscribe(
        driver.session, Subscribe("w", parse_address("/queue/>", "s"), AckMode.INDIVIDUAL, 1)
    )
    driver.send("0", "1", "2", priority=1)
    driver.settle()
    driver.send("urgent", priority=9, persistent=True)
    driver.evict()
    assert driver.settle() == {"express": ["urgent"]}


def test_unread_delayed_message_that_may_be_unselected_lets_no_other_queue_overtake() -> None:
    """Fixed: it counted as wanted before it was read, so nothing of its queue seemed to be ready, and a message of
    another queue came first."""
    driver = StoreDriver(Policy(while_waiting=WhileWaiting.BLOCK, first_delay_ms=60_000, delay_ms=60_000, page_size=1))
    # Queues are compared in the order in which they were made.
    driver.engine.commands.administering.pause("b")
    driver.engine.commands.administering.resume("b")
    driver.subscribe("first")
    driver.send("not wanted", persistent=True)
    driver.send("next", colour="red", persistent=True)
    assert driver.settle() == {"first": ["not wanted", "next"]}
    driver.engine.state.memory.limit = 0
    driver.engine.evict()
    driver.commit()
    driver.engine.commands.nack(driver.session, Nack("first", driver.entries["first"][0].sequence))
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("first"))
    driver.engine.state.memory.limit = maxsize
    other = SentMessage(4, True, 0, b"colour:red\n", b"behind it")
    driver.engine.commands.send(driver.session, Send(parse_address("/queue/b", "s"), other))
    selector = compile_selector("colour = 'red'")
    driver.engine.commands.subscribe(
        driver.session, Subscribe("w", parse_address("/queue/*", "s"), AckMode.INDIVIDUAL, 1, selector=selector)
    )
    assert driver.settle() == {"w": ["next"]}


def test_commit_in_flight_holds_back_a_later_wildcard_consumer_also_after_an_eviction() -> None:
    """Fixed: a consumer of a pattern that came then did not know of it, and got what is behind it in another queue."""
    driver = WildcardDriver()
    driver.subscribe("a", name="one", window=1)
    grouped = SentMessage(4, True, 0, b"JMSXGroupID:g\n", b"", group="g")
    driver.engine.commands.send(driver.session, Send(parse_address("/queue/a", "s"), grouped))
    driver.send("a", persistent=True)
    driver.engine.state.memory.limit = 400
    driver.engine.evict()
    driver.engine.state.memory.limit = maxsize
    driver.subscribe(">", is_exclusive=True)
    driver.send("b")
    assert driver.turn() == []
    driver.commit()
    assert driver.turn() == [("w", "a", 1), ("w", "a", 2), ("w", "b", 3)]


def test_paused_queue_does_not_hold_back_a_wildcard_consumer() -> None:
    # C7.6
    driver = WildcardDriver()
    driver.subscribe("*")
    driver.send("a", persistent=True)
    driver.send("b")
    assert driver.turn() == []
    driver.engine.commands.administering.pause("a")
    assert driver.turn() == [("w", "b", 2)]
    driver.commit()
    assert driver.turn() == []
    driver.engine.commands.administering.resume("a")
    assert driver.turn() == [("w", "a", 1)]


def test_an_exclusive_consumer_of_one_queue_keeps_that_from_others_and_nothing_else() -> None:
    # C7.6
    driver = WildcardDriver()
    driver.subscribe("*")
    driver.subscribe("a", name="own", is_exclusive=True, window=1)
    for queue in "aab":
        driver.send(queue)
    assert sorted(driver.turn()) == [("own", "a", 1), ("w", "b", 3)]
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("own"))
    assert driver.turn() == [("w", "a", 1), ("w", "a", 2)]


def test_an_exclusive_one_of_a_pattern_is_exclusive_in_each_queue() -> None:
    # C7.9
    driver = WildcardDriver()
    driver.subscribe("a", name="one")
    driver.subscribe("*", is_exclusive=True, window=1)
    for queue in "ab":
        driver.send(queue)
    assert driver.turn() == [("w", "a", 1)]
    driver.engine.commands.acknowledge(driver.session, Ack("w", 1))
    assert driver.turn() == [("w", "b", 2)]


def test_wildcard_consumers_without_credit_have_nothing_read() -> None:
    # Fixed: short of memory, the next message of each was read, evicted and read again, for ever.
    driver = StoreDriver()
    driver.send("1", "2", "3", "4", colour="blue", priority=9)
    driver.send("5", "6", "7", "8", colour="red")
    for name, selector in (("w", "colour = 'blue'"), ("v", "colour = 'red'")):
        driver.engine.commands.subscribe(
            driver.session,
            Subscribe(
                name,
                parse_address("/queue/*", "s"),
                AckMode.INDIVIDUAL,
                1,
                selector=compile_selector(selector),
            ),
        )
    assert driver.settle() == {"w": ["1"], "v": ["5"]}
    driver.subscribe("first")
    assert len(driver.settle()["first"]) == 6
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("first"))
    driver.turn()
    driver.engine.state.memory.limit = 0
    driver.evict()
    driver.evict()
    driver.send("9")
    pages = driver.pages
    for _ in range(5):
        driver.turn()
        driver.read_pages()
        driver.evict()
    assert driver.settle() == {} and driver.pages == pages
    driver.acknowledge("w")
    assert driver.settle() == {"w": ["2"]}


def test_a_message_costs_its_own_queue_and_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    head_for = QueueDispatch.lane_head_for

    def counting(way: QueueDispatch, *arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        return head_for(way, *arguments, **options)  # type: ignore[arg-type]

    driver = WildcardDriver()
    for number in range(500):
        driver.send(f"q.{number}", number % 10)
    driver.subscribe("q.*", window=1)
    driver.join_all()
    monkeypatch.setattr(QueueDispatch, "lane_head_for", counting)
    for _ in range(499):
        (sequence,) = driver.session.consumers["w"].held
        driver.engine.commands.acknowledge(driver.session, Ack("w", sequence))
        assert len(driver.turn()) == 1
    assert calls <= 499 * 30


def test_heads_that_are_no_longer_true_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wildcard, "STALE_MIN", 4)
    driver = WildcardDriver()
    driver.subscribe("*", window=1)
    driver.send("b")
    assert driver.turn() == [("w", "b", 1)]
    driver.subscribe("a", name="one", window=1)
    driver.send("a")
    for sequence in range(2, 200):
        driver.send("a")
        assert driver.turn() == [("one", "a", sequence)], "the other one has no credit"
        driver.engine.commands.acknowledge(driver.session, Ack("one", sequence))
    consumer = driver.session.consumers["w"]
    assert isinstance(consumer, Wildcard)
    assert all(len(heap) <= 8 for heap in consumer.heads)


# Many queues


def test_wildcard_consumer_joins_some_queues_in_each_turn_and_gets_nothing_before_the_last() -> None:
    # C7.2
    driver = WildcardDriver()
    for number in range(2 * JOIN_QUEUES_PER_TURN + 1):
        driver.send(f"q.{number}", priority=number % 10)
    driver.subscribe("q.*", window=3)
    consumer = driver.session.consumers["w"]
    joined = []
    while not driver.turn():
        joined.append(len(consumer.all_queues()))
    assert joined == [2 * JOIN_QUEUES_PER_TURN] and len(consumer.all_queues()) == 2 * JOIN_QUEUES_PER_TURN + 1
    assert [entry.lane.queue.name for entry in consumer.held.values()] == ["q.9", "q.19", "q.29"]


def test_queues_made_while_a_wildcard_consumer_joins_are_joined_and_removed_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wildcards, "JOIN_QUEUES_PER_TURN", 2)
    driver = WildcardDriver()
    for name in ("q.1", "q.2", "q.3", "q.4", "q.5", "q.6"):
        driver.send(name)
    driver.subscribe("q.*")
    driver.send("q.new")
    queues = targets.queues(driver.engine)
    removed, again = queues["q.1"], queues["q.2"]
    for queue in (removed, again):
        targets.REMOVE_QUEUE.of(driver.engine)(queue)
    driver.send("q.2")
    got = driver.join_all()
    assert sorted(queue for _, queue, _ in got) == ["q.2", "q.3", "q.4", "q.5", "q.6", "q.new"]
    assert not {removed, again} & set(driver.session.consumers["w"].all_queues())


def test_wildcard_consumer_that_ends_while_it_joins_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wildcards, "JOIN_QUEUES_PER_TURN", 2)
    driver = WildcardDriver()
    for number in range(10):
        driver.send(f"q.{number}")
    driver.subscribe("q.*", name="first")
    driver.join_all()
    before = driver.engine.state.memory.queue_bytes
    driver.subscribe("q.*")
    assert driver.engine.state.memory.queue_bytes > before + 10 * JOIN_BYTES, "it is counted before it has joined"
    driver.turn()
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("w"))
    driver.turn()
    assert driver.engine.state.memory.queue_bytes == before and not driver.engine.has_work
    assert all(
        len(driver.engine.state.clients.receivers_of(queue).wildcards) == 1
        for queue in driver.engine.queues.by_name.values()
    )


def test_a_queue_is_not_stuck_while_its_consumer_has_others_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wildcards, "JOIN_QUEUES_PER_TURN", 1)
    driver = WildcardDriver()
    for number in range(3):
        driver.send(f"q.{number}")
    driver.subscribe("q.*")
    driver.turn()
    audit = StuckQueueDetector()
    for now_ms in (0, STUCK_MS + 1, 2 * STUCK_MS + 2):
        driver.engine.state.commit_state.tick(now_ms * 1000, now_ms * 1000)
        assert run_stuck_audit(audit, driver.engine) == []
    assert len(driver.join_all()) == 3


def test_leaving_wildcard_consumer_touches_only_queues_where_that_may_change_something() -> None:
    driver = WildcardDriver()
    for number in range(300):
        driver.send(f"q.{number}")
    for name in ("w", "leaves"):
        driver.subscribe("q.*", name=name, window=1)
        driver.join_all()
    driver.subscribe("q.7", name="one", window=1)
    driver.turn()
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("leaves"))
    touched = {queue.name for queue in targets.touched(driver.engine)}
    # That of what it held, and the one from which somebody takes alone.
    assert "q.7" in touched and len(touched) <= 2
