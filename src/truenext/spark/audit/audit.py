"""The audit: computes all tables from the events, and one verdict.

events ──▶ blocks, runs, gaps, commits ──▶ timeline ──▶ sweep ──▶ ordering, loss, consumers, stuck,
   │                                                              starvation, latency, depth, positions
   ├──▶ redelivery
   └──▶ stages/judge.py, with the events that services of stages recorded
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from truenext.errors import ConfigurationError, HistoryError
from truenext.model.events import HISTORY_VERSION, OLDEST_HISTORY_VERSION
from truenext.spark.audit.after_end import after_ends, outstanding
from truenext.spark.audit.cut_rows import CutHistory, cut_rows
from truenext.spark.audit.findings import consumers, duplicates, lost, ordering, stuck
from truenext.spark.audit.measures import depth, latency, positions, redelivery, starvation
from truenext.spark.audit.model import EventCode, TimelineRow
from truenext.spark.audit.runs import EarlierBroker, blocks, earlier_broker, gaps, runs
from truenext.spark.audit.section_plan import SECTION_EVENTS, section_plan
from truenext.spark.audit.section_sweep import join_sections, sweep_sections
from truenext.spark.audit.sweep import sweep
from truenext.spark.audit.timeline import commits, marks, proven, queue_rows, timeline
from truenext.spark.stages.judge import audit_stages
from truenext.spark.verdict import FindingSummary, Verdict

STUCK_SECONDS = 10.0
"""Seconds without a dispatch, while a message is ready and a consumer is free, above which the audit reports a
finding."""

ProgressCallback = Callable[[str, float], None]
"""Function that is called after each step, with the step's name and its duration in seconds."""


@dataclass(frozen=True)
class AuditResults:
    tables: dict[str, DataFrame]
    """Tables `violations`, `lost`, `duplicates`, `consumers`, `stuck`, `gaps`, `starvation`, `redelivery`, `latency`,
    `depth`, `positions`. With events of stages also the tables of `StageResults`."""
    verdict: Verdict
    cached: tuple[DataFrame, ...]

    def unpersist(self) -> None:
        """Free the memory in which Spark caches the tables. A later read of a table computes it again."""
        for each in self.cached:
            each.unpersist()


def audit(
    events: DataFrame,
    *,
    since: datetime | None = None,
    queue: str | None = None,
    stuck_seconds: float = STUCK_SECONDS,
    stages: DataFrame | None = None,
    progress: ProgressCallback = lambda _step, _seconds: None,
    section_events: int = SECTION_EVENTS,
) -> AuditResults:
    """Check from `events` (docs/reference/history.md) whether docs/contract.md held.

    Events before `since` are ignored. If `queue` is given, events of other queues are ignored, too. `stages` are events
    of stages (docs/reference/history.md). A queue with many events is cut into sections of at least `section_events`
    events, and audited by several tasks.

    If the broker was restored, or its data folder got a new identity for another reason, events before that are
    ignored: they are another broker's.

    Raises: ConfigurationError if no events are left, or `stages` have another format; HistoryError if `events` have
    another history version, or are of two brokers at once
    """
    with timed(progress, "runs and gaps"):
        if since is not None:
            # The clock may have been set back, so the cut is made by `event` and not by time.
            first = events.where(F.col("at") >= F.lit(since)).agg(F.min("event")).collect()[0][0]
            events = events.where(F.col("event") >= F.lit(first))
        block_table = all_blocks = events.transform(blocks).persist()
        earlier = earlier_broker(all_blocks)
        if earlier is not None:
            # That broker went on: what it did with its messages says nothing of this one's.
            events, block_table = (each.where(F.col("run") >= earlier.next_run) for each in (events, all_blocks))
        run_table = block_table.transform(runs).persist()
        gap_table = events.transform(gaps, block_table).persist()
        run_rows = run_table.collect()
        missing = gap_table.agg(
            *(F.count("*"), F.coalesce(F.sum("missing"), F.lit(0)), F.coalesce(F.max("last_missing"), F.lit(0)))
        ).collect()[0]
        _check_runs(run_rows, since)
    of_queues = events if queue is None else events.where((F.col("queue") == queue) | F.col("queue").isNull())
    with timed(progress, "events of messages after their end"):
        mark_table = marks(run_table, gap_table).persist()
        mark_rows = _mark_rows(mark_table)
        starts = [each for each in mark_rows if each.code == EventCode.RUN_STARTED]
        first_event = min(row["first_event"] for row in run_rows)
        last_event = max(row["last_event"] for row in run_rows)
        plan = section_plan(of_queues, first_event, last_event, section_events)
        found = outstanding(of_queues, starts, plan).persist()
        end_table = after_ends(of_queues, found, starts)
    with timed(progress, "order, loss and time, event by event"):
        commit_table = events.transform(commits).persist()
        proofs = proven(of_queues, run_table, commit_table).persist()
        rows = of_queues.transform(queue_rows, mark_table, commit_table, proofs, end_table)
        if plan is None:
            sweep_rows = rows.transform(timeline).transform(sweep, stuck_seconds).persist()
        else:
            history = CutHistory(plan, plan.of_cut_queues(of_queues), commit_table, proofs, mark_rows)
            sweep_rows = _in_sections(rows, history, found, stuck_seconds)
        found.unpersist()
        counts = (
            sweep_rows.where(F.col("row") == "finding")
            .groupBy("kind")
            .agg(F.count("*").alias("findings"), F.sum("count").alias("messages"), F.max("duration").alias("duration"))
            .collect()
        )
    with timed(progress, "the queues' tables"):
        tables = _tables(sweep_rows, of_queues, gap_table)
        cached = [all_blocks, run_table, gap_table, mark_table, commit_table, proofs, sweep_rows]
        cached += [*(tables[name] for name in _CACHED), *([] if end_table is None else [end_table])]
    findings = _findings({row["kind"]: row for row in counts}, stuck_seconds)
    notes = _notes(run_rows, first_event, missing[0], earlier)
    if stages is not None:
        if earlier is not None:
            since = earlier.next_at if since is None else max(since, earlier.next_at)
        with timed(progress, "flows of stages"):
            results = audit_stages(stages, of_queues, last_gap=missing[2], queue=queue, since=since)
        tables |= results.tables
        cached += results.cached
        findings, notes = findings + results.findings, notes + results.notes
    return AuditResults(tables, Verdict(last_event - first_event + 1 - missing[1], findings, notes), tuple(cached))


def _in_sections(rows: DataFrame, history: CutHistory, found: DataFrame, stuck_seconds: float) -> DataFrame:
    """Audit the queues of the history's plan by section, all others whole, and return the cached rows of the sweep."""
    stuck_limit = int(stuck_seconds * 1e6)
    cuts, cached = cut_rows(history, found.where("is_carried").select("sequence"))
    of_sections = sweep_sections(rows, cuts, history.plan, stuck_limit).persist()
    joined = join_sections(of_sections, history.plan, stuck_limit).persist()
    joined.count()
    for each in (of_sections, *cached):
        each.unpersist()
    return joined


def _mark_rows(marks: DataFrame) -> list[TimelineRow]:
    """Return the starts of runs with their flags, the gaps, and the end of the history, in order."""
    rows = marks.select("event", "at", "code", "number").orderBy("event").collect()
    return [TimelineRow(event, at, EventCode(code), number=number) for event, at, code, number in rows]


def _check_runs(run_rows: list[Row], since: datetime | None) -> None:
    """Check that there are events, and that this truenext can read their history version.

    Raises: ConfigurationError if there are none; HistoryError for another history version
    """
    if not run_rows:
        raise ConfigurationError("the history has no events" + (f" since {since}" if since is not None else ""))
    unknown = [row["unknown_event"] for row in run_rows if row["unknown_event"] is not None]
    if unknown:
        raise HistoryError(
            f"event {min(unknown):,} is of another history version; this truenext reads {OLDEST_HISTORY_VERSION} to "
            f"{HISTORY_VERSION}: "
            "use the truenext that wrote it"
        )


_CACHED = ("starvation", "redelivery", "latency", "positions")
"""Tables that are cached, because later steps read them more than once."""


def _tables(sweep_rows: DataFrame, of_queues: DataFrame, gap_table: DataFrame) -> dict[str, DataFrame]:
    tables = {
        "violations": sweep_rows.transform(ordering),
        "lost": sweep_rows.transform(lost),
        "duplicates": sweep_rows.transform(duplicates),
        "consumers": sweep_rows.transform(consumers),
        "stuck": sweep_rows.transform(stuck),
        "gaps": gap_table,
        "starvation": sweep_rows.transform(starvation),
        "redelivery": of_queues.where("queue is not null").transform(redelivery),
        "latency": sweep_rows.transform(latency),
        "depth": sweep_rows.transform(depth),
        "positions": sweep_rows.transform(positions),
    }
    for name in _CACHED:
        tables[name].persist().count()
    return tables


def _findings(counts: dict[str, Row], stuck_seconds: float) -> tuple[FindingSummary, ...]:
    def number(kind: str, column: str = "messages") -> int:
        return int(counts[kind][column]) if kind in counts else 0

    longest = number("stuck", "duration") / 1e6
    sentences = {
        "inversion": "{:,} dispatches overtook a ready message of higher priority",
        "order": "{:,} dispatches overtook a message of the same priority that had arrived earlier",
        "premature": "{:,} dispatches were of messages that were not visible yet",
        "lost": "{:,} messages were lost: they were not in their queue, and nothing had removed them",
        "duplicate": "{:,} dispatches or acknowledgements were of messages that another consumer held, "
        "or that were removed already",
        "resurrected": "{:,} messages too many were recovered",
        "uncredited": "{:,} dispatches were to suspended consumers, or to others than an exclusive consumer, or beyond "
        "the window or the credit",
        "miscount": "{:,} returns counted an attempt although no consumer had failed",
        "stale": "{:,} times a consumer that had ended, or did not hold the message, got, started or acknowledged it",
        "lost-failure": "{:,} messages had fewer attempts than before, or were dead letters without a cause "
        "although a consumer had named one",
        "stuck": f"{{:,}} times messages waited for more than {stuck_seconds:g} s although a consumer could have "
        f"taken them; the longest was {longest:,.1f} s",
    }
    found = []
    for kind, sentence in sentences.items():
        count = number(kind, "findings" if kind == "stuck" else "messages")
        if count:
            found.append(FindingSummary(kind, count, sentence.format(count) + "."))
    return tuple(found)


def _notes(run_rows: list[Row], first_event: int, gap_count: int, earlier: EarlierBroker | None) -> tuple[str, ...]:
    notes = []
    if earlier is not None:
        notes.append(
            f"Up to run {earlier.next_run - 1:,} the history is that of a broker with another identity, "
            f"{earlier.store}; only later runs were judged."
        )
    elif first_event > 1:
        notes.append(f"The history begins with event {first_event:,}; older messages were not judged.")
    numbers = {row["run"] for row in run_rows}
    absent = max(numbers) - min(numbers) + 1 - len(numbers)
    if absent:
        notes.append(f"{absent:,} runs of the broker have no history; messages that waited then were not judged.")
    if gap_count:
        gaps_left = "A crash left a gap" if gap_count == 1 else f"Crashes left {gap_count:,} gaps"
        notes.append(f"{gaps_left} in the history; what happened there was not judged.")
    return tuple(notes)


@contextmanager
def timed(progress: ProgressCallback, step: str) -> Iterator[None]:
    """Report the duration of a `with` block to `progress`, unless the block raises."""
    started = time.monotonic()
    yield
    progress(step, time.monotonic() - started)
