"""Log of the events of all messages, in the order in which they happen, encoded for the history.

Consecutive events of one kind in one queue make one block. The columns of a block are encoded when the block ends, so a
single event costs only an append to a list. A block describes each entry as it is when the block ends. That is right,
because only events of another kind change an entry, and such an event ends the block first.

Temporary queues have no events: they are private to one connection.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from typing import cast

from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.queue import Entry, Queue, RequeueReason
from truenext.model.checksum import crc32
from truenext.model.commands import AckMode
from truenext.model.events import (
    BLOCK,
    BLOCKING,
    BROKER,
    CHECKSUM,
    CHUNK,
    DELAYED,
    EXCLUSIVE,
    FROM_BATCH,
    NO_WINDOW,
    PERSISTENT_FLAG,
    PULLING,
    REASONS,
    STARTS_FILE,
    SUBSCRIPTION_MODES,
    WITH_EXPRESS,
    WITH_SELECTOR,
    WITH_STARTED,
    EventKind,
    group_number,
)
from truenext.model.limits import HISTORY_FILE_BYTES
from truenext.model.message import SentMessage

_ACCEPTED, _DISPATCHED, _ACKNOWLEDGED, _RETURNED, _EXPIRED, _REMOVED, _OF_GROUP, _STARTED = (
    int(kind)
    for kind in (
        EventKind.ACCEPTED,
        EventKind.DISPATCHED,
        EventKind.ACKNOWLEDGED,
        EventKind.RETURNED,
        EventKind.EXPIRED,
        EventKind.REMOVED,
        EventKind.ACCEPTED_OF_GROUP,
        EventKind.STARTED,
    )
)
BLOCK_US_MAX = 500
"""Longest time in microseconds during which events share a block and the block's timestamp."""

_SINGLE_EVENT = struct.Struct(BLOCK.format + "Q")
_SINGLE_ACCEPTED = struct.Struct(_SINGLE_EVENT.format + "IB")
_SINGLE_OF_GROUP = struct.Struct(_SINGLE_ACCEPTED.format + "Q")
_SINGLE_DISPATCHED = struct.Struct(_SINGLE_EVENT.format + "II")
_SINGLE_RETURNED = struct.Struct(_SINGLE_EVENT.format + "I")

_DUE_CODE = REASONS.index("due")
_RETURNED_CODES = {reason: REASONS.index(reason.value) for reason in RequeueReason}


def _reason_codes(wait: str) -> dict[RequeueReason | None, int]:
    """Return the codes of the event that a message waits for its next try, by reason of its failure. `wait` is DELAYED
    or BLOCKING. The key None is for a message from a page, whose failure was logged before."""
    at_once = RequeueReason.RELEASED, RequeueReason.CLOSED
    failures = (reason for reason in RequeueReason if reason not in at_once)
    return {None: REASONS.index(wait)} | {reason: REASONS.index(f"{reason.value} and {wait}") for reason in failures}


_DELAYED_CODES, _BLOCKING_CODES = _reason_codes(DELAYED), _reason_codes(BLOCKING)


class EventLog:
    def __init__(self, *, run: int = 1, first_event: int = 1) -> None:
        self._run = run
        self._now_us = 0
        self._unwritten_names: dict[int, str] = {}
        self._forgotten_numbers: list[int] = []
        """Numbers of forgotten queues that may have events in the current chunk."""
        self._forgotten_in_file: list[int] = []
        """Numbers of forgotten queues that may have events in the current file, but only in earlier chunks."""
        self.reusable_numbers: list[int] = []
        """Numbers of forgotten queues that have events only in earlier files (`take_reusable_numbers`)."""
        self._next_event = first_event
        """Number of the first event of the block that ends next. Events of an open block have no number yet."""
        self._chunk_event = first_event
        self._blocks: list[bytes] = []
        self.size = 0
        """Bytes of the finished blocks of the current chunk."""
        self._file_size = HISTORY_FILE_BYTES
        """Bytes in the current file. At first this is the size of a full file, so that the first chunk begins a new
        file."""

        self._causes: dict[str, int] = {}
        """Causes that the current chunk has, each with its number in this chunk."""

        # The open block.
        self._block_kind = -1
        self._block_code = 0
        self._block_queue = 0
        self._block_other = 0
        self._opened_us = 0
        self._started_entries: list[Entry] = []
        """Entries of the block of started events, which may be open at the same time as the other block."""
        self._started_consumer_numbers: list[int] = []
        self._started_us = 0
        """Time of the first event in the block of started events, in microseconds since the epoch."""
        self.block_entries: list[Entry] = []
        """Entries of the open block. A caller may append an entry if the open block is for the same event and queue."""
        self.accepting_queue: Queue | None = None
        """Queue of the open block, if the block has accepted events of messages without groups."""
        self.accepting_batch = 0
        """Batch that makes the messages of an open block of accepted events visible."""
        self.acknowledging_queue: Queue | None = None
        """Queue of the open block, if the block has acknowledged events."""
        self._block_consumers: list[int] = []

    @property
    def next_event(self) -> int:
        """Number of the event that happens next."""
        return self._next_event + len(self.block_entries) + len(self._started_entries)

    def tick(self, now_us: int) -> None:
        opened_us = self._opened_us if self.block_entries else self._started_us
        if (self.block_entries or self._started_entries) and now_us - opened_us > BLOCK_US_MAX:
            self.end_block()
        self._now_us = now_us

    # ---- Frequent events ----

    def accepted(self, entry: Entry) -> None:
        queue = entry.lane.queue
        if queue.number and entry.group:
            if (self._block_kind, self._block_queue, self._block_other) != (_OF_GROUP, queue.number, entry.batch):
                self._open_block(_OF_GROUP, queue.number, entry.batch)
            self.block_entries.append(entry)
        elif queue.number:
            if self.accepting_queue is not queue or self.accepting_batch != entry.batch:
                self._open_block(_ACCEPTED, queue.number, entry.batch)
                self.accepting_queue, self.accepting_batch = queue, entry.batch
            self.block_entries.append(entry)

    def dispatched(self, queue: Queue, entries: list[Entry], consumers: list[int]) -> None:
        """Add dispatched events. `consumers` has the number of the consumer for each entry."""
        if queue.number:
            if self._block_kind != _DISPATCHED or self._block_queue != queue.number:
                self._open_block(_DISPATCHED, queue.number)
            self.block_entries.extend(entries)
            self._block_consumers.extend(consumers)

    def acknowledged(self, entry: Entry) -> None:
        self.acknowledged_all(entry.lane.queue, (entry,))

    def acknowledged_all(self, queue: Queue, entries: Iterable[Entry]) -> None:
        if queue.number:
            if self.acknowledging_queue is not queue:
                self._open_block(_ACKNOWLEDGED, queue.number)
                self.acknowledging_queue = queue
            self.block_entries.extend(entries)

    def started(self, entry: Entry, consumer: BrokerConsumer) -> None:
        """Add the event that a truenext client has started this dispatch, or has settled the message inside a
        transaction."""
        queue = entry.lane.queue
        if queue.number:
            # A client acknowledges one message and starts the next, again and again. So that acknowledged and started
            # events do not end each other's block, started events have a block of their own. It is written before
            # the open block, which must then have only acknowledged events: their messages are gone.
            if self._block_kind not in (-1, _ACKNOWLEDGED) or (
                self._started_entries and self._started_entries[0].lane.queue is not queue
            ):
                self.end_block()
            if not self._started_entries:
                self._started_us = self._now_us
            self._started_entries.append(entry)
            self._started_consumer_numbers.append(consumer.number)

    def returned(self, entry: Entry, reason: RequeueReason, cause: str = "") -> None:
        """Add the event that a message was requeued. `cause` is the text that the consumer gave."""
        code = _RETURNED_CODES[reason]
        if (
            self._block_kind == _RETURNED
            and self._block_queue == entry.lane.queue.number
            and self._block_code == code
            and not (cause or self._block_other)
        ):
            # A shortcut: one event may requeue very many.
            self.block_entries.append(entry)
        else:
            self._add_returned(entry, code, cause)

    def delayed(self, entry: Entry, reason: RequeueReason | None = None, *, is_blocking: bool, cause: str = "") -> None:
        """Add the event that a message waits for its next try. `reason` says how it has just failed; None if it was
        read from the store."""
        self._add_returned(entry, (_BLOCKING_CODES if is_blocking else _DELAYED_CODES)[reason], cause)

    def became_due(self, entry: Entry) -> None:
        self._add_returned(entry, _DUE_CODE)

    def _add_returned(self, entry: Entry, reason_code: int, cause: str = "") -> None:
        queue = entry.lane.queue.number
        if queue:
            number = self._cause_number(cause) if cause else 0
            if (
                self._block_kind != _RETURNED
                or self._block_queue != queue
                or self._block_code != reason_code
                or self._block_other != number
            ):
                self._open_block(_RETURNED, queue, number, reason_code)
            self.block_entries.append(entry)

    def _cause_number(self, cause: str) -> int:
        """Return the number of a cause in this chunk. The chunk has the text of the cause once."""
        number = self._causes.get(cause, 0)
        if not number:
            self.end_block()
            number = self._causes[cause] = len(self._causes) + 1
            self._add_block(_encode_numbered_text(EventKind.CAUSE, number, cause, self._now_us), 0)
        return number

    def expired(self, entry: Entry) -> None:
        self._add_end(_EXPIRED, entry)

    def removed(self, entry: Entry) -> None:
        """Add the event that a control request removed a message."""
        self._add_end(_REMOVED, entry)

    def _add_end(self, kind: int, entry: Entry) -> None:
        queue = entry.lane.queue.number
        if queue:
            if self._block_kind != kind or self._block_queue != queue:
                self._open_block(kind, queue)
            self.block_entries.append(entry)

    # ---- Rare events ----

    def run_started(self, *, after_clean_stop: bool, epoch: int = 0, identity: str = "") -> None:
        code = REASONS.index("clean" if after_clean_stop else "unclean")
        if identity:
            self._unwritten_names[BROKER] = identity
        self._add_single_event(EventKind.RUN_STARTED, int(identity or "0", 16), code=code, other=epoch)

    def recovered(self, queue: Queue, count: int) -> None:
        if queue.number:
            self._add_single_event(EventKind.RECOVERED, queue.number, other=count)

    def on_committed(self, batch: int) -> None:
        self._add_single_event(EventKind.COMMITTED, other=batch)

    def subscribed(self, consumer: BrokerConsumer, queue: Queue, *, has_selector: bool) -> None:
        if queue.number:
            is_pulling = consumer.pull_request is not None
            is_counted = consumer.mode is not AckMode.AUTO and not is_pulling
            mode = (
                consumer.mode.value
                + WITH_SELECTOR * has_selector
                + WITH_EXPRESS * consumer.has_express
                + WITH_STARTED * consumer.session.is_truenext_client
                + PULLING * is_pulling
                + EXCLUSIVE * consumer.is_exclusive
            )
            kind = EventKind.SUBSCRIBED
            columns = _column("I", [max(consumer.window, 0) if is_counted else NO_WINDOW])
            if consumer.is_exclusive:
                kind = EventKind.SUBSCRIBED_EXCLUSIVE
                columns += _column("b", [consumer.priority])
            self._add_single_event(
                kind, queue.number, code=SUBSCRIPTION_MODES.index(mode), other=consumer.number, columns=columns
            )

    def window_changed(self, consumer: BrokerConsumer, queue: Queue, window: int) -> None:
        """Add the event that the consumer may hold `window` messages; 0 while it is suspended. Add dispatches made
        under the former window first. Wildcard consumers and consumers that pull have no such event."""
        if queue.number:
            self._add_single_event(
                EventKind.WINDOW, queue.number, other=consumer.number, columns=_column("I", [window])
            )

    def pull_requested(self, consumer: BrokerConsumer, queue: Queue, count: int) -> None:
        """Add the event that the consumer may get `count` more messages; 0 if its pull request was withdrawn or has
        ended. Add dispatches made under the former request first. Wildcard consumers have no such event."""
        if queue.number:
            self._add_single_event(
                EventKind.REQUESTED, queue.number, other=consumer.number, columns=_column("I", [count])
            )

    def unsubscribed(self, consumer: BrokerConsumer, queue: Queue) -> None:
        if queue.number:
            self._add_single_event(EventKind.UNSUBSCRIBED, queue.number, other=consumer.number)

    def dead_lettered(self, entry: Entry, target: Queue, target_sequence: int) -> None:
        """Add the event that a message was dead-lettered. The message must be in memory with its causes."""
        self._add_moved(EventKind.DEAD_LETTERED, entry, target, target_sequence)

    def handled(self, entry: Entry, target: Queue, target_sequence: int) -> None:
        """Add the event that a handler gets a message that has failed. The message must be in memory with its
        causes."""
        self._add_moved(EventKind.HANDLED, entry, target, target_sequence)

    def reported(self, entry: Entry, target: Queue | None = None, target_sequence: int = 0) -> None:
        """Add the event that the dead letter of a message has sent a report, to a topic if there is no `target`."""
        self._add_moved(EventKind.REPORTED, entry, target, target_sequence)

    def moved(self, entry: Entry, target: Queue, target_sequence: int) -> None:
        self._add_moved(EventKind.MOVED, entry, target, target_sequence)

    def paused(self, queue: Queue) -> None:
        self._add_single_event(EventKind.PAUSED, queue.number)

    def resumed(self, queue: Queue) -> None:
        self._add_single_event(EventKind.RESUMED, queue.number)

    def subscription_ended(self, queue: Queue) -> None:
        """Add the event that a subscription ended. Each message of the subscription has an expired event when it is
        removed."""
        if queue.number:
            self._add_single_event(EventKind.ENDED, queue.number)

    def _add_moved(self, kind: EventKind, entry: Entry, target: Queue | None, target_sequence: int) -> None:
        number = 0 if target is None else target.number
        columns = _column("Q", [entry.sequence]) + _column("I", [number]) + _column("Q", [target_sequence])
        cause = 0
        if kind in (EventKind.DEAD_LETTERED, EventKind.HANDLED) and entry.causes is not None:
            cause = self._cause_number(entry.causes.last)
        self._add_single_event(kind, entry.lane.queue.number, other=cause, columns=columns)

    def queue_named(self, queue: Queue) -> None:
        """Write the queue's name and number, before the first event of the queue."""
        if queue.number:
            self.end_block()
            self._unwritten_names[queue.number] = queue.name
            self._add_block(_encode_numbered_text(EventKind.NAME, queue.number, queue.name, self._now_us), 0)

    def forget_queue(self, queue: Queue) -> bool:
        """Note that a queue has no more events. Returns True if the queue's number must not be reused before
        `take_reusable_numbers` returns it: within one file, a number must stand for one name."""
        if not queue.number:
            return False
        self._forgotten_numbers.append(queue.number)
        return True

    def take_reusable_numbers(self) -> list[int]:
        """Return and forget the numbers of queues forgotten in earlier files. The removal of these queues is
        durable."""
        reusable, self.reusable_numbers = self.reusable_numbers, []
        return reusable

    # ---- Chunks ----

    def is_empty(self) -> bool:
        return not self._blocks and not self.block_entries and not self._started_entries

    def close_chunk(self, *, of_batch: bool = False) -> bytes:
        """Return all events since the last call as one chunk of a history file; empty if there are none. `of_batch` is
        True if the store writes changes of a batch together with the chunk."""
        self.end_block()
        if not self._blocks:
            self._forget_queues()
            return b""
        flags = FROM_BATCH if of_batch else 0
        if self._file_size >= HISTORY_FILE_BYTES:
            flags |= STARTS_FILE
            self._file_size = 0
            self.reusable_numbers += self._forgotten_in_file
            self._forgotten_in_file = []
            # Each file names all queues and the broker, so that it can be read by itself.
            self._blocks[:0] = [
                _encode_numbered_text(EventKind.NAME, number, name, self._now_us)
                for number, name in self._unwritten_names.items()
            ]
        size = sum(map(len, self._blocks))
        # Joined at once: with the names of a hundred thousand queues it is large.
        rest = b"".join((CHUNK.pack(0, size, self._run, flags, self._chunk_event)[CHECKSUM.size :], *self._blocks))
        self._blocks = []
        self._causes.clear()
        if self._forgotten_numbers:
            self._forget_queues()
        self.size = 0
        self._chunk_event = self._next_event
        self._file_size += len(rest)
        return CHECKSUM.pack(crc32(rest)) + rest

    # ---- Blocks ----

    def _forget_queues(self) -> None:
        for number in self._forgotten_numbers:
            # A queue of scheduled sends was never named.
            self._unwritten_names.pop(number, None)
        self._forgotten_in_file += self._forgotten_numbers
        self._forgotten_numbers.clear()

    def _open_block(self, kind: int, queue: int, other: int = 0, code: int = 0) -> None:
        self.end_block()
        self._block_kind, self._block_queue, self._block_other, self._block_code = kind, queue, other, code
        self._opened_us = self._now_us

    def end_block(self) -> None:
        """End and encode the open block. Call it before messages of the block leave memory."""
        if self._started_entries:
            self._end_started()
        entries = self.block_entries
        kind, self._block_kind = self._block_kind, -1
        self.accepting_queue = self.acknowledging_queue = None
        if not entries:
            return
        count = len(entries)
        if count == 1:
            self._add_block(self._single_event_block(kind, entries.pop()), 1)
            return
        block = BLOCK.pack(kind, self._block_code, count, self._block_queue, self._block_other, self._opened_us)
        columns = _column("Q", [entry.sequence for entry in entries])
        if kind in (_ACCEPTED, _OF_GROUP):
            # All are in memory: no message leaves it before its batch is durable, and closing the batch ends the block.
            messages = cast("list[SentMessage]", [entry.message for entry in entries])
            columns += _column("I", [len(message.body) for message in messages])
            columns += bytes([message.priority + PERSISTENT_FLAG * message.persistent for message in messages])
            if kind == _OF_GROUP:
                columns += _column("Q", [group_number(entry.group) for entry in entries])
        elif kind == _DISPATCHED:
            columns += _column("I", self._block_consumers)
            columns += _column("I", [entry.deliveries for entry in entries])
            self._block_consumers = []
        elif kind == _RETURNED:
            columns += _column("I", [entry.attempts for entry in entries])
        self.block_entries = []
        self._add_block(block + columns, count)

    def _end_started(self) -> None:
        entries, self._started_entries = self._started_entries, []
        consumers, self._started_consumer_numbers = self._started_consumer_numbers, []
        queue = entries[0].lane.queue.number
        columns = _column("Q", [entry.sequence for entry in entries]) + _column("I", consumers)
        self._add_block(BLOCK.pack(_STARTED, 0, len(entries), queue, 0, self._started_us) + columns, len(entries))

    def _single_event_block(self, kind: int, entry: Entry) -> bytes:
        """Encode a block of one event, at a third of the cost of `end_block`. A message that arrives alone needs three
        such blocks."""
        sequence = entry.sequence
        queue, other, opened_us = self._block_queue, self._block_other, self._opened_us
        if kind == _ACCEPTED:
            message = entry.message
            assert message is not None, "see above"
            flags = message.priority + PERSISTENT_FLAG * message.persistent
            return _SINGLE_ACCEPTED.pack(kind, 0, 1, queue, other, opened_us, sequence, len(message.body), flags)
        if kind == _DISPATCHED:
            consumer_number = self._block_consumers.pop()
            return _SINGLE_DISPATCHED.pack(
                kind, 0, 1, queue, other, opened_us, sequence, consumer_number, entry.deliveries
            )
        if kind == _RETURNED:
            return _SINGLE_RETURNED.pack(kind, self._block_code, 1, queue, other, opened_us, sequence, entry.attempts)
        if kind == _OF_GROUP:
            message = entry.message
            assert message is not None, "see above"
            flags, group = message.priority + PERSISTENT_FLAG * message.persistent, group_number(entry.group)
            return _SINGLE_OF_GROUP.pack(kind, 0, 1, queue, other, opened_us, sequence, len(message.body), flags, group)
        return _SINGLE_EVENT.pack(kind, 0, 1, queue, other, opened_us, sequence)

    def _add_single_event(
        self, kind: EventKind, queue: int = 0, *, code: int = 0, other: int = 0, columns: bytes = b""
    ) -> None:
        self.end_block()
        self._add_block(BLOCK.pack(kind, code, 1, queue, other, self._now_us) + columns, 1)

    def _add_block(self, block: bytes, events: int) -> None:
        self._next_event += events
        self._blocks.append(block)
        self.size += len(block)


def _record_nothing(*_: object, **__: object) -> None:
    pass


class NoEventLog(EventLog):
    """Event log that records nothing, for a broker without a history."""

    def accepted(self, entry: Entry) -> None:
        pass

    def dispatched(self, queue: Queue, entries: list[Entry], consumers: list[int]) -> None:
        pass

    def acknowledged_all(self, queue: Queue, entries: Iterable[Entry]) -> None:
        pass

    def started(self, entry: Entry, consumer: BrokerConsumer) -> None:
        pass

    def forget_queue(self, queue: Queue) -> bool:
        return False

    _add_returned = _add_end = _add_moved = _add_single_event = queue_named = _record_nothing


def _encode_numbered_text(kind: EventKind, number: int, value: str, now_us: int) -> bytes:
    """Encode a block that assigns a number to a text."""
    text = value.encode()
    return BLOCK.pack(kind, 0, 0, number, len(text), now_us) + text


def _column(code: str, values: list[int]) -> bytes:
    column = array(code, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()
