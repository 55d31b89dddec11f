"""Work of one message in a database: one SQL transaction with its session. The stage's worker checks and ends it.

`AsyncSqlWork` is for `async` functions, and `ThreadSqlWork` for plain functions. Both classes have the same methods.
Nothing is sent to the database before the function first uses the session.
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
"""Options of the session. Objects that the function has read stay readable after the commit. The session itself cannot
be used any more."""


class _SqlWork(Generic[S]):
    """SQL session and transaction of one message. Base class of `AsyncSqlWork` and `ThreadSqlWork`. Its methods never
    await. So they can run in a thread, and `AsyncSqlWork` can run them in a greenlet of SQLAlchemy."""

    _session_type: type[S]

    def __init__(
        self, engine: Engine | AsyncEngine, is_closed: Callable[[], bool], inbox_id: str | None, stage: str
    ) -> None:
        """Create the work of one message. `is_closed` returns whether the database was closed meanwhile. `inbox_id` is
        the message's id in the inbox; None without exactly-once processing. `stage` is the stage's name in errors."""
        self.is_committed: bool | None = False
        """True after the commit; None if a COMMIT was sent and its outcome is not known."""
        self._transaction = SqlTransaction(None if inbox_id is None else ExactlyOnceWriter(inbox_id), stage)
        self._engine = engine
        self._session: S | None = None
        self._is_closed = is_closed
        self._has_ended = False
        self._was_used = False

    @property
    def session(self) -> S:
        """Session for the function. The first access creates it. Raises: LocalProtocolError if the work has ended"""
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
        """True if the function has used the session, so that a transaction has begun."""
        inner = self._transaction.session
        return self._was_used or (inner is not None and inner.in_transaction())

    def function_returned(self) -> None:
        """Note that the function has returned. From now on, statements of tasks and threads that the function has left
        running are refused."""
        self._transaction.has_returned = True

    def end_unused(self) -> bool:
        """End the work if the function has not used the session, without waiting. Return True if the work was ended."""
        if self.is_used:
            return False
        self._end()
        return True

    def classify_error(self, error: BaseException) -> DatabaseErrorKind:
        """Return the kind of an error that has ended the function. An earlier error that broke the transaction and that
        the function ignored may decide instead. Call this before the rollback, which forgets the earlier error."""
        kind = classify_error(error)
        fault = self._transaction.commit_fault()
        return kind if kind is not DatabaseErrorKind.APPLICATION or fault is None else classify_error(fault)

    @property
    def skip_reason(self) -> AlreadyProcessed | InProgress | None:
        """Error of the inbox that forbids a commit: the message was already processed, or another transaction is
        processing it; None if there is no such error."""
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
        """Roll back if nothing was committed. Return the connection to its pool, or close it."""
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
    """SQL transaction of one message, for a plain function. Only one thread at a time may call its methods."""

    _session_type = StageSession

    def check(self) -> None:
        """Flush the session, and check whether the transaction can be committed. After an error, call `rollback`.

        Raises: Swallowed if the function has ignored an error that broke the transaction; errors of SQLAlchemy
        """
        self._check()

    def complete(self, service: str, number: CommitNumber | None, unit: OutboxUnit) -> None:
        """Flush the session, check the transaction, and write the unit of an exactly-once message into the outbox.
        `number` is the number of the unit; None if the stage sends nothing; then no unit is written.

        Raises: AlreadyProcessed, InProgress or ProducerLost if nothing may be committed; Swallowed if the function has
        ignored an error that broke the transaction; errors of SQLAlchemy
        """
        self._complete(self.session, service, number, unit)

    def commit(self) -> None:
        """Commit, and end the work. Call `check` or `complete` before. If the session was not used, nothing is
        committed.

        Raises: NotCommitted if the database refuses the COMMIT; CommitInDoubt if the COMMIT is not answered; Swallowed
        or an error of SQLAlchemy before the COMMIT is sent
        """
        self._commit()

    def rollback(self) -> None:
        """Roll back, and end the work. This can be called in any state, and repeatedly. After a commit it does nothing.
        It raises no errors."""
        self._end()


class AsyncSqlWork(_SqlWork[StageAsyncSession]):
    """SQL transaction of one message, for an `async` function. Its methods are called in the event loop in which the
    database was opened."""

    _session_type = StageAsyncSession

    async def check(self) -> None:
        """Flush the session, and check whether the transaction can be committed. After an error, call `rollback`.

        Raises: Swallowed if the function has ignored an error that broke the transaction; errors of SQLAlchemy
        """
        if self._session is not None:
            await self._session.run_sync(lambda _: self._check())

    async def complete(self, service: str, number: CommitNumber | None, unit: OutboxUnit) -> None:
        """Flush the session, check the transaction, and write the unit of an exactly-once message into the outbox.
        `number` is the number of the unit; None if the stage sends nothing; then no unit is written.

        Raises: AlreadyProcessed, InProgress or ProducerLost if nothing may be committed; Swallowed if the function has
        ignored an error that broke the transaction; errors of SQLAlchemy
        """
        await self.session.run_sync(lambda session: self._complete(session, service, number, unit))

    async def commit(self) -> None:
        """Commit, and end the work. A cancelled call still finishes the commit, and then raises the cancellation;
        `is_committed` has the outcome.

        Raises: NotCommitted if the database refuses the COMMIT; CommitInDoubt if the COMMIT is not answered; Swallowed
        or an error of SQLAlchemy before the COMMIT is sent
        """
        if self._session is None:
            self._commit()
        else:
            await run_to_completion(self._session.run_sync(lambda _: self._commit()))

    async def rollback(self) -> None:
        """Roll back, and end the work. A cancelled call still finishes the rollback, and then raises the
        cancellation."""
        if self._session is None:
            self._end()
        else:
            await run_to_completion(self._session.run_sync(lambda _: self._end()))


AnySqlWork: TypeAlias = AsyncSqlWork | ThreadSqlWork
