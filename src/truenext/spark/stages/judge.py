"""Audit of stages: joins the stages' events with a history, and returns tables, findings and notes.

events of stages ──▶ runs ──┬──▶ joined ──▶ findings, commit gaps, flows, waterfalls, stages
history ──▶ message_histories ──┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from truenext.errors import ConfigurationError
from truenext.history.stage_files import FORMAT, SUFFIX
from truenext.spark.stages.findings import SENTENCES, commit_gaps, stage_findings
from truenext.spark.stages.flows import flows, stage_runs, stages, waterfalls
from truenext.spark.stages.processes import processes
from truenext.spark.stages.runs import joined, message_histories, runs
from truenext.spark.verdict import FindingSummary

COMMIT_GAP, CLOSED_COMMIT_GAP = "commit gap", "closed commit gap"


@dataclass(frozen=True)
class StageResults:
    tables: dict[str, DataFrame]
    """Tables `stage_findings`, `commit_gaps`, `flows`, `waterfalls`, `stages`, `stage_runs`."""
    findings: tuple[FindingSummary, ...]
    notes: tuple[str, ...]
    cached: tuple[DataFrame, ...]


def audit_stages(
    stage_events: DataFrame,
    events: DataFrame,
    *,
    broker: str | None = None,
    is_only: bool = True,
    last_gap: int = 0,
    queue: str | None = None,
    since: datetime | None = None,
) -> StageResults:
    """Audit `stage_events`, the events of stages, against `events`, the history of the broker with the identity
    `broker`, None if it is not known. If `queue` is given, only this queue is audited. `last_gap` is the number of the
    last event that the history lacks; 0 if it lacks none.

    Executions of messages of other brokers are left out. If the broker `is_only`, executions that name no broker are
    its own, as services of earlier versions have recorded them.

    Raises: ConfigurationError if the events of stages have another format, or do not say which broker they belong to
    """
    stage_events = stage_events.persist()
    process_table = stage_events.transform(processes).persist()
    process_rows = process_table.collect()
    for row in process_rows:
        if row["format"] not in (None, FORMAT):
            raise ConfigurationError(
                f"the events of stages in {row['process']}-*{SUFFIX} have format {row['format']}; this truenext reads "
                f"{FORMAT}: use the version that wrote them, or move the files of that format out of the folder"
            )
    run_table = _of_broker(stage_events.transform(runs), broker, is_only)
    if queue is not None:
        run_table = run_table.where(F.col("queue") == queue)
    if since is not None:
        run_table = run_table.where(F.col("started_at") >= F.lit(since))
    run_table = run_table.persist()
    queues = run_table.where("queue is not null").select("queue").distinct()
    joined_table = joined(run_table, events.transform(message_histories, queues)).persist()
    found = stage_findings(joined_table, process_table, last_gap).persist()
    commit_gap_table = commit_gaps(joined_table, process_table).persist()
    flow_table = flows(joined_table).persist()
    kinds = found.select("kind").union(
        commit_gap_table.select(F.when(F.col("exactly_once"), CLOSED_COMMIT_GAP).otherwise(COMMIT_GAP))
    )
    counts = {row["kind"]: int(row["count"]) for row in kinds.groupBy("kind").count().collect()}
    findings = tuple(
        FindingSummary(kind, counts[kind], sentence.format(counts[kind]) + ".")
        for kind, sentence in SENTENCES.items()
        if kind in counts
    )
    incomplete = sum(not row["is_whole"] for row in process_rows)
    tables = {
        "stage_findings": found,
        "commit_gaps": commit_gap_table,
        "flows": flow_table,
        "waterfalls": waterfalls(joined_table, flow_table),
        "stages": stages(joined_table),
        "stage_runs": stage_runs(joined_table),
    }
    cached = (stage_events, process_table, run_table, joined_table, found, commit_gap_table, flow_table)
    return StageResults(tables, findings, _notes(flow_table, counts, incomplete), cached)


def _of_broker(run_table: DataFrame, broker: str | None, is_only: bool) -> DataFrame:
    if is_only:
        return run_table if broker is None else run_table.where(F.coalesce("broker", F.lit(broker)) == F.lit(broker))
    unknown = run_table.where("broker is null").select("process").first()
    if unknown is not None:
        raise ConfigurationError(
            f"the events of stages of process {unknown['process']} do not say which broker they belong to, since an "
            "earlier version recorded them: audit them with the history of one broker"
        )
    return run_table.where(F.col("broker") == F.lit(broker))


_COMMIT_GAP_SENTENCE = "SQL was committed and the message was not acknowledged with it"


def _times(count: int) -> str:
    return "Once" if count == 1 else f"{count:,} times"


def _notes(flows: DataFrame, counts: Mapping[str, int], incomplete: int) -> tuple[str, ...]:
    commit_gaps, closed_commit_gaps = counts.get(COMMIT_GAP, 0), counts.get(CLOSED_COMMIT_GAP, 0)
    count, messages, run_count, given_up, in_progress = flows.agg(
        F.count("*"),
        *(F.coalesce(F.sum(name), F.lit(0)) for name in ("messages", "runs")),
        F.count_if(F.col("given_up") > 0),
        F.count_if((F.col("given_up") == 0) & (F.col("in_progress") > 0)),
    ).collect()[0]
    notes = [
        f"Stages: {run_count:,} runs with {messages:,} messages in {count:,} flows. Messages of {given_up:,} of these "
        f"were given up, and {in_progress:,} are in progress."
    ]
    if commit_gaps:
        notes.append(f"{_times(commit_gaps)} {_COMMIT_GAP_SENTENCE}: the commit gap of docs/stages.md, and no fault.")
    if closed_commit_gaps:
        notes.append(
            f"{_times(closed_commit_gaps)} {_COMMIT_GAP_SENTENCE}, of exactly-once stages, which have no effect twice."
        )
    if incomplete:
        lost = "A process of stages has" if incomplete == 1 else f"{incomplete:,} processes of stages have"
        notes.append(f"{lost} lost events; what only these events could show was not judged.")
    return tuple(notes)
