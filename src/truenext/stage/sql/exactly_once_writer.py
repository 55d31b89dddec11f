"""Writer of the inbox and outbox rows of a stage, in the same SQL transaction as its function.

The first statement inserts the id of the message into the inbox. If the id exists already, the message was processed
before. The last statement inserts the messages that the stage sends into the outbox, under the next number of a
producer of this process.

Source: docs/stages-database.md; docs/decisions/0067-once.md
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.exc import DBAPIError

from truenext.stage.sql.errors import AlreadyProcessed, InProgress, OutboxUnusable, ProducerLost
from truenext.stage.sql.tables import unusable_table_text

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from truenext.stage.core.outbox_unit import CommitNumber, OutboxUnit

WAIT_S: Final = 5
"""Seconds for which the transaction waits for another transaction that is processing the same message."""
IDLE_S: Final = 300
"""Seconds after which PostgreSQL ends this transaction if it is idle. The transaction's process may be dead, or may
have stopped."""

CLOCK: Final = {
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
}
"""SQL expression for the time in milliseconds since the epoch, by the clock of the database."""

_LOCK_NOT_AVAILABLE = "55P03"

# The limits are those of this transaction. The lock timeout is for the inbox alone: the function may wait as it likes.
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

OUTBOX_COLUMNS = "id, service, producer, number, interactive, messages, written_ms, unit"
# Each of these changes one row; else the producer belongs to another process, or has used the number.
_WRITE = {
    # One round trip instead of two, as most messages pay for it.
    "postgresql": [
        f"""
        WITH producer AS (
            UPDATE truenext_producers SET number = %(number)s, used_ms = {CLOCK["postgresql"]}
            WHERE name = %(producer)s AND owner = %(owner)s AND number = %(number)s - 1
            RETURNING used_ms)
        INSERT INTO truenext_outbox ({OUTBOX_COLUMNS})
        SELECT CAST(%(id)s AS uuid), %(service)s, %(producer)s, %(number)s, %(interactive)s, %(messages)s, used_ms,
            %(unit)s
        FROM producer"""
    ],
    "sqlite": [
        f"""
        UPDATE truenext_producers SET number = :number, used_ms = {CLOCK["sqlite"]}
        WHERE name = :producer AND owner = :owner AND number = :number - 1""",
        f"""
        INSERT INTO truenext_outbox ({OUTBOX_COLUMNS})
        SELECT :id, :service, :producer, :number, :interactive, :messages, used_ms, :unit FROM truenext_producers
        WHERE name = :producer""",
    ],
}


class ExactlyOnceWriter:
    """Writer of one message's rows in inbox and outbox, in the SQL transaction of the stage."""

    __slots__ = ("_id", "skip_reason")

    def __init__(self, id: str) -> None:
        """Create the writer for one message. `id` is the message's id in the inbox."""
        self._id = id
        self.skip_reason: AlreadyProcessed | InProgress | None = None
        """Error of the first statement. If it is set, nothing is committed, even if the function has caught the
        error."""

    def insert_inbox_id(self, connection: Connection) -> None:
        """Insert the message's id into the inbox. This is the first statement of the transaction.

        Raises: AlreadyProcessed if the id exists; InProgress if another transaction has inserted the id and has not
        ended in time; OutboxUnusable; errors of SQLAlchemy
        """
        try:
            result = connection.exec_driver_sql(_BEGIN[connection.dialect.name], {"id": self._id})
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
                self.skip_reason = InProgress(
                    f"the same message is still being processed elsewhere, after a wait of {WAIT_S} seconds"
                )
                raise self.skip_reason from error
            raise _translated(error) from error
        if result.rowcount != 1:
            self.skip_reason = AlreadyProcessed("the message was already processed: this transaction is rolled back")
            raise self.skip_reason

    def insert_unit(self, connection: Connection, service: str, number: CommitNumber, unit: OutboxUnit) -> None:
        """Insert the unit into the outbox, and advance the producer's number. This is the last statement before COMMIT.

        Raises: ProducerLost if another process has claimed the producer; OutboxUnusable; errors of SQLAlchemy
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
                raise ProducerLost(
                    f"the producer {number.producer.name} was claimed by another process; nothing was committed"
                )


def _translated(error: DBAPIError) -> Exception:
    """Return OutboxUnusable if the tables cause the error; otherwise return the error itself."""
    text = unusable_table_text(error)
    return OutboxUnusable(text) if text else error
