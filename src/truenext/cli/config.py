"""`truenext config check` shows faults and policies of a configuration file. `truenext reload` lets a broker read its
file again."""

from pathlib import Path

import click
from rich.table import Column, Table

from truenext.broker.config import Configuration, configure, format_value, with_files
from truenext.broker.settings import DEFAULT_DATA, BrokerSettings, fault_of_store
from truenext.cli import sizing, terminal
from truenext.cli.connection import BrokerOptions, broker_options, connected, send_control_request
from truenext.cli.exit_status import NoAnswerFailure
from truenext.cli.files import fault_of_files
from truenext.cli.serve import fault_of_backups, fault_of_memory_limit
from truenext.cli.values import PathParam, QueueNameParam
from truenext.errors import ConfigurationError, FaultyFileError, TruenextError
from truenext.model.policy import Policy
from truenext.model.setting import settings_of
from truenext.model.url import parse_listener_url
from truenext.store.backup import check_place_of_backups


@click.group()
def config() -> None:
    """Check a configuration file of a broker.

    The file is for `truenext serve --config`; see docs/reference/settings.md.
    """


@config.command()
@click.argument("file", metavar="FILE", type=PathParam())
@click.option(
    "--queue",
    type=QueueNameParam(),
    metavar="NAME",
    help="Print the policy of this queue, and for each value the table that sets it.",
)
def check(file: Path, queue: str | None) -> None:
    """Print each fault of FILE, or what a broker with it needs.

    For a file without faults it prints memory, files and disk space of a broker with it on this machine.

    Notes are not faults. A note names a setting that a broker rejects on this machine, or without a further option:
    for example a memory_limit beyond the memory of the machine, or too few open files. Other notes say what is too
    small, such as the disk, and why no backup can be made.

    Exits 0 if FILE has no faults, 1 if it has, 2 if it could not be read.
    """
    try:
        configuration = with_files(configure(file))
    except FaultyFileError as error:
        for fault in error.faults:
            terminal.echo(fault)
        count = len(error.faults)
        terminal.echo(f"{file} has {count} fault{'' if count == 1 else 's'}; no broker starts with it or reloads it.")
        raise SystemExit(1) from error
    except ConfigurationError as error:
        raise NoAnswerFailure(error) from error
    _print_notes(configuration)
    _print_sizes(configuration.broker)
    terminal.echo(f"{file} has no faults.")
    if queue is not None:
        _print_policy(configuration, queue)


@click.command()
@broker_options
def reload(broker: BrokerOptions) -> None:
    """Let a broker reload its configuration file.

    Prints the settings that have changed.

    Exits 0 if the file is in force; 1 if the broker has refused the file, and changed nothing; 2 if the broker could
    not be asked, or has refused the login.
    """
    with connected(broker, failure=NoAnswerFailure) as connection:
        outcome = send_control_request(connection, "reload")
    if outcome["errors"]:
        raise TruenextError("\n".join(["nothing was changed:", *outcome["errors"]]))
    for change in outcome["changed"]:
        terminal.echo(change)
    terminal.echo(f"{outcome['file']} is in force{'' if outcome['changed'] else ', and changes nothing'}.")


def _print_notes(configuration: Configuration) -> None:
    """Print which settings a broker would reject, depending on its command line or its machine."""
    settings = configuration.broker
    if settings.data is None and not settings.memory:
        terminal.echo(
            f"note: the file names no folder for messages; `truenext serve` uses ./{DEFAULT_DATA} where it is called."
        )
    if (
        not settings.allow_anonymous
        and settings.users is None
        and not all(parse_listener_url(url).is_loopback for url in settings.listen)
    ):
        terminal.echo(
            "note: other machines can reach the broker; for that `truenext serve` needs --users or --allow-anonymous."
        )
    fault = fault_of_store(settings, take_over=False)
    if fault is not None:
        terminal.echo(f"note: `truenext serve` refuses this file without more options: {fault}.")
    faults = (
        fault_of_memory_limit(settings.memory_limit),
        fault_of_files(sizing.files_max(), len(settings.listen)),
    )
    for fault in faults:
        if fault is not None:
            terminal.echo(f"note: `truenext serve` refuses this file on this machine: {fault}.")
    fault = fault_of_backups(settings, check_place_of_backups)
    if fault is not None:
        terminal.echo(f"note: no backup can be made: {fault}.")


def _print_sizes(settings: BrokerSettings) -> None:
    """Print what a broker with these settings needs of this machine, and what is too small."""
    try:
        facts = sizing.read_machine(None if settings.memory else settings.data or DEFAULT_DATA)
    except OSError as error:
        terminal.echo(f"note: the disk of the data folder cannot be examined: {error.strerror}.")
        facts = sizing.read_machine(None)
    for warning in sizing.warnings(settings, facts):
        terminal.echo(f"note: {warning}.")
    for line in sizing.describe(settings, facts):
        terminal.echo(line)


def _print_policy(configuration: Configuration, queue: str) -> None:
    table = Table(Column(terminal.table_cell(f"policy of {queue}")), "value", "from", box=None)
    policy = configuration.policies.for_queue(queue)
    for name, setting in settings_of(Policy).items():
        value = format_value(setting, getattr(policy, name))
        table.add_row(name, terminal.table_cell(value), terminal.table_cell(configuration.source(queue, name)))
    terminal.print_drawn(table)
