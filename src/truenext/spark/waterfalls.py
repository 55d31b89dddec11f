"""Waterfalls on the audit's page: the flows of the table `waterfalls`, drawn as everywhere (`flows/drawing.py`). A
hundred flows are small, and need no script.
"""

from itertools import count
from typing import Any

import pandas

from truenext.flows.drawing import LEGEND_HTML, to_html
from truenext.flows.model import RecordedExecution, RecordedFlow

OPEN_FLOWS = 3
"""Number of flows that are shown open. Each other flow is one line until the reader opens it."""
_SUMMARY = ("seconds", "messages", "runs", "failures", "given_up", "in_progress")


def waterfalls_html(waterfalls: pandas.DataFrame) -> str:
    """Return HTML of the flows with messages that were given up, the latest first, and of the slowest flows.
    `waterfalls` has a row for each execution."""
    flows = recorded_flows(waterfalls)
    if not flows:
        return '<p class="note">None.</p>'
    given_up = sorted((each for each in flows if each.given_up), key=lambda flow: flow.started_at, reverse=True)
    others = sorted((each for each in flows if not each.given_up), key=lambda flow: flow.seconds, reverse=True)
    parts = [LEGEND_HTML]
    numbers = count()
    for heading, some in (("Given up, the latest first", given_up), ("The slowest of the others", others)):
        if some:
            shown = "".join(to_html(flow, is_open=next(numbers) < OPEN_FLOWS) for flow in some)
            parts.append(f"<h3>{heading}</h3>{shown}")
    return "".join(parts)


def recorded_flows(waterfalls: pandas.DataFrame) -> list[RecordedFlow]:
    """Return the flows of the table. Their summaries are those of the table, which may lack executions."""
    rows_by_flow: dict[str, list[dict[str, Any]]] = {}
    for row in waterfalls.sort_values(["flow", "position"]).to_dict("records"):
        values = {str(name): _value(value) for name, value in row.items()}
        rows_by_flow.setdefault(values["flow"], []).append(values)
    return [_recorded_flow(rows) for rows in rows_by_flow.values()]


def _recorded_flow(rows: list[dict[str, Any]]) -> RecordedFlow:
    first = rows[0]
    return RecordedFlow(
        id=first["flow"],
        trace=first["trace"] or "",
        started_at=first["flow_started_at"],
        executions=[_recorded_execution(row) for row in rows],
        **{name: first[name] for name in _SUMMARY},
    )


def _recorded_execution(row: dict[str, Any]) -> RecordedExecution:
    values = {name: row.get(name) for name in RecordedExecution.__struct_fields__}
    return RecordedExecution(**values | {name: values[name] or "" for name in ("trace", "parent", "sender")})


def _value(value: Any) -> Any:
    """Return a cell as a value of the model: None if it is empty, a time in microseconds since the epoch."""
    if pandas.isna(value):
        return None
    return value.value // 1000 if isinstance(value, pandas.Timestamp) else value
