"""Background work on a log, in a thread with a connection of its own: partitions, compaction, sizes, and the mark of
the active broker.

A lost connection is opened again, for as long as it takes. Any other error is the end: `failure` has it, the next
append raises it, and a broker that appends nothing stops, too.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from dataclasses import replace
from math import ceil
from threading import Event, Thread

import psycopg

from truenext.clock import monotonic, time_ns
from truenext.errors import StoreError, StoreFencedError, TruenextError
from truenext.model.disk_level import DiskLevel
from truenext.store.disk_space import level_of_limit
from truenext.store.log import Awaited, Member, MemberSettings, Role, Wait
from truenext.store.postgresql import layout, takeover
from truenext.store.postgresql.compaction import UNCOMPACTED_BYTES, Compactor
from truenext.store.postgresql.connection import Connection, describe
from truenext.store.postgresql.kept import read_position
from truenext.store.postgresql.log_rows import last_row
from truenext.store.postgresql.member import forget_members, read_members, write_member
from truenext.store.postgresql.outcome import ErrorKind, kind_of_error
from truenext.store.postgresql.standing_by import STALE_S

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
DROP_PAUSE_S = 30.0
"""Pause after an attempt to drop partitions for which another session was in the way. Each attempt makes appends wait
for a moment."""
BACKGROUND_TIMEOUT_S = 5.0
DELETE_DIVISOR = 32
"""Compacted rows of the newest partition are deleted when they take the limit of the database divided by this."""
SILENCE_S = 60.0
"""Silence after which the background connection counts as lost. A step of the compaction takes longer than an
append."""


class Background:
    """Background work for one broker. `start` starts it; before that, the methods may be called by the opener."""

    def __init__(self, parameters: dict[str, str], schema: str, database_limit: int, member: MemberSettings) -> None:
        self._parameters = parameters
        self._schema = schema
        self._member = member
        self._connection: Connection | None = None
        self._compactor: Compactor
        self._has_hint = False
        self._checked_at = -INTERVAL_S
        self._drop_at = 0.0
        """Time of the next attempt to drop partitions."""
        self._epoch = 0
        self._is_closing = Event()
        self._thread: Thread | None = None
        self._is_lost = False
        self.wait: Wait | None = None
        """Wait for a database to which the connection is lost."""
        self.failure: StoreError | None = None
        """Error that has ended the work."""
        self.level = DiskLevel.PLENTY
        self.bytes = {"database_used": 0, "database_limit": database_limit}
        self.position = 0
        self.members: tuple[Member, ...] = ()
        """Brokers that have described themselves, as of the last check."""
        self._members_at = 0.0
        """Time of that check."""
        self._was_ended = False
        """True if the last step has found that an administrator, or another broker, had ended the session."""
        self._numbers = deque([0], maxlen=ceil(STALE_S / INTERVAL_S) + 1)
        """Numbers of the last row, as of the last checks."""

    @property
    def number_before(self) -> int:
        """Number of the last row at least STALE_S ago; 0 if it is not known."""
        return self._numbers[0]

    @property
    def members_now(self) -> tuple[Member, ...]:
        """`members`, with their ages as of now."""
        passed_ms = round((monotonic() - self._members_at) * 1000)
        return tuple(replace(each, age_ms=each.age_ms + passed_ms) for each in self.members)

    def start(self, epoch: int) -> None:
        """Start the thread, for the active broker of this epoch."""
        self._epoch = epoch
        self._thread = Thread(target=self._run, name="truenext-postgresql", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        if self._connection is not None:
            self._connection.is_abandoned = True
        if self._thread is not None:
            self._thread.join()
        self._disconnect()

    def prepare(self, silence_s: float) -> None:
        """Mark this broker as the active one, and measure the tables. Meanwhile no row comes, so that the connection
        counts as lost after a silence of `silence_s` seconds.

        Raises: StoreError if the log is damaged; psycopg.Error
        """
        connection = self._connected()
        connection.silence_s = silence_s
        self._mark(connection)
        self._measure()
        connection.silence_s = SILENCE_S

    def _measure(self) -> None:
        """Measure the tables, and set `level` and `bytes`."""
        used = self._compactor.used_bytes()
        limit = self.bytes["database_limit"]
        self.level = level_of_limit(limit, used, self.level)
        self.bytes = {"database_used": used, "database_limit": limit}

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._has_hint = False
            self._connection = Connection.open(self._parameters, BACKGROUND_TIMEOUT_S)
            self._connection.silence_s = SILENCE_S
            self._compactor = Compactor(self._connection, self._schema)
            if self._is_closing.is_set():
                self._connection.is_abandoned = True
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._has_hint = False

    def _run(self) -> None:
        while not self._is_closing.wait(0 if self._step_safely() else INTERVAL_S):
            pass

    def _step_safely(self) -> bool:
        """Do a piece of the work. Return whether there is more to do now."""
        try:
            has_more = self._step()
        except psycopg.Error as error:
            self._handle(error)
            return False
        except TruenextError as error:
            self._fail(error if isinstance(error, StoreError) else StoreError(str(error)))
            return False
        except Exception as error:
            failure = StoreError(f"the maintenance of the log in schema {self._schema!r} failed: {error!r}")
            failure.__cause__ = error
            self._fail(failure)
            return False
        self.wait = None
        self._was_ended = False
        if self._is_lost:
            self._is_lost = False
            logger.warning("background work on PostgreSQL goes on again")
        return has_more

    def _handle(self, error: psycopg.Error) -> None:
        if self._is_closing.is_set():
            return
        kind = kind_of_error(error.sqlstate)
        if kind in (ErrorKind.OTHER, ErrorKind.NUMBER_EXISTS, ErrorKind.NO_PARTITION):
            self._fail(StoreError(f"cannot maintain the log in schema {self._schema!r}: {describe_refusal(error)}"))
            return
        if kind is ErrorKind.LOST:
            self._disconnect()
            self.wait = self.wait or begin_wait(Awaited.DATABASE)
        if isinstance(error, psycopg.errors.AdminShutdown) and not self._was_ended:
            # The next step finds out whether another broker has taken over, or PostgreSQL shuts down.
            self._was_ended = True
            logger.info("background work on PostgreSQL: the session was ended, connecting again")
            return
        if not self._is_lost:
            self._is_lost = True
            logger.warning("background work on PostgreSQL failed: retrying", extra={"reason": describe(error)})

    def _fail(self, error: StoreError) -> None:
        self.failure = error
        self._is_closing.set()
        self._disconnect()
        logger.error("background work on PostgreSQL ended: the broker stops", extra={"reason": str(error)})

    def _step(self) -> bool:
        connection = self._connected()
        if monotonic() >= self._checked_at + INTERVAL_S:
            self._check(connection)
            self._checked_at = monotonic()
        # Rows take more space than what they add up to.
        uncompacted_bytes = min(UNCOMPACTED_BYTES, self.bytes["database_limit"] // 8)
        return self._compactor.step(uncompacted_bytes if self.level is DiskLevel.PLENTY else 0)

    def _check(self, connection: Connection) -> None:
        last = last_row(connection, self._schema)
        if last is not None:
            if last.epoch > self._epoch:
                raise fenced_error(self._schema, last.epoch, self._epoch)
            layout.attach_partitions(connection, self._schema, last.number + 1)
            self._numbers.append(last.number)
        if not self._has_hint:
            self._mark(connection)
        self.position = read_position(connection, self._schema).number
        if monotonic() >= self._drop_at:
            is_free = layout.drop_partitions(connection, self._schema, self.position + 1) is not None
            self._drop_at = monotonic() + (0 if is_free else DROP_PAUSE_S)
        layout.delete_compacted_rows(connection, self._schema, self.bytes["database_limit"] // DELETE_DIVISOR)
        self._measure()
        if last is not None:
            # For people only: all else is done if the database has no space for this, or another error comes of it.
            with suppress(psycopg.errors.DiskFull):
                write_member(connection, self._schema, self._member, Role.ACTIVE, last.epoch, last.number)
            forget_members(connection, self._schema, last.number)
        self.members = read_members(connection, self._schema)
        self._members_at = monotonic()

    def _mark(self, connection: Connection) -> None:
        # The marked session is that of a broker which this one has fenced.
        takeover.end_active_session(connection, self._schema)
        self._has_hint = takeover.lock_hint(connection, self._schema)


def describe_refusal(error: psycopg.Error) -> str:
    """Return PostgreSQL's text of an error that ends the broker, and what to do if the log is gone."""
    is_gone = isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName)
    advice = ": restore the schema from a backup, or make an empty log with `truenext store init`" if is_gone else ""
    return describe(error) + advice


def begin_wait(awaited: Awaited) -> Wait:
    return Wait(awaited, time_ns() // 1_000_000)


def fenced_error(schema: str, found: int, own: int) -> StoreFencedError:
    return StoreFencedError(
        f"another broker has taken over the log in schema {schema!r} (epoch {found}; this broker's is {own}): messages "
        "are served by that broker; start this one again, so that it stands by"
    )
