"""Outbox: the calls that read and change the outbox's tables outside of the transactions of stages.

Each call is one transaction, over connections that no stage uses. A call that raises DatabaseUnavailable may have been
executed. Every call may be repeated.

Source: docs/stages-database.md
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, NamedTuple

from sqlalchemy import CursorResult
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from truenext.errors import ConfigurationError
from truenext.stage.core.outbox_unit import (
    COMBINED_PREFIX,
    COMBINED_UNITS_MAX,
    PART_PREFIX,
    UNIT_PREFIXES,
    OutboxProducer,
    combine_units,
    decode_unit,
    split_unit,
)
from truenext.stage.sql.error_kind import classify_error
from truenext.stage.sql.errors import DatabaseErrorKind, DatabaseUnavailable, OutboxBusy, OutboxUnusable, ProducerLost
from truenext.stage.sql.exactly_once_writer import OUTBOX_COLUMNS
from truenext.stage.sql.sqlite import READ_ONLY
from truenext.stage.sql.syntax import SqlSyntax, plain_id
from truenext.stage.sql.tables import check_versions, create_tables, metadata, replies, unusable_table_text

ALIVE_MS = 15_000
"""Milliseconds for which a process counts as alive after its heartbeat. Even if a living process is wrongly taken for
dead, no message is sent twice."""
DEAD_OWNER_KEPT_MS = 24 * 3600 * 1000
"""Milliseconds after which the row of a dead process is deleted."""
PRODUCER_UNUSED_MS = 6 * 24 * 3600 * 1000
"""Milliseconds after which an unused producer is dropped, since the broker will soon forget it. Source:
docs/reference/limits.md, PRODUCER_RETENTION_MS"""
RETENTION_MS = 7 * 24 * 3600 * 1000
"""Milliseconds for which the inbox keeps a message's id after its acknowledgement."""
DELETED_ROWS_MAX = 1000
"""Largest number of rows of the inbox, of keys and of replies, that are deleted in one transaction."""


class StoredUnit(NamedTuple):
    """Unit in the outbox, with the producer and the number under which it is sent."""

    id: str
    producer: str
    number: int
    unit: bytes
    age_ms: int
    """Milliseconds since the unit was written; for a combined unit, since its oldest part was written."""
    may_have_others: bool = True
    """False if no other unit without a number was left when this unit got its number."""


class PendingWork(NamedTuple):
    """State of the outbox, read with a heartbeat. It tells the relay which work is pending."""

    is_owner_registered: bool
    """True if this process has a row among the owners."""
    has_ownerless_producers: bool
    """True if a producer exists whose process is dead."""
    has_unnumbered_units: bool
    """True if a unit exists that has no number yet and that this process can read."""
    owned_producer_count: int


class UnsentCounts(NamedTuple):
    """Counts of the messages that are still in a service's outbox, and perhaps not sent yet."""

    numbered: int
    """Number of messages in units with a number."""
    unnumbered: int
    """Number of messages in units without a number, which programs' own transactions have written."""
    oldest_s: float


class Outbox:
    def __init__(self, engine: AsyncEngine, service: str, owner: str, instance: str) -> None:
        """Create the outbox of a service. `owner` is the id of this run, and `instance` is the human-readable name of
        the run."""
        self.owner = owner
        self._service = service
        self._instance = instance[:255]
        self._engine = engine
        self._read_only_engine = engine.execution_options(**READ_ONLY)
        self._syntax = SqlSyntax(engine.dialect.name)
        self._now_ms = self._syntax.now_ms
        self._is_readable = IS_READABLE[engine.dialect.name]
        self.keeps_replies = False
        """True if the database has the table of kept replies. `check_tables` sets it."""

    # ---- Start, heartbeat, counts ----

    async def check_tables(self) -> None:
        """Check that all tables exist with all their columns.

        Raises: ConfigurationError if a table is missing or cannot be used, or the tables are of another version;
        DatabaseUnavailable
        """
        try:
            async with self._transaction(is_read_only=True) as connection:
                found = (await self._execute(connection, "SELECT version FROM truenext_schema")).scalars().all()
                if found:
                    # Tables of another version lack columns, too; the version's error says what to do.
                    check_versions(found)
                self.keeps_replies = bool((await self._execute(connection, self._syntax.has_replies)).scalar())
                for table in metadata.tables.values():
                    if table is replies and not self.keeps_replies:
                        # Added later: services that keep no replies run without it.
                        continue
                    columns = ", ".join(column.name for column in table.columns)
                    await self._execute(connection, f"SELECT {columns} FROM {table.name} WHERE 1 = 0")
        except DatabaseUnavailable as error:
            cause = error.__cause__
            if isinstance(cause, DBAPIError) and (text := unusable_table_text(cause)):
                raise ConfigurationError(text) from error
            raise
        check_versions(found)

    async def is_durable(self) -> bool:
        """Return whether commits survive a crash of the database: False if PostgreSQL's synchronous_commit is off.
        Raises: DatabaseUnavailable"""
        if self._syntax.is_sqlite:
            # SQLite's connections are set up for that.
            return True
        rows = await self._read("SELECT current_setting('synchronous_commit')")
        return bool(rows[0][0] != "off")

    async def create_tables(self) -> None:
        """Create missing tables. Raises: DatabaseUnavailable"""
        async with self._transaction() as connection:
            await connection.run_sync(create_tables)

    async def register_owner(self) -> None:
        """Record that this process is alive. Raises: DatabaseUnavailable"""
        async with self._transaction() as connection:
            await self._execute(
                connection,
                f"""INSERT INTO truenext_owners (name, service, instance, alive_until_ms)
                VALUES (:owner, :service, :instance, {self._now_ms} + :alive_ms)
                ON CONFLICT (name) DO UPDATE SET alive_until_ms = excluded.alive_until_ms""",
                {"instance": self._instance, "alive_ms": ALIVE_MS},
            )

    async def deregister_owner(self, free: Collection[str]) -> None:
        """Remove this process from the owners, so that other processes may claim its producers now. Drop the producers
        in `free` that have no units.

        Raises: DatabaseUnavailable
        """
        async with self._transaction() as connection:
            await self._drop(connection, free)
            await self._execute(connection, "DELETE FROM truenext_owners WHERE name = :owner")

    async def heartbeat(self) -> PendingWork:
        """Record that this process is alive, and return the pending work. Raises: DatabaseUnavailable"""
        async with self._transaction() as connection:
            found = await self._execute(
                connection,
                f"""UPDATE truenext_owners SET alive_until_ms = {self._now_ms} + :alive_ms WHERE name = :owner
                RETURNING
                    (SELECT count(*) FROM (SELECT 1 FROM truenext_producers AS p WHERE {self._ownerless} LIMIT 1) AS p),
                    {self._unnumbered_count},
                    (SELECT count(*) FROM truenext_producers AS p
                        WHERE p.service = :service AND p.owner = :owner)""",
                {"alive_ms": ALIVE_MS},
            )
            row = found.first()
        if row is None:
            return PendingWork(False, True, True, 0)
        ownerless, unnumbered, owned = tuple(row)
        return PendingWork(True, bool(ownerless), bool(unnumbered), owned)

    async def count_unsent(self) -> UnsentCounts:
        """Count the messages of all processes that are still in the outbox, and perhaps not sent yet. Raises:
        DatabaseUnavailable"""
        rows = await self._read(
            f"""SELECT
                coalesce(sum(CASE WHEN producer IS NULL THEN 0 ELSE messages END), 0),
                coalesce(sum(CASE WHEN producer IS NULL THEN messages ELSE 0 END), 0),
                coalesce({self._now_ms} - min(written_ms), 0)
            FROM truenext_outbox WHERE service = :service"""
        )
        numbered, unnumbered, oldest_ms = rows[0]
        return UnsentCounts(int(numbered), int(unnumbered), max(oldest_ms, 0) / 1000)

    # ---- Producers ----

    def new_producer(self) -> OutboxProducer:
        """Return a new producer. `add_producer` inserts it into the database."""
        return OutboxProducer(f"truenext-{secrets.token_hex(16)}", self.owner, 0)

    async def add_producer(self, producer: OutboxProducer) -> None:
        """Insert a producer into the database. Raises: DatabaseUnavailable; then it may have been inserted"""
        async with self._transaction() as connection:
            await self._insert_producer(connection, producer)

    async def owned_producers(self) -> list[str]:
        """Return the names of the producers that this process owns in the database. Raises: DatabaseUnavailable"""
        rows = await self._read("SELECT name FROM truenext_producers WHERE service = :service AND owner = :owner")
        return [name for (name,) in rows]

    async def ownerless_producers(self, count: int) -> list[str]:
        """Return at most `count` names of producers whose process is dead. They are chosen at random, so that producers
        that cannot be claimed yet do not hide other producers. Raises: DatabaseUnavailable"""
        rows = await self._read(
            f"SELECT p.name FROM truenext_producers AS p WHERE {self._ownerless} ORDER BY random() LIMIT :count",
            {"count": count},
        )
        return [name for (name,) in rows]

    async def claim(self, name: str, *, owner_is_dead: bool) -> OutboxProducer | Literal["busy", "another's"]:
        """Claim a producer of this process, or with `owner_is_dead` a producer whose process is dead. Return "busy" if
        an open transaction uses the producer. Return "another's" if the producer no longer exists or has another owner.
        Read the units of a claimed producer in a later transaction, so that all earlier commits are visible.

        Raises: DatabaseUnavailable
        """
        condition = self._ownerless if owner_is_dead else "p.owner = :owner AND p.service = :service"
        lock = "" if self._syntax.is_sqlite else " FOR UPDATE OF p SKIP LOCKED"
        async with self._transaction() as connection:
            locked = await self._execute(
                connection,
                f"SELECT p.number FROM truenext_producers AS p WHERE p.name = :name AND {condition}{lock}",
                {"name": name},
            )
            if locked.first() is None:
                existing = await self._execute(
                    connection,
                    f"SELECT 1 FROM truenext_producers AS p WHERE p.name = :name AND {condition}",
                    {"name": name},
                )
                return "another's" if existing.first() is None else "busy"
            # The row as it is now: a transaction that ended meanwhile may have changed it.
            claimed = await self._execute(
                connection,
                "UPDATE truenext_producers SET owner = :owner WHERE name = :name RETURNING number",
                {"name": name},
            )
            return OutboxProducer(name, self.owner, claimed.scalar_one())

    async def units_of(self, producer: OutboxProducer) -> list[StoredUnit]:
        """Return the units of a producer, in the order of their numbers. Raises: DatabaseUnavailable"""
        return await self._units("producer = :name ORDER BY number", {"name": producer.name})

    async def find_unit(self, id: str) -> StoredUnit | None:
        """Return the unit of the message with this inbox id; None if the outbox no longer has it. Raises:
        DatabaseUnavailable"""
        units = await self._units(f"id = {self._syntax.id_parameter} AND producer IS NOT NULL", {"id": id})
        return units[0] if units else None

    async def unused_producers(self) -> list[str]:
        """Return the names of this process's producers that have been unused for so long that the broker may soon
        forget them.

        Raises: DatabaseUnavailable
        """
        rows = await self._read(
            "SELECT name FROM truenext_producers WHERE owner = :owner AND service = :service "
            f"AND used_ms <= {self._now_ms} - :forgotten_ms",
            {"forgotten_ms": PRODUCER_UNUSED_MS},
        )
        return [name for (name,) in rows]

    async def drop_producers(self, free: Collection[str]) -> None:
        """Drop producers of this process. A producer that still has units is not dropped. Raises:
        DatabaseUnavailable"""
        async with self._transaction() as connection:
            await self._drop(connection, free)

    async def renumber(self, units: Sequence[StoredUnit], old: OutboxProducer) -> OutboxProducer | None:
        """Move units whose numbers the broker does not know to a new producer, with numbers from 1 on. Delete the old
        producer. Return the new producer; None if another process has claimed the old one.

        Raises: DatabaseUnavailable
        """
        new = self.new_producer()
        async with self._transaction() as connection:
            deleted = await self._execute(
                connection,
                "DELETE FROM truenext_producers WHERE name = :name AND owner = :owner AND number = :number",
                {"name": old.name, "number": old.last_number},
            )
            if deleted.rowcount != 1:
                return None
            for each in units:
                new.last_number += 1
                await self._execute(
                    connection,
                    "UPDATE truenext_outbox SET producer = :new, number = :number "
                    "WHERE producer = :old AND number = :before",
                    {"new": new.name, "number": new.last_number, "old": old.name, "before": each.number},
                )
            await self._insert_producer(connection, new)
        return new

    async def number_units(self, producer: OutboxProducer, rows_max: int = COMBINED_UNITS_MAX) -> StoredUnit | None:
        """Combine at most `rows_max` units without a number into one unit, and give it the producer's next number.
        Interactive units come first, and are not combined with other units. Return None if there is no unit that this
        process can read.

        Raises: ProducerLost if another process has claimed the producer; DatabaseUnavailable, and then the unit may
        have been numbered
        """
        id, number = secrets.token_hex(16), producer.last_number + 1
        names = {"producer": producer.name, "number": number, "id": id, "most": rows_max}
        async with self._transaction() as connection:
            for is_interactive in (True, False):
                combined = await self._combine_rows(connection, {**names, "interactive": is_interactive})
                if combined is not None:
                    break
            else:
                return None
            used = await self._execute(
                connection,
                f"UPDATE truenext_producers SET number = :number, used_ms = {self._now_ms} "
                "WHERE name = :name AND owner = :owner AND number = :number - 1 "
                f"RETURNING {self._now_ms}, {self._unnumbered_count}",
                {"name": producer.name, "number": number},
            )
            row = used.first()
            if row is None:
                raise ProducerLost(
                    f"the producer {producer.name} was claimed by another process; nothing was committed"
                )
            now_ms, others = tuple(row)
            written_ms, unit = combined
            return StoredUnit(id, producer.name, number, unit, now_ms - written_ms, bool(others))

    async def split_into_unnumbered(self, unit: StoredUnit) -> bool:
        """Replace a unit by its parts, which have no number. Afterwards nothing can be sent under the unit's number.
        Return False if the unit no longer exists, since another process has split it.

        Raises: UnreadableUnit; DatabaseUnavailable, and then the unit may have been split
        """
        parts = [(secrets.token_hex(16), *part) for part in split_unit(unit.unit)]
        async with self._transaction() as connection:
            deleted = await self._execute(
                connection,
                "DELETE FROM truenext_outbox WHERE producer = :name AND number = :number "
                "RETURNING interactive, written_ms",
                {"name": unit.producer, "number": unit.number},
            )
            row = deleted.first()
            if row is None:
                return False
            interactive, first_ms = tuple(row)
            for id, written_ms, part in parts or [(unit.id, first_ms, unit.unit)]:
                await self._execute(
                    connection,
                    f"""INSERT INTO truenext_outbox (id, service, interactive, messages, written_ms, unit)
                    VALUES ({self._syntax.id_parameter}, :service, :interactive, :messages, :written_ms, :unit)""",
                    {
                        "id": id,
                        "interactive": interactive,
                        "messages": len(decode_unit(part, 0)),
                        "written_ms": written_ms,
                        "unit": part,
                    },
                )
            return True

    async def count_unreadable(self) -> int:
        """Count units without a number that only a newer process can read. Raises: DatabaseUnavailable"""
        rows = await self._read(
            "SELECT count(*) FROM truenext_outbox WHERE producer IS NULL AND service = :service "
            f"AND NOT {self._is_readable}"
        )
        return int(rows[0][0])

    # ---- Sent units, processed messages ----

    async def delete_sent(self, producer: str, number: int) -> None:
        """Delete a unit that was sent. Raises: DatabaseUnavailable"""
        async with self._transaction() as connection:
            await self._execute(
                connection,
                "DELETE FROM truenext_outbox WHERE producer = :name AND number = :number",
                {"name": producer, "number": number},
            )

    async def confirm_rows(self, sent: Collection[str], acknowledged: Collection[str]) -> None:
        """Delete the units in `sent`. Mark in the inbox that the acknowledgements of the messages in `acknowledged` are
        final. Both are collections of inbox ids.

        Raises: DatabaseUnavailable
        """
        async with self._transaction() as connection:
            if sent:
                await self._execute(
                    connection,
                    f"DELETE FROM truenext_outbox WHERE {self._syntax.one_of_ids_in_order('truenext_outbox')}",
                    {"ids": self._syntax.ids(sent)},
                )
            if acknowledged:
                await self._execute(
                    connection,
                    f"""UPDATE truenext_inbox SET acknowledged_ms = {self._now_ms} WHERE acknowledged_ms IS NULL
                    AND {self._syntax.one_of_ids_in_order("truenext_inbox")}""",
                    {"ids": self._syntax.ids(acknowledged)},
                )

    async def is_processed(self, id: str) -> bool:
        """Return whether the inbox contains this id. Raises: DatabaseUnavailable"""
        return bool(
            await self._read(f"SELECT 1 FROM truenext_inbox WHERE id = {self._syntax.id_parameter}", {"id": id})
        )

    async def delete_expired(self) -> bool:
        """Delete some rows whose retention has ended. Return True if there may be more such rows. Raises:
        DatabaseUnavailable"""
        async with self._transaction() as connection:
            tables = [("truenext_inbox", "acknowledged_ms"), ("truenext_keys", "started_ms")]
            if self.keeps_replies:
                tables.append(("truenext_replies", "kept_ms"))
            deleted = [
                await self._execute(
                    connection,
                    f"""DELETE FROM {table} WHERE id IN (SELECT id FROM {table} WHERE {time} < {self._now_ms} - :kept_ms
                    ORDER BY {time} LIMIT :count{self._syntax.skip_locked})""",
                    {"kept_ms": RETENTION_MS, "count": DELETED_ROWS_MAX},
                )
                for table, time in tables
            ]
            # Producers of these owners are ownerless either way.
            await self._execute(
                connection,
                f"DELETE FROM truenext_owners WHERE service = :service AND alive_until_ms < {self._now_ms} - :gone_ms",
                {"gone_ms": DEAD_OWNER_KEPT_MS},
            )
            return max(each.rowcount for each in deleted) >= DELETED_ROWS_MAX

    # ---- Statements ----

    async def _combine_rows(self, connection: AsyncConnection, names: Mapping[str, object]) -> tuple[int, bytes] | None:
        """Combine the oldest units without a number into one unit. Return its bytes, and the time at which its oldest
        part was written; None if there are no such units."""
        if self._syntax.is_sqlite:
            return await self._combine_in_steps(connection, names)
        combined = (await self._execute(connection, _COMBINE, names)).first()
        if combined is None:
            return None
        written_ms, unit = tuple(combined)
        return written_ms, unit

    async def _combine_in_steps(
        self, connection: AsyncConnection, names: Mapping[str, object]
    ) -> tuple[int, bytes] | None:
        rowids: list[int] = []
        size = messages = 0
        for rowid, length, count in map(tuple, (await self._execute(connection, _FIRST, names)).all()):
            if rowids and (size + length > BYTES_MAX or messages + count > MESSAGES_MAX):
                break
            rowids.append(rowid)
            size += length
            messages += count
        if not rowids:
            return None
        these = {"places": json.dumps(rowids)}
        rows = await self._execute(connection, f"SELECT written_ms, rowid, unit {_THESE}", these)
        written = [(written_ms, unit) for written_ms, _, unit in sorted(map(tuple, rows.all()))]
        await self._execute(connection, f"DELETE {_THESE}", these)
        first_ms, unit = written[0][0], combine_units(written)
        more = {"messages": messages, "written_ms": first_ms, "unit": unit}
        await self._execute(connection, _INSERT, {**names, **more})
        return first_ms, unit

    @property
    def _ownerless(self) -> str:
        return f"""p.service = :service AND NOT EXISTS
            (SELECT 1 FROM truenext_owners AS w WHERE w.name = p.owner AND w.alive_until_ms > {self._now_ms})"""

    @property
    def _unnumbered_count(self) -> str:
        """SQL expression: 1 if there is a unit without a number that this process can read, 0 otherwise."""
        return f"""(SELECT count(*) FROM (SELECT 1 FROM truenext_outbox
            WHERE producer IS NULL AND service = :service AND {self._is_readable} LIMIT 1) AS u)"""

    async def _units(self, where: str, parameters: Mapping[str, object]) -> list[StoredUnit]:
        rows = await self._read(
            f"SELECT id, producer, number, unit, {self._now_ms} - written_ms FROM truenext_outbox WHERE {where}",
            parameters,
        )
        return [StoredUnit(plain_id(id), producer, number, unit, age_ms) for id, producer, number, unit, age_ms in rows]

    async def _drop(self, connection: AsyncConnection, free: Collection[str]) -> None:
        for name in free:
            await self._execute(
                connection,
                "DELETE FROM truenext_producers WHERE name = :name AND owner = :owner "
                "AND NOT EXISTS (SELECT 1 FROM truenext_outbox AS o WHERE o.producer = :name)",
                {"name": name},
            )

    async def _insert_producer(self, connection: AsyncConnection, producer: OutboxProducer) -> None:
        await self._execute(
            connection,
            "INSERT INTO truenext_producers (name, service, owner, number, used_ms) "
            f"VALUES (:name, :service, :owner, :number, {self._now_ms})",
            {"name": producer.name, "number": producer.last_number},
        )

    async def _read(self, statement: str, parameters: Mapping[str, object] | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of one statement. Raises: DatabaseUnavailable"""
        async with self._transaction(is_read_only=True) as connection:
            return list(map(tuple, await self._execute(connection, statement, parameters)))

    async def _execute(
        self, connection: AsyncConnection, statement: str, parameters: Mapping[str, object] | None = None
    ) -> CursorResult[Any]:
        """Execute a statement. `:service` and `:owner` in it are the service and the owner id of this process."""
        names = {"service": self._service, "owner": self.owner, **(parameters or {})}
        return await self._syntax.execute(connection, statement, names)

    @asynccontextmanager
    async def _transaction(self, *, is_read_only: bool = False) -> AsyncIterator[AsyncConnection]:
        """Open a transaction, which may write unless `is_read_only`. Raises: the errors of `mapped_errors`"""
        with mapped_errors(f"the outbox of {self._service}"):
            async with (self._read_only_engine if is_read_only else self._engine).begin() as connection:
                yield connection


@contextmanager
def mapped_errors(subject: str) -> Iterator[None]:
    """Raise an error of truenext in place of each error of the database. `subject` names the table in errors.

    Raises: OutboxBusy if a lock was not free in time; DatabaseUnavailable if the database does not answer;
    OutboxUnusable for all other errors
    """
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        kind = classify_error(error)
        if kind is DatabaseErrorKind.RETRYABLE:
            raise OutboxBusy(f"{subject} is busy: {error}") from error
        if kind in (DatabaseErrorKind.UNAVAILABLE, DatabaseErrorKind.LOST):
            raise DatabaseUnavailable(f"{subject} cannot be reached: {error}") from error
        if isinstance(error, DBAPIError) and (text := unusable_table_text(error)):
            raise OutboxUnusable(text) from error
        raise OutboxUnusable(f"{subject} cannot be used: {error}") from error


# ---- Numbers for units of programs' own transactions: many units are combined into one, in one row ----
#
# So a thousand of them take one number, one COMMIT of the broker and one deleted row. PostgreSQL combines them in one
# statement, which returns the unit in one piece. SQLite runs in this process, where a few simple statements are quick.
#
# Rows are named by their place, which is quicker than their key: no other transaction changes them now.
#
# Source: docs/stages-database.md; decision 67

MESSAGES_MAX = 10_000
"""Largest number of messages in a combined unit: half of a transaction's limit. A first part with more messages is
sent alone."""
BYTES_MAX = 2 * 1024 * 1024
"""Largest number of bytes in a combined unit. A larger first part is sent alone."""

IS_READABLE = {
    "postgresql": "substr(unit, 1, 2) IN (" + ", ".join(f"'\\x{each.hex()}'" for each in UNIT_PREFIXES) + ")",
    "sqlite": "substr(unit, 1, 2) IN (" + ", ".join(f"x'{each.hex()}'" for each in UNIT_PREFIXES) + ")",
}
"""SQL condition for units that this process can read. Units of other formats are left to newer processes."""

_COMBINE = f"""
    WITH first_rows AS (
        SELECT ctid AS place, id, written_ms, length(unit) AS size, messages FROM truenext_outbox
        WHERE producer IS NULL AND service = :service AND interactive = :interactive AND {IS_READABLE["postgresql"]}
        ORDER BY written_ms, id LIMIT :most FOR UPDATE SKIP LOCKED),
    counted AS (
        SELECT place, row_number() OVER in_order AS nth, sum(size) OVER in_order AS size,
            sum(messages) OVER in_order AS messages
        FROM first_rows WINDOW in_order AS (ORDER BY written_ms, id)),
    taken AS (
        DELETE FROM truenext_outbox WHERE ctid = ANY(ARRAY(
            SELECT place FROM counted WHERE nth = 1 OR (size <= {BYTES_MAX} AND messages <= {MESSAGES_MAX})))
        RETURNING id, written_ms, messages, unit)
    INSERT INTO truenext_outbox ({OUTBOX_COLUMNS})
    SELECT CAST(:id AS uuid), :service, :producer, :number, :interactive, sum(messages), min(written_ms),
        '\\x{COMBINED_PREFIX.hex()}' || int4send(CAST(count(*) AS int)) || string_agg(
            '\\x{PART_PREFIX.hex()}' || int8send(written_ms) || unit, CAST('' AS bytea) ORDER BY written_ms, id)
    FROM taken HAVING count(*) > 0
    RETURNING written_ms, unit"""

_FIRST = f"""
    SELECT rowid, length(unit), messages FROM truenext_outbox
    WHERE producer IS NULL AND service = :service AND interactive = :interactive AND {IS_READABLE["sqlite"]}
    ORDER BY written_ms, rowid LIMIT :most"""
_THESE = "FROM truenext_outbox WHERE rowid IN (SELECT value FROM json_each(:places))"
_INSERT = f"""
    INSERT INTO truenext_outbox ({OUTBOX_COLUMNS})
    VALUES (:id, :service, :producer, :number, :interactive, :messages, :written_ms, :unit)"""
