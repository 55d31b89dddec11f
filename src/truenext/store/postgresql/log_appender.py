"""LogAppender: appends rows to a log that was taken over.

An append whose answer is lost is repeated under the same number, on a new connection, until the patience ends
(database.py). The rows show which of the attempts succeeded (outcome.py).

`begin_append` sends the statement, as far as the socket takes it, and its caller goes on meanwhile. Only an answer
without any doubt ends that append; `append` takes over from any other point, as if it had sent the statement itself.
"""

from __future__ import annotations

from functools import partial

import psycopg

from truenext.clock import boottime
from truenext.errors import StoreError
from truenext.store.log import LogPosition
from truenext.store.postgresql import kept, log_rows, repair, takeover
from truenext.store.postgresql.background import Background, fenced_error
from truenext.store.postgresql.connection import SILENCE_S, Connection
from truenext.store.postgresql.database import Database, PendingAppend
from truenext.store.postgresql.log_end import LogEnd
from truenext.store.postgresql.outcome import Finding, NewRow, Row, find
from truenext.store.postgresql.standing_by import silent_from
from truenext.store.store import Pending, Progress

SLOWEST_DISK = 4 * 1024 * 1024
"""Bytes a second that PostgreSQL writes at least. It is silent while it writes: without this allowance, a large row
would be begun again and again on a slow disk."""
SLOW_S = 0.1
"""Duration of an append after which the append is checked again. Meanwhile this process may have been stopped, and
another broker may have taken over; or the names of the synchronous standbys may have been removed."""


class LogAppender:
    def __init__(self, end: LogEnd, database: Database, background: Background) -> None:
        self._end = end
        self._database = database
        self._background = background
        self._uncertain: list[NewRow] = []
        """Rows behind the last one that is certain. The folder gets their frames only with those of a certain row."""

    def append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> bool:
        if not self._database.is_active:
            raise StoreError("the log cannot be written before it was taken over")
        new = NewRow(number, self._end.epoch, digest, before, b"".join(parts))
        pending = self._database.pending
        assert pending is None or pending.new == new
        began = boottime() if pending is None else pending.began
        silence_s = SILENCE_S + len(new.payload) / SLOWEST_DISK
        append = partial(self._database.call, partial(self._append, new=new), silence_s, self._is_durable)
        is_certain = append()
        limit = began + SLOW_S
        while boottime() > limit:
            # On a slow network each check is slow; a longer stop is covered by the silence.
            limit = silent_from(boottime(), self._end.member.failover_after_s)
            if not self._database.call(partial(self._is_appended, new=new)):
                is_certain = append()
        self._end.number = number
        is_durable = self._is_durable(is_certain)
        if is_durable:
            self._uncertain = []
            self._end.confirm(began)
        else:
            self._uncertain.append(new)
        return is_durable

    def _is_durable(self, is_certain: bool) -> bool:
        return is_certain or not self._database.is_replicated

    def begin_append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> Pending | None:
        connection = self._database.connection
        if connection is None or connection.closed or not connection.has_prepared_append:
            return None
        if self._background.failure is not None or connection.origin not in (None, self._end.origin):
            return None
        assert not self._uncertain, "`append` is called again until a row is certain"
        new = NewRow(number, self._end.epoch, digest, before, b"".join(parts))
        if not log_rows.has_one_part(new):
            return None
        self._database.pending = pending = PendingAppend(connection, new, self.advance_append)
        connection.has_warned = False
        try:
            log_rows.begin_append(connection, new)
            pending.is_sent = connection.send()
        except psycopg.Error:
            # `append` finds the error again.
            return None
        return pending

    def advance_append(self, pending: PendingAppend) -> Progress:
        """Go on with an append that was begun, and find out whether it has ended without any doubt. Do not wait."""
        connection, new = pending.connection, pending.new
        try:
            pending.is_sent = pending.is_sent or connection.send()
            if not connection.read_answer():
                return Progress.WAITING
            names_standbys = log_rows.finish_append(connection)
        except psycopg.Error:
            return Progress.IN_DOUBT
        is_certain = names_standbys is not None and (names_standbys or not self._database.is_replicated)
        if connection.has_warned or not is_certain or boottime() - pending.began > SLOW_S:
            return Progress.IN_DOUBT
        self._database.pending = None
        self._database.note_quick_answer()
        self._end.number = new.number
        self._end.confirm(pending.began)
        return Progress.APPLIED

    def _append(self, connection: Connection, new: NewRow) -> bool:
        """Append a row. Return whether the standby has it for certain, too, if there must be one."""
        pending, self._database.pending = self._database.pending, None
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
        self._database.check_standbys(names_standbys)
        if connection.origin not in (None, self._end.origin):
            # The row before is there, too.
            self._name_origin(connection)
        return not connection.has_warned

    def _prepare_append(self, connection: Connection) -> None:
        """Raises: StoreError if the background work has failed"""
        if self._background.failure is not None:
            raise self._background.failure
        if not connection.has_prepared_append:
            # Not at the opening: it waits for the lock of a takeover whose broker has died, which `take_over` ends.
            log_rows.prepare_append(connection, self._end.schema)
        connection.has_warned = False

    def _name_origin(self, connection: Connection) -> None:
        assert connection.origin is not None, "it was compared"
        kept.write_fact(connection, self._end.schema, "origin", kept.ORIGIN.pack(*connection.origin))
        self._end.origin = connection.origin
        self._end.follow(self._end.origin)

    def _is_appended(self, connection: Connection, new: NewRow) -> bool:
        """Check that the row is there, and that no broker has taken over since. Return False if the database had
        forgotten rows: those before the row are there again, and the row must be appended again."""
        rows, names_standbys = log_rows.rows_near(connection, self._end.schema, new.number)
        found = find(new.row, new.before, rows)
        if found is Finding.FENCED:
            raise fenced_error(self._end.schema, max(rows).epoch, new.epoch)
        if found is Finding.FORGOTTEN:
            self._repair(connection, new)
        self._database.check_standbys(names_standbys)
        return found is Finding.APPENDED

    def _repair(self, connection: Connection, new: NewRow) -> None:
        """Put back all rows before `new`, which this broker appends."""
        self._end.check_is_no_former_primary(connection, new.number - 2)
        position = LogPosition(new.number - 1, new.before)
        connection.silence_s = takeover.REPAIR_SILENCE_S
        repair.attach_missing(connection, self._end.schema, position)
        with takeover.locked(connection, self._end.schema) as last:
            if last.epoch > new.epoch:
                raise fenced_error(self._end.schema, last.epoch, new.epoch)
            end = repair.put_back(connection, self._end.schema, last, position, self._end.frames, self._uncertain)
            if end != Row(new.number - 1, new.epoch, new.before):
                raise repair.overtaken_error(self._end.schema, last)
