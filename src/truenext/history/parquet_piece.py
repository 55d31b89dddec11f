"""Piece of a history whose events are in Parquet files only.

A broker runs `python -m truenext.history.parquet_piece FOLDER FILE EVENT [causes]` as a process of the lowest priority.
It prints the number of the event behind the piece, and behind this line a stream of Arrow with the events from EVENT on
of the files with this name.
"""

from __future__ import annotations

import os
import sys
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from truenext.history.files import parquet_files
from truenext.history.table import SCHEMA

EVENTS_MAX = 100_000
"""Number of events in a piece."""


def parquet_piece(folder: Path, stem: str, event: int, with_causes: bool) -> tuple[int, bytes]:
    """Return the number of the event behind the piece, and the events as a stream of Arrow; no bytes if there are none.
    Without `with_causes` each cause is an empty text.

    Raises: OSError if a file cannot be read
    """
    files = parquet_files(folder, stem)
    try:
        tables = [pq.read_table(path, filters=pc.field("event") >= event, partitioning=None) for path in files]
    except FileNotFoundError:
        # Deleted since they were listed, as all days of one name are: the next look at all files says so.
        return event, b""
    if not tables:
        return event, b""
    # A day may begin with events of an earlier number, as the clock may be set back.
    table = pa.concat_tables(tables, promote_options="default").sort_by("event").slice(0, EVENTS_MAX)
    if not len(table):
        return event, b""
    end = table["event"][-1].as_py() + 1
    if not with_causes:
        hidden = pc.if_else(pc.is_valid(table["cause"]), "", pa.scalar(None, pa.string()))
        table = table.set_column(table.schema.get_field_index("cause"), "cause", hidden)
    return end, encode_stream(table)


def encode_stream(table: pa.Table) -> bytes:
    known = [name for name in SCHEMA.names if name in table.schema.names]
    target = BytesIO()
    with ipc.new_stream(target, table.select(known).schema, options=ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_table(table.select(known))
    return target.getvalue()


def main(folder: str, stem: str, event: str, causes: str) -> None:
    os.nice(19)
    end, content = parquet_piece(Path(folder), stem, int(event), bool(causes))
    sys.stdout.buffer.write(b"%d\n" % end + content)


if __name__ == "__main__":
    main(*sys.argv[1:])
