"""Tests of the transaction of one message: it commits as a whole, or not at all. Source: docs/stages-database.md"""

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from tests.stages.sql.shop import Order, Shop, execute_sql, insert
from truenext.errors import LocalProtocolError
from truenext.stage.sql.errors import DatabaseErrorKind, NotCommitted


def test_rows_of_a_function_are_visible_after_the_commit_and_not_before(shop: Shop) -> None:
    work = shop.work()
    work.do(insert(1))
    work.check()
    assert shop.orders() == []
    work.commit()
    assert (shop.orders(), work.inner.is_committed, shop.in_use()) == ([1], True, 0)


def test_a_rollback_takes_everything_back_and_may_be_repeated(shop: Shop) -> None:
    work = shop.work()
    work.do(insert(1))
    work.rollback()
    work.rollback()
    assert (shop.orders(), work.inner.is_committed, shop.in_use()) == ([], False, 0)


def test_a_rollback_after_the_commit_does_nothing(shop: Shop) -> None:
    work = shop.work()
    work.do(insert(1))
    work.commit()
    work.rollback()
    assert (shop.orders(), work.inner.is_committed) == ([1], True)


def test_unused_session_takes_no_connection(shop: Shop) -> None:
    unused, used = shop.work(), shop.work()
    used.do(lambda session: None)
    assert not unused.inner.is_used and not used.inner.is_used
    assert shop.in_use() == 0
    for work in (unused, used):
        work.check()
        work.commit()
        assert not work.inner.is_used and work.inner.is_committed is not None


def test_a_work_is_used_from_the_first_object_or_statement_on(shop: Shop) -> None:
    first, second = shop.work(), shop.work()
    first.do(lambda session: session.add(Order(number=1)))
    assert first.inner.is_used
    first.check()
    first.commit()
    second.do(execute_sql("SELECT 1"))
    assert first.inner.is_used and second.inner.is_used
    assert shop.orders() == [1]


def test_check_flushes_the_session_so_that_errors_are_raised_before_the_commit(
    shop: Shop,
) -> None:
    before = shop.work()
    before.do(insert(1))
    before.commit()
    work = shop.work()
    work.do(lambda session: session.add(Order(number=1)))
    with pytest.raises(IntegrityError) as raised:
        work.check()
    assert work.classify_error(raised.value) is DatabaseErrorKind.APPLICATION
    work.rollback()
    assert shop.in_use() == 0


def test_objects_that_were_read_stay_readable_after_the_commit(shop: Shop) -> None:
    work = shop.work()

    def read(session: Session) -> Order:
        session.add(Order(number=1, what="pears"))
        return session.scalars(select(Order)).one()

    order = work.do(read)
    work.commit()
    assert order.what == "pears"


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_session_whose_message_is_over_does_nothing_more(shop: Shop, end: str) -> None:
    work = shop.work()
    work.do(insert(1))
    getattr(work, end)()
    with pytest.raises(LocalProtocolError, match="has ended"):
        work.do(insert(2))
    assert shop.in_use() == 0
    assert shop.orders() == ([1] if end == "commit" else [])


def test_savepoints_are_the_functions_own(shop: Shop) -> None:
    work = shop.work()

    def step(session: Session) -> None:
        session.add(Order(number=1))
        with pytest.raises(IntegrityError), session.begin_nested():
            session.execute(text("INSERT INTO orders (number, what) VALUES (1, 'twice')"))
        with session.begin_nested():
            session.add(Order(number=2))
        nested = session.begin_nested()
        session.add(Order(number=3))
        nested.rollback()
        session.execute(text("SAVEPOINT mine"))
        session.execute(text("INSERT INTO orders (number, what) VALUES (4, 'pears')"))
        session.execute(text("ROLLBACK TO SAVEPOINT mine"))
        session.execute(text("RELEASE SAVEPOINT mine"))
        session.begin_nested()
        session.add(Order(number=5))

    work.do(step)
    work.check()
    work.commit()
    assert shop.orders() == [1, 2, 5]


def test_a_constraint_that_is_only_looked_at_by_the_commit_means_that_nothing_was_committed(
    url: str, face: str
) -> None:
    with Shop(url, face, workers=1) as shop:
        _commit_a_line_without_an_order(shop)


def _commit_a_line_without_an_order(shop: Shop) -> None:
    with shop.second_engine() as engine, engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TABLE lines (number int PRIMARY KEY, "
                "of int REFERENCES orders (number) DEFERRABLE INITIALLY DEFERRED)"
            )
        )
    work = shop.work()
    work.do(insert(1))
    work.do(execute_sql("INSERT INTO lines VALUES (1, 2)"))
    work.check()
    with pytest.raises(NotCommitted) as raised:
        work.commit()
    assert (work.classify_error(raised.value), work.inner.is_committed) == (DatabaseErrorKind.APPLICATION, False)
    assert (shop.orders(), shop.in_use()) == ([], 0)
    # The connection went back without that transaction: a pool of one has no other.
    after = shop.work()
    after.do(insert(3))
    after.commit()
    assert shop.orders() == [3]
