"""Tests of the cuts that Spark computes: their rows are those that `sections.py` computes in memory.

Most of them call the functions of Spark's processes without Spark, for thousands of histories in seconds.

TRUENEXT_EXAMPLES=5000 pytest tests/spark/test_cut_rows.py   longer
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pytest
from msgspec import structs
from pyspark.sql import DataFrame

from tests.spark import test_sections
from tests.spark.cutting import UntouchedRule
from tests.spark.faults import Fault, planted
from tests.spark.histories import Event, RandomHistory, joined
from tests.spark.plain import by_queue, rows_of
from tests.spark.test_consumers import Story
from tests.spark.test_cuts import EXAMPLES, random_history, seeds
from tests.spark.waiting import never_touched
from truenext.spark.audit import audit as audit_module
from truenext.spark.audit import cut_rows as rows_module
from truenext.spark.audit import section_plan as plan_module
from truenext.spark.audit import sections as sections_module
from truenext.spark.audit import untouched as untouched_module
from truenext.spark.audit.broker_numbers import NUMBER_BITS
from truenext.spark.audit.cut import ConsumerRow, CutCode, IdleTime, MessageRow, QueueCut, SectionRow
from truenext.spark.audit.cut_rows import CutHistory, Recoveries, SavedQueues, encode
from truenext.spark.audit.lifetime import ENDS, MARKS, MESSAGE_CODES, Lifetime, is_continued
from truenext.spark.audit.model import NEVER, ConsumerFlags, EventCode, TimelineRow
from truenext.spark.audit.section_plan import Grain, Section, SectionPlan
from truenext.spark.audit.sections import CONSUMER_CODES, RESETS, Subscription, queue_cuts
from truenext.spark.audit.untouched import QueueCuts

BITS = 2
PULLS = int(ConsumerFlags.PULLS)
Timelines = Mapping[str, Sequence[TimelineRow]]

pytestmark = pytest.mark.timeout(300 + EXAMPLES)


@pytest.fixture(autouse=True)
def without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small batches, and messages without positions: of events in earlier sections a cut has only the numbers."""
    monkeypatch.setattr(rows_module, "BATCH_ROWS", 3)
    monkeypatch.setattr(sections_module, "_placed", _negated)


def _negated(messages: Sequence[MessageRow], *_: object) -> list[MessageRow]:
    return [structs.replace(each, arrival=-each.arrival, delivery=-each.delivery) for each in messages]


# ---- What Spark does with the rows of whole histories, in plain Python ----


def plan_of(timelines: Timelines, size: int, first: int = 0) -> SectionPlan:
    """Return the plan of `section_plan`, without its table."""
    sections: list[Section] = []
    for queue, rows in timelines.items():
        own = [row for row in rows if row.code < EventCode.RUN_STARTED]
        grains = [_grain(queue, number, [*some]) for number, some in groupby(own, key=lambda row: row.event >> BITS)]
        sections += plan_module.queue_sections(grains, BITS, size, first)
    totals = {queue: sum(row.code < EventCode.RUN_STARTED for row in rows) for queue, rows in timelines.items()}
    return SectionPlan(sections, totals, dict.fromkeys(timelines, 0), None, BITS)  # type: ignore[arg-type]


def _grain(queue: str, number: int, rows: Sequence[TimelineRow]) -> Grain:
    codes = Counter(row.code for row in rows)
    grouped = sum(row.code == EventCode.ACCEPTED and row.detail_code != 0 for row in rows)
    last = {code: max((row.event for row in rows if row.code == code), default=0) for code in _PAUSES}
    ends = sum(codes[each] for each in ENDS)
    return Grain(*(queue, number, len(rows), codes[EventCode.ACCEPTED], grouped, ends), *last.values())


_PAUSES = (EventCode.PAUSED, EventCode.RESUMED)


def history_of(timelines: Timelines, size: int) -> CutHistory:
    rows = next(iter(timelines.values()))
    marks = [row for row in rows if row.code in RESETS | {EventCode.FINISHED}]
    first = min(row.event for rows in timelines.values() for row in rows)
    marks = rows_module.with_beginnings(marks, [(first, marks[-1].event - 1)])
    marks.append(TimelineRow(1 << NUMBER_BITS, 0, EventCode.RUN_STARTED))  # Of another broker.
    return CutHistory(plan_of(timelines, size), None, None, None, marks)  # type: ignore[arg-type]


def recoveries_of(timelines: Timelines, history: CutHistory) -> Recoveries:
    before = rows_module._open_starts(history)
    return {
        queue: [each for each in pairwise([*before.get(queue, ()), *rows]) if is_continued(each[0])]
        for queue, rows in timelines.items()
    }


def rows_of_cuts(timelines: Timelines, history: CutHistory) -> list[dict[str, Any]]:
    """Return the rows of `cut_rows`."""
    cuts, recoveries = history.plan.cuts(), recoveries_of(timelines, history)
    saved: Mapping[tuple[str, int], Sequence[ConsumerRow]] = {}
    messages = _batches(timelines, history.saved)
    marks = {
        queue: sorted([*history.resets_of(queue), *(row for row in rows if row.code in MARKS - RESETS)])
        for queue, rows in timelines.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_count", _count)
        known = rows_module._known_counts(history)
        marks, counts = rows_module._with_losses(messages, marks, recoveries, known)  # type: ignore[arg-type]
    states = _rows(rows_module._message_states(messages, marks, cuts))
    held = [
        (each["queue"], each["number"], rows_module._HELD, each["sequence"], each["consumer"], each["event"] + 1, 0)
        for each in states
        if each["code"] == CutCode.MESSAGE and each["number"] > 0
    ]
    consumers = [
        (queue, row.event, row.code, row.sequence, row.consumer, row.number, row.detail_code)
        for queue, rows in timelines.items()
        for row in rows
        if row.code in CONSUMER_CODES - {EventCode.DISPATCHED}
    ]
    if history.saved is not None:
        saved = history.saved.consumers
        consumers += ((queue, history.after, rows_module._KNOWN, -1, number, 0, 0) for queue, number in saved)
    rows = sorted([*held, *consumers, *dispatches_of(timelines, history)], key=itemgetter(0, 4, 1, 2))
    names = ("queue", "event", "code", "sequence", "consumer", "number", "detail_code")
    resets = {queue: [*history.resets_before(), *history.resets_of(queue)] for queue in timelines}
    of_consumers = rows_module._follow_consumers([_batch(rows, names)], resets, cuts, saved, history.after)
    starts = rows_module._section_rows(history, recoveries, counts)
    return [*states, *_rows(of_consumers), *starts.to_pylist()]


def dispatches_of(timelines: Timelines, history: CutHistory) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `_dispatches`."""
    stretches = rows_module._stretches_after_gaps([*history.resets_before(), *history.marks])
    for queue, rows in timelines.items():
        cuts = [*history.plan.cuts()[queue]]
        pulling = {row.consumer for row in rows if row.code == EventCode.SUBSCRIBED and row.detail_code & PULLS}
        since: dict[int, int] = {}
        if history.saved is not None:
            pulling |= {number for name, number, _ in rows_module._pulling(history.saved) if name == queue}
            since = {number: history.after for name, number in history.saved.consumers if name == queue}
        events: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row in rows:
            if row.code != EventCode.DISPATCHED:
                since |= {row.consumer: row.event} if row.code in CONSUMER_CODES else {}
            elif row.consumer in since and (
                row.consumer in pulling or any(first <= row.event <= last for first, last in stretches)
            ):
                events[row.consumer, since[row.consumer], bisect_right(cuts, row.event)].append(row.event)
        for (consumer, _, _), some in events.items():
            yield queue, some[0], int(EventCode.DISPATCHED), -1, consumer, 0, len(some) - 1


def _count(rows: Sequence[pa.RecordBatch], marks: Any, points: Any) -> Any:
    sums: defaultdict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    # Two tasks.
    for some in (rows[::2], rows[1::2]):
        for each in _rows(rows_module._count_states(some, marks, points)):
            for at, name in enumerate(("certain", "uncertain")):
                sums[each["queue"], each["point"]][at] += each[name]
    return {key: (certain, uncertain) for key, (certain, uncertain) in sums.items()}


def _batches(timelines: Timelines, saved: SavedQueues | None) -> list[pa.RecordBatch]:
    """Return the rows of messages, a batch for each message."""
    found: list[tuple[Any, ...]] = [
        (queue, *row, None) for queue, rows in timelines.items() for row in rows if row.code in MESSAGE_CODES
    ]
    if saved is not None:
        rest = [None] * (len(TimelineRow._fields) - 4)
        messages: Any = saved.messages
        found += ((queue, saved.after, None, -2, each.sequence, *rest, encode(each)) for queue, each in messages)
    # By queue, too: in a wrong history two queues have events of one message.
    found.sort(key=itemgetter(4, 0, 1))
    of_each = groupby(found, key=itemgetter(4, 0))
    return [_batch([*some], ("queue", *TimelineRow._fields, "payload")) for _, some in of_each]


def _batch(rows: Sequence[tuple[Any, ...]], names: Sequence[str]) -> pa.RecordBatch:
    types = {"queue": pa.string(), "persistent": pa.bool_(), "payload": pa.binary()}
    columns = [*zip(*rows, strict=True)] or [()] * len(names)
    arrays = [pa.array(column, types.get(name, pa.int64())) for column, name in zip(columns, names, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=[*names])


def _rows(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [each for batch in batches for each in batch.to_pylist()]


# ---- Comparison with the cuts in memory ----


def check_history(events: Sequence[Event], size: int) -> None:
    timelines = by_queue(rows_of([*events]))
    timelines = {queue: rows for queue, rows in timelines.items() if any(r.code < EventCode.RUN_STARTED for r in rows)}
    if not timelines:
        return
    history = history_of(timelines, size)
    check_cuts(timelines, history.plan, rows_of_cuts(timelines, history))


def check_cuts(
    timelines: Timelines, plan: SectionPlan, rows: Sequence[dict[str, Any]], saved: Saved | None = None
) -> None:
    """Check the rows of all cuts of a history in sections, which may begin with a saved cut. The timelines are those of
    the whole history."""
    of_sections: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        of_sections[row["section"]].append(row)
    assert [*of_sections] and {*of_sections} == {*range(len(plan.sections))}
    after = 0 if saved is None else saved.queues.after
    for queue, cuts in plan.cuts().items():
        rule, end = UntouchedRule(timelines[queue]), timelines[queue][-1].event
        # A loss may be shown by the last row.
        *computed, at_end = queue_cuts(timelines[queue], [*cuts, end + 1])
        others: list[MessageRow] = []
        for cut, (first, until) in zip(computed, pairwise([*cuts, end + 1]), strict=True):
            cut.queue.first_dispatches = 0
            reduced, others = rule.reduced(cut, until)
            assert decoded(first, of_sections[cuts[first]]) == reduced
        left = [_payload(each, MessageRow) for each in rows if (each["queue"], each["code"]) == (queue, CutCode.LEFT)]
        names = {each.sequence for each in others} - (saved.untouched if saved is not None else set())
        assert sorted(left, key=attrgetter("sequence")) == [each for each in at_end.messages if each.sequence in names]
    # The first section of the next queue begins with 0.
    ends = [*(each.first for each in plan.sections[1:]), after]
    for number, (each, end) in enumerate(zip(plan.sections, ends, strict=True)):
        start = section_row(of_sections[number])
        assert (start.first, start.end) == (each.first, end if end > after + 1 else NEVER)
        is_behind_saved = saved is not None and each.first == after + 1
        assert start.idle == (IdleTime(after, 0, 1, 4, True) if is_behind_saved else None)
        assert start.total == plan.totals[each.queue] + (
            0 if saved is None else saved.queues.queues[each.queue].queue.ticks
        )
        assert {row["queue"] for row in of_sections[number]} == {each.queue}
        # Before all events of the section.
        assert {row["event"] for row in of_sections[number]} == {each.first - 1}


def section_row(rows: Sequence[dict[str, Any]]) -> SectionRow:
    (row,) = (each for each in rows if each["code"] == CutCode.SECTION)
    return msgspec.msgpack.decode(row["payload"], type=SectionRow)


def decoded(event: int, rows: Sequence[dict[str, Any]]) -> QueueCut:
    """Return the cut that a section's rows stand for."""
    consumers = [_payload(each, ConsumerRow) for each in rows if each["code"] == CutCode.CONSUMER]
    messages = [_payload(each, MessageRow) for each in rows if each["code"] == CutCode.MESSAGE]
    holders = {each["sequence"]: each["number"] for each in rows if each["code"] == CutCode.HOLDER}
    for message in messages:
        message.subscription = holders.pop(message.sequence, 0)
    assert not holders
    queue = section_row(rows).queue
    queue.knows_exclusive |= any(each["code"] == CutCode.GAP_DISPATCH for each in rows)
    consumers.sort(key=attrgetter("since"))
    messages.sort(key=attrgetter("sequence"))
    untouched = sum(each["number"] for each in rows if each["code"] == CutCode.UNTOUCHED)
    return QueueCut(event, queue, consumers, messages, untouched=untouched)


def _payload(row: dict[str, Any], type: Any) -> Any:
    return msgspec.msgpack.decode(row["payload"], type=type)


def test_rows_of_cuts_are_those_that_are_computed_in_memory() -> None:
    for seed in seeds(max(EXAMPLES // 5, 1)):
        check_random(seed)


def check_random(seed: int) -> None:
    size = random.Random(seed).choice([2, 5, 20])
    check_history(random_history(seed), size)
    check_history(never_touched(seed)[0], size)


def test_loss_that_only_the_end_of_the_history_shows_leaves_messages_in_doubt() -> None:
    """The last run has no event of the queue."""
    story = Story(messages=6).add("run-started", queue=None, reason="clean", run=2)
    story.add("accepted", queue="another", sequence=7, priority=4, persistent=True, size=1, run=2)
    check_history(story.events, 3)


def test_message_with_an_event_in_another_queue_is_followed_as_one() -> None:
    """Event 21, in queue b, had cut the rows of queue a's message 1 in two."""
    check_random(1189113347)


# ---- Sections that begin with a saved cut ----


def test_rows_of_cuts_behind_a_saved_cut_are_those_of_the_whole_history() -> None:
    for seed in seeds(EXAMPLES):
        check_saved(seed)


def check_saved(seed: int) -> None:
    numbers = random.Random(seed)
    for events in (random_history(seed), never_touched(seed)[0], paused_and_ended(seed)):
        check_from(events, numbers.choice([2, 5, 20]), numbers.choice(events[:-1])["event"], numbers.random() < 0.7)


def paused_and_ended(seed: int) -> list[Event]:
    """Return a history with pauses, and with consumers that end while they hold messages, and get others later."""
    numbers = random.Random(seed)
    story = Story(messages=9, window=9)
    for sequence in range(1, 9):
        story.dispatch(sequence)
        if numbers.random() < 0.3:
            story.unsubscribe()
        if numbers.random() < 0.3:
            story.subscribe(1, window=9)
        if numbers.random() < 0.5:
            story.add(numbers.choice(["paused", "resumed"]))
    return story.acknowledge(*range(1, 9)).events


def check_from(events: Sequence[Event], size: int, after: int, has_untouched: bool) -> None:
    """Check the rows of cuts in the history behind an event, of which all before is only in a saved cut."""
    whole = by_queue(rows_of([*events]))
    later = {queue: [row for row in rows if row.event > after] for queue, rows in whole.items()}
    later = {queue: rows for queue, rows in later.items() if any(r.code < EventCode.RUN_STARTED for r in rows)}
    if not later:
        return
    whole = {queue: whole[queue] for queue in later}
    marks = [row for row in next(iter(later.values())) if row.code in RESETS | {EventCode.FINISHED}]
    plan = plan_of(later, size, after + 1)
    saved = saved_queues(whole, after, has_untouched=has_untouched)
    history = CutHistory(plan, None, None, None, marks, saved.queues)  # type: ignore[arg-type]
    check_cuts(whole, plan, rows_of_cuts(later, history), saved)


class Saved(NamedTuple):
    queues: SavedQueues
    untouched: set[int]
    """Messages that are only counted in all sections."""


def saved_queues(whole: Timelines, after: int, *, has_untouched: bool) -> Saved:
    names: set[int] = set()
    queues, consumers = dict[str, SectionRow](), defaultdict[tuple[str, int], list[ConsumerRow]](list)
    messages: list[tuple[str, MessageRow]] = []
    untouched = {}
    for queue, rows in whole.items():
        (cut,) = queue_cuts(rows, [after + 1])
        # Positions are lower than the numbers of events; here they are those numbers.
        cut.messages = _negated(cut.messages)
        queues[queue] = SectionRow(after + 1, cut.queue, NEVER, 0, IdleTime(after, 0, 1, 4, True))
        for each in cut.consumers:
            consumers[queue, each.number].append(each)
        if has_untouched and not any(row.code in MARKS and row.event > after for row in rows):
            cut, others = UntouchedRule(rows).reduced(cut, rows[-1].event + 1)
            names |= {each.sequence for each in others}
            untouched[queue] = cut.untouched
        messages += ((queue, each) for each in cut.messages)
    resets = [row for row in next(iter(whole.values())) if row.code in RESETS and row.event <= after]
    first = min(row.event for rows in whole.values() for row in rows)
    reset = rows_module.with_beginnings(resets, [(first, after)])[-1]
    return Saved(SavedQueues(after, reset, queues, consumers, messages, untouched, None), names)  # type: ignore[arg-type]


class Stopped(Exception):
    """Ends an audit once the cuts are there."""


@pytest.mark.drawn
@pytest.mark.timeout(900)
def test_rows_of_cuts_by_spark_are_those_that_are_computed_in_memory(
    frame: Callable[[list[Event]], DataFrame], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[SectionPlan] = []
    rows: list[dict[str, Any]] = []

    def stop(history: CutHistory, carried: DataFrame) -> None:
        found, left, cached = rows_module.cut_rows(history, carried)
        plans.append(history.plan)
        rows.extend(each.asDict() for each in found.unionByName(left).collect())
        for each in cached:
            each.unpersist()
        raise Stopped

    monkeypatch.setattr(audit_module, "cut_rows", stop)
    (seed,) = seeds(1)
    events = joined(RandomHistory(each, 60, faults=0.3).events for each in range(seed, seed + 8))
    with pytest.raises(Stopped):
        audit_module.audit(frame(events), section_events=random.Random(seed).choice([3, 10, 40]))
    timelines = by_queue(rows_of(events))
    check_cuts({queue: timelines[queue] for queue in plans[0].totals}, plans[0], rows)


# ---- Planted faults ----

TRIES = 400

FAULTS = [
    Fault("losses not counted", rows_module, "_with_losses", "if found == lost or", "if True or"),
    Fault("losses counted without a known end", rows_module, "_with_losses", "is_known(start, row) and ", ""),
    Fault("uncertain messages taken for certain", rows_module, "_count_states", "in CERTAIN", "is not None"),
    Fault(
        "queues of messages mixed", rows_module, "_count_states", "marks[queue], points", "[*marks.values()][0], points"
    ),
    Fault(
        "rows before a flush forgotten",
        rows_module,
        "_message_states",
        "yield _batch(found, CUT_SCHEMA)\n            found",
        "found",
    ),
    Fault("rows flushed twice", rows_module, "_message_states", "found = []\n    for", "pass\n    for"),
    Fault("event of the section itself", rows_module, "_message_states", "cut - 1, int(code)", "cut, int(code)"),
    Fault("arrival taken for a position", rows_module, "_message_states", "=-message.arrival", "=message.arrival"),
    Fault("messages that are left forgotten", rows_module, "_message_states", "if is_left and", "if False and"),
    Fault("untouched messages not counted", rows_module, "_message_states", "of_queue.untouched()", "()"),
    Fault(
        "mark in a section missed", QueueCuts, "__init__", "every & ~self.sections(row.event for row in marks)", "-1"
    ),
    Fault(
        "event before the first cut in the first section",
        QueueCuts,
        "sections",
        "(self.cuts, event) >> 1",
        "(self.cuts, event)",
    ),
    Fault(
        "untouched message that is not visible yet",
        QueueCuts,
        "take",
        "visible = every & -(1 <<",
        "visible = every | (1 <<",
    ),
    Fault("untouched message with an event", QueueCuts, "take", "visible & ~own", "visible"),
    Fault("state of an untouched message changed", QueueCuts, "take", "untouched & self._unmarked", "untouched"),
    Fault("start taken for an end", QueueCuts, "take", "self._with_persistent if", "self._unmarked if"),
    Fault(
        "transient message found after a crash",
        QueueCuts,
        "take",
        "else self._with_transient",
        "else self._with_persistent",
    ),
    Fault("first of another priority", QueueCuts, "take", "(message.priority, message.group)", "(4, message.group)"),
    Fault("first of another group", QueueCuts, "take", "(message.priority, message.group)", "(message.priority, 0)"),
    Fault("first of a section for each message", QueueCuts, "take", "= with_first | untouched", "= with_first"),
    Fault("first of another section", QueueCuts, "take", "= with_first | untouched", "= -1"),
    Fault("message left in any section", QueueCuts, "take", "bool(unknown & self._last)", "bool(unknown)"),
    Fault("numbers of all sections", QueueCuts, "untouched", "sections ^ (sections << 1)", "sections"),
    Fault("gap taken for an end", untouched_module, "_keeps_persistent", "mark.code == EventCode.GAP or", ""),
    Fault("loss taken for an end", untouched_module, "_keeps_transient", "mark.code == EventCode.NOT_RECOVERED or", ""),
    Fault(
        "unknown run taken for a start",
        untouched_module,
        "is_continued",
        "and bool(start.number & StartFlag.CONTINUED)",
        "",
    ),
    Fault("crash taken for a stop", untouched_module, "_keeps_transient", " and is_clean", ""),
    Fault("held message untouched", MessageRow, "can_be_untouched", "self.state is MessageState.HELD", "False"),
    Fault("blocking message untouched", MessageRow, "can_be_untouched", "self.is_blocking or self.group", "self.group"),
    Fault(
        "delayed untouched message of a group",
        MessageRow,
        "can_be_untouched",
        "self.is_blocking or self.group",
        "self.is_blocking",
    ),
    Fault(
        "rows of consumers flushed twice", rows_module, "_follow_consumers", "found = []\n    yield", "pass\n    yield"
    ),
    Fault("consumers of all queues mixed", rows_module, "_follow_consumers", "itemgetter(0, 4)", "itemgetter(4, 4)"),
    Fault(
        "dispatches left out not counted", rows_module, "_follow_consumers", "detail_code=detail_code", "detail_code=0"
    ),
    Fault(
        "holder without a consumer", rows_module, "_of_consumer", "if not own and not known:\n        return", "pass"
    ),
    Fault("holds not asked for the end", rows_module, "_of_consumer", "*(each.number for each in held)", ""),
    Fault(
        "cut at the end of a consumer forgotten",
        rows_module,
        "_of_consumer",
        "bisect_left(cuts, end + 1)",
        "bisect_left(cuts, end)",
    ),
    Fault("ended consumers kept", rows_module, "_of_consumer", "not state.has_ended or ", "True or "),
    Fault("holders forgotten", rows_module, "_of_consumer", " or state.since in holders[cut]", ""),
    Fault(
        "dispatches before the end forgotten",
        rows_module,
        "_end_of_consumer",
        " and all(row.code != EventCode.DISPATCHED for row in rows)",
        "",
    ),
    Fault("end at the last event", rows_module, "_end_of_consumer", "else NEVER", "else last"),
    Fault(
        "dispatch before the gap told",
        rows_module,
        "_has_dispatch_after_gap",
        "> bisect_left(dispatches, reset.event)",
        "> 0",
    ),
    Fault(
        "dispatch after the cut told",
        rows_module,
        "_has_dispatch_after_gap",
        "bisect_left(dispatches, cut) >",
        "len(dispatches) >",
    ),
    Fault("event at the cut counted", rows_module, "last_before", "bisect_left", "__import__('bisect').bisect_right"),
    Fault("consumers known after a gap", rows_module, "_section_rows", "reset.code == EventCode.RUN_STARTED", "True"),
    Fault("end before the saved cut forgotten", Lifetime, "_apply_to_present", "is None and row.number", "is True"),
    Fault(
        "saved consumer that had ended gets messages",
        Subscription,
        "__init__",
        "since + 1) for each",
        "NEVER) for each",
    ),
    Fault(
        "saved consumers forgotten",
        rows_module,
        "_of_consumer",
        "known, after)\n    holders",
        "(), after)\n    holders",
    ),
    Fault(
        "saved holder sought by its dispatch", rows_module, "_of_consumer", "if each.event > after else each.event", ""
    ),
    Fault("saved consumer without events ends at once", rows_module, "_end_of_consumer", "else after + 1", "else 0"),
    Fault("saved consumers that pull forgotten", rows_module, "_pulling", "ConsumerFlags.PULLS", "0"),
    Fault("gap before the saved cut forgotten", CutHistory, "resets_before", "[self.saved.reset]", "[]"),
    Fault("recovery over the saved cut forgotten", rows_module, "_open_starts", "history.unrecovered()", "{}"),
    Fault("messages that it must find forgotten", rows_module, "_known_counts", "history.unrecovered()", "{}"),
    Fault("arrivals before the saved cut forgotten", rows_module, "_section_rows", "beginning.queue.arrivals + ", ""),
    Fault(
        "events before the saved cut forgotten", rows_module, "_section_rows", "beginning.queue.ticks + each", "each"
    ),
    Fault("saved total forgotten", rows_module, "_section_rows", "beginning.queue.ticks + plan", "plan"),
    Fault("saved consumers unknown", rows_module, "_section_rows", "= beginning.queue.knows_consumers,", "= False,"),
    Fault(
        "exclusive saved consumers unknown",
        rows_module,
        "_section_rows",
        ", beginning.queue.knows_exclusive",
        ", False",
    ),
    Fault("saved pause forgotten", rows_module, "_section_rows", "row.is_paused = beginning.queue.is_paused", "pass"),
    Fault("saved pause kept", rows_module, "_section_rows", " and not each.resumed", ""),
    Fault("idle time over the saved cut forgotten", rows_module, "_section_rows", "= beginning.idle", "= None"),
    Fault(
        "idle time over the saved cut in each section", rows_module, "_section_rows", "if number == 0 or", "if True or"
    ),
    Fault(
        "messages of no row not counted",
        rows_module,
        "_section_rows",
        "if untouched := 0 if",
        "if untouched := 0 if True or",
    ),
    Fault("pause of an earlier run kept", rows_module, "_section_rows", "reset.event if reset is not None else 0", "0"),
    Fault(
        "recovery before the start",
        rows_module,
        "_section_rows",
        "start.event < each.first <= until.event",
        "each.first <= until.event",
    ),
    Fault(
        "recovery that has ended",
        rows_module,
        "_section_rows",
        "start.event < each.first <= until.event",
        "start.event < each.first",
    ),
    Fault("section without an end", rows_module, "_section_rows", "following.first if", "NEVER if"),
    Fault("end in another queue", rows_module, "_section_rows", " and following.queue == each.queue", ""),
    Fault("beginning without a start forgotten", rows_module, "with_beginnings", "if first not in known", "if False"),
    Fault(
        "marks of another broker",
        CutHistory,
        "marks_of",
        "if each.event >> NUMBER_BITS == self.plan.brokers[queue]",
        "",
    ),
    Fault(
        "backlog below zero",
        plan_module,
        "queue_sections",
        "max(backlog + each.arrivals - each.ends, 0)",
        "backlog + each.arrivals - each.ends",
    ),
    Fault("groups forgotten", plan_module, "queue_sections", "min(backlog, grouped)", "backlog"),
    Fault("backlog forgotten", plan_module, "queue_sections", "max(section_events, largest)", "section_events"),
    Fault(
        "largest backlog of an earlier section kept",
        plan_module,
        "queue_sections",
        "            largest = of_groups\n",
        "",
    ),
    Fault("short remainder", plan_module, "queue_sections", " and left > max(section_events, of_groups) // 2", ""),
    Fault(
        "remainder below the backlog",
        plan_module,
        "queue_sections",
        "max(section_events, of_groups) // 2",
        "section_events // 2",
    ),
    Fault(
        "cut at the beginning of the grain",
        plan_module,
        "queue_sections",
        "each.grain + 1 << bits",
        "each.grain << bits",
    ),
    Fault("pauses forgotten", plan_module, "queue_sections", "max(paused, each.paused)", "each.paused"),
    Fault("resumes forgotten", plan_module, "queue_sections", "max(resumed, each.resumed)", "each.resumed"),
    Fault("grain of the end forgotten", plan_module, "_all_grains", ") + 1)", "))"),
    Fault("grains of another broker", plan_module, "_all_grains", "number + (broker << NUMBER_BITS)", "number"),
    Fault(
        "grains before the history", plan_module, "_table", "max(each.first >> bits, every.start)", "each.first >> bits"
    ),
    Fault(
        "last section of a queue without an end",
        plan_module,
        "_table",
        " or sections[number + 1].queue != each.queue",
        "",
    ),
]


@pytest.mark.drawn
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_in_the_rows_of_a_cut_is_seen(fault: Fault) -> None:
    with planted(fault):
        if fault.owner is plan_module:
            assert any(map(_fails, PLAN_TESTS))
        else:
            assert any(_fails(partial(check, seed)) for seed in range(TRIES) for check in (check_random, check_saved))


PLAN_TESTS = [
    each for name, each in vars(test_sections).items() if name.startswith(("test_section", "test_rest", "test_table"))
]


def _fails(test: Callable[[], None]) -> bool:
    try:
        test()
    except (AssertionError, LookupError, MemoryError, TypeError, ValueError):
        return True
    return False
