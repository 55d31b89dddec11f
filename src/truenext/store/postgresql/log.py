"""PostgresqlLog: the log of a store in PostgreSQL.

    append      one statement: inserts row N if row N - 1 has the epoch and the digest that this broker knows
    look        one statement, each 0.2 s while the broker stands by (lookout.py, standing_by.py)
    takeover    one transaction under a lock: reads the last row, and inserts a row with the next epoch (takeover.py)

An append whose answer is lost is repeated under the same number, on a new connection, until the patience ends
(database.py). The rows show which of the attempts succeeded (outcome.py).

`begin_append` sends the statement, as far as the socket takes it, and its caller goes on meanwhile. Only an answer
without any doubt ends that append; `append` takes over from any other point, as if it had sent the statement itself.

Partitions, compaction and sizes are the work of a thread (background.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from math import inf

import psycopg

from truenext.clock import boottime
from truenext.errors import ConfigurationError, StoreBehindError, StoreError
from truenext.model.disk_level import DiskLevel
from truenext.store.changes import RareChanges
from truenext.store.checkpoint_format import LOG_FORMAT, NUMBER
from truenext.store.log import (
    Frames,
    LogPosition,
    LogStatus,
    MemberSettings,
    Relation,
    Role,
    Snapshot,
)
from truenext.store.postgresql import kept, layout, log_rows, repair, takeover
from truenext.store.postgresql.background import Background, fenced_error
from truenext.store.postgresql.connection import (
    SILENCE_S,
    Connection,
    describe,
    opening_error,
    parse_url,
)
from truenext.store.postgresql.database import PAUSE_MIN_S, Database
from truenext.store.postgresql.forgotten import (
    End,
    Fault,
    choose_heir,
    former_primary_fault,
    origin_fault,
    went_other_way,
)
from truenext.store.postgresql.known_origin import read_origin, write_origin
from truenext.store.postgresql.lookout import Lookout
from truenext.store.postgresql.member import place_of, read_members, write_member
from truenext.store.postgresql.outcome import Finding, NewRow, Row, RowChain, find, relate
from truenext.store.postgresql.standing_by import STALE_S, Decision, Origin, silent_from
from truenext.store.store import Pending, Progress

logger = logging.getLogger(__name__)

TAKEOVER_SILENCE_S = takeover.LOCK_TIMEOUT_S + SILENCE_S
SNAPSHOT_SILENCE_S = 60.0
SLOWEST_DISK = 4 * 1024 * 1024
"""Bytes a second that PostgreSQL writes at least. It is silent while it writes: without this allowance, a large row
would be begun again and again on a slow disk."""
NAME_PATIENCE_S = 1.5 * STALE_S
"""Time for which an opener waits until a broker with its member name has died."""
HAND_OVER_PATIENCE_S = 2.0
SLOW_S = 0.1
"""Duration of an append after which the append is checked again. Meanwhile this process may have been stopped, and
another broker may have taken over; or the names of the synchronous standbys may have been removed."""

DESCRIPTION_INTERVAL_S = 1.0
"""Interval at which a broker that stands by describes itself in the log."""


class PostgresqlLog:
    def __init__(
        self,
        url: str,
        schema: str,
        *,
        take_over: bool,
        is_replicated: bool,
        database_limit: int,
        patience_s: float,
        member: MemberSettings,
    ) -> None:
        """Connect to the log in `schema` of the database at `url`, `postgresql://...` without a password.

        With `take_over` this broker, which is `member`, becomes active at once, also if another one is. With
        `is_replicated` a row is durable only when a synchronous standby has it, too. The schema may have
        `database_limit` bytes, from which `disk_level` follows. Reading and appending wait up to `patience_s` seconds
        for a database that is not available.

        Raises: ConfigurationError if an option or the database must be changed, or another broker has this member
        name; StoreError if the database cannot be reached
        """
        self._parameters = parse_url(url)
        layout.check_schema_name(schema)
        self._schema = schema
        self._may_take_over = take_over
        self._is_replicated = is_replicated
        self._member = member
        self._lookout = Lookout(schema, member)
        self._has_stood_by = False
        self._is_held_back = False
        """True while this broker has logged that it cannot take over."""
        self._warned_users: str | None = None
        """Users file of another broker of which this one has warned."""
        self._described_at = 0.0
        self._described = (0, 0)
        """Epoch and number of the last description."""
        self._origin: Origin | None = None
        """Origin that is named in the log."""
        self._known: Origin | None = None
        """Newest origin that the folder has followed."""
        self._compared: Row | None = None
        """Last row of the log that was compared with the folder, which is ahead."""
        self._was_replicated = False
        """Setting `is_replicated` of the broker that has named `_origin`."""
        self.silent_from = inf
        self.frames: Frames
        self._database = Database(
            self._parameters,
            schema,
            is_replicated=is_replicated,
            patience_s=patience_s,
            check=self._check_is_no_copy,
            attach=self._attach_partitions,
        )
        self._call = self._database.call
        self._background = Background(self._parameters, schema, database_limit, member)
        self._epoch = 0
        self._pending: _PendingAppend | None = None
        """Append that was begun, and whose answer `append` must read."""
        self._uncertain: list[NewRow] = []
        """Rows behind the last one that is certain. The folder gets their frames only with those of a certain row."""
        self._last_number = 0
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    # ---- Opening ----

    def _open(self) -> None:
        try:
            connection = self._database.open()
            layout.check_layout(connection, self._schema)
            layout.upgrade_layout(connection, self._schema)
            facts = kept.read_facts(connection, self._schema)
            self._background.position = kept.read_position(connection, self._schema).number
            last = log_rows.last_row(connection, self._schema)
            if last is None:
                raise takeover.empty_log_error(self._schema)
            self._origin, self._was_replicated = facts.origin, facts.active.is_replicated
            self._check_is_no_copy(connection)
            if connection.origin is None:
                logger.warning(
                    "PostgreSQL does not tell its system identifier and timeline: neither a copied database nor lost "
                    "rows that no folder has are noticed",
                    extra={"schema": self._schema},
                )
        except psycopg.Error as error:
            raise opening_error(error, "cannot open the log in PostgreSQL") from error
        self.identity = facts.recovered.identity
        self._known = read_origin(self._member.folder, self.identity)
        self.earlier_identities: Mapping[str, int] = facts.earlier
        self._epoch, self._last_number = last.epoch, last.number

    def _check_is_no_copy(self, connection: Connection) -> None:
        """Raises: ConfigurationError if the database is a copy of the one that the last takeover has named"""
        now, named = connection.origin, self._origin
        if now is not None and named is not None and now.system != named.system:
            raise ConfigurationError(
                f"the database at {connection.where} is a copy: its system identifier is {now.system}, and the log in "
                f"schema {self._schema!r} was written in {named.system}; name the original in --store, or make the "
                f"copy a log of its own: `truenext store adopt URL --schema {self._schema}`"
            )

    def _claim_name(self, connection: Connection, number: int) -> None:
        """Describe this broker, whose folder has the rows up to `number`.

        Raises: ConfigurationError if another broker has this member name; psycopg.Error
        """
        deadline = boottime() + NAME_PATIENCE_S
        while not self._describe_itself(connection, Role.STANDING_BY, self._epoch, number):
            if boottime() >= deadline:
                raise self._name_error()
            time.sleep(PAUSE_MIN_S)

    def _name_error(self) -> ConfigurationError:
        return ConfigurationError(
            f"another broker has the member name {self._member.name!r} on the log in schema {self._schema!r}: give "
            "this one another name (--member)"
        )

    def _describe_itself(self, connection: Connection, role: Role, epoch: int, number: int) -> bool:
        """Return False if another broker has this member name."""
        self._described_at, self._described = boottime(), (epoch, number)
        # No broker waits until the database has space for this.
        with suppress(psycopg.errors.DiskFull):
            return write_member(connection, self._schema, self._member, role, epoch, number)
        return True

    # ---- Reading ----

    @property
    def next_history(self) -> tuple[int, int]:
        # Not as of the opening: until it is taken over, another broker may go on, and compact its rows.
        return self._call(lambda connection: kept.read_facts(connection, self._schema)).next_history

    def relation(self, position: LogPosition, frames: Frames | None = None) -> Relation:
        found = self._call(lambda connection: log_rows.read_relation(connection, self._schema, position.number))
        if found is None:
            raise takeover.empty_log_error(self._schema)
        digest, compacted, last = found
        relation = relate(position, digest, compacted, last)
        if relation is None:
            raise kept.DamagedLogError(self._schema, f"row {position.number} is missing or changed")
        if relation is Relation.AHEAD and frames is not None:
            row = self._call(lambda connection: log_rows.last_row(connection, self._schema))
            if row is not None and _went_other_way(row, position, frames):
                relation = Relation.OTHER_WAY
        if relation is Relation.OTHER_WAY:
            self._call(partial(self._check_is_no_former_primary, last=last))
        return relation

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        return self._snapshot()

    @contextmanager
    def _snapshot(self) -> Iterator[Snapshot]:
        try:
            with Connection.open(self._parameters) as connection:
                connection.silence_s = SNAPSHOT_SILENCE_S
                with kept.open_snapshot(connection, self._schema) as snapshot:
                    yield snapshot
        except psycopg.Error as error:
            raise StoreError(f"cannot read the compacted rows of the log: {describe(error)}") from error

    def rows_after(self, position: LogPosition) -> Iterator[bytes]:
        end = self._call(lambda connection: log_rows.last_row(connection, self._schema))
        chain = RowChain(position)
        while end is not None and chain.last.number < end.number:
            piece = self._call(
                partial(log_rows.read_piece, schema=self._schema, first=chain.next_part, last=end.number)
            )
            if not piece:
                raise self._missing(chain, f"row {chain.last.number + 1} is missing or changed")
            yield from self._checked(chain, piece)

    def _checked(self, chain: RowChain, piece: list[tuple[int, int, int | None, bytes, bytes]]) -> Iterator[bytes]:
        for number, part, format_version, digest, payload in piece:
            if format_version is not None and format_version > LOG_FORMAT:
                raise takeover.format_error(self._schema, format_version)
            try:
                whole = chain.add(number, part, digest, payload)
            except ValueError as error:
                raise self._missing(chain, str(error)) from None
            if whole is not None:
                yield whole

    def _missing(self, chain: RowChain, problem: str) -> StoreError:
        """Return the error for the row after the chain, which the log does not have."""
        number = chain.last.number + 1
        if self.relation(chain.last) is Relation.OTHER_WAY:
            return self._behind("this broker's folder went another way")
        position = self._call(lambda connection: kept.read_position(connection, self._schema)).number
        if position < number:
            return kept.DamagedLogError(self._schema, problem)
        return self._behind(f"the rows from {number} on, which this broker's folder lacks, are compacted")

    def _behind(self, problem: str) -> StoreBehindError:
        return StoreBehindError(f"the folder cannot follow the log in schema {self._schema!r}: {problem}")

    # ---- Writing ----

    def stands_by(self, position: LogPosition) -> bool:
        if not self._described_at:
            # Not at the opening: until the folder is locked, the broker that uses it may describe itself there.
            self._call(partial(self._claim_name, number=position.number))
        self._lookout.wait()
        decision = self._call(partial(self._look, position=position))
        if decision is Decision.END_AND_TAKE_OVER:
            self._call(lambda connection: takeover.end_active_session(connection, self._schema))
        return decision is Decision.WAIT

    def _look(self, connection: Connection, position: LogPosition) -> Decision:
        """Look at the log, and return what to do. Raises: StoreBehindError if the folder went another way"""
        last = self._lookout.look(connection).last
        self._epoch, self._last_number, self._origin = last.epoch, last.number, self._lookout.origin
        self._was_replicated = self._lookout.active.is_replicated
        self._check_identity(self._lookout.identity)
        self._know(self._origin)
        self._compare(connection, position, last)
        needs_repair = position.number > last.number or self._origin_fault(connection, last) is not None
        if self._may_take_over and not needs_repair:
            return Decision.TAKE_OVER
        decision = self._lookout.decide(needs_repair=needs_repair)
        if decision is Decision.WAIT and not self._has_stood_by and self._lookout.is_certain_to_stand_by:
            self._has_stood_by = True
            active = self._lookout.active.place
            logger.info("standing by", extra={"schema": self._schema, "active": active})
            self._member.on_standing_by(active.partition("@")[0])
        self._log_held_back()
        if decision is Decision.WAIT and boottime() >= self._described_at + DESCRIPTION_INTERVAL_S:
            if not self._describe_itself(connection, Role.STANDING_BY, last.epoch, position.number):
                # Begun while this process was stopped.
                raise self._name_error()
            self._compare_users(connection, last.epoch)
        return decision

    def _log_held_back(self) -> None:
        """Log that this broker cannot take over while PostgreSQL waits for its standby, once for each such wait."""
        waited_s, was_held_back = self._lookout.waited_s, self._is_held_back
        self._is_held_back = waited_s > 0 and (was_held_back or waited_s >= self._member.failover_after_s)
        if self._is_held_back and not was_held_back:
            logger.warning(
                "the synchronous standby does not confirm: no broker can take over until it does",
                extra={"schema": self._schema},
            )
        elif was_held_back and not self._is_held_back:
            logger.warning("the synchronous standby confirms again", extra={"schema": self._schema})

    def _know(self, origin: Origin | None) -> None:
        """Note the origin that is named in the log, unless the folder has followed a newer one."""
        known = self._known
        if origin is None or (known is not None and known.system == origin.system and known >= origin):
            return
        self._known = origin
        write_origin(self._member.folder, self.identity, origin)

    def _compare(self, connection: Connection, position: LogPosition, last: Row) -> None:
        """Compare the folder with the last row of the log. Raises: StoreBehindError if the folder went another way"""
        if position.number < last.number or last == self._compared:
            return
        self._compared = last
        is_other = position.digest != last.digest
        if position.number > last.number:
            is_other = _went_other_way(last, position, self.frames)
            logger.warning(
                "this broker's folder has rows that the database has not",
                extra={"schema": self._schema, "first": last.number + 1, "last": position.number},
            )
        # The folder knows better than a former primary, which `take_over` refuses.
        if is_other and former_primary_fault(self._known, connection.origin, last.number) is None:
            raise self._behind("this broker's folder went another way")

    def _check_is_no_former_primary(self, connection: Connection, last: int) -> None:
        """Raises: StoreForgottenError if the folder has followed a later timeline"""
        fault = former_primary_fault(self._known, connection.origin, last)
        if fault is not None and self._known is not None:
            with suppress(psycopg.errors.DiskFull):
                kept.write_later_origin(connection, self._schema, self._known)
            raise repair.forgotten_error(self._schema, fault, read_members(connection, self._schema))

    def _check_identity(self, found: str) -> None:
        """Raises: StoreBehindError if the log has got another identity than the folder"""
        if found != self.identity:
            raise self._behind("the log has got another identity")

    def _compare_users(self, connection: Connection, epoch: int) -> None:
        """Log a warning if the active broker has another users file, once for each, and if it has the same again."""
        for each in read_members(connection, self._schema):
            is_active = (each.role, each.epoch) == (Role.ACTIVE, epoch)
            if is_active and self._warned_users is not None and each.users == self._member.users:
                self._warned_users = None
                logger.warning("the active broker has the same users file again", extra={"active": each.name})
            if is_active and each.users not in (self._member.users, self._warned_users):
                self._warned_users = each.users
                logger.warning(
                    "the active broker has another users file: clients may be refused once this one takes over",
                    extra={"active": each.name},
                )

    def _origin_fault(self, connection: Connection, last: Row) -> Fault | None:
        return former_primary_fault(self._known, connection.origin, last.number) or origin_fault(
            self._origin, connection.origin, last, is_replicated=self._was_replicated
        )

    def take_over(self, position: LogPosition) -> bool:
        own: list[Row] = []
        is_certain = False
        # A takeover whose answer was lost, or which may be missing on the standby, is repeated with yet another epoch.
        while not is_certain:
            began = boottime()
            row, is_certain = self._call(
                partial(self._try_to_take_over, position=position, own=own),
                takeover.REPAIR_SILENCE_S if position.number > self._last_number else TAKEOVER_SILENCE_S,
                lambda result: result[1],
            )
            if row is None:
                return False
        self._database.is_active = True
        self._call(partial(self._describe_itself, role=Role.ACTIVE, epoch=self._epoch, number=self._last_number))
        self._call(lambda _: self._background.prepare(TAKEOVER_SILENCE_S))
        self.silent_from = silent_from(began, self._member.failover_after_s)
        logger.info("took over the log", extra={"schema": self._schema, "epoch": self._epoch})
        return True

    def _try_to_take_over(
        self, connection: Connection, position: LogPosition, own: list[Row]
    ) -> tuple[Row | None, bool]:
        """Do what `_take_over` does. Return no row, too, if another session keeps the lock: it may be a repair, and the
        log has another last row then."""
        try:
            return self._take_over(connection, position=position, own=own)
        except psycopg.errors.LockNotAvailable:
            if own:
                raise
            return None, True

    def _take_over(self, connection: Connection, position: LogPosition, own: list[Row]) -> tuple[Row | None, bool]:
        """Take over behind the row of the last look or a row of `own`, the rows of earlier attempts, and add the row
        of the takeover to these.

        Return this row, None if the log has another last row; and whether the standby has it for certain, too, if
        there must be one.
        """
        self._check_is_no_former_primary(connection, self._last_number)
        repair.attach_missing(connection, self._schema, position)
        connection.has_warned = False
        with takeover.locked(connection, self._schema) as last:
            self._check_identity(kept.read_identity(connection, self._schema))
            if last not in own and not self._was_seen(connection, last, position):
                return None, True
            end = repair.put_back(connection, self._schema, last, position, self.frames)
            fault = self._origin_fault(connection, end)
            if fault is None:
                row = self._insert_takeover(connection, end)
                # Before the commit, whose answer may be lost.
                own.append(row)
        if fault is not None:
            # Behind the commit: `accept-loss` must not lose the rows that were put back.
            raise repair.forgotten_error(self._schema, fault, read_members(connection, self._schema))
        self._epoch, self._last_number, self._origin = row.epoch, row.number, connection.origin or self._origin
        self._know(self._origin)
        return row, not (self._is_replicated and connection.has_warned)

    def _was_seen(self, connection: Connection, last: Row, position: LogPosition) -> bool:
        """Return whether the broker may take over behind the row `last`."""
        if self._may_take_over and position.number <= last.number:
            return True
        # With another connection, it may be another server, or a backup in which that row is the last one again.
        return (last, connection.session) == (self._lookout.last_look.last, self._lookout.last_look.session)

    def _insert_takeover(self, connection: Connection, last: Row) -> Row:
        row, names_standbys = takeover.insert_takeover(connection, self._schema, last, RareChanges(), self._member.name)
        self._check_standbys(names_standbys)
        failover_after_ms = round(self._member.failover_after_s * 1000)
        active = kept.ActiveBroker(failover_after_ms, self._is_replicated, place_of(self._member), row.number)
        kept.write_fact(connection, self._schema, "active", kept.encode_active(active))
        return row

    def append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> bool:
        if not self._database.is_active:
            raise StoreError("the log cannot be written before it was taken over")
        new = NewRow(number, self._epoch, digest, before, b"".join(parts))
        assert self._pending is None or self._pending.new == new
        began = boottime() if self._pending is None else self._pending.began
        silence_s = SILENCE_S + len(new.payload) / SLOWEST_DISK
        append = partial(self._call, partial(self._append, new=new), silence_s, self._is_durable)
        is_certain = append()
        limit = began + SLOW_S
        while boottime() > limit:
            # On a slow network each check is slow; a longer stop is covered by the silence.
            limit = silent_from(boottime(), self._member.failover_after_s)
            if not self._call(partial(self._is_appended, new=new)):
                is_certain = append()
        self._last_number = number
        is_durable = self._is_durable(is_certain)
        if is_durable:
            self._uncertain = []
            self.silent_from = silent_from(began, self._member.failover_after_s)
        else:
            self._uncertain.append(new)
        return is_durable

    def _is_durable(self, is_certain: bool) -> bool:
        return is_certain or not self._is_replicated

    def begin_append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> Pending | None:
        connection = self._database.connection
        if connection is None or connection.closed or not connection.has_prepared_append:
            return None
        if self._background.failure is not None or connection.origin not in (None, self._origin):
            return None
        assert not self._uncertain, "`append` is called again until a row is certain"
        new = NewRow(number, self._epoch, digest, before, b"".join(parts))
        if not log_rows.has_one_part(new):
            return None
        self._pending = pending = _PendingAppend(self, connection, new)
        self._database.is_answer_awaited = True
        connection.has_warned = False
        try:
            log_rows.begin_append(connection, new)
            pending.is_sent = connection.send()
        except psycopg.Error:
            # `append` finds the error again.
            return None
        return pending

    def advance_append(self, pending: _PendingAppend) -> Progress:
        """Go on with an append that was begun, and find out whether it has ended without any doubt. Do not wait."""
        connection, new = pending.connection, pending.new
        try:
            pending.is_sent = pending.is_sent or connection.send()
            if not connection.read_answer():
                return Progress.WAITING
            names_standbys = log_rows.finish_append(connection)
        except psycopg.Error:
            return Progress.IN_DOUBT
        is_certain = names_standbys is not None and (names_standbys or not self._is_replicated)
        if connection.has_warned or not is_certain or boottime() - pending.began > SLOW_S:
            return Progress.IN_DOUBT
        self._end_pending()
        self._database.note_quick_answer()
        self._last_number = new.number
        self.silent_from = silent_from(pending.began, self._member.failover_after_s)
        return Progress.APPLIED

    def _end_pending(self) -> _PendingAppend | None:
        pending, self._pending = self._pending, None
        self._database.is_answer_awaited = False
        return pending

    def _append(self, connection: Connection, new: NewRow) -> bool:
        """Append a row. Return whether the standby has it for certain, too, if there must be one."""
        pending = self._end_pending()
        if pending is None:
            self._prepare_append(connection)
        try:
            names_standbys = (
                log_rows.append_row(connection, new) if pending is None else log_rows.finish_append(connection)
            )
        except psycopg.errors.UniqueViolation:
            names_standbys = None
        if names_standbys is None:
            # Right only if the row is there from an earlier attempt.
            return False if self._is_appended(connection, new) else self._append(connection, new)
        self._check_standbys(names_standbys)
        if connection.origin not in (None, self._origin):
            # The row before is there, too.
            self._name_origin(connection)
        return not connection.has_warned

    def _prepare_append(self, connection: Connection) -> None:
        """Raises: StoreError if the background work has failed"""
        if self._background.failure is not None:
            raise self._background.failure
        if not connection.has_prepared_append:
            # Not at the opening: it waits for the lock of a takeover whose broker has died, which `take_over` ends.
            log_rows.prepare_append(connection, self._schema)
        connection.has_warned = False

    def _name_origin(self, connection: Connection) -> None:
        assert connection.origin is not None, "it was compared"
        kept.write_fact(connection, self._schema, "origin", kept.ORIGIN.pack(*connection.origin))
        self._origin = connection.origin
        self._know(self._origin)

    def _is_appended(self, connection: Connection, new: NewRow) -> bool:
        """Check that the row is there, and that no broker has taken over since. Return False if the database had
        forgotten rows: those before the row are there again, and the row must be appended again."""
        rows, names_standbys = log_rows.rows_near(connection, self._schema, new.number)
        found = find(new.row, new.before, rows)
        if found is Finding.FENCED:
            raise fenced_error(self._schema, max(rows).epoch, new.epoch)
        if found is Finding.FORGOTTEN:
            self._repair(connection, new)
        self._check_standbys(names_standbys)
        return found is Finding.APPENDED

    def _repair(self, connection: Connection, new: NewRow) -> None:
        """Put back all rows before `new`, which this broker appends."""
        self._check_is_no_former_primary(connection, new.number - 2)
        position = LogPosition(new.number - 1, new.before)
        connection.silence_s = takeover.REPAIR_SILENCE_S
        repair.attach_missing(connection, self._schema, position)
        with takeover.locked(connection, self._schema) as last:
            if last.epoch > new.epoch:
                raise fenced_error(self._schema, last.epoch, new.epoch)
            end = repair.put_back(connection, self._schema, last, position, self.frames, self._uncertain)
            if end != Row(new.number - 1, new.epoch, new.before):
                raise repair.overtaken_error(self._schema, last)

    def _check_standbys(self, are_named: bool) -> None:
        if self._is_replicated and not are_named:
            raise StoreError(takeover.NO_STANDBYS)

    def choose_heir(self, to: str | None) -> str:
        numbers = self._background.number_before, self._last_number
        return choose_heir(self._background.members, to, self._member.name, numbers)

    def hand_over(self, heir: str) -> None:
        self._background.close()
        # Without the hint, another broker waits longer. Meanwhile, clients of this one wait.
        self._database.patience_s = min(self._database.patience_s, HAND_OVER_PATIENCE_S)
        self._call(partial(self._hand_over, heir=heir))

    def _hand_over(self, connection: Connection, heir: str) -> None:
        with connection.transaction():
            stop = NUMBER.pack(self._last_number) + heir.encode()
            kept.write_fact(connection, self._schema, "stop", stop)
            write_member(connection, self._schema, self._member, Role.STOPPED, self._epoch, self._last_number)

    def leave(self) -> None:
        if not self._described_at or self._database.is_active:
            return
        epoch, number = self._described
        # Another method may be using the connection.
        with suppress(psycopg.Error, ConfigurationError), Connection.open(self._parameters) as connection:
            write_member(connection, self._schema, self._member, Role.STOPPED, epoch, number)

    def _attach_partitions(self, connection: Connection) -> None:
        last = log_rows.last_row(connection, self._schema)
        layout.attach_partitions(connection, self._schema, self._last_number if last is None else last.number + 1)

    # ---- Background ----

    def start(self) -> None:
        self._background.start(self._epoch)

    def begin_stop(self) -> None:
        self._database.is_stopping = True

    @property
    def failure(self) -> StoreError | None:
        return self._background.failure

    @property
    def disk_level(self) -> DiskLevel:
        return max(self._background.level, DiskLevel.NONE) if self._database.is_full else self._background.level

    @property
    def disk_level_bytes(self) -> Mapping[str, int]:
        return self._background.bytes

    @property
    def status(self) -> LogStatus:
        return LogStatus(
            server=self._database.server,
            wait=self._database.wait or self._background.wait,
            epoch=self._epoch,
            number=self._last_number,
            position=self._background.position,
            is_replicated=self._is_replicated,
            members=self._background.members_now,
        )

    def close(self) -> None:
        self._background.close()
        self._database.close()


def _went_other_way(last: Row, position: LogPosition, frames: Frames) -> bool:
    end = End(last, position, frames.oldest_frame)
    # A generator: nothing is read if the folder no longer has the rows.
    return went_other_way(end, frames.frames_after(last.number))


class _PendingAppend:
    def __init__(self, log: PostgresqlLog, connection: Connection, new: NewRow) -> None:
        self.connection = connection
        self.new = new
        self.began = boottime()
        self.socket = connection.pgconn.socket
        self.is_sent = False
        self._log = log

    def advance(self) -> Progress:
        return self._log.advance_append(self)
