"""Log: the durable record of a store whose data folder is only a copy, with one row for each frame of the journal.

A batch becomes a row of the log first, and a frame of the folder's journal then. So the folder is a prefix of the log,
and can be made anew from it. `EmbeddedStore` keeps the folder; `postgresql/` keeps the log in PostgreSQL.

    row N  has the number and the payload of frame N, and a digest of its payload and of the digest of row N - 1

So two logs that differ in a row have different digests in all later rows, and a folder belongs to a log if the last
frame of the folder and the row with its number have one digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, StrEnum
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Protocol

from truenext.errors import StoreError
from truenext.model.batch import Batch, Causes, Mark
from truenext.model.disk_level import DiskLevel
from truenext.store.changes import encode_batch
from truenext.store.store import Pending, Recovered

DIGEST_SIZE = 16

EMPTY_PAYLOAD = b"".join(encode_batch(Batch(0), None))
"""Payload of a row that changes nothing."""


BEAT_S = 0.5
"""Longest time between the begins of two appends of an active broker, while the log confirms them."""


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


class Role(StrEnum):
    """Role of a broker of a log."""

    ACTIVE = "active"
    STANDING_BY = "standing by"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Broker of a log, as it has described itself in the log."""

    name: str
    host: str
    role: Role
    epoch: int
    number: int
    """Number of its last row."""
    age_ms: int
    """Milliseconds since it has written this, by the clock of the database."""
    users: str
    """Digest of its users file; "" if it has none."""


@dataclass(slots=True, kw_only=True)
class MemberSettings:
    """Settings with which a broker takes part in a log."""

    name: str
    folder: Path
    """Data folder of this broker."""
    failover_after_s: float
    users: str = ""
    """Digest of its users file; "" if it has none. A reload changes it, on any thread."""
    on_standing_by: Callable[[str], object] = lambda _: None
    """Called once the broker stands by, with the name of the broker that was active last; "" if there was none."""


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
    members: tuple[Member, ...] = ()
    """Brokers of the log that have described themselves."""


class Frames(Protocol):
    """Frames of a folder's journal, as bytes."""

    @property
    def oldest_frame(self) -> int:
        """Number of the oldest frame that the folder has as bytes. If there is none, the number after the last
        frame."""

    def frames_after(self, number: int) -> Iterator[bytes]:
        """Yield the payloads of the frames after frame `number`, up to the last one. Nothing may be appended meanwhile.

        Raises: StoreError if one is missing or damaged; OSError if the disk fails
        """


class Log(Protocol):
    """Log of one broker. Only one thread at a time may call `append` and the methods before it.

    All methods raise StoreError if the log cannot be read or written, with a text for the operator.
    """

    frames: Frames
    """Frames of the folder, from which the log puts back rows that the database has forgotten. Set it before
    `stands_by`."""

    @property
    def earlier_identities(self) -> Mapping[str, int]:
        """Number of the last row by each identity that the log has had before."""

    @property
    def identity(self) -> str:
        """Id of the store, as in `Recovered`."""

    @property
    def next_history(self) -> tuple[int, int]:
        """Lowest run and lowest event that the compacted rows have not used; (1, 1) if they have no history. Rows after
        these may have used more."""

    def relation(self, position: LogPosition, frames: Frames | None = None) -> Relation:
        """Return the relation of a folder whose last frame is at `position`. With the folder's `frames`, a folder that
        ends behind the log has gone another way if the log's last row is another one than the folder's.

        Raises: StoreForgottenError if a folder has gone another way, and knows that the log is no longer the present
        one
        """

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        """Open a snapshot of the compacted rows."""

    def rows_after(self, position: LogPosition) -> Iterator[bytes]:
        """Yield the payloads of all rows after `position`, in order, up to the last row.

        Raises: StoreError if a row is missing or changed
        """

    def stands_by(self, position: LogPosition) -> bool:
        """Wait for the time of the next look at the log, and return whether the broker must go on to stand by. If not,
        it calls `take_over`. `position` is that of the folder's last frame.

        Raises: StoreBehindError if the folder cannot follow the log: it went another way, or the log has got another
        identity
        """

    def take_over(self, position: LogPosition) -> bool:
        """Append a row with the next epoch, behind the row that the last look has shown. After it, no broker of an
        earlier epoch can append a row. `append` may be called after this. Rows of the folder that the database has
        forgotten are put back before.

        Return False if another row has come meanwhile: the broker stands by on.

        Raises: StoreForgottenError if rows are missing, and cannot be repaired
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

    def choose_heir(self, to: str | None) -> str:
        """Return the name of the member that takes over after a clean stop: `to`, or the one that is least behind. Any
        thread may call it, at no cost.

        Raises: ConfigurationError if no broker stands by, `to` is not one of them, or it is too far behind, or ahead
        """

    def hand_over(self, heir: str) -> None:
        """Write that this broker has stopped cleanly, and that the member `heir` takes over; "" names none. Called
        after the last `append`."""

    def leave(self) -> None:
        """Write that this broker, which stands by, has stopped cleanly, if the log can be reached. Any thread may call
        it, also while another thread uses the log; the process must end after it."""

    @property
    def silent_from(self) -> float:
        """Time from which this broker is silent, in seconds of `clock.boottime`; infinite before the takeover. Any
        thread may read it, at no cost."""

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
