"""What the store must do in one atomic, durable step.

Finished bytes only: the store's thread compares, encodes and decides nothing. Keys and records are those of
record.py.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

NO_NUMBER = -1
"""Less than any number of a producer."""


class ProducerState(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What is remembered of one producer: engine/state/producer.py."""

    highest_send: int
    last_used_ms: int
    """Milliseconds since the epoch of its last use."""
    is_used_once: bool = False
    """It had one SEND, and nothing since."""
    highest_commit: int = NO_NUMBER
    highest_unknown_commit: int = NO_NUMBER
    is_gapless: bool | None = None
    resolved: tuple[int, ...] = ()


class Mark(NamedTuple):
    """What became of a message so far."""

    attempts: int
    deliveries: int
    due_ms: int = 0
    """Milliseconds since the epoch before which it is not tried again; DUE_NEVER for one that was rejected, and has to
    be read before it can be dead-lettered."""
    was_lost: bool = False
    """Its last attempt was a lost connection."""


NO_MARK = Mark(0, 0)


class Causes(NamedTuple):
    """Why consumers have failed with a message, as they said; empty where nothing was said."""

    first: str = ""
    last: str = ""

    def merged_onto(self, before: Causes) -> Causes:
        """What is so after these, where `before` was so: an empty one says nothing."""
        return Causes(before.first or self.first, self.last or before.last) if before != NO_CAUSES else self


NO_CAUSES = Causes()
DUE_NEVER = (1 << 63) - 1


class Batch:
    """Changes to the store that happen together or not at all. Grows in the engine, is only read once handed over."""

    def __init__(self, number: int) -> None:
        self.number = number
        """1 for the first batch of a run; the store's pages name the batch they are true up to."""
        self.puts: dict[bytes, bytes] = {}
        """Message key to record of each new persistent message, in order of arrival; one that is done with before the
        batch is handed over is taken out again."""
        self.transient_puts: dict[bytes, bytes] = {}
        """The same for transient messages; an unclean stop drops them."""
        self.removes: list[bytes] = []
        """Keys of persistent messages that are gone; each was put by an earlier batch."""
        self.transient_removes: list[bytes] = []
        self.dereferenced: list[bytes] = []
        """Keys of contents (record.py), one for each reference among `removes`. The store counts them, and removes a
        content with its last reference; what is put with a content is its mark, whose attempts say how many it has."""
        self.transient_dereferenced: list[bytes] = []
        """The same for references among `transient_removes`, whose contents are transient, too."""
        self.marks: dict[bytes, Mark] = {}
        """By message key, for messages of either kind that were requeued."""
        self.causes: dict[bytes, Causes] = {}
        """By the key of a message that has a mark here: what is new of its causes. They go with the mark."""
        self.unmarks: list[bytes] = []
        """Message keys whose mark goes, always together with the message."""
        self.queues: dict[int, str] = {}
        """Queue number to name, for each queue that is new to the store, or has another name from here on; to "" if it
        has gone, of which then nothing else is left."""
        self.paused: dict[int, bool] = {}
        """By number: queues that are paused from now on (True), or are no longer; each is known, by this batch at the
        latest."""
        self.producers: dict[str, ProducerState] = {}
        self.forgotten_producers: list[str] = []
        self.timers: dict[bytes, None] = {}
        """See record.py. To set one that is there changes nothing; they outlive a crash, whatever they were set for."""
        self.cleared_timers: list[bytes] = []
        """Of earlier batches; one that is set here as well is set. To clear one that is not there changes nothing."""
        self.sequence_limit = 0
        """If not 0: sequences below it may be given out once this batch is durable."""
        self.redelivered_below = 0
        """If not 0: messages with a sequence below it may have been dispatched without a trace."""
        self.clean_stop: bool | None = None
        """True as the last act of a run, False before a listener opens."""
        self.history = b""
        """What happened until now, see events.py; a batch can have nothing else."""
        self.size = 0
        """Bytes of records, keys and timers, roughly."""

    def is_empty(self) -> bool:
        """There is nothing to be made durable."""
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
