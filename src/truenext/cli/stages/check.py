"""`truenext stages check`: find what a change of a service breaks, for its queued messages and for other services."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from truenext.cli import terminal
from truenext.cli.exit_status import CommandFailure, NoAnswerFailure
from truenext.cli.stages.service_loader import load_service, service_argument
from truenext.cli.terminal import count_noun
from truenext.cli.values import PathParam
from truenext.errors import ConfigurationError
from truenext.stage.introspection.compatibility import (
    FORMAT,
    Incompatibility,
    ServiceInterface,
    any_breaking,
    compare_interfaces,
    interface_of,
)


@click.command()
@service_argument
@click.option(
    "--against",
    "file",
    type=PathParam(dir_okay=False),
    required=True,
    help="What the service took, kept and replied before, as --write has written it.",
)
@click.option("--write", is_flag=True, help="Write into that file how it is now.")
def check(target: str, file: Path, write: bool) -> None:
    """Say what a change of a service breaks.

    That is, messages that are under way, or services that ask it.

    FILE is to be committed with the service, and written anew with each change that is deployed. Exits 0 if nothing
    breaks, or if FILE was written; 1 if something breaks; 2 if that is not known.
    """
    try:
        service = load_service(target)
        now = interface_of(service.name, service.endpoints)
        before = None if write and not file.exists() else _read(file, is_replaced=write)
    except ConfigurationError as error:
        raise CommandFailure(error) from error
    except OSError as error:
        raise NoAnswerFailure(error) from error
    try:
        findings = [] if before is None else compare_interfaces(before, now)
    except (ValueError, TypeError, AttributeError) as error:
        raise CommandFailure(_invalid_file(file, error)) from error
    for finding in findings:
        _print_finding(finding)
    if write:
        try:
            file.write_bytes(_encoded(now))
        except OSError as error:
            raise NoAnswerFailure(error) from error
        terminal.echo(f"{file} says how {service.name} is now.")
        return
    if any_breaking(findings):
        terminal.echo(
            f"{count_noun(sum(each.is_breaking for each in findings), 'change')} of {service.name} would break it."
        )
        raise SystemExit(1)
    terminal.echo(f"Nothing breaks {service.name}.")
    if before != now:
        terminal.echo(f"note: {file} says how it was; write it anew (--write) when this is deployed.")


def _read(file: Path, *, is_replaced: bool) -> ServiceInterface | None:
    """Read an interface from `file`; None if its format is older and the file `is_replaced`.

    Raises: ConfigurationError, OSError
    """
    try:
        interface = msgspec.json.decode(file.read_bytes(), type=ServiceInterface)
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no file {file}: --write makes it, and it is to be committed") from error
    except msgspec.MsgspecError as error:
        raise _invalid_file(file, error) from error
    if interface.format < FORMAT:
        if is_replaced:
            terminal.echo(f"note: {file} has the older format {interface.format}, so nothing was compared.")
            return None
        raise ConfigurationError(
            f"{file} has format {interface.format}, which does not say all that is compared now: with the code that is "
            "deployed, make a new one (--write), and commit it"
        )
    if interface.format != FORMAT:
        raise ConfigurationError(f"{file} has format {interface.format}, and this knows {FORMAT}: update truenext")
    return interface


def _invalid_file(file: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"{file} is not what --write has written: {error}")


def _encoded(interface: ServiceInterface) -> bytes:
    """Encode so that a change of one part changes only the lines of that part."""
    return msgspec.json.format(msgspec.json.encode(interface, order="sorted"), indent=2) + b"\n"


def _print_finding(finding: Incompatibility) -> None:
    terminal.echo(f"{'breaks' if finding.is_breaking else 'warning'}: {finding.location}: {finding.change}")
    terminal.echo(f"    {finding.consequence}")
    terminal.echo(f"    {finding.advice}")
