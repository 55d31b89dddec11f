"""Sessions of a stage: sessions of SQLAlchemy that refuse the calls that begin or end the stage's transaction.

This module refuses calls of the sessions. The module `transaction` refuses calls of the connection, and SQL statements
such as COMMIT.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from sqlalchemy import Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction
from sqlalchemy.orm import Session, SessionTransaction

from truenext.stage.sql.transaction import SqlTransaction


def session_type(*, is_async: bool) -> type[Session | AsyncSession]:
    """Return the class that a stage's function writes as the annotation of its session parameter."""
    return AsyncSession if is_async else Session


class StageSession(Session):
    """Session for the function of a plain stage. The function may not begin or end the stage's transaction."""

    def __init__(self, *, stage_transaction: SqlTransaction, **options: Any) -> None:
        super().__init__(**options)
        self.stage_transaction = stage_transaction
        stage_transaction.session = self

    def get_bind(self, *arguments: Any, **options: Any) -> Engine | Connection:
        # Called before each statement, and before a connection is taken.
        self.stage_transaction.check_usable()
        return super().get_bind(*arguments, **options)

    def begin(self, nested: bool = False) -> SessionTransaction:
        if not nested:
            self.forbid("session.begin()")
        return super().begin(nested)

    def commit(self) -> None:
        self.forbid("session.commit()")

    def prepare(self) -> None:
        self.forbid("session.prepare()")

    def rollback(self) -> None:
        self.forbid("session.rollback()")

    def close(self) -> None:
        self.forbid("session.close()")

    def reset(self) -> None:
        self.forbid("session.reset()")

    def invalidate(self) -> None:
        self.forbid("session.invalidate()")

    def __enter__(self) -> NoReturn:
        self.forbid("`with session`")

    def flush(self, objects: Sequence[Any] | None = None) -> None:
        try:
            super().flush(objects)
        except Exception as error:
            if not self.is_active:
                self.stage_transaction.mark_broken(error)
            raise

    def forbid(self, what: str) -> NoReturn:
        """Refuse a call of the function, and mark the transaction so that it cannot be committed. Raises:
        LocalProtocolError always"""
        raise self.stage_transaction.forbid_statement(what)


@event.listens_for(StageSession, "after_begin")
def _attach(session: StageSession, _: SessionTransaction, connection: Connection) -> None:
    session.stage_transaction.attach(connection)


class StageAsyncSession(AsyncSession):
    """Session for the function of an `async` stage. It refuses `begin` and `async with`, and passes all other calls to
    a StageSession."""

    sync_session_class = StageSession

    def begin(self) -> AsyncSessionTransaction:
        self._forbid("session.begin()")

    async def __aenter__(self) -> NoReturn:
        self._forbid("`async with session`")

    def _forbid(self, what: str) -> NoReturn:
        inner = self.sync_session
        assert isinstance(inner, StageSession)
        inner.forbid(what)
