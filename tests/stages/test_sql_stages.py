"""Tests of SQL and messages of one stage: they are one transaction, except for the commit gap.

Source: docs/stages.md, "One transaction"
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, get_args

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.drawing import each_one_of
from tests.stages.flows import Memo, Number, Text, run, until
from truenext.errors import LocalProtocolError
from truenext.stage import Depends, Endpoint, Flow, Reject, Service
from truenext.stage.sql.errors import DatabaseUnavailable
from truenext.testing.stages import Point, Stages

INSERT = text("INSERT INTO orders VALUES (:n)")
Body = Callable[[Number, Flow, "Shop"], None]


@pytest.fixture(params=each_one_of([True, False], ["async", "plain"]))
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Shop:
    """A service with a stage that inserts a row and sends a message, of either kind."""

    def __init__(self, is_async: bool, body: Body = lambda number, flow, shop: None, **settings: Any) -> None:
        """`body` is the stage's code after its statement."""
        self.app = app = Service("shop", **settings)
        self.received: list[int] = []
        self.attempts: list[int] = []

        @app.terminator("take", Number)
        async def take(number: Number) -> None:
            self.received.append(number.n)

        self.take = take

        async def asynchronous(number: Number, flow: Flow, sql: AsyncSession) -> Number:
            self.attempts.append(flow.attempt)
            await sql.execute(INSERT, {"n": number.n})
            flow.send(take, number)
            body(number, flow, self)
            return number

        def plain(number: Number, flow: Flow, sql: Session) -> Number:
            self.attempts.append(flow.attempt)
            sql.execute(INSERT, {"n": number.n})
            flow.send(take, number)
            body(number, flow, self)
            return number

        place = app.endpoint("placing", Number, Number)
        place.stage(asynchronous if is_async else plain)
        self.place: Endpoint[Number, Number] = place


async def make_table(t: Stages, constraint: str = "PRIMARY KEY") -> None:
    async with t.sql() as sql:
        await sql.execute(text(f"CREATE TABLE orders (n INTEGER {constraint})"))


async def orders(t: Stages) -> list[int]:
    async with t.sql() as sql:
        return sorted((await sql.execute(text("SELECT n FROM orders"))).scalars())


def test_rows_and_messages_of_a_stage_are_there_together(database: str, is_async: bool) -> None:
    shop = Shop(is_async)

    async def work(t: Stages) -> None:
        await make_table(t)
        assert await t.ask(shop.place, Number(1)) == Number(1)
        await t.wait_until_ended()
        assert (await orders(t), shop.received) == ([1], [1])

    run(shop.app, work, database=database)


def test_an_exception_takes_back_what_was_inserted_and_its_message_is_a_dead_letter(
    database: str, is_async: bool
) -> None:
    def fails(number: Number, flow: Flow, shop: Shop) -> None:
        raise ValueError("no")

    shop = Shop(is_async, fails, attempts=2)

    async def work(t: Stages) -> None:
        await make_table(t)
        await t.send(shop.place, Number(1))
        await t.wait_until_ended(dead_letters=1)
        assert (await orders(t), shop.received, shop.attempts) == ([], [], [1, 2])

    run(shop.app, work, database=database)


def test_a_refusal_takes_back_what_was_inserted(database: str, is_async: bool) -> None:
    def rejects(number: Number, flow: Flow, shop: Shop) -> None:
        raise Reject("no")

    shop = Shop(is_async, rejects)

    async def work(t: Stages) -> None:
        await make_table(t)
        await t.send(shop.place, Number(1))
        await t.wait_until_ended(dead_letters=1)
        assert (await orders(t), shop.received, shop.attempts) == ([], [], [1])

    run(shop.app, work, database=database)


def test_a_statement_that_fails_is_an_attempt(database: str, is_async: bool) -> None:
    shop = Shop(is_async, attempts=2)

    async def work(t: Stages) -> None:
        await make_table(t)
        await t.send(shop.place, Number(1))
        await t.wait_until_ended()
        await t.send(shop.place, Number(1))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.last_cause.startswith("IntegrityError")
        assert (await orders(t), shop.received) == ([1], [1])

    run(shop.app, work, database=database)


BEFORE: list[Point] = ["received", "run", "checked", "sent"]


@pytest.mark.parametrize("point", BEFORE)
def test_error_before_the_sql_commit_rolls_back_rows_and_messages(point: Point, database: str) -> None:
    shop = Shop(True, attempts=3)

    def fails() -> None:
        raise OSError(f"at {point}")

    async def work(t: Stages) -> None:
        await make_table(t)
        t.at(point, fails, stage="placing", times=2)
        t.at("run", lambda: committed.append(len(shop.received)), stage="placing", times=9)
        await t.send(shop.place, Number(1))
        await t.wait_until_ended()
        # Had the first attempts left a row, the third one would have failed.
        assert (await orders(t), shop.received) == ([1], [1])
        assert set(committed) == {0}

    committed: list[int] = []
    run(shop.app, work, database=database)


def test_error_after_the_sql_commit_repeats_sql_and_no_message(database: str, is_async: bool) -> None:
    """This is the commit gap."""
    shop = Shop(is_async, attempts=3)

    def fails() -> None:
        raise OSError

    async def work(t: Stages) -> None:
        await make_table(t, constraint="")
        t.at("SQL committed", fails, stage="placing")
        await t.send(shop.place, Number(1))
        await t.wait_until_ended()
        assert (await orders(t), shop.received, shop.attempts) == ([1, 1], [1], [1, 2])

    run(shop.app, work, database=database)


def test_a_broker_that_crashes_before_sqls_commit_takes_back_sql_and_is_no_attempt(database: str) -> None:
    shop = Shop(True)
    crashes: list[asyncio.Task[None]] = []

    async def work(t: Stages) -> None:
        await make_table(t)

        def crash() -> None:
            t.broker.kill()
            crashes.append(asyncio.ensure_future(t.broker._start_again()))

        t.at("checked", crash, stage="placing")
        await t.send(shop.place, Number(1))
        await until(lambda: bool(crashes))
        await crashes[0]
        await t.wait_until_ended()
        assert (await orders(t), shop.received) == ([1], [1])

    run(shop.app, work, database=database)


def test_transaction_refused_by_the_broker_leaves_no_rows(database: str, is_async: bool) -> None:
    def says_too_much(number: Number, flow: Flow, shop: Shop) -> None:
        for _ in range(2):
            flow.send(large, Text("x" * 9_000_000))

    shop = Shop(is_async, says_too_much, attempts=2)
    large = shop.app.remote("large", Text)

    async def work(t: Stages) -> None:
        await make_table(t)
        await t.send(shop.place, Number(1))
        await t.wait_until_ended(dead_letters=1)
        assert (await orders(t), shop.received, shop.attempts) == ([], [], [1, 2])

    run(shop.app, work, database=database)


def test_want_of_room_at_the_broker_is_known_before_sql_is_committed_and_no_attempt(database: str) -> None:
    shop = Shop(True)

    async def work(t: Stages) -> None:
        await make_table(t)
        t.at("received", t.broker.fill_disk, stage="placing")
        await t.send(shop.place, Number(1))
        await until(lambda: bool(shop.attempts))
        await asyncio.sleep(0.05)
        assert await orders(t) == []
        t.broker.free_disk()
        await t.wait_until_ended()
        assert (await orders(t), shop.received, set(shop.attempts)) == ([1], [1], {1})

    run(shop.app, work, database=database)


def test_sql_begins_when_the_function_first_says_something_to_the_database(database: str) -> None:
    """Without a use of its session a stage skips all SQL."""
    app = Service("shop")
    points: list[str] = []

    @app.terminator("uses", Number)
    async def uses(number: Number, sql: AsyncSession) -> None:
        await sql.execute(text("SELECT 1"))

    @app.terminator("asks", Number)
    async def asks(number: Number, sql: AsyncSession) -> None: ...

    async def work(t: Stages) -> None:
        for stage in ("uses", "asks"):
            for point in get_args(Point):
                t.at(point, partial(points.append, f"{stage} {point}"), stage=stage, required=False)
        await t.send(uses, Number())
        await t.wait_until_ended()
        await t.send(asks, Number())
        await t.wait_until_ended()
        assert points == [
            "uses received",
            "uses run",
            "uses checked",
            "uses sent",
            "uses SQL committed",
            "uses committed",
            "asks received",
            "asks run",
            "asks committed",
        ]

    run(app, work, database=database)


def test_a_stage_its_dependencies_and_the_stage_that_follows_directly_have_one_session(
    database: str, is_async: bool
) -> None:
    app = Service("shop")
    sessions: list[object] = []
    chain = app.endpoint("chain", Number, attempts=1)

    def of_task(sql: AsyncSession) -> AsyncSession:
        return sql

    def of_thread(sql: Session) -> Session:
        return sql

    async def first_task(
        number: Number, flow: Flow, sql: AsyncSession, same: Annotated[AsyncSession, Depends(of_task)]
    ) -> None:
        sessions.extend([sql, same])
        await sql.execute(INSERT, {"n": number.n})
        flow.next_direct(number)

    async def second_task(number: Number, sql: AsyncSession) -> None:
        sessions.append(sql)
        assert list((await sql.execute(text("SELECT n FROM orders"))).scalars()) == [number.n]
        raise ValueError("takes back both")

    def first_plain(number: Number, flow: Flow, sql: Session, same: Annotated[Session, Depends(of_thread)]) -> None:
        sessions.extend([sql, same])
        sql.execute(INSERT, {"n": number.n})
        flow.next_direct(number)

    def second_plain(number: Number, sql: Session) -> None:
        sessions.append(sql)
        assert list(sql.execute(text("SELECT n FROM orders")).scalars()) == [number.n]
        raise ValueError("takes back both")

    chain.stage(name="one")(first_task if is_async else first_plain)
    chain.stage(name="two")(second_task if is_async else second_plain)

    async def work(t: Stages) -> None:
        await make_table(t)
        await t.send(chain, Number(1))
        await t.wait_until_ended(dead_letters=1)
        assert len(sessions) == 3 and len(set(map(id, sessions))) == 1
        assert await orders(t) == []

    run(app, work, database=database)


def test_a_stage_that_asks_for_a_session_cannot_follow_directly_one_that_does_not(database: str) -> None:
    app = Service("shop", attempts=1)
    chain = app.endpoint("chain", Number, Number)

    @chain.stage
    async def one(number: Number, flow: Flow) -> None:
        flow.next_direct(number)

    @chain.stage
    async def two(number: Number, sql: AsyncSession) -> Number:
        raise AssertionError("not reached")

    async def work(t: Stages) -> None:
        await t.send(chain, Number(3))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.last_cause.startswith("FlowError: stage two takes a session, but one")

    run(app, work, database=database)


def test_an_initiation_of_its_own_stays_though_its_stage_and_sql_are_taken_back(database: str) -> None:
    app = Service("shop")
    received: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number.n)

    @app.terminator("fails", Number, attempts=1)
    async def fails(number: Number, flow: Flow, sql: AsyncSession) -> None:
        await sql.execute(INSERT, {"n": 1})
        flow.send(take, Number(1))
        await app.send(take, Number(2), trace="of its own")
        raise ValueError("no")

    async def work(t: Stages) -> None:
        await make_table(t)
        await t.send(fails, Number())
        await t.wait_until_ended(dead_letters=1)
        assert (await orders(t), received) == ([], [2])

    run(app, work, database=database)


def test_caught_error_that_ended_the_transaction_fails_the_stage(postgres_database: str, postgres: Any) -> None:
    app = Service("shop", attempts=1)
    received: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number.n)

    @app.terminator("swallows", Number)
    async def swallows(number: Number, flow: Flow, sql: AsyncSession) -> None:
        await sql.execute(INSERT, {"n": 1})
        flow.send(take, number)
        with contextlib.suppress(IntegrityError):
            await sql.execute(INSERT, {"n": 1})

    @app.terminator("saves", Number)
    async def saves(number: Number, flow: Flow, sql: AsyncSession) -> None:
        await sql.execute(INSERT, {"n": 2})
        flow.send(take, number)
        try:
            async with sql.begin_nested():
                await sql.execute(INSERT, {"n": 2})
        except IntegrityError:
            pass

    async def work(t: Stages) -> None:
        await make_table(t)
        await t.send(swallows, Number(1))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.last_cause.startswith("Swallowed")
        await t.send(saves, Number(2))
        await t.wait_until_ended(dead_letters=1)
        assert (await orders(t), received) == ([2], [2])

    run(app, work, database=postgres.url(postgres_database))


def test_the_sessions_own_commit_and_rollback_are_refused(database: str, is_async: bool) -> None:
    app = Service("shop", attempts=1)
    refused: list[str] = []

    async def asynchronous(number: Number, sql: AsyncSession) -> None:
        await sql.execute(INSERT, {"n": number.n})
        with pytest.raises(LocalProtocolError, match="the stage begins the transaction"):
            await (sql.commit() if number.n else sql.rollback())
        refused.append("refused")

    def plain(number: Number, sql: Session) -> None:
        sql.execute(INSERT, {"n": number.n})
        with pytest.raises(LocalProtocolError, match="the stage begins the transaction"):
            (sql.commit if number.n else sql.rollback)()
        refused.append("refused")

    take = app.endpoint("take", Number)
    take.stage(asynchronous if is_async else plain)

    async def work(t: Stages) -> None:
        await make_table(t)
        for n in range(2):
            await t.send(take, Number(n))
        await t.wait_until_ended(dead_letters=2)
        assert (await orders(t), refused) == ([], ["refused"] * 2)

    run(app, work, database=database)


def test_a_deadlock_is_run_again_in_place_and_is_no_attempt(postgres_database: str, postgres: Any) -> None:
    app = Service("shop", concurrency=2)
    both = asyncio.Barrier(2)
    runs: list[int] = []
    ended: list[tuple[int, int]] = []

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow, sql: AsyncSession) -> None:
        runs.append(number.n)
        update = text("UPDATE orders SET n = n WHERE n = :n")
        await sql.execute(update, {"n": number.n})
        if len(runs) <= 2:
            await both.wait()
        await sql.execute(update, {"n": 1 - number.n})
        flow.after_commit(ended.append, (number.n, flow.attempt))

    async def work(t: Stages) -> None:
        await make_table(t)
        async with t.sql() as sql:
            for n in range(2):
                await sql.execute(INSERT, {"n": n})
        for n in range(2):
            await t.send(take, Number(n))
        await t.wait_until_ended()
        assert sorted(ended) == [(0, 1), (1, 1)]
        assert len(runs) > 2

    run(app, work, database=postgres.url(postgres_database))


def test_unavailable_database_pauses_its_stages_and_no_others(database: str) -> None:
    """The database reports itself unavailable; the gate probes it, and finds it."""
    app = Service("shop")
    attempts: list[int] = []
    received: list[int] = []

    @app.terminator("uses", Number)
    async def uses(number: Number, flow: Flow, sql: AsyncSession) -> None:
        attempts.append(flow.attempt)
        await sql.execute(INSERT, {"n": number.n})
        if len(attempts) == 1:
            raise DatabaseUnavailable("it is full")

    @app.terminator("other", Number)
    async def other(number: Number) -> None:
        received.append(number.n)

    async def work(t: Stages) -> None:
        await make_table(t)
        await t.send(uses, Number(1))
        await until(lambda: bool(attempts))
        await t.send(other, Number(2))
        await until(lambda: received == [2])
        await until(lambda: len(attempts) == 2)
        await t.wait_until_ended()
        assert (await orders(t), attempts) == ([1], [1, 1])

    run(app, work, database=database)


def test_a_service_whose_database_is_not_there_does_not_start() -> None:
    app = Service("shop")

    @app.terminator("uses", Number)
    async def uses(number: Number, sql: AsyncSession) -> None: ...

    async def work(t: Stages) -> None:
        raise AssertionError("not reached")

    with pytest.raises(DatabaseUnavailable, match="there is no file"):
        run(app, work, database="sqlite:////nowhere/shop.db")


def test_an_error_of_the_own_statement_is_an_attempt_and_not_trouble_of_the_database(database: str) -> None:
    app = Service("shop", attempts=2)
    attempts: list[int] = []

    @app.terminator("uses", Number)
    async def uses(number: Number, flow: Flow, sql: AsyncSession) -> None:
        attempts.append(flow.attempt)
        await sql.execute(text("SELECT * FROM nowhere"))

    async def work(t: Stages) -> None:
        await t.send(uses, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert attempts == [1, 2]
        assert letter.last_cause.startswith((OperationalError.__name__, "ProgrammingError"))

    run(app, work, database=database)


def test_interactive_work_has_connections_of_its_own(postgres_database: str, postgres: Any) -> None:
    """Two works of each kind run concurrently, each in a transaction."""
    app = Service("shop", concurrency=2)
    four = asyncio.Barrier(4)
    backends: set[int] = set()

    @app.terminator("uses", Number)
    async def uses(number: Number, sql: AsyncSession) -> None:
        backends.add((await sql.execute(text("SELECT pg_backend_pid()"))).scalar_one())
        await four.wait()

    async def work(t: Stages) -> None:
        for n in range(2):
            await t.send(uses, Number(n))
            await t.send(uses, Number(n), interactive=True)
        await t.wait_until_ended()
        assert len(backends) == 4

    run(app, work, database=postgres.url(postgres_database))


def test_a_flow_over_several_stages_with_sql_has_its_rows_once(database: str) -> None:
    app = Service("shop")
    chain = app.endpoint("chain", Number, Number, state=Memo)

    @app.single("leaf", Number, Number)
    def leaf(number: Number, sql: Session) -> Number:
        sql.execute(INSERT, {"n": 10 + number.n})
        return number

    @chain.stage
    async def one(number: Number, memo: Memo, flow: Flow, sql: AsyncSession) -> None:
        await sql.execute(INSERT, {"n": number.n})
        memo.n = number.n
        flow.request(leaf, number)

    @chain.stage
    async def two(reply: Number, memo: Memo, sql: AsyncSession) -> Number:
        await sql.execute(INSERT, {"n": 20 + memo.n})
        return reply

    async def work(t: Stages) -> None:
        await make_table(t)
        assert await asyncio.gather(*(t.ask(chain, Number(n)) for n in range(5))) == [Number(n) for n in range(5)]
        await t.wait_until_ended()
        assert await orders(t) == [*range(5), *range(10, 15), *range(20, 25)]

    run(app, work, database=database)


def test_a_session_that_a_task_left_behind_uses_first_after_the_end_of_its_stage_is_refused(database: str) -> None:
    app = Service("shop")
    go_on, abandoned, received = asyncio.Event(), list[asyncio.Task[Any]](), list[int]()

    @app.terminator("forget", Number, concurrency=1)
    async def forget(number: Number, sql: AsyncSession) -> None:
        async def late() -> None:
            await go_on.wait()
            await sql.execute(INSERT, {"n": number.n})

        abandoned.append(asyncio.create_task(late()))

    @app.terminator("insert", Number, concurrency=1)
    async def insert(number: Number, sql: AsyncSession) -> None:
        await sql.execute(INSERT, {"n": number.n})
        received.append(number.n)

    async def work(t: Stages) -> None:
        await make_table(t)
        for n in range(3):
            await app.send(forget, Number(n), trace=f"forget {n}")
        await t.wait_until_ended()
        go_on.set()
        await asyncio.wait(abandoned)
        for task in abandoned:
            assert "before the function of stage forget ends" in str(task.exception()), task
        await app.send(insert, Number(9), trace="insert")
        await t.wait_until_ended()
        assert await orders(t) == received == [9]

    run(app, work, database=database)


def test_running_statement_delays_neither_the_failure_of_its_stage_nor_the_next_attempt(
    database: str,
) -> None:
    app = Service("shop")
    attempts, abandoned = list[int](), list[asyncio.Task[Any]]()
    slow = (
        "SELECT pg_sleep(1000)"
        if database.startswith("postgresql")
        else "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000000000000) SELECT max(i) FROM n"
    )

    @app.terminator("place", Number, concurrency=1, retry={KeyError: "0s"})
    async def place(number: Number, flow: Flow, sql: AsyncSession) -> None:
        attempts.append(flow.attempt)
        await sql.execute(INSERT, {"n": number.n})
        if flow.attempt < 3:

            async def fails() -> None:
                await asyncio.sleep(0.1)
                raise KeyError

            abandoned.append(asyncio.create_task(sql.execute(text(slow))))
            await asyncio.gather(abandoned[-1], fails())

    async def work(t: Stages) -> None:
        await make_table(t)
        await app.send(place, Number(1), trace="order 1")
        await t.wait_until_ended()
        assert attempts == [1, 2, 3]
        assert await orders(t) == [1]
        for task in abandoned:
            assert isinstance(task.exception(), LocalProtocolError)

    run(app, work, database=database)
