"""Log: the durable record of a store whose data folder is only a copy, with one row for each frame of the journal.

A batch becomes a row of the log first, and a frame of the folder's journal then. So the folder is a prefix of the log,
and can be made anew from it. `EmbeddedStore` keeps the folder; `postgresql/` keeps the log in PostgreSQL.

    row N  has the number and the payload of frame N, and a digest of its payload and of the digest of row N - 1

So two logs that differ in a row have different digests in all later rows, and a folder belongs to a log if the last
frame of the folder and the row with its number have one digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import NamedTuple, Protocol

from truenext.errors import StoreError
from truenext.model.batch import Batch, Causes, Mark
from truenext.model.disk_level import DiskLevel
from truenext.store.changes import encode_batch
from truenext.store.store import Pending, Recovered

DIGEST_SIZE = 16

EMPTY_PAYLOAD = b"".join(encode_batch(Batch(0), None))
"""Payload of a row that changes nothing."""


def next_digest(before: bytes, parts: Iterable[bytes | memoryview]) -> bytes:
    """Return the digest of a row. `before` is the digest of the row before; `parts` are the row's payload."""
    # With the instructions of current processors it takes half the time of BLAKE2b.
    digest = sha256(before)
    for part in parts:
        digest.update(part)
    return digest.digest()[:DIGEST_SIZE]


class LogPosition(NamedTuple):
    """Row of a log, by its number. The digest identifies all rows up to this one."""

    number: int
    digest: bytes


class Relation(Enum):
    """Relation of a folder to a log, found by the position of the folder's last frame."""

    PREFIX = 1
    """The folder is a prefix of the log, and the log has all rows that the folder lacks."""
    OLD = 2
    """The log no longer has all rows that the folder lacks: they are only in a snapshot."""
    OTHER_WAY = 3
    """The log has another row with this number."""
    AHEAD = 4
    """The log has no row with this number yet: it has forgotten rows, or is another log."""


class KeptMessage(NamedTuple):
    """Message of a snapshot."""

    key: bytes
    record: bytes
    is_transient: bool
    mark: Mark
    causes: Causes


class Snapshot(Protocol):
    """State that all rows up to one row add up to, as of one moment. From it a folder is made anew."""

    position: LogPosition
    recovered: Recovered
    """State without messages: `counts` and `history` are empty."""

    def messages(self) -> Iterator[KeptMessage]:
        """Yield all messages and contents, in the order of their keys."""

    def timers(self) -> Iterator[bytes]:
        """Yield all timers, in order."""


class Awaited(Enum):
    """Cause for which a log waits."""

    DATABASE = "database"
    """The database does not answer, or has interrupted a statement."""
    STANDBY = "standby"
    """The synchronous standby of the database does not confirm."""
    SPACE = "space"
    """The disk of the database is full."""


class Wait(NamedTuple):
    """Wait of a log, during which nothing becomes durable."""

    awaited: Awaited
    since_ms: int
    """Begin of the wait, in milliseconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatus:
    """Facts about a log for `truenext status`."""

    server: str
    """Host and port of the database server that is or was in use."""
    wait: Wait | None = None
    """Wait that has not ended; None if the log can be written, as far as known."""
    epoch: int
    number: int
    """Number of the last row."""
    position: int
    """Number of the row up to which rows were compacted."""
    is_replicated: bool
    """True if each row is confirmed by a synchronous standby, too."""


class Log(Protocol):
    """Log of one broker. Only one thread at a time may call `append` and the methods before it.

    All methods raise StoreError if the log cannot be read or written, with a text for the operator.
    """

    @property
    def identity(self) -> str:
        """Id of the store, as in `Recovered`."""

    @property
    def next_history(self) -> tuple[int, int]:
        """Lowest run and lowest event that the compacted rows have not used; (1, 1) if they have no history. Rows after
        these may have used more."""

    def relation(self, position: LogPosition) -> Relation:
        """Return the relation of a folder whose last frame is at `position`."""

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        """Open a snapshot of the compacted rows."""

    def rows_after(self, position: LogPosition) -> Iterator[bytes]:
        """Yield the payloads of all rows after `position`, in order, up to the last row.

        Raises: StoreError if a row is missing or changed
        """

    def take_over(self) -> None:
        """Append a row with the next epoch. After it, no broker of an earlier epoch can append a row. `append` may be
        called after this.

        Raises: ConfigurationError if another broker is active, and this one may not take over
        """

    def append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> bool:
        """Append row `number`, whose payload consists of `parts` and whose digest is `digest`; `before` is the digest
        of the row before it. The row is durable on return.

        Return False if the row may stand on this database only, and not on its standby. Then another row must be
        appended, and nothing may be confirmed before `append` has returned True.

        Raises: StoreFencedError if another broker has taken over; StoreForgottenError if the database has lost rows;
        StoreError if the row could not be appended in time
        """

    def begin_append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> Pending | None:
        """Begin to append a row, without waiting for anything. Return None if `append` must do it.

        In both cases the next call must be `append` of the same row, unless `Pending` appends it. `APPLIED` means that
        `append` would have returned True.
        """

    def start(self) -> None:
        """Start the background work, such as compaction. Called once, after `take_over`."""

    def begin_stop(self) -> None:
        """Wait for a full disk no longer than for a lost connection from now on, because the broker stops. Any thread
        may call it."""

    @property
    def failure(self) -> StoreError | None:
        """Error that has ended the background work, such as the takeover by another broker; None while it goes on. Any
        thread may read it, at no cost."""

    @property
    def disk_level(self) -> DiskLevel:
        """Disk level of the database. Any thread may read it, at no cost."""

    @property
    def disk_level_bytes(self) -> Mapping[str, int]:
        """Sizes in bytes from which `disk_level` follows: `database_used`, `database_limit`."""

    @property
    def status(self) -> LogStatus:
        """Status as of now; `number` and `position` are as of the last append or compaction. Any thread may read it, at
        no cost."""

    def close(self) -> None:
        """End the background work, and close all connections."""
