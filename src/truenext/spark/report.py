"""Report of an audit: one HTML page that needs no other file. It shows one run, or several runs side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from html import escape
from importlib.resources import files
from pathlib import Path

import pandas

from truenext.errors import ConfigurationError
from truenext.spark import plots
from truenext.spark.html import script_json, table_html
from truenext.spark.verdict import Verdict
from truenext.spark.waterfalls import waterfalls_html

ROWS_MAX = 100
"""Largest number of rows that are shown of a table."""
QUEUES_MAX = 6
"""Largest number of queues that get plots. Queues with most violations come first, then queues with most messages."""
TABLES = {
    "stage_findings": "Findings: events of stages against the history",
    "violations": "Violations, with witnesses",
    "lost": "Lost",
    "duplicates": "Delivered twice",
    "consumers": "Wrong dispatches, acknowledgements and attempts, by consumer",
    "stuck": "Stuck",
    "starvation": "Starvation",
    "redelivery": "Redelivery",
    "stages": "Stages: outcomes of their runs, waiting and working times in milliseconds",
    "commit_gaps": "SQL committed, message not acknowledged",
    "gaps": "Gaps",
    "differences": "Differences between the folders of one broker",
}
SHOWN_ROWS_MAX = 200_000
"""Largest number of rows of a table that are read for a page. The Parquet files have all rows."""
MEASURES = ("visible to dispatched", "dispatched to acknowledged")


@dataclass(frozen=True, slots=True)
class AuditedHistory:
    """Tables and verdict of one audited history, and its name on the page."""

    name: str
    tables: Mapping[str, pandas.DataFrame]
    """Tables of the audit, such as `positions`, `latency`, `depth` and `violations`. The page leaves out tables that
    are missing."""
    verdict: Verdict


def write_comparison(
    runs: Sequence[AuditedHistory], path: Path, *, title: str, sections: Mapping[str, pandas.DataFrame] | None = None
) -> None:
    """Write the page that `comparison_page` returns to `path`.

    Raises: ConfigurationError if the package that draws the plots is not installed; OSError if the page cannot be
    written
    """
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(comparison_page(runs, title=title, sections=sections), encoding="utf-8")
    unfinished.replace(path)


def comparison_page(
    runs: Sequence[AuditedHistory], *, title: str, sections: Mapping[str, pandas.DataFrame] | None = None
) -> str:
    """Return one page on one or several runs. Plots of one queue are next to each other, with the same scale.

    Queues of the same name are compared. If each run has only one queue, these queues are compared whatever their names
    are. A queue that exists only in some runs is drawn for these runs. `sections` are further tables about the runs,
    shown after the verdicts, each under its heading.

    Raises: ConfigurationError if the package that draws the plots is not installed
    """
    specs: list[plots.Spec] = []
    parts = [
        _verdicts(runs),
        *_sections(sections or {}),
        *_flows(runs),
        *_Plots(runs, specs).sections(),
        *_tables(runs),
    ]
    body = "".join(parts)
    content = files("truenext.spark")
    # The policy allows the page to run its own scripts only, and to send no requests.
    policy = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{content.joinpath("page.css").read_text()}{files("truenext.flows").joinpath("waterfall.css").read_text()}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
<script>{_vega()}</script>
<script type="application/json" id="specs">{script_json(specs)}</script>
<script>{content.joinpath("draw.js").read_text()}</script>
</body>
</html>
"""


def _verdicts(runs: Sequence[AuditedHistory]) -> str:
    cards = []
    for run in runs:
        held = run.verdict.has_contract_held
        name = f"<h2>{escape(run.name)}</h2>" if len(runs) > 1 else ""
        findings = "".join(f"<li>{escape(finding.sentence)}</li>" for finding in run.verdict.findings)
        facts = " · ".join(escape(fact) for fact in (f"{run.verdict.events:,} events", *run.verdict.notes))
        cards.append(
            f'<section class="verdict {"held" if held else "broken"}">{name}'
            f'<p class="word">{"✓ The contract held" if held else "✗ The contract was broken"}</p>'
            f'<ul>{findings}</ul><p class="note">{facts}</p></section>'
        )
    return _side_by_side(cards)


def _sections(sections: Mapping[str, pandas.DataFrame]) -> Iterator[str]:
    for heading, table in sections.items():
        yield f"<section><h2>{escape(heading)}</h2>{table_html(table, rows_max=ROWS_MAX)}</section>"


class _Plots:
    """Sections with plots. The specification of each plot is added to `specs`; the plot's element on the page has the
    index in `specs`."""

    def __init__(self, runs: Sequence[AuditedHistory], specs: list[plots.Spec]) -> None:
        self._runs = runs
        self._specs = specs
        self._names = [_queues(run) for run in runs]
        names = self._names
        if len(runs) > 1 and all(len(each) == 1 for each in names):
            self._rows = [[each[0] for each in names]]
        else:
            # Runs contribute their queues in turn, so that one busy run does not crowd out the others.
            longest = max((len(each) for each in names), default=0)
            in_turn = [each[n] for n in range(longest) for each in names if n < len(each)]
            self._rows = [[name] * len(runs) for name in dict.fromkeys(in_turn)]

    def sections(self) -> Iterator[str]:
        runs = self._runs
        omitted_count = len(self._rows) - QUEUES_MAX
        if omitted_count > 0:
            yield f'<p class="note">{omitted_count} more queues are in the tables only.</p>'
        yield self._section(
            "Order",
            "<p>Each point is a message: its horizontal position is its place in the order of delivery, its height "
            "its place in the order of arrival. The band below shows the priorities that were delivered at that time, "
            "the narrow band which of them were persistent. If all messages wait before the first delivery, the right "
            "order is one rising line for each priority, from 9 on the left to 0 on the right.</p>" + _legend(runs),
            self._draw_order,
        )
        for measure in MEASURES:
            if any("latency" in run.tables and (run.tables["latency"]["measure"] == measure).any() for run in runs):
                yield self._section(
                    f"Latency, {measure}",
                    '<p class="note">● half were faster (p50) &nbsp; ❙ nine in ten (p90) &nbsp; ○ 99 in 100 (p99); '
                    "logarithmic</p>",
                    partial(self._draw_latency, measure),
                )
        if any("depth" in run.tables for run in runs):
            yield self._section(
                "Depth", '<p class="note">Messages in the queue, and with consumers.</p>', self._draw_depth
            )

    def _section(self, heading: str, intro: str, draw: Callable[[list[str]], list[str]]) -> str:
        parts = [f"<h2>{heading}</h2>{intro}"]
        for row in self._rows[:QUEUES_MAX]:
            figures = []
            for run, names, queue, figure in zip(self._runs, self._names, row, draw(row), strict=True):
                if queue not in names:
                    continue
                label = " · ".join(escape(text) for text in ((run.name, queue) if len(self._runs) > 1 else (queue,)))
                figures.append(f"<figure><figcaption>{label}</figcaption>{figure}</figure>")
            parts.append(_side_by_side(figures))
        return f"<section>{''.join(parts)}</section>"

    def _slot(self, table: pandas.DataFrame, kind: str, plot: Callable[..., plots.Spec], **extent: float) -> str:
        if table.empty:
            return '<p class="note">No rows.</p>'
        self._specs.append(plot(table, **extent))
        return f'<div class="plot {kind}" data-spec="{len(self._specs) - 1}"></div>'

    def _draw_order(self, row: list[str]) -> list[str]:
        tables = [_of_queue(run, "positions", queue) for run, queue in zip(self._runs, row, strict=True)]
        deliveries, arrivals = (int(_maximum(tables, column)) for column in ("delivery", "arrival"))
        return [
            _last_of_highest(table)
            + self._slot(table, "order", plots.order_plot, deliveries=deliveries, arrivals=arrivals)
            for table in tables
        ]

    def _draw_latency(self, measure: str, row: list[str]) -> list[str]:
        tables = [_of_queue(run, "latency", queue) for run, queue in zip(self._runs, row, strict=True)]
        tables = [table[table["measure"] == measure] if not table.empty else table for table in tables]
        low = min((float(table["p50"].min()) for table in tables if not table.empty), default=1.0)
        high = _maximum(tables, "p99")
        return [self._slot(table, "latency", plots.latency_plot, low=low, high=high) for table in tables]

    def _draw_depth(self, row: list[str]) -> list[str]:
        tables = [
            _with_seconds(_of_queue(run, "depth", queue), run.tables["depth"]) if "depth" in run.tables else _NO_ROWS
            for run, queue in zip(self._runs, row, strict=True)
        ]
        most = int(max(_maximum(tables, "waiting"), _maximum(tables, "held")))
        seconds = _maximum(tables, "seconds")
        return [self._slot(table, "depth", plots.depth_plot, most=most, seconds=seconds) for table in tables]


def _flows(runs: Sequence[AuditedHistory]) -> Iterator[str]:
    for run in runs:
        if "waterfalls" in run.tables:
            yield (
                "<section><h2>Flows</h2><p>Each line is a message: the time that it waited in its queue, by the "
                "broker's clock, and the time that a stage worked with it, by the clock of the stage's process.</p>"
                f"{waterfalls_html(run.tables['waterfalls'])}</section>"
            )


def _tables(runs: Sequence[AuditedHistory]) -> Iterator[str]:
    for key, heading in TABLES.items():
        parts = []
        for run in runs:
            table = run.tables.get(key)
            if table is None or (table.empty and key != "violations"):
                continue
            name = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
            parts.append(name + ('<p class="note">None.</p>' if table.empty else table_html(table, rows_max=ROWS_MAX)))
        if parts:
            yield f"<section><h2>{heading}</h2>{''.join(parts)}</section>"


def _legend(runs: Sequence[AuditedHistory]) -> str:
    found: set[int] = set()
    for run in runs:
        if "positions" in run.tables:
            found.update(int(priority) for priority in run.tables["positions"]["priority"].dropna().unique())
    keys = "".join(f'<span><i class="key p{priority}"></i>{priority}</span>' for priority in sorted(found)[::-1])
    return (
        f'<p class="legend"><b>priority</b> {keys} <b>kind</b> <span>● <i class="key persistent"></i>persistent</span>'
        '<span>▲ <i class="key transient"></i>transient</span></p>'
    )


def _last_of_highest(positions: pandas.DataFrame) -> str:
    if positions.empty:
        return ""
    highest = int(positions["priority"].max())
    last = int(positions.loc[positions["priority"] == highest, "delivery"].max())
    deliveries = int(positions["delivery"].max())
    # The audit of a large history returns a sample, whose messages must not be counted.
    is_sample = len(positions) < max(deliveries, int(positions["arrival"].max()))
    count = "" if is_sample else f"{int((positions['priority'] == highest).sum()):,} messages, "
    stride = plots.stride(len(positions))
    thinned = " A sample of the messages." if is_sample else ""
    if stride > 1:
        thinned += f" Points show one message in {stride}, the bands all."
    return (
        f'<p class="note">Priority {highest}: {count}the last delivered as number <b>{last:,}</b> of '
        f"{deliveries:,}.{thinned}</p>"
    )


_NO_ROWS = pandas.DataFrame()


def _of_queue(run: AuditedHistory, key: str, queue: str) -> pandas.DataFrame:
    table = run.tables.get(key)
    return _NO_ROWS if table is None or table.empty else table[table["queue"] == queue]


def _maximum(tables: Sequence[pandas.DataFrame], column: str) -> float:
    return max((float(table[column].max()) for table in tables if not table.empty), default=0.0)


def _with_seconds(depth: pandas.DataFrame, whole: pandas.DataFrame) -> pandas.DataFrame:
    """Add the column `seconds`: time since the first event of the run's queues. So runs at different times can be
    compared."""
    if depth.empty:
        return depth
    since = pandas.to_datetime(depth["at"], utc=True) - pandas.to_datetime(whole["at"], utc=True).min()
    return depth.assign(seconds=since.dt.total_seconds())


def _queues(run: AuditedHistory) -> list[str]:
    """Return the queues of a run. Queues with most violations come first, then queues with most messages."""
    tables = run.tables
    names = {
        str(name)
        for key in ("positions", "latency", "depth")
        if key in tables
        for name in tables[key]["queue"].dropna().unique()
    }
    violations, messages = (
        tables[key]["queue"].value_counts().to_dict() if key in tables and not tables[key].empty else {}
        for key in ("violations", "positions")
    )
    return sorted(names, key=lambda name: (-violations.get(name, 0), -messages.get(name, 0), name))


def _side_by_side(parts: Sequence[str]) -> str:
    return f'<div class="runs">{"".join(parts)}</div>'


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script."""
    try:
        import vl_convert
    except ImportError as error:
        raise ConfigurationError(
            "the report needs the package vl-convert-python, which is missing: pip install 'truenext[spark]'"
        ) from error
    # A script ends at this text, even inside a string.
    return (
        str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
        .replace("</script", "<\\/script")
        .replace("<!--", "<\\!--")
    )
