"""Tests of SQLite as the database of a service. Source: docs/stages-database.md, "SQLite" """

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from tests.stages.sql.shop import Shop, execute_sql, insert
from truenext.stage.sql import sqlite
from truenext.stage.sql.error_kind import classify_error
from truenext.stage.sql.errors import DatabaseErrorKind
from truenext.stage.sql.work import AsyncSqlWork

# Writes to the same file as the test, at the same time.
WRITER = """
import sys
from truenext.stage.sql import Database
database = Database(sys.argv[1], interactive=1, others=1)
from sqlalchemy import text
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    work = database.new_thread_work()
    work.session.execute(text("INSERT INTO orders (number, what) VALUES (:n, 'x')"), {"n": number})
    work.check()
    work.commit()
"""


def test_a_commit_is_durable_and_foreign_keys_hold(sqlite_shop: Shop) -> None:
    work = sqlite_shop.work()

    def settings(session: Session) -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys")
        return [session.execute(text(f"PRAGMA {name}")).scalar_one() for name in names]

    # 2 is FULL.
    assert work.do(settings) == ["wal", 2, 1]
    assert work.do(lambda session: _driver(session).isolation_level) is None
    work.rollback()
    with sqlite_shop.second_engine() as engine, engine.begin() as connection:
        connection.execute(text("CREATE TABLE lines (of int REFERENCES orders (number))"))
    work = sqlite_shop.work()
    with pytest.raises(IntegrityError, match="FOREIGN KEY"):
        work.do(execute_sql("INSERT INTO lines VALUES (7)"))


def _driver(session: Session) -> Any:
    return session.connection().connection.driver_connection


def test_two_transactions_that_have_read_may_both_write(sqlite_shop: Shop) -> None:
    # With the deferred transactions of the driver the second would fail: what it has read is old.
    first, second = sqlite_shop.work(), sqlite_shop.work()

    def read(session: Session) -> int:
        return int(session.execute(text("SELECT count(*) FROM orders")).scalar_one())

    assert first.do(read) == 0
    waiting = second.start(read)
    first.do(insert(1))
    first.commit()
    assert waiting.result(30) == 1
    second.do(insert(2))
    second.commit()
    assert sqlite_shop.orders() == [1, 2]


def test_a_table_that_is_made_in_a_work_that_is_rolled_back_is_not_there(sqlite_shop: Shop) -> None:
    # The driver by itself would commit before.
    work = sqlite_shop.work()
    work.do(insert(1))
    work.do(execute_sql("CREATE TABLE new (x int)"))
    work.rollback()
    assert sqlite_shop.orders() == []
    with sqlite_shop.second_engine() as engine, engine.connect() as connection, pytest.raises(OperationalError):
        connection.execute(text("SELECT * FROM new"))


def test_two_processes_write_to_one_file(sqlite_shop: Shop) -> None:
    there = subprocess.Popen([sys.executable, "-c", WRITER, sqlite_shop.url, "1000", "1100"])
    try:
        for number in range(100):
            work = sqlite_shop.work()
            work.do(insert(number))
            work.check()
            work.commit()
        assert there.wait(60) == 0
    finally:
        there.kill()
        there.wait()
    assert sqlite_shop.orders() == [*range(100), *range(1000, 1100)]


def test_another_process_that_writes_for_longer_than_is_waited_means_to_try_again(
    sqlite_url: str, face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sqlite.CONNECT_ARGS, "timeout", 0.05)
    with Shop(sqlite_url, face) as shop, shop.second_engine() as engine, engine.connect() as other:
        other.exec_driver_sql("INSERT INTO orders (number, what) VALUES (7, 'theirs')")
        work = shop.work()
        with pytest.raises(OperationalError, match="locked") as raised:
            work.do(insert(1))
        assert classify_error(raised.value) is DatabaseErrorKind.RETRYABLE
        # There was no transaction yet, so a function that lives without is not to blame.
        work.check()
        work.commit()
        other.commit()
        after = shop.work()
        after.do(insert(1))
        after.commit()
        assert shop.orders() == [1, 7]


def test_wait_for_another_process_does_not_block_the_event_loop(sqlite_url: str) -> None:
    with Shop(sqlite_url, "tasks") as shop, shop.second_engine() as engine, engine.connect() as other:
        other.exec_driver_sql("INSERT INTO orders (number, what) VALUES (7, 'theirs')")
        work = shop.work()
        waiting = work.start(insert(1))

        async def still_runs() -> str:
            await asyncio.sleep(0.05)
            return "yes"

        assert shop.run(still_runs()) == "yes"
        assert not waiting.done()
        other.commit()
        waiting.result(30)
        work.commit()
        assert shop.orders() == [1, 7]


def test_a_task_that_is_cancelled_in_the_line_or_while_it_begins_leaves_nothing(sqlite_url: str) -> None:
    with Shop(sqlite_url, "tasks") as shop:
        holder = shop.work()
        holder.do(insert(1))
        in_line = shop.work()
        assert isinstance(in_line.inner, AsyncSqlWork)
        inner = in_line.inner

        async def cancel() -> None:
            task = asyncio.create_task(inner.session.execute(text("SELECT 1")))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await inner.rollback()

        shop.run(cancel())
        assert shop.in_use() == 1
        holder.commit()
        with shop.second_engine() as engine, engine.connect() as other:
            other.exec_driver_sql("INSERT INTO orders (number, what) VALUES (7, 'theirs')")
            started = shop.work()
            assert isinstance(started.inner, AsyncSqlWork)
            inner = started.inner
            waiting = threading.Thread(target=lambda: shop.run(cancel()))
            waiting.start()
            waiting.join(1)
            other.rollback()
            waiting.join()
        after = shop.work()
        after.do(insert(2))
        after.commit()
        assert shop.orders() == [1, 2]


def test_the_file_may_be_moved_to_a_symbolic_link(tmp_path: Path, face: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "shop.db")
    with Shop(f"sqlite:///{tmp_path / 'link.db'}", face) as shop:
        work = shop.work()
        work.do(insert(1))
        work.commit()
        assert shop.orders() == [1]
