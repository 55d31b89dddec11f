"""Waterfalls: drawings of flows on the page. Each message of a flow is a line from the start of the flow to its last
activity. Bars on the line show when the message waited, and when stages worked with it.

A waterfall is plain HTML, with a few bars in each line. So a hundred flows are small, and need no script. All text is
escaped.
"""

from collections.abc import Iterator
from html import escape
from itertools import count, groupby
from typing import Any

import pandas

OPEN_FLOWS = 3
"""Number of flows that are shown open. Each other flow is one line until the reader opens it."""
LINES_MAX = 40
"""Largest number of messages that are shown of one flow."""
DEPTH_MAX = 8
"""Largest number of steps by which a message is indented. Each message is one step below the message that caused it."""
BAR_STYLES = {
    "completed": "completed",
    "already processed": "completed",
    "failed": "failed",
    "rejected": "failed",
    "released": "released",
    "in doubt": "released",
    "interrupted": "failed",
}
"""Style of an execution's bar, by its outcome."""
END_TEXTS = {"dead-lettered": "; a dead letter", "expired": "; expired", "removed": "; removed"}
HEAD = (
    '<tr><th>stage</th><th class="number">waited</th><th class="number">worked</th><th>what became of it</th>'
    '<th class="track">0 to {}</th></tr>'
)
LEGEND = (
    '<p class="legend"><span><i class="key waited"></i>waited</span><span><i class="key completed"></i>worked, and '
    'completed</span><span><i class="key failed"></i>failed, rejected or interrupted</span><span>'
    '<i class="key released"></i>released or in doubt</span></p>'
)

ExecutionRow = dict[str, Any]
"""Row of the table `waterfalls`. A column without a value is None."""


def waterfalls_html(waterfalls: pandas.DataFrame) -> str:
    """Return HTML of the flows with messages that were given up, the latest first, and of the slowest flows.
    `waterfalls` has a row for each execution."""
    flows: dict[str, list[ExecutionRow]] = {}
    for row in waterfalls.sort_values(["flow", "position"]).to_dict("records"):
        run: ExecutionRow = {str(name): None if pandas.isna(value) else value for name, value in row.items()}
        flows.setdefault(run["flow"], []).append(run)
    if not flows:
        return '<p class="note">None.</p>'
    given_up = [runs for runs in flows.values() if runs[0]["given_up"]]
    given_up.sort(key=lambda runs: runs[0]["flow_started_at"], reverse=True)
    others = [runs for runs in flows.values() if not runs[0]["given_up"]]
    others.sort(key=lambda runs: runs[0]["seconds"], reverse=True)
    parts = [LEGEND]
    numbers = count()
    for heading, some in (("Given up, the latest first", given_up), ("The slowest of the others", others)):
        if some:
            shown = "".join(_flow(runs, is_open=next(numbers) < OPEN_FLOWS) for runs in some)
            parts.append(f"<h3>{heading}</h3>{shown}")
    return "".join(parts)


def _flow(runs: list[ExecutionRow], *, is_open: bool) -> str:
    first = runs[0]
    seconds = max(float(first["seconds"]), 1e-6)
    facts = [_duration(seconds * 1e3), _count(first["messages"], "message")]
    if first["runs"] > first["messages"]:
        facts.append(_count(first["runs"], "run"))
    if first["given_up"]:
        facts.append(f"{first['given_up']:,} given up")
    if first["in_progress"]:
        facts.append(f"{first['in_progress']:,} in progress")
    lines = list(_lines(runs, first["flow_started_at"], seconds))[:LINES_MAX]
    omitted_count = first["messages"] - len(lines)
    rest = f'<p class="note">{omitted_count:,} more messages.</p>' if omitted_count > 0 else ""
    return (
        f'<details class="flow"{" open" if is_open else ""}><summary>{escape(first["trace"] or "(no trace)")} '
        f'<span class="note">{" · ".join(facts)}</span></summary><div class="scroll"><table>'
        f"<thead>{HEAD.format(_duration(seconds * 1e3))}</thead><tbody>{''.join(lines)}</tbody></table></div>{rest}"
        "</details>"
    )


def _lines(runs: list[ExecutionRow], started: pandas.Timestamp, seconds: float) -> Iterator[str]:
    """Yield one line for each message, in the order of their starts."""
    messages: dict[str, list[ExecutionRow]] = {}
    for run in runs:
        messages.setdefault(run["message"], []).append(run)
    depths: dict[str, int] = {}

    def position(at: pandas.Timestamp) -> float:
        return min(max(float((at - started).total_seconds()) / seconds, 0.0), 1.0)

    for message, own in messages.items():
        first = own[0]
        depth = depths[message] = depths.get(first["parent"] or "", -1) + 1
        bars, waited = "", ""
        accepted_at, dispatched_at = first["accepted_at"], first["dispatched_at"]
        if accepted_at is not None:
            # The clocks of the broker and of a process are compared here, and only for a bar.
            bars += _bar("waited", position(accepted_at), position(first["started_at"]))
            if dispatched_at is not None:
                waited = _duration((dispatched_at - accepted_at).total_seconds() * 1e3)
        for run in own:
            bars += _bar(
                BAR_STYLES[_outcome(run)], position(run["started_at"]), position(run["ended_at"] or run["started_at"])
            )
        times = [run["total_us"] for run in own if run["total_us"] is not None]
        worked = _duration(sum(times) / 1e3) if times else ""
        indent = 0.7 + 0.9 * min(depth, DEPTH_MAX)
        yield (
            f'<tr><td style="padding-left:{indent:.1f}rem">{escape(first["stage"])}</td>'
            f'<td class="number">{waited}</td><td class="number">{worked}</td><td>{escape(_describe_outcome(own))}</td>'
            f'<td class="track"><div>{bars}</div></td></tr>'
        )


def _describe_outcome(runs: list[ExecutionRow]) -> str:
    descriptions = (_outcome(run) if run["error"] is None else f"{_outcome(run)}: {run['error']}" for run in runs)
    times = ((description, len(list(same))) for description, same in groupby(descriptions))
    text = ", then ".join(description if count == 1 else f"{description} {count} times" for description, count in times)
    return text + END_TEXTS.get(runs[-1]["end_kind"] or "", "")


def _outcome(run: ExecutionRow) -> str:
    return run["outcome"] or "interrupted"


def _bar(kind: str, start: float, end: float) -> str:
    return f'<i class="{kind}" style="left:{start:.2%};width:{max(end - start, 0.0):.2%}"></i>'


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _duration(ms: float) -> str:
    """Format milliseconds in the unit that needs few digits.

    >>> _duration(0.424), _duration(99.6), _duration(4240.0), _duration(420000.0)
    ('0.42 ms', '100 ms', '4.2 s', '7 min')
    """
    value, unit = ms, "ms"
    for times, larger in ((1000, "s"), (60, "min"), (60, "h")):
        if value < (1000 if unit == "ms" else 120):
            break
        value, unit = value / times, larger
    return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.2g} {unit}"
