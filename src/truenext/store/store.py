"""What a store promises to the broker.

A message leaves the store only through a batch that removes it: nothing is dequeued by reading. One contract suite
(tests/contract) holds every store to this file.
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
    """One message of a page, its record not yet decoded."""

    key: bytes
    record: bytes
    mark: Mark
    content: bytes = b""
    """The record that its own refers to (record.py); empty if it does not, or that is missing."""
    causes: Causes = NO_CAUSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    messages: list[UndecodedMessage]
    """In the order of their keys."""
    as_of: int
    """Number of the last batch whose every effect on the lane this page shows; 0 before the first of a run."""
    is_end: bool
    """As of then, the lane has no message behind these."""

    @classmethod
    def of(cls, following: Iterable[UndecodedMessage], limit: int, size_max: int, *, as_of: int) -> Self:
        """The page that begins with `following`, from which at most one message more than fits is taken."""
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
    """In order: by the time at which they are due."""
    as_of: int
    """Number of the last batch whose every timer this page shows; 0 before the first of a run."""
    is_end: bool
    """As of then, there are none behind these."""

    @classmethod
    def of(cls, following: Iterable[bytes], limit: int, *, as_of: int) -> Self:
        """The page that begins with `following`, from which at most one more than fits is taken."""
        timers = list(islice(following, limit + 1))
        return cls(timers=timers[:limit], as_of=as_of, is_end=len(timers) <= limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a store holds when it opens: counts and positions, not messages."""

    identity: str
    """Eight hexadecimal digits, made once per store."""
    clean_stop: bool
    """The last run ended as it should; transients are then still there, otherwise the store has dropped them."""
    sequence_limit: int = 1
    """No sequence from here on was ever given out."""
    redelivered_below: int = 0
    """Messages with a sequence below it may have been dispatched without a trace, in a run before the last."""
    queues: dict[int, str] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    """Numbers of queues from which nothing is dispatched."""
    counts: dict[bytes, int] = field(default_factory=dict)
    """Lane key to messages stored there; lanes without any are left out, and so is that of contents."""
    producers: dict[str, ProducerState] = field(default_factory=dict)
    """In order of last use."""
    history: list[bytes] = field(default_factory=list)
    """History of batches that its own files may not have yet, in order."""


class Store(Protocol):
    """Durable state of one broker. `apply`, `recover` and `close` are called from one thread at a time."""

    @property
    def disk_level(self) -> DiskLevel:
        """What was found last, within a second or so; costs nothing to ask, on any thread, from `recover` on.

        It is advice: the store takes every batch that it can, whatever it said.
        """

    @property
    def disk_level_bytes(self) -> dict[str, int]:
        """Bytes by which `disk_level` was found last: `free` and `needed` of a disk, below which producers wait; `used`
        and `limit` where the store has a limit of its own."""

    def recover(self) -> Recovered:
        """Read what is there, once, before anything else; after an unclean stop drop the transients first.

        Raises: StoreError if it cannot be read.
        """

    def apply(self, batch: Batch) -> None:
        """Do all of the batch; returns once it is durable. Blocks: call it on a thread of its own.

        Raises: StoreError if it could not be made durable; the broker then stops, and never tries again.
        """

    def read_page(self, lane: bytes, after_sequence: int, limit: int, size_max: int = PAGE_BYTES) -> Page:
        """The next messages of a lane behind `after_sequence`, persistent and transient in one order: at most `limit`
        (1 or more) with at most `size_max` bytes of records, contents and causes, or one that is larger.

        Reflects every batch that apply has returned for, and none but whole ones. May be called on any thread while
        apply runs on another; neither waits for the other's disk.

        Raises: StoreError if it cannot be read.
        """

    def read_messages(self, keys: Collection[bytes], size_max: int = PAGE_BYTES) -> Page:
        """The stored messages with these keys, in the order of the keys: as many as `read_page` would give.
        The page is the end if nothing was left out for its size. Of any lanes; otherwise like `read_page`.

        Raises: StoreError if it cannot be read.
        """

    def content_references(self, numbers: Collection[int]) -> dict[int, int]:
        """By the number of each of these persistent contents, how many messages refer to it, as of all batches that
        apply has returned for, or more than there are; 0 if there is none. May be called on any thread while apply runs
        on another.

        Raises: StoreError if it cannot be read.
        """

    def read_timers(self, after: bytes, limit: int) -> TimerPage:
        """The next timers (record.py) behind `after`, which need not be one of them: at most `limit`, 1 or more.

        Reflects every batch that apply has returned for, and none but whole ones. May be called on any thread while
        apply runs on another. What is set or cleared outlives any stop.

        Raises: StoreError if it cannot be read.
        """

    def close(self) -> None:
        """Let go of files and locks. Nothing is written."""
