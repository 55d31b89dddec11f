"""`truenext stages check`: show whether a change of a service breaks queued messages or other services."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from truenext.cli import terminal
from truenext.cli.exit_status import NoAnswerFailure
from truenext.cli.stages.service_loader import load_service, service_argument
from truenext.cli.values import PathParam
from truenext.errors import ConfigurationError
from truenext.model.numerals import count_noun
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
    help="File of the messages, states and replies that the service had before, written by --write.",
)
@click.option("--write", is_flag=True, help="Write messages, states and replies of the present service into the file.")
def check(target: str, file: Path, write: bool) -> None:
    """Check whether a change of a service breaks messages or callers.

    Compares the service with FILE. Shows what the change breaks: messages that are under way, or services that send
    requests to it.

    Commit FILE with the service, and write it again with each change that is deployed. Exits 0 if nothing breaks, or if
    FILE was written; 1 if something breaks, but not for warnings alone; 2 if the check failed.
    """
    try:
        service = load_service(target)
        now = interface_of(service.name, service.endpoints)
        before = None if write and not file.exists() else _read(file, is_replaced=write)
    except OSError as error:
        raise NoAnswerFailure(error) from error
    try:
        findings = [] if before is None else compare_interfaces(before, now)
    except (ValueError, TypeError, AttributeError) as error:
        raise _invalid_file(file, error) from error
    for finding in findings:
        _print_finding(finding)
    if write:
        try:
            file.write_bytes(_encoded(now))
        except OSError as error:
            raise NoAnswerFailure(error) from error
        terminal.echo(f"{file} describes {service.name} as it is now.")
        return
    if any_breaking(findings):
        terminal.echo(
            f"{count_noun(sum(each.is_breaking for each in findings), 'change')} of {service.name} would break "
            f"messages or callers."
        )
        raise SystemExit(1)
    terminal.echo(f"Nothing breaks {service.name}.")
    if before != now:
        terminal.echo(f"note: {file} describes the former service; write it anew (--write) when this is deployed.")


def _read(file: Path, *, is_replaced: bool) -> ServiceInterface | None:
    """Read an interface from `file`. With `is_replaced` the command will overwrite the file anyway, so an older format
    is no error, and the result is None.

    Raises: ConfigurationError if the file is missing, or its format or content cannot be used; OSError if it cannot be
    read
    """
    try:
        interface = msgspec.json.decode(file.read_bytes(), type=ServiceInterface)
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no file {file}: write it with --write, and commit it") from error
    except msgspec.MsgspecError as error:
        raise _invalid_file(file, error) from error
    if interface.format < FORMAT:
        if is_replaced:
            terminal.echo(f"note: {file} has the older format {interface.format}, so nothing was compared.")
            return None
        raise ConfigurationError(
            f"{file} has format {interface.format}, which lacks facts that are compared now: write it anew (--write) "
            "with the code that is deployed, and commit it"
        )
    if interface.format != FORMAT:
        raise ConfigurationError(
            f"{file} has format {interface.format}, and this truenext knows {FORMAT}: update truenext"
        )
    return interface


def _invalid_file(file: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"{file} was not written by --write: {error}")


def _encoded(interface: ServiceInterface) -> bytes:
    """Encode the interface, with each part on its own lines, so that a change of one part changes only the lines of
    that part."""
    return msgspec.json.format(msgspec.json.encode(interface, order="sorted"), indent=2) + b"\n"


def _print_finding(finding: Incompatibility) -> None:
    terminal.echo(f"{'breaks' if finding.is_breaking else 'warning'}: {finding.location}: {finding.change}")
    terminal.echo(f"    {finding.consequence}")
    terminal.echo(f"    {finding.advice}")
