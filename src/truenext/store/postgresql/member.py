"""Statements on the table `member`, in which each broker of a log describes itself for people.

A description that is lost with the database matters to no broker. So it is written without a wait for disk or standby.
"""

from __future__ import annotations

import platform

from truenext.store.log import Member, MemberSettings, Role
from truenext.store.postgresql.connection import Connection
from truenext.store.postgresql.layout import statement
from truenext.store.postgresql.standing_by import STALE_S


def place_of(settings: MemberSettings) -> str:
    """Return the place of a broker: its name, machine and folder."""
    return f"{settings.name}@{platform.node()}:{settings.folder.absolute()}"


def write_member(
    connection: Connection,
    schema: str,
    settings: MemberSettings,
    role: Role,
    epoch: int,
    number: int,
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
        (
            settings.name,
            platform.node(),
            place_of(settings),
            role.value,
            epoch,
            number,
            settings.users,
            STALE_S,
        ),
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
        Member(
            name=name,
            host=host,
            role=Role(role),
            epoch=epoch,
            number=number,
            users=users,
            age_ms=age_ms,
        )
        for name, host, role, epoch, number, users, age_ms in rows
    )
