"""`truenext stages flow`: print the waterfall of a flow."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from truenext.cli import terminal
from truenext.cli.values import TEXT, PathParam
from truenext.errors import TruenextError
from truenext.flows.drawing import LEGEND_TEXT, TEXT_WIDTH, to_text, waterfall_lines
from truenext.flows.model import RecordedFlow
from truenext.flows.search import find_flows, similar_traces
from truenext.model.numerals import count_noun

FLOWS_MAX = 10
"""Largest number of flows that are drawn: the latest ones."""
LINES_MAX = 200
"""Largest number of lines that are drawn of one flow."""


@click.command()
@click.argument("trace", type=TEXT)
@click.option(
    "--events",
    "folders",
    metavar="DIR",
    multiple=True,
    required=True,
    type=PathParam(exists=True, file_okay=False),
    help="Folder into which a service wrote its events (truenext stages run --events). May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def flow(trace: str, folders: tuple[Path, ...], as_json: bool) -> None:
    """Print the waterfall of a flow.

    Shows for each message of the flow in which stage it was, how long it waited and was worked with, all attempts with
    their errors, and whether it became a dead letter. TRACE is the trace of the flow, or its id. Flows that its stages
    have started are shown, too. If several flows have the trace, the latest are shown.
    """
    found = find_flows(folders, trace)
    for problem in found.problems:
        terminal.echo(problem, err=True)
    if not found.flows:
        raise TruenextError(_nothing_found(folders, trace))
    shown = found.flows[-FLOWS_MAX:]
    if as_json:
        terminal.write_json([_as_json(each) for each in shown])
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else TEXT_WIDTH
    for each in shown:
        terminal.echo(to_text(each, width=width, lines_max=LINES_MAX) + "\n")
    terminal.echo(LEGEND_TEXT)
    omitted_count = found.omitted + len(found.flows) - len(shown)
    if omitted_count:
        terminal.echo(f"{count_noun(omitted_count, 'earlier flow')} of this trace: give a flow's id to see one")


def _as_json(flow: RecordedFlow) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(flow)
    return facts | {"lines": waterfall_lines(flow)}


def _nothing_found(folders: tuple[Path, ...], trace: str) -> str:
    similar = similar_traces(folders, trace)
    if similar:
        names = ", ".join(repr(each) for each in similar)
        return f"no flow has the trace {trace!r}; similar ones: {names}"
    return (
        f"no flow has the trace {trace!r}, nor a similar one: give the trace that the start of the flow has named; "
        "events are deleted after 30 days, or beyond 8 GiB"
    )
