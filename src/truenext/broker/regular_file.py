"""Reading of files that a user names. Only regular files are read, because reading a FIFO or a device could make the
broker wait."""

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from truenext.errors import ConfigurationError
from truenext.model.limits import CONFIGURATION_BYTES_MAX

_KINDS_OF_FILES = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_regular_file(file: Path) -> bytes:
    """Return the content of a regular file, without ever waiting for another process.

    Raises: OSError if the file cannot be read; ConfigurationError if it is no regular file, or too large
    """
    # Checked twice: to open a device may have effects, and the opened file may be another one than the first check saw.
    _check_regular(file, file.stat())
    with open(file, "rb", opener=_open_without_waiting) as opened:
        _check_regular(file, os.fstat(opened.fileno()))
        content = opened.read(CONFIGURATION_BYTES_MAX + 1)
    if len(content) > CONFIGURATION_BYTES_MAX:
        raise ConfigurationError(
            f"cannot read {file}: a configuration file has at most {CONFIGURATION_BYTES_MAX} bytes"
        )
    return content


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse the content of a TOML file.

    Raises: ValueError with the fault, if the content is not TOML, or has a number of thousands of digits
    """
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"byte {content[error.start]:#04x} is not UTF-8 (at line {line})") from error
    except RecursionError as error:
        raise ValueError("tables or arrays are nested too deeply") from error


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_regular(file: Path, status: os.stat_result) -> None:
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        # The system refuses to open a directory.
        kind = _KINDS_OF_FILES.get(stat.S_IFMT(status.st_mode), "something else")
        raise ConfigurationError(f"cannot read {file}: it is {kind}, not a regular file: copy its content to one")
