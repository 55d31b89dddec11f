"""`truenext history`: export of a broker's history as Parquet."""

from pathlib import Path

import click

from truenext.cli import terminal
from truenext.cli.exit_status import CommandFailure
from truenext.cli.values import PathParam
from truenext.errors import HistoryError
from truenext.history.export import export_all, export_closed_files


@click.group()
def history() -> None:
    """Export the history of a broker.

    The history is the broker's record of every message; see docs/reference/history.md.
    """


@history.command()
@click.argument("data", metavar="DIR", type=PathParam(exists=True, file_okay=False))
@click.option(
    "--out",
    type=PathParam(file_okay=False),
    help="Write all history that is not Parquet yet into this folder, and do not change the broker's files.",
)
def export(data: Path, out: Path | None) -> None:
    """Turn the history of a broker into Parquet files.

    The history is read from the data folder DIR. The files are written to DIR/history/events, or to the folder of
    --out.

    A broker does this itself if numpy and pyarrow are installed. Without --out, the file that a running broker writes
    to is left out. The broker may run meanwhile.
    """
    count = 0
    try:
        folder = data / "history" if (data / "history").exists() else data
        if out is not None:
            count = sum(out in path.parents for path in export_all(folder, out))
        else:
            for path in export_closed_files(folder):
                count += 1
                terminal.echo(f"exported {path.name}")
    except (HistoryError, OSError) as error:
        raise CommandFailure(error) from error
    terminal.echo(f"{count} file{'' if count == 1 else 's'} exported to {out or folder / 'events'}")
