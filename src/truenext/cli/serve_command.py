"""`truenext serve`: command line of a broker."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import click

from truenext.broker.config import Configuration, configure, with_files
from truenext.broker.settings import ClientCertificates, LogLevel
from truenext.cli import early_signals, logs
from truenext.cli.exit_status import CommandFailure
from truenext.cli.serve import serve as run_broker
from truenext.cli.values import URL, PathParam, ServerNameParam, SizeParam
from truenext.errors import TruenextError
from truenext.model.limits import DISK_LIMIT_MIN, MEMORY_LIMIT, MEMORY_LIMIT_MIN, PAGE_SIZE, PAGE_SIZE_MAX
from truenext.model.numerals import format_size
from truenext.model.policy import StoreAndDispatch, WhenFull
from truenext.model.url import DEFAULT_URL
from truenext.version import VERSION

logger = logging.getLogger(__name__)


@click.command()
@click.option("--data", type=PathParam(file_okay=False), help="Folder that messages are stored in.")
@click.option("--memory", is_flag=True, help="Store nothing on disk; for tests.")
@click.option(
    "--config",
    type=PathParam(exists=True, dir_okay=False),
    help="File with these and other settings, see docs/reference/settings.md; options override it.",
)
@click.option(
    "--listen",
    type=URL,
    multiple=True,
    show_default=DEFAULT_URL,
    help="Where to listen, stomp://HOST:PORT, or stomp+ssl:// with TLS; port 0 picks a free one. May be repeated. "
    "TRUENEXT_URL is not used.",
)
@click.option(
    "--server-name",
    type=ServerNameParam(),
    show_default=f"truenext/{VERSION}",
    help="Value of the header `server` of CONNECTED.",
)
@click.option(
    "--history/--no-history",
    default=None,
    show_default="history",
    help="Record what happens to every message in DIR/history, for `truenext audit`.",
)
@click.option(
    "--memory-limit",
    type=SizeParam(MEMORY_LIMIT_MIN),
    show_default=format_size(MEMORY_LIMIT),
    help="Private memory of the broker, all in all; messages beyond that wait on disk.",
)
@click.option(
    "--queue-memory-limit",
    type=SizeParam(),
    help="Memory for the messages of one queue; by default only the limit of all queues.",
)
@click.option(
    "--page-size",
    type=click.IntRange(1, PAGE_SIZE_MAX),
    show_default=str(PAGE_SIZE),
    help="Messages read from disk at a time.",
)
@click.option(
    "--disk-limit",
    type=SizeParam(DISK_LIMIT_MIN),
    help="Disk space for messages, without the history; by default all of the disk but a reserve.",
)
@click.option(
    "--when-full",
    type=click.Choice([each.value for each in WhenFull]),
    show_default=WhenFull.SLOW.value,
    help="Near the limit of the disk producers wait, or are refused. Consumers continue either way.",
)
@click.option(
    "--store-and-dispatch",
    type=click.Choice([each.value for each in StoreAndDispatch]),
    show_default=StoreAndDispatch.DURABLE.value,
    help="Dispatch a persistent message once it is durable, or while it is being written.",
)
@click.option(
    "--certificate",
    type=PathParam(exists=True, dir_okay=False),
    help="File with the broker's certificate, PEM, for stomp+ssl:// addresses.",
)
@click.option(
    "--key",
    type=PathParam(exists=True, dir_okay=False),
    help="File with the private key of the certificate, PEM; by default in the same file.",
)
@click.option(
    "--client-ca",
    type=PathParam(exists=True, dir_okay=False),
    help="File with the certificates that sign those of clients, PEM.",
)
@click.option(
    "--client-certificates",
    type=click.Choice([each.value for each in ClientCertificates]),
    show_default=ClientCertificates.NONE.value,
    help="Whether clients show certificates.",
)
@click.option(
    "--users",
    type=PathParam(exists=True, dir_okay=False),
    help="File with users and their grants, see docs/security.md; without it every client may do everything.",
)
@click.option(
    "--allow-anonymous", is_flag=True, default=None, help="Listen beyond loopback, although clients need no password."
)
@click.option(
    "--allow-plaintext",
    is_flag=True,
    default=None,
    help="Listen without TLS beyond loopback, although users send passwords.",
)
@click.option(
    "--log-level",
    type=click.Choice([each.value for each in LogLevel]),
    show_default=LogLevel.WARNING.value,
    help="Lowest level that is logged, to standard error.",
)
def serve(
    data: Path | None,
    memory: bool,
    config: Path | None,
    listen: tuple[str, ...],
    server_name: str | None,
    history: bool | None,
    memory_limit: int | None,
    queue_memory_limit: int | None,
    page_size: int | None,
    disk_limit: int | None,
    when_full: str | None,
    store_and_dispatch: str | None,
    certificate: Path | None,
    key: Path | None,
    client_ca: Path | None,
    client_certificates: str | None,
    users: Path | None,
    allow_anonymous: bool | None,
    allow_plaintext: bool | None,
    log_level: str | None,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C.

    Prints `listening on URL`, one line per listener, once clients can connect. Exits 0 after a clean stop.
    The files of --config, --users and --certificate are read again on SIGHUP, and when `truenext reload` asks for it.
    """
    has_files = config is not None or users is not None or certificate is not None
    if not has_files:
        early_signals.restore_sighup()
    if memory and data is not None:
        raise click.UsageError("--data and --memory exclude each other: messages are stored in a folder, or not at all")
    configure_broker = partial(
        configure,
        config,
        broker=_specified_options(
            data=data,
            memory=memory or None,
            listen=listen or None,
            server_name=server_name,
            history=history,
            memory_limit=memory_limit,
            disk_limit=disk_limit,
            when_full=when_full and WhenFull(when_full),
            certificate=certificate,
            key=key,
            client_ca=client_ca,
            client_certificates=client_certificates and ClientCertificates(client_certificates),
            users=users,
            allow_anonymous=allow_anonymous,
            allow_plaintext=allow_plaintext,
            log_level=log_level and LogLevel(log_level),
        ),
        policy=_specified_options(
            page_size=page_size,
            memory_limit=queue_memory_limit,
            store_and_dispatch=store_and_dispatch and StoreAndDispatch(store_and_dispatch),
        ),
    )

    def read() -> Configuration:
        return with_files(configure_broker())

    try:
        configuration = read()
        settings = configuration.broker
        if settings.data is None and not settings.memory:
            raise click.UsageError("a broker needs a folder for messages: --data DIR, or --memory to store nothing")
        if settings.memory and settings.disk_limit is not None:
            raise click.UsageError("--disk-limit is for a broker with --data")
        if settings.memory and history:
            raise click.UsageError("--history is for a broker with --data")
        logs.configure_logging(settings.log_level.value)
        if config is not None:
            logger.info("configuration read", extra={"file": str(config)})
        run_broker(configuration, read if has_files else None)
    except TruenextError as error:
        raise CommandFailure(error) from error


def _specified_options(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
