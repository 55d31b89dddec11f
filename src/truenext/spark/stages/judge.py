"""How do events of stages and a history make one verdict?

events of stages ──▶ runs ──┬──▶ joined ──▶ findings, windows, flows, waterfalls, stages
history ──▶ fates ──────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from truenext.errors import ConfigurationError
from truenext.history.stage_files import FORMAT
from truenext.spark.stages.findings import SENTENCES, stage_findings, windows
from truenext.spark.stages.flows import flows, stage_runs, stages, waterfalls
from truenext.spark.stages.processes import processes
from truenext.spark.stages.runs import fates, joined, runs
from truenext.spark.verdict import Finding

WINDOW, CLOSED = "window", "window of what happens once"


@dataclass(frozen=True)
class StageResults:
    tables: dict[str, DataFrame]
    """`stage_findings`, `windows`, `flows`, `waterfalls`, `stages`, `stage_runs`"""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    kept: tuple[DataFrame, ...]


def judge_stages(
    told: DataFrame, events: DataFrame, *, last_gap: int = 0, queue: str | None = None, since: datetime | None = None
) -> StageResults:
    """`told` are the events of stages, `events` those of the history, of one queue if `queue` says so. `last_gap` is
    the last event that is missing there, 0 if none is.

    Raises: ConfigurationError if the events of stages are of a newer format
    """
    told = told.persist()
    process_table = told.transform(processes).persist()
    process_rows = process_table.collect()
    newest = max((row["format"] or 0 for row in process_rows), default=0)
    if newest > FORMAT:
        raise ConfigurationError(
            f"the events of stages are of format {newest}, this truenext reads {FORMAT}: use the one that wrote them"
        )
    run_table = told.transform(runs)
    if queue is not None:
        run_table = run_table.where(F.col("queue") == queue)
    if since is not None:
        run_table = run_table.where(F.col("begun_at") >= F.lit(since))
    run_table = run_table.persist()
    queues = run_table.where("queue is not null").select("queue").distinct()
    both = joined(run_table, events.transform(fates, queues)).persist()
    found = stage_findings(both, process_table, last_gap).persist()
    window_table = windows(both, process_table).persist()
    flow_table = flows(both).persist()
    kinds = found.select("kind").union(window_table.select(F.when(F.col("once"), CLOSED).otherwise(WINDOW)))
    counts = {row["kind"]: int(row["count"]) for row in kinds.groupBy("kind").count().collect()}
    findings = tuple(
        Finding(kind, counts[kind], sentence.format(counts[kind]) + ".")
        for kind, sentence in SENTENCES.items()
        if kind in counts
    )
    holes = sum(not row["is_whole"] for row in process_rows)
    tables = {
        "stage_findings": found,
        "windows": window_table,
        "flows": flow_table,
        "waterfalls": waterfalls(both, flow_table),
        "stages": stages(both),
        "stage_runs": stage_runs(both),
    }
    kept = (told, process_table, run_table, both, found, window_table, flow_table)
    return StageResults(tables, findings, _notes(flow_table, counts.get(WINDOW, 0), counts.get(CLOSED, 0), holes), kept)


_IN_BETWEEN = "SQL was committed and the message was not acknowledged with it"


def _times(count: int) -> str:
    return "Once" if count == 1 else f"{count:,} times"


def _notes(flows: DataFrame, windows: int, closed: int, holes: int) -> tuple[str, ...]:
    count, messages, run_count, given_up, under_way = flows.agg(
        F.count("*"),
        *(F.coalesce(F.sum(name), F.lit(0)) for name in ("messages", "runs")),
        F.count_if(F.col("given_up") > 0),
        F.count_if((F.col("given_up") == 0) & (F.col("under_way") > 0)),
    ).collect()[0]
    notes = [
        f"Stages: {run_count:,} runs with {messages:,} messages in {count:,} flows. Messages of {given_up:,} of these "
        f"were given up, and {under_way:,} had not ended."
    ]
    if windows:
        notes.append(f"{_times(windows)} {_IN_BETWEEN}: the window of docs/stages.md, and no fault.")
    if closed:
        notes.append(f"{_times(closed)} {_IN_BETWEEN}, of stages whose effects happen once all the same.")
    if holes:
        lost = "A process of stages has" if holes == 1 else f"{holes:,} processes of stages have"
        notes.append(f"{lost} lost events; what is not told for that was not judged.")
    return tuple(notes)
