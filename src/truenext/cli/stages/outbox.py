"""`truenext stages outbox`: show the unsent messages of a service's outbox, and the processes that send them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.table import Table

from truenext.cli import terminal
from truenext.cli.stages.service_loader import database_option, load_with_database, service_argument
from truenext.model.numerals import count_noun

if TYPE_CHECKING:
    from truenext.stage.sql.outbox_report import OutboxReport


@click.command()
@service_argument
@database_option
@click.option(
    "--inbox",
    "with_inbox",
    is_flag=True,
    help="Count the rows of the inbox, too; with millions of rows this takes long.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def outbox(target: str, database: str | None, with_inbox: bool, as_json: bool) -> None:
    """Show the messages that wait in the outbox of a service.

    Shows messages that are not known to be sent, processes that run, and units that belong to no process.

    Each message is in the outbox for a moment before it is sent. A message that is older than a minute waits for the
    broker or for a process.
    """
    service, url = load_with_database(target, database)
    # Imported here: the other commands work without SQLAlchemy.
    from truenext.stage.sql import outbox_report

    facts = outbox_report(url, service.name, with_inbox=with_inbox)
    if as_json:
        terminal.write_json(facts)
    else:
        _print_report(facts)


def _print_report(facts: OutboxReport) -> None:
    if facts.waiting:
        table = Table("producer", "of", "units", "messages", "oldest, s")
        for each in facts.waiting:
            cells = (each.producer or "none yet", each.owner or "no process", f"{each.units:,}", f"{each.messages:,}")
            table.add_row(*map(terminal.table_cell, (*cells, f"{each.oldest_s:,.1f}")))
        terminal.print_drawn(table)
    else:
        terminal.echo(f"No message waits in the outbox of {facts.service}.")
    for process in facts.processes:
        state = "alive" if process.alive else "not alive"
        terminal.echo(f"{process.instance}: {state}, {count_noun(process.producers, 'producer')}")
    if facts.ownerless:
        terminal.echo(f"{count_noun(facts.ownerless, 'producer')} of processes that have ended")
    if facts.inbox is not None:
        terminal.echo(
            f"inbox: {count_noun(facts.inbox.rows, 'message')}, {facts.inbox.unacknowledged:,} of them unacknowledged"
        )
