"""Tables of a log in PostgreSQL, in a schema of their own.

    log        number bigint, part int          ->  epoch int, format int, digest bytea, payload bytea
    kept       key bytea                        ->  generation int, record bytea, mark bytea
    fact       kind text, name bytea            ->  value bytea
    position   (one row)                            number bigint, digest bytea
    member     name text                        ->  host text, place text, role text, epoch int, number bigint,
                                                    users text, at timestamptz

`log` has the rows of the log (log.py). A payload of more than PART_BYTES_MAX bytes is in several parts, which are
numbered from 0. `format` is LOG_FORMAT (checkpoint_format.py) in the row of a takeover, and null in all others. The
table is partitioned: `log_0` has the numbers 0 to 4095, `log_1` the next 4096, and so on.

All rows of the log up to the one in `position` add up to `kept`, the messages and contents, and `fact`, all other
state. A message's `generation` is null if it is persistent. A transient message counts only if its generation is the
one in `fact`. `mark` is what `encode_mark` returns (checkpoint_format.py); it is null for NO_MARK without causes.

The facts, with numbers in big-endian:

    identity                                    ->  eight hexadecimal digits
    layout                                      ->  u32     LAYOUT_VERSION
    generation                                  ->  u32     of the transient messages that count
    queue               queue number u32        ->  name
    paused              queue number u32        ->  nothing
    producer            BLAKE2b-128 of the name ->  MessagePack: name, ProducerState (batch.py)
    timer               timer (record.py)       ->  nothing
    sequence limit                              ->  u64
    redelivered below                           ->  u64
    clean stop                                  ->  u8      0 or 1
    history                                     ->  u64 next run, u64 next event
    kept bytes                                  ->  u64     in use by `kept`: its records and marks, and KEPT_ROW_BYTES
                                                            for each of its rows
    origin                                      ->  u64 system identifier, u32 timeline of the last takeover
    later origin                                ->  the same of the later one that a broker has followed elsewhere, if
                                                            this server is a former primary
    active                                      ->  u32 failover_after_ms, u8 replicated (0 or 1), u64 number of the row
                                                            of its takeover, and place of the last active broker
    stop                                        ->  u64 last row of a clean stop, name of the heir
    earlier identity    eight hexadecimal digits->  u64 last row of the log when it had this identity

Each broker describes itself in `member` once a second: for people, for the choice of an heir, and so that no two use
one name. No takeover is decided by that.

If you change anything here, increase LAYOUT_VERSION.
"""

from __future__ import annotations

import struct
from typing import Any, LiteralString

import psycopg
from psycopg import errors, sql

from truenext.errors import ConfigurationError
from truenext.model.database import SCHEMA_NAME

Connection = psycopg.Connection[Any]

LAYOUT_FACT = struct.Struct(">I")

LAYOUT_VERSION = 2

_LAYOUT_WITHOUT_MEMBERS = 1
"""Layout that had no table `member`."""

UNFINISHED_LAYOUT = 0
"""Value of the fact `layout` while the log is being made from a folder that is not its copy yet."""

KEPT_ROW_BYTES = 100
"""Estimated bytes of a row of `kept` beside its record and mark: key, index, and what PostgreSQL itself stores."""

PARTITION_ROWS = 4096
"""Count of numbers in one partition of `log`."""

PARTITIONS_AHEAD = 4
"""Number of partitions that are attached before their rows are appended."""

DROP_LOCK_TIMEOUT_MS = 50
"""Time for which the drop of a partition may wait for its lock. Meanwhile appends wait, too."""

PART_BYTES_MAX = 16 * 1024 * 1024
"""Largest number of bytes of a payload in one part."""


_COLUMNS = {
    "log": (
        ("number", "bigint"),
        ("part", "integer"),
        ("epoch", "integer"),
        ("format", "integer"),
        ("digest", "bytea"),
        ("payload", "bytea"),
    ),
    "kept": (("key", "bytea"), ("generation", "integer"), ("record", "bytea"), ("mark", "bytea")),
    "fact": (("kind", "text"), ("name", "bytea"), ("value", "bytea")),
    "position": (("number", "bigint"), ("digest", "bytea")),
    "member": (
        ("name", "text"),
        ("host", "text"),
        ("place", "text"),
        ("role", "text"),
        ("epoch", "integer"),
        ("number", "bigint"),
        ("users", "text"),
        ("at", "timestamp with time zone"),
    ),
}
"""Columns of each table, with their types."""

_MEMBER_TABLE: LiteralString = """
    CREATE TABLE {member} (
        name text PRIMARY KEY,
        host text NOT NULL,
        place text NOT NULL,
        role text NOT NULL,
        epoch integer NOT NULL,
        number bigint NOT NULL,
        users text NOT NULL,
        at timestamptz NOT NULL
    ) WITH (fillfactor = 50)
    """

# A row of the log is read once or twice, soon after it was written, and its partition is dropped as a whole: neither
# compression nor autovacuum pays.
_TABLES: tuple[LiteralString, ...] = (
    """
    CREATE TABLE {log} (
        number bigint NOT NULL,
        part integer NOT NULL,
        epoch integer NOT NULL,
        format integer,
        digest bytea NOT NULL,
        payload bytea NOT NULL,
        PRIMARY KEY (number, part)
    ) PARTITION BY RANGE (number)
    """,
    "ALTER TABLE {log} ALTER payload SET STORAGE EXTERNAL",
    """
    CREATE TABLE {kept} (key bytea PRIMARY KEY, generation integer, record bytea NOT NULL, mark bytea)
    WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.5)
    """,
    "ALTER TABLE {kept} ALTER record SET STORAGE EXTERNAL",
    # To find transient messages that were dropped.
    "CREATE INDEX kept_transient ON {kept} (generation, key) WHERE generation IS NOT NULL",
    "CREATE TABLE {fact} (kind text, name bytea, value bytea NOT NULL, PRIMARY KEY (kind, name))",
    "CREATE TABLE {position} (number bigint NOT NULL, digest bytea NOT NULL)",
    "CREATE UNIQUE INDEX position_is_one_row ON {position} ((true))",
    _MEMBER_TABLE,
)


def statement(schema: str, text: LiteralString, **names: sql.Composable) -> sql.Composed:
    """Return a statement in which `{log}`, `{kept}`, `{fact}`, `{position}` and `{member}` are the tables in this
    schema. `names` has its further placeholders."""
    tables = {name: sql.Identifier(schema, name) for name in _COLUMNS}
    return sql.SQL(text).format(**tables, **names)


def check_schema_name(schema: str) -> None:
    """Raises: ConfigurationError if a schema may not have this name"""
    if not SCHEMA_NAME.fullmatch(schema):
        raise ConfigurationError(
            f"{schema!r} cannot be the schema of a log: name one with at most 63 characters of a-z, 0-9 and _, the "
            "first of them no digit"
        )


def create_layout(connection: Connection, schema: str) -> None:
    """Create the tables, without a row and without a partition, in a schema that exists. Call it in a transaction.

    Raises: psycopg.Error, for example if a table exists already
    """
    for table in _TABLES:
        connection.execute(statement(schema, table))


def drop_layout(connection: Connection, schema: str) -> None:
    """Drop the tables and all that is in them. Raises: psycopg.Error"""
    connection.execute(statement(schema, "DROP TABLE IF EXISTS {log}, {kept}, {fact}, {position}, {member}"))


def upgrade_layout(connection: Connection, schema: str) -> None:
    """Add what a readable log of an earlier version lacks. Raises: psycopg.Error"""
    if _read_layout_fact(connection, schema) == LAYOUT_VERSION:
        return
    with connection.transaction():
        connection.execute(statement(schema, "LOCK TABLE {fact} IN SHARE ROW EXCLUSIVE MODE"))
        if _read_layout_fact(connection, schema) == _LAYOUT_WITHOUT_MEMBERS:
            connection.execute(statement(schema, _MEMBER_TABLE))
            mark_layout(connection, schema, LAYOUT_VERSION)


def mark_layout(connection: Connection, schema: str, layout: int) -> None:
    connection.execute(
        statement(schema, "UPDATE {fact} SET value = %s WHERE kind = 'layout'"), (LAYOUT_FACT.pack(layout),)
    )


# ---- Checks ----


def schema_exists(connection: Connection, schema: str) -> bool:
    return bool(_value(connection, "SELECT count(*) FROM pg_catalog.pg_namespace WHERE nspname = %s", schema))


def has_schema_right(connection: Connection, schema: str, right: str) -> bool:
    """Return whether the role has a right on a schema that exists."""
    return bool(_value(connection, "SELECT has_schema_privilege(%s, %s)", schema, right))


def tables_in(connection: Connection, schema: str) -> set[str]:
    """Return the names of all tables in a schema, views and indexes included."""
    rows = connection.execute(
        """
        SELECT relname::text FROM pg_catalog.pg_class
        JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = relnamespace WHERE nspname = %s
        """,
        (schema,),
    )
    return {name for (name,) in rows}


def check_layout(connection: Connection, schema: str) -> None:
    """Check that a broker can use the tables.

    Raises: ConfigurationError if the schema is missing, has no log or one of another version, a crash would empty one
    of its tables, or the role lacks a right
    """
    if absence := _absence(connection, schema):
        raise ConfigurationError(f"{absence}: run `truenext store init URL --schema {schema}`, or name another schema")
    check_readable_layout(connection, schema)
    for table in unlogged_tables(connection, schema):
        raise ConfigurationError(
            f"table {table!r} is UNLOGGED, and PostgreSQL empties it after a crash: run "
            f'ALTER TABLE "{schema}"."{table}" SET LOGGED'
        )
    missing = [
        f"{right} on schema {schema!r}"
        for right in ("USAGE", "CREATE")
        if not has_schema_right(connection, schema, right)
    ]
    # Only the owner of a table attaches and drops its partitions.
    rows = connection.execute(
        """
        SELECT relname::text, pg_catalog.pg_get_userbyid(relowner)::text FROM pg_catalog.pg_class
        JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = relnamespace
        WHERE nspname = %s AND relname = ANY(%s) AND NOT pg_catalog.pg_has_role(relowner, 'USAGE')
        ORDER BY relname
        """,
        (schema, list(_COLUMNS)),
    )
    missing += [f"the rights of {owner!r}, the owner of table {name!r}" for name, owner in rows]
    if missing:
        raise _missing_rights(connection, missing)


def check_readable_layout(connection: Connection, schema: str) -> None:
    """Check that the tables are there and can be read.

    Raises: ConfigurationError if the schema is missing, has no log or one of another version, or the role lacks a right
    """
    if absence := _absence(connection, schema):
        raise ConfigurationError(f"{absence}: name the database and the schema of a broker (its --store and --schema)")
    if not _has_columns(connection, schema):
        raise ConfigurationError(
            f"schema {schema!r} has tables that are not those of a log of truenext: name another schema"
        )
    _check_readable(connection, schema)
    found = _read_layout_fact(connection, schema)
    if found == UNFINISHED_LAYOUT:
        raise ConfigurationError(
            f"the log in schema {schema!r} is unfinished, because `truenext store init` was interrupted: repeat that "
            "command"
        )
    if found not in (LAYOUT_VERSION, _LAYOUT_WITHOUT_MEMBERS):
        raise ConfigurationError(
            f"the log in schema {schema!r} has layout {found}; this truenext reads layout {LAYOUT_VERSION}: use the "
            "version that wrote it, or name another schema"
        )


def _absence(connection: Connection, schema: str) -> str:
    """Return that the schema is missing, or has no log; empty if it has tables."""
    check_schema_name(schema)
    if not schema_exists(connection, schema):
        return f"the database has no schema {schema!r}"
    return "" if tables_in(connection, schema) else f"schema {schema!r} has no log yet"


def unlogged_tables(connection: Connection, schema: str) -> list[str]:
    """Return the names of the log's tables, partitions included, that PostgreSQL empties after a crash."""
    rows = connection.execute(
        """
        SELECT relname::text FROM pg_catalog.pg_class
        JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = relnamespace
        WHERE nspname = %s AND relpersistence <> 'p' AND relkind IN ('r', 'p')
            AND (relname = ANY(%s) OR relname ~ '^log_[0-9]+$') ORDER BY relname
        """,
        (schema, list(_COLUMNS)),
    )
    return [name for (name,) in rows]


def _has_columns(connection: Connection, schema: str) -> bool:
    found = _columns_in(connection, schema)
    return {"member": _COLUMNS["member"], **found} == _COLUMNS


def _columns_in(connection: Connection, schema: str) -> dict[str, tuple[tuple[str, str], ...]]:
    rows = connection.execute(
        """
        SELECT relname::text, array_agg(attname::text ORDER BY attnum),
            array_agg(pg_catalog.format_type(atttypid, NULL) ORDER BY attnum)
        FROM pg_catalog.pg_attribute JOIN pg_catalog.pg_class AS class ON class.oid = attrelid
        JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = relnamespace
        WHERE nspname = %s AND relname = ANY(%s) AND attnum > 0 AND NOT attisdropped GROUP BY relname
        """,
        (schema, list(_COLUMNS)),
    )
    return {name: tuple(zip(names, types, strict=True)) for name, names, types in rows}


def _check_readable(connection: Connection, schema: str) -> None:
    if not has_schema_right(connection, schema, "USAGE"):
        raise _missing_rights(connection, [f"USAGE on schema {schema!r}"])
    found = tables_in(connection, schema)
    missing = [
        f"SELECT on table {name!r}"
        for name in _COLUMNS
        if name in found and not _value(connection, "SELECT has_table_privilege(%s, 'SELECT')", f"{schema}.{name}")
    ]
    if missing:
        raise _missing_rights(connection, missing)


def _missing_rights(connection: Connection, missing: list[str]) -> ConfigurationError:
    role = _value(connection, "SELECT current_user::text")
    return ConfigurationError(
        f"the role {role!r} lacks rights in the database: {', '.join(missing)}; grant them, or use another role"
    )


def read_layout(connection: Connection, schema: str) -> int | None:
    """Return the version of the tables in a schema; None if these are not the tables of a log.

    Raises: ConfigurationError if the role may not read them
    """
    if not _has_columns(connection, schema):
        return None
    _check_readable(connection, schema)
    return _read_layout_fact(connection, schema)


def _read_layout_fact(connection: Connection, schema: str) -> int:
    row = connection.execute(
        statement(schema, "SELECT value FROM {fact} WHERE kind = 'layout'"), binary=True
    ).fetchone()
    return -1 if row is None else int.from_bytes(row[0])


def _value(connection: Connection, query: LiteralString, *parameters: object) -> Any:
    row = connection.execute(query, parameters).fetchone()
    return None if row is None else row[0]


# ---- Partitions ----


def partition_of(number: int) -> int:
    """Return the number of the partition that has the row with this number."""
    return number // PARTITION_ROWS


def partitions_in(connection: Connection, schema: str) -> list[int]:
    """Return the numbers of the attached partitions, in order."""
    rows = connection.execute(
        """
        SELECT relname::text FROM pg_catalog.pg_inherits JOIN pg_catalog.pg_class AS class ON class.oid = inhrelid
        WHERE inhparent = pg_catalog.to_regclass(%s)
        """,
        (_regclass(schema, "log"),),
    )
    return sorted(int(name.removeprefix("log_")) for (name,) in rows)


def keep_partitions(connection: Connection, schema: str) -> None:
    """Keep all partitions until the end of the transaction. Call it before the transaction reads anything: its snapshot
    does not have the rows of a partition that is dropped after the snapshot was taken."""
    connection.execute(statement(schema, "LOCK TABLE ONLY {log} IN ACCESS SHARE MODE"))


def size_of_compacted_partitions(connection: Connection, schema: str, position: int) -> int:
    """Return the bytes of the partitions that have only rows up to `position`, and are not dropped yet."""
    end = (position + 1) // PARTITION_ROWS
    tables = [
        _regclass(schema, f"log_{partition}") for partition in partitions_in(connection, schema) if partition < end
    ]
    size = _value(
        connection, "SELECT sum(pg_total_relation_size(to_regclass(name))) FROM unnest(%s::text[]) AS name", tables
    )
    return int(size or 0)


def attach_partitions(connection: Connection, schema: str, number: int) -> None:
    """Attach the partition of row `number` and the next ones, unless they are attached. Several brokers may do this at
    the same time, also while rows are appended. It waits for a takeover that is in progress.

    Raises: psycopg.Error, for example if the disk is full
    """
    first = partition_of(number)
    needed = range(first, first + PARTITIONS_AHEAD)
    if set(partitions_in(connection, schema)).issuperset(needed):
        return
    with connection.transaction():
        # Before the tables are made: each other broker finds them attached, or makes them itself.
        connection.execute(statement(schema, "LOCK TABLE ONLY {log} IN SHARE UPDATE EXCLUSIVE MODE"))
        attached = partitions_in(connection, schema)
        for partition in needed:
            if partition not in attached:
                _attach(connection, schema, partition)


def _attach(connection: Connection, schema: str, partition: int) -> None:
    # Made apart, because CREATE TABLE ... PARTITION OF needs an ACCESS EXCLUSIVE lock on `log`.
    names = {
        "partition": sql.Identifier(schema, f"log_{partition}"),
        "low": sql.Literal(partition * PARTITION_ROWS),
        "high": sql.Literal((partition + 1) * PARTITION_ROWS),
    }
    connection.execute(
        statement(
            schema,
            """
            CREATE TABLE {partition} (
                LIKE {log} INCLUDING STORAGE INCLUDING INDEXES, CHECK (number >= {low} AND number < {high})
            ) WITH (autovacuum_enabled = false, toast.autovacuum_enabled = false)
            """,
            **names,
        )
    )
    connection.execute(
        statement(schema, "ALTER TABLE {log} ATTACH PARTITION {partition} FOR VALUES FROM ({low}) TO ({high})", **names)
    )


def drop_partitions(connection: Connection, schema: str, below: int) -> list[int] | None:
    """Drop the partitions that have only rows with numbers lower than `below`, and return their numbers. The partition
    of the newest row stays, and all rows after the position. Return None if nothing was dropped because another session
    uses the table, such as a backup.

    Raises: psycopg.Error
    """
    try:
        with connection.transaction():
            connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(DROP_LOCK_TIMEOUT_MS)))
            return _drop_partitions(connection, schema, below)
    except errors.LockNotAvailable:
        return None


def _drop_partitions(connection: Connection, schema: str, below: int) -> list[int]:
    row = connection.execute(
        statement(schema, "SELECT (SELECT number FROM {position}), (SELECT max(number) FROM {log})")
    ).fetchone()
    if row is None or row[0] is None or row[1] is None:
        return []
    position, newest = row
    end = min(below, position + 1, partition_of(newest) * PARTITION_ROWS) // PARTITION_ROWS
    dropped = [partition for partition in partitions_in(connection, schema) if partition < end]
    for partition in dropped:
        connection.execute(
            statement(schema, "DROP TABLE {partition}", partition=sql.Identifier(schema, f"log_{partition}"))
        )
    return dropped


def delete_compacted_rows(connection: Connection, schema: str, least_bytes: int) -> None:
    """Delete the compacted rows of the newest partition, which is not dropped, if they take `least_bytes` or more. The
    newest row stays. PostgreSQL uses their space again. The connection must be in autocommit mode.

    Without this, few large rows could take any space: a partition is dropped only when later ones have rows.

    Raises: psycopg.Error
    """
    if size_of_compacted_rows(connection, schema) < least_bytes:
        return
    # Deleted from the whole table, since the newest partition may be another one meanwhile.
    connection.execute(statement(schema, f"DELETE FROM {{log}} WHERE {_IS_COMPACTED}"))
    newest = connection.execute(statement(schema, "SELECT max(number) FROM {log}")).fetchone()
    assert newest is not None and newest[0] is not None, "the newest row is never deleted"
    partition = sql.Identifier(schema, f"log_{partition_of(newest[0])}")
    connection.execute(sql.SQL("VACUUM (INDEX_CLEANUP on, TRUNCATE off) {}").format(partition))


_IS_COMPACTED: LiteralString = "number <= (SELECT number FROM {position}) AND number < (SELECT max(number) FROM {log})"


def size_of_compacted_rows(connection: Connection, schema: str) -> int:
    """Return the bytes of payload of the compacted rows in the newest partition."""
    newest = connection.execute(statement(schema, "SELECT max(number) FROM {log}")).fetchone()
    if newest is None or newest[0] is None:
        return 0
    first = partition_of(newest[0]) * PARTITION_ROWS
    row = connection.execute(
        statement(schema, f"SELECT sum(octet_length(payload)) FROM {{log}} WHERE number >= %s AND {_IS_COMPACTED}"),
        (first,),
    ).fetchone()
    return 0 if row is None else int(row[0] or 0)


def _regclass(schema: str, table: str) -> str:
    return f'"{schema}"."{table}"'
