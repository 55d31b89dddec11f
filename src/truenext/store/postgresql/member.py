"""Statements on the table `member`, in which each broker of a log describes itself for people.

A description that is lost with the database matters to no broker. So it is written without a wait for disk or standby.
"""

from __future__ import annotations

import logging
import platform
import time
from contextlib import suppress

import psycopg

from truenext.clock import boottime
from truenext.errors import ConfigurationError
from truenext.store.log import Member, MemberSettings, Role
from truenext.store.postgresql.connection import Connection
from truenext.store.postgresql.layout import statement
from truenext.store.postgresql.standing_by import STALE_S

logger = logging.getLogger(__name__)

NAME_PATIENCE_S = 1.5 * STALE_S
"""Time for which an opener waits until a broker with its member name has died."""
_NAME_PAUSE_S = 0.05


def place_of(settings: MemberSettings) -> str:
    """Return the place of a broker: its name, machine and folder."""
    return f"{settings.name}@{platform.node()}:{settings.folder.absolute()}"


def write_member(
    connection: Connection, schema: str, settings: MemberSettings, role: Role, epoch: int, number: int
) -> bool:
    """Describe a broker. Return False if another broker with its name has done so in the last STALE_S.

    Raises: psycopg.Error
    """
    found = connection.execute(
        statement(
            schema,
            """
            INSERT INTO {member} (name, host, place, role, epoch, number, users, at)
            VALUES (%s, %s, %s, %s, %s, %s, %s, clock_timestamp())
            ON CONFLICT (name) DO UPDATE SET (host, place, role, epoch, number, users, at)
                = (excluded.host, excluded.place, excluded.role, excluded.epoch, excluded.number, excluded.users,
                    excluded.at)
            WHERE {member}.place = excluded.place OR {member}.role = 'stopped'
                OR {member}.at < clock_timestamp() - %s * interval '1 second'
            RETURNING set_config('synchronous_commit', 'off', true)
            """,
        ),
        (settings.name, platform.node(), place_of(settings), role.value, epoch, number, settings.users, STALE_S),
    ).fetchone()
    return found is not None


def forget_members(connection: Connection, schema: str, number: int) -> None:
    """Delete each broker that has not described itself for a day. A broker that has said to have rows behind `number`
    stays: its description may be all that tells of them. Raises: psycopg.Error"""
    connection.execute(
        statement(schema, "DELETE FROM {member} WHERE at < clock_timestamp() - interval '1 day' AND number <= %s"),
        (number,),
    )


def read_members(connection: Connection, schema: str) -> tuple[Member, ...]:
    """Return all brokers that have described themselves, in the order of their names. Raises: psycopg.Error"""
    rows = connection.execute(
        statement(
            schema,
            """
            SELECT name, host, role, epoch, number, users,
                (extract(epoch FROM clock_timestamp() - at) * 1000)::bigint
            FROM {member} ORDER BY name
            """,
        )
    )
    return tuple(
        Member(name=name, host=host, role=Role(role), epoch=epoch, number=number, users=users, age_ms=age_ms)
        for name, host, role, epoch, number, users, age_ms in rows
    )


class OwnMember:
    """Description of this broker, and what it has noticed of that of the active one."""

    def __init__(self, schema: str, settings: MemberSettings) -> None:
        self._schema = schema
        self._settings = settings
        self._warned_users: str | None = None
        """Users file of another broker of which this one has warned."""
        self.described_at = 0.0
        self._described = (0, 0)
        """Epoch and number of the last description."""

    def claim_name(self, connection: Connection, epoch: int, number: int) -> None:
        """Describe this broker, whose folder has the rows up to `number`.

        Raises: ConfigurationError if another broker has this member name; psycopg.Error
        """
        deadline = boottime() + NAME_PATIENCE_S
        while not self.describe(connection, Role.STANDING_BY, epoch, number):
            if boottime() >= deadline:
                raise self.name_error()
            time.sleep(_NAME_PAUSE_S)

    def name_error(self) -> ConfigurationError:
        return ConfigurationError(
            f"another broker has the member name {self._settings.name!r} on the log in schema {self._schema!r}: give "
            "this one another name (--member)"
        )

    def describe(self, connection: Connection, role: Role, epoch: int, number: int) -> bool:
        """Return False if another broker has this member name."""
        self.described_at, self._described = boottime(), (epoch, number)
        # No broker waits until the database has space for this.
        with suppress(psycopg.errors.DiskFull):
            return write_member(connection, self._schema, self._settings, role, epoch, number)
        return True

    def compare_users(self, connection: Connection, epoch: int) -> None:
        """Log a warning if the active broker has another users file, once for each, and if it has the same again."""
        for each in read_members(connection, self._schema):
            is_active = (each.role, each.epoch) == (Role.ACTIVE, epoch)
            if is_active and self._warned_users is not None and each.users == self._settings.users:
                self._warned_users = None
                logger.warning("the active broker has the same users file again", extra={"active": each.name})
            if is_active and each.users not in (self._settings.users, self._warned_users):
                self._warned_users = each.users
                logger.warning(
                    "the active broker has another users file: clients may be refused once this one takes over",
                    extra={"active": each.name},
                )

    def end(self, connection: Connection, epoch: int, number: int) -> None:
        """Describe this broker as stopped. Raises: psycopg.Error"""
        write_member(connection, self._schema, self._settings, Role.STOPPED, epoch, number)

    def leave(self, parameters: dict[str, str]) -> None:
        """Describe this broker, which stands by, as stopped, if the database can be reached."""
        if not self.described_at:
            return
        # Another method may be using the connection.
        with suppress(psycopg.Error, ConfigurationError), Connection.open(parameters) as connection:
            self.end(connection, *self._described)
