"""Tests of a sink whose broker was restored: a query of the original fails by name, and a new one goes on.

Source of what is expected: docs/contract.md, C29.16; docs/spark.md
"""

from __future__ import annotations

import pytest

from tests.restored import restored
from tests.spark.faults import Fault, planted
from tests.spark.sink.small_write import (
    QUEUES,
    bodies_in,
    commit,
    connecting,
    draft,
    drafts_waiting,
    last_decision,
    write_batch,
)
from truenext.model.spark_queues import Decision, SinkQueues
from truenext.spark.broker.latest import replace_latest
from truenext.spark.broker.patience import Patience
from truenext.spark.sink import decision
from truenext.spark.sink.admin import close_sink
from truenext.spark.sink.decision import decide
from truenext.spark.sink.driver import OutdatedBatch, commit_batch
from truenext.testing import BlockingBroker

OTHER_BROKER = "^the last decision of this query was made at a broker whose data has the name "


def check_query_fails_by_name(here: BlockingBroker) -> None:
    """Publish a batch before a backup and one since, and see that the query of the original fails where the latter is
    missing."""
    write_batch(here, 0, "a")
    with restored(here) as other:
        write_batch(here, 1, "b")
        # A batch without rows must not pass either.
        for drafts in ((), draft(other, 2, "c")):
            with pytest.raises(OutdatedBatch, match=OTHER_BROKER):
                commit(other, 2, drafts)
        assert bodies_in(other) == ["a"]
        last = last_decision(other)
        assert last is not None
        assert last.batch == 0
    write_batch(here, 2, "c")
    assert bodies_in(here) == ["a", "b", "c"]


def test_query_fails_by_name_at_a_broker_that_was_restored(here: BlockingBroker) -> None:
    check_query_fails_by_name(here)


def test_decision_without_an_identity_is_noticed(here: BlockingBroker) -> None:
    fault = Fault("a decision does not name its broker", decision, "decide", ', "store": broker.store_id', "")
    with planted(fault), pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_query_fails_by_name(here)


def test_broker_with_the_identity_of_the_original_is_noticed(
    here: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.restored.new_identity", lambda: here._local._store._identity)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_query_fails_by_name(here)


def test_output_decided_before_the_backup_is_published_by_abandon_alone(here: BlockingBroker) -> None:
    drafts = draft(here, 0, *"abc")
    with connecting(here)() as broker:
        assert decide(broker, QUEUES, Decision(0, drafts), None)
    with restored(here) as other:
        with pytest.raises(OutdatedBatch, match=OTHER_BROKER):
            write_batch(other, 1, "d")
        assert bodies_in(other) == []
        with connecting(other)() as broker:
            assert close_sink(broker, QUEUES) == 0
        assert bodies_in(other) == [*"abc"]
        with pytest.raises(OutdatedBatch, match=r"^this query was abandoned, after batch 0"):
            write_batch(other, 1, "d")
        new = SinkQueues("main", "query-2")
        commit_batch(new, 0, (), connecting(other), Patience(0))
    commit(here, 0, ())
    assert bodies_in(here) == [*"abc"]
    assert drafts_waiting(here) == 0


def test_decision_of_an_earlier_version_is_followed_and_the_next_one_names_the_broker(here: BlockingBroker) -> None:
    with connecting(here)() as broker:
        store = broker.store_id
        assert replace_latest(
            broker, QUEUES.decisions, {"batch": 0, "drafts": []}, QUEUES.producer, 1, replaces=lambda _: True
        )
    write_batch(here, 1, "b")
    last = last_decision(here)
    assert last is not None
    assert (last.batch, last.store) == (1, store)
    assert bodies_in(here) == ["b"]
