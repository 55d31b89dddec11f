"""Initialization of a log in PostgreSQL: makes its tables, empty or with all of a data folder.

If the messages come from a folder, no broker may ever use both the folder and the log on its own. So there are three
steps, each of them atomic and durable:

    1  one transaction writes everything; the log is marked as unfinished, and no broker uses it
    2  the folder becomes a copy of the log, and no broker uses it alone
    3  the log is marked as finished

An interruption after step 1 leaves an ordinary folder, and a log that the next initialization replaces. An interruption
after step 2 leaves a copy of an unfinished log; when the initialization is repeated, it does step 3.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
from psycopg import errors, sql

from truenext.clock import monotonic
from truenext.errors import ConfigurationError, StoreError
from truenext.model.events import chunk_position, next_event
from truenext.store.checkpoint_format import new_identity
from truenext.store.copying import become_copy, copy_position, first_position
from truenext.store.log import DIGEST_SIZE, EMPTY_PAYLOAD, KeptMessage, LogPosition, Snapshot
from truenext.store.postgresql.connection import Connection, opening_error, parse_url
from truenext.store.postgresql.kept import read_facts, read_position, write_snapshot
from truenext.store.postgresql.layout import (
    LAYOUT_VERSION,
    UNFINISHED_LAYOUT,
    attach_partitions,
    check_schema_name,
    create_layout,
    drop_layout,
    has_schema_right,
    mark_layout,
    read_layout,
    schema_exists,
    statement,
    tables_in,
)
from truenext.store.postgresql.takeover import check_fsync, lock_hint
from truenext.store.salvage.damage import Damage
from truenext.store.salvage.folder import Salvage, open_salvage
from truenext.store.store import Recovered

LOCK_PATIENCE_S = 2.0
"""Time for which an initialization waits until the session of an interrupted one is gone."""

SILENCE_S = 60.0
"""Silence after which the connection counts as lost. A commit of very many messages takes long."""


def initialize(
    url: str,
    schema: str,
    data: Path | None,
    on_progress: Callable[[int, int], None],
    *,
    next_history: tuple[int, int] = (1, 1),
    last_history_chunk: tuple[int, int] | None = None,
) -> None:
    """Make a log in `schema` of the database at `url`. A missing schema is made, if the role may do so.

    With `data`, the log has everything that this folder has, which then is a copy of the log. No broker may use the
    folder. `on_progress` gets the bytes of the folder that were read, and their total. `next_history` is the lowest run
    and the lowest event that the history's own files have not used; `last_history_chunk` is the run and the first event
    of the last chunk of a batch in these files.

    Raises: ConfigurationError if the server has fsync = off, the schema has tables already, or the role lacks a right;
    StoreInUseError if a broker uses the folder; StoreError if the folder is damaged, or folder or database cannot be
    read or written
    """
    check_schema_name(schema)
    with connected(url) as connection:
        check_fsync(connection)
        _find_unfinished(connection, schema)
        _lock(connection, schema)
        is_unfinished = _find_unfinished(connection, schema)
        if data is None:
            if is_unfinished:
                raise _unfinished_error(connection, schema)
            _make_empty(connection, schema)
        elif not (is_unfinished and _is_copy_of(data, connection, schema)):
            with open_salvage(data, _refuse_damage(data), on_progress, last_history_chunk) as salvage:
                if is_unfinished and salvage.recovered.identity != read_facts(connection, schema).recovered.identity:
                    raise _unfinished_error(connection, schema)
                first_digest = secrets.token_bytes(DIGEST_SIZE)
                position = first_position(data, first_digest)
                snapshot = _FolderSnapshot(salvage, position)
                with connection.transaction():
                    _make(connection, schema, snapshot, _higher(next_history, salvage), replaces=is_unfinished)
                    mark_layout(connection, schema, UNFINISHED_LAYOUT)
                become_copy(data, first_digest)
        mark_layout(connection, schema, LAYOUT_VERSION)


@contextmanager
def connected(url: str, connect: Callable[[dict[str, str]], Connection] = Connection.open) -> Iterator[Connection]:
    """Connect to the database at `url` by `connect`, for a command.

    Raises: ConfigurationError if the URL or the server cannot be used; StoreError if the database fails
    """
    parameters = parse_url(url)
    try:
        with closing(connect(parameters)) as connection:
            connection.silence_s = SILENCE_S
            yield connection
    except psycopg.Error as error:
        raise opening_error(error, "PostgreSQL reports an error") from error


def _lock(connection: Connection, schema: str) -> None:
    """Lock the schema against other initializations, until the connection ends.

    Raises: ConfigurationError if another one is active
    """
    deadline = monotonic() + LOCK_PATIENCE_S
    while not lock_hint(connection, schema):
        if monotonic() >= deadline:
            raise ConfigurationError(f"schema {schema!r} is in use: another initialization is active")
        time.sleep(0.05)


# ---- The schema ----


def _make_schema(connection: Connection, schema: str) -> None:
    role = connection.info.user
    if not schema_exists(connection, schema):
        try:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        except errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"the role {role!r} may not make schema {schema!r}: an administrator of the database runs "
                f'CREATE SCHEMA "{schema}" AUTHORIZATION "{role}"'
            ) from error
    if not all(has_schema_right(connection, schema, right) for right in ("USAGE", "CREATE")):
        raise ConfigurationError(
            f"the role {role!r} may not make tables in schema {schema!r}: its owner runs "
            f'GRANT USAGE, CREATE ON SCHEMA "{schema}" TO "{role}"'
        )


def _find_unfinished(connection: Connection, schema: str) -> bool:
    """Return whether the schema has an unfinished log. Raises: ConfigurationError if it has any other table"""
    if not schema_exists(connection, schema) or not tables_in(connection, schema):
        return False
    layout = read_layout(connection, schema)
    if layout == UNFINISHED_LAYOUT:
        return True
    if layout is not None:
        raise ConfigurationError(
            f"schema {schema!r} has a log already: start a broker with `truenext serve --store URL --schema {schema}`, "
            f'or name another schema; in psql, DROP SCHEMA "{schema}" CASCADE deletes this log and all its messages'
        )
    raise ConfigurationError(f"schema {schema!r} has tables of another program: name another schema")


# ---- The log ----


def _unfinished_error(connection: Connection, schema: str) -> ConfigurationError:
    # Its folder may be a copy of this log already, and then nothing else has the messages.
    identity = read_facts(connection, schema).recovered.identity
    return ConfigurationError(
        f"schema {schema!r} has the unfinished log of the store {identity}: run the same "
        "command again, with the folder that was named then; or drop the schema, if its messages are not needed"
    )


def _make_empty(connection: Connection, schema: str) -> None:
    recovered = Recovered(identity=new_identity(), clean_stop=True)
    position = LogPosition(0, secrets.token_bytes(DIGEST_SIZE))
    with connection.transaction():
        _make(connection, schema, _EmptySnapshot(recovered, position), (1, 1), replaces=False)


def _make(
    connection: Connection, schema: str, snapshot: Snapshot, next_history: tuple[int, int], *, replaces: bool
) -> None:
    """Make the tables, write the snapshot, and begin the log with a row at its position. `replaces` is True if an
    unfinished log is replaced."""
    if replaces:
        drop_layout(connection, schema)
    _make_schema(connection, schema)
    create_layout(connection, schema)
    write_snapshot(connection, schema, snapshot, next_history, lambda _: None)
    attach_partitions(connection, schema, snapshot.position.number)
    connection.execute(
        statement(schema, "INSERT INTO {log} (number, part, epoch, digest, payload) VALUES (%s, 0, 0, %s, %s)"),
        (*snapshot.position, EMPTY_PAYLOAD),
    )


class _EmptySnapshot:
    def __init__(self, recovered: Recovered, position: LogPosition) -> None:
        self.recovered = recovered
        self.position = position

    def messages(self) -> Iterator[KeptMessage]:
        return iter(())

    def timers(self) -> Iterator[bytes]:
        return iter(())


class _FolderSnapshot:
    """Snapshot of a data folder, at the position of its last frame in the log."""

    def __init__(self, salvage: Salvage, position: LogPosition) -> None:
        self._salvage = salvage
        self.recovered = salvage.recovered
        self.position = position

    def messages(self) -> Iterator[KeptMessage]:
        for message in self._salvage.messages():
            yield KeptMessage(message.key, message.record, message.is_transient, message.mark, message.causes)

    def timers(self) -> Iterator[bytes]:
        return self._salvage.timers()


# ---- The folder ----


def _is_copy_of(data: Path, connection: Connection, schema: str) -> bool:
    """Return whether a folder is a copy of the unfinished log, and has all of it."""
    try:
        found = copy_position(data)
    except ConfigurationError:
        return False
    return found == (read_facts(connection, schema).recovered.identity, read_position(connection, schema))


def _refuse_damage(data: Path) -> Callable[[Damage], None]:
    def refuse(damage: Damage) -> None:
        raise StoreError(
            f"{data} is damaged, and nothing was written: {damage}. `truenext store export {data} NEW` saves all that "
            "is readable; then name NEW"
        )

    return refuse


def _higher(next_history: tuple[int, int], salvage: Salvage) -> tuple[int, int]:
    """Return the lowest run and event that neither the history's own files nor the journal have used."""
    history = salvage.last_history
    if not history:
        return next_history
    return max(next_history[0], chunk_position(history)[0] + 1), max(next_history[1], next_event(history))
