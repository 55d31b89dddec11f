"""Tests of the tables of a log in PostgreSQL, and of its partitions."""

import re
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

from tests.contract.postgresql.rows import SCHEMA, Rows, empty_state
from tests.stages.postgres import PostgresServer
from truenext.errors import ConfigurationError
from truenext.store.postgresql.layout import (
    PARTITION_ROWS,
    PARTITIONS_AHEAD,
    Connection,
    attach_partitions,
    check_layout,
    check_readable_layout,
    create_layout,
    drop_partitions,
    partitions_in,
    statement,
)


@pytest.fixture
def other(postgres: PostgresServer, postgres_database: str) -> Iterator[Connection]:
    with postgres.connect(postgres_database) as connection:
        yield connection


@pytest.fixture
def app(connection: Connection, postgres: PostgresServer, postgres_database: str) -> Iterator[Connection]:
    """Connection of a role that has no rights yet."""
    role = f"app_{postgres_database}"
    connection.execute(f"CREATE ROLE {role} LOGIN")
    with psycopg.connect(host=str(postgres.folder), user=role, dbname=postgres_database, autocommit=True) as app:
        yield app
    connection.execute(f"DROP OWNED BY {role}")
    connection.execute(f"DROP ROLE {role}")


# ---- Checks ----


def test_layout_of_a_new_log_passes_the_check(tables: Connection) -> None:
    Rows(tables)
    check_layout(tables, SCHEMA)


@pytest.mark.parametrize("schema", ["", "Main", "1st", 'a"b', "a-b", "a" * 64, "public; DROP TABLE x"])
def test_schema_name_with_other_characters_is_refused(connection: Connection, schema: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be the schema of a log"):
        check_layout(connection, schema)


@pytest.mark.parametrize("schema", ["select", "user", "_1", "a" * 63])
def test_schema_may_have_the_name_of_a_keyword(connection: Connection, schema: str) -> None:
    connection.execute(f'CREATE SCHEMA "{schema}"')
    create_layout(connection, schema)
    Rows(connection, schema)
    check_layout(connection, schema)
    drop_partitions(connection, schema, 1)


def test_missing_schema_is_refused(connection: Connection) -> None:
    with pytest.raises(ConfigurationError, match="the database has no schema 'main': run `truenext store init URL"):
        check_layout(connection, SCHEMA)


def test_schema_without_tables_is_refused(connection: Connection) -> None:
    connection.execute("CREATE SCHEMA main")
    with pytest.raises(ConfigurationError, match="schema 'main' has no log yet: run `truenext store init URL"):
        check_layout(connection, SCHEMA)


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE main.kept",
        "ALTER TABLE main.log ADD more int",
        "ALTER TABLE main.fact DROP value",
        "ALTER TABLE main.position ALTER number TYPE int",
        "DROP TABLE main.log, main.kept, main.fact; ALTER TABLE main.position RENAME TO other",
    ],
)
def test_schema_with_other_tables_is_refused(tables: Connection, change: str) -> None:
    Rows(tables)
    tables.execute(change)
    with pytest.raises(ConfigurationError, match="schema 'main' has tables that are not those of a log of truenext"):
        check_layout(tables, SCHEMA)


def test_log_with_a_newer_layout_is_refused(tables: Connection) -> None:
    Rows(tables)
    tables.execute("UPDATE main.fact SET value = '\\x00000003' WHERE kind = 'layout'")
    with pytest.raises(ConfigurationError, match="has layout 3; this truenext reads layout 2: use the version"):
        check_layout(tables, SCHEMA)


@pytest.mark.parametrize("table", ["log_0", "kept", "fact", "position"])
def test_table_that_a_crash_empties_is_refused(tables: Connection, table: str) -> None:
    Rows(tables)
    tables.execute(f"ALTER TABLE main.{table} SET UNLOGGED")
    with pytest.raises(
        ConfigurationError, match=rf'table \'{table}\' is UNLOGGED, .* run ALTER TABLE "main"."{table}" SET LOGGED'
    ):
        check_layout(tables, SCHEMA)
    tables.execute(f"ALTER TABLE main.{table} SET LOGGED")
    tables.execute("CREATE UNLOGGED TABLE main.other ()")
    check_layout(tables, SCHEMA)


def test_missing_rights_are_named(tables: Connection, app: Connection) -> None:
    Rows(tables)
    role = app.info.user
    start = f"the role '{role}' lacks rights in the database: "

    def refusal() -> str:
        with pytest.raises(ConfigurationError, match=re.escape(start)) as caught:
            check_layout(app, SCHEMA)
        return str(caught.value).removeprefix(start).partition(";")[0]

    assert refusal() == "USAGE on schema 'main'"
    tables.execute(f"GRANT USAGE ON SCHEMA main TO {role}")
    tables.execute(f"GRANT SELECT ON main.log, main.fact TO {role}")
    assert refusal() == "SELECT on table 'kept', SELECT on table 'position', SELECT on table 'member'"
    tables.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA main TO {role}")
    check_readable_layout(app, SCHEMA)
    assert refusal() == (
        "CREATE on schema 'main', the rights of 'postgres', the owner of table 'fact', "
        "the rights of 'postgres', the owner of table 'kept', the rights of 'postgres', the owner of table 'log', "
        "the rights of 'postgres', the owner of table 'member', the rights of 'postgres', the owner of table 'position'"
    )
    tables.execute(f"GRANT CREATE ON SCHEMA main TO {role}")
    for table in ("fact", "kept", "log", "member", "position"):
        tables.execute(f"ALTER TABLE main.{table} OWNER TO {role}")
    check_layout(app, SCHEMA)


# ---- Partitions ----


def test_attached_partitions_have_the_next_rows(tables: Connection) -> None:
    attach_partitions(tables, SCHEMA, 5 * PARTITION_ROWS - 1)
    assert partitions_in(tables, SCHEMA) == [*range(4, 4 + PARTITIONS_AHEAD)]
    attach_partitions(tables, SCHEMA, 5 * PARTITION_ROWS)
    assert partitions_in(tables, SCHEMA) == [*range(4, 5 + PARTITIONS_AHEAD)]
    for number in (4 * PARTITION_ROWS, (5 + PARTITIONS_AHEAD) * PARTITION_ROWS - 1):
        tables.execute("INSERT INTO main.log VALUES (%s, 0, 0, NULL, '', '')", (number,))
    for number in (4 * PARTITION_ROWS - 1, (5 + PARTITIONS_AHEAD) * PARTITION_ROWS):
        with pytest.raises(psycopg.errors.CheckViolation, match="no partition"):
            tables.execute("INSERT INTO main.log VALUES (%s, 0, 0, NULL, '', '')", (number,))


def test_payload_of_a_partition_is_stored_without_compression(tables: Connection) -> None:
    attach_partitions(tables, SCHEMA, 0)
    rows = tables.execute(
        "SELECT attstorage::text FROM pg_attribute WHERE attrelid = 'main.log_0'::regclass AND attname = 'payload'"
    )
    assert rows.fetchall() == [("e",)]


def test_attaching_a_partition_lets_others_read_and_append(tables: Connection, other: Connection) -> None:
    attach_partitions(tables, SCHEMA, 0)
    with other.transaction():
        other.execute("SELECT * FROM main.log")
        other.execute("INSERT INTO main.log VALUES (1, 0, 0, NULL, '', '')")
        tables.execute("SET lock_timeout = '1s'")
        attach_partitions(tables, SCHEMA, PARTITION_ROWS)
        with tables.transaction():
            attach_partitions(tables, SCHEMA, 9 * PARTITION_ROWS)
            other.execute("SET LOCAL lock_timeout = '1s'")
            other.execute("INSERT INTO main.log VALUES (2, 0, 0, NULL, '', '')")
            assert other.execute("SELECT count(*) FROM main.log").fetchone() == (2,)
    assert partitions_in(tables, SCHEMA) == [*range(1 + PARTITIONS_AHEAD), *range(9, 9 + PARTITIONS_AHEAD)]


def test_partitions_attached_by_several_brokers_at_once_are_attached_once(
    postgres: PostgresServer, postgres_database: str, tables: Connection
) -> None:
    failures: list[BaseException] = []

    def attach() -> None:
        try:
            with postgres.connect(postgres_database) as connection:
                for partition in range(20):
                    attach_partitions(connection, SCHEMA, partition * PARTITION_ROWS)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=attach) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert partitions_in(tables, SCHEMA) == [*range(19 + PARTITIONS_AHEAD)]


def rows_up_to(tables: Connection, number: int) -> None:
    """Make a log whose position and newest row are at `number`."""
    Rows(tables, state=empty_state(number))
    for partition in range(number // PARTITION_ROWS):
        attach_partitions(tables, SCHEMA, partition * PARTITION_ROWS)
        tables.execute(f"INSERT INTO main.log VALUES ({partition * PARTITION_ROWS}, 0, 0, NULL, '', '')")


def test_drop_of_partitions_keeps_rows_after_the_position_and_the_newest_row(tables: Connection) -> None:
    rows_up_to(tables, 5 * PARTITION_ROWS + 7)
    attached = partitions_in(tables, SCHEMA)
    assert drop_partitions(tables, SCHEMA, PARTITION_ROWS - 1) == []
    assert drop_partitions(tables, SCHEMA, PARTITION_ROWS) == [0]
    tables.execute(f"UPDATE main.position SET number = {3 * PARTITION_ROWS - 2}")
    assert drop_partitions(tables, SCHEMA, 100 * PARTITION_ROWS) == [1]
    tables.execute(f"UPDATE main.position SET number = {3 * PARTITION_ROWS - 1}")
    assert drop_partitions(tables, SCHEMA, 100 * PARTITION_ROWS) == [2]
    tables.execute(f"UPDATE main.position SET number = {9 * PARTITION_ROWS}")
    assert drop_partitions(tables, SCHEMA, 100 * PARTITION_ROWS) == [3, 4]
    assert drop_partitions(tables, SCHEMA, 100 * PARTITION_ROWS) == []
    assert partitions_in(tables, SCHEMA) == [one for one in attached if one >= 5]


def test_drop_of_partitions_gives_up_while_another_session_reads(tables: Connection, other: Connection) -> None:
    rows_up_to(tables, 2 * PARTITION_ROWS)
    with other.transaction():
        # As pg_dump does.
        other.execute("LOCK TABLE main.log_0 IN ACCESS SHARE MODE")
        started = time.monotonic()
        assert drop_partitions(tables, SCHEMA, 2 * PARTITION_ROWS) is None
        assert time.monotonic() - started < 5
        assert partitions_in(tables, SCHEMA)[:2] == [0, 1]
    assert drop_partitions(tables, SCHEMA, 2 * PARTITION_ROWS) == [0, 1]


def test_drop_of_partitions_of_a_log_without_rows_drops_nothing(tables: Connection) -> None:
    attach_partitions(tables, SCHEMA, 0)
    assert drop_partitions(tables, SCHEMA, 100 * PARTITION_ROWS) == []
    assert statement(SCHEMA, "SELECT 1 FROM {log}").as_string(tables) == 'SELECT 1 FROM "main"."log"'
