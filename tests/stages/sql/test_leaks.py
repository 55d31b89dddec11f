"""Tests of connections after any end of a work: a connection returns clean to its pool or is closed, and the database
keeps nothing of the work."""

import asyncio
import itertools
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.stages.sql.shop import Shop, execute_sql, insert
from truenext.errors import LocalProtocolError
from truenext.stage.sql import Database, postgresql
from truenext.stage.sql.errors import DatabaseErrorKind, Swallowed
from truenext.stage.sql.work import AsyncSqlWork

PATIENCE_S = 60.0

# They take longer than any test.
SLOW = {
    "postgresql": "SELECT pg_sleep(1000)",
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000000000000) SELECT max(i) "
    "FROM n",
}


@pytest.fixture
def task_shop(url: str) -> Any:
    with Shop(url, "tasks", workers=1) as made:
        yield made


def _slow(shop: Shop) -> str:
    return SLOW["postgresql" if shop.is_postgres else "sqlite"]


def _works_on(shop: Shop) -> None:
    """Check that the pool's one connection, or its replacement, works."""
    assert shop.in_use() == 0
    work = shop.work()
    work.do(insert(100))
    work.check()
    work.commit()
    assert shop.orders() == [100]


def test_a_function_that_is_cancelled_in_a_statement(task_shop: Shop) -> None:
    work = task_shop.work()
    work.do(insert(1))
    inner = work.inner
    assert isinstance(inner, AsyncSqlWork)

    async def cancelled() -> None:
        task = asyncio.create_task(inner.session.execute(text(_slow(task_shop))))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await inner.rollback()

    task_shop.run(cancelled())
    _works_on(task_shop)


def test_a_function_that_limits_the_time_of_a_statement_has_lost_its_transaction(task_shop: Shop) -> None:
    work = task_shop.work()
    work.do(insert(1))
    inner = work.inner
    assert isinstance(inner, AsyncSqlWork)

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await inner.session.execute(text(_slow(task_shop)))

    task_shop.run(impatient())
    with pytest.raises(Swallowed, match="lost") as raised:
        work.check()
    assert work.classify_error(raised.value) is DatabaseErrorKind.APPLICATION
    work.rollback()
    _works_on(task_shop)


def test_a_connection_that_was_told_to_commit_by_itself_is_not_used_again(postgres_shop: Shop) -> None:
    work = postgres_shop.work()

    def commit_each(session: Session) -> None:
        # At the driver, where nobody sees it.
        driver: Any = session.connection().connection.dbapi_connection
        driver.autocommit = True

    work.do(commit_each)
    work.rollback()
    _works_on(postgres_shop)


def test_a_connection_that_leads_to_a_server_that_can_only_be_read_is_not_used_again(postgres_shop: Shop) -> None:
    first = postgres_shop.work()
    process = first.do(lambda session: session.execute(text("SELECT pg_backend_pid()")).scalar_one())
    first.rollback()
    again = postgres_shop.work()
    assert again.do(lambda session: session.execute(text("SELECT pg_backend_pid()")).scalar_one()) == process
    again.do(execute_sql("SET TRANSACTION READ ONLY"))
    with pytest.raises(DBAPIError, match="read-only"):
        again.do(insert(1))
    again.rollback()
    after = postgres_shop.work()
    assert after.do(lambda session: session.execute(text("SELECT pg_backend_pid()")).scalar_one()) != process
    after.rollback()


def test_a_rollback_that_is_cancelled_ends_all_the_same(task_shop: Shop) -> None:
    work = task_shop.work()
    work.do(insert(1))
    inner = work.inner
    assert isinstance(inner, AsyncSqlWork)

    async def cancelled() -> None:
        task = asyncio.create_task(inner.rollback())
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    task_shop.run(cancelled())
    _works_on(task_shop)


@types.coroutine
def _cancelled_at(point: int, work: Coroutine[Any, Any, None]) -> Generator[Any, Any, int]:
    """Cancel the task when `work` waits for the `point`-th time; return how often it waited."""
    task = asyncio.current_task()
    assert task is not None
    waits = 0
    resume: Callable[[], Any] = partial(work.send, None)
    while True:
        try:
            waited_for = resume()
        except StopIteration:
            return waits
        waits += 1
        if waits == point:
            asyncio.get_running_loop().call_soon(task.cancel)
        try:
            yield waited_for
            resume = partial(work.send, None)
        except BaseException as error:
            resume = partial(work.throw, error)


def test_a_cancellation_at_any_moment_of_a_work(task_shop: Shop) -> None:
    async def work_once(inner: AsyncSqlWork, number: int) -> None:
        try:
            await inner.session.execute(text(f"INSERT INTO orders (number, what) VALUES ({number}, 'x')"))
            await inner.check()
            await inner.commit()
        finally:
            await inner.rollback()

    async def cancel_at(point: int) -> tuple[bool | None, bool]:
        inner = task_shop.database.new_async_work()
        task = asyncio.ensure_future(_cancelled_at(point, work_once(inner, point)))
        await asyncio.wait({task})
        return inner.is_committed, not task.cancelled() and task.result() < point

    committed: list[int] = []
    for point in itertools.count(1):
        is_committed, is_beyond = task_shop.run(cancel_at(point))
        assert is_committed is not None
        assert task_shop.in_use() == 0, point
        if is_committed:
            committed.append(point)
        assert task_shop.orders() == committed
        if is_beyond:
            break
    # There was something to cancel, and the last ones came too late.
    assert len(committed) < point


def test_a_thread_that_was_abandoned_gives_its_connection_back_when_its_function_ends(url: str) -> None:
    with Shop(url, "threads", workers=1) as shop:
        work, resume = shop.work(), threading.Event()

        def function(session: Session) -> None:
            insert(1)(session)
            resume.wait()
            insert(2)(session)

        running = work.start(function)
        resume.set()
        running.result(30)
        work.rollback()
        _works_on(shop)


def test_a_work_that_ends_after_its_database_was_closed_leaves_no_connection(url: str, face: str) -> None:
    with Shop(url, face) as shop:
        work = shop.work()
        work.do(insert(1))
        shop.run(shop.database.close())
        work.rollback()
        assert shop.in_use() == 0
        with shop.second_engine() as engine, engine.connect() as connection:
            if shop.is_postgres:
                # In one transaction the server shows the same activity again and again.
                connection.execution_options(isolation_level="AUTOCOMMIT")
                count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                assert _in_the_end(lambda: connection.execute(text(count)).scalar_one() == 1)
            else:
                connection.exec_driver_sql("BEGIN EXCLUSIVE")
        shop.database = Database(url, interactive=1, others=1)


def _in_the_end(is_so: Callable[[], bool]) -> bool:
    """True if the condition comes true: a server notices the end of a connection a little later."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


def test_a_task_that_the_function_has_left_behind_does_not_keep_the_connection(task_shop: Shop) -> None:
    work = task_shop.work()
    work.do(insert(1))
    inner = work.inner
    assert isinstance(inner, AsyncSqlWork)

    async def forgetful() -> Coroutine[Any, Any, Any] | None:
        slow = "SELECT pg_sleep(0.5)" if task_shop.is_postgres else _slow(task_shop).replace("1000000000000", "300000")
        abandoned = asyncio.create_task(inner.session.execute(text(slow)))
        await asyncio.sleep(0.05)
        await inner.rollback()
        abandoned.cancel()
        await asyncio.wait({abandoned})
        return None

    task_shop.run(forgetful())
    _works_on(task_shop)


class _Failed(Exception):
    """The function's own error."""


INSERT = text("INSERT INTO orders (number, what) VALUES (1, 'x')")
LATE = "transaction of this statement has ended: await every statement"
Abandoned = list[asyncio.Future[Any]]
"""Statements that a function started and did not await to their end."""


async def _fails() -> None:
    raise _Failed


async def _gathers(session: AsyncSession, abandoned: Abandoned) -> None:
    abandoned.append(asyncio.ensure_future(session.execute(INSERT)))
    await asyncio.gather(abandoned[-1], _fails())


async def _leaves_a_task_and_raises(session: AsyncSession, abandoned: Abandoned) -> None:
    abandoned.append(asyncio.create_task(session.execute(INSERT)))
    await asyncio.sleep(0)
    raise _Failed


async def _leaves_a_task_and_returns(session: AsyncSession, abandoned: Abandoned) -> None:
    abandoned.append(asyncio.create_task(session.execute(INSERT)))
    await asyncio.sleep(0)


async def _shields(session: AsyncSession, abandoned: Abandoned) -> None:
    abandoned.append(asyncio.ensure_future(session.execute(INSERT)))
    shielded = asyncio.shield(abandoned[-1])
    asyncio.get_running_loop().call_soon(shielded.cancel)
    try:
        await shielded
    except asyncio.CancelledError:
        raise _Failed from None


async def _waits_for_the_first(session: AsyncSession, abandoned: Abandoned) -> None:
    abandoned.append(asyncio.ensure_future(session.execute(INSERT)))
    await asyncio.wait([abandoned[-1], asyncio.ensure_future(asyncio.sleep(0))], return_when=asyncio.FIRST_COMPLETED)
    raise _Failed


async def _begins_with_two(session: AsyncSession, abandoned: Abandoned) -> None:
    abandoned += [asyncio.ensure_future(session.execute(INSERT)) for _ in range(2)]
    await asyncio.gather(*abandoned[-2:])


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (_gathers, _Failed),
        (_leaves_a_task_and_raises, _Failed),
        (_leaves_a_task_and_returns, Swallowed),
        (_shields, _Failed),
        (_waits_for_the_first, _Failed),
        (_begins_with_two, InvalidRequestError),
    ],
)
def test_a_connection_that_comes_after_the_end_of_its_work_goes_back_at_once(
    task_shop: Shop,
    function: Callable[[AsyncSession, Abandoned], Coroutine[Any, Any, None]],
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With a ping the session always waits for its connection, also if that is back in the pool already.
    monkeypatch.setattr(postgresql, "IDLE_S", 0.0)
    abandoned: Abandoned = []

    async def stage() -> None:
        work = task_shop.database.new_async_work()
        try:
            await function(work.session, abandoned)
            await work.check()
            await work.commit()
        finally:
            await work.rollback()

    for _ in range(3):
        with pytest.raises(error):
            task_shop.run(stage())

    async def ends() -> list[BaseException | None]:
        return [each.exception() for each in (await asyncio.wait(abandoned))[0]]

    late = [each for each in task_shop.run(ends()) if not isinstance(each, InvalidRequestError)]
    assert len(late) == 3
    for each in late:
        assert isinstance(each, LocalProtocolError) and LATE in str(each)
    _works_on(task_shop)


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
def test_a_connection_that_comes_after_the_end_of_its_function_in_a_thread_goes_back_at_once(
    url: str, raises: bool
) -> None:
    with Shop(url, "threads", workers=1) as shop:
        is_connecting, resume = threading.Event(), threading.Event()

        def held(*_: object) -> None:
            is_connecting.set()
            resume.wait(30)

        pool = shop.database._sql_engines[False].for_threads
        event.listen(pool, "checkout", held)
        work = shop.work()
        late = work.start(lambda session: session.execute(INSERT))
        assert is_connecting.wait(30)
        if not raises:
            with pytest.raises(Swallowed, match="still waited for its connection"):
                work.check()
        work.rollback()
        resume.set()
        with pytest.raises(LocalProtocolError, match=LATE):
            late.result(30)
        _works_on(shop)
