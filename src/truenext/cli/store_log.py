"""Commands of `truenext store` for a log in PostgreSQL that several brokers use: show these brokers and which rows are
missing, go on without these rows, and make the log of a copied database one of its own."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from truenext.cli import terminal
from truenext.cli.exit_status import NoAnswerFailure
from truenext.cli.members import print_members
from truenext.cli.postgresql import read_status, renew_log
from truenext.cli.values import SCHEMA, STORE_URL
from truenext.errors import ConfigurationError, TruenextError

if TYPE_CHECKING:
    from truenext.store.postgresql.renewal import StoreStatus

_url_argument = click.argument("url", metavar="URL", type=STORE_URL)
_schema_option = click.option(
    "--schema", type=SCHEMA, required=True, help="Schema of the database in which the messages are stored."
)

ALIVE_MS = 2000
"""Age of its description below which a broker counts as running."""


@click.command()
@_url_argument
@_schema_option
def status(url: str, schema: str) -> None:
    """Show the brokers of a log, and which rows are missing.

    Shows each broker that has used the schema, with its last row, and when it has written that; and since when nothing
    is confirmed because the standby of PostgreSQL does not confirm. Asks the database, not the brokers, and changes
    nothing.

    Exits 0 if no row is missing, 1 if rows are missing, or the database is a copy that `store adopt` must adopt, 2 if
    the database could not be asked.
    """
    found = _read_status(url, schema)
    terminal.echo(f"log      epoch {found.epoch:,}, row {found.number:,}, on {found.server}")
    print_members("members  ", map(asdict, found.members), found.epoch, found.number)
    terminal.echo(f"missing  {_missing_text(found)}")
    if found.missing is not None:
        terminal.echo(f"         {found.missing.advice}")
    if found.waiting_since_ms is not None:
        since = terminal.format_utc(found.waiting_since_ms)
        terminal.echo(f"standby  of PostgreSQL has not confirmed since {since}: nothing is confirmed meanwhile")
    if found.is_copy:
        terminal.echo("copy     of another database: run `truenext store adopt`, or name the other database")
    if found.is_copy or found.missing is not None:
        raise SystemExit(1)


@click.command("accept-loss")
@_url_argument
@_schema_option
def accept_loss(url: str, schema: str) -> None:
    """Go on without rows that PostgreSQL has lost.

    For a log of which `store status` shows missing rows. Messages of these rows are lost, and messages that they
    acknowledged come again. The log gets a new identity: for clients, outboxes and Spark it is another broker; see
    docs/postgresql.md. Stop all brokers first.

    Asks for the name of the schema. Exits 0 if brokers can start again, 2 if nothing was changed.
    """
    found = _read_status(url, schema)
    if found.missing is None:
        raise ConfigurationError(f"no row is missing in schema {schema}: nothing was changed")
    terminal.echo(f"missing: {_missing_text(found)}")
    terminal.echo(f"{found.missing.advice}.")
    _renew(url, schema, "lose these rows", is_copy=False)


@click.command()
@_url_argument
@_schema_option
def adopt(url: str, schema: str) -> None:
    """Let brokers start on a copy of a database.

    For a copy of a log, such as a clone of production or a restored backup on another server. A base backup or a
    snapshot is not noticed: adopt it before a broker starts on it. The log gets a new identity: for clients, outboxes
    and Spark it is another broker; see docs/postgresql.md. Stop all brokers of this copy first.

    Asks for the name of the schema. Exits 0 if brokers can start, 2 if nothing was changed.
    """
    found = _read_status(url, schema)
    if found.missing is not None:
        terminal.echo(f"missing: {_missing_text(found)}")
    if not found.is_copy:
        terminal.echo(
            "This may be the original: its system identifier does not differ from that in the log. A base backup or a "
            "snapshot has the same, too."
        )
    terminal.echo("Consumers will get the messages of this copy, and those of the other database get the same ones.")
    _renew(url, schema, "give this log a new identity", is_copy=True)


def _read_status(url: str, schema: str) -> StoreStatus:
    try:
        return read_status(url, schema)
    except TruenextError as error:
        raise NoAnswerFailure(error) from error


def _renew(url: str, schema: str, purpose: str, *, is_copy: bool) -> None:
    """Give a log a new identity for this purpose, if the operator types the name of its schema."""
    terminal.require_typed("schema", schema, purpose)
    try:
        identity = renew_log(url, schema, is_copy=is_copy)
    except TruenextError as error:
        raise NoAnswerFailure(error) from error
    terminal.echo(f"The log has the identity {identity} now. Start its brokers: they make their folders anew.")


def _missing_text(found: StoreStatus) -> str:
    """Describe the rows that are missing, and the brokers that had them."""
    fault = found.missing
    if fault is None:
        return "none"
    if fault.last is None:
        rows = f"perhaps from row {fault.first:,} on"
    elif any(each.role == "active" and each.age_ms < ALIVE_MS and each.number < fault.first for each in found.members):
        # It has gone on without them, from a row that is not known.
        rows = f"rows up to {fault.last:,}"
    else:
        rows = f"rows {fault.first:,} to {fault.last:,}"
    holders = [f"{each.name} had row {each.number:,}" for each in found.members if each.number >= fault.first]
    return "; ".join([f"{rows}: {fault.reason}", *map(terminal.escape_line, holders)])
