"""Tests of cases of a task that the state machine meets rarely, or never."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from tests.spark.source.small_query import SmallQuery, bodies_in, client, connecting, forget_numbers, send
from truenext.errors import ConfigurationError, ConnectionLost, TruenextError
from truenext.spark.broker.patience import Patience
from truenext.spark.datasource import PlannedTask
from truenext.spark.source.bundle import decode_bundle
from truenext.spark.source.task import Superseded, read_task
from truenext.testing import BlockingBroker

NewQuery = Callable[..., SmallQuery]


@pytest.fixture(autouse=True)
def small_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.spark.source.bundle.BUNDLE_ROWS", 2)
    monkeypatch.setattr("truenext.spark.source.task._AHEAD_FIRST", 2)


def attempt(query: SmallQuery, planned: PlannedTask) -> Generator[list[str], None, None]:
    """Yield the bodies of each bundle of an attempt."""
    for batch in query.reader().read(planned):
        yield [body.decode() for body in batch.column("body").to_pylist()]


def remove_bundle(here: BlockingBroker, query: SmallQuery, number: int) -> None:
    taker = client(here)
    taker.subscribe(query.end.bundle_queue(0))
    for each in taker.messages(here.queue(query.end.bundle_queue(0)).unacknowledged):
        if each.headers["spark_bundle"] == str(number):
            taker.ack(each, confirmed=True)
    taker.disconnect()


def test_a_bundle_says_what_spark_and_a_sink_are_to_know(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, *"abc")
    (planned,) = query.plan(query.reader())
    plan = planned.plan.with_query("7f00", "12")
    list(read_task(plan, connecting(here), Patience(0)))
    own = here.queue(query.end.bundle_queue(0)).messages
    names = ("bundle", "rows", "bytes", "last", "format", "batch", "source", "query", "query_batch")
    assert [[each.headers[f"spark_{name}"] for name in names] for each in own] == [
        ["0", "2", "2", "false", "1", "1", "orders", "7f00", "12"],
        ["1", "1", "1", "true", "1", "1", "orders", "7f00", "12"],
    ]
    assert [decode_bundle(each.body).num_rows for each in own] == [2, 1]


def test_rows_are_given_only_once_their_bundle_is_there(here: BlockingBroker, new_query: NewQuery) -> None:
    send(here, *"abcde")
    query = new_query(patience="60")
    (planned,) = query.plan(query.reader())
    rows = attempt(query, planned)
    for number in (1, 2):
        next(rows)
        here.crash()
        assert here.queue(query.end.bundle_queue(0)).waiting == number
    assert list(rows) == [["e"]]


def test_a_task_that_gets_nothing_says_that_it_has_ended(here: BlockingBroker, new_query: NewQuery) -> None:
    send(here, "a")
    query = new_query(partitions="2")
    planned = query.plan(query.reader())
    assert list(attempt(query, planned[0])) == [["a"]]
    assert list(attempt(query, planned[1])) == [[]]
    send(here, "late")
    assert list(attempt(query, planned[1])) == [[]]
    assert bodies_in(here) == ["late"]


def test_a_task_goes_on_behind_what_an_earlier_attempt_has_left(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, *"abcde")
    (planned,) = query.plan(query.reader())
    first = attempt(query, planned)
    assert next(first) == ["a", "b"]
    first.close()
    send(here, "first of all", priority=9)
    assert list(attempt(query, planned)) == [["a", "b"], ["first of all", "c"], ["d", "e"], []]


def test_a_task_that_finds_a_gap_fails_by_name(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, *"abcdef")
    (planned,) = query.plan(query.reader())
    list(attempt(query, planned))
    remove_bundle(here, query, 1)
    rows = attempt(query, planned)
    assert next(rows) == ["a", "b"]
    with pytest.raises(Superseded, match=r"^batch 1 lacks bundle 1 of /queue/Spark\.source\..*: another run of this"):
        next(rows)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_zombie_whose_batch_was_cleared_fails_by_name_and_takes_nothing(
    here: BlockingBroker, new_query: NewQuery, given: int
) -> None:
    send(here, *"abcdef")
    query = new_query(maxRowsPerTrigger="5")
    reader = query.reader()
    (planned,) = query.plan(reader)
    zombie = attempt(query, planned)
    for _ in range(given):
        next(zombie)
    found = query.finish(reader, [planned])
    # This clears it.
    following = query.plan(reader)
    with pytest.raises(Superseded, match=r"^batch 1 was read and cleared by another run of this query: run only one"):
        list(zombie)
    assert here.queue(query.end.bundle_queue(0)).waiting == 0
    found += query.finish(reader, following) + query.run_to_end(reader)
    assert sorted(found) == [*"abcdef"]


def test_three_concurrent_attempts_give_the_same_rows(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, *"abcdefgh")
    (planned,) = query.plan(query.reader())
    rows: list[list[list[str]]] = [[], [], []]
    attempts = [attempt(query, planned) for _ in rows]
    left = [0, 1, 2]
    while left:
        for each in [*left]:
            try:
                rows[each].append(next(attempts[each]))
            except StopIteration:
                left.remove(each)
    assert rows[0] == rows[1] == rows[2]
    assert sorted(body for bundle in rows[0] for body in bundle) == [*"abcdefgh"]
    assert bodies_in(here) == []


def test_a_number_that_was_forgotten_is_no_reason_to_take_anything_twice(
    here: BlockingBroker, query: SmallQuery
) -> None:
    """The query did nothing for a week; its batch is to be repeated."""
    send(here, *"abc")
    reader = query.reader()
    (planned,) = query.plan(reader)
    assert list(attempt(query, planned)) == [["a", "b"], ["c"]]
    forget_numbers(here, query.end.id)
    send(here, "late")
    assert list(attempt(query, planned)) == [["a", "b"], ["c"]]
    assert query.finish(reader, [planned]) + query.run_to_end(reader) == [*"abc", "late"]


def test_a_task_without_broker_fails_when_its_patience_ends(
    here: BlockingBroker, query: SmallQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(here, "a")
    (planned,) = query.plan(query.reader())
    connect = connecting(here)
    slept: list[float] = []
    calls = [0]

    def fail_first() -> Any:
        calls[0] += 1
        if calls[0] < 4:
            here.drop()
            raise ConnectionLost("nobody is there")
        return connect()

    patience = Patience(60, sleep=slept.append)
    rows = [row for batch in read_task(planned.plan, fail_first, patience) for row in batch.to_pylist()]
    assert [row["body"] for row in rows] == [b"a"]
    assert len(slept) == 3
    assert slept == sorted(slept)
    calls[0] = 0
    with pytest.raises(TruenextError) as raised:
        list(read_task(planned.plan, fail_first, Patience(0, sleep=slept.append)))
    assert str(raised.value) == (
        "nobody is there; the query has tried for 0 s (option patience). Restart it when the broker is "
        "available and has free space: it continues with the same rows"
    )


def test_check_of_the_driver_costs_a_delivery_and_no_attempt(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, "a", headers={"JMSXGroupID": "g"})
    query.plan(query.reader())
    (message,) = here.queue("orders").messages
    assert (message.headers["truenext-deliveries"], message.headers["truenext-attempts"]) == ("1", "0")
    # The group is nobody's.
    other = client(here)
    other.subscribe("orders")
    assert other.message().body == b"a"
    other.disconnect()


def test_a_query_of_all_that_is_available_now_ends_with_what_waited_at_its_start(
    here: BlockingBroker, new_query: NewQuery
) -> None:
    send(here, *"abcde")
    query = new_query(maxRowsPerTrigger="2")
    reader = query.reader()
    reader.prepareForTriggerAvailableNow()
    found: list[str] = []
    while rows := query.run_batch(reader):
        found += rows
        send(here, "later")
    assert found == [*"abcde"]
    assert here.queue(query.end.bundle_queue(0)).waiting == 0


def test_latest_offset_reports_waiting_messages_at_intervals(
    here: BlockingBroker, new_query: NewQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("truenext.spark.datasource.monotonic", lambda: now[0])
    send(here, *"ab", queue="orders.a")
    send(here, *"cde", queue="orders.b")
    send(here, "f", queue="DLQ.orders.b")
    query = new_query(queue="orders.>")
    reader = query.reader()
    assert reader.reportLatestOffset() == {"waiting": 5}
    send(here, "g", queue="orders.c")
    now[0] += 9.0
    assert reader.reportLatestOffset() == {"waiting": 5}
    now[0] += 1.0
    assert reader.reportLatestOffset() == {"waiting": 6}


def test_available_now_reads_all_that_waited_though_bytes_limit_its_batches(
    here: BlockingBroker, new_query: Callable[..., SmallQuery]
) -> None:
    """Fixed: rows were deducted that a batch might have had, so the run ended while messages waited."""
    for partitions in ("1", "2"):
        send(here, *"abcdefghij")
        query = new_query(maxBytesPerTrigger="1", partitions=partitions)
        reader = query.reader()
        reader.prepareForTriggerAvailableNow()
        send_later = ["late"] if partitions == "2" else []
        rows = query.run_batch(reader)
        send(here, *send_later)
        rows += query.run_to_end(reader)
        assert len(rows) == 10
        assert len(bodies_in(here)) == len(send_later)


def test_the_first_run_creates_the_queue_of_a_virtual_topic_though_nothing_waits(
    here: BlockingBroker, new_query: Callable[..., SmallQuery]
) -> None:
    """Fixed: a run with availableNow did not subscribe to a queue without waiting messages."""
    query = new_query(queue="Consumer.A.VirtualTopic.news")
    reader = query.reader()
    reader.prepareForTriggerAvailableNow()
    assert query.run_to_end(reader) == []
    producer = client(here)
    headers = {"destination": "/topic/VirtualTopic.news", "persistent": "true"}
    producer.send_frame("SEND", headers, b"a", confirmed=True)
    producer.disconnect()
    second = query.reader()
    second.prepareForTriggerAvailableNow()
    assert query.run_to_end(second) == ["a"]


# ---- Two sources of one query ----


def run_task(here: BlockingBroker, planned: PlannedTask, spark_query: str) -> None:
    """Read a task within a query of Spark's."""
    list(read_task(planned.plan.with_query(spark_query, "0"), connecting(here), Patience(0)))


@pytest.mark.parametrize("other", ["orders", "orders,returns"])
def test_two_sources_of_one_query_with_one_queue_are_refused_each_time(
    here: BlockingBroker, new_query: NewQuery, other: str
) -> None:
    """Even if one finds nothing that the other has left."""
    send(here, *"ab")
    first, second = new_query(), new_query(queue=other)
    (of_first,), (of_second,) = first.plan(first.reader()), second.plan(second.reader())
    run_task(here, of_first, "q")
    for _ in range(2):
        with pytest.raises(ConfigurationError) as raised:
            run_task(here, of_second, "q")
    assert str(raised.value) == (
        f"the query reads orders with two sources, {second.end.id} and {first.end.id}, as in a join of a stream with "
        "itself: each message would be in one of them only. Join each batch with itself in foreachBatch. Run `truenext "
        "spark abandon` for each of the two: it returns their rows"
    )
    # The first one, too, when its batch is repeated.
    with pytest.raises(ConfigurationError, match=f"with two sources, {first.end.id} and {second.end.id}, "):
        run_task(here, of_first, "q")


@pytest.mark.parametrize(
    ("options", "spark_query"),
    [
        ({"selector": "JMSPriority > 4"}, "q"),
        ({"queue": "returns"}, "q"),
        ({}, "another query"),
        # Spark gives its options to both sources of a join.
        ({"space": "other"}, "q"),
    ],
)
def test_two_sources_that_share_nothing_are_read(
    here: BlockingBroker, new_query: NewQuery, options: dict[str, str], spark_query: str
) -> None:
    for queue in ("orders", "returns"):
        send(here, *"ab", queue=queue, priority=5)
    first, second = new_query(), new_query(**options)
    (of_first,), (of_second,) = first.plan(first.reader()), second.plan(second.reader())
    run_task(here, of_first, "q")
    run_task(here, of_second, spark_query)
