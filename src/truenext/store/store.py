"""Interface of a store, which keeps the broker's durable state.

A message leaves the store only through a batch that removes it: reading removes nothing. One contract suite
(tests/contract) tests every store against this file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, Self

import msgspec

from truenext.model.batch import NO_CAUSES, Batch, Causes, Mark, ProducerState
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import PAGE_BYTES


class UndecodedMessage(msgspec.Struct, gc=False):
    """One message of a page, with its record not yet decoded."""

    key: bytes
    record: bytes
    mark: Mark
    content: bytes = b""
    """Record of the content that this record refers to (record.py); empty if it refers to none, or to a missing one."""
    causes: Causes = NO_CAUSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    messages: list[UndecodedMessage]
    """Messages, sorted by key."""
    as_of: int
    """Number of the last batch whose effects on the lane this page shows in full; 0 before the first batch of a run."""
    is_end: bool
    """True if no message of the lane followed this page when batch `as_of` was the last."""

    @classmethod
    def of(cls, following: Iterable[UndecodedMessage], limit: int, size_max: int, *, as_of: int) -> Self:
        """Return the page that starts with `following`; at most one message more than fits is taken from there."""
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
    """Timers, sorted by their bytes (record.py): by due time, timers of scheduled sends last."""
    as_of: int
    """Number of the last batch whose timers this page shows in full; 0 before the first batch of a run."""
    is_end: bool
    """True if no timer followed this page when batch `as_of` was the last."""

    @classmethod
    def of(cls, following: Iterable[bytes], limit: int, *, as_of: int) -> Self:
        """Return the page that starts with `following`. At most one timer more than fits is taken from the iterator."""
        timers = list(islice(following, limit + 1))
        return cls(timers=timers[:limit], as_of=as_of, is_end=len(timers) <= limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """State of a store when it opens: counts and positions, no messages."""

    identity: str
    """Eight hexadecimal digits, made once per store."""
    clean_stop: bool
    """True if the last run stopped cleanly. Otherwise the store has dropped the transient messages."""
    sequence_limit: int = 1
    """Exclusive upper bound of all sequences that were ever given out."""
    redelivered_below: int = 0
    """Messages with a lower sequence may have been dispatched in a run before the last without a record of it."""
    queues: dict[int, str] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    """Numbers of the paused queues."""
    counts: dict[bytes, int] = field(default_factory=dict)
    """Number of stored messages by lane key. Empty lanes and the lane of contents are left out."""
    producers: dict[str, ProducerState] = field(default_factory=dict)
    """States by producer name, in order of last use, oldest first."""
    history: list[bytes] = field(default_factory=list)
    """History chunks of batches, in order, that the history's own files may lack."""


class Store(Protocol):
    """Durable state of one broker. One thread at a time calls `apply`, `recover` and `close`."""

    @property
    def disk_level(self) -> DiskLevel:
        """Disk level found by the last check, about a second ago at most. Costs nothing to read, on any thread.

        Valid from `recover` on. Advice only: the store takes every batch that it can write, whatever the level.
        """

    @property
    def disk_level_bytes(self) -> dict[str, int]:
        """Bytes from which `disk_level` was found: `free` and `needed` of a disk (producers wait below `needed`),
        and `used` and `limit` if the store has a limit of its own."""

    def recover(self) -> Recovered:
        """Read the stored state, once, before any other call; after an unclean stop drop the transients first.

        Raises: StoreError if the state cannot be read.
        """

    def apply(self, batch: Batch) -> None:
        """Apply the whole batch and return once it is durable. Blocks: call it on a thread of its own.

        Raises: StoreError if the batch could not be made durable. The broker then stops, and never tries again.
        """

    def read_page(self, lane: bytes, after_sequence: int, limit: int, size_max: int = PAGE_BYTES) -> Page:
        """Return the next messages of a lane after `after_sequence`, persistent and transient in one order: at most
        `limit` (1 or more) with at most `size_max` bytes of records, contents and causes, or one larger message.

        The page shows every batch for which `apply` has returned, and no batch in part. May be called on any thread
        while `apply` runs on another; neither waits for the other's disk access.

        Raises: StoreError if the messages cannot be read.
        """

    def read_messages(self, keys: Collection[bytes], size_max: int = PAGE_BYTES) -> Page:
        """Return the stored messages with these keys, of any lanes, sorted by key: as many as `read_page` would
        return. `is_end` is True if none was left out for its size. Otherwise like `read_page`.

        Raises: StoreError if the messages cannot be read.
        """

    def content_references(self, numbers: Collection[int]) -> dict[int, int]:
        """Return the number of messages that refer to each of these persistent contents, by content number; 0 for a
        missing one. The number is never lower than after all batches for which `apply` has returned, but may be
        higher. May be called on any thread while `apply` runs on another.

        Raises: StoreError if the counts cannot be read.
        """

    def read_timers(self, after: bytes, limit: int) -> TimerPage:
        """Return the next timers (record.py) after `after`, which need not exist: at most `limit`, 1 or more.

        The page shows every batch for which `apply` has returned, and no batch in part. May be called on any thread
        while `apply` runs on another. Set and cleared timers survive any stop.

        Raises: StoreError if the timers cannot be read.
        """

    def close(self) -> None:
        """Release files and locks. Writes nothing."""
