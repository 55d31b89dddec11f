"""Work of one message in a database: one transaction, which the stage checks and ends.

`AsyncSqlWork` is for `async` functions, `ThreadSqlWork` for plain ones; both have the same names. Nothing is sent to
the database before the function first uses the session.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from truenext.errors import LocalProtocolError
from truenext.stage.core.outbox_unit import CommitNumber, OutboxUnit
from truenext.stage.sql.error_kind import classify_error, is_definite_failure
from truenext.stage.sql.errors import AlreadyProcessed, CommitInDoubt, DatabaseErrorKind, InProgress, NotCommitted
from truenext.stage.sql.exactly_once_writer import ExactlyOnceWriter
from truenext.stage.sql.session import StageAsyncSession, StageSession
from truenext.stage.sql.shielded import run_to_completion
from truenext.stage.sql.transaction import SqlTransaction

S = TypeVar("S", bound=Session | AsyncSession)

_logger = logging.getLogger("truenext.stage")

_OPTIONS: dict[str, Any] = {"expire_on_commit": False, "close_resets_only": False}
"""Objects that the function has read stay readable after the commit; the session itself cannot be used any more."""


class _SqlWork(Generic[S]):
    """Common part of both works: it does not `await`, and runs in the thread or in SQLAlchemy's greenlet."""

    _session_type: type[S]

    def __init__(
        self, engine: Engine | AsyncEngine, is_closed: Callable[[], bool], inbox_id: str | None, stage: str
    ) -> None:
        """`is_closed` returns whether the database was closed meanwhile; `inbox_id` is the message's id in the inbox,
        if it is processed exactly once; `stage` is named in errors."""
        self.is_committed: bool | None = False
        """None if a COMMIT was sent and its outcome is not known here."""
        self._transaction = SqlTransaction(None if inbox_id is None else ExactlyOnceWriter(inbox_id), stage)
        self._engine = engine
        self._session: S | None = None
        self._is_closed = is_closed
        self._has_ended = False
        self._was_used = False

    @property
    def session(self) -> S:
        """Session of the function, made at the first use. Raises: LocalProtocolError after the end"""
        if self._session is None:
            if self._has_ended:
                raise LocalProtocolError(
                    "the session has ended with the processing of its message: use it before the function returns"
                )
            options = {"bind": self._engine, "stage_transaction": self._transaction, **_OPTIONS}
            self._session = self._session_type(**options)
        return self._session

    @property
    def is_used(self) -> bool:
        """True if the function has done something with its session."""
        inner = self._transaction.session
        return self._was_used or (inner is not None and inner.in_transaction())

    def function_returned(self) -> None:
        """Refuse from now on statements of tasks and threads that the function has left behind."""
        self._transaction.has_returned = True

    def end_unused(self) -> bool:
        """End the work if the function has done nothing with its session; return whether that is so. Does not wait."""
        if self.is_used:
            return False
        self._end()
        return True

    def classify_error(self, error: BaseException) -> DatabaseErrorKind:
        """Return the kind of an error that ended the function. Called before the rollback: an error that the
        function has swallowed counts, if it has broken the transaction."""
        kind = classify_error(error)
        fault = self._transaction.commit_fault()
        return kind if kind is not DatabaseErrorKind.APPLICATION or fault is None else classify_error(fault)

    @property
    def skip_reason(self) -> AlreadyProcessed | InProgress | None:
        """Reason to commit nothing: the message was already processed, or another transaction is handling it."""
        exactly_once = self._transaction.exactly_once
        return None if exactly_once is None else exactly_once.skip_reason

    def _check(self) -> None:
        with self._transaction.issued_by_stage():
            self._transaction.check_unbroken()
            session = self._transaction.session
            if session is not None and not self._has_ended:
                session.flush()
                self._transaction.check_committable()

    def _complete(self, session: Session, service: str, number: CommitNumber | None, unit: OutboxUnit) -> None:
        exactly_once = self._transaction.exactly_once
        assert exactly_once is not None, "it is of a message whose effects happen once"
        if exactly_once.skip_reason is not None:
            raise exactly_once.skip_reason
        with self._transaction.issued_by_stage():
            self._transaction.check_unbroken()
            # The function may have sent nothing to the database.
            connection = session.connection()
            session.flush()
            if number is not None:
                exactly_once.insert_unit(connection, service, number, unit)

    def _commit(self) -> None:
        with self._transaction.issued_by_stage():
            self._commit_session()

    def _commit_session(self) -> None:
        session = self._transaction.session
        if session is None or self._has_ended:
            self._has_ended = True
            return
        self._transaction.check_unbroken()
        self._was_used = self.is_used
        self._transaction.is_ending = True
        try:
            self._transaction.close_cursors()
            Session.commit(session)
            self.is_committed = True
        except BaseException as error:
            if not self._transaction.is_commit_sent:
                raise
            if isinstance(error, Exception) and not isinstance(error, DBAPIError) and self._transaction.has_ended():
                self.is_committed = True
                _logger.error(
                    "a listener of a session has failed after the commit, which is not affected", exc_info=error
                )
                return
            if is_definite_failure(error):
                raise NotCommitted(f"the database has not committed: {error}") from error
            self.is_committed = None
            raise CommitInDoubt(f"the outcome of the database's commit is not known: {error}") from error
        finally:
            self._end()

    def _end(self) -> None:
        """Roll back what is not committed, and return the connection to its pool, or close it."""
        session = self._transaction.session
        has_ended, self._has_ended = self._has_ended, True
        if session is None or has_ended:
            return
        self._transaction.stop_attaching()
        self._was_used = self.is_used
        self._transaction.is_ending = True
        try:
            if self._is_closed():
                # The pool is closed, and would not close the connection.
                self._transaction.discard()
            else:
                self._transaction.roll_back()
        except Exception:
            # The connection is lost, or is in use by a task or thread that the function has left behind.
            with contextlib.suppress(Exception):
                self._transaction.discard()
        with contextlib.suppress(Exception):
            Session.close(session)


class ThreadSqlWork(_SqlWork[StageSession]):
    """Work of a plain function. All methods are called in one thread at a time."""

    _session_type = StageSession

    def check(self) -> None:
        """Flush the session, and check whether the transaction can be committed.

        Raises: Swallowed; what SQLAlchemy raises. In all cases nothing is committed, and `rollback` must be called
        """
        self._check()

    def complete(self, service: str, number: CommitNumber | None, unit: OutboxUnit) -> None:
        """Check as `check` does, and write the unit of a message that is processed exactly once into the outbox,
        under `number`, which is None if the message sends nothing.

        Raises: AlreadyProcessed, InProgress, ProducerLost; as `check`
        """
        self._complete(self.session, service, number, unit)

    def commit(self) -> None:
        """Commit, and end the work. `check` must be called before; does nothing if the session was not used.

        Raises: NotCommitted; CommitInDoubt; Swallowed and what SQLAlchemy raises before the COMMIT is sent
        """
        self._commit()

    def rollback(self) -> None:
        """End the work, in any state and any number of times; does nothing after a commit. Raises nothing."""
        self._end()


class AsyncSqlWork(_SqlWork[StageAsyncSession]):
    """Work of an `async` function, in the event loop in which its database was opened."""

    _session_type = StageAsyncSession

    async def check(self) -> None:
        """Check as `ThreadSqlWork.check` does."""
        if self._session is not None:
            await self._session.run_sync(lambda _: self._check())

    async def complete(self, service: str, number: CommitNumber | None, unit: OutboxUnit) -> None:
        """Complete as `ThreadSqlWork.complete` does."""
        await self.session.run_sync(lambda session: self._complete(session, service, number, unit))

    async def commit(self) -> None:
        """Commit as `ThreadSqlWork.commit` does. If cancelled, this still ends, and then raises the cancellation;
        `is_committed` has the outcome."""
        if self._session is None:
            self._commit()
        else:
            await run_to_completion(self._session.run_sync(lambda _: self._commit()))

    async def rollback(self) -> None:
        """Roll back as `ThreadSqlWork.rollback` does; a cancellation is raised after the end."""
        if self._session is None:
            self._end()
        else:
            await run_to_completion(self._session.run_sync(lambda _: self._end()))


AnySqlWork: TypeAlias = AsyncSqlWork | ThreadSqlWork
