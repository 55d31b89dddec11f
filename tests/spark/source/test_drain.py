"""Test that a query that reads and writes queues goes on during a drain, though its tasks open connections."""

from __future__ import annotations

from collections.abc import Callable

from tests.spark.sink.small_write import commit, draft
from tests.spark.source.small_query import SmallQuery, connect, send
from truenext.testing import BlockingBroker


def test_query_from_queue_to_queue_empties_its_queue_during_a_drain(
    here: BlockingBroker, new_query: Callable[..., SmallQuery]
) -> None:
    # C31.3, C31.4
    query = new_query(patience="60")
    reader = query.reader()
    assert query.plan(reader) == []
    send(here, *"abcdefg")
    with connect(here) as operator:
        report = operator.ask("drain", {"draining": True})
        assert (report["draining"], report["waiting"]) == (True, 7)
        rows = query.run_batch(reader)
        assert rows == [*"abcdefg"]
        commit(here, 0, draft(here, 0, *rows, patience_s=60), patience_s=60)
        assert query.plan(reader) == []
        report = operator.ask("drain")
        assert [(each["queue"], each["waiting"]) for each in report["queues"]] == [("out", 7)]
        assert operator.ask("purge", {"queue": "out"})["moved"] == 7
        report = operator.ask("drain")
        assert (report["drained"], report["kept"]) == (True, 2)
