"""How a recorded history becomes Parquet files as docs/history.md describes them."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from truenext.client.recorder import Event
from truenext.errors import ConfigurationError, StoreError

INSTALL = "pip install 'truenext[spark]'"


def check_folder(folder: Path) -> None:
    """Make sure that a recording can be written to `folder`, before the work of making one.

    Raises: ConfigurationError if pyarrow is missing, or if something is there already: events of two recordings have
    the same numbers.
    """
    _pyarrow()
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigurationError(f"{folder} is not empty; name a new folder for each recording")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written to: {error.strerror}") from error


def write_recording(events: Sequence[Event], folder: Path) -> list[Path]:
    """Write `events` to `folder`/date=YYYY-MM-DD/, a file for each day (UTC), each under its name once it is complete.

    Raises: ConfigurationError, StoreError if the disk does not take it
    """
    pyarrow = _pyarrow()
    written = []
    try:
        for date, of_a_day in groupby(events, key=lambda event: event.at.date()):
            rows = [msgspec.structs.asdict(event) for event in of_a_day]
            path = folder / f"date={date.isoformat()}" / f"{rows[0]['event']:016}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".unfinished")
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=_schema(pyarrow)), unfinished)
            unfinished.rename(path)
            written.append(path)
    except OSError as error:
        raise StoreError(f"the recording cannot be written to {folder}: {error}") from error
    return written


def _schema(pyarrow: Any) -> Any:
    """All columns but `date`, which is the name of the folder."""
    required = {"event", "run", "at", "kind"}
    kinds = {
        "event": pyarrow.int64(),
        "run": pyarrow.int32(),
        "at": pyarrow.timestamp("us", tz="UTC"),
        "kind": pyarrow.string(),
        "queue": pyarrow.string(),
        "sequence": pyarrow.int64(),
        "priority": pyarrow.int8(),
        "persistent": pyarrow.bool_(),
        "size": pyarrow.int32(),
        "batch": pyarrow.int64(),
        "consumer": pyarrow.int64(),
        "deliveries": pyarrow.int32(),
        "attempts": pyarrow.int32(),
        "reason": pyarrow.string(),
        "mode": pyarrow.string(),
        "window": pyarrow.int32(),
        "target_queue": pyarrow.string(),
        "target_sequence": pyarrow.int64(),
        "count": pyarrow.int64(),
    }
    return pyarrow.schema([pyarrow.field(name, kind, nullable=name not in required) for name, kind in kinds.items()])


def _pyarrow() -> Any:
    # Only recordings need it, so that a broker does without its 100 MiB.
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(
            f"a recording is written as Parquet, by pyarrow, which is missing: {INSTALL}"
        ) from error
    return pyarrow
