"""The audit of each queue, fed without Spark: it handles thousands of small histories in seconds."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

import pyarrow as pa

from truenext.spark.audit.lifetime import AFTER_END_CODES
from truenext.spark.audit.model import (
    AUTO_WINDOW,
    HAS_CAUSE,
    NEVER,
    SELECTOR_WINDOW,
    UNLIMITED,
    ConsumerFlags,
    EventCode,
    ReturnReason,
    StartFlag,
    TimelineRow,
)
from truenext.spark.audit.sections import end_codes
from truenext.spark.audit.sweep import sweep_batches
from truenext.spark.audit.timeline import CODES, COLUMNS

Event = dict[str, Any]


def rows_of(events: list[Event]) -> list[dict[str, Any]]:
    """Return the rows that `timeline` makes of `events`, in plain Python."""
    rows = _rows_of(events)
    for queue, timeline in by_queue(rows).items():
        codes = end_codes(timeline)
        for each in rows:
            if each["queue"] == queue and each["code"] in AFTER_END_CODES:
                each["number"] = codes.get(each["event"], 0)
    return rows


def by_queue(rows: list[dict[str, Any]]) -> dict[str, list[TimelineRow]]:
    """Return the timeline of each queue."""
    queues: dict[str, list[TimelineRow]] = {}
    for each in rows:
        row = TimelineRow(**{name: each[name] for name in TimelineRow._fields})
        queues.setdefault(each["queue"], []).append(row)
    return queues


def _rows_of(events: list[Event]) -> list[dict[str, Any]]:
    queues = sorted({each["queue"] for each in events if each["queue"]})
    runs = sorted({each["run"] for each in events})
    starts = {each["run"]: each for each in events if each["kind"] == "run-started"}
    rows = []

    def row(event: int, code: EventCode, queue: str, **columns: Any) -> None:
        empty = dict.fromkeys(COLUMNS, -1) | {
            "number": 0,
            "persistent": False,
            "visible_event": NEVER,
            "at": 0,
            "visible_at": 0,
            "detail_code": 0,
        }
        rows.append(empty | {"event": event, "code": int(code), "queue": queue} | columns)

    def micros(each: Event) -> int:
        at: datetime = each["at"]
        return round(at.timestamp() * 1e6)

    previous = None
    for each in events:
        if previous is not None and each["event"] - previous["event"] > 1:
            for queue in queues:
                row(previous["event"] + 1, EventCode.GAP, queue)
        if each["kind"] == "run-started":
            flags = int(StartFlag.CLEAN) if each["reason"] == "clean" else 0
            flags += int(StartFlag.CONTINUED) if each["run"] - 1 in runs else 0
            others = {other["kind"] for other in events if other["run"] == each["run"]} - {"run-started", "recovered"}
            is_whole = events[0]["event"] == 1 and all(run in runs for run in range(runs[0], each["run"]))
            flags += (int(StartFlag.RECOVERED) if others else 0) + (int(StartFlag.COMPLETE) if is_whole else 0)
            for queue in queues:
                row(
                    each["event"],
                    EventCode.RUN_STARTED,
                    queue,
                    at=micros(each),
                    number=flags,
                    visible_at=micros(previous) if previous else 0,
                )
        previous = each
        if each["kind"] not in CODES:
            continue
        columns: dict[str, Any] = {"at": micros(each)}
        columns["sequence"] = -1 if each["sequence"] is None else each["sequence"]
        columns["consumer"] = -1 if each["consumer"] is None else each["consumer"]
        if each["kind"] == "accepted":
            by = next(
                (
                    o
                    for o in events
                    if o["kind"] == "committed" and o["run"] == each["run"] and o["batch"] >= each["batch"]
                ),
                None,
            )
            if not each["batch"]:
                by = each
            if by is None:
                start = next((starts[run] for run in runs if run > each["run"] and run in starts), None)
                if start and any(o["sequence"] == each["sequence"] and o["event"] > start["event"] for o in events):
                    by = start
            columns |= {"number": each["priority"], "persistent": each["persistent"], "detail_code": each["group"] or 0}
            if by is not None:
                columns |= {"visible_event": by["event"], "visible_at": micros(by)}
        elif each["kind"] in ("subscribed", "window"):
            columns["number"] = AUTO_WINDOW if each["window"] is None else each["window"]
            if each["kind"] == "subscribed":
                mode = each["mode"] or ""
                if "pulling" in mode:
                    columns["number"] = UNLIMITED
                if "selector" in mode:
                    columns["number"] = SELECTOR_WINDOW
                if each["priority"] is not None:
                    columns["sequence"] = each["priority"]
                columns["detail_code"] = sum(
                    int(flag)
                    for word, flag in {
                        "auto": ConsumerFlags.AUTO,
                        "express": ConsumerFlags.EXPRESS,
                        "started": ConsumerFlags.NAMES_STARTED,
                        "pulling": ConsumerFlags.PULLS,
                        "exclusive": ConsumerFlags.EXCLUSIVE,
                    }.items()
                    if word in mode
                )
        else:
            columns["number"] = each["count"] or each["attempts"] or 0
        code = CODES[each["kind"]]
        if each["kind"] == "returned":
            waits = {"delayed": EventCode.DELAYED, "blocking": EventCode.BLOCKING}
            code = waits.get(each["reason"].rpartition(" ")[2], code)
            reasons = {"released": ReturnReason.RELEASED, "lost": ReturnReason.STARTED, "aborted": ReturnReason.STARTED}
            columns["detail_code"] = int(reasons.get(each["reason"].partition(" ")[0], ReturnReason.OTHER))
        if each["kind"] in ("returned", "dead-lettered", "handled") and each.get("cause") is not None:
            columns["detail_code"] = columns.get("detail_code", 0) + HAS_CAUSE
        row(each["event"], code, each["queue"], **columns)
    for queue in queues:
        row(events[-1]["event"] + 1, EventCode.FINISHED, queue, at=micros(events[-1]))
    return rows


def outcomes_of(events: list[Event], stuck_seconds: float) -> list[dict[str, Any]]:
    rows = rows_of(events)
    batch = pa.RecordBatch.from_arrays(
        [pa.array([each[name] for each in rows]) for name in COLUMNS], names=list(COLUMNS)
    )
    return [each for out in sweep_batches([batch], int(stuck_seconds * 1e6)) for each in out.to_pylist()]


def counted(findings: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Count findings by kind and queue; `stuck` counts times, the other kinds count messages."""
    total: Counter[tuple[str, str]] = Counter()
    for each in findings:
        total[each["kind"], each["queue"]] += 1 if each["kind"] == "stuck" else each["count"]
    return total


def witnessed(findings: list[dict[str, Any]]) -> set[tuple[str, str, int, int | None]]:
    return {
        (
            each["kind"],
            each["queue"],
            each["event"],
            each["overtaken_sequence"] if each["overtaken_sequence"] >= 0 else None,
        )
        for each in findings
        if each["kind"]
        in ("inversion", "order", "premature", "duplicate", "uncredited", "miscount", "stale", "lost-failure")
    }
