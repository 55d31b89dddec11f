"""Lines that describe the brokers of a log, for `truenext status` and `truenext store status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from truenext.cli import terminal

GONE_MS = 5_000
"""Age of a broker's description from which on it is shown as gone. A broker that runs writes one each second."""


def print_members(label: str, members: Iterable[Mapping[str, Any]], epoch: int, last: int) -> None:
    """Print a line for each member; `label` begins the first one. `epoch` is that of the active broker, `last` the
    number of the last row of the log."""
    for each in members:
        terminal.echo(f"{label}{_line(each, epoch, last)}")
        label = " " * len(label)


def _line(member: Mapping[str, Any], epoch: int, last: int) -> str:
    # What the active broker has said of itself may be a second old.
    behind = 0 if member["role"] == "active" else last - member["number"]
    place = f"{terminal.escape_line(member['name'])} on {terminal.escape_line(member['host'])}"
    row = f"row {member['number']:,}" + (f", {behind:,} behind" if behind > 0 else "")
    role = member["role"]
    if role == "active" and member["epoch"] < epoch:
        role = "taken over (was active)"
    elif role != "stopped" and member["age_ms"] >= GONE_MS:
        role = f"gone (was {role})"
    return f"{place}: {role}, {row}, {member['age_ms'] / 1000:,.1f} seconds ago"
