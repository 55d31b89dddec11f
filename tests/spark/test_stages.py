"""Tests of the audit of stages: their events joined with the broker's history show what happened, and every
contradiction is found."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess, dying_with_us
from tests.spark.queues import read_events
from tests.spark.shop import shop
from truenext.cli.audit import audit as audit_command
from truenext.errors import ConfigurationError
from truenext.flows import events as written
from truenext.flows.model import flow_of
from truenext.history.stage_files import FORMAT, stage_files
from truenext.spark.schema import EVENTS
from truenext.spark.stages.flows import flows
from truenext.spark.stages.judge import audit_stages
from truenext.spark.stages.schema import STAGE_EVENTS, read_stage_events
from truenext.spark.waterfalls import recorded_flows, waterfalls_html

pytestmark = pytest.mark.timeout(900)

ORDERS = 12
ROOT = Path(__file__).parents[2]
EventRow = dict[str, Any]


class Story(NamedTuple):
    data: Path
    """Data folder of the broker."""
    events_folder: Path
    """Folder with the events of the services."""
    history: list[EventRow]
    stages: list[EventRow]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Story]:
    """A story with retries, dead letters, a process that is killed, and one that then does its work."""
    folder = tmp_path_factory.mktemp("stages")
    events_folder = folder / "told"
    broker = BrokerProcess(folder)
    broker.start()
    try:
        url = f"stomp://127.0.0.1:{broker.port}"
        killed = subprocess.run(
            dying_with_us([sys.executable, "-m", "tests.spark.shop", url, str(events_folder)]),
            cwd=ROOT,
            timeout=60,
            check=False,
        )
        assert killed.returncode == -9
        asyncio.run(serve(broker, url, events_folder))
        broker.stop()
        history = read_events(spark, broker.data).orderBy("event").collect()
        stages = [json.loads(line) for path in stage_files(events_folder) for line in path.read_bytes().splitlines()]
        yield Story(broker.data, events_folder, [row.asDict() for row in history], stages)
    finally:
        broker.clean_up()


async def serve(broker: BrokerProcess, url: str, folder: Path) -> None:
    app = shop(url, str(folder))
    endpoints = app.endpoints
    async with app.running():
        for number in range(ORDERS):
            item = "tea" if number % 3 else "milk"
            assert await app.ask(endpoints["order.place"], item, trace=f"order {number}")
        await app.send(endpoints["broken"], "b", trace="broken")
        await app.send(endpoints["refused"], "r", trace="refused")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            queues = await asyncio.to_thread(broker.queues)
            if not any(each.waiting + each.unacknowledged for name, each in queues.items() if name[:4] != "DLQ."):
                return
            assert time.monotonic() < deadline, queues
            await asyncio.sleep(0.05)


class Judged:
    """A story that a test changes, and the findings of its audit."""

    def __init__(self, story: Story, spark: SparkSession) -> None:
        self.history = deepcopy(story.history)
        self.stages = deepcopy(story.stages)
        self._spark = spark

    def run(self, trace: str, queue: str, outcome: str = "completed", at: int = 0) -> EventRow:
        """Return the `started` event of an execution by its flow, its queue and its outcome."""
        over = {(each["process"], each["execution"]): each["kind"] for each in self.stages if "execution" in each}
        found = [
            each
            for each in self.stages
            if each["kind"] == "started"
            and each.get("queue") == queue
            and each["trace"] == trace
            and over.get((each["process"], each["number"]), "") == outcome
        ]
        return found[at]

    def end(self, started: EventRow) -> EventRow:
        return next(
            each
            for each in self.stages
            if each["process"] == started["process"] and each.get("execution") == started["number"]
        )

    def forget(self, started: EventRow, kind: str) -> EventRow:
        """Remove the event of this kind about an execution's message from the history, and return it."""
        event = next(
            each
            for each in self.history
            if each["kind"] == kind and (each["queue"], each["sequence"]) == (started["queue"], started["sequence"])
        )
        self.history.remove(event)
        return event

    def judge(self, **options: Any) -> Any:
        def rows(events: list[EventRow], schema: Any) -> DataFrame:
            return self._spark.createDataFrame(
                [tuple(each.get(name) for name in schema.names) for each in events], schema
            )

        return audit_stages(rows(self.stages, STAGE_EVENTS), rows(self.history, EVENTS), **options)


@pytest.fixture
def judged(story: Story, spark: SparkSession) -> Judged:
    return Judged(story, spark)


def test_columns_of_stage_events_are_the_fields_that_are_written() -> None:
    fields = {name for kind in written.EVENTS for name in kind.__struct_fields__} | {"kind"}
    assert fields == set(STAGE_EVENTS.names)


@pytest.mark.alternates("whole audits")
def test_retries_dead_letters_and_a_process_that_was_killed_are_no_findings(story: Story) -> None:
    done = CliRunner().invoke(audit_command, [str(story.data), "--stages", str(story.events_folder)])
    assert done.exit_code == 0, done.output
    messages = 5 * ORDERS + 3
    runs = messages + 8 + 2
    flows = 3 * ORDERS + 3
    assert f"Stages: {runs} runs with {messages} messages in {flows} flows." in done.output
    assert "Messages of 2 of these were given up, and 0 are in progress." in done.output


def renumber(stages: list[EventRow]) -> None:
    """Number the events anew, so that none seems to be missing."""
    numbers: dict[tuple[str, int], int] = {}
    for process in {each["process"] for each in stages}:
        own = sorted((each for each in stages if each["process"] == process), key=lambda each: int(each["number"]))
        for number, each in enumerate(own):
            numbers[process, each["number"]] = number
            each["number"] = number
            if "execution" in each:
                each["execution"] = numbers[process, each["execution"]]


@pytest.mark.alternates("audits of stages")
def test_contradictions_of_stages_and_history_are_found(judged: Judged) -> None:
    # Acknowledged by the stages' account, and still there by the broker's.
    held = judged.run("order 1", "order.place")
    judged.forget(held, "acknowledged")
    again = judged.run("order 2", "order.place")
    event = judged.forget(again, "acknowledged")
    # In its place, so that no other event is missing for that.
    judged.history.append(event | {"kind": "returned", "reason": "lost"})
    # Acknowledged by a process that says nothing of it.
    silent = judged.run("order 3", "order.place")
    judged.stages.remove(judged.end(silent))
    unheard = judged.run("order 4", "order.place")
    judged.stages.remove(judged.end(unheard))
    judged.stages.remove(unheard)
    renumber(judged.stages)
    # Ended once more.
    twice = judged.run("order 5", "price")
    judged.stages.append(twice | {"process": "other", "number": 1, "sequence": 1 << 40})
    judged.stages.append(judged.end(twice) | {"process": "other", "number": 2, "execution": 1})
    # There, though its stage was not committed.
    parent = judged.run("order 8", "order.place.stage.reserve")
    judged.forget(parent, "acknowledged")
    judged.end(parent)["kind"] = "failed"
    # Not these: what went on from a stash, and what a dead letter has sent when it was re-driven.
    stashed = judged.run("order 9", "order.place")
    judged.forget(stashed, "acknowledged")
    judged.end(stashed)["kind"] = "failed"
    judged.run("order 9", "price")["sender"] = "shop"
    redriven = judged.run("order 11", "order.place")
    event = judged.forget(redriven, "acknowledged")
    judged.history.append(event | {"kind": "dead-lettered"})
    judged.end(redriven)["kind"] = "rejected"
    results = judged.judge()
    rows = results.tables["stage_findings"].collect()
    assert sum(each.count for each in results.findings) == len(rows)
    assert {(row["kind"], row["trace"] or "", row["queue"], row["detail"]) for row in rows} == {
        ("unacknowledged", "order 1", "order.place", "held"),
        # What came of it was there as well.
        ("orphaned", "order 1", "price", "sent by shop order.place"),
        ("unacknowledged", "order 2", "order.place", "came again"),
        ("orphaned", "order 2", "price", "sent by shop order.place"),
        ("not recorded", "order 3", "order.place", "nothing recorded"),
        (*("not recorded", ""), "order.place", "nothing recorded"),
        ("repeated", "order 5", "price", "2 times"),
        ("orphaned", "order 8|mail", "mail", "sent by shop order.place.stage.reserve"),
    }


@pytest.mark.alternates("audits of stages")
def test_missing_and_repeated_events_are_no_findings_and_a_commit_gap_is_listed(judged: Judged) -> None:
    failed = judged.run("order 4", "price", "failed")
    # The process was killed between this one's commit and telling of it; and its older files are gone.
    last = judged.end(judged.run("order 10", "price"))
    last["kind"] = "SQL committed"
    own = [each for each in judged.stages if each["process"] == failed["process"]]
    for missing in (*own[1:12], *own[own.index(last) + 1 :]):
        judged.stages.remove(missing)
    # With a number that is there, so that none is missing.
    judged.stages.append({**failed, "kind": "SQL committed", "execution": failed["number"]})
    # A folder that is named twice.
    judged.stages += deepcopy(judged.stages)
    # Only one queue is asked for, so nothing of others is judged.
    judged.history = [each for each in judged.history if each["queue"] in ("price", None)]
    results = judged.judge(queue="price")
    assert not results.findings
    assert {row["stage"] for row in results.tables["stage_runs"].collect()} == {"price"}
    assert [
        (row["trace"], row["queue"], row["attempt"], row["outcome"], row["error"])
        for row in results.tables["commit_gaps"].collect()
    ] == [("order 4", "price", 1, "failed", "Busy")]
    assert "Once SQL was committed" in results.notes[1]


@pytest.mark.alternates("audits of stages")
def test_exactly_once_messages_may_be_sent_before_the_ack_and_redelivered(judged: Judged) -> None:
    # It was sent by another one before its message was acknowledged, which it is not yet.
    parent = judged.run("order 8", "order.place.stage.reserve")
    judged.forget(parent, "acknowledged")
    judged.stages.remove(judged.end(parent))
    # A foreign program has sent the same twice.
    twice = judged.run("order 5", "price")
    judged.stages.append(twice | {"process": "other", "number": 1, "sequence": 1 << 40})
    judged.stages.append(
        judged.end(twice) | {"process": "other", "number": 2, "execution": 1, "kind": "already processed"}
    )
    renumber(judged.stages)
    # SQL was committed, and its message came again.
    failed = judged.run("order 4", "price", "failed")
    judged.stages.append({**failed, "kind": "SQL committed", "execution": failed["number"]})
    for each in judged.stages:
        if each["kind"] == "started":
            each["exactly_once"] = True
    results = judged.judge()
    assert not results.findings
    assert [(row["trace"], row["exactly_once"]) for row in results.tables["commit_gaps"].collect()] == [
        ("order 4", True)
    ]
    assert "Once SQL was committed" in results.notes[1]
    assert "have no effect twice" in results.notes[1]
    assert [row["already_processed"] for row in results.tables["stages"].where("stage = 'price'").collect()] == [1]


@pytest.mark.alternates("audits of stages")
def test_events_that_are_lost_or_not_recorded_yet_cause_no_finding(judged: Judged) -> None:
    silent = judged.run("order 3", "order.place")
    judged.stages.remove(judged.end(silent))
    held = judged.run("order 1", "order.place")
    event = judged.forget(held, "acknowledged")["event"]
    # It was read before the services' events were, which go on.
    last = judged.run("order 10", "order.place")
    until = judged.forget(last, "acknowledged")["event"]
    judged.history = [each for each in judged.history if each["event"] < until]
    results = judged.judge(last_gap=event + 1)
    assert not results.findings
    assert results.notes[1:] == (
        "A process of stages has lost events; what only these events could show was not judged.",
    )
    # The flows are told all the same, and what the page says of each is what its executions say.
    for flow in recorded_flows(results.tables["waterfalls"].toPandas()):
        assert flow_of(flow.executions) == flow
    drawn = waterfalls_html(results.tables["waterfalls"].toPandas())
    for text in (
        "order 7|mail",
        "order.place.stage.reserve",
        "failed: Busy, then completed",
        "interrupted, then completed",
    ):
        assert text in drawn
    assert [row["failed"] for row in results.tables["stages"].where("stage = 'price'").collect()] == [8]


@pytest.mark.alternates("audits of stages")
def test_message_acknowledged_in_the_history_is_not_in_progress(judged: Judged) -> None:
    """A killed process may have committed more than it had recorded."""
    for kind, order in (("completed", "order 1"), ("acknowledged", "order 2")):
        started = judged.run(order, "order.place.stage.reserve")
        judged.stages.remove(judged.end(started))
        if kind == "acknowledged":
            judged.forget(started, kind)
    flows = judged.judge().tables["flows"].where("in_progress > 0").collect()
    assert [(row["trace"], row["in_progress"]) for row in flows] == [("order 2", 1)]


def test_events_that_cannot_be_read_are_refused_with_what_is_wrong(
    judged: Judged, story: Story, tmp_path: Path, spark: SparkSession
) -> None:
    for format in (FORMAT - 1, FORMAT + 1):
        judged.stages[0]["format"] = format
        process = judged.stages[0]["process"]
        with pytest.raises(
            ConfigurationError,
            match=rf"in {process}-\*.jsonl have format {format}; this truenext reads {FORMAT}: use the version that",
        ):
            judged.judge()
    with pytest.raises(ConfigurationError, match="no events of stages in"):
        read_stage_events(spark, [tmp_path])


def test_files_of_the_first_format_are_refused(judged: Judged, tmp_path: Path, spark: SparkSession) -> None:
    opened = '{"kind":"opened","process":"p","n":0,"at":1,"format":1,"service":"shop","instance":"shop"}'
    (tmp_path / "p-000001.jsonl").write_text(f'{opened}\n{{"kind":"closed","process":"p","n":1,"at":1}}\n')
    with pytest.raises(ConfigurationError, match="have format 1; this truenext reads 2: use the version that wrote"):
        audit_stages(read_stage_events(spark, [tmp_path]), spark.createDataFrame([], EVENTS))


def test_a_truncated_line_is_left_out(tmp_path: Path, spark: SparkSession) -> None:
    (tmp_path / "p-000001.jsonl").write_text(
        '{"kind":"closed","process":"p","number":1,"at":1}\n{"kind":"started","proc'
    )
    assert [row["number"] for row in read_stage_events(spark, [tmp_path]).collect()] == [1]


@pytest.mark.alternates("audits of stages")
def test_message_that_a_job_of_spark_rejects_is_given_up(spark: SparkSession) -> None:
    """Fixed: it counted as ended, as the job had acknowledged it before."""
    at = datetime(2026, 11, 21, tzinfo=UTC)
    rows = [
        # Rejected by a job, answered by a job, rejected by a service and redriven to one that was killed.
        ("f1", "m1", "acknowledged", "rejected", True),
        ("f2", "m2", "acknowledged", "completed", True),
        ("f3", "m3", "acknowledged", "rejected", None),
        # Rejected by a job, and handled by a service that has the message since then.
        ("f4", "m4", "acknowledged", "rejected", True),
        ("f4", "m4", "acknowledged", "completed", None),
    ]
    names = "flow string, message string, end_kind string, outcome string, taken boolean"
    joined = spark.createDataFrame(rows, names).withColumns(
        {
            "trace": F.col("flow"),
            "started_at": F.lit(at),
            "ended_at": F.lit(at),
            "accepted_at": F.lit(at),
            "accepted_ms": F.lit(None).cast("bigint"),
            "given_up_for": F.when(F.col("outcome") == "rejected", "rejected"),
        }
    )
    found = flows(joined).select("flow", "given_up", "in_progress").orderBy("flow").collect()
    assert [tuple(each) for each in found] == [("f1", 1, 0), ("f2", 0, 0), ("f3", 0, 0), ("f4", 0, 0)]
