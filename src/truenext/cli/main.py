"""The `truenext` command."""

from pathlib import Path

import click

import truenext
from truenext.cli import logs
from truenext.cli.audit import audit
from truenext.cli.client import Failure, queues, receive, send
from truenext.cli.history import history as history_command
from truenext.cli.record import record
from truenext.cli.serve import serve as run_broker
from truenext.errors import TruenextError
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
@click.option("--allow-anonymous", is_flag=True, help="Let anybody in who reaches an address beyond loopback.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
)
def serve(
    data: Path | None, memory: bool, urls: tuple[str, ...], history: bool, allow_anonymous: bool, log_level: str
) -> None:
    """Run a broker until SIGTERM or Ctrl-C.

    Prints `listening on URL`, one line per listener, once clients can connect. Exits 0 after a clean stop.
    """
    if (data is None) != memory:
        raise click.UsageError("say where messages are kept: --data DIR, or --memory for nowhere")
    logs.configure(log_level)
    try:
        run_broker(data, urls, allow_anonymous=allow_anonymous, with_history=history)
    except TruenextError as error:
        raise Failure(error) from error


for command in (send, receive, queues, audit, history_command, record):
    main.add_command(command)
