"""`truenext store`: check a data folder that no broker uses, and export the readable part of a damaged folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from truenext.cli import terminal
from truenext.cli.exit_status import NoAnswerFailure
from truenext.cli.terminal import count_noun
from truenext.cli.values import PathParam
from truenext.errors import TruenextError
from truenext.history.check import find_damage, last_batch_chunk
from truenext.store.check import SalvageSummary
from truenext.store.check import check as check_store
from truenext.store.export import export as export_store
from truenext.store.salvage.damage import Damage


@click.group()
def store() -> None:
    """Check a data folder, or save its messages.

    No broker may run on the folder.
    """


@store.command()
@click.argument("data", metavar="DIR", type=PathParam())
def check(data: Path) -> None:
    """Check everything in the data folder DIR.

    Checks the journal, the checkpoint, every message and the history.

    Changes nothing. Prints one line for each damage, then the content. Exits 0 if there is no damage, 1 if there is
    damage, 2 if the folder could not be checked.
    """
    try:
        with _progress("checked") as report:
            summary = check_store(data, _print_damage, report, last_history_chunk=last_batch_chunk(data / "history"))
        in_history = 0
        for name, what in find_damage(data / "history"):
            terminal.echo(f"damaged: history/{name}: {what}")
            in_history += 1
    except (TruenextError, OSError) as error:
        raise NoAnswerFailure(error) from error
    _print_summary(summary, data)
    if summary.damage_count:
        terminal.echo(
            f"{data} is damaged: {count_noun(summary.damage_count, 'finding')}, above. What to do: restore it from a "
            f"copy. If there is none, `truenext store export {data} NEW` writes all readable messages into a new "
            f"folder, on which a broker can start; {data} is not changed."
        )
    if in_history:
        terminal.echo(
            "The history is damaged. No message is lost by that, but an audit does not see these events. What to do: "
            "move the files named above to another folder."
        )
    if summary.damage_count or in_history:
        raise SystemExit(1)
    terminal.echo(f"{data} has no damage.")


@store.command()
@click.argument("data", metavar="DIR", type=PathParam())
@click.argument("new", metavar="NEW", type=PathParam())
def export(data: Path, new: Path) -> None:
    """Write all readable messages of DIR into a new folder NEW.

    DIR is a data folder, and a broker can start on NEW.

    Changes nothing in DIR. Messages keep their order. If DIR is damaged, NEW may contain acknowledged messages, and all
    messages are delivered as redelivered. Prints one line for each part that could not be read. The history is not
    copied. Exits 0 if everything could be read, 1 if a part could not, 2 if nothing was written.
    """
    try:
        with _progress("read") as report:
            summary = export_store(
                data, new, _print_damage, report, last_history_chunk=last_batch_chunk(data / "history")
            )
    except (TruenextError, OSError) as error:
        raise NoAnswerFailure(error) from error
    _print_summary(summary, new)
    if summary.damage_count:
        terminal.echo(
            f"Not all of {data} could be read: {count_noun(summary.damage_count, 'finding')}, above. What to do: start "
            f"a broker with `truenext serve --data {new}`; consumers may get messages again that they acknowledged. "
            f"Keep {data} until you know which messages are missing."
        )
        raise SystemExit(1)
    terminal.echo(f"All of {data} is in {new}: `truenext serve --data {new}` starts a broker with it.")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    # Text printed meanwhile goes around the bar, but a redirected standard output stays redirected.
    with Progress(
        console=console, transient=True, redirect_stdout=sys.stdout.isatty(), disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _print_damage(finding: Damage) -> None:
    terminal.echo(f"damaged: {finding}")


def _print_summary(summary: SalvageSummary, folder: Path) -> None:
    table = Table("queue", "persistent", "transient", "bytes", "damaged", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for number, queue in sorted(summary.queues.items()):
        name = summary.names.get(number, f"number {number}")
        table.add_row(
            terminal.table_cell(name),
            *(f"{count:,}" for count in (queue.persistent, queue.transient, queue.size, queue.damaged)),
        )
    if summary.queues:
        terminal.print_drawn(table)
    messages = count_noun(sum(each.persistent + each.transient for each in summary.queues.values()), "message")
    size = sum(each.size for each in summary.queues.values())
    terminal.echo(f"{folder}: {messages} of {size:,} bytes in {count_noun(len(summary.queues), 'queue')}")
    if summary.contents:
        terminal.echo(
            f"{count_noun(summary.contents, 'content')} of {summary.contents_size:,} bytes that several messages share"
        )
    if summary.timers:
        terminal.echo(count_noun(summary.timers, "timer"))
    for note in summary.notes_besides_damage:
        terminal.echo(f"note: {note}")
