"""How flows are begun in a transaction of the program's own: what they send goes into the outbox, and is sent when that
transaction has been committed. Nothing is said to the broker.

Source: docs/stages-outbox.md, "In a transaction of your own"
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
from truenext.stage.sql.tables import is_missing_table, keys, missing_table_text, outbox

T = TypeVar("T")

_CALLS, _BLOCKS = "truenext: when committed", "truenext: open blocks"
"""Of a session's `info`."""

_INSERTS: dict[str, Callable[..., Any]] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


class SessionOutbox:
    """The transaction of a session."""

    def __init__(self, session: object) -> None:
        """Raises: ConfigurationError if it is none"""
        if not isinstance(session, Session | AsyncSession):
            raise ConfigurationError(f"initiate takes a Session or an AsyncSession, not {session!r}")
        self.is_async = isinstance(session, AsyncSession)
        self._session = session
        self._transactions: list[SessionTransaction] = []
        """The transactions of the session, the innermost first, when the block began."""
        self._has_lost_transaction = False
        """One of them was rolled back, or the outermost has ended, inside the block."""

    def open_block(self) -> None:
        """A block begins: until it is left the transaction of the session is not to end."""
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
        """The block has ended."""
        self._sync_session.info[_BLOCKS].remove(self)
        self._transactions = []

    def check_transaction_not_lost(self) -> None:
        """Raises: FlowError if the block has outlived its transaction"""
        if self._has_lost_transaction:
            raise FlowError(
                "what the block was in has been rolled back or closed inside of it, and nothing is begun: commit, roll "
                "back and close the session behind the block of initiate"
            )

    @property
    def _sync_session(self) -> Session:
        return self._session if isinstance(self._session, Session) else self._session.sync_session

    def seed_of_key(self, key: str, new: str) -> str:
        """What the ids of all that is begun under this key are made of: 32 hexadecimal digits, `new` if nothing was.
        Who asks while another transaction has the key for the first time waits for its end.

        Raises: ConfigurationError; what SQLAlchemy raises
        """
        assert isinstance(self._session, Session)
        return _execute(self._session, _seed, key, new)

    async def seed_of_key_async(self, key: str, new: str) -> str:
        """The same in an AsyncSession."""
        return await self._execute_async(_seed, key, new)

    def write_unit(self, service: str, id: str, key: InitiationKey | None, unit: OutboxUnit) -> None:
        """Write a unit, and have it sent when the transaction has been committed. Once more under its key is nothing.

        Raises: FlowError if something else was begun under the key; ConfigurationError; what SQLAlchemy raises
        """
        assert isinstance(self._session, Session)
        _execute(self._session, _write, service, id, key, unit)

    async def write_unit_async(self, service: str, id: str, key: InitiationKey | None, unit: OutboxUnit) -> None:
        """The same in an AsyncSession."""
        await self._execute_async(_write, service, id, key, unit)

    async def _execute_async(self, call: Callable[..., T], *arguments: object) -> T:
        assert isinstance(self._session, AsyncSession)
        # Asked for here, where a wait for it can be cancelled.
        connection = await self._session.connection()
        execution = self._session.run_sync(_execute, call, *arguments)
        if connection.dialect.name != "sqlite":
            return await execution
        # A SELECT that is cancelled before it is read stays open, and while it does a connection of SQLite that is
        # closed keeps its lock: until the cursor is garbage nobody else could write.
        return await run_to_completion(execution)

    def call_on_commit(self, call: Callable[[], object]) -> None:
        """In whatever thread that happens; if the transaction is rolled back, after the next one of its session."""
        session = self._sync_session
        calls = session.info.get(_CALLS)
        if calls is None:
            # One listener for the life of the session: none goes while its event is told.
            calls = session.info[_CALLS] = []
            event.listen(session, "after_commit", _on_committed)
        if call not in calls:
            calls.append(call)


def _forbid_commit(session: Session) -> None:
    """Raises: FlowError if a block is open"""
    if session.info[_BLOCKS] and not session.in_nested_transaction():
        raise FlowError(
            "the session commits inside a block of initiate, and what the block begins would not be in that "
            "transaction: nothing was committed; commit behind the block"
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
            "the session commits each statement by itself (AUTOCOMMIT), so nothing could be taken back: begin flows in "
            "a transaction, or with initiate() without a session"
        )
    try:
        return call(connection, *arguments)
    except DBAPIError as error:
        if is_missing_table(error):
            raise ConfigurationError(missing_table_text(error)) from error
        raise


def _is_autocommit(connection: Connection) -> bool:
    if str(connection.get_execution_options().get("isolation_level", "")).upper() == "AUTOCOMMIT":
        return True
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        # Whoever begins transactions by hand has begun one. Python 3.12 has a word of its own for it.
        is_by_itself = driver.isolation_level is None or getattr(driver, "autocommit", None) is True
        return is_by_itself and not driver.in_transaction
    return getattr(driver, "autocommit", False) is True


def _seed(connection: Connection, key: str, new: str) -> str:
    first = _INSERTS[connection.dialect.name](keys).values(id=key, seed=new, started_ms=_clock(connection))
    # The asynchronous driver of PostgreSQL has forgotten the count of an INSERT when it is asked for it.
    first = first.on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    # Locked, so that it is not cleaned away before something was begun under it. If it just was, the next one is new.
    before = select(keys.c.seed).where(keys.c.id == key).with_for_update()
    for _ in range(2):
        if connection.execute(first).rowcount == 1:
            return new
        seed = connection.execute(before).scalar_one_or_none()
        if seed is not None:
            return str(seed).replace("-", "")
    raise FlowError("the key was removed twice while something was begun under it: try once more")


def _record_key_content(connection: Connection, key: InitiationKey) -> bool:
    """Raises: FlowError if something else was begun under it"""
    first = update(keys).where(keys.c.id == key.id, keys.c.content.is_(None))
    if connection.execute(first.values(content=key.content, started_ms=_clock(connection))).rowcount == 1:
        return True
    before = connection.execute(select(keys.c.content).where(keys.c.id == key.id)).scalar_one_or_none()
    if before is None:
        raise FlowError("what the block was in has been rolled back inside of it: nothing is begun under its key")
    if str(before).replace("-", "") != key.content:
        raise FlowError("something else was begun under this key before: begin other flows under other keys")
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


def _clock(connection: Connection) -> ColumnElement[int]:
    try:
        return literal_column(CLOCK[connection.dialect.name])
    except KeyError:
        raise ConfigurationError(f"the outbox is in PostgreSQL or SQLite, not {connection.dialect.name}") from None
