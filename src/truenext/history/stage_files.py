"""Files with the events of stages: names the files, and deletes old ones. Source: docs/stages-running.md

    FOLDER/019a3c5e7f20a1b2c3d4-000001.jsonl     the first file of one process

The first part of a file's name stands for the process, and begins with the time at which the process was started. The
second part counts the files of this process. Any number of processes may write into one folder, on one machine or on
several.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from truenext.model.limits import HISTORY_BYTES_MAX, HISTORY_DAYS_MAX

FORMAT = 2
"""Version of the records. An audit rejects files of any other version."""
SUFFIX = ".jsonl"
FILE_BYTES_MAX = 16 * 1024 * 1024
"""Size from which on a new file is started."""
FILE_SECONDS_MAX = 24 * 3600
"""Age from which on a new file is started, so that no file has events of much more than a day."""


def stage_file(folder: Path, process: str, number: int) -> Path:
    return folder / f"{process}-{number:06}{SUFFIX}"


def stage_files(folder: Path) -> list[Path]:
    """Return the files in a folder, process by process: first those of the oldest process, in the order in which it has
    started them."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def delete_old_files(
    folder: Path, *, bytes_max: int = HISTORY_BYTES_MAX, days_max: int = HISTORY_DAYS_MAX
) -> list[Path]:
    """Delete files that have not grown for `days_max` days, and those beyond `bytes_max` bytes in all; files that have
    not grown for longest go first. The file that was written last is never deleted. Returns the deleted files.

    If another process has a deleted file open, that process starts a new file.
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
