"""Export of history as Parquet files, one row per event, and deletion of old history.

    history/events/date=2026-11-21/0000000000000001.parquet     made from 0000000000000001.history, then deleted

A Parquet file is written under another name, synced, and renamed. So readers of the folder see all of the file or
nothing. If a crash comes before the `.history` file is deleted, the next run writes the same Parquet files again.

If numpy and pyarrow are installed, a broker runs `python -m truenext.history.export FOLDER BYTES DAYS` as a process of
the lowest priority.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from truenext.errors import HistoryError
from truenext.history.files import EVENTS_FOLDER as EVENTS_FOLDER
from truenext.history.files import PARQUET_SUFFIX, chunks_of_file, history_files, parquet_files
from truenext.model.limits import HISTORY_BYTES_MAX, HISTORY_DAYS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

logger = logging.getLogger(__name__)

INSTALL_HINT = "pip install 'truenext[spark]'"
"""Command that installs numpy and pyarrow."""


def can_write_parquet() -> bool:
    """Return whether numpy and pyarrow are installed, without importing them, which would take some 100 MiB of
    memory."""
    return all(find_spec(name) is not None for name in ("numpy", "pyarrow"))


def export_closed_files(folder: Path) -> Iterator[Path]:
    """Turn each history file but the last, which may still grow, into Parquet files, and delete it. Yield the path of
    each file that was deleted.

    Raises: HistoryError if a file is no history file, or numpy or pyarrow is missing; OSError if the disk fails
    """
    for path in history_files(folder)[:-1]:
        try:
            table = _read_table(path)
        except FileNotFoundError:
            # Another process was quicker.
            continue
        write_by_date(table, folder / EVENTS_FOLDER, path.stem)
        path.unlink(missing_ok=True)
        yield path


def export_all(folder: Path, target: Path) -> list[Path]:
    """Return Parquet files that together have every event once. For history that is not Parquet yet, new files are
    written in the folder `target`; the history's folder stays as it is.

    May be called while the broker runs and exports.

    Raises: HistoryError if a file is no history file, or numpy or pyarrow is missing; OSError if the disk fails
    """
    files: dict[str, list[Path]] = {}
    paths = history_files(folder)
    for file in parquet_files(folder):
        files.setdefault(file.stem, []).append(file)
    for path in paths:
        # A file that the broker exported since the listing is among the Parquet files, or no longer here.
        if path.stem not in files:
            source = folder / EVENTS_FOLDER
            with suppress(FileNotFoundError):
                write_by_date(_read_table(path), target, path.stem)
                source = target
            files[path.stem] = list(source.glob(f"date=*/{path.stem}{PARQUET_SUFFIX}"))
    return [file for stem in sorted(files) for file in sorted(files[stem])]


def write_by_date(table: pa.Table, folder: Path, stem: str) -> list[Path]:
    """Write one Parquet file for each day in the table, and return the paths. Each file is synced before it appears, so
    readers of the folder see all of it or nothing."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    written = []
    dates = pc.strftime(table["at"], format="%Y-%m-%d")
    for date in dates.unique().to_pylist():
        day = folder / f"date={date}"
        day.mkdir(parents=True, exist_ok=True)
        new = folder / f".{stem}-{date}-{os.getpid()}"
        with new.open("wb") as file:
            pq.write_table(table.filter(pc.equal(dates, date)), file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        written.append(new.rename(day / f"{stem}{PARQUET_SUFFIX}"))
    return written


def delete_old_files(
    folder: Path, *, bytes_max: int = HISTORY_BYTES_MAX, days_max: int = HISTORY_DAYS_MAX
) -> list[Path]:
    """Delete history older than `days_max` days, and the oldest files beyond `bytes_max` bytes. The history file that
    still grows is never deleted. Returns the paths of the deleted files.

    The age of a history file is the time since it was last written. Parquet files of one name have the days of one
    history file, and go together: a reader takes the number in the name for that of the first event that is there.
    """
    days: dict[str, list[Path]] = {}
    for path in parquet_files(folder):
        days.setdefault(path.stem, []).append(path)
    groups = [*days.values(), *([path] for path in history_files(folder)[:-1])]
    sizes = {path: path.stat().st_size for group in groups for path in group}
    first = datetime.now(UTC) - timedelta(days=days_max)
    too_much = sum(sizes.values()) - bytes_max
    deleted = []
    for group in groups:
        if too_much <= 0 and not all(_is_before(path, first) for path in group):
            continue
        for path in group:
            path.unlink()
            too_much -= sizes[path]
            deleted.append(path)
            if path.suffix == PARQUET_SUFFIX and not any(path.parent.iterdir()):
                path.parent.rmdir()
    return deleted


def _is_before(path: Path, first: datetime) -> bool:
    """Return whether all events of a file happened before a time: of a Parquet file by its day."""
    if path.suffix == PARQUET_SUFFIX:
        return path.parent.name < f"date={first:%Y-%m-%d}"
    return path.stat().st_mtime < first.timestamp()


def try_to_delete_old_files(folder: Path, bytes_max: int, days_max: int) -> None:
    """Call `delete_old_files`. An error of the disk is logged, not raised."""
    try:
        delete_old_files(folder, bytes_max=bytes_max, days_max=days_max)
    except OSError as error:
        logger.error("old history not deleted", extra={"error": str(error)})


def _read_table(path: Path) -> pa.Table:
    try:
        from truenext.history.table import arrow_table_of
    except ImportError as error:
        raise HistoryError(
            f"Parquet needs numpy and pyarrow ({error}): {INSTALL_HINT}; the history in {path.parent} was left as it is"
        ) from error
    return arrow_table_of(chunks_of_file(path))


def main(folder: Path, bytes_max: int, days_max: int) -> None:
    os.nice(19)
    try:
        # A data folder may be moved after its broker was killed, and a new one made in its place. The old history must
        # not get there.
        os.chdir(folder)
    except OSError as error:
        logger.error("history not exported", extra={"error": str(error)})
        return
    try:
        for _ in export_closed_files(Path()):
            pass
    except (HistoryError, OSError) as error:
        logger.error("history not exported", extra={"error": f"{folder}: {error}"})
    try_to_delete_old_files(Path(), bytes_max, days_max)


if __name__ == "__main__":
    # This process writes to the broker's standard error, so it logs in the broker's format.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s error=%(error)r")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
