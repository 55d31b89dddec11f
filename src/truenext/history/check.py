"""Whether the files of a history hold what was written into them. The Parquet files made from them have checksums of
their own, which whoever reads them looks at.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from truenext.errors import HistoryError
from truenext.events import CHUNK, FILE
from truenext.history.files import chunk_at, chunks_of_file, events_in, history_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEARCH_BYTES_MAX = 1 << 32
"""Bytes, some of them many times, whose checksum is computed to find good chunks behind a damaged one."""

_RUN_AT = 8


def damages(folder: Path) -> Iterator[tuple[str, str]]:
    """Names of files, and what is wrong with them. Raises: OSError"""
    paths = history_files(folder)
    for path in paths:
        end = FILE.size
        next_event = 0
        try:
            for chunk in chunks_of_file(path):
                if chunk.first_event < next_event:
                    yield path.name, f"at byte {end}, event {chunk.first_event} follows event {next_event - 1}"
                next_event = chunk.first_event + events_in(chunk)
                end = chunk.end
        except HistoryError as error:
            yield path.name, str(error)
            continue
        size = path.stat().st_size
        behind = next_chunk(memoryview(path.read_bytes()), end) if end < size else None
        if behind is not None:
            yield path.name, f"bytes {end} to {behind - 1} cannot be read, and what stands behind them is not read"
        elif end < size and path != paths[-1]:
            yield path.name, f"bytes {end} to {size - 1} cannot be read"


def next_chunk(content: memoryview, at: int) -> int | None:
    """Where the first whole chunk behind `at` begins, of the run of the file."""
    run = FILE.unpack_from(content)[2]
    held = bytes(content)
    needle = struct.pack("<I", run)
    left = SEARCH_BYTES_MAX
    found = held.find(needle, at + 1 + _RUN_AT)
    while found >= 0 and left > 0:
        start = found - _RUN_AT
        if start + CHUNK.size <= len(held):
            if chunk_at(content, start) is not None:
                return start
            left -= min(CHUNK.unpack_from(held, start)[1], len(held) - start)
        found = held.find(needle, found + 1)
    return None
