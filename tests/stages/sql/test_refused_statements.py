"""Tests of calls and statements that begin or end a transaction within a stage: they are refused, and the function's
work is not committed. Source: docs/stages-database.md, "Refused calls" """

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.stages.sql.shop import Driven, Order, Shop, Step, execute_sql, insert, swallowing
from truenext.errors import LocalProtocolError
from truenext.stage.sql.errors import DatabaseErrorKind, Swallowed
from truenext.stage.sql.transaction import find_transaction_statement
from truenext.stage.sql.work import AsyncSqlWork


def _commit_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.commit()


def _rollback_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.rollback()


def _core_transaction(session: Session) -> Any:
    transaction = session.connection().get_transaction()
    assert transaction is not None
    return transaction


REFUSED: dict[str, Step[Any]] = {
    "commit": lambda session: session.commit(),
    "rollback": lambda session: session.rollback(),
    "close": lambda session: session.close(),
    "reset": lambda session: session.reset(),
    "invalidate": lambda session: session.invalidate(),
    "begin": lambda session: session.begin(),
    "with": lambda session: session.__enter__(),
    "prepare": lambda session: session.prepare(),
    "commit of the session's transaction": _commit_transaction,
    "rollback of the session's transaction": _rollback_transaction,
    "commit of the connection": lambda session: session.connection().commit(),
    "rollback of the connection": lambda session: session.connection().rollback(),
    "close of the connection": lambda session: session.connection().close(),
    "commit of the connection's transaction": lambda session: _core_transaction(session).commit(),
    "rollback of the connection's transaction": lambda session: _core_transaction(session).rollback(),
    "COMMIT": execute_sql("COMMIT"),
    "commit with a comment": execute_sql("/* now */ -- really\n commit work"),
    "ROLLBACK": execute_sql("ROLLBACK"),
    "BEGIN": execute_sql("BEGIN"),
    "END": execute_sql("END"),
    "core COMMIT": lambda session: session.connection().exec_driver_sql("COMMIT"),
}


def test_calls_that_begin_or_end_a_transaction_are_refused(shop: Shop) -> None:
    for what, step in REFUSED.items():
        work = shop.work()
        work.do(insert(1))
        with pytest.raises(LocalProtocolError, match="is refused: the stage"):
            work.do(step)
            pytest.fail(what)
        work.rollback()
        assert (shop.orders(), shop.in_use()) == ([], 0), what


def test_a_refusal_that_is_swallowed_is_found_before_the_commit(shop: Shop) -> None:
    for what, step in REFUSED.items():
        work = shop.work()
        work.do(insert(1))
        work.do(swallowing(step))
        for end in (work.check, work.commit):
            with pytest.raises(Swallowed, match="refused") as raised:
                end()
            assert isinstance(raised.value.__cause__, LocalProtocolError)
            assert work.classify_error(raised.value) is DatabaseErrorKind.APPLICATION
        work.rollback()
        assert (shop.orders(), shop.in_use()) == ([], 0), what


def test_transaction_calls_before_the_first_statement_are_refused(shop: Shop) -> None:
    for what in ("commit", "rollback", "close", "begin", "reset", "invalidate"):
        work = shop.work()
        with pytest.raises(LocalProtocolError):
            work.do(REFUSED[what])


def test_a_connection_that_would_commit_by_itself_is_refused(shop: Shop) -> None:
    work = shop.work()
    with pytest.raises(LocalProtocolError, match="AUTOCOMMIT"):
        work.do(lambda session: session.connection(execution_options={"isolation_level": "AUTOCOMMIT"}))
    with pytest.raises(LocalProtocolError, match="AUTOCOMMIT"):
        work.do(lambda session: session.connection().execution_options(isolation_level="AUTOCOMMIT"))
    work.rollback()
    assert shop.in_use() == 0
    after = shop.work()
    after.do(insert(1))
    after.rollback()
    assert shop.orders() == []


def test_several_statements_at_once_may_not_end_the_transaction_either(postgres_shop: Shop) -> None:
    work = postgres_shop.work()
    with pytest.raises(LocalProtocolError, match="COMMIT is refused"):
        work.do(execute_sql("INSERT INTO orders VALUES (1, 'a; b'); COMMIT; BEGIN"))
    assert postgres_shop.orders() == []


def test_transaction_end_hidden_in_nested_comments_is_refused_after_its_execution(
    postgres_shop: Shop,
) -> None:
    # Comments within comments are PostgreSQL's own.
    work = postgres_shop.work()
    work.do(insert(1))
    with pytest.raises(LocalProtocolError, match="a statement that ends the transaction"):
        work.do(lambda session: session.connection().exec_driver_sql("SELECT 1 /* /* */ ' */; COMMIT --'"))
    with pytest.raises(Swallowed):
        work.commit()


def test_statement_after_a_swallowed_rollback_is_refused(shop: Shop) -> None:
    work = shop.work()
    work.do(insert(1))
    work.do(swallowing(REFUSED["rollback of the connection"]))
    with pytest.raises(LocalProtocolError, match="another transaction"):
        work.do(insert(2))
    work.rollback()
    assert (shop.orders(), shop.in_use()) == ([], 0)


def _raw_commit(work: Driven) -> None:
    """Commit through the driver, past all events of SQLAlchemy."""

    def commit(session: Session) -> None:
        driver: Any = session.connection().connection.dbapi_connection
        driver.commit()

    work.do(commit)


def test_transaction_ended_through_the_driver_is_found_and_later_statements_are_refused(shop: Shop) -> None:
    work = shop.work()
    work.do(insert(1))
    _raw_commit(work)
    with pytest.raises(Swallowed, match="has ended"):
        work.do(insert(2))
    with pytest.raises(Swallowed, match="has ended"):
        work.check()
    with pytest.raises(Swallowed, match="has ended"):
        work.commit()
    assert shop.orders() == [1]


ASYNC_REFUSED: list[Callable[[AsyncSession], Awaitable[Any]]] = [
    lambda session: session.commit(),
    lambda session: session.rollback(),
    lambda session: session.close(),
    lambda session: session.reset(),
    lambda session: session.invalidate(),
    lambda session: session.begin().__aenter__(),
    lambda session: session.__aenter__(),
    lambda session: _commit_async_connection(session),
]


async def _commit_async_connection(session: AsyncSession) -> None:
    await (await session.connection()).commit()


def test_the_methods_of_an_async_session_are_refused_as_well(url: str) -> None:
    with Shop(url, "tasks") as shop:
        for call in ASYNC_REFUSED:
            work = shop.work()
            assert isinstance(work.inner, AsyncSqlWork)
            shop.run(_is_refused(work.inner.session, call))
            with pytest.raises(Swallowed):
                work.check()
            work.rollback()
        assert shop.orders() == []


async def _is_refused(session: AsyncSession, call: Callable[[AsyncSession], Awaitable[Any]]) -> None:
    session.add(Order(number=1))
    await session.flush()
    async with session.begin_nested():
        await session.execute(text("SELECT 1"))
    with pytest.raises(LocalProtocolError):
        await call(session)


@pytest.mark.parametrize(
    "statement",
    [
        "commit",
        " COMMIT;",
        "select 1; commit",
        "rollback",
        "ROLLBACK WORK",
        "rollback; select 1",
        "abort",
        "end transaction",
        "begin immediate",
        "Start  Transaction READ ONLY",
        "prepare transaction 'x'",
        "commit prepared 'x'",
        "SET autocommit = 1",
        "SET SESSION AUTOCOMMIT TO on",
        "/* a */ /* b */ commit",
        "\ufeffCOMMIT",
        "\ufeff commit; select 1",
        "create table t (n int); commit",
        "create trigger t after insert on a begin select 1; end; commit",
        "insert into t values ('it''s; fine'); commit",
        r"select E'\''; commit; --'",
    ],
)
def test_transaction_statements_are_recognized(statement: str) -> None:
    assert find_transaction_statement(statement) is not None


@pytest.mark.parametrize(
    "statement",
    [
        "select * from commit_log",
        "create trigger t after insert on a begin update b set n = 1; select case when 1 then 2 end; end",
        "/* once */ CREATE TEMP TRIGGER t AFTER INSERT ON a BEGIN DELETE FROM b; END;",
        "create or replace procedure p() begin atomic insert into t values (1); end",
        "insert into t values ('x; commit')",
        "select 1 -- ; commit",
        "select 1; /* ; commit */ select 2",
        "rollback to savepoint a",
        "ROLLBACK WORK TO a",
        "rollback transaction to savepoint a",
        "savepoint a",
        "release savepoint a",
        "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "prepare plan as select 1",
        "do $$ begin perform 1; end $$",
        "do $a$ begin perform 1; commit; end $a$; select 1",
        'select "a; commit" from t',
        r"select e'a\'; commit; ', 'b'",
        "",
    ],
)
def test_other_statements_are_not_taken_for_transaction_statements(statement: str) -> None:
    assert find_transaction_statement(statement) is None
