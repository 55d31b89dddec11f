"""Tests of a COMMIT whose answer was lost. Source: docs/stages-database.md, "COMMIT in doubt" """

import asyncio
import sqlite3
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from tests.stages.commit_proxy import CommitProxy, Lose
from tests.stages.postgres import PostgresServer
from tests.stages.sql.shop import Shop, insert
from truenext.stage.sql.error_kind import classify_error, is_definite_failure
from truenext.stage.sql.errors import CommitInDoubt, DatabaseErrorKind, NotCommitted
from truenext.stage.sql.work import AsyncSqlWork


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[CommitProxy]:
    with CommitProxy(postgres.folder) as made:
        yield made


@pytest.fixture
def far_shop(postgres: PostgresServer, postgres_database: str, proxy: CommitProxy, face: str) -> Iterator[Shop]:
    """A shop behind a proxy that loses answers or COMMITs on demand."""
    far = postgres.url(postgres_database, "127.0.0.1", proxy.port)
    with Shop(far, face, postgres.url(postgres_database)) as made:
        yield made


def _orders_in_the_end(shop: Shop, expected: list[int]) -> list[int]:
    """Return the committed orders, once the server has finished: it may still be at work when its client has given
    up."""
    deadline = time.monotonic() + 20
    while (found := shop.orders()) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(("lose", "happened"), [(Lose.ANSWER, [1]), (Lose.COMMIT, [])])
def test_commit_with_a_lost_answer_is_in_doubt(
    far_shop: Shop, proxy: CommitProxy, lose: Lose, happened: list[int]
) -> None:
    work = far_shop.work()
    work.do(insert(1))
    work.check()
    proxy.lose = lose
    with pytest.raises(CommitInDoubt) as raised:
        work.commit()
    assert proxy.has_lost.is_set()
    assert (work.inner.is_committed, classify_error(raised.value)) == (None, DatabaseErrorKind.LOST)
    assert _orders_in_the_end(far_shop, happened) == happened
    assert far_shop.in_use() == 0
    after = far_shop.work()
    after.do(insert(2))
    after.commit()
    assert far_shop.orders() == [*happened, 2]


def test_a_listener_that_raises_after_the_commit_takes_nothing_back(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    work = shop.work()
    work.do(insert(1))
    work.check()
    inner = work.do(lambda session: session)

    def fails(session: Session) -> None:
        raise ValueError("after all")

    event.listen(inner, "after_commit", fails)
    work.commit()
    assert (work.inner.is_committed, shop.orders(), shop.in_use()) == (True, [1], 0)
    assert "a listener of a session has failed after the commit" in caplog.text


def test_a_server_that_stops_before_the_commit_is_in_doubt_unless_it_was_asked(
    own_postgres: PostgresServer, face: str
) -> None:
    with Shop(own_postgres.url("postgres"), face) as shop:
        checked, not_checked = shop.work(), shop.work()
        for number, work in enumerate((checked, not_checked)):
            work.do(insert(number))
        own_postgres.stop()
        with pytest.raises(DBAPIError):
            checked.check()
        assert checked.inner.is_committed is False
        with pytest.raises(CommitInDoubt):
            not_checked.commit()
        assert not_checked.inner.is_committed is None


def test_commit_refused_by_the_database_is_not_in_doubt(shop: Shop) -> None:
    with shop.second_engine() as engine, engine.begin() as connection:
        connection.execute(text("CREATE TABLE lines (of int REFERENCES orders (number) DEFERRABLE INITIALLY DEFERRED)"))
    work = shop.work()
    work.do(lambda session: session.execute(text("INSERT INTO lines VALUES (7)")))
    with pytest.raises(NotCommitted):
        work.commit()
    assert work.inner.is_committed is False


def test_an_io_error_of_sqlite_at_the_commit_is_in_doubt_and_a_full_disk_is_not() -> None:
    for code, answered in ((sqlite3.SQLITE_IOERR_FSYNC, False), (sqlite3.SQLITE_FULL, True)):
        orig = sqlite3.OperationalError()
        orig.sqlite_errorcode = code
        assert is_definite_failure(DBAPIError(None, None, orig)) is answered


def test_a_commit_that_is_cancelled_ends_and_says_what_became_of_it(url: str) -> None:
    with Shop(url, "tasks") as shop:
        work = shop.work()
        work.do(insert(1))
        inner = work.inner
        assert isinstance(inner, AsyncSqlWork)

        async def cancelled() -> None:
            task = asyncio.create_task(inner.commit())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        shop.run(cancelled())
        assert (inner.is_committed, shop.orders(), shop.in_use()) == (True, [1], 0)


def test_a_commit_over_a_network_that_stands_still_is_given_up_after_a_cancellation(
    postgres: PostgresServer, postgres_database: str, proxy: CommitProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.stage.sql.shielded.CANCEL_TIMEOUT_S", 0.05)
    far = postgres.url(postgres_database, "127.0.0.1", proxy.port)
    with Shop(far, "tasks", postgres.url(postgres_database)) as shop:
        _give_up_a_commit(shop, proxy)


def _give_up_a_commit(shop: Shop, proxy: CommitProxy) -> None:
    work = shop.work()
    work.do(insert(1))
    inner = work.inner
    assert isinstance(inner, AsyncSqlWork)
    proxy.lose = Lose.ALL_FROM_NOW

    async def cancelled() -> None:
        task = asyncio.create_task(inner.commit())
        await asyncio.to_thread(proxy.has_lost.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    shop.run(cancelled())
    assert inner.is_committed is None
    assert shop.in_use() == 0
