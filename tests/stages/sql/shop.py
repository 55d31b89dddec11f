"""A database with one table, and SQL work on it of either kind that a test drives step by step.

A step is a plain function of a session. An `async` work runs it in SQLAlchemy's greenlet, where a session waits without
`await`. So one test covers both kinds, and several works can run concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

from truenext.stage.sql import Database
from truenext.stage.sql.errors import DatabaseErrorKind
from truenext.stage.sql.work import AsyncSqlWork, ThreadSqlWork

T = TypeVar("T")
Step = Callable[[Session], T]
WAIT_S = 30


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    what: Mapped[str] = mapped_column(default="apples")


def insert(number: int) -> Step[None]:
    """Make a step that inserts an order with this number."""

    def step(session: Session) -> None:
        session.execute(text("INSERT INTO orders (number, what) VALUES (:number, 'apples')"), {"number": number})

    return step


def execute_sql(statement: str) -> Step[None]:
    def step(session: Session) -> None:
        session.execute(text(statement))

    return step


def swallowing(step: Step[Any], *more: Step[Any]) -> Step[BaseException]:
    """Make a step that catches and returns the error of the first step, and continues with the others."""

    def swallow(session: Session) -> BaseException:
        try:
            step(session)
        except Exception as error:
            swallowed = error
        else:
            raise AssertionError("nothing was raised")
        for each in more:
            each(session)
        return swallowed

    return swallow


class DrivenWork(Protocol):
    """SQL work of either kind, driven from outside."""

    @property
    def inner(self) -> AsyncSqlWork | ThreadSqlWork: ...
    def start(self, step: Step[T]) -> Future[T]: ...
    def start_check(self) -> Future[None]: ...
    def start_commit(self) -> Future[None]: ...
    def start_rollback(self) -> Future[None]: ...


class Driven:
    """One driven work; the steps of `start_...` run while the test continues."""

    def __init__(self, work: DrivenWork) -> None:
        self._work = work
        self.start = work.start
        self.start_check = work.start_check
        self.start_commit = work.start_commit
        self.start_rollback = work.start_rollback

    @property
    def inner(self) -> AsyncSqlWork | ThreadSqlWork:
        return self._work.inner

    def do(self, step: Step[T]) -> T:
        return self._work.start(step).result(WAIT_S)

    def check(self) -> None:
        self._work.start_check().result(WAIT_S)

    def commit(self) -> None:
        self._work.start_commit().result(WAIT_S)

    def rollback(self) -> None:
        self._work.start_rollback().result(WAIT_S)

    def classify_error(self, error: BaseException) -> DatabaseErrorKind:
        return self._work.inner.classify_error(error)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result(WAIT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class _Tasks:
    def __init__(self, loop: Loop, work: AsyncSqlWork) -> None:
        self._loop = loop
        self.inner = work

    def start(self, step: Step[T]) -> Future[T]:
        async def run() -> T:
            return await self.inner.session.run_sync(step)

        return self._loop.start(run())

    def start_check(self) -> Future[None]:
        return self._loop.start(self.inner.check())

    def start_commit(self) -> Future[None]:
        return self._loop.start(self.inner.commit())

    def start_rollback(self) -> Future[None]:
        return self._loop.start(self.inner.rollback())


class _Threads:
    def __init__(self, threads: ThreadPoolExecutor, work: ThreadSqlWork) -> None:
        self._threads = threads
        self.inner = work

    def start(self, step: Step[T]) -> Future[T]:
        return self._threads.submit(lambda: step(self.inner.session))

    def start_check(self) -> Future[None]:
        return self._threads.submit(self.inner.check)

    def start_commit(self) -> Future[None]:
        return self._threads.submit(self.inner.commit)

    def start_rollback(self) -> Future[None]:
        return self._threads.submit(self.inner.rollback)


class Shop:
    """One open database, with its works; `url` is the URL of the database, which may be behind a proxy."""

    def __init__(self, url: str, face: str, direct_url: str | None = None, workers: int = 4) -> None:
        self.url = url
        self.face = face
        self.is_postgres = url.startswith("postgresql")
        self._direct_url = direct_url or url
        self._loop = Loop()
        self._threads = ThreadPoolExecutor(16)
        self._works: list[Driven] = []
        self.database = Database(url, interactive=workers, others=workers)

    def __enter__(self) -> Shop:
        with self.second_engine() as engine:
            Base.metadata.create_all(engine)
        self.run(self.database.open())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for work in self._works:
                work.rollback()
            assert self.in_use() == 0
            self.run(self.database.close())
        finally:
            self._threads.shutdown()
            self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(coroutine)

    def work(self, *, is_interactive: bool = False) -> Driven:
        work: DrivenWork
        if self.face == "tasks":
            work = _Tasks(self._loop, self.database.new_async_work(is_interactive=is_interactive))
        else:
            work = _Threads(self._threads, self.database.new_thread_work(is_interactive=is_interactive))
        driven = Driven(work)
        self._works.append(driven)
        return driven

    def in_use(self) -> int:
        """Return the number of connections that are checked out of their pools."""
        pools = [
            each
            for kind in self.database._sql_engines.values()
            for each in (kind.for_tasks.pool, kind.for_threads.pool)
        ]
        return sum(each.checkedout() for each in pools)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def second_engine(self) -> Iterator[Engine]:
        """Yield an engine whose connections stages do not know."""
        engine = create_engine(self._direct_url, poolclass=NullPool)
        try:
            yield engine
        finally:
            engine.dispose()

    def orders(self) -> list[int]:
        """Return the numbers of the committed orders."""
        with self.second_engine() as engine, engine.connect() as connection:
            return list(connection.scalars(text("SELECT number FROM orders ORDER BY number")))
