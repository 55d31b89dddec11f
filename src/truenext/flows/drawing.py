"""Waterfall: drawing of a flow. Each line is a message in a stage, with bars on the time of the flow: when the message
waited, and when a stage worked with it.

    order 7: 4.2 s, 3 messages, 4 runs
                              waited  worked  0                          4.2 s
    order.place                12 ms   80 ms  .==                               completed
      price                   250 ms  1.5 s      ..xxxx......======             failed: Busy, then completed

One list of lines (`waterfall_lines`) is drawn for terminals (`to_text`) and for pages (`to_html`). The HTML has neither
style nor script: bars are rectangles of SVG, and `waterfall.css` gives all colours. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

import msgspec

from truenext.flows.model import RecordedExecution, RecordedFlow

LINES_MAX = 40
"""Largest number of lines that are drawn of one flow on a page."""
DEPTH_MAX = 8
"""Largest number of steps by which a line is indented. A message is one step below the message that caused it."""
TEXT_WIDTH = 100
"""Width in columns of a waterfall as text, unless the caller gives another. Long outcomes are longer."""
BAR_KINDS = {
    "completed": "completed",
    "already processed": "completed",
    "failed": "failed",
    "rejected": "failed",
    "released": "released",
    "in doubt": "released",
    "interrupted": "failed",
    "not ended": "released",
}
"""Kind of an execution's bar, by its outcome."""
_END_TEXTS = {
    "dead-lettered": "; a dead letter",
    "handled": "; handled",
    "expired": "; expired",
    "removed": "; removed",
}
_MARKS = {"waited": ".", "released": "~", "completed": "=", "failed": "x"}
"""Character for each kind of bar, from the weakest to the strongest: the stronger one is drawn where two meet."""
_BARS_WIDTH_MIN = 20
_UNITS = 1000
"""Width of the bars of one line in units of SVG."""
_UNITS_MIN = 4
"""Least width of a bar. So an execution of a long flow can be seen."""

LEGEND_TEXT = ". waited  = worked, and completed  x failed, rejected or interrupted  ~ released, in doubt or not ended"
LEGEND_HTML = (
    '<p class="legend"><span><i class="key waited"></i>waited</span><span><i class="key completed"></i>worked, and '
    'completed</span><span><i class="key failed"></i>failed, rejected or interrupted</span><span>'
    '<i class="key released"></i>released, in doubt or not ended</span></p>'
)


class Bar(msgspec.Struct, frozen=True):
    """Bar on a line: a time in which the message waited, or in which a stage worked with it."""

    kind: str
    """Kind of the bar: waited, completed, failed or released."""
    start: float
    """Start of the bar as a part of the flow's time, from 0 to 1."""
    end: float


class WaterfallLine(msgspec.Struct, frozen=True):
    """Line of a waterfall: a message in one stage."""

    stage: str
    message: str
    depth: int
    """Number of messages from the start of the flow to this one, each of which caused the next."""
    waited_ms: float | None
    """Milliseconds for which the message waited until it was first dispatched; None if that is not known. Without the
    broker's history it is the time until its stage started, by two clocks."""
    worked_ms: float | None
    """Milliseconds of all executions together; None if no end is recorded."""
    outcome: str
    """Outcomes of the executions, with their errors, and the end of the message."""
    bars: tuple[Bar, ...]


def waterfall_lines(flow: RecordedFlow) -> list[WaterfallLine]:
    """Return the lines of a flow: below each message those that its stage has sent, in the order of their starts."""
    by_line: dict[tuple[str, str], list[RecordedExecution]] = {}
    for each in flow.executions:
        by_line.setdefault((each.message, each.stage), []).append(each)
    handled = _handled_lines(by_line)
    keys: dict[str, list[tuple[str, str]]] = {}
    for key in by_line:
        keys.setdefault(key[0], []).append(key)
    parents = {message: by_line[own[0]][0].parent for message, own in keys.items()}
    return [
        _line(flow, by_line[key], depth, is_handled=key in handled)
        for message, depth in _in_tree(parents)
        for key in keys[message]
    ]


def to_text(flow: RecordedFlow, *, width: int = TEXT_WIDTH, lines_max: int | None = None) -> str:
    """Draw a flow for a terminal of `width` columns. At most `lines_max` messages are drawn."""
    lines = waterfall_lines(flow)[:lines_max]
    rows = [
        (
            "  " * min(each.depth, DEPTH_MAX) + _printable(each.stage),
            _optional_duration(each.waited_ms),
            _optional_duration(each.worked_ms),
        )
        for each in lines
    ]
    widths = [max(map(len, column)) for column in zip(("", "waited", "worked"), *rows, strict=True)]
    duration = format_duration(flow.seconds * 1e3)
    bars_width = max(_BARS_WIDTH_MIN, width - sum(widths) - 8 - _outcome_width(lines))
    parts = [
        f"{_printable(flow.trace) or '(no trace)'}: {', '.join(_facts(flow))}",
        _text_row(("", "waited", "worked"), widths, f"0{duration:>{bars_width - 1}}", ""),
    ]
    for row, each in zip(rows, lines, strict=True):
        parts.append(_text_row(row, widths, _text_bars(each.bars, bars_width), _printable(each.outcome)))
    omitted_count = _omitted_count(flow, lines)
    if omitted_count > 0:
        parts.append(f"{omitted_count:,} more messages")
    return "\n".join(parts)


def to_html(flow: RecordedFlow, *, is_open: bool = False) -> str:
    """Draw a flow as an element `details` for a page with `waterfall.css`."""
    lines = waterfall_lines(flow)[:LINES_MAX]
    omitted_count = _omitted_count(flow, lines)
    rest = f'<p class="note">{omitted_count:,} more messages.</p>' if omitted_count > 0 else ""
    return (
        f'<details class="flow"{" open" if is_open else ""}><summary>{escape(flow.trace or "(no trace)")} '
        f'<span class="note">{" · ".join(_facts(flow))}</span></summary><div class="scroll"><table>'
        '<thead><tr><th>stage</th><th class="number">waited</th><th class="number">worked</th>'
        f'<th>what became of it</th><th class="track">0 to {format_duration(flow.seconds * 1e3)}</th></tr></thead>'
        f"<tbody>{''.join(map(_html_row, lines))}</tbody></table></div>{rest}</details>"
    )


def format_duration(ms: float) -> str:
    """Format milliseconds in the unit that needs few digits.

    >>> format_duration(0.424), format_duration(99.6), format_duration(4240.0), format_duration(420000.0)
    ('0.42 ms', '100 ms', '4.2 s', '7 min')
    """
    value, unit = ms, "ms"
    for times, larger in ((1000, "s"), (60, "min"), (60, "h")):
        if value < (1000 if unit == "ms" else 120):
            break
        value, unit = value / times, larger
    return f"{value:,.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.2g} {unit}"


# ---- Lines ----


def _in_tree(parents: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield messages with their depths: each one before its children, and these before the next one of its depth.
    `parents` has the parent of each message, in the order of the starts."""
    children: dict[str, list[str]] = {}
    roots: list[str] = []
    for message, parent in parents.items():
        (children.setdefault(parent, []) if parent in parents else roots).append(message)
    done = set()
    # No service records messages that are their own ancestors, but a file may have them.
    stack = [(message, 0) for message in (*reversed(list(parents)), *reversed(roots))]
    while stack:
        message, depth = stack.pop()
        if message not in done:
            done.add(message)
            yield message, depth
            stack += [(child, depth + 1) for child in reversed(children.get(message, ()))]


def _handled_lines(by_line: dict[tuple[str, str], list[RecordedExecution]]) -> set[tuple[str, str]]:
    """Return the lines of given-up messages that another stage has received later: the stage that handles the
    failure."""
    handled = set()
    last_of_message: dict[str, tuple[str, str]] = {}
    for key, runs in by_line.items():
        before = last_of_message.get(key[0])
        # Subscribers of a topic get copies of a message, with its id, and have no queue.
        if before is not None and runs[0].queue is not None and by_line[before][-1].is_given_up:
            handled.add(before)
        last_of_message[key[0]] = key
    return handled


def _line(flow: RecordedFlow, runs: list[RecordedExecution], depth: int, *, is_handled: bool) -> WaterfallLine:
    first = runs[0]
    times = [run.total_us for run in runs if run.total_us is not None]
    return WaterfallLine(
        stage=first.stage,
        message=first.message,
        depth=depth,
        waited_ms=_waited_ms(first),
        worked_ms=sum(times) / 1e3 if times else None,
        outcome=_describe_outcome(runs, is_handled=is_handled),
        bars=tuple(_bars(flow, runs)),
    )


def _waited_ms(first: RecordedExecution) -> float | None:
    if first.accepted_at is None:
        return None
    until = first.started_at if first.dispatched_at is None else first.dispatched_at
    return max(0.0, (until - first.accepted_at) / 1e3)


def _bars(flow: RecordedFlow, runs: list[RecordedExecution]) -> Iterator[Bar]:
    """Yield the bars of a line. Clocks of the broker and of processes are compared here, and only for a bar."""
    length = max(flow.seconds * 1e6, 1.0)

    def position(at: int) -> float:
        return min(max((at - flow.started_at) / length, 0.0), 1.0)

    waits_since = runs[0].accepted_at
    for index, run in enumerate(runs):
        start = position(run.started_at)
        if waits_since is not None and position(waits_since) < start:
            yield Bar("waited", position(waits_since), start)
        end = run.started_at if run.ended_at is None else run.ended_at
        yield Bar(BAR_KINDS[_outcome(run, is_last=index == len(runs) - 1)], start, max(start, position(end)))
        waits_since = run.ended_at


def _describe_outcome(runs: list[RecordedExecution], *, is_handled: bool) -> str:
    outcomes = [_outcome(run, is_last=run is runs[-1]) for run in runs]
    descriptions = (
        outcome if run.error is None else f"{outcome}: {run.error}" for outcome, run in zip(outcomes, runs, strict=True)
    )
    times = ((description, len(list(same))) for description, same in groupby(descriptions))
    text = ", then ".join(description if count == 1 else f"{description} {count} times" for description, count in times)
    return text + _describe_end(runs[-1], is_handled=is_handled)


def _describe_end(last: RecordedExecution, *, is_handled: bool) -> str:
    if last.end_kind is not None:
        return _END_TEXTS.get(last.end_kind, "")
    if not last.is_given_up:
        return ""
    return "; handled" if is_handled else "; a dead letter"


def _outcome(run: RecordedExecution, *, is_last: bool) -> str:
    if run.outcome is not None:
        return run.outcome
    # What is not ended may still run, unless the message came again or ended.
    return "not ended" if is_last and run.end_kind is None else "interrupted"


def _facts(flow: RecordedFlow) -> list[str]:
    facts = [format_duration(max(flow.seconds * 1e3, 1e-3)), _count(flow.messages, "message")]
    if flow.runs > flow.messages:
        facts.append(_count(flow.runs, "run"))
    if flow.given_up:
        facts.append(f"{flow.given_up:,} given up")
    if flow.in_progress:
        facts.append(f"{flow.in_progress:,} in progress")
    if flow.omitted:
        facts.append(f"{_count(flow.omitted, 'more run')} left out")
    return facts


def _omitted_count(flow: RecordedFlow, lines: Iterable[WaterfallLine]) -> int:
    return flow.messages - len({each.message for each in lines})


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _optional_duration(ms: float | None) -> str:
    return "" if ms is None else format_duration(ms)


# ---- Text ----


def _text_row(cells: Sequence[str], widths: Sequence[int], bars: str, outcome: str) -> str:
    stage, waited, worked = cells
    row = f"{stage:<{widths[0]}}  {waited:>{widths[1]}}  {worked:>{widths[2]}}  {bars}"
    return f"{row}  {outcome}".rstrip()


def _outcome_width(lines: Iterable[WaterfallLine]) -> int:
    return min(max((len(each.outcome) for each in lines), default=0), 40)


def _text_bars(bars: Iterable[Bar], width: int) -> str:
    cells = [" "] * width
    for kind, mark in _MARKS.items():
        for bar in bars:
            if bar.kind == kind:
                first = min(int(bar.start * width), width - 1)
                last = max(first + 1, round(bar.end * width))
                cells[first:last] = mark * (last - first)
    return "".join(cells)


def _printable(text: str) -> str:
    r"""Escape characters that control a terminal.

    >>> _printable("two\n\x1b[31mlines")
    'two\\n\\x1b[31mlines'
    """
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


# ---- HTML ----


def _html_row(line: WaterfallLine) -> str:
    bars = "".join(map(_html_bar, line.bars))
    return (
        f'<tr><td class="depth-{min(line.depth, DEPTH_MAX)}">{escape(line.stage)}</td>'
        f'<td class="number">{_optional_duration(line.waited_ms)}</td>'
        f'<td class="number">{_optional_duration(line.worked_ms)}</td>'
        f'<td>{escape(line.outcome)}</td><td class="track">'
        f'<svg viewBox="0 0 {_UNITS} 10" preserveAspectRatio="none" aria-hidden="true">{bars}</svg></td></tr>'
    )


def _html_bar(bar: Bar) -> str:
    width = max(bar.end - bar.start, 0.0) * _UNITS
    start = min(bar.start * _UNITS, _UNITS - _UNITS_MIN)
    return f'<rect class="{bar.kind}" x="{start:.1f}" width="{max(width, _UNITS_MIN):.1f}" height="10"/>'
