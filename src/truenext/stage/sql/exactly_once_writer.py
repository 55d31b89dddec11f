"""Writes the inbox and outbox rows of a stage, in the same SQL transaction as its function.

First comes the id of its message, into the inbox: if it is there already, the message was already processed. Last comes
what it sends, into the outbox, under the next number of a producer that is this process's own.

Source: docs/stages-outbox.md; docs/decisions/0067-once.md
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.exc import DBAPIError

from truenext.stage.sql.errors import AlreadyProcessed, InProgress, OutboxUnusable, ProducerLost
from truenext.stage.sql.tables import is_unusable_table, unusable_table_text

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from truenext.stage.core.outbox_unit import CommitNumber, OutboxUnit

WAIT_S: Final = 5
"""For so long another transaction that handles the same message is waited for."""
IDLE_S: Final = 300
"""PostgreSQL ends a transaction in which nothing is said for so long: its process may be gone, or stand still."""

CLOCK: Final = {
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
}
"""Milliseconds since the epoch, by the clock of the database."""

_LOCK_NOT_AVAILABLE = "55P03"

# The limits are those of this transaction. That of waiting is the inbox's alone: what the function waits for is its own
# affair.
_BEGIN = {
    "postgresql": f"""
        WITH before AS MATERIALIZED (SELECT current_setting('lock_timeout') AS waited),
        limits AS MATERIALIZED (
            SELECT waited, set_config('lock_timeout', '{WAIT_S}s', true) AS wait,
                set_config('idle_in_transaction_session_timeout', '{IDLE_S}s', true) AS idle
            FROM before)
        INSERT INTO truenext_inbox (id)
        SELECT CAST(%(id)s AS uuid) FROM limits WHERE wait IS NOT NULL AND idle IS NOT NULL
        ON CONFLICT DO NOTHING
        RETURNING set_config('lock_timeout', (SELECT waited FROM limits), true)""",
    "sqlite": "INSERT INTO truenext_inbox (id) VALUES (:id) ON CONFLICT DO NOTHING",
}

_COLUMNS = "id, service, producer, number, interactive, messages, written_ms, unit"
# Each of these changes one row, or the producer is not this process's own, or has used the number.
_WRITE = {
    # One question instead of two: most messages pay for it.
    "postgresql": [
        f"""
        WITH producer AS (
            UPDATE truenext_producers SET number = %(number)s, used_ms = {CLOCK["postgresql"]}
            WHERE name = %(producer)s AND owner = %(owner)s AND number = %(number)s - 1
            RETURNING used_ms)
        INSERT INTO truenext_outbox ({_COLUMNS})
        SELECT CAST(%(id)s AS uuid), %(service)s, %(producer)s, %(number)s, %(interactive)s, %(messages)s, used_ms,
            %(unit)s
        FROM producer"""
    ],
    "sqlite": [
        f"""
        UPDATE truenext_producers SET number = :number, used_ms = {CLOCK["sqlite"]}
        WHERE name = :producer AND owner = :owner AND number = :number - 1""",
        f"""
        INSERT INTO truenext_outbox ({_COLUMNS})
        SELECT :id, :service, :producer, :number, :interactive, :messages, used_ms, :unit FROM truenext_producers
        WHERE name = :producer""",
    ],
}


class ExactlyOnceWriter:
    """Of one message, in one transaction."""

    __slots__ = ("_id", "skip_reason")

    def __init__(self, id: str) -> None:
        """`id` is that of the inbox."""
        self._id = id
        self.skip_reason: AlreadyProcessed | InProgress | None = None
        """Why nothing is to be done now: whatever the function makes of it."""

    def insert_inbox_id(self, connection: Connection) -> None:
        """The first statement of the transaction.

        Raises: AlreadyProcessed, InProgress, OutboxUnusable; what SQLAlchemy raises
        """
        try:
            result = connection.exec_driver_sql(_BEGIN[connection.dialect.name], {"id": self._id})
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
                self.skip_reason = InProgress(f"the same message has been handled for {WAIT_S} seconds, and is still")
                raise self.skip_reason from error
            raise _translated(error) from error
        if result.rowcount != 1:
            self.skip_reason = AlreadyProcessed("the message was already processed: what is done now is taken back")
            raise self.skip_reason

    def insert_unit(self, connection: Connection, service: str, number: CommitNumber, unit: OutboxUnit) -> None:
        """The last statement before COMMIT.

        Raises: ProducerLost, OutboxUnusable; what SQLAlchemy raises
        """
        kind = connection.dialect.name
        parameters: dict[str, Any] = {
            "id": self._id,
            "service": service,
            "producer": number.producer.name,
            "owner": number.producer.owner,
            "number": number.number,
            "interactive": unit.is_interactive,
            "messages": len(unit.messages),
            "unit": unit.encode(),
        }
        for statement in _WRITE[kind]:
            try:
                result = connection.exec_driver_sql(statement, parameters)
            except DBAPIError as error:
                raise _translated(error) from error
            if result.rowcount != 1:
                raise ProducerLost(f"the numbers of {number.producer.name} are another process's by now")


def _translated(error: DBAPIError) -> Exception:
    """What the message cannot help is not its failure."""
    return OutboxUnusable(unusable_table_text(error)) if is_unusable_table(error) else error
