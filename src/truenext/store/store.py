"""Interface of a store, which keeps the broker's durable state.

A message leaves the store only by a batch that removes it. Reading removes nothing. One suite of contract tests
(tests/contract) tests every store against this interface.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import NamedTuple, Protocol, Self

import msgspec

from truenext.model.batch import NO_CAUSES, Batch, Causes, Mark, ProducerState
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import PAGE_BYTES


class UndecodedMessage(msgspec.Struct, gc=False):
    """Message of a page, whose record is not decoded yet."""

    key: bytes
    record: bytes
    mark: Mark
    content: bytes = b""
    """Record of the content to which the message's record refers (record.py). Empty if it refers to none, or the
    content is missing."""
    causes: Causes = NO_CAUSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    messages: list[UndecodedMessage]
    """Messages, sorted by key."""
    as_of: int
    """Number of the last batch that this page shows, with all its effects on the lane; 0 before the first batch of a
    run."""
    is_end: bool
    """True if this page was the end of the lane after batch `as_of`."""

    @classmethod
    def of(cls, following: Iterable[UndecodedMessage], limit: int, size_max: int, *, as_of: int) -> Self:
        """Return the page with the first messages of `following`. At most one message more than fits is taken from
        it."""
        messages: list[UndecodedMessage] = []
        size = 0
        for message in islice(following, limit + 1):
            size += len(message.record) + len(message.content)
            if message.causes is not NO_CAUSES:
                size += sum(map(len, message.causes))
            if messages and (size > size_max or len(messages) == limit):
                return cls(messages=messages, as_of=as_of, is_end=False)
            messages.append(message)
        return cls(messages=messages, as_of=as_of, is_end=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerPage:
    timers: list[bytes]
    """Timers in ascending order of their bytes (record.py): by due time, timers of scheduled sends last."""
    as_of: int
    """Number of the last batch that this page shows, with all its timers; 0 before the first batch of a run."""
    is_end: bool
    """True if this page was the end of all timers after batch `as_of`."""

    @classmethod
    def of(cls, following: Iterable[bytes], limit: int, *, as_of: int) -> Self:
        """Return the page with the first timers of `following`. This consumes at most `limit` + 1 items of
        `following`."""
        timers = list(islice(following, limit + 1))
        return cls(timers=timers[:limit], as_of=as_of, is_end=len(timers) <= limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """State that a store finds when it opens: counts and positions, without messages."""

    identity: str
    """Id of the store: eight hexadecimal digits, chosen when the store was made."""
    clean_stop: bool
    """True if the last run stopped cleanly. If False, the store has dropped the transient messages."""
    sequence_limit: int = 1
    """Limit of the sequences: all sequences used so far are lower."""
    redelivered_below: int = 0
    """Messages with a lower sequence count as redelivered: an earlier run of the broker may have dispatched these
    without recording the dispatch."""
    queues: dict[int, str] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    """Numbers of the paused queues."""
    counts: dict[bytes, int] = field(default_factory=dict)
    """Number of stored messages by lane key. Empty lanes are left out, and the lane of contents."""
    producers: dict[str, ProducerState] = field(default_factory=dict)
    """State of each producer, by its name. The producer that was used longest ago is first."""
    history: list[bytes] = field(default_factory=list)
    """History chunks of batches, in order. The history's own files may lack them."""


class Progress(Enum):
    """Progress of a batch that `Store.begin` has begun."""

    WAITING = 1
    """The answer is not complete."""
    APPLIED = 2
    """The batch is durable."""
    IN_DOUBT = 3
    """The batch may be durable. `Store.apply` must go on with it, and may wait."""


class Pending(Protocol):
    """Write that was begun, and waits for an answer of another machine. It is used by one thread."""

    @property
    def socket(self) -> int:
        """File descriptor that is readable when `advance` can do more."""

    @property
    def is_sent(self) -> bool:
        """False while `advance` can do more when the socket is writable, too."""

    def advance(self) -> Progress:
        """Go on without waiting. Not to be called again once the result was not WAITING. If the result is IN_DOUBT, the
        socket may be closed.

        Raises: StoreError if the batch could not be made durable
        """


class JournalSize(NamedTuple):
    """Size of a store's journal."""

    segments: int
    bytes: int
    """Bytes of all segments, unused bytes included."""


class Store(Protocol):
    """Durable state of one broker. Only one thread at a time may call `apply`, `recover` and `close`."""

    @property
    def disk_level(self) -> DiskLevel:
        """Disk level of the last check, which was about a second ago at most. Any thread may read the level, at no
        cost. The level is valid after `recover`. It only advises the broker: at each level the store takes every batch
        that it can write.
        """

    @property
    def disk_level_bytes(self) -> dict[str, int]:
        """Sizes in bytes from which `disk_level` follows. `free` is the free space of the disk; producers wait while
        less than `needed` is free. A store with its own limit also has `used` and `limit`. While a backup needs space,
        `backup` is what it needs beside these."""

    @property
    def journal_size(self) -> JournalSize | None:
        """Size of the journal; None if the store has none."""

    def recover(self) -> Recovered:
        """Return the stored state. Must be called once, before any other call. After an unclean stop the transient
        messages are dropped first.

        Raises: StoreError if the state cannot be read
        """

    def apply(self, batch: Batch) -> None:
        """Apply the whole batch. The call blocks, and returns once the batch is durable. The broker calls this method
        on a thread; if the disk is quick, also on its event loop, for small batches.

        Raises: StoreError if the batch could not be made durable. The broker must then stop, without another try.
        """

    def begin(self, batch: Batch) -> Pending | None:
        """Begin to apply a batch, without waiting for anything. Return None if `apply` must do it.

        In both cases the next call must be `apply` of the same batch, unless `Pending` makes the batch durable. Between
        the two the thread may change; the earlier thread then no longer uses `Pending`.
        """

    def read_page(self, lane: bytes, after_sequence: int, limit: int, size_max: int = PAGE_BYTES) -> Page:
        """Return a lane's next messages after `after_sequence`, persistent and transient ones in one order. The page
        has at most `limit` messages (1 or more), and at most `size_max` bytes of records, contents and causes. A larger
        message is returned alone.

        The page shows every batch for which `apply` has returned, and never a part of a batch. Any thread may call this
        while another is in `apply`. Neither waits for the other's disk access.

        Raises: StoreError if the messages cannot be read
        """

    def read_messages(self, keys: Collection[bytes], size_max: int = PAGE_BYTES) -> Page:
        """Return the stored messages with these keys, sorted by key. The keys may be of several lanes. The page has at
        most `size_max` bytes, or one larger message. `is_end` is False if messages were left out for their size.

        The page shows every batch for which `apply` has returned, and never a part of a batch. Any thread may call this
        while another is in `apply`.

        Raises: StoreError if the messages cannot be read
        """

    def content_references(self, numbers: Collection[int]) -> dict[int, int]:
        """Return by content number how many messages refer to each of these persistent contents; 0 if the content is
        missing. While a batch is being applied, the number may be too high. It is never too low for batches for which
        `apply` has returned. Any thread may call this while another is in `apply`.

        Raises: StoreError if the counts cannot be read
        """

    def read_timers(self, after: bytes, limit: int) -> TimerPage:
        """Return the next timers (record.py) after `after`, which itself need not exist: at most `limit` (1 or more).

        The page shows every batch for which `apply` has returned, and never a part of a batch. Any thread may call this
        while another is in `apply`. Timers survive any stop of the broker.

        Raises: StoreError if the timers cannot be read
        """

    def close(self) -> None:
        """Release files and locks, without writing."""
