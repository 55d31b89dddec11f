"""The `truenext` command."""

from pathlib import Path
from sys import maxsize

import click

import truenext
from truenext.cli import logs
from truenext.cli.audit import audit
from truenext.cli.client import Failure, queues, receive, send, status
from truenext.cli.history import history as history_command
from truenext.cli.record import record
from truenext.cli.redrive import redrive
from truenext.cli.serve import serve as run_broker
from truenext.cli.size import Size, said
from truenext.cli.store import store
from truenext.errors import TruenextError
from truenext.limits import MEMORY_LIMIT, MEMORY_LIMIT_MIN, PAGE_SIZE
from truenext.policy import Policies, Policy, StoreAndDispatch, WhenFull
from truenext.url import DEFAULT_URL


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(truenext.__version__, prog_name="truenext")
def main() -> None:
    """A message broker that always hands out the true next message."""


@main.command()
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Folder the messages are kept in.")
@click.option("--memory", is_flag=True, help="Keep nothing on disk; for tests.")
@click.option(
    "--listen",
    "urls",
    multiple=True,
    default=[DEFAULT_URL],
    show_default=True,
    help="Where to listen, stomp://HOST:PORT; port 0 picks a free one. May be repeated.",
)
@click.option(
    "--history/--no-history",
    default=True,
    show_default=True,
    help="Write down what happens to every message, for `truenext audit`; in DIR/history.",
)
@click.option(
    "--memory-limit",
    type=Size(MEMORY_LIMIT_MIN),
    default=said(MEMORY_LIMIT),
    show_default=True,
    help="Private memory the broker may take, all told; what waits beyond that waits on disk.",
)
@click.option(
    "--queue-memory-limit",
    type=Size(),
    help="Memory that the messages of one queue may take; no limit of its own by default.",
)
@click.option(
    "--page-size",
    type=click.IntRange(1, 100_000),
    default=PAGE_SIZE,
    show_default=True,
    help="Messages read from disk at a time.",
)
@click.option(
    "--disk-limit",
    type=Size(),
    help="What messages may take on disk, the history apart; by default what the disk has, but for a reserve.",
)
@click.option(
    "--when-full",
    type=click.Choice([each.value for each in WhenFull]),
    default=WhenFull.SLOW.value,
    show_default=True,
    help="Producers near the limit of the disk wait, or are refused. Consumers go on either way.",
)
@click.option(
    "--store-and-dispatch",
    type=click.Choice([each.value for each in StoreAndDispatch]),
    default=StoreAndDispatch.DURABLE.value,
    show_default=True,
    help="Dispatch a persistent message once it is durable, or while it is being written.",
)
@click.option("--allow-anonymous", is_flag=True, help="Let anybody in who reaches an address beyond loopback.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
)
def serve(
    data: Path | None,
    memory: bool,
    urls: tuple[str, ...],
    history: bool,
    memory_limit: int,
    queue_memory_limit: int | None,
    page_size: int,
    disk_limit: int | None,
    when_full: str,
    store_and_dispatch: str,
    allow_anonymous: bool,
    log_level: str,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C.

    Prints `listening on URL`, one line per listener, once clients can connect. Exits 0 after a clean stop.
    """
    if (data is None) != memory:
        raise click.UsageError("say where messages are kept: --data DIR, or --memory for nowhere")
    if memory and disk_limit is not None:
        raise click.UsageError("--disk-limit is for a broker with --data")
    logs.configure(log_level)
    policy = Policy(
        page_size=page_size,
        memory_limit=queue_memory_limit or maxsize,
        store_and_dispatch=StoreAndDispatch(store_and_dispatch),
    )
    try:
        run_broker(
            data,
            urls,
            policies=Policies(policy),
            when_full=WhenFull(when_full),
            memory_limit=memory_limit,
            disk_limit=disk_limit,
            allow_anonymous=allow_anonymous,
            with_history=history,
        )
    except TruenextError as error:
        raise Failure(error) from error


for command in (send, receive, queues, status, redrive, audit, history_command, store, record):
    main.add_command(command)
