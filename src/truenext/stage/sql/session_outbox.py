"""Outbox of a program's own session: writes the units of the flows that the program starts, in the session's
transaction. The relay sends them to the broker after the commit.

Source: docs/stages-database.md, "In a transaction of your own"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, event, insert, literal_column, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from truenext.errors import ConfigurationError
from truenext.stage.core.errors import FlowError
from truenext.stage.core.outbox_unit import InitiationKey, OutboxUnit
from truenext.stage.sql.exactly_once_writer import CLOCK
from truenext.stage.sql.shielded import run_to_completion
from truenext.stage.sql.tables import keys, missing_table_text, outbox, replies

T = TypeVar("T")

_CALLS, _BLOCKS = "truenext: when committed", "truenext: open blocks"
"""Keys in `Session.info`: calls for the next commit, and open blocks of `initiate`."""

_INSERTS: dict[str, Callable[..., Any]] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


class SessionOutbox:
    """Writer of outbox rows in the transaction of a program's own session."""

    def __init__(self, session: object) -> None:
        """Wrap a session of the program. Raises: ConfigurationError if `session` is not a Session or an AsyncSession"""
        if not isinstance(session, Session | AsyncSession):
            raise ConfigurationError(f"initiate takes a Session or an AsyncSession, not {session!r}")
        self.is_async = isinstance(session, AsyncSession)
        self._session = session
        self._transactions: list[SessionTransaction] = []
        """Transactions that the session had at the beginning of the block: the innermost savepoint first, the outermost
        transaction last."""
        self._has_lost_transaction = False
        """True if, inside the block, one of `_transactions` was rolled back or the outermost transaction has ended."""

    def open_block(self) -> None:
        """Begin a block. Until the block ends, a commit of the session is refused."""
        session = self._sync_session
        blocks = session.info.get(_BLOCKS)
        if blocks is None:
            blocks = session.info[_BLOCKS] = []
            event.listen(session, "before_commit", _forbid_commit)
            event.listen(session, "after_soft_rollback", _on_rolled_back)
            event.listen(session, "after_transaction_end", _on_transaction_ended)
        transaction = session.get_nested_transaction() or session.get_transaction()
        self._transactions, self._has_lost_transaction = [], False
        while transaction is not None:
            self._transactions.append(transaction)
            transaction = transaction.parent
        blocks.append(self)

    def close_block(self) -> None:
        self._sync_session.info[_BLOCKS].remove(self)
        self._transactions = []

    def check_transaction_not_lost(self) -> None:
        """Check that the session still has the transaction of the block's beginning.

        Raises: FlowError if the transaction was rolled back or has ended inside the block
        """
        if self._has_lost_transaction:
            raise FlowError(
                "the transaction was rolled back or closed inside the block of initiate, so no flow begins: commit, "
                "roll back and close the session after the block"
            )

    @property
    def _sync_session(self) -> Session:
        return self._session if isinstance(self._session, Session) else self._session.sync_session

    def seed_of_key(self, key: str, new: str) -> str:
        """Return the seed from which the ids of the key's flows are derived: 32 hexadecimal digits. The first call with
        the key stores `new` as the seed. If another transaction is using the key for the first time, this waits for its
        end.

        Raises: ConfigurationError if the tables are missing or the session commits each statement by itself; errors of
        SQLAlchemy
        """
        return _execute(self._sync_session, _seed, key, new)

    async def seed_of_key_async(self, key: str, new: str) -> str:
        """Return the seed from which the ids of the key's flows are derived, in an AsyncSession. The first call with
        the key stores `new` as the seed.

        Raises: ConfigurationError if the tables are missing or the session commits each statement by itself; errors of
        SQLAlchemy
        """
        return await self._execute_async(_seed, key, new)

    def write_unit(self, service: str, id: str, key: InitiationKey | None, unit: OutboxUnit) -> None:
        """Write a unit into the outbox. The relay sends the unit after the commit. If the flows were already started
        under the key, this writes nothing.

        Raises: FlowError if other flows were started under the key; ConfigurationError if the tables are missing or the
        session commits each statement by itself; errors of SQLAlchemy
        """
        _execute(self._sync_session, _write, service, id, key, unit)

    async def write_unit_async(self, service: str, id: str, key: InitiationKey | None, unit: OutboxUnit) -> None:
        """Write a unit into the outbox, in an AsyncSession. The relay sends the unit after the commit. If the flows
        were already started under the key, this writes nothing.

        Raises: FlowError if other flows were started under the key; ConfigurationError if the tables are missing or the
        session commits each statement by itself; errors of SQLAlchemy
        """
        await self._execute_async(_write, service, id, key, unit)

    async def _execute_async(self, call: Callable[..., T], *arguments: object) -> T:
        assert isinstance(self._session, AsyncSession)
        # Taken here, where a wait for it can be cancelled.
        connection = await self._session.connection()
        execution = self._session.run_sync(_execute, call, *arguments)
        if connection.dialect.name != "sqlite":
            return await execution
        # A SELECT that is cancelled before it is read stays open. Then a closed connection of SQLite keeps its lock,
        # and no other connection can write until the cursor is collected.
        return await run_to_completion(execution)

    def call_on_commit(self, call: Callable[[], object]) -> None:
        """Call a function after the next commit of the session, in the thread that commits. A rollback before that
        commit does not remove the call."""
        session = self._sync_session
        calls = session.info.get(_CALLS)
        if calls is None:
            # One listener for the life of the session: a listener must not be removed while it is being called.
            calls = session.info[_CALLS] = []
            event.listen(session, "after_commit", _on_committed)
        if call not in calls:
            calls.append(call)


def _forbid_commit(session: Session) -> None:
    """Refuse a commit of the session while a block is open. Raises: FlowError if a block is open"""
    if session.info[_BLOCKS] and not session.in_nested_transaction():
        raise FlowError(
            "the session commits inside a block of initiate, so flows of the block would not be in that "
            "transaction: nothing was committed; commit after the block"
        )


def _on_rolled_back(session: Session, transaction: SessionTransaction) -> None:
    for block in session.info[_BLOCKS]:
        block._has_lost_transaction = block._has_lost_transaction or transaction in block._transactions


def _on_transaction_ended(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        for block in session.info[_BLOCKS]:
            block._has_lost_transaction = True


def _on_committed(session: Session) -> None:
    if session.in_nested_transaction():
        # A savepoint was released.
        return
    calls: list[Callable[[], object]] = session.info[_CALLS]
    for call in calls:
        call()
    calls.clear()


def _execute(session: Session, call: Callable[..., T], *arguments: object) -> T:
    connection = session.connection()
    if _is_autocommit(connection):
        raise ConfigurationError(
            "the session commits each statement by itself (AUTOCOMMIT), so flows could not be rolled back: begin flows "
            "in a transaction, or with initiate() without a session"
        )
    try:
        return call(connection, *arguments)
    except DBAPIError as error:
        if text := missing_table_text(error):
            raise ConfigurationError(text) from error
        raise


def _is_autocommit(connection: Connection) -> bool:
    if str(connection.get_execution_options().get("isolation_level", "")).upper() == "AUTOCOMMIT":
        return True
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        # In this mode a program begins transactions by hand, and may have begun one. Since Python 3.12, the attribute
        # `autocommit` can set the mode, too.
        is_by_itself = driver.isolation_level is None or getattr(driver, "autocommit", None) is True
        return is_by_itself and not driver.in_transaction
    return getattr(driver, "autocommit", False) is True


def _seed(connection: Connection, key: str, new: str) -> str:
    first = _INSERTS[connection.dialect.name](keys).values(id=key, seed=new, started_ms=_clock(connection))
    # Without this option the asynchronous driver of PostgreSQL loses the row count of an INSERT.
    first = first.on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    # Locked, so that the key is not deleted before a flow is started. If it was just deleted, the next INSERT succeeds.
    before = select(keys.c.seed).where(keys.c.id == key).with_for_update()
    for _ in range(2):
        if connection.execute(first).rowcount == 1:
            return new
        seed = connection.execute(before).scalar_one_or_none()
        if seed is not None:
            return str(seed).replace("-", "")
    raise FlowError("the key was deleted twice while this transaction read it: try again")


def _record_key_content(connection: Connection, key: InitiationKey) -> bool:
    """Record the hash of the flows under the key. Return False if the same hash was recorded before. Raises: FlowError
    if another hash was recorded, or the key was rolled back"""
    first = update(keys).where(keys.c.id == key.id, keys.c.content.is_(None))
    first = first.values(content=key.content, started_ms=_clock(connection) + key.delay_ms)
    if connection.execute(first).rowcount == 1:
        return True
    before = connection.execute(select(keys.c.content).where(keys.c.id == key.id)).scalar_one_or_none()
    if before is None:
        raise FlowError("the transaction was rolled back inside the block of initiate: no flow begins under its key")
    if str(before).replace("-", "") != key.content:
        raise FlowError("other flows began under this key before: use another key for these flows")
    return False


def _write(connection: Connection, service: str, id: str, key: InitiationKey | None, unit: OutboxUnit) -> None:
    if key is not None and not _record_key_content(connection, key):
        return
    connection.execute(
        insert(outbox).values(
            id=id,
            service=service,
            interactive=unit.is_interactive,
            messages=len(unit.messages),
            written_ms=_clock(connection),
            unit=unit.encode(),
        )
    )
    if key is not None and key.kept is not None:
        # A row of an earlier flow is there for some days after its key was deleted.
        row = {"flow": key.kept.flow, "endpoint": key.kept.endpoint, "kept_ms": _clock(connection) + key.delay_ms}
        kept = _INSERTS[connection.dialect.name](replies).values(id=key.id, **row)
        connection.execute(
            kept.on_conflict_do_update(index_elements=["id"], set_=row | {"reply": None, "failure": None})
        )


def _clock(connection: Connection) -> ColumnElement[int]:
    try:
        return literal_column(CLOCK[connection.dialect.name])
    except KeyError:
        raise ConfigurationError(
            f"the outbox must be in PostgreSQL or SQLite, and the session uses {connection.dialect.name}"
        ) from None
