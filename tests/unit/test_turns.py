"""Tests of turns that do a part of their work and leave the rest to the next ones, and of the limits of what a
connection or a transaction may hold."""

from collections.abc import Iterable
from itertools import pairwise

import pytest

from tests.property import targets
from truenext.engine.commands import sending
from truenext.engine.engine import Engine
from truenext.engine.memory.eviction import EVICTED_BYTES_PER_BATCH
from truenext.engine.queues import wildcards
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.queue import Queue
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Abort, Ack, AckMode, Begin, Commit, Nack, Send, Subscribe, Unsubscribe
from truenext.model.destination import parse_address
from truenext.model.limits import GATHERING_BYTES_MAX, TRANSACTION_MESSAGES_MAX
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy
from truenext.model.selector import compile_selector

LARGE = 1 << 30


class TurnDriver:
    """Engine with one connection, and the state of its clock."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.engine = Engine(memory=MemoryBudget(LARGE), policies=Policies(policy or Policy()))
        self.tick(1_000_000)
        self.engine.lifespan.start()
        self.commit()
        self.session: ConnectionState = self.engine.commands.connect("s")

    def tick(self, now_ms: int) -> None:
        self.engine.state.commit_state.tick(now_ms * 1000, now_ms * 1000)

    def commit(self) -> None:
        while (batch := self.engine.take_batch()) is not None:
            self.engine.store_results.on_committed(batch)

    def send(
        self,
        queue: str,
        *,
        priority: int = 4,
        persistent: bool = False,
        expires_ms: int = 0,
        body: bytes = b"",
        transaction: str | None = None,
    ) -> None:
        message = SentMessage(priority, persistent, expires_ms, b"content-length:%d\n" % len(body), body)
        self.engine.commands.send(self.session, Send(parse_address(f"/queue/{queue}", "s"), message, transaction))

    def subscribe(
        self,
        queue: str,
        *,
        name: str = "",
        window: int = 1000,
        selector: str | None = None,
        has_express: bool = False,
        is_exclusive: bool = False,
    ) -> None:
        compiled = None if selector is None else compile_selector(selector)
        address = parse_address(f"/queue/{queue}", "s")
        subscribe = Subscribe(
            name or queue,
            address,
            AckMode.INDIVIDUAL,
            window,
            selector=compiled,
            has_express=has_express,
            is_exclusive=is_exclusive,
        )
        self.engine.commands.subscribe(self.session, subscribe)

    def ack(self, subscription: str, sequence: int, transaction: str | None = None) -> None:
        self.engine.commands.acknowledge(self.session, Ack(subscription, sequence, transaction))

    def turn(self) -> list[tuple[str, int]]:
        """Return the queues and sequences of the messages that a turn dispatches."""
        deliveries = self.engine.turn.run().deliveries
        return [(each.lane.queue.name, each.sequence) for entries in deliveries.values() for each in entries]

    def turns(self) -> list[list[str]]:
        """Return the queues of the dispatched messages of each turn, until no turn has work."""
        dispatched = []
        while self.engine.has_work:
            dispatched.append([queue for queue, _ in self.turn()])
            assert len(dispatched) < 100, "the engine never comes to rest"
        return dispatched

    def waiting_count(self, queues: Iterable[str]) -> int:
        return sum(self.find_queue(name).waiting_count() for name in queues)

    def find_queue(self, name: str) -> Queue:
        return next(queue for queue in self.engine.queues.by_name.values() if queue.name == name)


def limit_turns(patch: pytest.MonkeyPatch, dispatches: int) -> None:
    targets.DISPATCHES_PER_TURN.replace(patch, dispatches)
    targets.DISPATCHES_OF_WILDCARDS_PER_TURN.replace(patch, dispatches)


def limit_held(patch: pytest.MonkeyPatch, held_max: int) -> None:
    targets.HELD_MAX.replace(patch, held_max)
    targets.HELD_MAX_TO_COUNT.replace(patch, held_max)


def driver_with_nine_and_one(selector: str | None) -> TurnDriver:
    """Return a driver of which queue a has nine messages for a consumer with the selector, and queue b has one."""
    driver = TurnDriver()
    driver.subscribe("a", selector=selector)
    driver.subscribe("b")
    for _ in range(9):
        driver.send("a")
    driver.send("b")
    return driver


# Dispatch -------------------------------------------------------------------------------------------------------------


def test_turn_with_more_changed_queues_than_its_limit_leaves_the_others_to_the_next_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_turns(monkeypatch, 4)
    driver = TurnDriver()
    for name in "abcde":
        driver.send(name)
        driver.subscribe(name)
    # A queue and a message count as one each.
    assert driver.turns() == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize("selector", [None, "JMSPriority = 4"])
def test_changed_queues_share_a_turn(monkeypatch: pytest.MonkeyPatch, selector: str | None) -> None:
    # Thousands of queues with many messages each kept a queue with one message waiting for seconds.
    limit_turns(monkeypatch, 8)
    driver = driver_with_nine_and_one(selector)
    first, *others = driver.turns()
    assert first == [*"aaaa", "b"]
    assert sum(turn.count("a") for turn in (first, *others)) == 9


@pytest.mark.parametrize("selector", [None, "JMSPriority = 4"])
def test_queue_that_a_turn_cut_goes_behind_the_queues_that_wait(
    monkeypatch: pytest.MonkeyPatch, selector: str | None
) -> None:
    limit_turns(monkeypatch, 2)
    driver = driver_with_nine_and_one(selector)
    first, second, *others = driver.turns()
    assert set(first) == {"a"} and second[0] == "b"
    assert sum(turn.count("a") for turn in (first, second, *others)) == 9


def test_wildcard_consumer_gets_nothing_until_all_changed_queues_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    targets.SEARCHES_MIN.replace(monkeypatch, 2)
    driver = TurnDriver()
    driver.subscribe("x.>", window=2)
    for name in "abcd":
        driver.send(f"x.{name}")
    driver.send("x.e", priority=9)
    assert driver.turns() == [[], [], ["x.e", "x.a"]], "the true nexts, though other queues were searched first"


@pytest.mark.parametrize(("selector", "expired_max"), [(None, 4), ("JMSPriority = 4", 4 + 3)])
def test_turn_with_more_expired_messages_than_its_limit_leaves_the_others_to_the_next_turns(
    monkeypatch: pytest.MonkeyPatch, selector: str | None, expired_max: int
) -> None:
    limit_turns(monkeypatch, 4)
    targets.EXPIRED_PER_TURN.replace(monkeypatch, 3)
    driver = TurnDriver()
    for name in "abc":
        for _ in range(4):
            driver.send(name, expires_ms=2_000_000)
        driver.send(name)
    driver.tick(3_000_000)
    for name in "abc":
        driver.subscribe(name, selector=selector)
    left = [driver.waiting_count("abc")]
    dispatched: list[str] = []
    while driver.engine.has_work:
        dispatched += [queue for queue, _ in driver.turn()]
        left.append(driver.waiting_count("abc"))
    assert max(before - after for before, after in pairwise(left)) <= expired_max
    assert sorted(dispatched) == ["a", "b", "c"] and not left[-1]


def test_messages_that_are_due_are_dispatched_in_order_once_all_have_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = TurnDriver(Policy(attempts_max=5, first_delay_ms=1000))
    driver.subscribe("a")
    for _ in range(5):
        driver.send("a")
    sequences = [sequence for _, sequence in driver.turn()]
    # The last one is due first.
    for number, sequence in enumerate(reversed(sequences)):
        driver.tick(1_000_000 + number)
        driver.engine.commands.nack(driver.session, Nack("a", sequence))
    assert not driver.turns()[-1]
    targets.RETRIES_PER_TURN.replace(monkeypatch, 2)
    driver.tick(1_010_000)
    assert driver.engine.has_work and not driver.turn()
    assert driver.engine.has_work and not driver.turn()
    assert [sequence for _, sequence in driver.turn()] == sequences


def test_wildcard_consumer_that_ends_leaves_its_queues_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wildcards, "LEAVE_QUEUES_PER_TURN", 2)
    driver = TurnDriver()
    for name in "abcde":
        driver.send(f"x.{name}")
    driver.subscribe("x.>", window=1)
    driver.turns()
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("x.>"))
    driver.subscribe("x.>", name="other")
    queues = [driver.find_queue(f"x.{name}") for name in "abcde"]
    counts = []
    while driver.engine.has_work:
        driver.turn()
        counts.append(sum(len(targets.receivers_of(driver.engine, queue).all()) for queue in queues))
    assert counts[-1] == 5 and len(counts) > 1, "only the other consumer is left"


def test_exclusive_wildcard_consumer_that_ends_holds_nothing_back_while_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets.LEAVE_QUEUES_PER_TURN.replace(monkeypatch, 1)
    driver = TurnDriver()
    for name in "abc":
        driver.send(f"x.{name}")
    for number in range(3):
        driver.subscribe("x.>", name=f"exclusive {number}", window=1, is_exclusive=True)
    driver.subscribe("x.>", name="other")
    assert [queue for turn in driver.turns() for queue in turn] == ["x.a"]
    for number in range(3):
        driver.engine.commands.unsubscribe(driver.session, Unsubscribe(f"exclusive {number}"))
    assert [queue for queue, _ in driver.turn()] == ["x.a", "x.b", "x.c"]
    assert len(targets.receivers_of(driver.engine, driver.find_queue("x.a")).all()) > 1, "they are still leaving"


# Held messages and transactions ---------------------------------------------------------------------------------------


def test_connection_that_holds_too_much_gets_nothing_until_it_acknowledges(monkeypatch: pytest.MonkeyPatch) -> None:
    # C4.14
    limit_held(monkeypatch, 3)
    driver = TurnDriver()
    driver.subscribe("a", window=2, has_express=True)
    driver.subscribe("b")
    for name in "aab":
        driver.send(name)
    held = driver.turn()
    assert [queue for queue, _ in held] == ["a", "a", "b"]
    driver.send("b")
    driver.send("a", priority=9)
    assert driver.turns() == [[]], "neither by credit nor by express dispatch"
    driver.ack("b", held[2][1])
    # The queue that has changed goes first. Another turn follows, because the connection is full again.
    assert driver.turns() == [["b", "a"], []]


def test_acknowledgement_in_an_open_transaction_gives_a_full_connection_no_credit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # C4.14
    limit_held(monkeypatch, 2)
    driver = TurnDriver()
    driver.subscribe("a")
    for _ in "12":
        driver.send("a")
    (_, first), _ = driver.turn()
    driver.send("a")
    driver.engine.commands.begin(driver.session, Begin("t"))
    driver.ack("a", first, "t")
    assert driver.turns() == [[]]
    driver.engine.commands.commit(driver.session, Commit("t"))
    # The broker runs a turn after each command.
    assert [queue for queue, _ in driver.turn()] == ["a"]


def test_messages_that_a_wildcard_consumer_holds_count_twice_until_a_transaction_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # C4.14
    limit_held(monkeypatch, 4)
    driver = TurnDriver()
    driver.subscribe("x.>")
    driver.subscribe("a")
    for name in ("x.a", "a"):
        driver.send(name)
        driver.turn()
    driver.send("x.b")
    ((_, first),) = driver.turn()
    driver.send("a")
    assert driver.turns() == [[]], "three messages count five times"
    driver.engine.commands.begin(driver.session, Begin("t"))
    driver.ack("x.>", first, "t")
    assert driver.turns() == [[]], "two times, and once each"
    driver.engine.commands.commit(driver.session, Commit("t"))
    assert [queue for queue, _ in driver.turn()] == ["a"]


def test_full_connection_that_unsubscribes_gets_messages_of_its_other_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    # C4.14
    limit_held(monkeypatch, 2)
    driver = TurnDriver()
    driver.subscribe("a")
    driver.subscribe("b")
    for name in "aab":
        driver.send(name)
        driver.turn()
    assert not driver.engine.has_work
    driver.engine.commands.unsubscribe(driver.session, Unsubscribe("a"))
    assert driver.turns() == [["b"]]


def test_transaction_that_sends_to_too_many_queues_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "TRANSACTION_QUEUES_UNCOUNTED", 2)
    monkeypatch.setattr(sending, "TRANSACTION_QUEUE_COUNT", TRANSACTION_MESSAGES_MAX - 4)
    driver = TurnDriver()
    driver.engine.commands.begin(driver.session, Begin("t"))
    for name in "abab":
        driver.send(name, transaction="t")
    with pytest.raises(
        RemoteProtocolError, match="and each queue beyond the first 100 of a transaction counts 10;"
    ) as refused:
        driver.send("c", transaction="t")
    assert refused.value.code is Code.LIMIT
    driver.engine.commands.abort(driver.session, Abort("t"))
    assert not targets.reserved(driver.engine)
    driver.engine.commands.begin(driver.session, Begin("t"))
    driver.send("c", transaction="t")


# Eviction -------------------------------------------------------------------------------------------------------------


def fill_queues(driver: TurnDriver, names: str) -> None:
    for name in names:
        driver.send(name, persistent=True, body=bytes(1000))
    driver.commit()
    driver.turns()


def test_eviction_of_more_bytes_than_one_turn_may_goes_on_with_the_next_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    targets.EVICTED_BYTES_PER_TURN.replace(monkeypatch, 1000)
    driver = TurnDriver()
    fill_queues(driver, "aaaaaaaabbbbbbbb")
    memory = driver.engine.state.memory
    memory.limit = 0
    left = [memory.message_bytes]
    driver.engine.evict()
    while driver.engine.has_work:
        left.append(memory.message_bytes)
        driver.turn()
        driver.engine.evict()
    assert memory.bytes_over_limit <= 0 and len(left) > 3
    assert left[0] > left[1] > left[2] > 0, "each turn evicts a part"


@pytest.mark.parametrize("limit", [targets.EVICTION_QUEUES_PER_TURN, targets.EVICTION_QUEUES_SORTED_PER_TURN])
def test_eviction_from_more_queues_than_one_turn_may_goes_on_with_the_next_turns(
    monkeypatch: pytest.MonkeyPatch, limit: targets.Attribute
) -> None:
    limit.replace(monkeypatch, 2)
    driver = TurnDriver()
    fill_queues(driver, "abcde")
    driver.engine.state.memory.limit = 0
    turns = 0
    driver.engine.evict()
    while driver.engine.has_work:
        turns += 1
        driver.turn()
        driver.engine.evict()
    assert driver.engine.state.memory.bytes_over_limit <= 0 and turns >= 2


def test_eviction_includes_messages_that_have_arrived_since_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    # A round of several turns ended as if nothing else could leave memory, until the next commit.
    targets.EVICTION_QUEUES_PER_TURN.replace(monkeypatch, 2)
    driver = TurnDriver()
    fill_queues(driver, "abcde")
    driver.engine.state.memory.limit = 0
    driver.engine.evict()
    goes_on = driver.engine.has_work
    assert goes_on
    for name in "fa":
        driver.send(name, persistent=True, body=bytes(1000))
    driver.commit()
    while driver.engine.has_work:
        driver.turn()
        driver.engine.evict()
    assert driver.engine.state.memory.bytes_over_limit <= 0


def test_eviction_leaves_room_in_the_batch_and_connections_wait_until_it_is_done() -> None:
    # The gathering batch was always full of evicted messages, so that no other connection was read for seconds.
    driver = TurnDriver()
    state, memory = driver.engine.state.commit_state, driver.engine.state.memory
    for _ in range(50):
        driver.send("a", body=bytes(100_000))
    driver.turns()
    memory.limit = 0
    batches = 0
    driver.engine.evict()
    while state.is_eviction_behind:
        assert EVICTED_BYTES_PER_BATCH <= state.batch.size < EVICTED_BYTES_PER_BATCH + 200_000
        assert not state.has_capacity and state.gathering_bytes < GATHERING_BYTES_MAX
        while driver.engine.has_work:
            driver.turn()
            driver.engine.evict()
        assert state.is_eviction_behind, "another turn changes nothing"
        batch = driver.engine.take_batch()
        assert batch is not None
        driver.engine.evict()
        batches += 1
        driver.engine.store_results.on_committed(batch)
        driver.turn()
    driver.commit()
    while driver.engine.has_work:
        driver.turn()
        driver.engine.evict()
    assert state.has_capacity and memory.bytes_over_limit <= 0 and batches >= 3


@pytest.mark.parametrize("limit", ["broker", "queue"])
def test_eviction_goes_on_after_all_evicted_messages_of_a_batch_were_acknowledged(limit: str) -> None:
    """Regression: eviction waited for a batch that was empty again, and so was never written. Where memory was short,
    the broker read no connection any more."""
    driver = TurnDriver(Policy(memory_limit=1000) if limit == "queue" else None)
    state, memory = driver.engine.state.commit_state, driver.engine.state.memory
    # From now on the store knows the queue.
    driver.send("a", persistent=True)
    driver.subscribe("a")
    driver.commit()
    for _ in range(7):
        driver.send("a", body=bytes(100_000))
    dispatched = driver.turn()[1:]
    if limit == "broker":
        memory.limit = 0
    driver.engine.evict()
    evicted = len(state.batch.transient_puts)
    assert evicted == 6, "the batch is full"
    for _, sequence in dispatched[:evicted]:
        driver.ack("a", sequence)
    assert state.batch.is_empty()
    driver.turn()
    driver.engine.evict()
    assert len(state.batch.transient_puts) == 1 and state.has_capacity
    driver.commit()
    driver.engine.evict()
    assert memory.message_bytes < 1000


def test_eviction_that_frees_nothing_comes_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    targets.EVICTION_QUEUES_PER_TURN.replace(monkeypatch, 1)
    driver = TurnDriver()
    driver.engine.commands.begin(driver.session, Begin("t"))
    fill_queues(driver, "abc")
    for name in "abc":
        driver.subscribe(name)
    for name, sequence in driver.turn():
        driver.ack(name, sequence, "t")
    driver.engine.state.memory.limit = 0
    driver.engine.evict()
    for _ in range(20):
        driver.turn()
        driver.engine.evict()
    assert not driver.engine.has_work and driver.engine.state.memory.bytes_over_limit > 0


def test_subscription_that_ends_while_eviction_goes_on_is_not_written_to_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It stayed in the store for ever.
    targets.EVICTION_QUEUES_PER_TURN.replace(monkeypatch, 1)
    driver = TurnDriver()
    engine, session = driver.engine, driver.session
    for name in "abc":
        address = parse_address(f"/topic/{name}", "s")
        engine.commands.subscribe(session, Subscribe(name, address, AckMode.INDIVIDUAL, 1))
        for _ in range(3):
            message = SentMessage(4, False, 0, b"content-length:1000\n", bytes(1000))
            engine.commands.send(session, Send(address, message))
    driver.commit()
    driver.turn()
    engine.state.memory.limit = 0
    engine.evict()
    written = {queue for queue in engine.queues.by_name.values() if queue.is_known_to_store}
    for name in "abc":
        engine.commands.unsubscribe(session, Unsubscribe(name))
    for _ in range(10):
        engine.evict()
        driver.turn()
    introduced = {queue for queue in targets.spilling_queues(engine._memory.eviction._spilling) if queue not in written}
    assert not introduced


# Stop -----------------------------------------------------------------------------------------------------------------


def test_turn_of_a_broker_that_stops_dispatches_nothing() -> None:
    """With many messages for wildcard consumers, or scheduled sends that repeat, a stop took half a minute or more."""
    driver = TurnDriver()
    driver.subscribe("a")
    driver.send("a")
    driver.engine.turn.stop()
    assert not driver.engine.turn.run().deliveries
    assert not driver.engine.turn.has_work
