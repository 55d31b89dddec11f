"""`truenext backup` and `truenext restore`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import click

from truenext.blocking import Connection
from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, broker_options, connected, send_control_request
from truenext.cli.exit_status import INTERRUPTED, NoAnswerFailure
from truenext.cli.progress_bar import progress_bar
from truenext.cli.values import PathParam, SizeParam
from truenext.errors import ConnectionLost
from truenext.history.check import last_batch_chunk
from truenext.model.limits import BACKUP_RATE, BACKUP_RATE_MIN
from truenext.model.numerals import format_size
from truenext.store.restore import Restored
from truenext.store.restore import restore as restore_backup
from truenext.store.store_errors import user_name

POLL_S = 0.25


@click.command()
@click.option(
    "--rate",
    type=SizeParam(BACKUP_RATE_MIN),
    default=BACKUP_RATE,
    show_default=format_size(BACKUP_RATE),
    help="Bytes a second that the broker copies at most.",
)
@click.option("--history", is_flag=True, help="Copy the history, too.")
@click.option("--stop", is_flag=True, help="Stop the backup that runs, and remove its folder.")
@broker_options
def backup(rate: int, history: bool, stop: bool, broker: BrokerOptions) -> None:
    """Back up a broker while it works.

    The broker writes a new folder in backup_dir, a setting in [broker] of its configuration file; see docs/backup.md.
    Prints its path on standard output when it is complete, and all else on standard error.

    Ctrl-C stops the backup. If the command is killed, the backup goes on.

    Exits 0 if the backup is complete, or with --stop was stopped; 1 if it was refused, has failed or was stopped, or
    the broker has ended meanwhile; 2 if the broker could not be asked.
    """
    with connected(broker) as connection:
        if stop:
            send_control_request(connection, "backup", {"action": "stop"})
            report = _wait(connection, lambda report: None)
            if report["state"] == "stopped":
                terminal.echo("The backup was stopped.")
            else:
                _print_result(report)
            return
        try:
            with _deferred_interrupt():
                send_control_request(connection, "backup", {"rate": rate, "history": history})
            with progress_bar("copied") as on_progress:
                report = _wait(connection, lambda report: on_progress(report["copied"], report["total"]))
        except KeyboardInterrupt:
            send_control_request(connection, "backup", {"action": "stop"})
            _wait(connection, lambda report: None)
            terminal.echo("truenext: the backup was stopped, and its folder removed", err=True)
            raise SystemExit(INTERRUPTED) from None
    for name in report["incomplete"]:
        terminal.echo(f"note: {name} is no backup: it was cut short, and can be deleted", err=True)
    _print_result(report)


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block: a request that was sent and not answered may have begun a backup."""
    deferred: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, _: deferred.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    for number in deferred:
        signal.raise_signal(number)


def _wait(connection: Connection, on_report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return the report of a backup that has ended. Raises: click.ClickException if the connection is lost before"""
    folder = ""
    while True:
        try:
            report: dict[str, Any] = send_control_request(connection, "backup", {"action": "show"})
        except (ConnectionLost, TimeoutError) as error:
            raise _lost_error(error, folder) from error
        folder = report["folder"]
        if report["state"] != "running":
            return report
        on_report(report)
        time.sleep(POLL_S)


def _lost_error(error: Exception, folder: str) -> click.ClickException:
    left = f"delete {folder}" if folder else "the next backup names what it has left"
    return click.ClickException(
        f"no backup was made yet: {error}; if the broker still runs, its backup goes on, and if it was killed, {left}"
    )


def _print_result(report: dict[str, Any]) -> None:
    """Print the path of a backup that is complete on standard output, for scripts, and its figures on standard error.

    Raises: click.ClickException if it is not
    """
    if report["state"] == "failed":
        raise click.ClickException(f"no backup was made: {report['error']}")
    if report["state"] != "done":
        raise click.ClickException("no backup was made: it was stopped")
    grown = f"; the file of the checkpoint has grown by {report['growth']:,} bytes" if report["growth"] else ""
    terminal.echo(report["folder"])
    terminal.echo(f"{report['copied']:,} bytes, the state after batch {report['batch']:,}{grown}", err=True)


@click.command()
@click.argument("backup", metavar="BACKUP", type=PathParam())
@click.argument("new", metavar="NEW", type=PathParam())
def restore(backup: Path, new: Path) -> None:
    """Make a data folder of a backup.

    BACKUP is a folder that `truenext backup` made, NEW a folder that does not exist or is empty. Checks each file, and
    everything in the store. The new folder has an identity of its own: for clients its broker is another one, which may
    run beside the original; see docs/backup.md.

    Exits 0 if NEW is a data folder, 1 if the backup is damaged, 2 if nothing was restored for another reason. Then
    there is nothing in NEW.
    """
    try:
        with progress_bar("restored") as on_progress:
            restored = restore_backup(backup, new, on_progress, last_batch_chunk)
    except OSError as error:
        raise NoAnswerFailure(error) from error
    _print_notes(restored, backup, new)
    _print_restored(restored, backup, new)


def _print_notes(restored: Restored, backup: Path, new: Path) -> None:
    if restored.foreign:
        names = ", ".join(map(terminal.escape_line, restored.foreign))
        terminal.echo(f"note: not restored, as the backup was made without it: {names}", err=True)
    owner, other = (user_name(path.stat().st_uid) for path in (new, backup))
    if owner != other:
        terminal.echo(
            f"note: {new} belongs to {owner}, and the backup to {other}: if the broker runs as {other}, "
            f"`chown -R {other} {quote(str(new))}`",
            err=True,
        )


def _print_restored(restored: Restored, backup: Path, new: Path) -> None:
    manifest = restored.manifest
    terminal.echo(
        f"{new} has the state after batch {manifest.batch:,}, of {manifest.made}. Its identity is {restored.identity}; "
        f"that of {backup} was {manifest.identity}."
    )
    users = " --users FILE" if manifest.users else ""
    if manifest.users:
        terminal.echo("The broker had users: name a copy of its users file, which is not in the backup.")
    terminal.echo(f"`truenext serve --data {quote(str(new))}{users}` starts a broker with it.")
