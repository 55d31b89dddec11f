"""Tests of checkpoints that do not match the broker: they are refused by name, before anything is read twice."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.restored import restored
from tests.spark.source.small_query import SmallQuery, bodies_in, client, connect, forget_numbers, send
from truenext.model.url import parse_url
from truenext.spark.admin import abandon, find_source
from truenext.spark.datasource import QueueStreamReader
from truenext.spark.source.mark import read_mark
from truenext.spark.source.task import Superseded
from truenext.testing import BlockingBroker, blocking_broker

NewQuery = Callable[..., SmallQuery]


def rewind(query: SmallQuery, batches: int) -> SmallQuery:
    """Return the query with an older copy of its checkpoint, without the last batches."""
    older = SmallQuery(query.here, **query.options)
    older.offsets = copy.deepcopy(query.offsets[: len(query.offsets) - batches])
    older.rows = query.rows[: len(older.offsets)]
    return older


def test_a_checkpoint_of_another_store_is_refused_by_name(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, "a")
    planned = query.plan(query.reader())
    with blocking_broker() as other:
        send(other, "b")
        elsewhere = SmallQuery(other)
        elsewhere.offsets = query.offsets
        store = query.end.store
        steps: list[Callable[[QueueStreamReader], object]] = [elsewhere.plan, elsewhere.replan]
        for step in steps:
            with pytest.raises(Superseded) as raised:
                step(elsewhere.reader())
            assert str(raised.value).startswith(
                f"the checkpoint was made with a broker whose data has the name {store}, "
            )
            assert str(raised.value).endswith(": correct the option url, or start the query with a new checkpoint")
        options = replace(planned[0].plan.options, addresses=(parse_url(other.url),))
        planned[0].plan = replace(planned[0].plan, options=options)
        with pytest.raises(Superseded, match=f"^the checkpoint was made with a broker whose data has the name {store}"):
            elsewhere.finish(elsewhere.reader(), planned)
        elsewhere.stop()
        assert bodies_in(other) == ["b"]


def test_restored_broker_gives_the_rows_of_the_original_s_query_to_a_new_one(
    here: BlockingBroker, new_query: NewQuery
) -> None:
    """C29.15; original and restored broker go on side by side."""
    send(here, *"abcd")
    query = new_query(maxRowsPerTrigger="2")
    reader = query.reader()
    assert query.run_batch(reader) == ["a", "b"]
    with restored(here) as other:
        elsewhere = SmallQuery(other)
        elsewhere.offsets = query.offsets
        steps: list[Callable[[QueueStreamReader], object]] = [elsewhere.plan, elsewhere.replan]
        for step in steps:
            with pytest.raises(Superseded, match=r"^the checkpoint was made with a broker whose data has the name "):
                step(elsewhere.reader())
        elsewhere.stop()
        assert bodies_in(other) == ["c", "d"]
        with connect(other) as broker:
            assert [*abandon(broker, find_source(broker, query.end.id))] == [(2, 0)]
        new = SmallQuery(other)
        assert new.run_to_end(new.reader()) == ["c", "d", "a", "b"]
        new.stop()
    assert query.run_to_end(reader) == ["c", "d"]


def test_a_checkpoint_of_another_queue_is_refused_by_name(here: BlockingBroker, new_query: NewQuery) -> None:
    send(here, "a")
    send(here, "b", queue="other")
    query = new_query()
    query.run_batch(query.reader())
    query.options["queue"] = "other"
    with pytest.raises(Superseded) as raised:
        query.plan(query.reader())
    assert str(raised.value) == (
        "the checkpoint belongs to the queue orders, and option queue is other: use another checkpoint for another "
        "queue"
    )
    assert bodies_in(here, "other") == ["b"]


def test_another_queue_is_refused_before_a_batch_is_repeated(here: BlockingBroker, new_query: NewQuery) -> None:
    """Otherwise the batch would have rows of both queues."""
    send(here, "a")
    send(here, "b", queue="other")
    query = new_query()
    query.plan(query.reader())
    query.options["queue"] = "other"
    with pytest.raises(Superseded, match=r"^the checkpoint belongs to the queue orders, and option queue is other"):
        query.replan(query.reader())
    assert (bodies_in(here), bodies_in(here, "other")) == (["a"], ["b"])


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["at once", "after 8 days"])
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_an_older_checkpoint_is_refused_before_anything_is_taken(
    here: BlockingBroker, new_query: NewQuery, batches: int, is_forgotten: bool
) -> None:
    send(here, *"abcde")
    query = new_query(maxRowsPerTrigger="1")
    reader = query.reader()
    for _ in range(4):
        query.run_batch(reader)
    # This clears the fourth.
    query.plan(reader)
    if is_forgotten:
        forget_numbers(here, query.end.id)
    older = rewind(query, 1 + batches)
    first = f"batch {4 - batches} of this query was cleared, like all up to 4: the checkpoint is older than the"
    if older.offsets:
        with pytest.raises(Superseded, match=first):
            older.plan(older.reader())
        # Its last batch may be one that is to be repeated.
        with pytest.raises(Superseded, match=first):
            older.replan(older.reader())
    older.stop()
    assert bodies_in(here) == ["e"]


@pytest.mark.parametrize("is_to_be_repeated", [False, True])
def test_a_broker_that_was_restored_is_noticed_before_anything_is_taken(
    here: BlockingBroker, new_query: NewQuery, is_to_be_repeated: bool
) -> None:
    send(here, *"abcdef")
    query = new_query(maxRowsPerTrigger="1")
    reader = query.reader()
    for _ in range(5):
        query.run_batch(reader)
    reader.stop()
    # As it was when the second batch was done: the third is in the queue again.
    _set_mark(here, query, 2)
    send(here, *"cde")
    restored = query.reader()
    with pytest.raises(Superseded) as raised:
        query.replan(restored) if is_to_be_repeated else query.plan(restored)
    assert str(raised.value) == (
        "the broker knows this query up to batch 2, and the checkpoint is at batch "
        "5: the query was forgotten, or the broker restored from an older copy, so that rows may be lost or come "
        "twice; start the query with a new checkpoint"
    )
    assert sorted(bodies_in(here)) == ["c", "d", "e", "f"]


def test_a_new_checkpoint_begins_a_new_query(here: BlockingBroker, new_query: NewQuery) -> None:
    send(here, *"abc")
    first = new_query(maxRowsPerTrigger="1")
    first.run_batch(first.reader())
    second = new_query()
    assert second.run_to_end(second.reader()) == ["b", "c"]
    assert first.end.id != second.end.id


def test_a_driver_that_dies_between_mark_and_purge_leaves_nothing(
    here: BlockingBroker, new_query: NewQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(here, *"ab")
    query = new_query(maxRowsPerTrigger="1")
    query.run_batch(query.reader())
    with monkeypatch.context() as patch:
        patch.setattr("truenext.spark.source.driver.purge", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            query.plan(query.reader())
    with connect(here) as broker:
        assert read_mark(broker, query.end.mark_queue) == 1
    own = query.end.bundle_queue(0)
    assert here.queue(own).waiting == 1
    query.plan(query.reader())
    assert here.queue(own).waiting == 0


def _set_mark(here: BlockingBroker, query: SmallQuery, batch: int) -> None:
    taker = client(here)
    taker.subscribe(query.end.mark_queue)
    taker.ack(taker.message(), confirmed=True)
    taker.disconnect()
    send(here, f'{{"batch": {batch}}}', queue=query.end.mark_queue)
