"""Tests of the control request `queues` with a body: selection, orders, pieces and sums, ages and rates.

The counts themselves are compared with the history in tests/property/counts_audit.py.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.unit.test_control_queries import ReportDriver, finished
from truenext.broker.queues_request import PLACES_SORTED_PER_STEP, QUEUES_MAX, make_queues_report
from truenext.broker.rates import RATE_S, Rates
from truenext.broker.unread_heads import LANES_PER_READ, UnreadHeads
from truenext.engine.engine import Engine
from truenext.engine.state.queue import Queue
from truenext.errors import RemoteProtocolError, StoreError
from truenext.model.batch import NO_MARK
from truenext.model.commands import Ack, Nack, Send
from truenext.model.destination import parse_address
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy
from truenext.model.record import LANE_KEY_SIZE, encode_record, message_key
from truenext.store.store import Page, UndecodedMessage

MANY = 2 * PLACES_SORTED_PER_STEP + 7


def names(answer: dict[str, Any]) -> list[str]:
    return [row["name"] for row in answer["queues"]]


def pages(driver: ReportDriver, between: Callable[[], object] = lambda: None, **request: Any) -> list[str]:
    """Return the names of all queues, requested piece by piece."""
    found: list[str] = []
    after = None
    while True:
        answer = driver.answer("queues", request | {"after": after})
        found += names(answer)
        if answer["next"] is None:
            return found
        after = answer["next"]
        between()


@pytest.mark.parametrize(
    ("name", "selected"),
    [
        ("", ["Orders.new", "orders", "orders.eu.old", "pears"]),
        ("orders", ["Orders.new", "orders", "orders.eu.old"]),
        ("EU", ["orders.eu.old"]),
        ("orders.>", ["orders.eu.old"]),
        ("*", ["orders", "pears"]),
        ("none", []),
    ],
)
def test_queues_of_a_part_or_a_pattern_of_the_name_are_reported_and_summed(name: str, selected: list[str]) -> None:
    driver = ReportDriver()
    for each in ("orders", "Orders.new", "orders.eu.old", "pears"):
        driver.send(each)
    answer = driver.answer("queues", {"name": name})
    assert names(answer) == selected and answer["next"] is None
    assert (answer["sums"]["queues"], answer["sums"]["waiting"]) == (len(selected), len(selected))


@pytest.mark.parametrize("order", ["name", "waiting", "oldest", "held", "failing", "rate"])
@pytest.mark.parametrize("limit", [1, 7, 100])
def test_pieces_of_an_answer_have_each_queue_once_in_order(order: str, limit: int) -> None:
    driver, random = ReportDriver(), Random(f"{order} {limit}")
    for number in range(40 if limit == 1 else MANY):
        driver.tick(random.randrange(20))
        driver.send(f"q{number:04}")
        if number % 3 == 0:
            driver.send(f"q{number:04}")
    for queue in driver.engine.queues.by_name.values():
        queue.rate = random.choice([0, 0, 1.5, 20.1])
        queue.counts.rare.failed_again = random.choice([0, 0, 1, 20])
    for number, name in enumerate(random.sample([*driver.engine.queues.by_name], 20)):
        driver.subscribe(f"/queue/{name}", window=1)
        if number % 5 == 0:
            driver.tick(20 + number)
            driver.engine.turn.run()
    driver.tick(60)
    whole = driver.answer("queues", {"order": order})["queues"]
    keys: dict[str, Callable[[dict[str, Any]], float]] = {
        "name": lambda _: 0,
        "waiting": lambda row: -row["waiting"],
        "oldest": lambda row: -(row["oldest_s"] or 0),
        "held": lambda row: -(row["held_s"] or 0),
        "failing": lambda row: -row["failed_again"],
        "rate": lambda row: -row["rate"],
    }
    assert whole == sorted(whole, key=lambda row: (keys[order](row), row["name"]))
    assert pages(driver, order=order, limit=limit) == [row["name"] for row in whole]


def test_queue_by_name_comes_once_while_others_come_and_go() -> None:
    # C32.8
    driver = ReportDriver()
    lasting = [f"q{number:03}" for number in range(50)]
    for name in lasting:
        driver.send(name)
    created = iter(range(1000))

    def change() -> None:
        number = next(created)
        driver.send(f"q{number * 37 % 100:03}.new")
        driver.send(lasting[number])

    found = pages(driver, change, limit=3)
    assert [name for name in found if name in lasting] == lasting
    assert len(set(found)) == len(found)


def test_dead_letter_queues_of_prefix_and_policies_are_told_and_selected() -> None:
    """Fixed: a queue that a policy makes one for dead letters was not known as such, and seemed stuck."""
    driver = ReportDriver()
    shared = Policies(by_pattern={"orders.>": Policy(dead_letters="failed")})
    driver.engine.commands.administering.change_policies(shared)
    for name in ("DLQ.a", "orders.new", "failed", "failed.not"):
        driver.send(name)
    assert {row["name"]: row["dead_letters"] for row in driver.answer("queues", {})["queues"]} == {
        "DLQ.a": True,
        "failed": True,
        "failed.not": False,
        "orders.new": False,
    }
    answer = driver.answer("queues", {"dead_letters": True})
    assert (names(answer), answer["sums"]["waiting"]) == (["DLQ.a", "failed"], 2)


def test_cursor_is_a_place_and_its_queue_need_not_exist() -> None:
    # C32.8
    driver = ReportDriver()
    for name, count in (("a", 3), ("b", 2), ("c", 1)):
        for _ in range(count):
            driver.send(name)
    first = driver.answer("queues", {"order": "waiting", "limit": 1})
    assert names(first) == ["a"]
    for _ in range(5):
        driver.send("c")
    assert names(driver.answer("queues", {"order": "waiting", "after": first["next"]})) == ["b"]
    driver.engine.queues.remove(driver.engine.queues.by_name["a"])
    assert names(driver.answer("queues", {"order": "waiting", "after": first["next"]})) == ["b"]


def test_limit_of_0_gives_sums_alone_and_a_larger_one_than_allowed_gives_a_cursor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = ReportDriver()
    for number in range(5):
        driver.send(f"q{number}")
    answer = driver.answer("queues", {"limit": 0})
    assert (answer["queues"], answer["next"], answer["sums"]["accepted"]) == ([], None, 5)
    monkeypatch.setattr("truenext.broker.queues_request.QUEUES_MAX", 3)
    answer = driver.answer("queues", {"limit": QUEUES_MAX})
    assert names(answer) == ["q0", "q1", "q2"] and answer["next"] is not None
    assert len(driver.answer("queues")) == 5, "without a body all come"


def test_sums_are_of_what_the_user_may_see() -> None:
    # C32.7
    driver = ReportDriver()
    for name in ("mine", "mine.too", "other"):
        driver.send(name)

    def may_see(queue: Queue) -> bool:
        return queue.name.startswith("mine")

    answer = json.loads(finished(make_queues_report(driver.engine, may_see, b"{}")))
    assert (names(answer), answer["sums"]["queues"]) == (["mine", "mine.too"], 2)
    assert (answer["sums"]["accepted"], answer["sums"]["waiting"]) == (2, 2)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"name": "a.>.b"}, "> is allowed only as the last word"),
        ({"limit": -1}, "limit"),
        ({"order": "size"}, "order"),
        ({"after": "x"}, "after"),
        ({"after": '["x","y"]'}, "after"),
        ({"names": "x"}, "names"),
    ],
)
def test_senseless_request_is_refused_in_a_sentence(body: dict[str, Any], fault: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"^queues.*{fault}"):
        ReportDriver().answer("queues", body)


def test_counts_of_a_removed_queue_stay_in_those_of_the_broker_alone() -> None:
    # C32.4
    driver = ReportDriver()
    driver.subscribe("/queue/a", window=1)
    driver.send("a")
    driver.engine.turn.run()
    driver.engine.commands.acknowledge(driver.session, Ack("/queue/a", 1, None))
    driver.engine.commands.disconnect(driver.session, is_exempt=True)
    driver.engine.queues.remove(driver.engine.queues.by_name["a"])
    driver.session = driver.engine.commands.connect("s")
    driver.send("a")
    assert driver.answer("queues", {})["sums"]["accepted"] == 1
    counts = driver.answer("status")["counts"]
    assert (counts["accepted"], counts["acknowledged"]) == (2, 1)


def test_messages_of_temporary_queues_count_apart() -> None:
    # C32.4
    driver = ReportDriver()
    driver.subscribe("/topic/news")
    driver.send_to("/topic/news")
    driver.send("a")
    status = driver.answer("status")
    assert (status["counts"]["accepted"], status["temporary_counts"]["accepted"]) == (1, 1)
    driver.engine.commands.disconnect(driver.session, is_exempt=True)
    assert driver.answer("status")["temporary_counts"] == status["temporary_counts"]


def test_dead_letters_count_by_reason() -> None:
    # C32.2
    driver = ReportDriver()
    driver.subscribe("/queue/a")
    for _ in range(3):
        driver.send("a")
    driver.engine.turn.run()
    for sequence in (1, 2):
        driver.engine.commands.nack(driver.session, Nack("/queue/a", sequence, None, is_rejected=True))
    driver.engine.commands.nack(driver.session, Nack("/queue/a", 3, None))
    (letters, queue) = driver.answer("queues", {})["queues"]
    assert (queue["dead_lettered"], queue["returned"], queue["failed_again"]) == ({"rejected": 2}, 1, 0)
    assert (letters["name"], letters["accepted"]) == ("DLQ.a", 2)


def test_message_that_fails_again_counts_and_one_that_is_released_does_not() -> None:
    # C32.3
    driver = ReportDriver()
    shared = Policies(by_pattern={"a": Policy(attempts_max=4, delay_ms=0)})
    driver.engine.commands.administering.change_policies(shared)
    driver.subscribe("/queue/a", window=1)
    driver.send("a")
    counted = []
    for _ in range(4):
        driver.engine.turn.run()
        driver.engine.commands.nack(driver.session, Nack("/queue/a", 1, None))
        (queue,) = driver.answer("queues", {"names": ["a"]})["queues"]
        counted.append((queue["returned"], queue["failed_again"]))
    assert counted == [(1, 0), (2, 1), (3, 2), (3, 2)], "the last failure has made a dead letter"
    assert driver.answer("status")["counts"]["failed_again"] == 2 == driver.answer("queues", {})["sums"]["failed_again"]


# Ages and rates


def test_age_is_that_of_the_oldest_waiting_message_of_any_priority() -> None:
    # C32.5
    driver = ReportDriver()
    driver.tick(100)
    driver.send("a")
    driver.tick(130)
    driver.engine.commands.send(driver.session, _urgent("a"))
    driver.tick(150)
    driver.send("b")
    driver.tick(160.5)
    answer = driver.answer("queues", {"order": "oldest"})
    assert [(row["name"], row["oldest_s"]) for row in answer["queues"]] == [("a", 60.5), ("b", 10.5)]
    assert answer["sums"]["oldest_s"] == 60.5 == driver.answer("status")["oldest_s"]
    driver.subscribe("/queue/a", window=2)
    driver.engine.turn.run()
    assert driver.answer("queues", {"name": "a"})["queues"][0]["oldest_s"] is None, "held messages do not wait"


def test_age_of_a_message_that_waits_for_its_next_try_is_left_out() -> None:
    # C32.5
    driver = ReportDriver()
    driver.subscribe("/queue/a", window=1)
    driver.tick(100)
    driver.send("a")
    driver.engine.turn.run()
    driver.engine.commands.nack(driver.session, Nack("/queue/a", 1, None, delay_ms=5000))
    driver.tick(101)
    (row,) = driver.answer("queues", {})["queues"]
    assert (row["waiting"], row["oldest_s"]) == (1, None)


def _urgent(queue: str) -> Send:
    return Send(parse_address(f"/queue/{queue}", "s"), SentMessage(9, False, 0, b"content-length:0\n", b""))


class OnePage:
    """Store that has one message in each lane but the last, which cannot be read."""

    def __init__(self, broken: bytes) -> None:
        self.broken = broken
        self.read_lanes: list[bytes] = []

    def read_page(self, lane: bytes, after: int, limit: int, size: int = 0) -> Page:
        assert (len(lane), limit) == (LANE_KEY_SIZE, 1)
        self.read_lanes.append(lane)
        if lane == self.broken:
            raise StoreError("it cannot be read")
        key = message_key(lane, 5)
        message = SentMessage(4, True, 0, b"content-length:0\n", b"")
        message.arrived_ms = 40_000
        return Page(messages=[UndecodedMessage(key, encode_record(key, message), NO_MARK)], as_of=1, is_end=True)


class CallingPager:
    """Pager whose calls are done when `run` is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []

    def call(self, read: Callable[[], Any], on_read: Callable[[Any], object]) -> None:
        self.calls.append((read, on_read))

    def run(self) -> None:
        read, on_read = self.calls.pop(0)
        on_read(read())


def test_messages_from_before_the_start_are_read_once_while_answers_lack_their_ages() -> None:
    """Fixed: the first answer after a start came only when all of them were read."""
    # C32.5
    driver = ReportDriver()
    engine: Engine = driver.engine
    count = LANES_PER_READ + 2
    for number in range(1, count + 1):
        queue = engine.lifespan.restore_queue(number + 100, f"q{number:03}")
        engine.lifespan.restore_lane(queue, 5, 2)
    lanes = list(engine.lifespan.unread_lanes)
    pager, store = CallingPager(), OnePage(lanes[-1].key)
    typed: Any = pager
    heads = UnreadHeads(engine.lifespan.unread_lanes, store, typed)  # type: ignore[arg-type]
    driver.tick(100)

    def ages() -> list[float | None]:
        return [row["oldest_s"] for row in driver.answer("queues", {"order": "oldest"})["queues"]]

    heads.read()
    assert ages() == [None] * count
    pager.run()
    assert ages() == [60.0] * (LANES_PER_READ - 1) + [None] * (count - LANES_PER_READ + 1)
    while pager.calls:
        pager.run()
    assert sorted(store.read_lanes) == sorted(lane.key for lane in lanes)
    assert ages() == [60.0] * (count - 1) + [None]


def test_rate_is_that_of_the_last_seconds() -> None:
    # C32.6
    driver, clock = ReportDriver(), [0]
    rates = Rates(driver.engine, lambda: clock[0])
    driver.send("a")
    queue = driver.engine.queues.by_name["a"]
    for seconds, acknowledged, rate in ((RATE_S, 10, 2.0), (RATE_S, 0, 0), (2 * RATE_S, 1, 0.1)):
        clock[0] += int(seconds * 1e9) - 1
        assert rates.are_due is (seconds > RATE_S)
        clock[0] += 1
        queue.counts.acknowledged += acknowledged
        assert rates.are_due
        for _ in rates.count():
            assert not rates.are_due
        assert queue.rate == rate
        assert driver.answer("queues", {})["sums"]["rate"] == rate


def test_age_of_messages_that_memory_was_too_short_for_is_known() -> None:
    # C32.5
    driver = ReportDriver()
    engine = driver.engine
    for seconds in (100, 110, 120):
        driver.tick(seconds)
        message = SentMessage(4, True, 0, b"content-length:1000\n", bytes(1000))
        engine.commands.send(driver.session, Send(parse_address("/queue/a", "s"), message))
    batch = engine.take_batch()
    assert batch is not None
    engine.store_results.on_committed(batch)
    engine.turn.run()
    queue = engine.queues.by_name["a"]
    engine.state.memory.limit = 1
    while queue.resident_count:
        engine.evict()
    assert (queue.waiting_count(), queue.oldest_ms()) == (3, 100_000)
    driver.tick(130)
    assert driver.answer("queues", {})["queues"][0]["oldest_s"] == 30.0
