"""How do the rates of many runs become one table that says whether the targets are met?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.load import Load

TRUENEXT = "truenext"
ACTIVEMQ = "ActiveMQ"

HISTORY_TARGET = 0.85
"""What is left of the rate without history, at least, on any load."""

HISTORY_MEDIAN_TARGET = 0.9
"""The same in the median over the loads."""

SYNC_TARGET = 0.8
"""What is left of the rate without forcing anything to the disk, at least."""

WINDOW_TARGET = 0.95
"""What an automatic window leaves of the rate with a window of 1000, at least."""

FLOOR_TARGET = 0.65
"""Of the rate of a loop that does nothing but append a message and force it to the disk."""


@dataclass
class Results:
    """Rates by load and broker, in the order of the runs."""

    peer: str = ACTIVEMQ
    """What truenext is compared with."""
    target: float | None = None
    """Ratio that it aims at; that of each load if there is none."""
    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, load: Load, broker: str, rate: float) -> None:
        self.rates.setdefault((load.key, broker), []).append(rate)

    def of(self, load: Load, broker: str) -> list[float]:
        return self.rates.get((load.key, broker), [])

    def ratio(self, load: Load) -> float | None:
        rates, peer_rates = self.of(load, TRUENEXT), self.of(load, self.peer)
        return statistics.median(rates) / statistics.median(peer_rates) if rates and peer_rates else None


def table(results: Results, loads: Sequence[Load], compared: bool) -> list[list[str]]:
    """Headings and one row a load; without a comparison only truenext's column."""
    headings = ["load", f"{TRUENEXT} msg/s", f"{results.peer} msg/s", "ratio", "target", "met"]
    rows = [headings] + [_row(results, load) for load in loads]
    return rows if compared else [row[:2] for row in rows]


def _row(results: Results, load: Load) -> list[str]:
    ratio = results.ratio(load)
    target = load.target if results.target is None else results.target
    met = "-" if ratio is None else "yes" if ratio >= target else "no"
    return [
        f"{load.key}. {load.title}",
        spread(results.of(load, TRUENEXT)),
        spread(results.of(load, results.peer)),
        "-" if ratio is None else f"{ratio:.2f}",
        f"{target:g}",
        met,
    ]


def median_ratio(results: Results, loads: Sequence[Load]) -> float | None:
    """In the median over the loads."""
    ratios = [ratio for load in loads if (ratio := results.ratio(load)) is not None]
    return statistics.median(ratios) if ratios else None


def spread(rates: list[float]) -> str:
    if not rates:
        return "-"
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"


def plain(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def markdown(rows: list[list[str]], notes: list[tuple[str, str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join([*lines, "", bullets(notes), ""])


def bullets(notes: list[tuple[str, str]]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in notes)
