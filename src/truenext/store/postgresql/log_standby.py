"""LogStandby: looks of a broker that stands by at the log, and compares the log with the folder.
LogTakeover: takes the log over by a row with the next epoch, behind the row of the last look.
"""

from __future__ import annotations

import logging
from functools import partial

import psycopg

from truenext.clock import boottime
from truenext.store.changes import RareChanges
from truenext.store.log import LogPosition, Role
from truenext.store.postgresql import kept, repair, takeover
from truenext.store.postgresql.background import Background
from truenext.store.postgresql.connection import SILENCE_S, Connection
from truenext.store.postgresql.database import Database
from truenext.store.postgresql.forgotten import former_primary_fault
from truenext.store.postgresql.log_end import LogEnd, is_other_way
from truenext.store.postgresql.lookout import Lookout
from truenext.store.postgresql.member import OwnMember, place_of, read_members
from truenext.store.postgresql.outcome import Row
from truenext.store.postgresql.standing_by import Decision

logger = logging.getLogger(__name__)

TAKEOVER_SILENCE_S = takeover.LOCK_TIMEOUT_S + SILENCE_S
DESCRIPTION_INTERVAL_S = 1.0
"""Interval at which a broker that stands by describes itself in the log."""


class LogStandby:
    def __init__(self, end: LogEnd, database: Database, own_member: OwnMember, *, takes_over: bool) -> None:
        """With `takes_over` the broker takes over at once, also if another one is active."""
        self._end = end
        self._call = database.call
        self.own_member = own_member
        self._takes_over = takes_over
        self._lookout = Lookout(end.schema, end.member)
        self._has_stood_by = False
        self._is_held_back = False
        """True while this broker has logged that it cannot take over."""
        self._compared: Row | None = None
        """Last row of the log that was compared with the folder, which is ahead."""

    def stands_by(self, position: LogPosition) -> bool:
        if not self.own_member.described_at:
            # Not at the opening: until the folder is locked, the broker that uses it may describe itself there.
            self._call(partial(self.own_member.claim_name, epoch=self._end.epoch, number=position.number))
        self._lookout.wait()
        decision = self._call(partial(self._look, position=position))
        if decision is Decision.END_AND_TAKE_OVER:
            self._call(lambda connection: takeover.end_active_session(connection, self._end.schema))
        return decision is Decision.WAIT

    def _look(self, connection: Connection, position: LogPosition) -> Decision:
        """Look at the log, and return what to do. Raises: StoreBehindError if the folder went another way"""
        last = self._lookout.look(connection).last
        self._end.note(last, self._lookout.origin)
        self._end.was_replicated = self._lookout.active.is_replicated
        self._end.check_identity(self._lookout.identity)
        self._end.follow(self._end.origin)
        self._compare(connection, position, last)
        needs_repair = position.number > last.number or self._end.origin_fault(connection, last) is not None
        if self._takes_over and not needs_repair:
            return Decision.TAKE_OVER
        decision = self._lookout.decide(needs_repair=needs_repair)
        if decision is Decision.WAIT and not self._has_stood_by and self._lookout.is_certain_to_stand_by:
            self._has_stood_by = True
            active = self._lookout.active.place
            logger.info("standing by", extra={"schema": self._end.schema, "active": active})
            self._end.member.on_standing_by(active.partition("@")[0])
        self._log_held_back()
        if decision is Decision.WAIT and boottime() >= self.own_member.described_at + DESCRIPTION_INTERVAL_S:
            if not self.own_member.describe(connection, Role.STANDING_BY, last.epoch, position.number):
                # Begun while this process was stopped.
                raise self.own_member.name_error()
            self.own_member.compare_users(connection, last.epoch)
        return decision

    def _log_held_back(self) -> None:
        """Log that this broker cannot take over while PostgreSQL waits for its standby, once for each such wait."""
        waited_s, was_held_back = self._lookout.waited_s, self._is_held_back
        self._is_held_back = waited_s > 0 and (was_held_back or waited_s >= self._end.member.failover_after_s)
        if self._is_held_back and not was_held_back:
            logger.warning(
                "the synchronous standby does not confirm: no broker can take over until it does",
                extra={"schema": self._end.schema},
            )
        elif was_held_back and not self._is_held_back:
            logger.warning("the synchronous standby confirms again", extra={"schema": self._end.schema})

    def _compare(self, connection: Connection, position: LogPosition, last: Row) -> None:
        """Compare the folder with the last row of the log. Raises: StoreBehindError if the folder went another way"""
        if position.number < last.number or last == self._compared:
            return
        self._compared = last
        is_other = position.digest != last.digest
        if position.number > last.number:
            is_other = is_other_way(last, position, self._end.frames)
            logger.warning(
                "this broker's folder has rows that the database has not",
                extra={"schema": self._end.schema, "first": last.number + 1, "last": position.number},
            )
        # The folder knows better than a former primary, which `take_over` refuses.
        if is_other and former_primary_fault(self._end.followed, connection.origin, last.number) is None:
            raise self._end.behind_error("this broker's folder went another way")

    def has_seen(self, connection: Connection, last: Row, position: LogPosition) -> bool:
        """Return whether the broker may take over behind the row `last`."""
        if self._takes_over and position.number <= last.number:
            return True
        # With another connection, it may be another server, or a backup in which that row is the last one again.
        return (last, connection.session) == (self._lookout.last_look.last, self._lookout.last_look.session)


class LogTakeover:
    def __init__(self, end: LogEnd, database: Database, background: Background, standby: LogStandby) -> None:
        self._end = end
        self._database = database
        self._background = background
        self._standby = standby

    def take_over(self, position: LogPosition) -> bool:
        own: list[Row] = []
        is_certain = False
        # A takeover whose answer was lost, or which may be missing on the standby, is repeated with yet another epoch.
        while not is_certain:
            began = boottime()
            row, is_certain = self._database.call(
                partial(self._try_to_take_over, position=position, own=own),
                takeover.REPAIR_SILENCE_S if position.number > self._end.number else TAKEOVER_SILENCE_S,
                lambda result: result[1],
            )
            if row is None:
                return False
        self._database.is_active = True
        end, own_member = self._end, self._standby.own_member
        self._database.call(partial(own_member.describe, role=Role.ACTIVE, epoch=end.epoch, number=end.number))
        self._database.call(lambda _: self._background.prepare(TAKEOVER_SILENCE_S))
        end.confirm(began)
        logger.info("took over the log", extra={"schema": end.schema, "epoch": end.epoch})
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
        self._end.check_is_no_former_primary(connection, self._end.number)
        repair.attach_missing(connection, self._end.schema, position)
        connection.has_warned = False
        with takeover.locked(connection, self._end.schema) as last:
            self._end.check_identity(kept.read_identity(connection, self._end.schema))
            if last not in own and not self._standby.has_seen(connection, last, position):
                return None, True
            end = repair.put_back(connection, self._end.schema, last, position, self._end.frames)
            fault = self._end.origin_fault(connection, end)
            if fault is None:
                row = self._insert_takeover(connection, end)
                # Before the commit, whose answer may be lost.
                own.append(row)
        if fault is not None:
            # Behind the commit: `accept-loss` must not lose the rows that were put back.
            raise repair.forgotten_error(self._end.schema, fault, read_members(connection, self._end.schema))
        self._end.note(row, connection.origin or self._end.origin)
        self._end.follow(self._end.origin)
        return row, not (self._database.is_replicated and connection.has_warned)

    def _insert_takeover(self, connection: Connection, last: Row) -> Row:
        schema, member = self._end.schema, self._end.member
        row, names_standbys = takeover.insert_takeover(connection, schema, last, RareChanges(), member.name)
        self._database.check_standbys(names_standbys)
        failover_after_ms = round(member.failover_after_s * 1000)
        active = kept.ActiveBroker(failover_after_ms, self._database.is_replicated, place_of(member), row.number)
        kept.write_fact(connection, schema, "active", kept.encode_active(active))
        return row
