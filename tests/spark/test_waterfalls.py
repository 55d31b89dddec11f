"""Tests that the flows which the console and `truenext stages flow` read are those of the audit of the same events."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.kept.unpacked import ARCHIVES, unpack
from tests.stages.recorded_events import decoded, random_events, write_events
from truenext.flows.event_files import EventFiles
from truenext.flows.model import RecordedFlow, executions_of, flows_of
from truenext.flows.reader import FlowReader
from truenext.history.stage_files import stage_files
from truenext.spark.schema import EVENTS
from truenext.spark.stages.flows import GIVEN_UP_MAX, RUNS_MAX, SLOWEST_MAX
from truenext.spark.stages.judge import audit_stages
from truenext.spark.stages.schema import read_stage_events
from truenext.spark.waterfalls import recorded_flows

pytestmark = pytest.mark.timeout(300)


def audited_flows(folder: Path, spark: SparkSession, history: DataFrame | None = None) -> list[RecordedFlow]:
    """Return the flows on the page of an audit of these events, without a history unless one is given."""
    events = spark.createDataFrame([], EVENTS) if history is None else history
    results = audit_stages(read_stage_events(spark, [folder]), events)
    return in_order(recorded_flows(results.tables["waterfalls"].toPandas()))


def flows_on_page(flows: list[RecordedFlow]) -> list[RecordedFlow]:
    """Return the flows that the audit shows of all flows, each with as many executions as it shows."""
    slowest = sorted(flows, key=lambda flow: -flow.seconds)[:SLOWEST_MAX]
    given_up = sorted((each for each in flows if each.given_up), key=lambda flow: -flow.started_at)[:GIVEN_UP_MAX]
    shown = {each.id: each for each in (*slowest, *given_up)}
    for each in shown.values():
        each.executions = each.executions[:RUNS_MAX]
    return in_order(list(shown.values()))


def in_order(flows: list[RecordedFlow]) -> list[RecordedFlow]:
    return sorted(flows, key=lambda flow: flow.id)


def columns_of(flow: RecordedFlow) -> dict[str, Any]:
    """Return all columns of the table `waterfalls` for a flow, to compare them one by one."""
    executions = [{name: getattr(each, name) for name in each.__struct_fields__} for each in flow.executions]
    return {name: getattr(flow, name) for name in flow.__struct_fields__} | {"executions": executions}


def compare(flows: list[RecordedFlow], audited: list[RecordedFlow]) -> None:
    assert [each.id for each in flows] == [each.id for each in audited]
    for own, other in zip(flows, audited, strict=True):
        assert columns_of(own) == columns_of(other)


@pytest.mark.alternates("waterfalls")
def test_waterfalls_of_random_events_equal_those_of_the_audit(tmp_path: Path, spark: SparkSession) -> None:
    seed = Random().randrange(1 << 30)
    events = random_events(Random(seed), 200)
    write_events(tmp_path, events)
    flows = flows_of(executions_of(decoded(events)))
    assert {flow.has_ended for flow in flows} == {flow.given_up > 0 for flow in flows} == {True, False}, seed
    assert max(flow.runs for flow in flows) > RUNS_MAX
    compare(flows_on_page(flows), audited_flows(tmp_path, spark))


@pytest.mark.alternates("waterfalls")
def test_waterfalls_of_kept_events_equal_those_of_the_audit(tmp_path: Path, spark: SparkSession) -> None:
    folder = unpack(ARCHIVES[-1], tmp_path) / "stages"
    assert stage_files(folder)
    reader = FlowReader([folder])
    while reader.read():
        pass
    flows = reader.latest(1000)
    assert flows and not reader.problems
    assert sum(len(chunk) for chunk in EventFiles([folder], first_bytes_max=1 << 30).read(1 << 30)) > len(flows)
    compare(flows_on_page(flows), audited_flows(folder, spark))
