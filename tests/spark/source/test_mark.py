"""Tests of the mark of a query, also when drivers that replace it die or come late."""

import pytest

from tests.spark.source.small_query import client, connect, send
from truenext.model.spark_queues import CLOSED_BATCH
from truenext.spark.broker.latest import purge
from truenext.spark.source.mark import close_mark, mark_producer, read_mark, replace_mark
from truenext.spark.source.task import Superseded
from truenext.testing import BlockingBroker

QUEUE = "Spark.source.main.q"


def test_a_query_that_has_none_is_at_0(here: BlockingBroker) -> None:
    with connect(here) as broker:
        assert read_mark(broker, QUEUE) == 0
    assert here.queue(QUEUE).waiting == 0


def test_the_mark_is_the_last_one_and_alone(here: BlockingBroker) -> None:
    with connect(here) as broker:
        for batch in (1, 2, 7):
            replace_mark(broker, QUEUE, batch, mark_producer("q"), batch)
            assert read_mark(broker, QUEUE) == batch
    here.crash()
    (mark,) = here.queue(QUEUE).messages
    assert (mark.body, mark.headers["truenext-attempts"]) == (b'{"batch":7}', "0")


def test_a_mark_is_not_put_back(here: BlockingBroker) -> None:
    with connect(here) as broker:
        replace_mark(broker, QUEUE, 5, mark_producer("q"), 5)
    error = rf"^batch 5 is done already \(mark in {QUEUE}\): another run of this query is ahead"
    with connect(here) as broker, pytest.raises(Superseded, match=error):
        replace_mark(broker, QUEUE, 4, mark_producer("q"), 4)
    with connect(here) as broker:
        assert read_mark(broker, QUEUE) == 5


def test_a_driver_that_comes_late_with_the_same_batch_changes_nothing(here: BlockingBroker) -> None:
    """The number of the batch prevents a change, though the driver has seen an older mark."""
    late = client(here)
    late.begin("late")
    late.send(QUEUE, b'{"batch":2}', persistent=True, transaction="late")
    with connect(here) as broker:
        replace_mark(broker, QUEUE, 2, mark_producer("q"), 2)
    late.commit("late", headers={"truenext-producer": "spark/q/mark", "truenext-number": "2"})
    late.disconnect()
    assert here.queue(QUEUE).bodies == [b'{"batch":2}']


def test_higher_of_two_marks_counts_and_the_next_replaces_both(here: BlockingBroker) -> None:
    """One of the marks was held by a dead driver for a while."""
    with connect(here) as broker:
        replace_mark(broker, QUEUE, 1, mark_producer("q"), 1)
    holder = client(here)
    holder.subscribe(QUEUE)
    holder.message()
    with connect(here) as broker:
        assert read_mark(broker, QUEUE) == 0
        replace_mark(broker, QUEUE, 2, mark_producer("q"), 2)
    holder.disconnect()
    with connect(here) as broker:
        assert read_mark(broker, QUEUE) == 2
        assert here.queue(QUEUE).waiting == 2
        replace_mark(broker, QUEUE, 3, mark_producer("q"), 3)
    assert here.queue(QUEUE).bodies == [b'{"batch":3}']


def test_a_closed_query_has_no_batch_more(here: BlockingBroker) -> None:
    with connect(here) as broker:
        replace_mark(broker, QUEUE, 1, mark_producer("q"), 1)
        for _ in range(2):
            close_mark(broker, QUEUE, "q")
            assert read_mark(broker, QUEUE, allow_closed=True) == CLOSED_BATCH
        with pytest.raises(Superseded, match=rf"^this query was abandoned \(mark in {QUEUE}\): start it with a new"):
            read_mark(broker, QUEUE)
    assert here.queue(QUEUE).waiting == 1


def test_a_purge_removes_what_its_selector_wants_and_knows_no_queue_that_is_not_there(here: BlockingBroker) -> None:
    for batch in "123":
        send(here, batch, queue=f"{QUEUE}.0", headers={"spark_batch": batch})
    with connect(here) as broker:
        assert purge(broker, f"{QUEUE}.0", "spark_batch <= 2") == 2
        assert purge(broker, f"{QUEUE}.0", "spark_batch <= 2") == 0
        assert purge(broker, f"{QUEUE}.1", "spark_batch <= 2") == 0
    assert here.queue(f"{QUEUE}.0").bodies == [b"3"]
