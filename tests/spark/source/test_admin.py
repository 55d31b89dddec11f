"""Tests of operations on queries: each row is in one place afterwards, whatever runs meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from tests.spark.source.small_query import SmallQuery, bodies_in, client, connect, send
from tests.spark.stage_job.messages import request
from truenext.errors import ConnectionLost, TruenextError
from truenext.flows.envelope import ReplyTo, encode_envelope
from truenext.model.spark_queues import QueryStatus
from truenext.spark.admin import abandon, find_source
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.source import admin
from truenext.spark.source.admin import list_queries, reject
from truenext.spark.source.mark import close_mark
from truenext.spark.source.task import Superseded
from truenext.testing import BlockingBroker

NewQuery = Callable[..., SmallQuery]


def listed(here: BlockingBroker) -> list[QueryStatus]:
    with connect(here) as broker:
        return list_queries(broker)


def abandoned(here: BlockingBroker, query: SmallQuery) -> int:
    """Abandon the query, and return the number of rows that were returned."""
    with connect(here) as broker:
        return sum(returned for returned, _ in abandon(broker, find_source(broker, query.end.id)))


def test_a_broker_without_queries_lists_none(here: BlockingBroker) -> None:
    send(here, "a")
    send(here, "b", queue="Spark.source")
    assert listed(here) == []


def test_a_query_is_listed_with_what_it_has_not_cleared(here: BlockingBroker, new_query: NewQuery) -> None:
    before_ms = int(time.time() * 1000)
    send(here, *"abcde")
    query = new_query(maxRowsPerTrigger="2", partitions="2", space="team")
    reader = query.reader()
    query.run_batch(reader)
    query.run_batch(reader)
    (status,) = listed(here)
    end = query.end
    assert (status.space, status.id, status.source, status.batch) == ("team", end.id, "orders", 2)
    assert (status.rows, status.bytes, status.is_abandoned) == (2, 2, False)
    assert before_ms <= status.since_ms <= int(time.time() * 1000)
    assert sorted(status.bundle_queues) == [end.bundle_queue(0), end.bundle_queue(1)]
    query.run_to_end(reader)
    (status,) = listed(here)
    assert (status.batch, status.rows, status.since_ms, status.bundle_queues) == (3, 0, 0, [])


def test_a_query_is_found_by_the_beginning_of_its_id(
    here: BlockingBroker, new_query: NewQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(here, *"ab")
    first, second = (new_query(maxRowsPerTrigger="1") for _ in range(2))
    for each in (first, second):
        each.run_batch(each.reader())
    with connect(here) as broker:
        assert find_source(broker, first.end.id[:12]).id == first.end.id
        with pytest.raises(
            TruenextError, match=r"^query 'none' that reads: there is none; give a whole ID of `truenext spark list`"
        ):
            find_source(broker, "none")
        monkeypatch.setattr("truenext.spark.admin.BEGINNING_LENGTH_MIN", 0)
        with pytest.raises(TruenextError, match=r"^query '' that reads: several match; give a whole ID"):
            find_source(broker, "")


def test_an_abandoned_query_gives_its_rows_back_as_they_were(here: BlockingBroker, query: SmallQuery) -> None:
    # Of the second, a float of seconds is a little less.
    expires_ms = [1_800_000_000_001, 34_811_805_806_479]
    headers = {
        "JMSXGroupID": "g",
        "JMSXGroupSeq": "3",
        "correlation-id": "c",
        "reply-to": "/queue/answers",
        "content-type": "text/plain",
        "colour": "rot: \n grün",
        "empty": "",
    }
    for each in expires_ms:
        send(here, b"\xff\0", priority=7, headers=headers | {"expires": str(each)}, confirmed=False)
    send(here, "plain", persistent=False)
    sent = here.queue("orders").messages
    query.run_batch(query.reader())
    assert here.queue("orders").waiting == 0
    assert abandoned(here, query) == 3
    own = {"truenext-sequence", "message-id", "timestamp", "truenext-deliveries", "redelivered", "subscription"}
    returned = here.queue("orders").messages
    for before, after in zip(sent, returned, strict=True):
        assert after.body == before.body
        assert {name: text for name, text in after.headers.items() if name not in own} == {
            name: text for name, text in before.headers.items() if name not in own
        }
        assert int(after.headers["truenext-sequence"]) > int(sent[-1].headers["truenext-sequence"])
    (status,) = listed(here)
    assert (status.is_abandoned, status.batch, status.rows) == (True, 0, 0)


def test_second_abandon_of_a_query_changes_nothing(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, *"abc")
    query.run_batch(query.reader())
    assert [abandoned(here, query), abandoned(here, query)] == [3, 0]
    assert bodies_in(here) == ["a", "b", "c"]


@pytest.mark.parametrize("crashes", [False, True], ids=["", "crash"])
@pytest.mark.parametrize("steps", range(1, 5))
def test_a_query_that_runs_while_it_is_abandoned_fails_by_name_and_no_row_is_lost(
    here: BlockingBroker, new_query: NewQuery, monkeypatch: pytest.MonkeyPatch, steps: int, crashes: bool
) -> None:
    """Two tasks of the query have stopped at arbitrary points."""
    monkeypatch.setattr("truenext.spark.source.bundle.BUNDLE_ROWS", 2)
    send(here, *(str(number) for number in range(10)))
    query = new_query(partitions="2", maxRowsPerTrigger="8", patience="30")
    reader = query.reader()
    planned = query.plan(reader)
    tasks = [reader.read(each) for each in planned]
    seen: list[str] = []

    def step(number: int) -> None:
        seen.extend(row["body"].decode() for row in next(tasks[number]).to_pylist())

    for number in range(steps):
        step(number % 2)
    abandoned(here, query)
    if crashes:
        here.crash()
    is_whole = True
    for number in range(2):
        try:
            while True:
                step(number)
        except StopIteration:
            continue
        except Superseded as error:
            is_whole = False
            assert "was read and cleared by another run of this query" in str(error) or "was abandoned" in str(error)
    if is_whole:
        assert len(seen) == 8
    # The driver, whether its batch failed or was written.
    for again in (query.plan, query.replan):
        with pytest.raises(Superseded, match=r"this query was abandoned .*: start it with a new checkpoint$"):
            again(query.reader())
    # Of a batch that was read whole the effects are there, and maybe its rows in the queue, too.
    in_sink = set(seen) if is_whole else set()
    assert in_sink | set(bodies_in(here)) == {str(number) for number in range(10)}
    assert [status.rows for status in listed(here)] == [0]


def test_a_bundle_that_is_written_while_the_query_is_closed_is_returned(
    here: BlockingBroker, new_query: NewQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle did not exist when the query was looked up."""
    send(here, *"abc")
    query = new_query()
    reader = query.reader()
    planned = query.plan(reader)

    def run_and_close(broker: BrokerConnection, queue: str, query_id: str) -> None:
        query.finish(reader, planned)
        close_mark(broker, queue, query_id)

    with connect(here) as broker:
        query_status = QueryStatus("main", query.end.id)
        monkeypatch.setattr(admin, "close_mark", run_and_close)
        assert list(abandon(broker, query_status)) == [(3, 0)]
    assert bodies_in(here) == ["a", "b", "c"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("commits", range(4))
def test_abandon_that_was_interrupted_can_be_repeated(
    here: BlockingBroker, query: SmallQuery, monkeypatch: pytest.MonkeyPatch, when: str, commits: int
) -> None:
    monkeypatch.setattr("truenext.spark.source.bundle.BUNDLE_ROWS", 1)
    monkeypatch.setattr(admin, "PARTITIONS_MAX", 1)
    send(here, *"abc")
    query.run_batch(query.reader())
    call = BrokerConnection.call
    left = [commits]

    def call_or_die(self: BrokerConnection, command: str, headers: dict[str, str], body: bytes = b"") -> object:
        if command == "COMMIT":
            left[0] -= 1
            if left[0] == -1:
                if when == "after":
                    call(self, command, headers, body)
                self.close()
                raise ConnectionLost("the operator has died")
        return call(self, command, headers, body)

    with monkeypatch.context() as patch:
        patch.setattr(BrokerConnection, "call", call_or_die)
        with pytest.raises(ConnectionLost, match="the operator has died"):
            abandoned(here, query)
    abandoned(here, query)
    assert sorted(bodies_in(here)) == ["a", "b", "c"]


def test_a_rejected_row_is_in_the_dead_letter_queue_and_the_others_are_read(
    here: BlockingBroker, query: SmallQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.spark.source.bundle.BUNDLE_ROWS", 3)
    headers = {"colour": "red", "expires": str(int(datetime(2100, 1, 1, tzinfo=UTC).timestamp() * 1000))}
    for body in "abcdefg":
        send(here, body, persistent=False, headers=headers)
    reader = query.reader()
    planned = query.plan(reader)
    rows = [row for each in planned for batch in reader.read(each) for row in batch.to_pylist()]
    (sequence,) = (row["sequence"] for row in rows if row["body"] == b"b")
    with connect(here) as broker:
        assert reject(broker, find_source(broker, query.end.id), sequence) == "orders"
        with pytest.raises(TruenextError, match=f"^no bundle of query {query.end.id} has message {sequence}$"):
            reject(broker, find_source(broker, query.end.id), sequence)
    # In the order in which they were taken, though a bundle was written anew.
    assert query.finish(query.reader(), query.replan(query.reader())) == [*"acdefg"]
    here.crash()
    (letter,) = here.queue("DLQ.orders").messages
    assert (letter.body, letter.headers["colour"], letter.headers.get("expires")) == (b"b", "red", None)
    assert (letter.headers["persistent"], letter.headers["truenext-attempts"]) == ("true", "0")
    assert letter.headers["truenext-original-destination"] == "/queue/orders"
    assert letter.headers["truenext-original-last-cause"] == "rejected by truenext spark reject"


@pytest.mark.parametrize("act", ["reject", "abandon"])
def test_a_row_of_a_stage_keeps_the_addresses_told_of_its_failure(
    here: BlockingBroker, query: SmallQuery, act: str
) -> None:
    envelope = request(1, [ReplyTo("/topic/replies.shop.1", report="/queue/reports")])
    send(here, encode_envelope(envelope).decode())
    query.run_batch(query.reader())
    with connect(here) as broker:
        status = find_source(broker, query.end.id)
        if act == "reject":
            reject(broker, status, 1)
            (told,) = here.queue("reports").messages
            assert (told.headers["correlation-id"], told.headers["truenext-failure"]) == (envelope.flow.id, "report")
        else:
            list(abandon(broker, status))
            (row,) = here.queue("orders").messages
            assert row.headers["truenext-report-to"] == "/queue/reports"


def test_the_only_row_of_a_query_can_be_rejected(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, "a")
    reader = query.reader()
    query.run_batch(reader)
    with connect(here) as broker:
        reject(broker, find_source(broker, query.end.id), 1)
    assert query.finish(reader, query.replan(reader)) == []
    assert query.run_to_end(reader) == []
    assert bodies_in(here, "DLQ.orders") == ["a"]


def test_messages_that_an_operator_held_return_without_an_attempt(here: BlockingBroker, query: SmallQuery) -> None:
    send(here, *"ab")
    reader = query.reader()
    query.run_batch(reader)
    with connect(here) as broker:
        status = find_source(broker, query.end.id)
        with pytest.raises(TruenextError):
            reject(broker, status, 99)
        lost = abandon(broker, status)
        next(lost)
        broker.close()
    (bundle,) = here.queue(query.end.bundle_queue(0)).messages or [None]
    assert bundle is None
    # What waits was never charged.
    viewer = client(here)
    viewer.subscribe("orders")
    assert [each.headers["truenext-attempts"] for each in viewer.messages(2)] == ["0", "0"]
    viewer.disconnect()
