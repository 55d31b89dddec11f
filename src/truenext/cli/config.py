"""`truenext config`: is a configuration file sound, and what does it mean for a queue? `truenext reload`: use it."""

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from truenext.broker.config import Configuration, configure, shown
from truenext.cli.client import Failure, Unasked, url_option
from truenext.client.connection import Connection
from truenext.errors import ConfigurationError, FaultyFileError, TruenextError
from truenext.policy import Policy
from truenext.setting import settings_of
from truenext.url import parse_url


@click.group()
def config() -> None:
    """A configuration file, for `truenext serve --config`; see docs/policies.md."""


@config.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--queue", metavar="NAME", help="Say which policy this queue has, and from which table each value is.")
def check(file: Path, queue: str | None) -> None:
    """Say what is wrong in FILE, one line each, or that it is sound.

    Exits 0 if it is, 1 if not, 2 if it could not be read.
    """
    try:
        configuration = configure(file)
    except FaultyFileError as error:
        for fault in error.faults:
            click.echo(fault)
        count = len(error.faults)
        click.echo(
            f"{file} has {count} fault{'' if count == 1 else 's'}; no broker starts with it, or goes over to it."
        )
        raise SystemExit(1) from error
    except ConfigurationError as error:
        raise Unasked(error) from error
    _note(configuration)
    click.echo(f"{file} is sound.")
    if queue is not None:
        _show(configuration, queue.removeprefix("/queue/"))


@click.command()
@url_option
def reload(url: str) -> None:
    """Let the broker read its configuration file again, and say what it changed.

    Exits 0 if it took it over, 1 if it refused to and changed nothing, 2 if it could not be asked.
    """
    try:
        with Connection(url) as connection:
            outcome = msgspec.json.decode(connection.ask("reload"))
    except TruenextError as error:
        raise Unasked(error) from error
    if outcome["refused"]:
        raise Failure(ConfigurationError("\n".join(["nothing was changed:", *outcome["refused"]])))
    for change in outcome["changed"]:
        click.echo(change)
    click.echo(f"{outcome['file']} is in force{'' if outcome['changed'] else '; it says what it said before'}.")


def _note(configuration: Configuration) -> None:
    """What a broker refuses unless its command line says something else."""
    settings = configuration.broker
    if settings.data is None and not settings.memory:
        click.echo("note: it does not say where messages are kept; `truenext serve` needs --data DIR or --memory.")
    if not settings.allow_anonymous and not all(parse_url(url).is_loopback for url in settings.listen):
        click.echo("note: it listens to other machines; `truenext serve` needs --allow-anonymous, if that is meant.")


def _show(configuration: Configuration, queue: str) -> None:
    table = Table(f"policy of {escape(queue)}", "value", "from", box=None)
    policy = configuration.policies.of(queue)
    for name, setting in settings_of(Policy).items():
        value = shown(setting, getattr(policy, name))
        table.add_row(name, escape(value), escape(configuration.source(queue, name)))
    Console().print(table)
