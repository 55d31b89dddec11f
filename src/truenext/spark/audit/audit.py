"""The audit: computes all tables from the events, and one verdict.

events ──▶ blocks, runs, gaps, commits ──▶ timeline ──▶ sweep ──▶ ordering, loss, consumers, stuck,
   │                                                              starvation, latency, depth, positions
   ├──▶ redelivery
   └──▶ stages/judge.py, with the events that services of stages recorded
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from truenext.errors import ConfigurationError, HistoryError
from truenext.model.events import GAP_EVENTS, HISTORY_VERSION, OLDEST_HISTORY_VERSION
from truenext.spark.audit.after_end import Before, after_ends, outstanding
from truenext.spark.audit.cut_rows import CutHistory, cut_rows
from truenext.spark.audit.findings import consumers, duplicates, lost, ordering, stuck
from truenext.spark.audit.measures import depth, latency, positions, redelivery, starvation
from truenext.spark.audit.model import EventCode, StartFlag, TimelineRow
from truenext.spark.audit.resume import SavedAudit, reset_marks, saved_rows
from truenext.spark.audit.runs import EarlierBroker, NamedStore, blocks, earlier_broker, gaps, named_stores, runs
from truenext.spark.audit.section_plan import SECTION_EVENTS, section_plan
from truenext.spark.audit.section_sweep import Stop, join_sections, sweep_sections
from truenext.spark.audit.state import AuditState, AuditSummary
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
    next: SavedAudit | None = None
    """State from which the next audit goes on. None unless `goes_on` was given."""

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
    goes_on: bool = False,
    saved: SavedAudit | None = None,
    measures: bool = True,
) -> AuditResults:
    """Check from `events` (docs/reference/history.md) whether docs/contract.md held.

    Events before `since` are ignored. If `queue` is given, events of other queues are ignored, too. `stages` are events
    of stages (docs/reference/history.md). A queue with many events is cut into sections of at least `section_events`
    events, and audited by several tasks.

    With `goes_on` the history is not at its end: the results have the state from which the next audit goes on. With
    `saved`, such a state, only events after it are judged; `has_new_events` has checked it. Both are for all events of
    a history: without `since` and `stages`. Without `measures`, tables without findings are computed only if they are
    used.

    If the broker was restored, or its data folder got a new identity for another reason, events before that are
    ignored: they are another broker's.

    Raises: ConfigurationError if no events are left, or `stages` have another format; HistoryError if `events` have
    another history version, are of two brokers at once, or of another broker than `saved`
    """
    with timed(progress, "runs and gaps"):
        history = _judged_history(events, since, queue, saved)
    with timed(progress, "events of messages after their end"):
        marks_of_all = marks(history.runs, history.gaps, None if saved is None else saved.state.is_whole).persist()
        mark_table = marks_of_all.where(F.col("code") != int(EventCode.FINISHED)) if goes_on else marks_of_all
        mark_rows = _mark_rows(mark_table)
        starts = [each for each in mark_rows if each.code == EventCode.RUN_STARTED]
        plan = None
        if saved is None:
            plan = section_plan(history.of_queues, history.first_event, history.last_event, section_events)
        before = None
        if saved is not None:
            earlier_starts = [each for each in saved.state.marks if each.code == EventCode.RUN_STARTED]
            before = Before(saved.before(events), saved.kept(), earlier_starts)
        found = outstanding(history.of_queues, starts, plan, before).persist()
        end_table = after_ends(history.of_queues, found, starts, before)
    with timed(progress, "order, loss and time, event by event"):
        commit_table = history.events.transform(commits).persist()
        with_opened = history.of_queues
        if saved is not None:
            with_opened = with_opened.unionByName(saved.opened(), allowMissingColumns=True)
        proofs = proven(with_opened, history.runs, commit_table).persist()
        queues = None if saved is None else saved.queues()
        rows = history.of_queues.transform(queue_rows, mark_table, commit_table, proofs, end_table, queues)
        stop = Stop(history.last_event + 1, history.last_at) if goes_on else None
        stuck_limit = int(stuck_seconds * 1e6)
        if plan is not None:
            cut_history = CutHistory(
                plan, plan.of_cut_queues(history.of_queues), commit_table, proofs, _mark_rows(marks_of_all)
            )
            sweep_rows = _in_sections(rows, cut_history, found, stuck_limit, stop)
        elif stop is not None:
            sweep_rows = _from_cut(rows, saved, history, (commit_table, proofs), stuck_limit, stop)
        else:
            sweep_rows = rows.transform(timeline).transform(sweep, stuck_seconds).persist()
        found.unpersist()
        counts = (
            sweep_rows.where(F.col("row") == "finding")
            .groupBy("kind")
            .agg(F.count("*").alias("findings"), F.sum("count").alias("messages"), F.max("duration").alias("duration"))
            .collect()
        )
    with timed(progress, "the queues' tables"):
        tables = _tables(sweep_rows, history.of_queues, history.gaps)
        kept = [tables[name].persist() for name in _CACHED] if measures else []
        for each in kept:
            each.count()
        cached = [*history.cached, marks_of_all, commit_table, proofs, sweep_rows]
        cached += [*kept, *([] if end_table is None else [end_table])]
    findings = _findings({row["kind"]: row for row in counts}, stuck_seconds)
    notes = _notes(history, mark_rows, saved)
    if stages is not None:
        earlier = history.earlier
        if earlier is not None:
            since = earlier.next_at if since is None else max(since, earlier.next_at)
        with timed(progress, "flows of stages"):
            last_missing = history.missing["last"]
            results = audit_stages(stages, history.of_queues, last_gap=last_missing, queue=queue, since=since)
        tables |= results.tables
        cached += results.cached
        findings, notes = findings + results.findings, notes + results.notes
    verdict = Verdict(history.last_event - history.first_event + 1 - history.missing["events"], findings, notes)
    following = None
    if goes_on:
        rows = saved_rows(sweep_rows, with_opened, commit_table, history.run_rows[-1]["run"])
        following = SavedAudit(_next_state(history, queue, mark_rows, verdict, saved), rows)
    return AuditResults(tables, verdict, tuple(cached), following)


@dataclass(frozen=True)
class _JudgedHistory:
    """Events that are judged, and what follows from them for all queues."""

    events: DataFrame
    of_queues: DataFrame
    runs: DataFrame
    gaps: DataFrame
    run_rows: list[Row]
    """Rows of `runs` by run, the last one of `saved` included."""
    missing: Row
    """Number of `gaps`, of `events` in them, and the `last` missing event."""
    earlier: EarlierBroker | None
    first_event: int
    last_event: int
    last_at: int
    stores: list[NamedStore]
    """Identities that the starts of runs name, in order."""
    cached: tuple[DataFrame, ...]


def _judged_history(
    events: DataFrame, since: datetime | None, queue: str | None, saved: SavedAudit | None
) -> _JudgedHistory:
    if since is not None:
        # The clock may have been set back, so the cut is made by `event` and not by time.
        first = events.where(F.col("at") >= F.lit(since)).agg(F.min("event")).collect()[0][0]
        events = events.where(F.col("event") >= F.lit(first))
    if saved is not None:
        events = saved.after(events)
    block_table = all_blocks = events.transform(blocks).persist()
    if saved is not None:
        block_table = all_blocks.unionByName(saved.block(), allowMissingColumns=True)
    stores = named_stores(block_table)
    earlier = earlier_broker(stores)
    if earlier is not None and saved is not None:
        raise HistoryError(
            f"the state is that of the broker with the identity {earlier.store}, but from run {earlier.next_run:,} on "
            f"the history is that of {stores[-1].store}: name an empty folder for the state"
        )
    if earlier is not None:
        # That broker went on: what it did with its messages says nothing of this one's.
        events, block_table = (each.where(F.col("run") >= earlier.next_run) for each in (events, all_blocks))
    run_table = block_table.transform(runs).persist()
    gap_table = events.transform(gaps, block_table, None if saved is None else saved.state.last_event).persist()
    run_rows = run_table.orderBy("run").collect()
    missing = gap_table.agg(
        F.count("*").alias("gaps"),
        F.coalesce(F.sum("missing"), F.lit(0)).alias("events"),
        F.coalesce(F.max("last_missing"), F.lit(0)).alias("last"),
    ).collect()[0]
    _check_runs(run_rows, since)
    first_event = min(row["first_event"] for row in run_rows) if saved is None else saved.state.last_event + 1
    return _JudgedHistory(
        events,
        events if queue is None else events.where((F.col("queue") == queue) | F.col("queue").isNull()),
        run_table,
        gap_table,
        run_rows,
        missing,
        earlier,
        first_event,
        run_rows[-1]["last_event"],
        run_rows[-1]["last_at"],
        stores,
        (all_blocks, run_table, gap_table),
    )


def _in_sections(
    rows: DataFrame, history: CutHistory, found: DataFrame, stuck_limit: int, stop: Stop | None
) -> DataFrame:
    """Audit the queues of the history's plan by section, all others whole, and return the cached rows of the sweep."""
    cuts, cached = cut_rows(history, found.where("is_carried").select("sequence"))
    of_sections = sweep_sections(rows, cuts, history.plan, stuck_limit, stop=stop).persist()
    joined = join_sections(of_sections, history.plan, stuck_limit, stop).persist()
    joined.count()
    for each in (of_sections, *cached):
        each.unpersist()
    return joined


def _from_cut(
    rows: DataFrame,
    saved: SavedAudit | None,
    history: _JudgedHistory,
    durability: tuple[DataFrame, DataFrame],
    stuck_limit: int,
    stop: Stop,
) -> DataFrame:
    """Audit the queues up to `stop`, from the cut of `saved` if there is one, and return the cached rows."""
    if saved is None:
        return sweep_sections(rows, None, None, stuck_limit, stop=stop).persist()
    fresh = saved.fresh(is_recovered=history.run_rows[0]["is_recovered"])
    return sweep_sections(rows, saved.rows(*durability), None, stuck_limit, fresh=fresh, stop=stop).persist()


def _next_state(
    history: _JudgedHistory,
    queue: str | None,
    mark_rows: Sequence[TimelineRow],
    verdict: Verdict,
    saved: SavedAudit | None,
) -> AuditState:
    first, last = history.run_rows[0], history.run_rows[-1]
    earlier = None if saved is None else saved.state
    is_whole = history.first_event == 1 if earlier is None else earlier.is_whole
    summary = AuditSummary(
        history.first_event,
        history.last_event,
        history.last_at,
        verdict.events,
        {each.kind: (each.count, each.sentence) for each in verdict.findings},
        verdict.notes,
    )
    return AuditState(
        store=history.stores[-1].store if history.stores else None,
        queue=queue,
        run=last["run"],
        last_event=history.last_event,
        last_at=history.last_at,
        is_recovered=last["is_recovered"],
        is_whole=is_whole and last["run"] - first["run"] + 1 == len(history.run_rows),
        first_event=history.first_event if earlier is None else earlier.first_event,
        marks=(*(() if earlier is None else earlier.marks), *reset_marks(mark_rows)),
        audits=(*(() if earlier is None else earlier.audits), summary),
    )


def _mark_rows(marks: DataFrame) -> list[TimelineRow]:
    """Return the starts of runs with their flags, the gaps, and the end of the history, in order."""
    rows = marks.select("event", "at", "code", "number").orderBy("event").collect()
    return [TimelineRow(event, at, int(code), number=number) for event, at, code, number in rows]


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
    return {
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


def _notes(history: _JudgedHistory, mark_rows: Sequence[TimelineRow], saved: SavedAudit | None) -> tuple[str, ...]:
    notes = []
    earlier, gap_count = history.earlier, history.missing["gaps"]
    if earlier is not None:
        notes.append(
            f"Up to run {earlier.next_run - 1:,} the history is that of a broker with another identity, "
            f"{earlier.store}; only later runs were judged."
        )
    elif saved is None and history.first_event > 1:
        notes.append(f"The history begins with event {history.first_event:,}; older messages were not judged.")
    numbers = {row["run"] for row in history.run_rows}
    absent = max(numbers) - min(numbers) + 1 - len(numbers)
    if absent:
        notes.append(f"{absent:,} runs of the broker have no history; messages that waited then were not judged.")
    deleted = _deleted(mark_rows) if saved is not None and mark_rows else None
    if deleted is not None and deleted.event == history.first_event:
        gap_count -= 1
        notes.append(
            f"Events {deleted.event:,} to {deleted.number:,}, after the last audit, are no longer in the history; "
            "what happened there was not judged: audit more often, or keep more history."
        )
    if gap_count:
        gaps_left = "A crash left a gap" if gap_count == 1 else f"Crashes left {gap_count:,} gaps"
        notes.append(f"{gaps_left} in the history; what happened there was not judged.")
    return tuple(notes)


def _deleted(mark_rows: Sequence[TimelineRow]) -> TimelineRow | None:
    """Return the first row if it is a gap that no crash has left."""
    gap, *others = mark_rows
    if gap.code != EventCode.GAP:
        return None
    after = others[0] if others and others[0].event == gap.number + 1 else None
    is_crash = after is not None and after.code == EventCode.RUN_STARTED and not after.number & StartFlag.CLEAN
    return None if is_crash and gap.number - gap.event < GAP_EVENTS else gap


@contextmanager
def timed(progress: ProgressCallback, step: str) -> Iterator[None]:
    """Report the duration of a `with` block to `progress`, unless the block raises."""
    started = time.monotonic()
    yield
    progress(step, time.monotonic() - started)
