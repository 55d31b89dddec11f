"""Audits in pieces, in plain Python. Each knows the history up to its end, and goes on from the cut of the last one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
from msgspec import structs

from tests.spark.cutting import STUCK_US, fed
from tests.spark.histories import Event
from tests.spark.plain import by_queue, rows_of
from truenext.spark.audit.cut import WHOLE, CutCode, QueueCut
from truenext.spark.audit.model import NEVER, EventCode, Finding, StartFlag, TimelineRow
from truenext.spark.audit.queue_audit import QueueAudit
from truenext.spark.audit.resume import SAVED_COLUMNS, SavedAudit, _after_starts, _become_durable, reset_marks
from truenext.spark.audit.section_sweep import Stop, sweep_batches
from truenext.spark.audit.state import AuditState
from truenext.spark.audit.timeline import COLUMNS
from truenext.spark.audit.untouched import Since, since

Found = tuple[str, Finding]
"""Queue, and finding."""


def pieces(events: Sequence[Event], cuts: Sequence[int]) -> list[list[Event]]:
    """Return the events up to the end of each piece. `cuts` are the first events of all pieces but the first."""
    ends = [*cuts, events[-1]["event"] + 1]
    return [[each for each in events if each["event"] < end] for end in ends]


def judge_in_pieces(events: Sequence[Event], cuts: Sequence[int]) -> list[list[Found]]:
    """Return the findings of each piece."""
    return [
        [(queue, each) for queue, audit in piece for each in audit.findings] for piece in audit_pieces(events, cuts)
    ]


def audit_pieces(events: Sequence[Event], cuts: Sequence[int]) -> Iterator[list[tuple[str, QueueAudit]]]:
    """Yield for each piece the audits of the queues, at its end."""
    known = [[], *pieces(events, cuts)]
    saved: dict[str, QueueCut] = {}
    for earlier, events_up_to_end in pairwise(known):
        last = events_up_to_end[-1]
        first = earlier[-1]["event"] + 1 if earlier else 0
        audits = []
        for queue, rows in by_queue(rows_of(events_up_to_end)).items():
            rows = [each for each in rows if each.code != EventCode.FINISHED]
            before, after = (
                [each for each in rows if (each.event < first) is is_before] for is_before in (True, False)
            )
            if queue in saved:
                audit = QueueAudit.begin(_with_later_knowledge(saved[queue], before), STUCK_US)
            else:
                audit = fed(QueueAudit(STUCK_US), before)
                assert not audit.findings
            fed(audit, after)
            audit.stop(last["event"] + 1, round(last["at"].timestamp() * 1e6))
            audits.append((queue, audit))
            saved[queue] = audit.save(last["event"] + 1)
        yield audits


def _with_later_knowledge(cut: QueueCut, before: Sequence[TimelineRow]) -> QueueCut:
    """Return the cut with what is known now of the rows before it: when messages became durable, and whether a run has
    finished its recovery."""
    durable = {each.sequence: each for each in before if each.code == EventCode.ACCEPTED}
    flags = {each.event: each.number for each in before if each.code == EventCode.RUN_STARTED}
    messages = []
    for message in cut.messages:
        row = durable.get(message.sequence)
        # A later start shows that a message was durable, but not at the cut.
        if row is not None and message.visible_event == NEVER and row.visible_event >= cut.event:
            message = structs.replace(message, visible_event=row.visible_event, visible_at=row.visible_at)
        messages.append(message)
    queue = cut.queue
    if queue.expected is not None:
        recovered = flags[queue.start_event] & StartFlag.RECOVERED
        queue = structs.replace(queue, start_flags=queue.start_flags | recovered)
    return structs.replace(cut, messages=messages, queue=queue)


def keys(found: Sequence[Found]) -> list[tuple[object, ...]]:
    """Return the findings in order, without the durations of idle times and the times at which losses are seen: a piece
    tells both at its end, and the whole history perhaps later."""
    return sorted((queue, *structs.astuple(_comparable(each))) for queue, each in found)


def _comparable(finding: Finding) -> Finding:
    if finding.kind == "stuck":
        return structs.replace(finding, duration=0, count=0)
    return structs.replace(finding, at=0) if finding.kind == "lost" else finding


# ---- The same, through the rows that Spark's workers get and return ----


def sweep_in_pieces(events: Sequence[Event], cuts: Sequence[int]) -> list[list[Found]]:
    """Return the findings of each piece, of sweeps that get the saved rows of the one before."""
    found: list[list[Found]] = []
    known = pieces(events, cuts)
    # Of any queue: they are the same for all.
    marks = reset_marks(next(iter(by_queue(rows_of([*events])).values()), []))
    saved: list[dict[str, Any]] = []
    state: AuditState | None = None
    for events_up_to_end in known:
        last = events_up_to_end[-1]
        stop = Stop(last["event"] + 1, round(last["at"].timestamp() * 1e6))
        rows = [each for each in rows_of(events_up_to_end) if each["code"] != EventCode.FINISHED]
        new = rows if state is None else [each for each in rows if each["event"] > state.last_event]
        fresh = WHOLE
        happened: Since | None = None
        cut, untouched = _durable(saved, rows, state), list[dict[str, Any]]()
        if state is not None:
            after_recovery = [
                each["event"]
                for each in events_up_to_end
                if each["run"] == state.run and each["kind"] not in ("run-started", "recovered")
            ]
            is_recovered = bool(after_recovery)
            was_recovered = is_recovered and after_recovery[0] <= state.last_event
            happened = since(_resets(new), is_recovered=was_recovered)
            cut, untouched = _divided(cut, new, happened)
            fresh = SavedAudit(state, None).fresh(is_recovered=is_recovered)  # type: ignore[arg-type]
        batches = [_batch([*cut, *new])]
        swept = [each for out in sweep_batches(batches, STUCK_US, fresh, stop) for each in out.to_pylist()]
        saved = [each for each in swept if each["row"] == "saved"] + _left(untouched, swept, happened)
        names = Finding.__struct_fields__
        found.append(
            [(each["queue"], Finding(**{n: each[n] for n in names})) for each in swept if each["row"] == "finding"]
        )
        state = _state(marks, last, stop.at)
    return found


def _state(marks: Sequence[TimelineRow], last: Event, at: int) -> AuditState:
    # Whether a run has finished its recovery is not known yet.
    known = [each._replace(number=each.number & ~StartFlag.RECOVERED) for each in marks if each.event <= last["event"]]
    return AuditState(
        store=None,
        queue=None,
        run=last["run"],
        last_event=last["event"],
        last_at=at,
        is_recovered=False,
        is_whole=False,
        first_event=1,
        marks=tuple(known),
    )


def _durable(
    saved: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], state: AuditState | None
) -> list[dict[str, Any]]:
    """Return the saved rows as rows of a cut. Messages that became durable since then have the event."""
    if state is None or not saved:
        return []
    visible = {each["sequence"]: each for each in rows if each["code"] == EventCode.ACCEPTED}
    names = ("queue", "code", "sequence", "number", "payload")
    batch = _batch(
        [
            {name: each[name] for name in names}
            | {name: _later(visible.get(each["sequence"]), name, state.last_event) for name in _VISIBLE}
            for each in saved
            if each["code"] == CutCode.SAVED
        ],
        names=(*names, *_VISIBLE),
    )
    messages = [each for out in _become_durable([batch]) for each in out.to_pylist()]
    lanes = {each["sequence"]: {name: each[name] for name in _OF_MESSAGES} for each in saved}
    messages = [each | lanes[each["sequence"]] for each in messages]
    others = [each for each in saved if each["code"] != CutCode.SAVED]
    return [each | {"event": state.last_event} for each in (*messages, *others)]


def _divided(
    cut: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], happened: Since | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows that the sweep of the `new` events needs, and those of untouched messages."""
    if happened is None:
        return [*cut], []
    touched = {each["sequence"] for each in new}
    changed = {each["queue"] for each in new if each["code"] in (EventCode.ENDED, EventCode.DRAINED)}
    known, untouched = [], []
    lanes: set[tuple[Any, ...]] = set()
    for row in sorted(cut, key=lambda each: each["sequence"] or -1):
        is_waiting = row["priority"] is not None
        lane = row["queue"], row["priority"], row["group"]
        is_untouched = row["can_be_untouched"] and row["sequence"] not in touched and row["queue"] not in changed
        if happened.has_start:
            is_untouched = is_untouched and is_waiting and (happened.finds_transient or row["persistent"])
        if not is_untouched or (is_waiting and lane not in lanes):
            known.append(row)
            lanes |= {lane} if is_untouched else set()
        else:
            untouched.append(row)
    # One row for each message is as good as one for all of a queue.
    counts = [
        each | {"code": CutCode.UNTOUCHED, "number": 1, "payload": b""}
        for each in untouched
        if each["priority"] is not None
    ]
    return [*known, *counts], untouched


def _left(
    untouched: Sequence[dict[str, Any]], swept: Sequence[dict[str, Any]], happened: Since | None
) -> list[dict[str, Any]]:
    """Return the rows of the next cut for untouched messages, after all starts."""
    if happened is None or not happened.has_start:
        return [*untouched]
    sections = [each for each in swept if (each["row"], each["code"]) == ("saved", CutCode.SECTION)]
    in_doubt = {each["queue"] for each in sections if each["number"]}
    rows = [each | {"is_in_doubt": True if each["queue"] in in_doubt else None} for each in untouched]
    batch = _batch(rows, names=(*SAVED_COLUMNS, "is_in_doubt"))
    after = _after_starts([batch], has_gap=happened.has_gap)
    return [each | {"row": "saved"} for out in after for each in out.to_pylist()]


def _resets(rows: Sequence[dict[str, Any]]) -> list[TimelineRow]:
    """Return the starts and gaps, once each and in order."""
    codes = (EventCode.RUN_STARTED, EventCode.GAP)
    found = {each["event"]: each for each in rows if each["code"] in codes}
    return [TimelineRow(event, 0, row["code"], number=row["number"]) for event, row in sorted(found.items())]


_OF_MESSAGES = ("persistent", "can_be_untouched", "priority", "group")
_VISIBLE = ("visible_event", "visible_at")


def _later(row: dict[str, Any] | None, name: str, event: int) -> int | None:
    if row is None or row["visible_event"] == NEVER or row["visible_event"] <= event:
        return None
    return int(row[name])


def _batch(rows: Sequence[dict[str, Any]], names: Sequence[str] = (*COLUMNS, "section", "payload")) -> pa.RecordBatch:
    types = {"queue": pa.string(), "payload": pa.binary()}
    types |= dict.fromkeys(("persistent", "can_be_untouched", "is_in_doubt"), pa.bool_())
    arrays = [pa.array([each.get(name) for each in rows], types.get(name, pa.int64())) for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=[*names])
