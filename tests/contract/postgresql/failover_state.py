"""State of the model of a failover: PostgreSQL, which may forget rows, and brokers whose clocks run apart.

A row is named by its digest, which identifies all rows before it, too. A moment is an age in milliseconds of the clock
of the broker that remembers it; so a state does not depend on when it is reached.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Final, NamedTuple

from truenext.model.batch import Batch
from truenext.store.changes import RareChanges, Takeover, encode_batch
from truenext.store.log import EMPTY_PAYLOAD, next_digest
from truenext.store.postgresql.standing_by import Stop

AGE_MAX: Final = 20_000
"""Age of everything that is older: no decision differs any more."""
GENESIS: Final = bytes(16)


class Row(NamedTuple):
    number: int
    epoch: int
    digest: bytes
    before: bytes
    payload: bytes


@cache
def takeover_payload(epoch: int, timeline: int, nonce: int) -> bytes:
    rare = RareChanges(takeover=Takeover(epoch, "member", 1, timeline, bytes([nonce])))
    return b"".join(encode_batch(Batch(0), rare))


class Rows:
    """All rows that any broker has ever made, by digest."""

    def __init__(self) -> None:
        self._by_digest = {GENESIS: Row(0, 0, GENESIS, b"", EMPTY_PAYLOAD)}

    def __getitem__(self, digest: bytes) -> Row:
        return self._by_digest[digest]

    def add(self, before: bytes, epoch: int, payload: bytes) -> Row:
        row = Row(self[before].number + 1, epoch, next_digest(before, [payload]), before, payload)
        return self._by_digest.setdefault(row.digest, row)

    def at(self, last: bytes, number: int) -> Row | None:
        """Return row `number` of the log that ends with `last`; None if it is shorter."""
        row = self[last]
        while row.number > number:
            row = self[row.before]
        return row if row.number == number else None

    def has(self, last: bytes, digest: bytes) -> bool:
        """Return whether the log that ends with `last` has this row."""
        found = self.at(last, self[digest].number)
        return found is not None and found.digest == digest

    def common(self, one: bytes, other: bytes) -> bytes:
        """Return the last row that both logs have."""
        while not self.has(one, other):
            other = self[other].before
        return other


class TakenOver(NamedTuple):
    """Takeover, as the log has it."""

    number: int
    place: int
    process: int


class Database(NamedTuple):
    last: bytes = GENESIS
    takeovers: tuple[TakenOver, ...] = (TakenOver(0, 0, 0),)
    named: tuple[tuple[int, int], ...] = ((0, 1),)
    """Last row as of each naming of a timeline, and the timeline."""
    timeline: int = 1
    start: int = 1
    """Number of the server's start. A session ends with the start in which it began."""
    marked: int = 0
    """Process whose session is marked; 0 if none is."""
    stop: Stop | None = None
    identity: int = 1


class Life(IntEnum):
    OFF = 0
    STANDING_BY = 1
    ACTIVE = 2


class Seen(NamedTuple):
    """Content of a look, as of its execution."""

    database: Database
    is_marked: bool


class Watched(NamedTuple):
    last: bytes
    age: int
    start: int
    is_trusted: bool


class Append(NamedTuple):
    digest: bytes
    age: int
    """Age of its begin."""
    is_executed: bool = False


class Broker(NamedTuple):
    rate: int
    """Speed of the clock, in percent."""
    failover_after: int
    steps_left: int
    life: Life = Life.OFF
    folder: bytes = GENESIS
    takeovers: tuple[TakenOver, ...] = (TakenOver(0, 0, 0),)
    """Takeovers up to the folder's last frame."""
    oldest: int = 1
    """Number of the first frame of the folder."""
    identity: int = 1
    process: int = 0
    is_frozen: bool = False
    is_cut_off: bool = False
    first_start: int = 0
    """Start of the server in which this broker has looked first."""
    # While it stands by:
    look_age: int | None = None
    seen: Seen | None = None
    watched: Watched | None = None
    decided: Seen | None = None
    ends_session: bool = False
    is_by_silence: bool = False
    """True if it takes over because nothing came for long, and for no other reason."""
    # While it is active:
    epoch: int = 0
    session: int = 0
    append: Append | None = None
    idle: int = 0
    """Age of the last append's end."""
    was_away: bool = False
    """True if it could not append in time since its last row."""
    confirmed_age: int = 0
    """Age of the begin of the last append that was confirmed."""
    believed_age: int = 0
    """The same, as the broker believes."""
    must_be_silent: bool = False
    """True if another broker has taken over because nothing came for long."""

    def aged(self, real_ms: int, *, stops_when_frozen: bool) -> Broker:
        """Return the broker after `real_ms` milliseconds."""
        own = real_ms * self.rate // 100
        if self.life is Life.OFF:
            return self
        if self.life is Life.STANDING_BY:
            return self._replace(
                look_age=None if self.look_age is None else _older(self.look_age, own),
                watched=self.watched and self.watched._replace(age=_older(self.watched.age, own)),
            )
        believed = 0 if self.is_frozen and stops_when_frozen else own
        return self._replace(
            append=self.append and self.append._replace(age=_older(self.append.age, own)),
            idle=_older(self.idle, own),
            confirmed_age=_older(self.confirmed_age, own),
            believed_age=_older(self.believed_age, believed),
        )

    def off(self) -> Broker:
        """Return the broker without all that ends with its process."""
        return Broker(
            self.rate,
            self.failover_after,
            self.steps_left,
            folder=self.folder,
            takeovers=self.takeovers,
            oldest=self.oldest,
            identity=self.identity,
        )


def _older(age: int, by: int) -> int:
    return min(age + by, AGE_MAX)


class State(NamedTuple):
    database: Database
    brokers: tuple[Broker, ...]
    is_replicated: bool
    confirmed: tuple[int, bytes] = (1, GENESIS)
    """Identity, and the last row that was confirmed under it."""
    processes: int = 0
    has_said: bool = False
    """True if a broker has said which rows are missing."""
    times_left: int = 0
    failures_left: int = 0
    losses_left: int = 0

    def with_broker(self, at: int, broker: Broker) -> State:
        return self._replace(brokers=(*self.brokers[:at], broker, *self.brokers[at + 1 :]))

    def failed(self) -> State:
        return self._replace(failures_left=self.failures_left - 1)


class Bounds(NamedTuple):
    rates: tuple[int, ...] = (110, 90)
    """Speed of each broker's clock."""
    failover_after: tuple[int, ...] = (2000, 2000)
    steps: int = 8
    """Steps of each broker."""
    times: int = 3
    """Steps in which time passes."""
    failures: int = 0
    """Ends, pauses and cuts of brokers, and lost answers; restarts of PostgreSQL."""
    losses: int = 0
    """Promotions and restored backups, which lose rows."""
    is_replicated: bool = False

    def initial_state(self) -> State:
        brokers = tuple(
            Broker(rate, after, self.steps) for rate, after in zip(self.rates, self.failover_after, strict=True)
        )
        return State(
            Database(),
            brokers,
            self.is_replicated,
            times_left=self.times,
            failures_left=self.failures,
            losses_left=self.losses,
        )

    def __str__(self) -> str:
        rest = (f"{name} {value}" for name, value in self._asdict().items() if value)
        return ", ".join(rest)
