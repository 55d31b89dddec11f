"""Outcome of an append: the meaning of each error of PostgreSQL, and of the rows that it has after a doubt.

All functions are pure. An append is in doubt if the connection was lost before the answer came: the row may be there,
may be missing, or may still come. So the same row is appended again, and its number shows which of these it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from truenext.store.log import LogPosition, Relation, next_digest


class ErrorKind(Enum):
    """Meaning of an error of PostgreSQL for a statement."""

    LOST = "lost"
    """The connection is lost, or of no more use. The statement may have been executed."""
    STANDBY = "standby"
    """The synchronous standby does not confirm. The statement may have been executed. No SQLSTATE says so."""
    NUMBER_EXISTS = "number exists"
    """The number is in use. Nothing was written."""
    NO_PARTITION = "no partition"
    """The table has no partition for the number. Nothing was written."""
    DISK_FULL = "disk full"
    """PostgreSQL's disk is full. Nothing was written."""
    INTERRUPTED = "interrupted"
    """PostgreSQL has ended the statement, for another transaction or an administrator. Nothing was written."""
    OTHER = "other"
    """PostgreSQL refuses the statement. Nothing was written, and a repetition would not help."""


_LOST = frozenset(
    {
        "25006",  # read_only_sql_transaction: a standby, or a former primary
        "25P03",  # idle_in_transaction_session_timeout
        "26000",  # invalid_sql_statement_name: the session has lost its prepared statements
        "57P01",  # admin_shutdown
        "57P02",  # crash_shutdown
        "57P03",  # cannot_connect_now
        "57P05",  # idle_session_timeout
    }
)
_CONNECTION_EXCEPTION = "08"
_DISK_FULL = frozenset({"53000", "53100"})
_INTERRUPTED = frozenset(
    {
        "40001",  # serialization_failure
        "40P01",  # deadlock_detected
        "53200",  # out_of_memory
        "55P03",  # lock_not_available
        "57014",  # query_canceled
    }
)


def kind_of_error(sqlstate: str | None) -> ErrorKind:
    """Return the meaning of an error with this SQLSTATE. None is the error of a connection that broke, or of a server
    that did not answer."""
    if sqlstate is None or sqlstate in _LOST or sqlstate.startswith(_CONNECTION_EXCEPTION):
        return ErrorKind.LOST
    if sqlstate == "23505":
        return ErrorKind.NUMBER_EXISTS
    if sqlstate == "23514":
        return ErrorKind.NO_PARTITION
    if sqlstate in _DISK_FULL:
        return ErrorKind.DISK_FULL
    return ErrorKind.INTERRUPTED if sqlstate in _INTERRUPTED else ErrorKind.OTHER


class Row(NamedTuple):
    """Row of the log, without its payload."""

    number: int
    epoch: int
    digest: bytes


class NewRow(NamedTuple):
    """Row that is to be appended."""

    number: int
    epoch: int
    digest: bytes
    before: bytes
    """Digest of the row before."""
    payload: bytes

    @property
    def row(self) -> Row:
        return Row(self.number, self.epoch, self.digest)


class Finding(Enum):
    """State of the log, as seen by a broker that appends a row."""

    APPENDED = "appended"
    """The row is there."""
    ABSENT = "absent"
    """The row is not there yet, and can be appended."""
    FENCED = "fenced"
    """The log has the takeover of another broker."""
    FORGOTTEN = "forgotten"
    """The database has lost rows that it had confirmed, or has others in their place."""


def find(row: Row, before: bytes, rows: Iterable[Row]) -> Finding:
    """Return what has become of `row`, which the active broker of `row.epoch` appends. `before` is the digest of the
    row before it. `rows` are the rows with the number of `row` and with the number before it, and the last row of the
    log, as of one moment; missing rows are left out.

    Epochs never fall, so the last row has the epoch of the broker that has taken over last. The epoch is compared
    before the digest: the row of another broker may have the same digest, if both rows change nothing.
    """
    by_number = {each.number: each for each in rows}
    last = max(by_number.values(), default=None)
    if last is None or last.epoch < row.epoch:
        return Finding.FORGOTTEN
    if last.epoch > row.epoch:
        return Finding.FENCED
    if by_number.get(row.number) == row and last == row:
        return Finding.APPENDED
    if last == Row(row.number - 1, row.epoch, before):
        return Finding.ABSENT
    return Finding.FORGOTTEN


def relate(position: LogPosition, digest: bytes | None, compacted: LogPosition, last: int) -> Relation | None:
    """Return the relation of a folder whose last frame is at `position`; None if the log has a gap. `digest` is that of
    the log's row with the same number, None if there is none. `compacted` is the position of the log, `last` the number
    of its last row."""
    if position.number > last:
        return Relation.AHEAD
    if digest is None and position.number == compacted.number:
        digest = compacted.digest
    if digest is not None:
        return Relation.PREFIX if digest == position.digest else Relation.OTHER_WAY
    return Relation.OLD if position.number < compacted.number else None


class RowChain:
    """Check that rows follow each other without a gap, and that each has the digest of its payload."""

    def __init__(self, position: LogPosition) -> None:
        """`position` is the row before the first one."""
        self.last = position
        """Last row that is complete."""
        self._parts: list[bytes] = []

    @property
    def next_part(self) -> tuple[int, int]:
        """Number and part that must come next."""
        return self.last.number + 1, len(self._parts)

    def add(self, number: int, part: int, digest: bytes, payload: bytes) -> bytes | None:
        """Add a row, or a part of it. Return the whole payload of the row; None if further parts must follow.

        Raises: ValueError if the row is not the next one
        """
        if (number, part) != self.next_part:
            expected, expected_part = self.next_part
            raise ValueError(f"row {expected} (part {expected_part}) is missing or changed")
        self._parts.append(payload)
        if next_digest(self.last.digest, self._parts) != digest:
            return None
        whole = payload if len(self._parts) == 1 else b"".join(self._parts)
        self.last = LogPosition(number, digest)
        self._parts = []
        return whole
