"""Tests of statements, results, savepoints and tasks that a function leaves behind: they end with its stage."""

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from sqlalchemy import Result, event, text
from sqlalchemy.exc import ResourceClosedError
from sqlalchemy.ext.asyncio import AsyncResult, AsyncSession
from sqlalchemy.orm import Session

from tests.stages.sql.shop import Order, Shop, insert
from truenext.errors import LocalProtocolError
from truenext.stage.sql.errors import Swallowed
from truenext.stage.sql.work import AsyncSqlWork

PATIENCE_S = 60.0

# They take longer than any test.
SLOW = {
    "postgresql": "SELECT pg_sleep(1000)",
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000000000000) SELECT max(i) "
    "FROM n",
}
# Its rows come one by one, and there are more than any buffer has.
MANY = {
    "postgresql": "SELECT i FROM generate_series(1, 100000) AS i",
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000000) SELECT i FROM n, orders",
}
LATE = "has ended: await every statement"
WAIT_S = 20
Abandoned = list[asyncio.Task[Any]]
"""Tasks that a function started and did not await to their end."""


class _Failed(Exception):
    """The function's own error."""


@pytest.fixture
def task_shop(url: str) -> Iterator[Shop]:
    with Shop(url, "tasks", workers=1) as made:
        yield made


@pytest.fixture
def thread_shop(url: str) -> Iterator[Shop]:
    with Shop(url, "threads", workers=1) as made:
        yield made


def _slow(shop: Shop) -> str:
    return SLOW["postgresql" if shop.is_postgres else "sqlite"]


def _many(shop: Shop) -> str:
    return MANY["postgresql" if shop.is_postgres else "sqlite"]


_NUMBERS = itertools.count(1000)


def _works_on(shop: Shop) -> None:
    """Check that the pool's one connection, or its replacement, works, and that the database keeps nothing."""
    assert shop.in_use() == 0
    number = next(_NUMBERS)
    work = shop.work()
    work.do(insert(number))
    work.check()
    work.commit()
    assert number in shop.orders()
    if shop.is_postgres:
        with shop.second_engine() as engine, engine.connect() as connection:
            others = text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid() AND state <> 'idle'"
            )
            # A server notices the end of a connection a little later.
            deadline = time.monotonic() + PATIENCE_S
            while connection.execute(others).scalar_one():
                assert time.monotonic() < deadline, "a statement still runs"
                # In one transaction the server shows the same activity again.
                connection.rollback()
                time.sleep(0.01)


async def _stage(work: AsyncSqlWork, function: Awaitable[None]) -> None:
    """Run a function as a stage does, within a time limit: check, commit, and roll back."""
    async with asyncio.timeout(WAIT_S):
        try:
            await function
            await work.check()
            await work.commit()
        finally:
            await work.rollback()


async def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait({task})
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _is_too_late(error: BaseException | None) -> bool:
    """True if the error, or an earlier one in its context, says that the transaction has ended: a savepoint that can
    no longer be rolled back raises its own error."""
    while error is not None:
        if isinstance(error, LocalProtocolError):
            return LATE in str(error)
        error = error.__context__
    return False


async def _fails() -> None:
    raise _Failed


async def _is_cancelled(abandoned: asyncio.Task[Any]) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.shield(abandoned)


async def _times_out(abandoned: asyncio.Task[Any]) -> None:
    async with asyncio.timeout(0):
        await asyncio.shield(abandoned)


async def _gathers(abandoned: asyncio.Task[Any]) -> None:
    await asyncio.gather(abandoned, _fails())


async def _returns(_: asyncio.Task[Any]) -> None:
    pass


ENDINGS = pytest.mark.parametrize(
    ("ending", "error"),
    [
        (_gathers, _Failed),
        (_is_cancelled, asyncio.CancelledError),
        (_times_out, TimeoutError),
        (_returns, Swallowed),
    ],
)
Ending = Callable[[asyncio.Task[Any]], Awaitable[None]]


async def _executes(session: AsyncSession, statement: str) -> None:
    await session.execute(text(statement))


async def _executes_in_a_savepoint(session: AsyncSession, statement: str) -> None:
    async with session.begin_nested():
        await session.execute(text(statement))


async def _executes_on_its_connection(session: AsyncSession, statement: str) -> None:
    await (await session.connection()).execute(text(statement))


async def _executes_by_run_sync(session: AsyncSession, statement: str) -> None:
    await session.run_sync(lambda inner: inner.execute(text(statement)))


async def _streams(session: AsyncSession, statement: str) -> None:
    async for _ in await session.stream(text(statement)):
        pass


@ENDINGS
@pytest.mark.parametrize(
    "way",
    [_executes, _executes_in_a_savepoint, _executes_on_its_connection, _executes_by_run_sync, _streams],
)
def test_a_statement_that_runs_when_its_stage_ends_is_interrupted(
    task_shop: Shop, ending: Ending, error: type[BaseException], way: Callable[[AsyncSession, str], Awaitable[None]]
) -> None:
    async def stage() -> BaseException | None:
        work = task_shop.database.new_async_work()
        abandoned: list[asyncio.Task[Any]] = []

        async def function() -> None:
            await work.session.execute(text("INSERT INTO orders (number, what) VALUES (1, 'x')"))
            abandoned.append(asyncio.ensure_future(way(work.session, _slow(task_shop))))
            await asyncio.sleep(0.1)
            await ending(abandoned[0])

        with pytest.raises(error):
            await _stage(work, function())
        assert task_shop.in_use() == 0
        return await _error_of(abandoned[0])

    assert _is_too_late(task_shop.run(stage()))
    _works_on(task_shop)
    assert 1 not in task_shop.orders()


def test_thirty_stages_that_end_while_a_statement_runs_leave_the_pool_as_it_was(task_shop: Shop) -> None:
    async def stage() -> None:
        work = task_shop.database.new_async_work()
        abandoned = asyncio.ensure_future(work.session.execute(text(_slow(task_shop))))

        async def function() -> None:
            await asyncio.sleep(0.01)
            await _gathers(abandoned)

        with pytest.raises(_Failed):
            await _stage(work, function())
        await _error_of(abandoned)

    for _ in range(30):
        task_shop.run(stage())
    _works_on(task_shop)


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
def test_a_statement_in_a_thread_that_a_plain_function_left_is_interrupted(thread_shop: Shop, raises: bool) -> None:
    work = thread_shop.work()
    work.do(insert(1))
    started = threading.Event()

    def runs(session: Session) -> None:
        started.set()
        session.execute(text(_slow(thread_shop)))

    abandoned: Future[None] = work.start(runs)
    assert started.wait(WAIT_S)
    with pytest.raises(TimeoutError):
        abandoned.result(0.1)
    if not raises:
        with pytest.raises(Swallowed, match="was running"):
            work.check()
    work.rollback()
    with pytest.raises(LocalProtocolError, match=LATE):
        abandoned.result(WAIT_S)
    _works_on(thread_shop)
    assert 1 not in thread_shop.orders()


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
def test_rows_that_are_streamed_after_the_end_are_refused_and_disturb_no_other_stage(
    task_shop: Shop, raises: bool
) -> None:
    async def two_stages() -> BaseException | None:
        first = task_shop.database.new_async_work()
        is_over = asyncio.Event()
        abandoned: Abandoned = []

        async def reads(rows: AsyncResult[Any]) -> None:
            await is_over.wait()
            async for _ in rows:
                pass

        async def function() -> None:
            await first.session.execute(text("INSERT INTO orders (number, what) VALUES (1, 'x')"))
            rows = await first.session.stream(text(_many(task_shop)))
            await rows.fetchone()
            abandoned.append(asyncio.ensure_future(reads(rows)))
            if raises:
                raise _Failed

        if raises:
            with pytest.raises(_Failed):
                await _stage(first, function())
        else:
            await _stage(first, function())
        # Something else is written meanwhile, over another connection.
        await asyncio.to_thread(_write_concurrently, task_shop)
        second = task_shop.database.new_async_work()

        async def goes_on() -> BaseException | None:
            await second.session.execute(text("INSERT INTO orders (number, what) VALUES (2, 'x')"))
            is_over.set()
            late = await _error_of(abandoned[0])
            await second.session.execute(text("INSERT INTO orders (number, what) VALUES (3, 'x')"))
            return late

        late: list[BaseException | None] = []

        async def function_2() -> None:
            late.append(await goes_on())

        await _stage(second, function_2())
        return late[0]

    assert _is_too_late(task_shop.run(two_stages()))
    assert {2, 3, 77} <= set(task_shop.orders())
    assert (1 in task_shop.orders()) is not raises
    _works_on(task_shop)


def _write_concurrently(shop: Shop) -> None:
    with shop.second_engine() as engine, engine.begin() as connection:
        connection.execute(text("INSERT INTO orders (number, what) VALUES (77, 'x')"))


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
@pytest.mark.parametrize("streams", [True, False], ids=["streams", "executes"])
def test_rows_that_a_plain_function_has_not_read_are_refused_after_its_end(
    thread_shop: Shop, raises: bool, streams: bool
) -> None:
    first = thread_shop.work()
    first.do(insert(1))

    def reads(session: Session) -> Result[*tuple[Any, ...]]:
        options = {"stream_results": True, "yield_per": 10} if streams else {}
        rows = session.execute(text(_many(thread_shop)), execution_options=options)
        rows.fetchone()
        return rows

    rows = first.do(reads)
    if not raises:
        first.check()
        first.commit()
    first.rollback()
    _write_concurrently(thread_shop)
    second = thread_shop.work()
    second.do(insert(2))
    if streams or not thread_shop.is_postgres:
        with pytest.raises(LocalProtocolError, match=LATE):
            rows.fetchall()
    second.do(insert(3))
    second.check()
    second.commit()
    assert {2, 3, 77} <= set(thread_shop.orders())
    _works_on(thread_shop)


LATE_USES: list[Callable[[AsyncSession, Order], Awaitable[Any]]] = [
    lambda session, _: session.execute(text("SELECT 1")),
    lambda session, _: session.scalars(text("SELECT 1")),
    lambda session, _: session.stream(text("SELECT 1")),
    lambda session, _: session.get(Order, 1),
    lambda session, _: session.connection(),
    lambda session, _: session.run_sync(lambda inner: inner.execute(text("SELECT 1"))),
]


@pytest.mark.parametrize("use", LATE_USES)
@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("is_used", [True, False], ids=["used", "unused"])
def test_a_session_that_is_used_after_its_end_says_that_its_stage_has_ended(
    task_shop: Shop, use: Callable[[AsyncSession, Order], Awaitable[Any]], ending: str, is_used: bool
) -> None:
    async def late() -> None:
        work = task_shop.database.new_async_work()
        session, order = work.session, Order(number=1)
        if is_used:
            await session.execute(text("SELECT 1"))
        await (work.commit() if ending == "commit" else work.rollback())
        with pytest.raises(LocalProtocolError, match=LATE):
            await use(session, order)

    task_shop.run(late())
    _works_on(task_shop)


def test_a_connection_of_the_session_that_is_used_after_the_end_is_closed(task_shop: Shop) -> None:
    async def late() -> None:
        work = task_shop.database.new_async_work()
        connection = await work.session.connection()
        await work.commit()
        with pytest.raises(ResourceClosedError):
            await connection.execute(text("SELECT 1"))
        with pytest.raises(LocalProtocolError, match=LATE):
            await connection.begin()

    task_shop.run(late())
    _works_on(task_shop)


def test_a_savepoint_that_a_task_holds_open_at_the_end_is_rolled_back(task_shop: Shop) -> None:
    async def late() -> BaseException | None:
        work = task_shop.database.new_async_work()
        is_over = asyncio.Event()
        abandoned: Abandoned = []

        async def nested() -> None:
            async with work.session.begin_nested():
                await work.session.execute(text("INSERT INTO orders (number, what) VALUES (1, 'x')"))
                await is_over.wait()
                await work.session.execute(text("INSERT INTO orders (number, what) VALUES (2, 'x')"))

        async def function() -> None:
            abandoned.append(asyncio.ensure_future(nested()))
            await asyncio.sleep(0.1)
            raise _Failed

        with pytest.raises(_Failed):
            await _stage(work, function())
        is_over.set()
        return await _error_of(abandoned[0])

    assert _is_too_late(task_shop.run(late()))
    assert not task_shop.orders()
    _works_on(task_shop)


def test_a_savepoint_that_is_open_when_the_function_raises_does_not_keep_the_connection(shop: Shop) -> None:
    work = shop.work()
    work.do(lambda session: session.begin_nested())
    work.do(insert(1))
    work.rollback()
    _works_on(shop)


def test_a_statement_that_waits_for_another_one_when_the_stage_ends_is_not_committed(task_shop: Shop) -> None:
    """SQLite would commit the statement by itself, if it came after the rollback."""

    async def late() -> list[BaseException | None]:
        work = task_shop.database.new_async_work()
        abandoned: Abandoned = []

        async def function() -> None:
            await work.session.execute(text("SELECT 1"))
            for statement in (_slow(task_shop), "INSERT INTO orders (number, what) VALUES (1, 'x')"):
                abandoned.append(asyncio.create_task(_executes(work.session, statement)))
            await asyncio.sleep(0.1)
            raise _Failed

        with pytest.raises(_Failed):
            await _stage(work, function())
        return [await _error_of(each) for each in abandoned]

    assert all(map(_is_too_late, task_shop.run(late())))
    _works_on(task_shop)
    assert 1 not in task_shop.orders()


def test_a_statement_that_comes_while_the_stage_commits_is_refused(task_shop: Shop) -> None:
    """SQLite would commit the statement by itself, after the COMMIT."""

    async def late() -> BaseException | None:
        work = task_shop.database.new_async_work()
        await work.session.execute(text("INSERT INTO orders (number, what) VALUES (1, 'x')"))
        connection = await work.session.connection()
        engine = connection.engine.sync_engine
        await work.check()
        committing = asyncio.create_task(work.commit())
        abandoned: Abandoned = []

        def on_begin(_: object) -> None:
            abandoned.append(asyncio.create_task(_executes_on(connection, 2)))

        event.listen(engine, "commit", on_begin)
        try:
            await committing
        finally:
            event.remove(engine, "commit", on_begin)
        return await _error_of(abandoned[0])

    assert _is_too_late(task_shop.run(late()))
    assert task_shop.orders() == [1]
    _works_on(task_shop)


async def _executes_on(connection: Any, number: int) -> None:
    await connection.execute(text(f"INSERT INTO orders (number, what) VALUES ({number}, 'x')"))


def test_statement_of_a_left_task_behind_the_return_is_refused_and_the_stage_commits(task_shop: Shop) -> None:
    """Fixed: SQLite committed statements between the check and the COMMIT."""

    async def late() -> list[BaseException | None]:
        work = task_shop.database.new_async_work()
        session = work.session
        await session.execute(text("INSERT INTO orders (number, what) VALUES (1, 'x')"))
        connection = await session.connection()
        work.function_returned()
        errors = [await _error_of(asyncio.create_task(_executes_on(connection, 2)))]
        await work.check()
        errors.append(await _error_of(asyncio.create_task(_executes_on(session, 3))))
        await work.commit()
        return errors

    assert all(map(_is_too_late, task_shop.run(late())))
    assert task_shop.orders() == [1]
    _works_on(task_shop)


def test_session_that_a_left_task_uses_first_behind_the_return_stays_unused(task_shop: Shop) -> None:
    async def late() -> BaseException | None:
        work = task_shop.database.new_async_work()
        session = work.session
        work.function_returned()
        error = await _error_of(asyncio.create_task(_executes_on(session, 1)))
        await work.check()
        await work.commit()
        return error

    assert _is_too_late(task_shop.run(late()))
    assert task_shop.orders() == []
    _works_on(task_shop)


CLOSED_UNDER_A_THREAD = """
import sqlite3, sys, threading
from truenext.stage.sql.sqlite import SerializedConnection

sqlite = sqlite3.connect(":memory:", check_same_thread=False, cached_statements=0, factory=SerializedConnection)
cursor = sqlite.cursor()
cursor.execute("CREATE TABLE t (n)")
begun = threading.Event()
sqlite.create_function("begun", 0, lambda: begun.set() or 1)
slow = "WITH RECURSIVE n(i) AS (SELECT begun() UNION ALL SELECT i + 1 FROM n LIMIT 1000000) SELECT max(i) FROM n"
thread = threading.Thread(target=cursor.execute, args=(f"INSERT INTO t {slow}",))
thread.start()
begun.wait(20)
sqlite.close()
thread.join()
"""


def test_connection_that_is_closed_while_a_thread_executes_waits_for_it() -> None:
    """Fixed: Python's driver asked the closed connection for the last row, and the process died."""
    done = subprocess.run([sys.executable, "-c", CLOSED_UNDER_A_THREAD], check=False, timeout=60)
    assert done.returncode == 0
