"""HTML of texts and tables. All text from outside is escaped here."""

import json
from html import escape
from typing import Any

import pandas


def table_html(table: pandas.DataFrame, *, rows_max: int) -> str:
    """Return the first `rows_max` rows of a table as HTML. A note follows if there are more rows."""
    head = "".join(f"<th{_side(table, name)}>{escape(str(name).replace('_', ' '))}</th>" for name in table.columns)
    rows = []
    for values in table.head(rows_max).itertuples(index=False):
        cells = zip(table.columns, values, strict=True)
        rows.append("".join(f"<td{_side(table, name)}>{escape(_cell(value))}</td>" for name, value in cells))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    rest = len(table) - rows_max
    note = f'<p class="note">The first {rows_max:,} of {len(table):,} rows.</p>' if rest > 0 else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}'


def script_json(value: Any) -> str:
    """Return a value as JSON for a script element. The JSON cannot end the element, nor begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _side(table: pandas.DataFrame, name: Any) -> str:
    return ' class="number"' if pandas.api.types.is_numeric_dtype(table[name]) else ""


def _cell(value: Any) -> str:
    if isinstance(value, (list, tuple, set, dict)):
        return str(value)
    if value is None or pandas.isna(value):
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"
    if isinstance(value, pandas.Timestamp):
        return str(value.strftime("%Y-%m-%d %H:%M:%S.%f"))
    return str(value)
