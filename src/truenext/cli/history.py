"""`truenext history`: what a broker wrote down, as Parquet."""

from pathlib import Path

import click

from truenext.cli.client import Failure
from truenext.errors import HistoryError
from truenext.history.export import export_all, export_ended


@click.group()
def history() -> None:
    """What a broker wrote down of every message; see docs/history.md."""


@history.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write everything that is not Parquet yet into this folder, and leave the broker's files alone.",
)
def export(data: Path, out: Path | None) -> None:
    """Turn the history of the broker in DATA into Parquet files, in DATA/history/events.

    Brokers do that by themselves where numpy and pyarrow are installed. The file that the broker writes to stays as it
    is, unless --out is given. May be run while the broker runs.
    """
    folder = data / "history" if (data / "history").is_dir() else data
    count = 0
    try:
        if out is not None:
            count = sum(out in path.parents for path in export_all(folder, out))
        else:
            for path in export_ended(folder):
                count += 1
                click.echo(f"exported {path.name}")
    except (HistoryError, OSError) as error:
        raise Failure(error) from error
    click.echo(f"{count} file{'' if count == 1 else 's'} exported to {out or folder / 'events'}")
