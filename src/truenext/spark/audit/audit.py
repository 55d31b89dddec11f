"""The audit: computes all tables from the events of one broker or several, and a verdict on each broker.

histories ──▶ brokers.py ──▶ events, blocks
events, blocks ──▶ runs, gaps, commits ──▶ timeline ──▶ sweep ──▶ ordering, loss, consumers, stuck,
   │                                                              starvation, latency, depth, positions
   ├──▶ redelivery
   └──▶ stages/judge.py, with the events that services of stages recorded
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from truenext.spark.audit.after_end import after_ends
from truenext.spark.audit.broker_numbers import OWN_MASK, broker_number, own_number, queue_key, with_brokers
from truenext.spark.audit.brokers import AuditedBroker, FolderHistory, join_histories
from truenext.spark.audit.findings import consumers, duplicates, lost, ordering, stuck
from truenext.spark.audit.measures import depth, latency, positions, redelivery, starvation
from truenext.spark.audit.model import EventCode, TimelineRow
from truenext.spark.audit.runs import gaps, runs
from truenext.spark.audit.sweep import sweep
from truenext.spark.audit.timeline import commits, marks, timeline
from truenext.spark.stages.judge import StageResults, audit_stages
from truenext.spark.verdict import FindingSummary, Verdict

STUCK_SECONDS = 10.0
"""Seconds without a dispatch, while a message is ready and a consumer is free, above which the audit reports a
finding."""

ProgressCallback = Callable[[str, float], None]
"""Function that is called after each step, with the step's name and its duration in seconds."""


@dataclass(frozen=True)
class BrokerVerdict:
    broker: str
    """Name of the broker in the tables: its identity, or the name of its folder if the history has no identity."""
    histories: tuple[str, ...]
    """Names of the histories that are the broker's."""
    verdict: Verdict


@dataclass(frozen=True)
class AuditResults:
    tables: dict[str, DataFrame]
    """Tables `violations`, `lost`, `duplicates`, `consumers`, `stuck`, `gaps`, `starvation`, `redelivery`, `latency`,
    `depth`, `positions`. With several histories of one broker also `differences`, with events of stages also the tables
    of `StageResults`. Each row has its `broker`."""
    verdicts: tuple[BrokerVerdict, ...]
    cached: tuple[DataFrame, ...]

    @property
    def verdict(self) -> Verdict:
        """Verdict on the only broker."""
        (only,) = self.verdicts
        return only.verdict

    def unpersist(self) -> None:
        """Free the memory in which Spark caches the tables. A later read of a table computes it again."""
        for each in self.cached:
            each.unpersist()


def audit(events: DataFrame, **options: Any) -> AuditResults:
    """Check the history of one broker. `options` are those of `audit_brokers`."""
    return audit_brokers([FolderHistory("history", events)], **options)


def audit_brokers(
    histories: Sequence[FolderHistory],
    *,
    since: datetime | None = None,
    queue: str | None = None,
    stuck_seconds: float = STUCK_SECONDS,
    stages: DataFrame | None = None,
    progress: ProgressCallback = lambda _step, _seconds: None,
) -> AuditResults:
    """Check from `histories` (docs/reference/history.md) whether docs/contract.md held, in one job.

    Events before `since` are ignored. If `queue` is given, events of other queues are ignored, too. `stages` are events
    of stages (docs/reference/history.md).

    If a broker was restored, or its data folder got a new identity for another reason, events before that are ignored:
    they are another broker's.

    Raises: ConfigurationError if a history has no events left, or `stages` have another format; HistoryError if a
    history has another version, or is of two brokers at once
    """
    with timed(progress, "brokers, runs and gaps"):
        joined = join_histories(histories, since)
        events = joined.events
        run_table = joined.blocks.transform(runs).persist()
        gap_table = events.transform(gaps, joined.blocks).persist()
        run_rows = _by_broker(run_table.withColumn("number", broker_number(F.col("run"))))
        gap_rows = _by_broker(_count_gaps(gap_table))
    names = [each.name for each in joined.brokers]
    of_queues = events if queue is None else events.where(_is_queue(queue, len(names)) | F.col("queue").isNull())
    with timed(progress, "events of messages after their end"):
        mark_table = marks(run_table, gap_table).persist()
        end_table = after_ends(of_queues, _starts(mark_table))
    with timed(progress, "order, loss and time, event by event"):
        commit_table = events.transform(commits).persist()
        rows = of_queues.transform(timeline, run_table, mark_table, commit_table, end_table)
        sweep_rows = rows.transform(sweep, stuck_seconds).persist()
        counts = _by_broker(_count_findings(sweep_rows))
    with timed(progress, "the queues' tables"):
        own_tables = _tables(sweep_rows, of_queues, gap_table)
        cached = [run_table, gap_table, mark_table, commit_table, sweep_rows, *joined.cached]
        cached += [*(own_tables[name] for name in _CACHED), *([] if end_table is None else [end_table])]
        tables = {name: with_brokers(table, names) for name, table in own_tables.items()}
        if joined.differences is not None:
            tables["differences"] = joined.differences
        differing = _count_differences(joined.differences)
    verdicts = []
    for number, broker in enumerate(joined.brokers):
        gap = gap_rows.get(number, [_NO_GAP])[0]
        findings = _findings({row["kind"]: row for row in counts.get(number, ())}, stuck_seconds)
        findings += _difference_finding(differing.get(broker.name, 0))
        first, last = _limits(run_rows[number])
        notes = _notes(run_rows[number], first, gap["gaps"], broker)
        if stages is not None:
            with timed(progress, "flows of stages"):
                results = _audit_stages(
                    stages, broker, is_only=len(names) == 1, gap=gap["last"], queue=queue, since=since
                )
            cached += results.cached
            findings, notes = findings + results.findings, notes + results.notes
            _add_tables(tables, results.tables, broker.name)
        verdict = Verdict(last - first + 1 - gap["missing"], findings, notes)
        verdicts.append(BrokerVerdict(broker.name, broker.histories, verdict))
    return AuditResults(tables, tuple(verdicts), tuple(cached))


def _is_queue(queue: str, brokers: int) -> Column:
    """Return whether an event is one of this queue of any broker."""
    keys = [queue] if brokers == 1 else [queue_key(number, queue) for number in range(brokers)]
    return F.col("queue").isin(*keys)


_NO_GAP = {"gaps": 0, "missing": 0, "last": 0}


def _count_gaps(gap_table: DataFrame) -> DataFrame:
    """Return for each broker that has gaps their number, that of the missing events, and the last one of these."""
    return gap_table.groupBy(broker_number(F.col("first_missing")).alias("number")).agg(
        F.count("*").alias("gaps"),
        F.sum("missing").alias("missing"),
        own_number(F.max("last_missing")).alias("last"),
    )


def _count_findings(sweep_rows: DataFrame) -> DataFrame:
    return (
        sweep_rows.where(F.col("row") == "finding")
        .groupBy(broker_number(F.col("event")).alias("number"), "kind")
        .agg(F.count("*").alias("findings"), F.sum("count").alias("messages"), F.max("duration").alias("duration"))
    )


def _by_broker(table: DataFrame) -> dict[int, list[Row]]:
    """Return the rows of a table by the `number` of the broker."""
    by_broker: defaultdict[int, list[Row]] = defaultdict(list)
    for row in table.collect():
        by_broker[row["number"]].append(row)
    return by_broker


def _starts(marks: DataFrame) -> list[TimelineRow]:
    """Return the starts of runs with their flags."""
    starts = marks.where(F.col("code") == int(EventCode.RUN_STARTED)).orderBy("event").collect()
    return [TimelineRow(row["event"], row["at"], EventCode.RUN_STARTED, number=row["number"]) for row in starts]


def _audit_stages(
    stages: DataFrame, broker: AuditedBroker, *, is_only: bool, gap: int, queue: str | None, since: datetime | None
) -> StageResults:
    events = broker.events if queue is None else broker.events.where(F.col("queue") == queue)
    if broker.earlier is not None and broker.earlier.next_at is not None:
        since = broker.earlier.next_at if since is None else max(since, broker.earlier.next_at)
    return audit_stages(stages, events, broker=broker.identity, is_only=is_only, last_gap=gap, queue=queue, since=since)


def _add_tables(tables: dict[str, DataFrame], of_broker: Mapping[str, DataFrame], broker: str) -> None:
    """Add the rows of a broker's tables to `tables`."""
    for name, table in of_broker.items():
        named = table.select(F.lit(broker).alias("broker"), "*")
        tables[name] = tables[name].unionByName(named) if name in tables else named


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


def _count_differences(differences: DataFrame | None) -> dict[str, int]:
    """Return for each broker how many events are not the same in its histories."""
    if differences is None:
        return {}
    counts = differences.groupBy("broker").agg(F.count_distinct("event")).collect()
    return dict(counts)


def _difference_finding(count: int) -> tuple[FindingSummary, ...]:
    if not count:
        return ()
    sentence = f"{count:,} events are not the same in all folders of this broker, or are missing in one."
    return (FindingSummary("difference", count, sentence),)


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


def _limits(run_rows: Sequence[Row]) -> tuple[int, int]:
    """Return the first and the last event of a broker's runs, by its own numbers."""
    first, last = min(row["first_event"] for row in run_rows), max(row["last_event"] for row in run_rows)
    return first & OWN_MASK, last & OWN_MASK


def _notes(run_rows: Sequence[Row], first_event: int, gap_count: int, broker: AuditedBroker) -> tuple[str, ...]:
    notes = []
    earlier = broker.earlier
    if len(broker.histories) > 1:
        notes.append(f"{' and '.join(broker.histories)} are one history; each event was judged once.")
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
