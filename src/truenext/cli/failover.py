"""`truenext failover`: let another broker take over from the active one."""

from __future__ import annotations

import click

from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, broker_options, connected, send_control_request
from truenext.cli.values import MEMBER


@click.command()
@click.option(
    "--to",
    "member",
    metavar="NAME",
    type=MEMBER,
    help="Member name of the broker that takes over; by default the one that is least behind.",
)
@broker_options
def failover(member: str | None, broker: BrokerOptions) -> None:
    """Let another broker take over from the active one.

    The active broker stops cleanly, with transient messages, and exits with status 3. The broker that stands by takes
    over at once; see docs/failover.md. Prints its name.

    Exits 0 if the active broker stops, 1 if it has refused, for example because no broker stands by, 2 if it could not
    be asked.
    """
    with connected(broker) as connection:
        answer = send_control_request(connection, "failover", None if member is None else {"to": member})
    terminal.echo(f"{answer['member']} is to take over.")
