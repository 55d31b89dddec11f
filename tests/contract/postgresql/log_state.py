"""State of the model of a log: PostgreSQL, and the brokers that share it.

A digest identifies a row and all rows before it, so that the content after a row is a function of its digest.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Final, NamedTuple

from truenext.model.batch import Batch
from truenext.model.events import BLOCK, CHUNK, FROM_BATCH, EventKind, event_bytes
from truenext.model.record import lane_key, message_key, sequence_of
from truenext.store.changes import encode_batch
from truenext.store.log import EMPTY_PAYLOAD, next_digest
from truenext.store.postgresql.net_effect import NetEffect


class Payload(NamedTuple):
    """Payload of a row, with at most one change. All zero: the payload that changes nothing."""

    put: int = 0
    """Message that the row adds."""
    removed: int = 0
    event: int = 0
    """Number of the event in the row's history."""


EMPTY: Final = Payload()


@cache
def encoded(payload: Payload) -> bytes:
    if payload == EMPTY:
        return EMPTY_PAYLOAD
    batch = Batch(1)
    if payload.put:
        batch.puts = {_key(payload.put): b"record"}
    if payload.removed:
        batch.removes = [_key(payload.removed)]
    kind = EventKind.STARTED
    block = BLOCK.pack(kind, 0, 1, 0, 0, 0) + bytes(event_bytes(kind))
    batch.history = CHUNK.pack(0, len(block), 1, FROM_BATCH, payload.event) + block
    return b"".join(encode_batch(batch, None))


def _key(message: int) -> bytes:
    return message_key(lane_key(1, 4), message)


@cache
def digest_after(before: bytes, payload: Payload) -> bytes:
    return next_digest(before, [encoded(payload)])


class Content(NamedTuple):
    """State that rows add up to."""

    messages: tuple[int, ...] = ()
    next_event: int = 1

    def after(self, payload: Payload) -> Content:
        if payload == EMPTY:
            return self
        messages = tuple(each for each in self.messages if each != payload.removed)
        return Content((*messages, payload.put) if payload.put else messages, payload.event + 1)

    def compacted(self, payloads: tuple[Payload, ...]) -> Content:
        """Return what the code that compacts a log makes of this content and of rows after it."""
        removed, puts, next_event = _net_effect(payloads)
        messages = tuple(each for each in self.messages if each not in removed)
        return Content(messages + puts, next_event or self.next_event)


@cache
def _net_effect(payloads: tuple[Payload, ...]) -> tuple[frozenset[int], tuple[int, ...], int]:
    effect = NetEffect()
    for each in payloads:
        effect.add(encoded(each))
    removed = frozenset(map(sequence_of, effect.index.removed))
    return removed, tuple(sequence_of(each.key) for each in effect.puts()), (effect.next_history or (0, 0))[1]


class Row(NamedTuple):
    number: int
    epoch: int
    digest: bytes
    payload: Payload


GENESIS: Final = Row(0, 0, bytes(16), EMPTY)


class Damage(NamedTuple):
    """Damage that a hand or a disk has done to one row."""

    number: int
    is_missing: bool


class Database(NamedTuple):
    rows: tuple[Row, ...] = (GENESIS,)
    """All rows that were committed, dropped ones too. The index of a row is its number."""
    dropped_below: int = 0
    """Rows with lower numbers are in no partition any more."""
    replicated: int = 0
    """Number of the last row that the standby is known to have."""
    position: int = 0
    kept: Content = Content()
    damage: Damage | None = None
    has_forgotten: bool = False
    """True if rows were lost that PostgreSQL had committed."""
    takeovers: int = 0

    @property
    def last(self) -> Row:
        return self.rows[-1]

    def find(self, number: int) -> Row | None:
        """Return the row with this number, if PostgreSQL still has it."""
        is_there = self.dropped_below <= number < len(self.rows) and self.damage != (number, True)
        return self.rows[number] if is_there else None


class Folder(NamedTuple):
    number: int
    """Number of the last frame."""
    digest: bytes
    content: Content
    synced_number: int = 0
    """Number of the last frame that survives a power cut."""
    synced_digest: bytes = b""
    synced_content: Content = Content()
    """Content of the checkpoint."""
    has_own_identity: bool = False

    def with_frame(self, digest: bytes, payload: Payload) -> Folder:
        return self._replace(number=self.number + 1, digest=digest, content=self.content.after(payload))

    def synced(self) -> Folder:
        return self._replace(synced_number=self.number, synced_digest=self.digest, synced_content=self.content)

    def torn(self) -> Folder:
        return self._replace(number=self.synced_number, digest=self.synced_digest, content=self.synced_content)


class Life(IntEnum):
    OFF = 0
    OPENED = 1
    """Has a folder, and has not taken over yet."""
    ACTIVE = 2
    IN_DOUBT = 3
    """Has lost the answer of an append."""


class Compaction(NamedTuple):
    """Transaction that moves the position."""

    expected: int
    target: int
    content: Content


class Broker(NamedTuple):
    steps_left: int
    life: Life = Life.OFF
    folder: Folder | None = None
    epoch: int = 0
    run: int = 0
    batches: int = 0
    row: Row | None = None
    """Row that the broker appends."""
    owes_row: bool = False
    """True if its last row may stand on one database only."""
    late: Row | None = None
    """Row in a statement that PostgreSQL may still execute, although its connection is lost."""
    compaction: Compaction | None = None
    seen: Row | Content | int | None = None
    """First half of a step that must not be divided. Only faults use it."""


class State(NamedTuple):
    database: Database
    brokers: tuple[Broker, ...]
    confirmed: int = 0
    """Number of the highest confirmed row."""
    failures_left: int = 0
    chores_left: int = 0
    failovers_left: int = 0
    losses_left: int = 0
    damages_left: int = 0

    def with_broker(self, at: int, broker: Broker) -> State:
        return self._replace(brokers=(*self.brokers[:at], broker, *self.brokers[at + 1 :]))

    def with_failure(self) -> State:
        return self._replace(failures_left=self.failures_left - 1)


class Bounds(NamedTuple):
    brokers: int = 3
    steps: int = 6
    """Steps of each broker."""
    failures: int = 0
    """Lost answers, waits for a standby that are cancelled, and ends of brokers."""
    chores: int = 0
    """Compactions, drops of partitions, and moves into the checkpoint."""
    failovers: int = 0
    """Failovers to the standby, which lose rows that the standby does not have."""
    losses: int = 0
    """Losses of rows that PostgreSQL had confirmed."""
    damages: int = 0
    """Rows that are deleted or changed."""

    def initial_state(self) -> State:
        brokers = (Broker(self.steps),) * self.brokers
        return State(
            Database(),
            brokers,
            failures_left=self.failures,
            chores_left=self.chores,
            failovers_left=self.failovers,
            losses_left=self.losses,
            damages_left=self.damages,
        )

    def __str__(self) -> str:
        rest = (f"{name} {value}" for name, value in self._asdict().items() if value)
        return ", ".join(rest)
