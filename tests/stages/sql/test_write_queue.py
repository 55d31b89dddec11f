"""Tests of the queue of writers to one SQLite file: interactive work first, then in order of arrival."""

import asyncio
import gc
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.stages.sql.shop import Driven, Shop, insert
from truenext.stage.sql import Database, apply_schema
from truenext.stage.sql.outbox_table import Outbox
from truenext.stage.sql.sqlite import WriteQueue, write_queue_of
from truenext.stage.sql.work import AsyncSqlWork


async def _wait_in_queue(queue: WriteQueue, name: str, served: list[str], *, is_interactive: bool = False) -> None:
    await queue.wait_in_task(is_interactive=is_interactive)
    served.append(name)
    queue.end_write()


async def _all_waiting() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_write_queue_serves_interactive_work_first_and_then_in_order_of_arrival() -> None:
    async def main() -> list[str]:
        queue, served = WriteQueue(), list[str]()
        await queue.wait_in_task(is_interactive=False)
        others = [asyncio.create_task(_wait_in_queue(queue, f"other {number}", served)) for number in range(2)]
        await _all_waiting()
        urgent = [
            asyncio.create_task(_wait_in_queue(queue, f"urgent {number}", served, is_interactive=True))
            for number in range(2)
        ]
        await _all_waiting()
        assert served == []
        queue.end_write()
        await asyncio.gather(*others, *urgent)
        return served

    assert asyncio.run(main()) == ["urgent 0", "urgent 1", "other 0", "other 1"]


def test_write_queue_drops_a_cancelled_waiter_and_serves_the_next() -> None:
    async def main() -> list[str]:
        queue, served = WriteQueue(), list[str]()
        await queue.wait_in_task(is_interactive=False)
        cancelled = asyncio.create_task(_wait_in_queue(queue, "cancelled", served))
        later = asyncio.create_task(_wait_in_queue(queue, "behind", served))
        await _all_waiting()
        cancelled.cancel()
        await asyncio.wait({cancelled})
        queue.end_write()
        await later
        return served

    assert asyncio.run(main()) == ["behind"]


def test_write_queue_passes_the_turn_of_a_waiter_cancelled_as_it_came() -> None:
    async def main() -> list[str]:
        queue, served = WriteQueue(), list[str]()
        await queue.wait_in_task(is_interactive=False)
        cancelled = asyncio.create_task(_wait_in_queue(queue, "cancelled", served))
        later = asyncio.create_task(_wait_in_queue(queue, "behind", served))
        await _all_waiting()
        # Its turn, and its end, before it has run.
        queue.end_write()
        cancelled.cancel()
        await asyncio.wait({cancelled})
        await later
        return served

    assert asyncio.run(main()) == ["behind"]


def test_write_queue_serves_tasks_and_threads_in_one_order() -> None:
    async def main() -> list[str]:
        queue, served = WriteQueue(), list[str]()
        await queue.wait_in_task(is_interactive=False)

        def in_thread(name: str) -> None:
            queue.wait_in_thread(is_interactive=False)
            served.append(name)
            queue.end_write()

        with ThreadPoolExecutor() as threads:
            first = asyncio.create_task(_wait_in_queue(queue, "task", served))
            await _all_waiting()
            second = threads.submit(in_thread, "thread")
            while len(queue._others_waiting) < 2:
                await asyncio.sleep(0)
            third = asyncio.create_task(_wait_in_queue(queue, "another task", served))
            await _all_waiting()
            queue.end_write()
            await asyncio.gather(first, asyncio.wrap_future(second), third)
        return served

    assert asyncio.run(main()) == ["task", "thread", "another task"]


def test_write_queue_is_one_for_all_names_of_a_file_and_freed_when_unused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    queue = write_queue_of(tmp_path / "file")
    assert write_queue_of(tmp_path / "link") is queue is write_queue_of(tmp_path / "x" / ".." / "file")
    assert write_queue_of(tmp_path / "other") is not queue
    number = id(queue)
    queue._lock = None  # type: ignore[assignment]
    del queue
    gc.collect()
    assert number and write_queue_of(tmp_path / "file")._lock is not None


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_transactions_on_one_file_begin_one_by_one_and_interactive_ones_first(sqlite_shop: Shop, ends: str) -> None:
    shop, served = sqlite_shop, list[int]()
    first = shop.work()
    first.do(insert(0))
    waiting: list[tuple[Driven, Future[None]]] = []
    for number, is_interactive in ((1, False), (2, False), (3, True), (4, True)):
        work = shop.work(is_interactive=is_interactive)
        started = work.start(insert(number))
        started.add_done_callback(lambda _, number=number: served.append(number))  # type: ignore[misc]
        waiting.append((work, started))
        _wait_until_in_line(shop, len(waiting))
    getattr(first, ends)()
    for number in (3, 4, 1, 2):
        work, started = waiting[number - 1]
        started.result(30)
        assert served[-1] == number
        getattr(work, ends)()
    assert served == [3, 4, 1, 2]


def _wait_until_in_line(shop: Shop, count: int) -> None:
    file = shop.database._address.file
    assert file is not None
    queue = write_queue_of(file)
    while len(queue._interactive_waiting) + len(queue._others_waiting) < count:
        pass


def test_async_and_plain_work_of_several_databases_share_the_write_queue_of_their_file(sqlite_url: str) -> None:
    with Shop(sqlite_url, "tasks") as shop, Shop(sqlite_url, "threads") as same:
        first, second = shop.work(), same.work()
        first.do(insert(1))
        waiting = second.start(insert(2))
        _wait_until_in_line(shop, 1)
        first.commit()
        waiting.result(30)
        second.commit()
        assert shop.orders() == [1, 2]


def test_outbox_writes_are_served_before_work_that_is_not_interactive(sqlite_url: str) -> None:
    """The relay sends units of user transactions. Behind a batch it took seconds instead of one."""
    apply_schema(sqlite_url)
    served: list[str] = []

    async def work(work: AsyncSqlWork) -> None:
        await work.session.execute(text("SELECT 1"))
        served.append("work")
        await work.rollback()

    async def check(outbox: Outbox) -> None:
        await outbox.heartbeat()
        served.append("outbox")

    async def main() -> None:
        database = Database(sqlite_url, interactive=1, others=2)
        try:
            await database.open()
            outbox = database.outbox("shop", "process", "shop on a")
            first = database.new_async_work()
            await first.session.execute(text("SELECT 1"))
            file = database._address.file
            assert file is not None
            queue = write_queue_of(file)
            tasks = []
            for number, each in enumerate((work(database.new_async_work()), check(outbox)), 1):
                tasks.append(asyncio.create_task(each))
                while len(queue._interactive_waiting) + len(queue._others_waiting) < number:
                    await asyncio.sleep(0)
            await first.rollback()
            await asyncio.gather(*tasks)
        finally:
            await database.close()

    asyncio.run(main())
    assert served == ["outbox", "work"]
