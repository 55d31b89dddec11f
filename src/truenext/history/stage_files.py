"""Files with the events of stages: their names, and how long they are kept. docs/stages-running.md

    FOLDER/019a3c5e7f20a1b2c3d4-000001.jsonl     the first file of one process

The first part of a name is the process, and starts with the time of its start; the second part counts its files. Any
number of processes may write into one folder, on one machine or on several.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from truenext.model.limits import HISTORY_BYTES_MAX, HISTORY_DAYS_MAX

FORMAT = 2
"""Version of the records. An audit rejects files of another version, lower ones too."""
SUFFIX = ".jsonl"
FILE_BYTES_MAX = 16 * 1024 * 1024
"""Size after which a new file is started."""
FILE_SECONDS_MAX = 24 * 3600
"""Age after which a new file is started, so that a file is never much older than the day on which it ends."""


def stage_file(folder: Path, process: str, number: int) -> Path:
    return folder / f"{process}-{number:06}{SUFFIX}"


def stage_files(folder: Path) -> list[Path]:
    """Return the files process by process, the oldest process first, each in the order of its files."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def delete_old_files(
    folder: Path, *, bytes_max: int = HISTORY_BYTES_MAX, days_max: int = HISTORY_DAYS_MAX
) -> list[Path]:
    """Delete files that are too old or too much, as with the history, but never the newest: those that have not
    grown for longest first. Return the deleted files.

    Another process may still have such a file open, and then starts another one.
    """
    files = sorted(_with_times(folder))
    oldest = time.time() - days_max * 24 * 3600
    too_much = sum(size for _, _, size in files) - bytes_max
    deleted = []
    # The caller has just started the newest.
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
