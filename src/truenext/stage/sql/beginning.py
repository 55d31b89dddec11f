"""How flows are begun in a transaction of the program's own: what they send goes into the outbox, and is sent when that
transaction has been committed. Nothing is said to the broker.

Source: docs/stages-outbox.md, "In a transaction of your own"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, event, insert, literal_column, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from truenext.errors import ConfigurationError
from truenext.stage.core.errors import FlowError
from truenext.stage.sql.once import CLOCK
from truenext.stage.sql.tables import NO_TABLES, keys, outbox, says_no_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from truenext.stage.core.unit import Unit

_INSERTS: dict[str, Callable[..., Any]] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


class InTransaction:
    """The transaction of a session."""

    def __init__(self, session: object) -> None:
        """Raises: ConfigurationError if it is none"""
        if not isinstance(session, Session | AsyncSession):
            raise ConfigurationError(f"initiate takes a Session or an AsyncSession, not {session!r}")
        self.is_async = isinstance(session, AsyncSession)
        self._session = session

    def write(self, service: str, id: str, content: str | None, unit: Unit) -> None:
        """Write a unit, and have it sent when the transaction has been committed. `content` is what was begun under
        this id as its key, if it has one: once more is nothing.

        Raises: FlowError if something else was begun under the key; what SQLAlchemy raises
        """
        assert isinstance(self._session, Session)
        _write(self._session, service, id, content, unit)

    async def write_async(self, service: str, id: str, content: str | None, unit: Unit) -> None:
        """The same in an AsyncSession."""
        assert isinstance(self._session, AsyncSession)
        await self._session.run_sync(_write, service, id, content, unit)

    def when_committed(self, call: Callable[[], object]) -> None:
        """In whatever thread that happens."""
        session = self._session if isinstance(self._session, Session) else self._session.sync_session
        event.listen(session, "after_commit", lambda _: call(), once=True)


def _write(session: Session, service: str, id: str, content: str | None, unit: Unit) -> None:
    connection = session.connection()
    if _commits_by_itself(connection):
        raise ConfigurationError(
            "the session commits each statement by itself (AUTOCOMMIT), so nothing could be taken back: begin flows in "
            "a transaction, or with initiate() without a session"
        )
    try:
        _write_in(connection, service, id, content, unit)
    except DBAPIError as error:
        if says_no_table(error):
            raise ConfigurationError(NO_TABLES) from error
        raise


def _commits_by_itself(connection: Connection) -> bool:
    if str(connection.get_execution_options().get("isolation_level", "")).upper() == "AUTOCOMMIT":
        return True
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        # Whoever begins transactions by hand has begun one.
        return driver.isolation_level is None and not driver.in_transaction
    return getattr(driver, "autocommit", False) is True


def _write_in(connection: Connection, service: str, id: str, content: str | None, unit: Unit) -> None:
    clock: ColumnElement[int] = literal_column(_clock(connection))
    if content is not None:
        new = _INSERTS[connection.dialect.name](keys).values(id=id, content=content, begun_ms=clock)
        if connection.execute(new.on_conflict_do_nothing().returning(keys.c.id)).first() is None:
            before = connection.execute(select(keys.c.content).where(keys.c.id == id)).scalar_one_or_none()
            if before is None or before.replace("-", "") != content:
                raise FlowError("something else was begun under this key before: begin other flows under other keys")
            return
    connection.execute(
        insert(outbox).values(
            id=id,
            service=service,
            interactive=unit.is_interactive,
            messages=len(unit.messages),
            written_ms=clock,
            unit=unit.encode(),
        )
    )


def _clock(connection: Connection) -> str:
    try:
        return CLOCK[connection.dialect.name]
    except KeyError:
        raise ConfigurationError(f"the outbox is in PostgreSQL or SQLite, not {connection.dialect.name}") from None
