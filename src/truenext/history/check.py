"""Whether the files of a history hold what was written into them. The Parquet files made from them have checksums of
their own, which whoever reads them looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from truenext.errors import HistoryError
from truenext.history.files import chunks_of_file, count_events, history_files
from truenext.model.events import CHUNK, FILE, FROM_BATCH


def last_batch_chunk(folder: Path) -> tuple[int, int] | None:
    """Run and first event of the last chunk of a batch in the newest file that can be read, which the store must have;
    None if nothing tells of one.

    Raises: OSError if the folder cannot be read
    """
    for path in reversed(history_files(folder)):
        last, is_read = None, False
        with suppress(HistoryError, OSError):
            for chunk in chunks_of_file(path):
                is_read = True
                if chunk.flags & FROM_BATCH:
                    last = chunk.run, chunk.first_event
        if is_read:
            return last
    return None


def find_damage(folder: Path) -> Iterator[tuple[str, str]]:
    """Names of files, and what is wrong with them. Raises: OSError"""
    paths = history_files(folder)
    for path in paths:
        end = FILE.size
        next_event = 0
        try:
            for chunk in chunks_of_file(path):
                start = chunk.end - CHUNK.size - len(chunk.blocks)
                if start > end:
                    yield path.name, f"bytes {end} to {start - 1} cannot be read"
                if chunk.first_event < next_event:
                    yield path.name, f"at byte {start}, event {chunk.first_event} follows event {next_event - 1}"
                next_event = chunk.first_event + count_events(chunk)
                end = chunk.end
        except HistoryError as error:
            yield path.name, str(error)
            continue
        size = path.stat().st_size
        # Of the last file a crash may have torn the end.
        if end < size and path != paths[-1]:
            yield path.name, f"bytes {end} to {size - 1} cannot be read"
