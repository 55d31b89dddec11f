"""Report: a table of the rates of many runs, which says whether the targets are met."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.load import LOADS, Load

TRUENEXT = "truenext"
ACTIVEMQ = "ActiveMQ"


def _alike(target: float) -> dict[str, float]:
    """Return one target for all loads."""
    return dict.fromkeys((load.key for load in LOADS), target)


HISTORY_TARGETS = _alike(0.85)
"""Least ratio to the rate without history, on any load."""

HISTORY_MEDIAN_TARGET = 0.9
"""Least ratio to the rate without history, as the median over the loads."""

SYNC_TARGETS = _alike(0.8)
"""Least ratio to the rate without syncing."""

USERS_TARGETS = _alike(0.97)
"""Least ratio of the rate with users to the rate without."""

TLS_TARGETS = dict.fromkeys("12", 0.8) | dict.fromkeys("345", 0.85) | dict.fromkeys("678", 0.7)
"""Least ratio of the rate with TLS to the rate without, by load. With several producers each message is a record."""

WINDOW_TARGETS = _alike(0.95)
"""Least ratio of an automatic window to a window of 1000."""

FLOOR_TARGETS = _alike(0.65)
"""Least ratio to the rate of a loop that only appends and syncs messages."""


@dataclass
class Results:
    """Rates by load and broker, in the order of the runs."""

    peer: str = ACTIVEMQ
    """Broker with which truenext is compared."""
    targets: Mapping[str, float] = field(default_factory=lambda: {load.key: load.target for load in LOADS})
    """Targets of the ratio, by load."""
    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, load: Load, broker: str, rate: float) -> None:
        self.rates.setdefault((load.key, broker), []).append(rate)

    def of(self, load: Load, broker: str) -> list[float]:
        return self.rates.get((load.key, broker), [])

    def ratio(self, load: Load) -> float | None:
        rates, peer_rates = self.of(load, TRUENEXT), self.of(load, self.peer)
        return statistics.median(rates) / statistics.median(peer_rates) if rates and peer_rates else None


def table(results: Results, loads: Sequence[Load], compared: bool) -> list[list[str]]:
    """Return headings and one row for each load; without a comparison only truenext's column."""
    headings = ["load", f"{TRUENEXT} msg/s", f"{results.peer} msg/s", "ratio", "target", "met"]
    rows = [headings] + [_row(results, load) for load in loads]
    return rows if compared else [row[:2] for row in rows]


def _row(results: Results, load: Load) -> list[str]:
    ratio = results.ratio(load)
    target = results.targets[load.key]
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
    """Return the median of the ratios over the loads."""
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
