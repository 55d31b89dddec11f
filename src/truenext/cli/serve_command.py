"""`truenext serve`: command line of a broker."""

import logging
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import click

from truenext.broker.config import Configuration, configure, with_files
from truenext.broker.settings import (
    DEFAULT_DATA,
    BrokerSettings,
    ClientCertificates,
    Durability,
    LogFormat,
    LogLevel,
    fault_of_store,
)
from truenext.cli import early_signals, logs, terminal
from truenext.cli.serve import serve as run_broker
from truenext.cli.values import (
    HOST_AND_PORT,
    LISTENER_URL,
    MEMBER,
    SCHEMA,
    SERVER_NAME,
    STORE_URL,
    EnumParam,
    PathParam,
    SizeParam,
)
from truenext.errors import ConfigurationError
from truenext.model.limits import (
    DATABASE_LIMIT_MIN,
    DISK_LIMIT_MIN,
    MEMORY_LIMIT,
    MEMORY_LIMIT_MIN,
    PAGE_SIZE,
    PAGE_SIZE_MAX,
)
from truenext.model.numerals import format_size
from truenext.model.policy import Policy, StoreAndDispatch, WhenFull
from truenext.model.setting import settings_of
from truenext.model.url import DEFAULT_URL
from truenext.version import VERSION

logger = logging.getLogger(__name__)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _file_option(name: str, *, help: str) -> Decorator:
    return click.option(name, type=PathParam(exists=True, dir_okay=False), help=help)


def _enum_option(name: str, default: Enum, *, help: str) -> Decorator:
    return click.option(name, type=EnumParam(type(default)), show_default=default.value, help=help)


class ServeCommand(click.Command):
    """Command `serve`. If the name of an unknown option is that of a setting, the error says where to set it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.removeprefix("--").replace("-", "_")
            for table, described in (("broker", BrokerSettings), ("policy", Policy)):
                if name in settings_of(described):
                    text = f"No such option {error.option_name!r}: set {name} in [{table}] of the file of --config"
                    raise click.UsageError(text, ctx) from error
            raise


@click.command(cls=ServeCommand)
@click.option(
    "--data",
    type=PathParam(file_okay=False, readable=False),
    show_default=f"./{DEFAULT_DATA}",
    help="Folder in which messages are stored.",
)
@click.option("--memory", is_flag=True, help="Store nothing on disk; for tests.")
@_file_option(
    "--config",
    help="File with these and other settings, see docs/reference/settings.md; options override settings of the file.",
)
@click.option(
    "--listen",
    type=LISTENER_URL,
    multiple=True,
    show_default=DEFAULT_URL,
    help="Where to listen, stomp://HOST:PORT, or openwire://HOST:PORT for JMS clients; with TLS stomp+ssl:// or "
    "openwire+ssl://. Port 0 picks a free one. May be repeated. "
    "TRUENEXT_URL is not used.",
)
@click.option(
    "--server-name",
    type=SERVER_NAME,
    show_default=f"truenext/{VERSION}",
    help="Value of the header `server` of CONNECTED.",
)
@click.option(
    "--store",
    type=STORE_URL,
    help="PostgreSQL database in which messages are stored, postgresql://USER@HOST/DATABASE, without a password; see "
    "docs/postgresql.md. The folder of --data is only a copy then.",
)
@click.option(
    "--schema",
    type=SCHEMA,
    help="Schema of the database in which the messages of this broker are stored, with --store.",
)
@click.option(
    "--member",
    type=MEMBER,
    show_default="name of the machine",
    help="Name of this broker among those that use the same schema, with --store.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Take over at once from a broker that is active on the same schema, instead of standing by. The other broker "
    "confirms nothing any more, and exits with status 3.",
)
@_enum_option(
    "--durability",
    Durability.REPLICATED,
    help="With --store: confirm a message once the database and its synchronous standby have it, or the database "
    "alone.",
)
@click.option(
    "--database-limit",
    type=SizeParam(DATABASE_LIMIT_MIN),
    help="Disk space in the database for the tables of the broker; required with --store.",
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
    help="Limit of the broker's private memory, all in all; messages beyond this limit wait on disk.",
)
@click.option(
    "--queue-memory-limit",
    type=SizeParam(),
    help="Limit of the memory for the messages of one queue; by default there is only the limit for all queues "
    "together.",
)
@click.option(
    "--page-size",
    type=click.IntRange(1, PAGE_SIZE_MAX),
    show_default=str(PAGE_SIZE),
    help="Number of messages that are read from disk at a time.",
)
@click.option(
    "--disk-limit",
    type=SizeParam(DISK_LIMIT_MIN),
    help="Disk space for messages, without the history; by default all of the disk but a reserve.",
)
@_enum_option(
    "--when-full",
    WhenFull.SLOW,
    help="Near the limit of the disk producers wait, or are refused. Consumers continue either way.",
)
@_enum_option(
    "--store-and-dispatch",
    StoreAndDispatch.DURABLE,
    help="Dispatch a persistent message once it is durable, or while it is being written.",
)
@_file_option("--certificate", help="PEM file with the broker's certificate, for addresses with +ssl.")
@_file_option(
    "--key",
    help="PEM file with the private key of the certificate; by default the key is in the file of the certificate.",
)
@_file_option("--client-ca", help="PEM file with the certificates that sign the certificates of clients.")
@_enum_option("--client-certificates", ClientCertificates.NONE, help="Whether clients show certificates.")
@_file_option(
    "--users",
    help="File with users and their grants, see docs/security.md; without this file every client may do everything.",
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
    "--allow-network-disk",
    is_flag=True,
    default=None,
    help="Start on a folder on a network file system, although a lock there does not keep a second machine away.",
)
@click.option(
    "--health",
    type=HOST_AND_PORT,
    help="Serve /live, /ready and /metrics here, see docs/monitoring.md. A port alone is on 127.0.0.1, port 0 picks a "
    "free one.",
)
@_enum_option(
    "--log-level", LogLevel.WARNING, help="Lowest level of the log records that are written to standard error."
)
@_enum_option("--log-format", LogFormat.TEXT, help="Format of the log: lines for a reader, or one JSON object a line.")
def serve(
    config: Path | None,
    memory: bool,
    take_over: bool,
    listen: tuple[str, ...],
    page_size: int | None,
    queue_memory_limit: int | None,
    store_and_dispatch: StoreAndDispatch | None,
    **options: Any,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C.

    Prints `listening on URL`, one line per listener, once clients can connect. Before that it prints `health at URL` if
    it has --health. With --store, while another broker is
    active, this one prints `standing by for NAME`: it takes over when the other one ends, and listens only then. See
    docs/failover.md.

    Exits 0 after a clean stop, 3 if another broker takes over, 4 if the database has lost messages that it had
    confirmed, and 1 or 2 after other errors. The files of --config, --users and --certificate are read again on SIGHUP,
    and when `truenext reload` asks for it.
    """
    # `options` are the settings of `[broker]` that have the name of their option.
    has_files = config is not None or options["users"] is not None or options["certificate"] is not None
    if not has_files:
        early_signals.restore_sighup()
    if memory and options["data"] is not None:
        raise click.UsageError("--data and --memory exclude each other: messages are stored in a folder, or not at all")
    policy = {"page_size": page_size, "memory_limit": queue_memory_limit, "store_and_dispatch": store_and_dispatch}
    configure_broker = partial(
        configure,
        config,
        broker=_specified({"memory": memory or None, "listen": listen or None, **options}),
        policy=_specified(policy),
    )

    def read() -> Configuration:
        return with_files(_with_data(configure_broker()))

    configuration = read()
    settings = configuration.broker
    if settings.memory and settings.disk_limit is not None:
        raise click.UsageError("--disk-limit is for a broker with --data")
    if settings.memory and options["history"]:
        raise click.UsageError("--history is for a broker with --data")
    fault = fault_of_store(settings, take_over=take_over)
    if fault is not None:
        raise click.UsageError(fault)
    logs.configure_logging(settings.log_level.value, settings.log_format)
    if config is not None:
        logger.info("configuration read", extra={"file": str(config)})
    if settings.data == DEFAULT_DATA and options["data"] is None:
        terminal.echo(f"truenext: the data folder is ./{DEFAULT_DATA}; --data DIR chooses another one", err=True)
    run_broker(configuration, read if has_files else None, take_over=take_over)


def _with_data(configuration: Configuration) -> Configuration:
    """Return the configuration of a broker that stores its messages in DEFAULT_DATA, unless it names another folder or
    stores nothing."""
    settings = configuration.broker
    if settings.data is not None or settings.memory:
        return configuration
    try:
        Path.cwd()
    except FileNotFoundError as error:
        text = "the working folder was removed: change to another one, or name a folder with --data"
        raise ConfigurationError(text) from error
    return replace(configuration, broker=replace(settings, data=DEFAULT_DATA))


def _specified(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
