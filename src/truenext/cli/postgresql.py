"""Access to `truenext.store.postgresql`. It needs psycopg, which a broker without PostgreSQL does without, so both are
imported when they are used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truenext.errors import ConfigurationError
from truenext.history.check import last_batch_chunk, next_numbers
from truenext.store.check import SalvageSummary
from truenext.store.log import Log
from truenext.store.salvage.damage import Damage

if TYPE_CHECKING:
    from truenext.store.postgresql.renewal import StoreStatus


def open_log(url: str, schema: str, **options: Any) -> Log:
    """Open a log for a broker. `PostgresqlLog` describes the options.

    Raises: ConfigurationError if psycopg is missing, or the database cannot be used; StoreError if it cannot be read
    """
    require_psycopg()
    from truenext.store.postgresql.log import PostgresqlLog

    return PostgresqlLog(url, schema, **options)


def initialize_log(url: str, schema: str, data: Path | None, on_progress: Callable[[int, int], None]) -> None:
    """Make the tables of a log, with all of a data folder unless `data` is None. `on_progress` gets the bytes of the
    folder that were read, and their total.

    Raises: ConfigurationError if psycopg is missing, or the database or the folder cannot be used; StoreError if one of
    the two fails
    """
    require_psycopg()
    from truenext.store.postgresql.initialization import initialize

    if data is None:
        initialize(url, schema, None, on_progress)
    else:
        initialize(
            url,
            schema,
            data,
            on_progress,
            next_history=next_numbers(data / "history"),
            last_history_chunk=last_batch_chunk(data / "history"),
        )


def check_log(
    url: str, schema: str, on_damage: Callable[[Damage], None], on_progress: Callable[[int, int], None]
) -> SalvageSummary:
    """Check all rows of a log, and return its content. `on_damage` gets each damage, `on_progress` the numbers of rows
    that are done, and of all.

    Raises: ConfigurationError if psycopg is missing, or the database cannot be used; StoreError if it cannot be read
    """
    require_psycopg()
    from truenext.store.postgresql.check import check_log as check

    return check(url, schema, on_damage, on_progress)


def read_status(url: str, schema: str) -> StoreStatus:
    """Read the members of a log, and which rows are missing.

    Raises: ConfigurationError if psycopg is missing, or the database cannot be used; StoreError if it cannot be read
    """
    require_psycopg()
    from truenext.store.postgresql import renewal

    return renewal.read_status(url, schema)


def renew_log(url: str, schema: str, *, is_copy: bool) -> str:
    """Give a log that lacks rows, or with `is_copy` the log of a copied database, a new identity, and return that.

    Raises: ConfigurationError if psycopg is missing, the database cannot be used, or the log needs no new identity;
    StoreError if it cannot be read or written
    """
    require_psycopg()
    from truenext.store.postgresql.renewal import renew

    return renew(url, schema, is_copy=is_copy)


def require_psycopg() -> None:
    """Check that psycopg can be imported.

    Raises: ConfigurationError if it cannot
    """
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        # psycopg itself raises this, too, if it finds no libpq.
        raise ConfigurationError(
            f"messages in PostgreSQL need psycopg ({error}): pip install 'truenext[postgresql-store]'"
        ) from error
