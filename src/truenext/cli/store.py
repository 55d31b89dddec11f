"""`truenext store`: check a data folder that no broker uses, and export the readable part of a damaged folder. The same
for messages in PostgreSQL: make their tables, check them, and make a copy an ordinary folder. Other commands for a log
in PostgreSQL are in store_log.py."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import click
from rich.table import Table

from truenext.cli import store_log, terminal
from truenext.cli.exit_status import NoAnswerFailure
from truenext.cli.postgresql import check_log, initialize_log
from truenext.cli.progress_bar import progress_bar
from truenext.cli.values import SCHEMA, STORE_URL, DataFolderParam, PathParam, StorePlaceParam
from truenext.errors import TruenextError
from truenext.history.check import find_damage, last_batch_chunk
from truenext.model.numerals import count_noun
from truenext.store.check import SalvageSummary
from truenext.store.check import check as check_store
from truenext.store.copying import detach as detach_copy
from truenext.store.export import export as export_store
from truenext.store.renewal import renew as renew_folder
from truenext.store.salvage.damage import Damage


@click.group()
def store() -> None:
    """Check or save stored messages, in a folder or in PostgreSQL.

    No broker may run on a folder. A database is asked with the rights of its user; no broker is asked.
    """


for command in (store_log.status, store_log.accept_loss, store_log.adopt):
    store.add_command(command)

schema_option = click.option(
    "--schema", type=SCHEMA, help="Schema of the database in which the messages of one broker are stored."
)


@store.command()
@click.argument("url", metavar="URL", type=STORE_URL)
@click.option(
    "--schema",
    type=SCHEMA,
    required=True,
    help="Schema in which the tables are made. The schema is made, too, if it is missing and the user may do so.",
)
@click.option(
    "--from",
    "data",
    metavar="DIR",
    type=PathParam(exists=True, file_okay=False),
    help="Data folder of a stopped broker, whose messages go into the database. The folder is a copy then, and no "
    "broker starts on it without --store.",
)
def init(url: str, schema: str, data: Path | None) -> None:
    """Make the tables for a broker's messages in PostgreSQL.

    URL is a database, postgresql://USER@HOST:PORT/DATABASE, without a password; see docs/postgresql.md. The user needs
    rights in the schema alone.

    Exits 0 if the tables were made, 2 if nothing was made.
    """
    try:
        with progress_bar("written") as report:
            initialize_log(url, schema, data, report)
    except (TruenextError, OSError) as error:
        raise NoAnswerFailure(error) from error
    if data is not None:
        terminal.echo(f"All of {data} is in the database; {data} is a copy of it now.")
    terminal.echo(
        f"The schema {schema} is ready: `truenext serve --store {quote(url)} --schema {schema} --database-limit SIZE "
        f"--data {'DIR' if data is None else data}` starts a broker with it."
    )


@store.command()
@click.argument("place", metavar="DIR|URL", type=StorePlaceParam())
@schema_option
def check(place: Path | str, schema: str | None) -> None:
    """Check everything in the data folder DIR or in a database.

    Checks the journal, the checkpoint, every message and the history of a folder; or all rows in one schema of a
    database, postgresql://USER@HOST:PORT/DATABASE. A broker may go on with the database meanwhile.

    Changes nothing. Prints one line for each damage, then the content. Exits 0 if there is no damage, 1 if there is
    damage, 2 if the folder or database could not be checked.
    """
    if isinstance(place, Path):
        if schema is not None:
            raise click.UsageError("--schema is for a database: `truenext store check postgresql://... --schema NAME`")
        _check_folder(place)
    else:
        if schema is None:
            raise click.UsageError("a database has several schemas: name the broker's with --schema NAME")
        _check_database(place, schema)


def _check_database(url: str, schema: str) -> None:
    try:
        with progress_bar("checked") as report:
            summary = check_log(url, schema, _print_damage, report)
    except (TruenextError, OSError) as error:
        raise NoAnswerFailure(error) from error
    name = f"{url}, schema {schema}"
    _print_summary(summary, name)
    if summary.damage_count:
        terminal.echo(
            f"{name} is damaged: {count_noun(summary.damage_count, 'finding')}, above. What to do: restore the "
            "database with all its rows. If that is not possible, `truenext store check DIR` shows whether the folder "
            "of a broker has its messages, and `truenext store detach DIR` makes it a folder for a broker without "
            "PostgreSQL."
        )
        raise SystemExit(1)
    terminal.echo(f"{name} has no damage.")


def _check_folder(data: Path) -> None:
    try:
        with progress_bar("checked") as report:
            summary = check_store(data, _print_damage, report, last_history_chunk=last_batch_chunk(data / "history"))
        in_history = 0
        for name, what in find_damage(data / "history"):
            terminal.echo(f"damaged: history/{name}: {what}")
            in_history += 1
    except (TruenextError, OSError) as error:
        raise NoAnswerFailure(error) from error
    _print_summary(summary, data)
    if summary.damage_count and summary.is_copy:
        terminal.echo(
            f"{data} is a copy of a log in a database, and is damaged: {count_noun(summary.damage_count, 'finding')}, "
            "above. What to do: start its broker with --store, which fetches from the database what the folder lacks."
        )
    elif summary.damage_count:
        terminal.echo(
            f"{data} is damaged: {count_noun(summary.damage_count, 'finding')}, above. What to do: restore it from a "
            f"backup. If there is none, `truenext store export {data} NEW` writes all readable messages into a new "
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
@click.argument("data", metavar="DIR", type=DataFolderParam(exists=True, file_okay=False))
def detach(data: Path) -> None:
    """Make DIR a data folder that needs no database.

    DIR is the folder of a broker with --store. Stop the broker cleanly first; after a crash start it once with --store,
    which fetches what the folder lacks, and stop it. The folder keeps the messages that it has, and is no copy any
    more. It gets a new identity, since other brokers may go on with the database: for clients it is another broker. The
    database is not asked, and not changed.

    Exits 0 if the folder was changed, 2 if it was not.
    """
    try:
        identity = detach_copy(data, last_batch_chunk(data / "history"))
    except (TruenextError, OSError) as error:
        raise NoAnswerFailure(error) from error
    terminal.echo(
        f"{data} is an ordinary folder now, with the identity {identity}: `truenext serve --data {data}` starts a "
        "broker with it. It has all messages if its broker has stopped cleanly; after a crash the last ones may be "
        "missing. Changes that other brokers have made in the database since then are not in it. The database keeps "
        "its messages: when the new broker has what you need, delete them with DROP SCHEMA NAME CASCADE in psql."
    )


@store.command()
@click.argument("data", metavar="DIR", type=DataFolderParam(exists=True, file_okay=False))
def renew(data: Path) -> None:
    """Give the data folder DIR a new identity.

    For a folder that is a copy of another one, such as a snapshot of a disk, if both may be used. Stop the broker of
    DIR first. All else in the folder stays. For clients, outboxes and Spark, its broker is another one from then on;
    see docs/operations.md.

    Exits 0 if the folder has a new identity, 2 if nothing was changed.
    """
    try:
        identity = renew_folder(data)
    except TruenextError as error:
        raise NoAnswerFailure(error) from error
    terminal.echo(
        f"{data} has the identity {identity} now: `truenext serve --data {quote(str(data))}` starts a broker with it."
    )


@store.command()
@click.argument("data", metavar="DIR", type=DataFolderParam())
@click.argument("new", metavar="NEW", type=PathParam())
def export(data: Path, new: Path) -> None:
    """Write all readable messages of DIR into a new folder NEW.

    DIR is a data folder, and a broker can start on NEW.

    Changes nothing in DIR. Messages keep their order. If DIR is damaged, NEW may contain acknowledged messages, and all
    messages are delivered as redelivered. Prints one line for each part that could not be read. The history is not
    copied. Exits 0 if everything could be read, 1 if a part could not, 2 if nothing was written.
    """
    try:
        with progress_bar("read") as report:
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


def _print_damage(finding: Damage) -> None:
    terminal.echo(f"damaged: {finding}")


def _print_summary(summary: SalvageSummary, place: Path | str) -> None:
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
    terminal.echo(f"{place}: {messages} of {size:,} bytes in {count_noun(len(summary.queues), 'queue')}")
    if summary.contents:
        terminal.echo(
            f"{count_noun(summary.contents, 'content')} of {summary.contents_size:,} bytes that several messages share"
        )
    if summary.timers:
        terminal.echo(count_noun(summary.timers, "timer"))
    for note in summary.notes_besides_damage:
        terminal.echo(f"note: {note}")
