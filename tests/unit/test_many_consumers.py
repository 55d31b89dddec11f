"""Tests of the steps that very many consumers of one queue cost: express dispatch, exclusive consumers, and the end of
a connection with many of them. They count calls, so that a cost that grows with the square of a number shows."""

from __future__ import annotations

from collections.abc import Callable, ValuesView

import pytest

from tests.unit.test_transactions import steps_of
from tests.unit.test_turns import TurnDriver
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.queue import Entry
from truenext.model.commands import Ack, AckMode, Send, Subscribe, Unsubscribe
from truenext.model.destination import parse_address
from truenext.model.message import SentMessage
from truenext.model.selector import compile_selector

FEW, MANY = 50, 400
LINEAR_FACTOR = 2 * MANY // FEW
"""What MANY may cost, times what FEW cost: with the square it would be four times as much."""
WINDOW = 3


class ManyConsumersDriver(TurnDriver):
    """Engine in which each of many consumers holds a window of messages of priority 1."""

    def __init__(self) -> None:
        super().__init__()
        self.consuming = self.engine.commands.connect("consuming")

    def add_consumers(
        self,
        count: int,
        *,
        address: str = "/queue/q",
        name: str = "",
        is_exclusive: bool = False,
        has_express: bool = False,
        window: int = WINDOW,
        selector: Callable[[int], str] | None = None,
    ) -> None:
        for number in range(count):
            subscribe = Subscribe(
                f"{name}{number}",
                parse_address(address, "consuming"),
                AckMode.INDIVIDUAL,
                window,
                is_exclusive=is_exclusive,
                has_express=has_express,
                selector=None if selector is None else compile_selector(selector(number)),
            )
            self.engine.commands.subscribe(self.consuming, subscribe)

    def send_each(self, count: int, priority: int, *, of_group: bool = False) -> None:
        """Send messages with numbers from 0 on, each of a group of its own if `of_group`."""
        for number in range(count):
            group = f"g{number}" if of_group else ""
            header = b"number:%d\n" % number + (f"JMSXGroupID:{group}\n".encode() if group else b"")
            message = SentMessage(priority, False, 0, header, b"", group=group)
            self.engine.commands.send(self.session, Send(parse_address("/queue/q", "s"), message))

    def run_turns(self) -> int:
        """Run turns until none has work; return the number of dispatched messages."""
        count = 0
        while self.engine.has_work:
            count += sum(map(len, self.engine.turn.run().deliveries.values()))
            self.engine.commands.on_all_sent(self.consuming)
        return count


def own_number(number: int) -> str:
    return f"number = '{number}'"


def same_priority(_: int) -> str:
    return "JMSPriority >= 0"


def full_driver(
    count: int, *, selector: Callable[[int], str] | None, of_group: bool, with_wildcard: bool
) -> ManyConsumersDriver:
    """Return a driver with express consumers that hold as many messages of priority 1 as they may."""
    driver = ManyConsumersDriver()
    driver.add_consumers(count, has_express=True, selector=selector)
    if with_wildcard:
        driver.add_consumers(1, address="/queue/>", name="w", window=1)
    for _ in range(WINDOW + with_wildcard):
        driver.send_each(count, 1, of_group=of_group)
    driver.run_turns()
    return driver


KINDS = pytest.mark.parametrize(
    ("selector", "of_group", "with_wildcard"),
    [
        (None, False, False),
        (same_priority, False, False),
        (own_number, False, False),
        (None, True, False),
        (None, False, True),
        (own_number, False, True),
    ],
    ids=["plain", "selector", "own selectors", "groups", "wildcard", "wildcard and selectors"],
)


@KINDS
def test_express_dispatch_of_as_many_messages_as_consumers_costs_no_square(
    selector: Callable[[int], str] | None, of_group: bool, with_wildcard: bool
) -> None:
    """Fixed: all consumers were searched for each message."""

    def steps(count: int) -> int:
        driver = full_driver(count, selector=selector, of_group=of_group, with_wildcard=with_wildcard)
        driver.send_each(count, 8, of_group=of_group)
        dispatched = 0

        def run() -> None:
            nonlocal dispatched
            dispatched = driver.run_turns()

        found = steps_of(run)
        assert dispatched == count
        return found

    assert steps(MANY) < LINEAR_FACTOR * steps(FEW)


@pytest.mark.parametrize("selector", [None, same_priority, own_number])
def test_dispatch_to_many_consumers_beside_a_wildcard_consumer_searches_no_square(
    selector: Callable[[int], str] | None,
) -> None:
    """Fixed: after each message all consumers of the queue were searched anew."""

    def steps(count: int) -> int:
        driver = ManyConsumersDriver()
        driver.add_consumers(count, selector=selector)
        driver.add_consumers(1, address="/queue/>", name="w", window=1)
        driver.run_turns()
        driver.send_each(count, 4)
        return steps_of(driver.run_turns)

    assert steps(MANY) < LINEAR_FACTOR * steps(FEW)


class CountingDict(dict[int, Entry]):
    """Held messages that count how often they are searched."""

    search_count = 0

    def values(self) -> ValuesView[Entry]:  # type: ignore[override]
        CountingDict.search_count += 1
        return super().values()


@KINDS
def test_held_messages_are_searched_for_express_credit_only_when_they_have_changed(
    selector: Callable[[int], str] | None, of_group: bool, with_wildcard: bool
) -> None:
    """Fixed: each turn searched all that all full express consumers held."""
    driver = full_driver(FEW, selector=selector, of_group=of_group, with_wildcard=with_wildcard)
    consumers = list(driver.consuming.consumers.values())
    for consumer in consumers:
        consumer.held = CountingDict(consumer.held)
    driver.send_each(2 * FEW, 1, of_group=of_group)
    driver.run_turns()
    CountingDict.search_count = 0
    for _ in range(5):
        driver.send_each(1, 1, of_group=of_group)
        assert driver.run_turns() == 0
    assert CountingDict.search_count == 0
    driver.send_each(1, 2, of_group=of_group)
    assert driver.run_turns() == 1, "this one is more urgent"


def steps_of_end(driver: ManyConsumersDriver, session: ConnectionState) -> int:
    return steps_of(lambda: driver.engine.commands.disconnect(session, is_exempt=True))


@pytest.mark.parametrize("address", ["/queue/q", "/queue/*"])
@pytest.mark.parametrize("is_exclusive", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_end_of_a_connection_with_many_consumers_of_one_queue_costs_no_square(
    address: str, is_exclusive: bool, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: the next exclusive consumer was searched among all receivers, for each that ended; and each consumer was
    searched from the first one on."""
    # Comparisons in C call this.
    monkeypatch.setattr(BrokerConsumer, "__eq__", lambda one, other: one is other, raising=False)
    monkeypatch.setattr(BrokerConsumer, "__hash__", object.__hash__, raising=False)

    def steps(count: int) -> int:
        driver = ManyConsumersDriver()
        driver.send("q")
        driver.run_turns()
        sessions = [driver.engine.commands.connect("a"), driver.engine.commands.connect("b")]
        for driver.consuming in sessions:
            driver.add_consumers(count, address=address, is_exclusive=is_exclusive)
            driver.run_turns()
        return steps_of_end(driver, sessions[0 if is_first else 1])

    assert steps(MANY) < LINEAR_FACTOR * steps(FEW)


@pytest.mark.parametrize("address", ["/queue/q", "/queue/*"])
def test_subscribe_of_an_exclusive_consumer_costs_hardly_more_beside_many_others(address: str) -> None:
    def steps(others: int) -> int:
        driver = ManyConsumersDriver()
        driver.send("q")
        driver.add_consumers(others, address=address, is_exclusive=True)
        driver.run_turns()

        def run() -> None:
            driver.add_consumers(1, address=address, name="last", is_exclusive=True)

        return steps_of(run)

    assert steps(MANY) < steps(FEW) + 20


def test_exclusive_consumers_follow_one_another_by_priority_and_age() -> None:
    # C4.12
    driver = ManyConsumersDriver()
    driver.send_each(1, 4)
    for name, priority in (("a", 0), ("b", 3), ("c", -1), ("d", 3)):
        subscribe = Subscribe(
            name, parse_address("/queue/q", "s"), AckMode.INDIVIDUAL, 1, is_exclusive=True, priority=priority
        )
        driver.engine.commands.subscribe(driver.consuming, subscribe)
    driver.add_consumers(1, address="/queue/*", name="w", is_exclusive=True)
    got = []
    for _ in range(5):
        ((consumer, entries),) = driver.engine.turn.run().deliveries.items()
        got.append(consumer.subscription)
        driver.engine.commands.acknowledge(driver.consuming, Ack(consumer.subscription, entries[0].sequence))
        driver.engine.commands.unsubscribe(driver.consuming, Unsubscribe(consumer.subscription))
        driver.send_each(1, 4)
    assert got == ["b", "d", "a", "w0", "c"]
