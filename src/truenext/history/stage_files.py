"""Where the events of stages are, and how long they are kept. docs/stages-events.md

    FOLDER/019a3c5e7f20a1b2c3d4-000001.jsonl     the first file of one process

The first part of a name is the process, and begins with the time at which that began; the second part counts its files.
Any number of processes may write into one folder, on one machine or on several.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from truenext.model.limits import HISTORY_BYTES_MAX, HISTORY_DAYS_MAX

FORMAT = 2
"""Of the records. An audit refuses files of another format, lower ones too."""
SUFFIX = ".jsonl"
FILE_BYTES_MAX = 16 * 1024 * 1024
"""A new file begins after so much."""
FILE_SECONDS_MAX = 24 * 3600
"""And after so long, so that a file is never much older than the day on which it ends."""


def stage_file(folder: Path, process: str, number: int) -> Path:
    return folder / f"{process}-{number:06}{SUFFIX}"


def stage_files(folder: Path) -> list[Path]:
    """By process, the oldest first, and in its order."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def delete_old_files(
    folder: Path, *, bytes_max: int = HISTORY_BYTES_MAX, days_max: int = HISTORY_DAYS_MAX
) -> list[Path]:
    """Delete what is too old or too much of all files, as of the history; what has not grown for longest goes first.
    Says what went.

    It may be a file that another process still has open, which begins another one then.
    """
    files = sorted(_with_times(folder))
    oldest = time.time() - days_max * 24 * 3600
    too_much = sum(size for _, _, size in files) - bytes_max
    deleted = []
    # Whoever calls this has just begun the newest.
    for changed, path, size in files[:-1]:
        if changed >= oldest and too_much <= 0:
            break
        with suppress(FileNotFoundError, PermissionError):
            path.unlink()
            deleted.append(path)
        too_much -= size
    return deleted


def _with_times(folder: Path) -> Iterator[tuple[float, Path, int]]:
    for path in stage_files(folder):
        with suppress(FileNotFoundError):
            stat = path.stat()
            yield stat.st_mtime, path, stat.st_size
