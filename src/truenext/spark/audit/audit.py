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
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from truenext.errors import HistoryError
from truenext.spark.audit.after_end import Before, after_ends, outstanding
from truenext.spark.audit.broker_numbers import (
    NUMBER_BITS,
    OWN_MASK,
    broker_number,
    own_number,
    queue_key,
    with_brokers,
)
from truenext.spark.audit.brokers import AuditedBroker, FolderHistory, JoinedHistories, join_histories
from truenext.spark.audit.cut import WHOLE, SectionRow
from truenext.spark.audit.cut_rows import CutHistory, SavedQueues, cut_rows, with_beginnings
from truenext.spark.audit.findings import consumers, duplicates, lost, ordering, stuck
from truenext.spark.audit.measures import depth, latency, positions, redelivery, starvation
from truenext.spark.audit.model import EventCode, TimelineRow
from truenext.spark.audit.resume import SavedAudit, UntouchedMessages, reset_marks, saved_rows
from truenext.spark.audit.runs import gaps, runs
from truenext.spark.audit.section_plan import SECTION_EVENTS, SectionPlan, section_plan
from truenext.spark.audit.section_results import Swept, join_sections, uncut
from truenext.spark.audit.section_sweep import Stop, left_rows, sweep_sections
from truenext.spark.audit.sentences import difference_finding, findings_of, notes_on
from truenext.spark.audit.state import AuditState, AuditSummary
from truenext.spark.audit.sweep import sweep
from truenext.spark.audit.timeline import commits, marks, proven, queue_rows, timeline
from truenext.spark.caching import cache_rows
from truenext.spark.stages.judge import StageResults, audit_stages
from truenext.spark.verdict import Verdict

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
    next: SavedAudit | None = None
    """State from which the next audit of the only broker goes on. None unless `goes_on` was given."""

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
    section_events: int = SECTION_EVENTS,
    goes_on: bool = False,
    saved: SavedAudit | None = None,
    measures: bool = True,
) -> AuditResults:
    """Check from `histories` (docs/reference/history.md) whether docs/contract.md held, in one job.

    Events before `since` are ignored. If `queue` is given, events of other queues are ignored, too. `stages` are events
    of stages (docs/reference/history.md). A queue with many events is cut into sections of at least `section_events`
    events, and audited by several tasks.

    With `goes_on` the history is not at its end: the results have the state from which the next audit goes on. With
    `saved`, such a state, only events after it are judged; `has_new_events` has checked it. Both are for all events of
    one history: without `since` and `stages`. Without `measures`, tables without findings are computed only if they are
    used.

    If a broker was restored, or its data folder got a new identity for another reason, events before that are ignored:
    they are another broker's.

    Raises: ConfigurationError if a history has no events left, or `stages` have another format; HistoryError if a
    history has another version, is of two brokers at once, or of another broker than `saved`
    """
    with timed(progress, "brokers, runs and gaps"):
        history = _judged_history(histories, since, queue, saved)
    with timed(progress, "events of messages after their end"):
        marked = _marked(history, saved, goes_on=goes_on)
        beginning = _beginning(history, marked, saved, section_events)
    with timed(progress, "order, loss and time, event by event"):
        judged = _judge(history, marked, beginning, stuck_seconds, goes_on=goes_on)
    with timed(progress, "the queues' tables"):
        own_tables = _tables(judged, history)
        kept = [own_tables[name] for name in _CACHED] if measures else []
        if measures:
            kept = [cache_rows(each) for each in kept]
            own_tables |= dict(zip(_CACHED, kept, strict=True))
        for each in kept:
            each.count()
        tables = {name: with_brokers(table, history.names) for name, table in own_tables.items()}
        if history.differences is not None:
            tables["differences"] = history.differences
        differing = _count_differences(history.differences)
    cached = [*history.cached, marked.table, *beginning.cached, *judged.cached, *kept]
    verdicts = []
    for number, broker in enumerate(history.brokers):
        gap = history.missing.get(number, [_NO_GAP])[0]
        findings = findings_of({row["kind"]: row for row in judged.counts.get(number, ())}, stuck_seconds)
        findings += difference_finding(differing.get(broker.name, 0))
        first, last = history.limits[number]
        own_marks = [each for each in marked.rows if each.event >> NUMBER_BITS == number]
        has_state = saved is not None
        notes = notes_on(history.run_rows[number], first, gap["gaps"], broker, own_marks, has_state=has_state)
        if stages is not None:
            is_only = len(history.names) == 1
            with timed(progress, "flows of stages"):
                results = _audit_stages(stages, broker, is_only=is_only, gap=gap["last"], queue=queue, since=since)
            cached += results.cached
            findings, notes = findings + results.findings, notes + results.notes
            _add_tables(tables, results.tables, broker.name)
        verdict = Verdict(last - first + 1 - gap["missing"], findings, notes)
        verdicts.append(BrokerVerdict(broker.name, broker.histories, verdict))
    following = None
    if goes_on:
        state = _next_state(history, queue, marked.rows, verdicts[0].verdict, saved)
        following = SavedAudit(state, _next_cut(history, beginning, judged))
    return AuditResults(tables, tuple(verdicts), tuple(cached), following)


@dataclass(frozen=True)
class _JudgedHistory:
    """Events that are judged, and what follows from them for all queues. Lists and dictionaries are by the number of
    the broker."""

    brokers: tuple[AuditedBroker, ...]
    events: DataFrame
    of_queues: DataFrame
    runs: DataFrame
    gaps: DataFrame
    run_rows: dict[int, list[Row]]
    """Rows of `runs` by run, the last one of `saved` included."""
    missing: dict[int, list[Row]]
    """Rows of `_count_gaps`."""
    limits: list[tuple[int, int]]
    """First and last event, by the broker's own numbers."""
    differences: DataFrame | None
    earlier: DataFrame | None
    """Events before those that are judged, if an audit goes on."""
    cached: tuple[DataFrame, ...]

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.brokers]


def _judged_history(
    histories: Sequence[FolderHistory], since: datetime | None, queue: str | None, saved: SavedAudit | None
) -> _JudgedHistory:
    earlier = None
    if saved is not None:
        earlier = saved.before(histories[0].events)
        histories = [each._replace(events=saved.after(each.events)) for each in histories]
    joined = join_histories(histories, since)
    brokers, block_table = joined.brokers, joined.blocks
    if saved is not None:
        brokers = (_same_broker(joined, saved.state.store),)
        block_table = block_table.unionByName(saved.block(), allowMissingColumns=True)
    events = joined.events
    run_table = cache_rows(block_table.transform(runs))
    gap_table = cache_rows(events.transform(gaps, block_table, None if saved is None else saved.state.last_event))
    run_rows = _by_broker(run_table.withColumn("number", broker_number(F.col("run"))).orderBy("run"))
    limits = [_limits(run_rows[number]) for number in range(len(brokers))]
    if saved is not None:
        limits = [(saved.state.last_event + 1, limits[0][1])]
    is_queue = _is_queue(queue, len(brokers)) if queue is not None else None
    return _JudgedHistory(
        brokers,
        events,
        events if is_queue is None else events.where(is_queue | F.col("queue").isNull()),
        run_table,
        gap_table,
        run_rows,
        _by_broker(_count_gaps(gap_table)),
        limits,
        joined.differences,
        earlier,
        (run_table, gap_table, *joined.cached),
    )


def _same_broker(joined: JoinedHistories, store: str | None) -> AuditedBroker:
    """Return the broker of all new events, which is that of the state, with the identity `store`.

    Raises: HistoryError if it is another one
    """
    broker = joined.brokers[0]
    if broker.earlier is not None:
        store, run = store or broker.earlier.store, broker.earlier.next_run
    elif store is None or broker.identity is None or store == broker.identity:
        return replace(broker, identity=broker.identity or store)
    else:
        run = joined.blocks.agg(F.min("run")).collect()[0][0]
    raise HistoryError(
        f"the state is that of the broker with the identity {store}, but from run {run:,} on the history is that of "
        f"{broker.identity}: name an empty folder for the state"
    )


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


@dataclass(frozen=True)
class _Marked:
    """Starts of runs, gaps, and the ends of the brokers' histories: what applies to all queues of a broker."""

    table: DataFrame
    rows_with_ends: list[TimelineRow]
    """Starts, gaps and ends, in order."""
    rows: list[TimelineRow]
    """Rows that the audit judges: without the end, if the history goes on."""
    goes_on: bool

    @property
    def judged(self) -> DataFrame:
        """The rows of `table` that the audit judges."""
        return self.table.where(F.col("code") != int(EventCode.FINISHED)) if self.goes_on else self.table

    @property
    def starts(self) -> list[TimelineRow]:
        return [each for each in self.rows if each.code == EventCode.RUN_STARTED]


def _marked(history: _JudgedHistory, saved: SavedAudit | None, *, goes_on: bool) -> _Marked:
    table = cache_rows(marks(history.runs, history.gaps, None if saved is None else saved.state.is_whole))
    rows = _mark_rows(table)
    return _Marked(
        table, rows, [each for each in rows if not (goes_on and each.code == EventCode.FINISHED)], goes_on=goes_on
    )


@dataclass(frozen=True)
class _Beginning:
    """Places at which the audits of the queues begin, and the messages that exist there."""

    plan: SectionPlan | None
    """None if no queue is cut."""
    saved: SavedAudit | None
    """State from which the audit goes on, without `untouched`."""
    untouched: UntouchedMessages | None
    carried: DataFrame
    """Messages that need more than the audit of their queue: `outstanding`."""
    ends: DataFrame | None
    """Events after the end of their message: `after_ends`."""

    def rows_of_saved(self, commits: DataFrame, proofs: DataFrame) -> DataFrame | None:
        """Return the rows of the saved cut, with CUT_SCHEMA."""
        if self.saved is None:
            return None
        rows = self.saved.rows(commits, proofs)
        return rows if self.untouched is None else rows.unionByName(self.untouched.rows(self.saved.state))

    def saved_queues(self, rows: DataFrame | None, fresh: SectionRow) -> SavedQueues | None:
        """Return the saved cut of the queues of the plan. `rows` are those of all queues."""
        if self.saved is None or self.plan is None or rows is None:
            return None
        return self.saved.of_queues(self.plan.totals, rows, fresh)

    def fresh(self, history: _JudgedHistory) -> SectionRow:
        """Return the beginning of queues without rows in a saved cut."""
        return WHOLE if self.saved is None else self.saved.fresh(is_recovered=history.run_rows[0][0]["is_recovered"])

    @property
    def cached(self) -> list[DataFrame]:
        of_untouched = () if self.untouched is None else self.untouched.cached
        return [*(() if self.ends is None else (self.ends,)), *of_untouched]


def _beginning(history: _JudgedHistory, marked: _Marked, saved: SavedAudit | None, section_events: int) -> _Beginning:
    plan = section_plan(history.of_queues, history.limits, section_events, None if saved is None else saved.cut)
    before = untouched = None
    if saved is not None:
        assert history.earlier is not None
        cut_queues = () if plan is None else plan.totals
        saved, untouched = saved.divided(history.of_queues, reset_marks(marked.rows), cut_queues)
        earlier_starts = [each for each in saved.state.marks if each.code == EventCode.RUN_STARTED]
        before = Before(history.earlier, saved.kept(), earlier_starts)
    carried = cache_rows(outstanding(history.of_queues, marked.starts, plan, before))
    ends = after_ends(history.of_queues, carried, marked.starts, before)
    return _Beginning(plan, saved, untouched, carried, ends)


@dataclass(frozen=True)
class _Judged:
    """Results of the sweep over all queues."""

    messages: DataFrame
    """Rows `message` of the sweep."""
    others: DataFrame
    """Rows `finding` and `depth`, which are few and read often."""
    saved: DataFrame
    counts: dict[int, list[Row]]
    """Rows of `_count_findings` by the number of the broker."""
    accepted: DataFrame
    """Events, and messages of the state that were not durable yet as events `accepted`."""
    commits: DataFrame
    cached: tuple[DataFrame, ...]


def _judge(
    history: _JudgedHistory, marked: _Marked, beginning: _Beginning, stuck_seconds: float, *, goes_on: bool
) -> _Judged:
    plan, saved = beginning.plan, beginning.saved
    commit_table = cache_rows(history.events.transform(commits))
    accepted = history.of_queues
    if saved is not None:
        accepted = accepted.unionByName(saved.opened(), allowMissingColumns=True)
    proofs = cache_rows(proven(accepted, history.runs, commit_table))
    queues = None if saved is None else saved.queues()
    rows = history.of_queues.transform(queue_rows, marked.judged, commit_table, proofs, beginning.ends, queues)
    stop = Stop(history.limits[0][1] + 1, history.run_rows[0][-1]["last_at"]) if goes_on else None
    stuck_limit = int(stuck_seconds * 1e6)
    durability = commit_table, proofs
    saved_cut, fresh = beginning.rows_of_saved(*durability), beginning.fresh(history)
    if plan is not None:
        cut_history = _cut_history(history, marked, beginning, durability, beginning.saved_queues(saved_cut, fresh))
        swept = _in_sections(rows, cut_history, beginning.carried, saved_cut, fresh, stuck_limit, stop)
    elif stop is not None:
        swept = uncut(sweep_sections(rows, saved_cut, None, stuck_limit, fresh=fresh, stop=stop))
    else:
        swept = uncut(rows.transform(timeline).transform(sweep, stuck_seconds))
    others = cache_rows(swept.rows.where(F.col("row") != "message"))
    counts = _by_broker(_count_findings(others))
    beginning.carried.unpersist()
    messages = swept.rows.where(F.col("row") == "message")
    cached = (commit_table, proofs, *swept.cached, others)
    return _Judged(messages, others, swept.saved, counts, accepted, commit_table, cached)


def _next_cut(history: _JudgedHistory, beginning: _Beginning, judged: _Judged) -> DataFrame:
    """Return the rows of the cut at the end of the history, with SAVED_COLUMNS."""
    rows = saved_rows(judged.saved, judged.accepted, judged.commits, history.run_rows[0][-1]["run"])
    if beginning.untouched is not None:
        rows = rows.unionByName(beginning.untouched.saved(judged.saved))
    return rows


def _cut_history(
    history: _JudgedHistory,
    marked: _Marked,
    beginning: _Beginning,
    durability: tuple[DataFrame, DataFrame],
    saved: SavedQueues | None,
) -> CutHistory:
    plan, rows = beginning.plan, marked.rows_with_ends
    assert plan is not None
    events = plan.of_cut_queues(history.of_queues)
    if saved is None:
        return CutHistory(plan, events, *durability, with_beginnings(rows, history.limits))
    return CutHistory(plan, events, *durability, rows, saved, beginning.ends)


def _in_sections(
    rows: DataFrame,
    history: CutHistory,
    found: DataFrame,
    saved_cut: DataFrame | None,
    fresh: SectionRow,
    stuck_limit: int,
    stop: Stop | None,
) -> Swept:
    """Audit the queues of the history's plan by section, all others whole: from `saved_cut` if there is one, or else
    from `fresh`."""
    cuts, left, cached = cut_rows(history, found.where("is_carried").select("sequence"))
    if saved_cut is not None:
        cuts = cuts.unionByName(saved_cut.where(~F.col("queue").isin(*history.plan.totals)))
    of_sections = sweep_sections(rows, cuts, history.plan, stuck_limit, fresh=fresh, stop=stop)
    ends = {queue: Stop(end.event, end.at) for queue in history.plan.totals for end in history.marks_of(queue)[-1:]}
    of_sections = cache_rows(of_sections.unionByName(left_rows(left, ends, is_saved=stop is not None)))
    swept = join_sections(of_sections, history, stuck_limit, stop)
    for each in cached:
        each.unpersist()
    return swept


def _next_state(
    history: _JudgedHistory,
    queue: str | None,
    mark_rows: Sequence[TimelineRow],
    verdict: Verdict,
    saved: SavedAudit | None,
) -> AuditState:
    (broker,), run_rows = history.brokers, history.run_rows[0]
    first, last = run_rows[0], run_rows[-1]
    first_event, last_event = history.limits[0]
    earlier = None if saved is None else saved.state
    is_whole = first_event == 1 if earlier is None else earlier.is_whole
    summary = AuditSummary(
        first_event,
        last_event,
        last["last_at"],
        verdict.events,
        {each.kind: (each.count, each.sentence) for each in verdict.findings},
        verdict.notes,
    )
    return AuditState(
        store=broker.identity,
        queue=queue,
        run=last["run"],
        last_event=last_event,
        last_at=last["last_at"],
        is_recovered=last["is_recovered"],
        is_whole=is_whole and last["run"] - first["run"] + 1 == len(run_rows),
        first_event=first_event if earlier is None else earlier.first_event,
        marks=(*(() if earlier is None else earlier.marks), *reset_marks(mark_rows)),
        audits=(*(() if earlier is None else earlier.audits), summary),
    )


def _mark_rows(marks: DataFrame) -> list[TimelineRow]:
    """Return the starts of runs with their flags, the gaps, and the end of the history, in order."""
    rows = marks.select("event", "at", "code", "number").orderBy("event").collect()
    return [TimelineRow(event, at, int(code), number=number) for event, at, code, number in rows]


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


def _tables(judged: _Judged, history: _JudgedHistory) -> dict[str, DataFrame]:
    """Return the tables of the queues."""
    messages, others = judged.messages, judged.others
    return {
        "violations": others.transform(ordering),
        "lost": others.transform(lost),
        "duplicates": others.transform(duplicates),
        "consumers": others.transform(consumers),
        "stuck": others.transform(stuck),
        "gaps": history.gaps,
        "starvation": messages.transform(starvation),
        "redelivery": history.of_queues.where("queue is not null").transform(redelivery),
        "latency": messages.transform(latency),
        "depth": others.transform(depth),
        "positions": messages.transform(positions),
    }


def _count_differences(differences: DataFrame | None) -> dict[str, int]:
    """Return for each broker how many events are not the same in its histories."""
    if differences is None:
        return {}
    counts = differences.groupBy("broker").agg(F.count_distinct("event")).collect()
    return dict(counts)


def _limits(run_rows: Sequence[Row]) -> tuple[int, int]:
    """Return the first and the last event of a broker's runs, by its own numbers."""
    first, last = min(row["first_event"] for row in run_rows), max(row["last_event"] for row in run_rows)
    return first & OWN_MASK, last & OWN_MASK


@contextmanager
def timed(progress: ProgressCallback, step: str) -> Iterator[None]:
    """Report the duration of a `with` block to `progress`, unless the block raises."""
    started = time.monotonic()
    yield
    progress(step, time.monotonic() - started)
