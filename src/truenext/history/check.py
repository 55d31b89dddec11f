"""Check of history files: finds bytes that were changed since they were written. Parquet files made from history files
have checksums of their own, which are verified when the Parquet files are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from truenext.errors import HistoryError
from truenext.history.files import chunks_of_file, count_events, history_files
from truenext.model.events import CHUNK, FILE, FROM_BATCH


def last_batch_chunk(folder: Path) -> tuple[int, int] | None:
    """Return the position (run, first event) of the last chunk that was written with a batch, in the newest readable
    file; None if there is none. If the journal does not have that batch, the end of the journal is lost.

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


def next_numbers(folder: Path) -> tuple[int, int]:
    """Return the lowest run and the lowest event that the history files have not used; (1, 1) if there are none.

    Raises: OSError if the folder cannot be read
    """
    for path in reversed(history_files(folder)):
        numbers = None
        with suppress(HistoryError, OSError):
            for chunk in chunks_of_file(path):
                numbers = chunk.run + 1, chunk.first_event + count_events(chunk)
        if numbers is not None:
            return numbers
    return 1, 1


def find_damage(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each damaged file, with a description of the damage.

    Raises: OSError if the folder or a file cannot be read
    """
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
        # A crash may have torn the end of the last file.
        if end < size and path != paths[-1]:
            yield path.name, f"bytes {end} to {size - 1} cannot be read"
