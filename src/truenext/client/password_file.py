"""Password file: reads the file for each login, so that the next reconnect uses a changed password."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from truenext.client.core.credentials import Credentials, check_login_text
from truenext.errors import ConfigurationError

PASSWORD_FILE_BYTES_MAX = 1024


def current_password(credentials: Credentials) -> str | None:
    """Return the password for a login; None if the credentials have none.

    Raises: ConfigurationError if the password file cannot be read, or has no password
    """
    path = credentials.password_file
    if path is None:
        return credentials.password
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigurationError(f"password file {path!r} is not a regular file")
            content = file.read(PASSWORD_FILE_BYTES_MAX + 1)
        password = content.partition(b"\n")[0].removesuffix(b"\r").decode()
        check_login_text("its first line", password)
    except OSError as error:
        raise ConfigurationError(f"password file {path!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        # A path with a NUL gives a ValueError, too. The text of a UnicodeDecodeError has bytes of the password.
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise ConfigurationError(f"password file {path!r} cannot be used: {reason}") from None
    if len(content) > PASSWORD_FILE_BYTES_MAX:
        raise ConfigurationError(f"password file {path!r} has more than {PASSWORD_FILE_BYTES_MAX} bytes")
    if not password:
        raise ConfigurationError(f"password file {path!r} has no password in its first line")
    return password


def _open_without_waiting(path: str, flags: int) -> int:
    # Otherwise opening a named pipe would wait for its writer.
    return os.open(path, flags | os.O_NONBLOCK)


def absolute_paths(**paths: Path | str | None) -> dict[str, str | None]:
    """Return the paths of files as absolute paths, so that they stay valid if the current folder changes."""
    return {name: None if path is None else str(Path(path).absolute()) for name, path in paths.items()}
