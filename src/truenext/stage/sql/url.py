"""Address of a database: the parsed URL, with the drivers for `async` and for plain functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from truenext.errors import ConfigurationError

_PSYCOPG = ("postgresql", "postgresql+psycopg", "postgresql+psycopg_async")
_SQLITE = ("sqlite", "sqlite+pysqlite", "sqlite+aiosqlite")


@dataclass(frozen=True)
class DatabaseAddress:
    """Address of one database, with one driver for `async` functions and one for plain functions."""

    for_tasks: URL
    for_threads: URL
    file: Path | None
    """File of an SQLite database; None for PostgreSQL."""

    def __str__(self) -> str:
        """Return the URL without the password."""
        return self.for_threads.render_as_string()

    @contextmanager
    def loading_driver(self) -> Iterator[None]:
        """Context manager for the creation of the database's engines. Each engine imports its driver, which may be
        missing.

        Raises: ConfigurationError if a driver is not installed
        """
        try:
            yield
        except ImportError as error:
            extra = "postgresql" if self.file is None else "sql"
            raise ConfigurationError(
                f"the driver for {self} is missing ({error}): pip install 'truenext[{extra}]'"
            ) from error


def address_of(url: str) -> DatabaseAddress:
    """Parse a URL such as `postgresql+psycopg://...` or `sqlite:///...`.

    Raises: ConfigurationError if the URL is invalid; the text says what to write instead
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        # The URL itself is not shown, as it may contain a password.
        raise ConfigurationError(
            "the url of the database cannot be read: write postgresql+psycopg://user@host/name or sqlite:////path/name.db"
        ) from error
    if parsed.drivername in _PSYCOPG:
        both = parsed.set(drivername="postgresql+psycopg")
        return DatabaseAddress(both, both, None)
    if parsed.drivername in _SQLITE:
        return DatabaseAddress(
            parsed.set(drivername="sqlite+aiosqlite"), parsed.set(drivername="sqlite+pysqlite"), _file_of(parsed)
        )
    raise ConfigurationError(
        f"stages cannot work with {parsed.drivername}: write postgresql+psycopg://user@host/name or sqlite:////path/name.db"
    )


def _file_of(url: URL) -> Path:
    name = url.database or ""
    if name in ("", ":memory:", "file::memory:") or url.query.get("mode") == "memory":
        raise ConfigurationError(
            f"{url} names no file: each connection would have an empty database of its own, and lose it. "
            "Name a file, such as sqlite:////var/lib/shop/shop.db, or a temporary file in a test"
        )
    return Path(name.removeprefix("file:"))
