"""New identity of a log from which rows were lost for good, or which is a copy of another one.

A renewal is the takeover of a broker that ends at once. Its row leaves out so many sequences, epochs, runs and events
that no lost row can have used a later one. All folders of the earlier identity are set aside (copying.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from truenext.errors import ConfigurationError
from truenext.store.changes import RareChanges
from truenext.store.checkpoint_format import NUMBER, new_identity
from truenext.store.log import Member, Role
from truenext.store.postgresql.connection import Connection
from truenext.store.postgresql.forgotten import Fault, former_primary_fault, origin_fault
from truenext.store.postgresql.initialization import connected
from truenext.store.postgresql.kept import HISTORY, Facts, read_facts, write_fact
from truenext.store.postgresql.layout import (
    check_layout,
    check_readable_layout,
    statement,
    tables_in,
    upgrade_layout,
)
from truenext.store.postgresql.log_rows import last_row, waiting_since_ms
from truenext.store.postgresql.member import read_members
from truenext.store.postgresql.outcome import Row
from truenext.store.postgresql.standing_by import STALE_S
from truenext.store.postgresql.takeover import describe_active_broker, empty_log_error, insert_takeover, locked

SEQUENCES_SKIPPED = EVENTS_SKIPPED = 1 << 40
"""Numbers of messages and events that are left out: those of three years at 10,000 a second."""

EPOCHS_SKIPPED = RUNS_SKIPPED = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """State of a log, read without taking part in it."""

    server: str
    """Host and port of the database server."""
    epoch: int
    number: int
    """Number of the last row."""
    members: tuple[Member, ...]
    """All brokers that have described themselves, in the order of their names."""
    missing: Fault | None
    """Rows that are missing; None if none are."""
    is_copy: bool
    """True if the database is another one than that of the last takeover: `store adopt` is needed."""
    waiting_since_ms: int | None = None
    """Time since which rows wait for PostgreSQL's synchronous standby, in milliseconds since 1970; None if none do."""


def read_status(url: str, schema: str) -> StoreStatus:
    """Read the state of the log in `schema` of the database at `url`.

    Raises: ConfigurationError if the URL, the server or the schema cannot be used; StoreError if the database fails
    """
    with connected(url, Connection.open_for_reading) as connection:
        check_readable_layout(connection, schema)
        # Before the last row: a broker has no row that the log did not have before.
        members = read_members(connection, schema) if "member" in tables_in(connection, schema) else ()
        last = last_row(connection, schema)
        if last is None:
            raise empty_log_error(schema)
        return _status(connection, schema, read_facts(connection, schema), members, last)


def _status(connection: Connection, schema: str, facts: Facts, members: tuple[Member, ...], last: Row) -> StoreStatus:
    named, now = facts.origin, connection.origin
    is_copy = named is not None and now is not None and named.system != now.system
    missing = former_primary_fault(facts.later_origin, now, last.number) or _forgotten(members, last)
    return StoreStatus(
        server=connection.where,
        epoch=last.epoch,
        number=last.number,
        members=members,
        missing=missing or (None if is_copy else _never_copied(connection, facts, last)),
        is_copy=is_copy,
        waiting_since_ms=waiting_since_ms(connection, schema),
    )


def _forgotten(members: tuple[Member, ...], last: Row) -> Fault | None:
    """Return the rows that brokers have said to have, and the log has not."""
    highest = max((each.number for each in members), default=0)
    if highest <= last.number:
        return None
    return Fault(last.number + 1, highest, "the database has lost them, and no broker has put them back")


def _never_copied(connection: Connection, facts: Facts, last: Row) -> Fault | None:
    return origin_fault(facts.origin, connection.origin, last, is_replicated=facts.active.is_replicated)


def renew(url: str, schema: str, *, is_copy: bool) -> str:
    """Give the log a new identity, and go on without the rows that are missing: `store accept-loss`. With `is_copy`
    the database is taken for a copy, and no row need be missing: `store adopt`. Return the identity.

    Raises: ConfigurationError if nothing is missing from a log that is no copy, or a broker is active; StoreError if
    the database fails
    """
    with connected(url) as connection:
        check_layout(connection, schema)
        upgrade_layout(connection, schema)
        _check_no_broker(connection, schema)
        with locked(connection, schema) as last:
            # Again: until the lock another broker could take over.
            members = _check_no_broker(connection, schema)
            facts = read_facts(connection, schema)
            status = _status(connection, schema, facts, members, last)
            if not is_copy and status.missing is None:
                raise ConfigurationError(f"no row is missing in schema {schema!r}: nothing was changed")
            return _renew(connection, schema, facts, last)


def _check_no_broker(connection: Connection, schema: str) -> tuple[Member, ...]:
    """Return the members of the log. Raises: ConfigurationError if one is active"""
    members = read_members(connection, schema)
    active = (each.name for each in members if each.role is Role.ACTIVE and each.age_ms < STALE_S * 1000)
    found = next(active, "") or describe_active_broker(connection, schema)
    if found:
        raise ConfigurationError(f"a broker is active on the log in schema {schema!r}: stop {found}")
    return members


def _renew(connection: Connection, schema: str, facts: Facts, last: Row) -> str:
    limit = facts.recovered.sequence_limit + SEQUENCES_SKIPPED
    changes = RareChanges(sequence_limit=limit, redelivered_below=limit)
    insert_takeover(connection, schema, last, changes, "", epochs=EPOCHS_SKIPPED)
    identity = new_identity()
    run, event = facts.next_history
    write_fact(connection, schema, "identity", identity.encode())
    write_fact(connection, schema, "earlier identity", NUMBER.pack(last.number), facts.recovered.identity.encode())
    write_fact(connection, schema, "history", HISTORY.pack(run + RUNS_SKIPPED, event + EVENTS_SKIPPED))
    connection.execute(statement(schema, "DELETE FROM {fact} WHERE kind = 'later origin'"))
    # They describe what the log was.
    connection.execute(statement(schema, "DELETE FROM {member}"))
    return identity
