"""Batch: changes that the store makes in one atomic, durable step.

A batch holds finished bytes only: the store's thread compares, encodes and decides nothing. Keys and records are
those of record.py.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

NO_NUMBER = -1
"""Placeholder below all numbers of a producer."""


class ProducerState(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Stored state of one producer, see engine/state/producer.py."""

    highest_send: int
    last_used_ms: int
    """Time of the last use, in milliseconds since the epoch."""
    is_used_once: bool = False
    """True if the producer had one SEND, and no use since."""
    highest_commit: int = NO_NUMBER
    highest_unknown_commit: int = NO_NUMBER
    is_gapless: bool | None = None
    resolved: tuple[int, ...] = ()


class Mark(NamedTuple):
    """Delivery state of a stored message, kept apart from the message's record."""

    attempts: int
    deliveries: int
    due_ms: int = 0
    """Time of the next retry, in milliseconds since the epoch. DUE_NEVER: the message was rejected, and must be read
    before it can be dead-lettered."""
    was_lost: bool = False
    """True if the last attempt was a lost connection."""


NO_MARK = Mark(0, 0)


class Causes(NamedTuple):
    """First and last cause of a message's failures; empty if consumers stated none."""

    first: str = ""
    last: str = ""

    def merged_onto(self, before: Causes) -> Causes:
        """Return the causes of `before` followed by these; empty ones change nothing."""
        return Causes(before.first or self.first, self.last or before.last) if before != NO_CAUSES else self


NO_CAUSES = Causes()
DUE_NEVER = (1 << 63) - 1


class Batch:
    """Changes to the store, made together or not at all. The engine adds to them; the store only reads them."""

    def __init__(self, number: int) -> None:
        self.number = number
        """Number of the batch, 1 for the first of a run. The store's pages state the last batch that they include."""
        self.puts: dict[bytes, bytes] = {}
        """Message key to record of each new persistent message, in order of arrival. A message that is finished
        before the batch is handed over is removed again."""
        self.transient_puts: dict[bytes, bytes] = {}
        """Message key to record of each new transient message; an unclean stop drops them."""
        self.removes: list[bytes] = []
        """Keys of removed persistent messages; each was put by an earlier batch."""
        self.transient_removes: list[bytes] = []
        self.dereferenced: list[bytes] = []
        """Keys of contents (record.py), one for each reference among `removes`. The store counts them, and removes a
        content with its last reference. A content is put with a mark, whose attempts are its number of references."""
        self.transient_dereferenced: list[bytes] = []
        """Keys of contents of the references among `transient_removes`; these contents are transient, too."""
        self.marks: dict[bytes, Mark] = {}
        """Message key to mark of each requeued message, persistent or transient."""
        self.causes: dict[bytes, Causes] = {}
        """Message key to new causes of a message that has a mark here. Causes are removed with their mark."""
        self.unmarks: list[bytes] = []
        """Keys of messages whose mark is removed, always together with the message."""
        self.queues: dict[int, str] = {}
        """Queue number to name of each queue that is new to the store or renamed by this batch; "" for a removed
        queue, of which the store then holds nothing else."""
        self.paused: dict[int, bool] = {}
        """Queue number to new state: paused (True) or resumed (False). The store knows each queue, by this batch at
        the latest."""
        self.producers: dict[str, ProducerState] = {}
        self.forgotten_producers: list[str] = []
        self.timers: dict[bytes, None] = {}
        """Timer keys (record.py) to set; an existing one stays. Timers survive a crash, whatever they are for."""
        self.cleared_timers: list[bytes] = []
        """Timers of earlier batches to clear, before `timers` are set. A missing timer is ignored."""
        self.sequence_limit = 0
        """Sequences below this may be allocated once the batch is durable; 0 is no change."""
        self.redelivered_below = 0
        """Messages with a sequence below this may have been dispatched without a trace in the store; 0 is no change."""
        self.clean_stop: bool | None = None
        """True in the last batch of a run, False in the batch before a listener opens, None in all others."""
        self.history = b""
        """History up to now as bytes, see events.py. A batch may hold nothing but history."""
        self.size = 0
        """Approximate bytes of records, keys and timers."""

    def is_empty(self) -> bool:
        """Whether the batch has no change to make durable; history alone does not count."""
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
