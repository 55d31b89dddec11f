"""Report on the outbox of a service, for operators: unsent units, processes, and the size of the inbox."""

from __future__ import annotations

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, create_engine, func, literal_column, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from truenext.errors import ConfigurationError
from truenext.stage.sql.errors import DatabaseUnavailable, first_line
from truenext.stage.sql.exactly_once_writer import CLOCK
from truenext.stage.sql.tables import (
    check_versions,
    inbox,
    outbox,
    owners,
    producers,
    schema,
    unusable_table_text,
)
from truenext.stage.sql.url import address_of


class UnsentUnits(msgspec.Struct, frozen=True, kw_only=True):
    """Units that are still in the outbox, and perhaps not sent yet: those of one producer, or those without a
    producer."""

    producer: str | None
    """Producer of the units; None if the units have no numbers yet."""
    owner: str | None
    """Human-readable name of the process that owns the producer; None if that process is dead, or if there is no
    producer."""
    units: int
    messages: int
    oldest_s: float


class OutboxProcess(msgspec.Struct, frozen=True, kw_only=True):
    instance: str
    alive: bool
    producers: int


class InboxCounts(msgspec.Struct, frozen=True, kw_only=True):
    rows: int
    unacknowledged: int
    """Number of messages whose acknowledgement is not recorded as final: messages under way, and messages of dead
    processes."""


class OutboxReport(msgspec.Struct, frozen=True, kw_only=True):
    service: str
    waiting: list[UnsentUnits]
    """Unsent units of each producer. The producer with the oldest unit is first."""
    processes: list[OutboxProcess]
    ownerless: int
    """Number of producers of dead processes that no other process has claimed yet."""
    inbox: InboxCounts | None
    """Counts of the inbox, for all services in this database; None if they were not requested."""


def outbox_report(url: str, service: str, *, with_inbox: bool) -> OutboxReport:
    """Read the report from the database. `with_inbox` counts the rows of the inbox, which may be millions.

    Raises: ConfigurationError if the tables are missing; DatabaseUnavailable
    """
    address = address_of(url)
    if address.file is not None and not address.file.exists():
        raise DatabaseUnavailable(f"there is no file {address.file}: check the path in the URL of the database")
    with address.loading_driver():
        engine = create_engine(address.for_threads)
    try:
        with engine.connect() as connection:
            check_versions(connection.execute(select(schema.c.version)).scalars().all())
            return _report(connection, service, with_inbox)
    except (SQLAlchemyError, OSError) as error:
        if isinstance(error, DBAPIError) and (text := unusable_table_text(error)):
            raise ConfigurationError(f"{address}: {text}") from error
        raise DatabaseUnavailable(f"{address} is not available: {first_line(error)}") from error
    finally:
        engine.dispose()


def _report(connection: Connection, service: str, with_inbox: bool) -> OutboxReport:
    now: ColumnElement[int] = literal_column(CLOCK[connection.dialect.name])
    waiting = connection.execute(
        select(
            outbox.c.producer,
            owners.c.instance,
            func.count(),
            func.sum(outbox.c.messages),
            now - func.min(outbox.c.written_ms),
        )
        .select_from(outbox)
        .outerjoin(producers, producers.c.name == outbox.c.producer)
        .outerjoin(owners, and_(owners.c.name == producers.c.owner, owners.c.alive_until_ms > now))
        .where(outbox.c.service == service)
        .group_by(outbox.c.producer, owners.c.instance)
        .order_by(func.min(outbox.c.written_ms))
    ).all()
    processes = connection.execute(
        select(owners.c.instance, owners.c.alive_until_ms > now, func.count(producers.c.name))
        .outerjoin(producers, producers.c.owner == owners.c.name)
        .where(owners.c.service == service)
        .group_by(owners.c.name, owners.c.instance, owners.c.alive_until_ms)
        .order_by(owners.c.instance)
    ).all()
    alive = select(owners.c.name).where(owners.c.alive_until_ms > now)
    ownerless = select(func.count()).where(producers.c.service == service, producers.c.owner.not_in(alive))
    return OutboxReport(
        service=service,
        waiting=[
            UnsentUnits(
                producer=producer, owner=owner, units=units, messages=int(messages), oldest_s=max(int(age_ms), 0) / 1000
            )
            for producer, owner, units, messages, age_ms in map(tuple, waiting)
        ],
        processes=[
            OutboxProcess(instance=name, alive=bool(is_alive), producers=count) for name, is_alive, count in processes
        ],
        ownerless=connection.execute(ownerless).scalar_one(),
        inbox=_inbox(connection) if with_inbox else None,
    )


def _inbox(connection: Connection) -> InboxCounts:
    counts = select(func.count(), func.count(inbox.c.acknowledged_ms)).select_from(inbox)
    rows, acknowledged = connection.execute(counts).one()
    return InboxCounts(rows=rows, unacknowledged=rows - acknowledged)
