"""`truenext console`: web pages that show a broker, and let an operator act."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import click

from truenext.cli import logs, terminal
from truenext.cli.connection import broker_urls_option, ca_option
from truenext.cli.exit_status import CommandFailure
from truenext.cli.values import TEXT, PathParam
from truenext.client.core.credentials import Credentials
from truenext.errors import ConfigurationError, NoBroker

DEFAULT_LISTEN = "http://127.0.0.1:8161"


@click.command()
@broker_urls_option("--broker")
@ca_option
@click.option(
    "--events",
    type=PathParam(file_okay=False),
    multiple=True,
    help="Folder in which services of stages record their executions, to show flows. May be repeated.",
)
@click.option(
    "--listen",
    type=TEXT,
    default=DEFAULT_LISTEN,
    show_default=True,
    help="Where to listen for browsers, http://HOST:PORT, or https://HOST:PORT with --certificate. Port 0 picks a free "
    "one.",
)
@click.option(
    "--host",
    "hosts",
    type=TEXT,
    multiple=True,
    help="Further name by which browsers call the console: HOST, HOST:PORT if the port is another one, or the origin "
    "of a proxy with TLS, https://HOST. May be repeated.",
)
@click.option(
    "--certificate",
    type=PathParam(exists=True, dir_okay=False),
    help="PEM file with the certificate that the console shows to browsers.",
)
@click.option(
    "--key",
    type=PathParam(exists=True, dir_okay=False),
    help="PEM file with the private key of --certificate; by default the key is in the same file.",
)
@click.option(
    "--allow-plaintext",
    is_flag=True,
    help="Listen beyond this machine without TLS, where a proxy or a tunnel encrypts.",
)
def console(
    urls: tuple[str, ...],
    ca: Path | None,
    events: tuple[Path, ...],
    listen: str,
    hosts: tuple[str, ...],
    certificate: Path | None,
    key: Path | None,
    allow_plaintext: bool,
) -> None:
    """Serve web pages that show a broker.

    The pages show what wants attention, queues and their messages, dead letters by cause, services of stages and their
    flows, scheduled sends, subscriptions, connections, Spark's queries and refused requests. Operators re-drive, move
    and purge messages there, pause queues, cancel scheduled sends and close connections. SIGTERM or Ctrl-C ends it.

    If the broker has users, log in as one of them: the console may do what this user may do. Otherwise the console
    listens on this machine alone, and prints an address that opens it.

    See docs/console.md.
    """
    try:
        from truenext.console.serving import ConsoleOptions, parse_listen, run_console
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"this command needs {error.name}: pip install 'truenext[console]'") from error
    if key is not None and certificate is None:
        raise click.UsageError("--key needs --certificate: set both, or neither")
    logs.configure_logging("warning")
    # What an operator does that the broker does not see is told, too.
    logging.getLogger("truenext.console").setLevel(logging.INFO)
    options = ConsoleOptions(
        urls=urls,
        credentials=Credentials(ca=None if ca is None else str(ca)),
        events=events,
        listen=parse_listen(listen),
        hosts=hosts,
        certificate=certificate,
        key=key,
        allows_plaintext=allow_plaintext,
    )
    terminal.set_line_buffering()
    try:
        asyncio.run(run_console(options, _announce))
    except NoBroker as error:
        raise CommandFailure(error, "--broker") from error


def _announce(url: str) -> None:
    terminal.echo(f"truenext console: {url}")
