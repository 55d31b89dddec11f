"""What is said to the outbox beside the transactions of stages: who owns which producer, what is still to be sent, and
what was sent.

Each call is a transaction of its own, over connections that no stage uses. A call that was not answered may have
happened: all of them may be said again.

Source: docs/stages-outbox.md
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

from sqlalchemy import CursorResult, Row
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from truenext.errors import ConfigurationError
from truenext.stage.core.numbers import Producer
from truenext.stage.sql.errors import DatabaseAway, ProducerLost
from truenext.stage.sql.once import CLOCK
from truenext.stage.sql.tables import NO_TABLES, VERSION, make_tables, metadata, says_no_table

ALIVE_MS = 15_000
"""Milliseconds for which a process is taken for alive since it last said so. Whom that misjudges has more to do, and
nothing happens twice for it."""
GONE_MS = 24 * 3600 * 1000
"""Milliseconds after which a process that is not alive any more is not shown any more, either."""
FORGOTTEN_MS = 6 * 24 * 3600 * 1000
"""A producer that was not used for so long is not used again: the broker soon forgets it. Source: docs/limits.md,
PRODUCER_MEMORY_MS"""
KEPT_MS = 7 * 24 * 3600 * 1000
"""Milliseconds for which the inbox knows a message after its acknowledgement."""
NUMBERED_MAX = 1000
"""Rows that get one number."""
NUMBERED_MESSAGES_MAX = 10_000
"""Messages of them, unless it is a single one: a fifth of what the broker takes in one transaction."""
NUMBERED_BYTES_MAX = 2 * 1024 * 1024
"""Bytes of them, unless it is a single one."""
CLEANED_MAX = 1000
"""Rows of the inbox that go at a time."""


_NAME = re.compile(r"(?<!:):([a-z_]+)")


class Waiting(NamedTuple):
    """A unit in the outbox."""

    id: str
    producer: str
    number: int
    unit: bytes
    age_ms: int
    """Since it was written."""


class Look(NamedTuple):
    """What one look a second finds."""

    is_known: bool
    """This process is among the owners."""
    ownerless: bool
    """There are producers whose process is not alive any more."""
    unnumbered: bool
    """There are units that have no number yet."""
    owned: int
    """Producers of this process, as the database has it."""


class Unsent(NamedTuple):
    """What the outbox of a service has that is not known to be sent."""

    numbered: int
    """Units."""
    unnumbered: int
    """Units that programs' transactions have begun, and that have no number yet."""
    oldest_s: float


class Outbox:
    def __init__(self, engine: AsyncEngine, service: str, owner: str, instance: str) -> None:
        """`owner` is this run of this process, `instance` the same for people."""
        self.owner = owner
        self._service = service
        self._instance = instance[:255]
        self._engine = engine
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._clock = CLOCK[engine.dialect.name]
        self._as_uuid = ":{0}" if self._is_sqlite else "CAST(:{0} AS uuid)"

    # ---- Coming up ----

    async def check(self) -> None:
        """Raises: ConfigurationError if the tables are missing, or of another version; DatabaseAway"""
        try:
            async with self._connection() as connection:
                found = (await self._say(connection, "SELECT max(version) FROM truenext_schema")).scalar()
                for name in metadata.tables:
                    await self._say(connection, f"SELECT 1 FROM {name} WHERE 1 = 0")
        except DatabaseAway as error:
            cause = error.__cause__
            if isinstance(cause, DBAPIError) and says_no_table(cause):
                raise ConfigurationError(NO_TABLES) from error
            raise
        if found != VERSION:
            raise ConfigurationError(
                f"the tables in the database are of version {found}, and this truenext works with version {VERSION}: "
                + ("update truenext" if (found or 0) > VERSION else "`truenext stages schema SERVICE --apply`")
            )

    async def is_durable(self) -> bool:
        """What the database confirms survives its crash. Raises: DatabaseAway"""
        if self._is_sqlite:
            # Its connections are set up for that.
            return True
        async with self._connection() as connection:
            found = await self._say(connection, "SELECT current_setting('synchronous_commit')")
            return bool(found.scalar() != "off")

    async def make_tables(self) -> None:
        """Raises: DatabaseAway"""
        async with self._connection() as connection:
            await connection.run_sync(make_tables)

    async def join(self) -> None:
        """This process is alive. Raises: DatabaseAway"""
        async with self._connection() as connection:
            await self._say(
                connection,
                f"""INSERT INTO truenext_owners (name, service, instance, alive_until_ms)
                VALUES (:owner, :service, :instance, {self._clock} + :alive_ms)
                ON CONFLICT (name) DO UPDATE SET alive_until_ms = excluded.alive_until_ms""",
                {"owner": self.owner, "service": self._service, "instance": self._instance, "alive_ms": ALIVE_MS},
            )

    async def leave(self, free: Collection[str]) -> None:
        """Others may have what it has at once, but for these producers: of those nothing is under way.

        Raises: DatabaseAway
        """
        async with self._connection() as connection:
            await self._drop(connection, free)
            await self._say(connection, "DELETE FROM truenext_owners WHERE name = :owner", {"owner": self.owner})

    async def look(self) -> Look:
        """Once a second: this process is alive; and what is there to do? Raises: DatabaseAway"""
        async with self._connection() as connection:
            found = await self._say(
                connection,
                f"""UPDATE truenext_owners SET alive_until_ms = {self._clock} + :alive_ms WHERE name = :owner
                RETURNING
                    (SELECT count(*) FROM (SELECT 1 FROM truenext_producers AS p WHERE {self._ownerless} LIMIT 1) AS p),
                    (SELECT count(*) FROM (SELECT 1 FROM truenext_outbox
                        WHERE producer IS NULL AND service = :service LIMIT 1) AS u),
                    (SELECT count(*) FROM truenext_producers AS p
                        WHERE p.service = :service AND p.owner = :owner)""",
                {"owner": self.owner, "service": self._service, "alive_ms": ALIVE_MS},
            )
            row = found.first()
        if row is None:
            return Look(False, True, True, 0)
        ownerless, unnumbered, owned = tuple(row)
        return Look(True, bool(ownerless), bool(unnumbered), owned)

    async def unsent(self) -> Unsent:
        """What is not known to be sent, of all processes. Raises: DatabaseAway"""
        async with self._connection() as connection:
            found = await self._say(
                connection,
                f"""SELECT count(producer), count(*) - count(producer),
                coalesce({self._clock} - min(written_ms), 0) FROM truenext_outbox WHERE service = :service""",
                {"service": self._service},
            )
            numbered, unnumbered, oldest_ms = tuple(found.one())
        return Unsent(numbered, unnumbered, max(oldest_ms, 0) / 1000)

    # ---- Producers ----

    def named_producer(self) -> Producer:
        """One that the database is still to hear of, with `add`."""
        return Producer(f"truenext-{secrets.token_hex(16)}", self.owner, 0)

    async def add(self, producer: Producer) -> None:
        """Raises: DatabaseAway, and then it may be there"""
        async with self._connection() as connection:
            await self._make(connection, producer)

    async def owned(self) -> list[str]:
        """Producers of this process, as the database has it. Raises: DatabaseAway"""
        async with self._connection() as connection:
            found = await self._say(
                connection,
                "SELECT p.name FROM truenext_producers AS p WHERE p.service = :service AND p.owner = :owner",
                {"service": self._service, "owner": self.owner},
            )
            return list(found.scalars())

    async def ownerless(self, count: int) -> list[str]:
        """Producers of this service whose process is not alive any more. Raises: DatabaseAway"""
        async with self._connection() as connection:
            found = await self._say(
                connection,
                f"SELECT p.name FROM truenext_producers AS p WHERE {self._ownerless} LIMIT :count",
                {"service": self._service, "count": count},
            )
            return list(found.scalars())

    async def take_over(self, name: str, *, of_the_dead: bool) -> Producer | Literal["busy", "another's"]:
        """From now on it is this process's own, if it was before, or if its process is dead (`of_the_dead`). "busy": a
        transaction that has not ended uses it. What it was given to send is to be read later, in a transaction that
        sees all that was committed before this one.

        Raises: DatabaseAway
        """
        whose = self._ownerless if of_the_dead else "p.owner = :owner AND p.service = :service"
        lock = "" if self._is_sqlite else " FOR UPDATE OF p SKIP LOCKED"
        async with self._connection() as connection:
            locked = await self._say(
                connection,
                f"SELECT p.number FROM truenext_producers AS p WHERE p.name = :name AND {whose}{lock}",
                {"name": name, "owner": self.owner, "service": self._service},
            )
            if locked.first() is None:
                there = await self._say(
                    connection,
                    f"SELECT 1 FROM truenext_producers AS p WHERE p.name = :name AND {whose}",
                    {"name": name, "owner": self.owner, "service": self._service},
                )
                return "another's" if there.first() is None else "busy"
            # The row as it is now: a transaction that ended meanwhile may have changed it.
            taken = await self._say(
                connection,
                "UPDATE truenext_producers SET owner = :owner WHERE name = :name RETURNING number",
                {"name": name, "owner": self.owner},
            )
            return Producer(name, self.owner, taken.scalar_one())

    async def units_of(self, producer: Producer) -> list[Waiting]:
        """What it has to send, in order. Raises: DatabaseAway"""
        return await self._units("o.producer = :name ORDER BY o.number, o.id", {"name": producer.name})

    async def unit(self, id: str) -> Waiting | None:
        """What the message with this id in the inbox has to send, if that is still there. Raises: DatabaseAway"""
        units = await self._units(f"o.id = {self._as_uuid.format('id')} AND o.producer IS NOT NULL", {"id": id})
        return units[0] if units else None

    async def unused(self) -> list[str]:
        """Producers of this process that were not used for so long that the broker may soon forget them.

        Raises: DatabaseAway
        """
        async with self._connection() as connection:
            found = await self._say(
                connection,
                "SELECT name FROM truenext_producers WHERE owner = :owner AND service = :service "
                f"AND used_ms <= {self._clock} - :forgotten_ms",
                {"owner": self.owner, "service": self._service, "forgotten_ms": FORGOTTEN_MS},
            )
            return list(found.scalars())

    async def drop(self, free: Collection[str]) -> None:
        """None of these is used again; one that has something to send stays. Raises: DatabaseAway"""
        async with self._connection() as connection:
            await self._drop(connection, free)

    async def move(self, units: Sequence[Waiting], old: Producer) -> Producer | None:
        """The broker does not know the numbers that these units have: they get those of a new producer, from 1 on, and
        the old one is gone. None if that is another's by now.

        Raises: DatabaseAway
        """
        new = self.named_producer()
        async with self._connection() as connection:
            gone = await self._say(
                connection,
                "DELETE FROM truenext_producers WHERE name = :name AND owner = :owner AND number = :number",
                {"name": old.name, "owner": self.owner, "number": old.number},
            )
            if gone.rowcount != 1:
                return None
            # Several rows may be one unit, under one number.
            for before in sorted({each.number for each in units}):
                new.number += 1
                await self._say(
                    connection,
                    "UPDATE truenext_outbox SET producer = :new, number = :number "
                    "WHERE producer = :old AND number = :before",
                    {"new": new.name, "number": new.number, "old": old.name, "before": before},
                )
            await self._make(connection, new)
        return new

    async def number(self, producer: Producer) -> list[Waiting]:
        """Give the next number to some of what has none, to what somebody waits for first, and apart: all of these rows
        are one unit. Empty if there is nothing.

        Raises: ProducerLost if it is another's by now; DatabaseAway, and then it may have happened
        """
        async with self._connection() as connection:
            for interactive in (True, False):
                found = await self._say(
                    connection,
                    "SELECT id, length(unit), messages FROM truenext_outbox "
                    "WHERE producer IS NULL AND service = :service AND interactive = :interactive "
                    f"ORDER BY written_ms, id LIMIT :rows{self._skip_locked}",
                    {"service": self._service, "interactive": interactive, "rows": NUMBERED_MAX},
                )
                if rows := found.all():
                    break
            ids: list[str] = []
            size = messages = 0
            for id, length, count in map(tuple, rows):
                size += length
                messages += count
                if ids and (size > NUMBERED_BYTES_MAX or messages > NUMBERED_MESSAGES_MAX):
                    break
                ids.append(_id(id))
            if not ids:
                return []
            numbered = await self._say(
                connection,
                f"UPDATE truenext_producers SET number = :number, used_ms = {self._clock} "
                "WHERE name = :name AND owner = :owner AND number = :number - 1",
                {"name": producer.name, "owner": self.owner, "number": producer.number + 1},
            )
            if numbered.rowcount != 1:
                raise ProducerLost(f"the numbers of {producer.name} are another process's by now")
            # They are locked already. What it has sent before may be there still, and is none of them.
            units = await self._say(
                connection,
                f"UPDATE truenext_outbox SET producer = :name, number = :number WHERE {self._these} "
                f"RETURNING id, producer, number, unit, {self._clock} - written_ms",
                {"name": producer.name, "number": producer.number + 1, "ids": self._ids(ids)},
            )
            by_id = {each.id: each for each in map(_waiting, units.all())}
            return [by_id[id] for id in ids]

    # ---- What was sent ----

    async def sent(self, producer: str, number: int) -> None:
        """The unit that has this number was sent, for good. It may have been said before. Raises: DatabaseAway"""
        async with self._connection() as connection:
            await self._say(
                connection,
                "DELETE FROM truenext_outbox WHERE producer = :name AND number = :number",
                {"name": producer, "number": number},
            )

    async def confirm(self, sent: Collection[str], done: Collection[str]) -> None:
        """The units with these ids were sent, for good; of the messages with those ids in the inbox the acknowledgement
        is final. Both may have been said before.

        Raises: DatabaseAway
        """
        async with self._connection() as connection:
            if sent:
                await self._say(
                    connection,
                    f"DELETE FROM truenext_outbox WHERE {self._these_in_order('truenext_outbox')}",
                    {"ids": self._ids(sent)},
                )
            if done:
                await self._say(
                    connection,
                    f"""UPDATE truenext_inbox SET marked_ms = {self._clock} WHERE marked_ms IS NULL
                    AND {self._these_in_order("truenext_inbox")}""",
                    {"ids": self._ids(done)},
                )

    async def is_done(self, id: str) -> bool:
        """The inbox knows this id. Raises: DatabaseAway"""
        async with self._connection() as connection:
            found = await self._say(
                connection, f"SELECT 1 FROM truenext_inbox WHERE id = {self._as_uuid.format('id')}", {"id": id}
            )
            return found.first() is not None

    async def clean(self) -> int:
        """Have some rows go that the inbox has kept for long enough: how many. Raises: DatabaseAway"""
        async with self._connection() as connection:
            gone = await self._say(
                connection,
                f"""DELETE FROM truenext_inbox WHERE id IN (SELECT id FROM truenext_inbox
                WHERE marked_ms < {self._clock} - :kept_ms ORDER BY marked_ms LIMIT :count{self._skip_locked})""",
                {"kept_ms": KEPT_MS, "count": CLEANED_MAX},
            )
            keys = await self._say(
                connection,
                f"""DELETE FROM truenext_keys WHERE id IN (SELECT id FROM truenext_keys
                WHERE begun_ms < {self._clock} - :kept_ms ORDER BY begun_ms LIMIT :count{self._skip_locked})""",
                {"kept_ms": KEPT_MS, "count": CLEANED_MAX},
            )
            # What those had is ownerless either way.
            await self._say(
                connection,
                f"DELETE FROM truenext_owners WHERE service = :service AND alive_until_ms < {self._clock} - :gone_ms",
                {"service": self._service, "gone_ms": GONE_MS},
            )
            return max(gone.rowcount, keys.rowcount)

    # ---- How it is said ----

    @property
    def _ownerless(self) -> str:
        return f"""p.service = :service AND NOT EXISTS
            (SELECT 1 FROM truenext_owners AS w WHERE w.name = p.owner AND w.alive_until_ms > {self._clock})"""

    @property
    def _skip_locked(self) -> str:
        return "" if self._is_sqlite else " FOR UPDATE SKIP LOCKED"

    @property
    def _these(self) -> str:
        """Rows with one of `ids`."""
        if self._is_sqlite:
            return "id IN (SELECT value FROM json_each(:ids))"
        return "id = ANY(CAST(:ids AS uuid[]))"

    def _these_in_order(self, table: str) -> str:
        """The same, locked in the order of the key, so that no two who do this wait for one another."""
        if self._is_sqlite:
            return self._these
        return f"id IN (SELECT id FROM {table} WHERE {self._these} ORDER BY id FOR UPDATE)"

    def _ids(self, ids: Collection[str]) -> str | list[str]:
        return json.dumps(list(ids)) if self._is_sqlite else list(ids)

    async def _units(self, where: str, parameters: Mapping[str, Any]) -> list[Waiting]:
        async with self._connection() as connection:
            found = await self._say(
                connection,
                f"SELECT o.id, o.producer, o.number, o.unit, {self._clock} - o.written_ms "
                f"FROM truenext_outbox AS o WHERE {where}",
                parameters,
            )
            return list(map(_waiting, found.all()))

    async def _drop(self, connection: AsyncConnection, free: Collection[str]) -> None:
        for name in free:
            await self._say(
                connection,
                "DELETE FROM truenext_producers WHERE name = :name AND owner = :owner "
                "AND NOT EXISTS (SELECT 1 FROM truenext_outbox AS o WHERE o.producer = :name)",
                {"name": name, "owner": self.owner},
            )

    async def _make(self, connection: AsyncConnection, producer: Producer) -> None:
        await self._say(
            connection,
            "INSERT INTO truenext_producers (name, service, owner, number, used_ms) "
            f"VALUES (:name, :service, :owner, :number, {self._clock})",
            {"name": producer.name, "service": self._service, "owner": self.owner, "number": producer.number},
        )

    async def _say(
        self, connection: AsyncConnection, statement: str, parameters: Mapping[str, Any] | None = None
    ) -> CursorResult[Any]:
        if not self._is_sqlite:
            statement = _NAME.sub(r"%(\1)s", statement)
        return await connection.exec_driver_sql(statement, dict(parameters or {}))

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection]:
        """One transaction. Raises: DatabaseAway, whatever has gone wrong"""
        try:
            async with self._engine.begin() as connection:
                yield connection
        except (SQLAlchemyError, OSError) as error:
            raise DatabaseAway(f"the outbox cannot be reached: {error}") from error


def _id(id: object) -> str:
    """A driver may have a type of its own for it."""
    return str(id).replace("-", "")


def _waiting(row: Row[Any]) -> Waiting:
    id, producer, number, unit, age_ms = tuple(row)
    return Waiting(_id(id), producer, number, unit, age_ms)
