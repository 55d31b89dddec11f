"""`truenext stages grants`: print the grants that a service needs at a broker with users, or the grants that its user
lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import click
import tomlkit
from click.core import ParameterSource

from truenext.broker.users import read_users, suggest_name
from truenext.cli import terminal
from truenext.cli.exit_status import NoAnswerFailure
from truenext.cli.stages.service_loader import load_service, service_argument
from truenext.cli.values import TEXT, USERS_VARIABLE, PathParam, VariableOption
from truenext.errors import TruenextError
from truenext.model.grants import QUEUE_PREFIX, Pattern, Right, User
from truenext.stage.introspection.grants import missing_grants, needed_grants
from truenext.stage.service import Service


@click.command()
@service_argument
@click.option(
    "--users",
    "file",
    cls=VariableOption,
    type=PathParam(dir_okay=False),
    envvar=USERS_VARIABLE,
    show_envvar=True,
    help="Users file of the broker: print only the grants that the user of --user lacks in it.",
)
@click.option("--user", "name", type=TEXT, help="Name of a user in the file of --users.")
def grants(target: str, file: Path | None, name: str | None) -> None:
    """Print the grants that a service needs, as TOML for a users file.

    These grants cover the queues and topics that the definitions and the code of the stages name. Comments say which
    other grants the service may need, such as grants for replies and failures. No check covers these other grants. See
    docs/security.md.

    With --users and --user, exits 0 if the user has all of these grants, 1 if some are missing, 2 if the check failed.
    """
    context = click.get_current_context()
    if name is None and context.get_parameter_source("file") is ParameterSource.ENVIRONMENT:
        # The environment variable is also for other commands: without --user it is ignored.
        file = None
    if (file is None) is not (name is None):
        raise click.UsageError("--users and --user need one another: set both, or neither")
    service = load_service(target)
    keeper = service.name if service.has_outbox else None
    needed = needed_grants(service.endpoints.values(), service.remotes.values(), service.topics.values(), keeper)
    user = None if file is None or name is None else _read_user(file, name)
    missing = needed if user is None else missing_grants(needed, user)
    if user is not None and missing:
        terminal.echo(f"# User {user.name} lacks these grants, which {service.name} needs:")
    elif user is not None:
        terminal.echo(f"# User {user.name} has the grants that the code of {service.name} shows. Not checked:")
    if missing:
        _print_grants(missing)
    for line in _unknown_grants(service):
        terminal.echo(f"# {line}")
    if user is not None and missing:
        raise SystemExit(1)


def _read_user(file: Path, name: str) -> User:
    users = read_users(file)
    if name not in users:
        raise NoAnswerFailure(TruenextError(f"{file} has no user {name!r}{suggest_name(name, users)}"))
    return users[name].user


def _print_grants(grants: Mapping[Right, Iterable[Pattern]]) -> None:
    document = tomlkit.document()
    for right, patterns in grants.items():
        names = [str(each).removeprefix(QUEUE_PREFIX) for each in patterns]
        if names:
            array = tomlkit.array()
            array.extend(names)
            document[right.value] = array.multiline(True)
    terminal.echo(tomlkit.dumps(document).rstrip("\n"))


def _unknown_grants(service: Service) -> list[str]:
    """Return sentences about grants that the service may need, but that its definitions do not show."""
    found = []
    replying = [each.name for each in service.endpoints.values() if each.replies is not None]
    if replying:
        found.append(f"Replies of {', '.join(replying)}: `send` also to the stages that get them, and to")
        found.append("/topic/replies.CALLER.* of callers that use `ask`, and CALLER.replies of callers that use keys.")
    found.append("Callers that use `ask`, keys or `on_failure`, indirect ones, too: `send` also to their topics")
    found.append("/topic/replies.CALLER.*, and their queues CALLER.replies and ENDPOINT.stage.on_failure.")
    found.append(f"Programs of {service.name} that use `ask`, and the command `truenext stages send --ask`:")
    found.append(f"`take` and `send` also for /topic/replies.{service.name}.*.")
    if service.crons:
        queues = ", ".join(sorted({each.endpoint for each in service.crons.values()}))
        found.append(f"`truenext stages cron --apply`: `send`, `browse` and `manage` on {queues}.")
    return [*found, "A program that starts flows: `send` to their endpoints."]
