"""Tests of errors that a function caught and that broke its transaction: they are found before the commit, and named.

Source: docs/stages-database.md, "Swallowed errors"
"""

from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from tests.stages.sql.shop import Driven, Order, Shop, Step, execute_sql, insert, swallowing
from truenext.stage.sql.errors import DatabaseErrorKind, Swallowed


def _is_found(shop: Shop, work: Driven, match: str, trouble: DatabaseErrorKind = DatabaseErrorKind.APPLICATION) -> None:
    """Check that the error is found by the check, and by a commit without one."""
    for end in (work.check, work.commit):
        with pytest.raises(Swallowed, match=match) as raised:
            end()
        assert work.classify_error(raised.value) is trouble
    assert work.inner.is_committed is False
    work.rollback()
    assert (shop.orders(), shop.in_use()) == ([], 0)


def test_a_statement_that_failed_in_postgresql(postgres_shop: Shop) -> None:
    work = postgres_shop.work()
    work.do(insert(1))
    work.do(swallowing(insert(1)))
    _is_found(postgres_shop, work, "has failed.*has swallowed.*orders_pkey")


def test_the_first_error_is_named_and_not_those_that_follow_from_it(postgres_shop: Shop) -> None:
    work = postgres_shop.work()
    work.do(insert(1))
    work.do(swallowing(insert(1)))
    work.do(swallowing(insert(2)))
    work.do(swallowing(execute_sql("SELECT nonsense")))
    _is_found(postgres_shop, work, "orders_pkey")


def test_a_statement_that_failed_in_sqlite_leaves_the_transaction_alive(sqlite_shop: Shop) -> None:
    work = sqlite_shop.work()
    work.do(insert(1))
    work.do(swallowing(insert(1)))
    work.do(swallowing(execute_sql("SELECT nonsense")))
    work.check()
    work.commit()
    assert sqlite_shop.orders() == [1]


def test_a_flush_that_failed(shop: Shop) -> None:
    work = shop.work()
    work.do(insert(1))

    def add(session: Session) -> None:
        session.add(Order(number=1))
        session.flush()

    work.do(swallowing(add))
    with pytest.raises(SQLAlchemyError):
        work.do(insert(2))
    _is_found(shop, work, "rolled back.*(orders_pkey|UNIQUE)")


def test_a_flush_that_failed_before_the_database_was_asked(shop: Shop) -> None:
    work = shop.work()

    def add(session: Session) -> None:
        session.add(Order(number=[1]))
        session.flush()

    work.do(swallowing(add))
    _is_found(shop, work, "rolled back")


def test_a_bulk_insert_that_failed(shop: Shop) -> None:
    work = shop.work()
    work.do(insert(1))
    work.do(swallowing(lambda session: session.bulk_save_objects([Order(number=1)])))
    _is_found(shop, work, "rolled back")


def test_error_in_a_rolled_back_savepoint_does_not_fail_the_transaction(shop: Shop) -> None:
    work = shop.work()
    work.do(insert(1))

    def step(session: Session) -> None:
        with pytest.raises(IntegrityError), session.begin_nested():
            insert(1)(session)
        with pytest.raises(IntegrityError), session.begin_nested():
            session.add(Order(number=1))
            session.flush()
        session.execute(text("SAVEPOINT mine"))
        with pytest.raises(IntegrityError):
            insert(1)(session)
        session.execute(text("ROLLBACK TO mine"))

    work.do(step)
    work.check()
    work.commit()
    assert shop.orders() == [1]


def test_after_a_savepoint_that_was_rolled_back_the_next_error_is_named(postgres_shop: Shop) -> None:
    work = postgres_shop.work()
    work.do(insert(1))

    def step(session: Session) -> None:
        with pytest.raises(IntegrityError), session.begin_nested():
            insert(1)(session)

    work.do(step)
    work.do(swallowing(execute_sql("SELECT nonsense")))
    _is_found(postgres_shop, work, 'has swallowed.*"nonsense" does not exist')


def test_error_swallowed_by_a_session_hook_after_the_check_prevents_the_commit(postgres_shop: Shop) -> None:
    work = postgres_shop.work()
    work.do(insert(1))
    work.check()
    inner = work.do(lambda session: session)
    event.listen(inner, "before_commit", lambda session: swallowing(insert(1))(session))
    with pytest.raises(Swallowed, match="orders_pkey"):
        work.commit()
    work.rollback()
    assert (postgres_shop.orders(), work.inner.is_committed) == ([], False)


def test_a_full_disk_after_which_sqlite_has_ended_the_transaction(sqlite_shop: Shop) -> None:
    work = sqlite_shop.work()
    work.do(insert(1))
    error = work.do(swallowing(_fill))
    assert work.classify_error(error) is DatabaseErrorKind.FULL
    # It would be a transaction of its own, committed at once.
    with pytest.raises(Swallowed, match="full"):
        work.do(insert(2))
    _is_found(sqlite_shop, work, "has ended.*full", DatabaseErrorKind.FULL)


def _fill(session: Session) -> None:
    pages = session.execute(text("PRAGMA page_count")).scalar_one()
    session.execute(text(f"PRAGMA max_page_count={pages}"))
    try:
        session.execute(text("INSERT INTO orders (number, what) VALUES (9, zeroblob(1000000))"))
    finally:
        session.connection().connection.dbapi_connection.cursor().execute("PRAGMA max_page_count=1073741823")  # type: ignore[union-attr]


def test_a_constraint_that_is_told_to_end_the_transaction_in_sqlite(sqlite_shop: Shop) -> None:
    work = sqlite_shop.work()
    work.do(insert(1))
    work.do(swallowing(execute_sql("INSERT OR ROLLBACK INTO orders (number, what) VALUES (1, 'twice')")))
    with pytest.raises(Swallowed):
        work.do(insert(2))
    _is_found(sqlite_shop, work, "has ended.*UNIQUE")


def test_a_lost_connection(postgres_shop: Shop) -> None:
    work = postgres_shop.work()
    work.do(insert(1))
    error = work.do(swallowing(kill_own_connection))
    assert work.classify_error(error) is DatabaseErrorKind.LOST
    _is_found(postgres_shop, work, "lost with its connection", DatabaseErrorKind.LOST)


def kill_own_connection(session: Session) -> None:
    session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))


def test_error_raised_after_a_swallowed_lock_error_is_retryable(postgres_shop: Shop) -> None:
    # A lock that cannot be had, a ValueError in its wake: it is to run again.
    with postgres_shop.second_engine() as engine, engine.begin() as other:
        other.execute(text("LOCK TABLE orders"))
        work = postgres_shop.work()
        work.do(swallowing(execute_sql("LOCK TABLE orders NOWAIT")))
        assert work.classify_error(ValueError()) is DatabaseErrorKind.RETRYABLE


@pytest.mark.parametrize("step", [insert(1), execute_sql("SELECT nonsense")])
def test_error_that_was_not_swallowed_is_the_functions_own(shop: Shop, step: Step[Any]) -> None:
    work = shop.work()
    work.do(insert(1))
    with pytest.raises((IntegrityError, SQLAlchemyError)) as raised:
        work.do(step)
    assert work.classify_error(raised.value) is DatabaseErrorKind.APPLICATION


def test_a_statement_that_the_driver_refuses_does_not_break_the_transaction(postgres_shop: Shop) -> None:
    work = postgres_shop.work()

    def refused(session: Session) -> None:
        session.execute(text("SELECT :value"), {"value": object()})

    work.do(swallowing(refused))
    work.do(insert(1))
    work.do(swallowing(refused))
    work.check()
    work.commit()
    assert postgres_shop.orders() == [1]


def test_a_connection_that_was_lost_while_nothing_was_said_is_noticed_by_the_check(postgres_shop: Shop) -> None:
    work = postgres_shop.work()
    number = work.do(lambda session: session.execute(text("SELECT pg_backend_pid()")).scalar_one())
    with postgres_shop.second_engine() as engine, engine.begin() as other:
        other.execute(text(f"SELECT pg_terminate_backend({number}, 5000)"))
    with pytest.raises(OperationalError) as raised:
        work.check()
    assert work.classify_error(raised.value) is DatabaseErrorKind.LOST
    work.rollback()
    assert postgres_shop.in_use() == 0
