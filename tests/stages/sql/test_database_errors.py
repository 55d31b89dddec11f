"""Tests of the kinds of database errors, most of them raised by a real database.

Source: docs/stages-database.md, "Kinds of database errors"
"""

from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from tests.stages.postgres import PostgresServer
from tests.stages.sql.shop import Driven, Shop, Step, execute_sql, insert
from tests.stages.sql.test_swallowed_errors import kill_own_connection
from truenext.errors import LocalProtocolError
from truenext.stage.sql import Database, postgresql
from truenext.stage.sql.error_kind import classify_error
from truenext.stage.sql.errors import DatabaseErrorKind, NotCommitted


def _fails(work: Driven, step: Step[Any]) -> DatabaseErrorKind:
    with pytest.raises(DBAPIError) as raised:
        work.do(step)
    return classify_error(raised.value)


def test_wrong_statements_are_errors_of_the_application(shop: Shop) -> None:
    for statement in (
        "SELECT nonsense",
        "INSERT INTO nowhere VALUES (1)",
        "INSERT INTO orders (number, what) VALUES (1, NULL)",
    ):
        work = shop.work()
        assert _fails(work, execute_sql(statement)) is DatabaseErrorKind.APPLICATION
        work.rollback()


@pytest.mark.parametrize("error", [ValueError(), LocalProtocolError("no"), KeyboardInterrupt()])
def test_errors_of_no_database_are_errors_of_the_application(error: BaseException) -> None:
    assert classify_error(error) is DatabaseErrorKind.APPLICATION


def test_the_victim_of_a_deadlock_is_to_run_again(postgres_shop: Shop) -> None:
    first, second = postgres_shop.work(), postgres_shop.work()
    begin = postgres_shop.work()
    begin.do(insert(1))
    begin.do(insert(2))
    begin.commit()
    first.do(_update(1))
    second.do(_update(2))
    waiting = [first.start(_update(2)), second.start(_update(1))]
    errors = [each.exception(30) for each in waiting]
    (victim,) = [each for each in errors if each is not None]
    assert classify_error(victim) is DatabaseErrorKind.RETRYABLE


def _update(number: int) -> Step[None]:
    return execute_sql(f"UPDATE orders SET what = what || '!' WHERE number = {number}")


def _serializable(session: Session) -> None:
    session.connection(execution_options={"isolation_level": "SERIALIZABLE"})


def test_a_transaction_that_could_not_be_serialized_is_to_run_again(postgres_shop: Shop) -> None:
    begin = postgres_shop.work()
    begin.do(insert(1))
    begin.commit()
    first, second = postgres_shop.work(), postgres_shop.work()
    for work in (first, second):
        work.do(_serializable)
        work.do(execute_sql("SELECT * FROM orders"))
    first.do(_update(1))
    first.commit()
    assert _fails(second, _update(1)) is DatabaseErrorKind.RETRYABLE


def test_a_transaction_that_only_its_commit_finds_not_serializable_is_to_run_again(postgres_shop: Shop) -> None:
    first, second = postgres_shop.work(), postgres_shop.work()
    for number, work in enumerate((first, second)):
        work.do(_serializable)
        work.do(lambda session: session.execute(text("SELECT count(*) FROM orders")).scalar_one())
        work.do(insert(number))
    first.check()
    second.check()
    first.commit()
    with pytest.raises(NotCommitted) as raised:
        second.commit()
    assert classify_error(raised.value) is DatabaseErrorKind.RETRYABLE
    # The level is gone with the connection's return.
    after = postgres_shop.work()
    level = after.do(lambda session: session.execute(text("SHOW transaction_isolation")).scalar_one())
    assert level == "read committed"


def test_a_lock_that_could_not_be_had_in_time_is_tried_again(postgres_shop: Shop) -> None:
    first, second = postgres_shop.work(), postgres_shop.work()
    first.do(execute_sql("LOCK TABLE orders"))
    second.do(execute_sql("SET LOCAL lock_timeout = 1"))
    assert _fails(second, execute_sql("LOCK TABLE orders")) is DatabaseErrorKind.RETRYABLE


def test_a_connection_that_ends_itself_may_be_the_messages_fault(postgres_shop: Shop) -> None:
    work = postgres_shop.work()
    work.do(insert(1))
    assert _fails(work, kill_own_connection) is DatabaseErrorKind.LOST


def test_a_server_that_is_killed_in_the_middle_is_a_lost_connection_and_then_away(
    own_postgres: PostgresServer, face: str
) -> None:
    with Shop(own_postgres.url("postgres"), face) as shop:
        work, first_use = shop.work(), shop.work()
        work.do(insert(1))
        own_postgres.kill()
        assert _fails(work, insert(2)) is DatabaseErrorKind.LOST
        assert _fails(first_use, insert(2)) is DatabaseErrorKind.UNAVAILABLE
        work.rollback()
        first_use.rollback()
        own_postgres.start()
        after = shop.work()
        after.do(insert(3))
        after.commit()
        assert shop.orders() == [3]


def test_restarted_server_costs_a_recent_user_one_lost_connection(own_postgres: PostgresServer, face: str) -> None:
    with Shop(own_postgres.url("postgres"), face, workers=2) as shop:
        together = [shop.work(), shop.work()]
        for number, work in enumerate(together):
            work.do(insert(number))
        for work in together:
            work.commit()
        own_postgres.stop()
        own_postgres.start()
        assert _fails(shop.work(), insert(2)) is DatabaseErrorKind.LOST
        after = shop.work()
        after.do(insert(3))
        after.commit()
        assert shop.orders() == [0, 1, 3]


def test_restarted_server_causes_no_error_for_idle_connections(
    own_postgres: PostgresServer, face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "IDLE_S", 0.0)
    with Shop(own_postgres.url("postgres"), face) as shop:
        before = shop.work()
        before.do(insert(1))
        before.commit()
        own_postgres.stop()
        assert _fails(shop.work(), insert(2)) is DatabaseErrorKind.UNAVAILABLE
        own_postgres.start()
        after = shop.work()
        after.do(insert(3))
        after.commit()
        assert shop.orders() == [1, 3]


def test_too_many_connections_are_no_messages_fault(own_postgres: PostgresServer) -> None:
    with own_postgres.connect() as administrator:
        administrator.execute("CREATE USER few CONNECTION LIMIT 0")
    url = own_postgres.url("postgres").replace("user=postgres", "user=few")
    database = Database(url, interactive=1, others=1)
    work = database.new_thread_work()
    with pytest.raises(DBAPIError, match="too many connections") as raised:
        work.session.execute(text("SELECT 1"))
    assert classify_error(raised.value) is DatabaseErrorKind.UNAVAILABLE
    work.rollback()


def test_a_database_that_can_only_be_read_is_away(postgres_shop: Shop) -> None:
    name = postgres_shop.url.partition("///")[2].partition("?")[0]
    with postgres_shop.second_engine() as engine, engine.begin() as connection:
        connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
    work = postgres_shop.work()
    assert _fails(work, insert(1)) is DatabaseErrorKind.UNAVAILABLE


def test_a_file_that_can_only_be_read_is_away(sqlite_url: str, face: str) -> None:
    with Shop(sqlite_url, face):
        pass
    path = sqlite_url.removeprefix("sqlite:///")
    with Shop(f"sqlite:///file:{path}?mode=ro&uri=true", face, direct_url=sqlite_url) as shop:
        assert _fails(shop.work(), insert(1)) is DatabaseErrorKind.UNAVAILABLE


def test_a_full_disk_is_full(sqlite_shop: Shop) -> None:
    work = sqlite_shop.work()

    def fill(session: Session) -> None:
        pages = session.execute(text("PRAGMA page_count")).scalar_one()
        session.execute(text(f"PRAGMA max_page_count={pages}"))
        session.execute(text("INSERT INTO orders (number, what) VALUES (9, zeroblob(1000000))"))

    assert _fails(work, fill) is DatabaseErrorKind.FULL


def test_a_folder_that_is_gone_is_away(sqlite_url: str, face: str) -> None:
    with Shop(sqlite_url, face) as shop:
        elsewhere = Database(sqlite_url.replace("shop.db", "nowhere/shop.db"), interactive=1, others=1)
        work = elsewhere.new_thread_work()
        with pytest.raises(DBAPIError) as raised:
            work.session.execute(text("SELECT 1"))
        assert classify_error(raised.value) is DatabaseErrorKind.UNAVAILABLE
        work.rollback()
        shop.run(elsewhere.close())


def test_a_pool_whose_connections_are_all_taken_is_away() -> None:
    assert classify_error(PoolTimeoutError()) is DatabaseErrorKind.UNAVAILABLE


def test_exception_raised_from_a_database_error_has_the_kind_of_its_cause(postgres_shop: Shop) -> None:
    work = postgres_shop.work()
    other = postgres_shop.work()
    other.do(execute_sql("LOCK TABLE orders"))

    def explain(session: Session) -> None:
        try:
            session.execute(text("LOCK TABLE orders NOWAIT"))
        except DBAPIError as error:
            raise RuntimeError("no orders now") from error

    def replace(session: Session) -> None:
        try:
            explain(session)
        except RuntimeError:
            raise KeyError("orders")  # noqa: B904

    with pytest.raises(KeyError) as raised:
        work.do(replace)
    assert classify_error(raised.value) is DatabaseErrorKind.RETRYABLE


def test_database_error_in_an_exception_group_keeps_its_kind() -> None:
    away = PoolTimeoutError()
    assert classify_error(away) is DatabaseErrorKind.UNAVAILABLE
    assert (
        classify_error(ExceptionGroup("outer", [ValueError(), ExceptionGroup("inner", [away])]))
        is DatabaseErrorKind.UNAVAILABLE
    )
    assert classify_error(ExceptionGroup("own", [ValueError()])) is DatabaseErrorKind.APPLICATION


def test_causes_that_go_in_a_circle_end() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert classify_error(first) is DatabaseErrorKind.APPLICATION


@pytest.mark.parametrize(
    ("sqlstate", "trouble"),
    [
        ("53100", DatabaseErrorKind.FULL),  # disk_full
        ("53200", DatabaseErrorKind.FULL),  # out_of_memory
        ("53300", DatabaseErrorKind.FULL),  # too_many_connections
        ("53400", DatabaseErrorKind.APPLICATION),  # configuration_limit_exceeded
        ("57P01", DatabaseErrorKind.LOST),  # admin_shutdown
        ("57P02", DatabaseErrorKind.UNAVAILABLE),  # crash_shutdown
        ("57P03", DatabaseErrorKind.UNAVAILABLE),  # cannot_connect_now
        ("08006", DatabaseErrorKind.LOST),  # connection_failure
        ("40001", DatabaseErrorKind.RETRYABLE),  # serialization_failure
        ("40P01", DatabaseErrorKind.RETRYABLE),  # deadlock_detected
        ("55P03", DatabaseErrorKind.RETRYABLE),  # lock_not_available
        ("25006", DatabaseErrorKind.UNAVAILABLE),  # read_only_sql_transaction
        ("25P03", DatabaseErrorKind.APPLICATION),  # idle_in_transaction_session_timeout
        ("57014", DatabaseErrorKind.APPLICATION),  # query_canceled
        ("23505", DatabaseErrorKind.APPLICATION),  # unique_violation
    ],
)
def test_sqlstate_decides_the_kind_of_errors_that_are_not_provoked_here(
    sqlstate: str, trouble: DatabaseErrorKind
) -> None:
    orig = psycopg.errors.lookup(sqlstate)("told")
    assert classify_error(orig) is trouble
    assert classify_error(DBAPIError("SELECT 1", None, orig)) is trouble
