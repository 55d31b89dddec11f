"""Export of a recorded history to Parquet files, in the form of docs/reference/history.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from truenext.errors import ConfigurationError, StoreError
from truenext.history.export import INSTALL_HINT, write_by_date
from truenext.spark.recorder import HistoryRow


def check_folder(folder: Path) -> None:
    """Create `folder`, and check that a recording can be written to it. To be called before the recording is made.

    Raises: ConfigurationError if pyarrow is missing, or the folder is not empty: two recordings in one folder would use
    the same event numbers
    """
    _pyarrow()
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigurationError(f"{folder} is not empty; name a new folder for each recording")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write to {folder}: {error.strerror}") from error


def write_recording(events: Sequence[HistoryRow], folder: Path) -> list[Path]:
    """Write `events` to `folder`/date=YYYY-MM-DD/, one file for each day (UTC). Each file gets its name once it is
    complete.

    Raises: ConfigurationError if the folder cannot be used; StoreError if the disk is full or fails
    """
    pyarrow = _pyarrow()
    from truenext.history.table import SCHEMA

    table = pyarrow.Table.from_pylist(events, schema=SCHEMA)
    try:
        return write_by_date(table, folder, f"{events[0]['event']:016x}")
    except OSError as error:
        raise StoreError(f"cannot write the recording to {folder}: {error}") from error


def _pyarrow() -> Any:
    # Imported only for recordings, so that a broker does without its 100 MiB.
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(f"a recording needs pyarrow, which is missing: {INSTALL_HINT}") from error
    return pyarrow
