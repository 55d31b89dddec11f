"""Tests of queries that read several queues and patterns."""

from collections.abc import Callable

import pytest

from tests.spark.source.small_query import SmallQuery, bodies_in, client, send
from truenext.spark.datasource import BrowsingReader, TruenextDataSource
from truenext.spark.source.task import Superseded
from truenext.testing import BlockingBroker

NewQuery = Callable[..., SmallQuery]


def test_query_reads_each_of_its_queues_once_and_in_its_order(here: BlockingBroker, new_query: NewQuery) -> None:
    for queue in ("orders", "returns.eu", "returns.us", "others"):
        send(here, *(f"{queue} {number}" for number in range(10)), queue=queue)
    query = new_query(queue="orders,returns.>", maxRowsPerTrigger="7", partitions="2")
    found = query.run_to_end(query.reader())
    assert sorted(found) == sorted(
        f"{queue} {n}" for queue in ("orders", "returns.eu", "returns.us") for n in range(10)
    )
    for queue in ("orders", "returns.eu", "returns.us"):
        rows = [row for batch in query.rows for row in batch if row["queue"] == queue]
        assert [row["body"].decode() for row in rows] == [f"{queue} {number}" for number in range(10)]
        # At most one more for each batch that it was the first in.
        assert {row["attempts"] for row in rows} == {0}
    assert bodies_in(here, "others") == [f"others {number}" for number in range(10)]


@pytest.mark.parametrize("rows", ["1", "3"])
def test_full_queue_does_not_keep_small_batches_from_another_queue(
    here: BlockingBroker, new_query: NewQuery, rows: str
) -> None:
    send(here, *(f"a{number}" for number in range(20)), queue="a")
    send(here, "b", queue="b")
    query = new_query(queue="a,b", maxRowsPerTrigger=rows)
    reader = query.reader()
    found = query.run_batch(reader) + query.run_batch(reader)
    assert "b" in found


def test_two_full_queues_share_a_large_batch(here: BlockingBroker, new_query: NewQuery) -> None:
    for queue in "ab":
        send(here, *("x" for _ in range(600)), queue=queue)
    query = new_query(queue="a,b", maxRowsPerTrigger="512")
    query.run_batch(query.reader())
    assert [sum(row["queue"] == queue for row in query.rows[0]) for queue in "ab"] == [256, 256]


def test_batch_waits_for_a_message_in_any_of_its_queues(here: BlockingBroker, new_query: NewQuery) -> None:
    query = new_query(queue="a,b")
    reader = query.reader()
    for queue in "babb":
        assert query.run_batch(reader) == []
        send(here, queue, queue=queue)
        assert query.run_batch(reader) == [queue]


def test_available_now_reads_what_waits_in_any_of_its_queues(here: BlockingBroker, new_query: NewQuery) -> None:
    query = new_query(queue="a,b,c")
    send(here, "1", queue="b")
    send(here, "2", queue="c")
    reader = query.reader()
    reader.prepareForTriggerAvailableNow()
    assert sorted(query.run_to_end(reader)) == ["1", "2"]


def test_driver_holds_no_message_of_any_queue_between_batches(here: BlockingBroker, new_query: NewQuery) -> None:
    query = new_query(queue="a,b")
    reader = query.reader()
    for queue in "ab":
        send(here, queue, queue=queue)
    assert query.plan(reader)
    for queue in "ab":
        other = client(here)
        other.subscribe(queue)
        assert other.message().body.decode() == queue
        other.disconnect()


def test_option_with_its_queues_in_another_order_continues_the_query(here: BlockingBroker, new_query: NewQuery) -> None:
    query = new_query(queue="b,a")
    send(here, "1", queue="a")
    assert query.run_batch(query.reader()) == ["1"]
    query.options["queue"] = "a, b"
    send(here, "2", queue="b")
    assert query.run_batch(query.reader()) == ["2"]
    query.options["queue"] = "a"
    with pytest.raises(Superseded, match=r"^the checkpoint belongs to the queue a,b, and option queue is a: "):
        query.plan(query.reader())


def test_batch_read_shows_one_queue_after_the_other(here: BlockingBroker) -> None:
    for queue in "ba":
        send(here, f"{queue}1", f"{queue}2", queue=queue)
    source = TruenextDataSource({"url": here.url, "queue": "b,a"})
    reader = source.reader(source.schema())
    assert isinstance(reader, BrowsingReader)
    shown = [[row["body"] for batch in reader.read(each) for row in batch.to_pylist()] for each in reader.partitions()]
    assert shown == [[b"a1", b"a2"], [b"b1", b"b2"]]


def test_minimum_counts_the_messages_of_all_queues(here: BlockingBroker, new_query: NewQuery) -> None:
    query = new_query(queue="a,b.>", minRowsPerTrigger="2")
    reader = query.reader()
    query.run_batch(reader)
    send(here, "1", queue="a")
    send(here, "other", queue="c")
    assert query.run_batch(reader) == []
    send(here, "2", queue="b.c")
    assert sorted(query.run_batch(reader)) == ["1", "2"]
