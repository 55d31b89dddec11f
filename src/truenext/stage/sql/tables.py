"""Tables of exactly-once processing: processed messages, units to send, and numbers of producers.

    truenext_inbox       a row for each processed message, until 7 days after its acknowledgement
    truenext_outbox      a row for each unit: the messages that one run or one initiation sends, until they are sent
    truenext_producers   the producers of the outbox, their last numbers, and the processes that own them
    truenext_owners      the processes that run, and until when they count as alive
    truenext_keys        the keys under which flows were started, for 7 days
    truenext_replies     the replies and failures of flows under a key, for 7 days
    truenext_schema      a row for each version whose processes may use these tables: the last, and the one before

Times are milliseconds since the epoch, by the clock of the database. Source: docs/stages-database.md
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from truenext.errors import ConfigurationError
from truenext.stage.sql.errors import DatabaseUnavailable, first_line
from truenext.stage.sql.url import address_of

VERSION = 2
"""Version of these tables. This code works with no other version, but with tables that a later version has extended
from this one."""

ADDITIONS: tuple[str, ...] | None = None
"""Statements that make tables of the version before into those of this version, without the tables that are new. They
only add columns and indexes, with which processes of the version before go on. None: tables of the version before
cannot be used."""

LOCK_TIMEOUT_S = 2
"""Time for which an addition waits for transactions that use the table in PostgreSQL. Meanwhile new ones wait, too."""

APPLY_MAX = 5
"""Number of attempts to create the tables. Other processes may create them at the same time."""

_RETRIED = ("23505", "42P07", "42701", "55P03")
"""SQLSTATEs after which another attempt is made: unique_violation, duplicate_table and duplicate_column of another
process that does the same, lock_not_available."""

metadata = sa.MetaData()
"""SQLAlchemy's metadata of these tables. For Alembic: `target_metadata = [yours,
truenext.stage.sql.tables.metadata]`."""

schema = sa.Table("truenext_schema", metadata, sa.Column("version", sa.Integer, primary_key=True, autoincrement=False))

inbox = sa.Table(
    "truenext_inbox",
    metadata,
    sa.Column("id", sa.Uuid(as_uuid=False), primary_key=True),
    # Null until the acknowledgement is known to be final.
    sa.Column("acknowledged_ms", sa.BigInteger),
)
sa.Index(
    "truenext_inbox_acknowledged",
    inbox.c.acknowledged_ms,
    postgresql_where=inbox.c.acknowledged_ms.is_not(None),
    sqlite_where=inbox.c.acknowledged_ms.is_not(None),
)

outbox = sa.Table(
    "truenext_outbox",
    metadata,
    # Id of the message in the inbox, if a stage has written the unit.
    sa.Column("id", sa.Uuid(as_uuid=False), primary_key=True),
    sa.Column("service", sa.String(255), nullable=False),
    # Null until a unit of a program's own transaction gets a number.
    sa.Column("producer", sa.String(64)),
    sa.Column("number", sa.BigInteger),
    sa.Column("interactive", sa.Boolean(create_constraint=False), nullable=False),
    sa.Column("messages", sa.Integer, nullable=False),
    sa.Column("written_ms", sa.BigInteger, nullable=False),
    sa.Column("unit", sa.LargeBinary, nullable=False),
)
sa.Index(
    "truenext_outbox_number",
    outbox.c.producer,
    outbox.c.number,
    postgresql_where=outbox.c.producer.is_not(None),
    sqlite_where=outbox.c.producer.is_not(None),
)
sa.Index(
    "truenext_outbox_unnumbered",
    outbox.c.service,
    outbox.c.interactive,
    outbox.c.written_ms,
    postgresql_where=outbox.c.producer.is_(None),
    sqlite_where=outbox.c.producer.is_(None),
)

# To compress a unit takes longer than to write it, and it is soon deleted.
sa.event.listen(
    outbox,
    "after_create",
    sa.DDL("ALTER TABLE truenext_outbox ALTER COLUMN unit SET STORAGE EXTERNAL").execute_if(  # type: ignore[no-untyped-call]
        dialect="postgresql"
    ),
)

producers = sa.Table(
    "truenext_producers",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("service", sa.String(255), nullable=False),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("used_ms", sa.BigInteger, nullable=False),
)
sa.Index("truenext_producers_owner", producers.c.service, producers.c.owner)

owners = sa.Table(
    "truenext_owners",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("service", sa.String(255), nullable=False),
    sa.Column("instance", sa.String(255), nullable=False),
    sa.Column("alive_until_ms", sa.BigInteger, nullable=False),
)

keys = sa.Table(
    "truenext_keys",
    metadata,
    # Hash of the service and its key.
    sa.Column("id", sa.Uuid(as_uuid=False), primary_key=True),
    # Seed of the ids of all flows under the key.
    sa.Column("seed", sa.Uuid(as_uuid=False), nullable=False),
    # Hash of the flows, without their time; null until they are written.
    sa.Column("content", sa.Uuid(as_uuid=False)),
    sa.Column("started_ms", sa.BigInteger, nullable=False),
)
sa.Index("truenext_keys_started", keys.c.started_ms)


replies = sa.Table(
    "truenext_replies",
    metadata,
    # Id of the key.
    sa.Column("id", sa.Uuid(as_uuid=False), primary_key=True),
    sa.Column("flow", sa.Uuid(as_uuid=False), nullable=False),
    # Endpoint that the flow has asked.
    sa.Column("endpoint", sa.String(255), nullable=False),
    # JSON of the reply, and of the last failure.
    sa.Column("reply", sa.LargeBinary),
    sa.Column("failure", sa.LargeBinary),
    # Time of the start, or of the reply.
    sa.Column("kept_ms", sa.BigInteger, nullable=False),
)
sa.Index("truenext_replies_flow", replies.c.flow)
sa.Index("truenext_replies_kept", replies.c.kept_ms)


_NAME = re.compile(r"truenext_\w+")


def missing_table_text(error: DBAPIError) -> str | None:
    """Return a text that says what to do if a table is missing (SQLSTATE 42P01); otherwise None."""
    if getattr(error.orig, "sqlstate", None) != "42P01" and "no such table" not in str(error.orig):
        return None
    found = _NAME.search(str(error.orig))
    return (
        f"the database has no table {found[0] if found else 'of exactly-once processing'}: create the tables with "
        "`truenext stages schema SERVICE --apply`, or print the statements with --sql"
    )


def unusable_table_text(error: DBAPIError) -> str | None:
    """Return a text that says what to do if a table is missing, has other columns (SQLSTATE 42703), or may not be used
    by this user (42501); otherwise None."""
    missing = missing_table_text(error)
    if missing is not None:
        return missing
    state, text = getattr(error.orig, "sqlstate", None), str(error.orig)
    reason = text.partition("\n")[0]
    if state == "42501":
        return f"a table of exactly-once processing cannot be used ({reason}): grant the right to the service's user"
    if state != "42703" and "no such column" not in text and "has no column named" not in text:
        return None
    found = _NAME.search(f"{error.orig} {error.statement}")
    return (
        f"the table {found[0] if found else 'of exactly-once processing'} is not as `truenext stages schema` makes it "
        f"({reason}): compare it with what `truenext stages schema SERVICE --sql` prints"
    )


_REPLACE_TABLES = (
    "let the version that created them send all messages (`truenext stages outbox SERVICE`), drop the tables "
    "truenext_*, and create them again with `truenext stages schema SERVICE --apply`"
)

_EXTEND_TABLES = "extend them with `truenext stages schema SERVICE --apply`, while processes of that version run on"


def check_versions(found: Collection[int]) -> None:
    """Check the versions whose processes may use the tables.

    Raises: ConfigurationError if VERSION is not one of them
    """
    if VERSION in found:
        return
    if not found:
        raise ConfigurationError(
            "the table truenext_schema has no row with the version of the tables: write it with "
            "`truenext stages schema SERVICE --apply`"
        )
    newest = max(found)
    to_newer = _EXTEND_TABLES if _can_extend(found) else _REPLACE_TABLES
    advice = "update truenext" if newest > VERSION else to_newer
    raise ConfigurationError(
        f"the tables in the database have version {newest}, and this truenext works with version {VERSION}: {advice}"
    )


def _can_extend(found: Collection[int]) -> bool:
    return ADDITIONS is not None and VERSION - 1 in found


def schema_sql(url: str) -> str:
    """Return the statements that create the tables of exactly-once processing.

    Args:
        url: URL of SQLAlchemy. Its kind of database decides the dialect of the statements. No connection is made.

    Raises: ConfigurationError if the URL is invalid
    """
    statements: list[str] = []

    def collect(statement: object, *_: object, **__: object) -> None:
        compiled = statement.compile(dialect=engine.dialect)  # type: ignore[attr-defined]
        lines = (line.rstrip().replace("\t", "    ") for line in str(compiled).strip().splitlines())
        statements.append("\n".join(line for line in lines if line))

    engine = sa.create_mock_engine(address_of(url).for_threads, collect)
    metadata.create_all(engine, checkfirst=False)
    # Indexes of a table come in no fixed order.
    statements.sort(key=lambda each: each if each.startswith("CREATE INDEX") else "")
    return ";\n\n".join([*statements, f"INSERT INTO truenext_schema (version) VALUES ({VERSION})"]) + ";\n"


def create_tables(connection: sa.Connection) -> tuple[list[str], bool]:
    """Create the missing tables in the connection's transaction, and extend those of the version before. Return the
    names of the new tables, and whether the others were extended.

    Raises: ConfigurationError if existing tables are of another version
    """
    existing = set(sa.inspect(connection).get_table_names())
    versions = set(connection.execute(sa.select(schema.c.version)).scalars()) if schema.name in existing else set()
    is_extended = VERSION not in versions and _can_extend(versions)
    if is_extended:
        _extend_tables(connection)
    elif versions:
        check_versions(versions)
    metadata.create_all(connection)
    if VERSION not in versions:
        connection.execute(sa.insert(schema).values(version=VERSION))
    return [name for name in metadata.tables if name not in existing], is_extended


def _extend_tables(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'"))
    for statement in ADDITIONS or ():
        connection.execute(sa.text(statement))
    connection.execute(sa.delete(schema).where(schema.c.version < VERSION - 1))


class AppliedSchema(NamedTuple):
    """Result of `apply_schema`."""

    database: str
    """URL of the database without the password."""
    created: list[str]
    """Names of the created tables."""
    is_extended: bool
    """True if tables of the version before were extended."""


def apply_schema(url: str) -> AppliedSchema:
    """Create the missing tables of exactly-once processing, and extend tables of the version before.

    Args:
        url: URL of SQLAlchemy.

    Raises: ConfigurationError if the URL is invalid, or existing tables are of another version; DatabaseUnavailable
    """
    address = address_of(url)
    with address.loading_driver():
        engine = sa.create_engine(address.for_threads)
    try:
        for attempt in range(APPLY_MAX):
            try:
                with engine.begin() as connection:
                    if connection.dialect.name == "sqlite":
                        # By itself the driver begins no transaction before a statement that changes tables.
                        connection.exec_driver_sql("BEGIN IMMEDIATE")
                    return AppliedSchema(str(address), *create_tables(connection))
            except DBAPIError as error:
                if attempt == APPLY_MAX - 1 or getattr(error.orig, "sqlstate", None) not in _RETRIED:
                    raise
        raise AssertionError("the last attempt raises its error")
    except (SQLAlchemyError, OSError) as error:
        raise DatabaseUnavailable(f"the tables cannot be created in {address}: {first_line(error)}") from error
    finally:
        engine.dispose()
