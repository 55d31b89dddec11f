"""Which queues does a consumer of a pattern take from, in what order, and at what cost?"""

from sys import maxsize

import pytest

from tests.property import rooms
from tests.unit.looking import looked
from tests.unit.test_selecting import World as StoredWorld
from truenext.commands import Ack, AckMode, Nack, Send, Subscribe, Unsubscribe
from truenext.destination import parse
from truenext.engine.dispatch.selective import QueueDispatch
from truenext.engine.engine import Engine
from truenext.engine.queues import wildcards
from truenext.engine.state import wildcard
from truenext.engine.state.memory import JOIN_BYTES
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.stuck import STUCK_MS, StuckAudit
from truenext.limits import JOIN_QUEUES_PER_TURN
from truenext.message import SentMessage
from truenext.policy import Policies, Policy, WhileWaiting
from truenext.selector import compile_selector


class World:
    def __init__(self, policies: Policies | None = None) -> None:
        self.engine = Engine(policies=policies)
        self.engine.start()
        self.commit()
        self.session = self.engine.connect("s")

    def commit(self) -> None:
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.committed(batch)

    def send(self, queue: str, priority: int = 4, *, persistent: bool = False, topic: bool = False) -> None:
        message = SentMessage(priority, persistent, 0, b"content-length:0\n", b"")
        self.engine.send(self.session, Send(parse(f"/{'topic' if topic else 'queue'}/{queue}", "s"), message))

    def subscribe(self, pattern: str, *, window: int = 1000, name: str = "w", is_exclusive: bool = False) -> None:
        address = parse(f"/queue/{pattern}", "s")
        self.engine.subscribe(
            self.session, Subscribe(name, address, AckMode.INDIVIDUAL, window, is_exclusive=is_exclusive)
        )

    def turn(self) -> list[tuple[str, str, int]]:
        """Who got what: subscription, queue and sequence."""
        deliveries = self.engine.turn().deliveries
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

    def taken_by(self, pattern: str) -> list[str]:
        self.subscribe(pattern)
        consumer = self.session.consumers["w"]
        return sorted(queue.name for queue in consumer.all_queues())


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        (">", ["orders", "orders.eu"]),
        ("*", ["orders"]),
        ("orders.*", ["orders.eu"]),
        ("*.*", ["orders.eu"]),
        ("DLQ.>", ["DLQ.orders"]),
        ("*.orders", []),
        ("Consumer.>", ["Consumer.a.VirtualTopic.t"]),
        ("failed.>", []),
    ],
)
def test_dead_letters_and_virtual_topics_are_meant_by_name_alone_and_what_is_not_ordinary_never(
    pattern: str, meant: list[str]
) -> None:
    world = World(Policies(Policy(), {"special": Policy(dead_letters="failed.orders")}))
    for queue in ("orders", "orders.eu", "DLQ.orders", "Consumer.a.VirtualTopic.t", "failed.orders"):
        world.send(queue)
    for address in ("/temp-queue/private", "/topic/news"):
        world.engine.subscribe(world.session, Subscribe(address, parse(address, "s"), AckMode.INDIVIDUAL, 1))
    news = Subscribe("d", parse("/topic/news.>", "s"), AckMode.INDIVIDUAL, 1, durable="me,d")
    world.engine.subscribe(world.session, news)
    assert world.taken_by(pattern) == meant


def test_a_queue_that_a_dead_letter_makes_is_taken_from_in_the_same_turn_as_that_is_durable() -> None:
    world = World()
    world.subscribe("DLQ.*")
    world.subscribe("*", name="all")
    world.send("a")
    assert world.turn() == [("all", "a", 1)]
    world.engine.nack(world.session, Nack("all", 1, is_rejected=True))
    assert world.turn() == []
    world.commit()
    assert world.turn() == [("w", "DLQ.a", 2)]


def test_equals_wait_for_what_is_being_committed_in_another_queue_and_others_do_not() -> None:
    world = World()
    world.subscribe("*")
    world.send("a", persistent=True)
    world.send("b")
    world.send("b", 3)
    world.send("b", 5)
    assert world.turn() == [("w", "b", 4), ("w", "b", 3)]
    world.commit()
    assert world.turn() == [("w", "a", 1), ("w", "b", 2)]


def test_what_was_being_committed_before_the_subscription_is_waited_for_as_well() -> None:
    world = World()
    world.send("a", persistent=True)
    world.send("b")
    world.subscribe("*")
    assert world.turn() == []
    world.commit()
    assert world.turn() == [("w", "a", 1), ("w", "b", 2)]


def test_who_takes_from_one_queue_alone_waits_for_no_other() -> None:
    world = World()
    world.subscribe("*")
    world.subscribe("b", name="one")
    world.send("a", persistent=True)
    world.send("b")
    assert world.turn() == [("one", "b", 2)]


def test_the_express_lane_reads_what_has_left_memory_though_a_wildcard_takes_from_the_queue_as_well() -> None:
    world = StoredWorld()
    world.subscribe("express", window=2, has_express=True)
    world.engine.subscribe(world.session, Subscribe("w", parse("/queue/>", "s"), AckMode.INDIVIDUAL, 1))
    world.send("0", "1", "2", priority=1)
    world.settle()
    world.send("urgent", priority=9, persistent=True)
    world.leave_memory()
    assert world.settle() == {"express": ["urgent"]}


def test_what_waits_for_its_next_try_without_its_body_does_not_let_who_may_not_want_it_overtake() -> None:
    """Fixed: it counted as wanted before it was read, so nothing of its queue seemed to be ready, and a message of
    another queue came first."""
    world = StoredWorld(Policy(while_waiting=WhileWaiting.BLOCK, first_delay_ms=60_000, delay_ms=60_000, page_size=1))
    # Queues are compared in the order in which they were made.
    world.engine.pause("b")
    world.engine.resume("b")
    world.subscribe("first")
    world.send("not wanted", persistent=True)
    world.send("next", colour="red", persistent=True)
    assert world.settle() == {"first": ["not wanted", "next"]}
    world.engine.memory.limit = 0
    world.engine.evict()
    world.commit()
    world.engine.nack(world.session, Nack("first", world.entries["first"][0].sequence))
    world.engine.unsubscribe(world.session, Unsubscribe("first"))
    world.engine.memory.limit = maxsize
    other = SentMessage(4, True, 0, b"colour:red\n", b"behind it")
    world.engine.send(world.session, Send(parse("/queue/b", "s"), other))
    wanted = compile_selector("colour = 'red'")
    world.engine.subscribe(
        world.session, Subscribe("w", parse("/queue/*", "s"), AckMode.INDIVIDUAL, 1, selector=wanted)
    )
    assert world.settle() == {"w": ["next"]}


def test_what_is_being_committed_holds_back_who_comes_later_though_it_had_left_memory_and_come_back() -> None:
    """Fixed: a consumer of a pattern that came then did not know of it, and got what is behind it in another queue."""
    world = World()
    world.subscribe("a", name="one", window=1)
    grouped = SentMessage(4, True, 0, b"JMSXGroupID:g\n", b"", group="g")
    world.engine.send(world.session, Send(parse("/queue/a", "s"), grouped))
    world.send("a", persistent=True)
    world.engine.memory.limit = 400
    world.engine.evict()
    world.engine.memory.limit = maxsize
    world.subscribe(">", is_exclusive=True)
    world.send("b")
    assert world.turn() == []
    world.commit()
    assert world.turn() == [("w", "a", 1), ("w", "a", 2), ("w", "b", 3)]


def test_a_paused_queue_holds_nobody_back() -> None:
    world = World()
    world.subscribe("*")
    world.send("a", persistent=True)
    world.send("b")
    assert world.turn() == []
    world.engine.pause("a")
    assert world.turn() == [("w", "b", 2)]
    world.commit()
    assert world.turn() == []
    world.engine.resume("a")
    assert world.turn() == [("w", "a", 1)]


def test_an_exclusive_consumer_of_one_queue_keeps_that_from_others_and_nothing_else() -> None:
    world = World()
    world.subscribe("*")
    world.subscribe("a", name="own", is_exclusive=True, window=1)
    for queue in "aab":
        world.send(queue)
    assert sorted(world.turn()) == [("own", "a", 1), ("w", "b", 3)]
    world.engine.unsubscribe(world.session, Unsubscribe("own"))
    assert world.turn() == [("w", "a", 1), ("w", "a", 2)]


def test_an_exclusive_one_of_a_pattern_is_exclusive_in_each_queue() -> None:
    world = World()
    world.subscribe("a", name="one")
    world.subscribe("*", is_exclusive=True, window=1)
    for queue in "ab":
        world.send(queue)
    assert world.turn() == [("w", "a", 1)]
    world.engine.acknowledge(world.session, Ack("w", 1))
    assert world.turn() == [("w", "b", 2)]


def test_a_message_costs_its_own_queue_and_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    head_for = QueueDispatch.head_for

    def counting(way: QueueDispatch, *arguments: object) -> object:
        nonlocal asked
        asked += 1
        return head_for(way, *arguments)  # type: ignore[arg-type]

    world = World()
    for number in range(500):
        world.send(f"q.{number}", number % 10)
    world.subscribe("q.*", window=1)
    world.join_all()
    monkeypatch.setattr(QueueDispatch, "head_for", counting)
    for _ in range(499):
        (sequence,) = world.session.consumers["w"].held
        world.engine.acknowledge(world.session, Ack("w", sequence))
        assert len(world.turn()) == 1
    assert asked <= 499 * 30


def test_heads_that_are_no_longer_true_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wildcard, "STALE_MIN", 4)
    world = World()
    world.subscribe("*", window=1)
    world.send("b")
    assert world.turn() == [("w", "b", 1)]
    world.subscribe("a", name="one", window=1)
    world.send("a")
    for sequence in range(2, 200):
        world.send("a")
        assert world.turn() == [("one", "a", sequence)], "the other one has no credit"
        world.engine.acknowledge(world.session, Ack("one", sequence))
    consumer = world.session.consumers["w"]
    assert isinstance(consumer, Wildcard)
    assert all(len(heap) <= 8 for heap in consumer.heads)


# Many queues


def test_who_joins_many_queues_joins_some_in_each_turn_and_gets_nothing_before_it_has_joined_all() -> None:
    world = World()
    for number in range(2 * JOIN_QUEUES_PER_TURN + 1):
        world.send(f"q.{number}", priority=number % 10)
    world.subscribe("q.*", window=3)
    consumer = world.session.consumers["w"]
    joined = []
    while not world.turn():
        joined.append(len(consumer.all_queues()))
    assert joined == [2 * JOIN_QUEUES_PER_TURN] and len(consumer.all_queues()) == 2 * JOIN_QUEUES_PER_TURN + 1
    assert [entry.lane.queue.name for entry in consumer.held.values()] == ["q.9", "q.19", "q.29"]


def test_queues_that_come_and_go_while_somebody_joins_are_joined_and_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wildcards, "JOIN_QUEUES_PER_TURN", 2)
    world = World()
    for name in ("q.1", "q.2", "q.3", "q.4", "q.5", "q.6"):
        world.send(name)
    world.subscribe("q.*")
    world.send("q.new")
    queues = rooms.queues(world.engine)
    gone, again = queues["q.1"], queues["q.2"]
    for queue in (gone, again):
        rooms.REMOVE_QUEUE.of(world.engine)(queue)
    world.send("q.2")
    got = world.join_all()
    assert sorted(queue for _, queue, _ in got) == ["q.2", "q.3", "q.4", "q.5", "q.6", "q.new"]
    assert not {gone, again} & set(world.session.consumers["w"].all_queues())


def test_who_ends_while_it_joins_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wildcards, "JOIN_QUEUES_PER_TURN", 2)
    world = World()
    for number in range(10):
        world.send(f"q.{number}")
    world.subscribe("q.*", name="first")
    world.join_all()
    before = world.engine.memory.queues
    world.subscribe("q.*")
    assert world.engine.memory.queues > before + 10 * JOIN_BYTES, "it is counted before it has joined"
    world.turn()
    world.engine.unsubscribe(world.session, Unsubscribe("w"))
    world.turn()
    assert world.engine.memory.queues == before and not world.engine.has_work
    assert all(len(world.engine.clients.receivers_of(queue).wildcards) == 1 for queue in world.engine.queues())


def test_a_queue_is_not_stuck_while_its_consumer_has_others_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wildcards, "JOIN_QUEUES_PER_TURN", 1)
    world = World()
    for number in range(3):
        world.send(f"q.{number}")
    world.subscribe("q.*")
    world.turn()
    audit = StuckAudit()
    for now_ms in (0, STUCK_MS + 1, 2 * STUCK_MS + 2):
        world.engine.tick(now_ms * 1000, now_ms * 1000)
        assert looked(audit, world.engine) == []
    assert len(world.join_all()) == 3


def test_when_somebody_leaves_queues_are_looked_at_only_where_that_may_change_something() -> None:
    world = World()
    for number in range(300):
        world.send(f"q.{number}")
    for name in ("w", "leaves"):
        world.subscribe("q.*", name=name, window=1)
        world.join_all()
    world.subscribe("q.7", name="one", window=1)
    world.turn()
    world.engine.unsubscribe(world.session, Unsubscribe("leaves"))
    touched = {queue.name for queue in rooms.touched(world.engine)}
    # That of what it held, and the one from which somebody takes alone.
    assert "q.7" in touched and len(touched) <= 2
