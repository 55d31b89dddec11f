"""Plots of the report, as Vega-Lite specifications.

A specification contains no name of a queue, run or consumer. Its data are only numbers, as CSV, and its texts are
fixed. The script draw.js sets the colours, because it knows whether the reader's screen is light or dark.
"""

from typing import Any

import pandas

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
POINTS_MAX = 8000
"""Largest number of points in one plot. More points cannot be distinguished, and a page with several plots must open on
a phone."""
BINS = 150
"""Number of columns in the band below the order plot."""
MOMENTS_MAX = 1000
"""Largest number of moments in a depth plot."""
LATENCY_MIN = 0.001
"""Lowest latency in a plot, in milliseconds, because a logarithmic scale has no zero."""
PRIORITY_COLOUR = {"field": "priority", "type": "ordinal", "scale": {"domain": list(range(10))}, "legend": None}


def stride(messages: int) -> int:
    """Return n: every n-th message becomes a point in the order plot.

    >>> stride(POINTS_MAX), stride(POINTS_MAX + 1)
    (1, 2)
    """
    return max(1, -(-messages // POINTS_MAX))


def order_plot(positions: pandas.DataFrame, *, deliveries: int, arrivals: int) -> Spec:
    """Plot positions of arrival against positions of delivery. Bands of priority and persistence are below.

    `arrivals` and `deliveries` are the ends of the axes. Plots with the same ends can be compared.
    """
    shown = _numbers(positions, ["delivery", "arrival", "priority", "persistent"]).sort_values("delivery")
    most = max(deliveries, 1)
    points: Spec = {
        "width": "container",
        "height": 260,
        "data": _data(shown.iloc[:: stride(len(shown))]),
        "mark": {"type": "point", "filled": True, "opacity": 1, "tooltip": True},
        "encoding": {
            "x": _quantity("delivery", most, None),
            "y": _quantity("arrival", max(arrivals, 1), {"title": "arrived as number", "tickCount": 5}),
            "color": PRIORITY_COLOUR,
            "shape": {
                "field": "persistent",
                "type": "nominal",
                "scale": {"domain": [0, 1], "range": ["triangle-up", "circle"]},
                "legend": None,
            },
            "size": {"condition": {"test": "datum.persistent === 1", "value": 9}, "value": 26},
        },
    }
    return {
        "$schema": SCHEMA,
        "spacing": 6,
        "resolve": {"scale": {"color": "independent"}},
        "vconcat": [
            points,
            _band(_shares(shown, "priority", most), PRIORITY_COLOUR, most, 34, ""),
            _band(
                _shares(shown, "persistent", most),
                {"field": "persistent", "type": "nominal", "scale": {"domain": [0, 1]}, "legend": None},
                most,
                10,
                "delivered as number",
            ),
        ],
    }


def latency_plot(latency: pandas.DataFrame, *, low: float, high: float) -> Spec:
    """Plot p50, p90 and p99 by priority, on a logarithmic scale from `low` to `high` milliseconds."""
    shown = _numbers(latency, ["priority", "p50", "p90", "p99", "max", "count"])
    for column in ("p50", "p90", "p99", "max"):
        shown[column] = shown[column].astype("float64").clip(lower=LATENCY_MIN)
    scale = {"type": "log", "domain": [max(low, LATENCY_MIN), max(high, 10 * LATENCY_MIN)], "nice": True}

    def at(column: str) -> Spec:
        axis = {"title": "milliseconds", "tickCount": 5, "format": "~g"}
        return {"field": column, "type": "quantitative", "scale": scale, "axis": axis}

    tooltip = [
        {"field": name, "type": "quantitative", "format": "~r" if name in ("priority", "count") else ".3~f"}
        for name in ("priority", "p50", "p90", "p99", "max", "count")
    ]
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": max(70, 22 * shown["priority"].nunique() + 30),
        "data": _data(shown),
        "encoding": {
            "y": {
                "field": "priority",
                "type": "ordinal",
                "sort": "descending",
                "axis": {"title": "priority", "grid": False},
            },
            "color": PRIORITY_COLOUR,
            "tooltip": tooltip,
        },
        "layer": [
            {
                "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.45},
                "encoding": {"x": at("p50"), "x2": {"field": "p99"}},
            },
            {"mark": {"type": "point", "filled": True, "size": 80, "opacity": 1}, "encoding": {"x": at("p50")}},
            {"mark": {"type": "tick", "thickness": 3, "size": 14}, "encoding": {"x": at("p90")}},
            {"mark": {"type": "point", "size": 70, "strokeWidth": 2, "opacity": 1}, "encoding": {"x": at("p99")}},
        ],
    }


def depth_plot(depth: pandas.DataFrame, *, most: int, seconds: float) -> Spec:
    """Plot the numbers of waiting and of held messages over time. `most` messages and `seconds` since the start of the
    run are the ends of the axes."""
    shown = _numbers(depth, ["seconds", "waiting", "held"]).sort_values("seconds", kind="stable")
    if len(shown) > MOMENTS_MAX:
        # Each span of time keeps its peaks.
        shown = shown.groupby(pandas.RangeIndex(len(shown)) * MOMENTS_MAX // len(shown)).max()
    axis = {"tickCount": 5}
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 150,
        "data": _data(shown),
        "transform": [{"fold": ["waiting", "held"], "as": ["state", "messages"]}],
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
        "encoding": {
            "x": _quantity("seconds", max(seconds, 0.001), {"title": "seconds since the first event", **axis}),
            "y": _quantity("messages", max(most, 1), {"title": "messages", **axis}),
            "color": {
                "field": "state",
                "type": "nominal",
                "scale": {"domain": ["waiting", "held"], "range": "category"},
                "legend": {"orient": "top", "title": None, "symbolType": "stroke"},
            },
            "strokeDash": {
                "field": "state",
                "type": "nominal",
                "scale": {"domain": ["waiting", "held"], "range": [[1, 0], [4, 3]]},
            },
        },
    }


def _quantity(field: str, most: float, axis: Spec | None) -> Spec:
    """Return the encoding of a field whose values are positions between 0 and `most`."""
    return {"field": field, "type": "quantitative", "scale": {"domain": [0, most], "nice": False}, "axis": axis}


def _band(shares: pandas.DataFrame, colour: Spec, most: int, height: int, title: str) -> Spec:
    axis = {"title": title, "tickCount": 5, "grid": False} if title else None
    return {
        "width": "container",
        "height": height,
        "data": _data(shares),
        "mark": {"type": "rect", "strokeWidth": 0},
        "encoding": {
            "tooltip": [{"field": name, "type": "quantitative"} for name in (colour["field"], "messages")],
            "x": _quantity("first", most, axis),
            "x2": {"field": "last"},
            "y": _quantity("from", 1, None),
            "y2": {"field": "to"},
            "color": colour,
        },
    }


def _shares(positions: pandas.DataFrame, column: str, deliveries: int) -> pandas.DataFrame:
    """Return how often each value occurs in each bin of deliveries, as shares that are stacked from the largest value
    down."""
    width = max(1.0, deliveries / BINS)
    bins = ((positions["delivery"] - 1) / width).astype("int64").rename("bin")
    counts = positions.groupby([bins, column]).size().rename("messages").reset_index()
    counts = counts.sort_values(["bin", column], ascending=[True, False])
    share = counts["messages"] / counts.groupby("bin")["messages"].transform("sum")
    to = share.groupby(counts["bin"]).cumsum()
    return pandas.DataFrame(
        {
            "first": (counts["bin"] * width).round(2),
            # Each bin reaches a little below the next one, which is drawn later: so no hairlines show between bins.
            "last": ((counts["bin"] + 1.3) * width).clip(upper=deliveries).round(2),
            # The vertical axis points up, and the largest value is on top.
            "from": (1 - to).clip(lower=0).round(4),
            "to": (1 - to + share).clip(upper=1).round(4),
            column: counts[column],
            "messages": counts["messages"],
        }
    )


def _numbers(table: pandas.DataFrame, columns: list[str]) -> pandas.DataFrame:
    """Return these columns as numbers, without incomplete rows. A plot gets only numbers."""
    numbers = {name: pandas.to_numeric(table[name], errors="coerce").astype("float64") for name in columns}
    return pandas.DataFrame(numbers).dropna().convert_dtypes()


def _data(table: pandas.DataFrame) -> Spec:
    """Return a table as CSV data for a plot. CSV takes a quarter of the bytes of JSON."""
    return {
        "values": table.to_csv(index=False, lineterminator="\n", float_format="%.6g"),
        "format": {"type": "csv", "parse": {str(column): "number" for column in table.columns}},
    }
