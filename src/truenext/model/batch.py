"""Batch: changes that the store makes in one atomic, durable step.

A batch holds finished bytes only: the store's thread compares, encodes and decides nothing. record.py describes the
bytes of keys and records.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

NO_NUMBER = -1
"""Value for "no number", below all numbers of a producer."""


class ProducerState(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Stored state of one producer. engine/state/producer.py has the meaning of the fields."""

    highest_send: int
    last_used_ms: int
    """Time of the last use, in milliseconds since the epoch."""
    is_used_once: bool = False
    """True if the producer has sent one SEND, and was not used since."""
    highest_commit: int = NO_NUMBER
    highest_unknown_commit: int = NO_NUMBER
    is_gapless: bool | None = None
    resolved: tuple[int, ...] = ()


class Mark(NamedTuple):
    """Delivery state of a stored message. It is stored apart from the message's record, which never changes."""

    attempts: int
    deliveries: int
    due_ms: int = 0
    """Time of the next try, in milliseconds since the epoch; 0 if the message does not wait. DUE_NEVER: a consumer has
    rejected the message, which becomes a dead letter when it is read."""
    was_lost: bool = False
    """True if the last attempt ended with a lost connection. Without an attempt: True if a connection that held the
    message was lost."""


NO_MARK = Mark(0, 0)


class Causes(NamedTuple):
    """First and last cause of a message's failures; empty if consumers stated none."""

    first: str = ""
    last: str = ""

    def merged_onto(self, before: Causes) -> Causes:
        """Return the first and last cause of a message that had the causes `before`, after these causes were added."""
        return Causes(before.first or self.first, self.last or before.last) if before != NO_CAUSES else self


NO_CAUSES = Causes()
DUE_NEVER = (1 << 63) - 1


class Batch:
    """Changes to the store, made together or not at all. The engine adds changes; the store only reads the batch."""

    def __init__(self, number: int) -> None:
        self.number = number
        """Number of the batch: 1 for the first batch of a run. Each page of the store states the number of the last
        batch whose changes it includes."""
        self.puts: dict[bytes, bytes] = {}
        """Record of each new persistent message, by message key, in order of arrival. A message that is acknowledged
        before this batch is closed is removed from here."""
        self.transient_puts: dict[bytes, bytes] = {}
        """Record of each new transient message, by message key. After a crash the store drops all transient
        messages."""
        self.removes: list[bytes] = []
        """Keys of removed persistent messages. An earlier batch has put each of these messages."""
        self.transient_removes: list[bytes] = []
        self.dereferenced: list[bytes] = []
        """Keys of contents, one for each reference among `removes`. The store counts the references to a content, and
        removes a content with its last reference. The field `attempts` in the mark of a new content has its number of
        references."""
        self.transient_dereferenced: list[bytes] = []
        """Keys of transient contents, one for each reference among `transient_removes`."""
        self.marks: dict[bytes, Mark] = {}
        """New mark of each requeued message, persistent or transient, by message key."""
        self.causes: dict[bytes, Causes] = {}
        """New causes of a message, by message key. Such a message is in `marks`, too. The store removes causes together
        with the mark."""
        self.unmarks: list[bytes] = []
        """Keys of messages whose mark is removed. The batch removes these messages, too."""
        self.queues: dict[int, str] = {}
        """Name of each queue that this batch creates or renames, by queue number; "" for a queue that it removes.
        Everything else of a removed queue was removed from the store before."""
        self.paused: dict[int, bool] = {}
        """New state of each queue that was paused (True) or resumed (False), by queue number. The store knows the queue
        from an earlier batch or from this one."""
        self.producers: dict[str, ProducerState] = {}
        self.forgotten_producers: list[str] = []
        self.timers: dict[bytes, None] = {}
        """Keys of timers to set; a timer that exists already stays. All timers survive a crash, also those of transient
        messages."""
        self.cleared_timers: list[bytes] = []
        """Keys of timers of earlier batches to clear, before `timers` are set. A timer that does not exist is
        ignored."""
        self.sequence_limit = 0
        """Limit below which sequences may be allocated once the batch is durable; 0 is no change."""
        self.redelivered_below = 0
        """Limit below which messages, by sequence, count as dispatched before, because the store does not record each
        dispatch; 0 is no change."""
        self.clean_stop: bool | None = None
        """True in the last batch of a run; False in the batch that is written before a listener opens; None in all
        other batches."""
        self.history = b""
        """Events since the batch before, as the bytes that events.py describes. A batch may have history alone."""
        self.size = 0
        """Approximate bytes of records, keys and timers."""

    def is_empty(self) -> bool:
        """Return whether the batch has no change to make durable. History alone is no such change."""
        return not (
            self.puts
            or self.removes
            or self.marks
            or self.transient_puts
            or self.transient_removes
            or self.queues
            or self.paused
            or self.producers
            or self.forgotten_producers
            or self.timers
            or self.cleared_timers
            or self.sequence_limit
            or self.redelivered_below
            or self.clean_stop is not None
        )
