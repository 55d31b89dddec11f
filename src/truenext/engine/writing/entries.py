"""Changes of entries in a batch: storing, marking and removing messages, and sharing one content among copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from truenext.engine.state.causes import KnownCauses
from truenext.engine.state.memory import ENTRY_BYTES
from truenext.engine.state.queue import UNBOUNDED, Entry, Queue
from truenext.model.batch import NO_CAUSES, Batch, Mark
from truenext.model.limits import CONTENT_BYTES_MIN
from truenext.model.message import SentMessage
from truenext.model.record import content_key, encode_record, encode_reference, message_key


def introduce_queue(batch: Batch, queue: Queue) -> None:
    """Introduce a queue, empty or not, to the store: add its number and name to the batch."""
    queue.is_known_to_store = True
    batch.queues[queue.number] = queue.name
    batch.size += len(queue.name)


def put(batch: Batch, entry: Entry) -> None:
    """Store a message with this batch. If the store does not know the queue, add the queue to the batch, too."""
    queue = entry.lane.queue
    if not queue.is_known_to_store:
        introduce_queue(batch, queue)
    message = entry.message
    assert message is not None, "what has left memory is in the store already"
    key = message_key(entry.lane.key, entry.sequence)
    if entry.content_number:
        record = encode_reference(key, entry.content_number, persistent=entry.persistent)
    else:
        record = encode_record(key, _as_stored(message, persistent=entry.persistent))
    if entry.persistent and not entry.content_number:
        # A shortcut for the most common case.
        batch.puts[key] = record
        batch.size += len(record)
    else:
        (batch.puts if entry.persistent else batch.transient_puts)[key] = record
        batch.size += len(record) + _batch_overhead_bytes(entry)
    entry.store_batch = batch.number
    if entry.causes is not None:
        # It has failed before: its causes may leave memory, too.
        mark(batch, entry, 0)


def put_run(batch: Batch, entries: list[Entry]) -> None:
    """Store new persistent messages of one queue."""
    queue = entries[0].lane.queue
    if not queue.is_known_to_store:
        introduce_queue(batch, queue)
    number, puts, size = batch.number, batch.puts, 0
    for entry in entries:
        message = entry.message
        assert message is not None, "it is new"
        key = message_key(entry.lane.key, entry.sequence)
        puts[key] = record = encode_record(key, message)
        size += len(record)
        entry.store_batch = number
    batch.size += size


def _batch_overhead_bytes(entry: Entry) -> int:
    """Return the bytes that a message takes besides its record while its batch is in memory. Only copies and transient
    messages count, because one batch may have very many of these."""
    return ENTRY_BYTES if entry.content_number or not entry.persistent else 0


def put_content(batch: Batch, number: int, message: SentMessage, copies: int, *, persistent: bool) -> None:
    """Store a content once for `copies` copies. The same batch must put each copy, with this content number and
    persistence."""
    key = content_key(number)
    record = encode_record(key, _as_stored(message, persistent=persistent))
    (batch.puts if persistent else batch.transient_puts)[key] = record
    batch.marks[key] = Mark(copies, 0)
    batch.size += len(record)


def dereference_content(batch: Batch, content: int, *, persistent: bool) -> None:
    """Remove a stored copy's reference to a content that an earlier batch has put."""
    (batch.dereferenced if persistent else batch.transient_dereferenced).append(content_key(content))


def _cancel_content_copy(batch: Batch, content: int, *, persistent: bool) -> None:
    """Count one copy less of a content that this batch stores, because the copy is removed before it is written."""
    key = content_key(content)
    copies = batch.marks[key].attempts - 1
    if copies:
        batch.marks[key] = Mark(copies, 0)
    else:
        del batch.marks[key]
        batch.size -= len((batch.puts if persistent else batch.transient_puts).pop(key))


def _as_stored(message: SentMessage, *, persistent: bool) -> SentMessage:
    """Return the message with the persistence that its record has. In a topic subscription that ends with its
    connection, all messages are stored as transient."""
    return message if message.persistent == persistent else replace(message, persistent=persistent)


def remove(batch: Batch, entry: Entry) -> None:
    """Remove a stored message with this batch. If this batch also puts the message, neither change is written."""
    key = message_key(entry.lane.key, entry.sequence)
    if entry.store_batch == batch.number:
        batch.size -= len((batch.puts if entry.persistent else batch.transient_puts).pop(key)) + _batch_overhead_bytes(
            entry
        )
        if entry.has_mark:
            batch.marks.pop(key, None)
            batch.causes.pop(key, None)
        if entry.content_number:
            _cancel_content_copy(batch, entry.content_number, persistent=entry.persistent)
        return
    if entry.content_number:
        dereference_content(batch, entry.content_number, persistent=entry.persistent)
    (batch.removes if entry.persistent else batch.transient_removes).append(key)
    if entry.has_mark:
        batch.unmarks.append(key)
    batch.size += len(key)


def mark(batch: Batch, entry: Entry, due_ms: int) -> None:
    """Store the attempts, deliveries, new causes and due time of a stored message with this batch."""
    entry.has_mark = True
    key = message_key(entry.lane.key, entry.sequence)
    batch.marks[key] = Mark(entry.attempts, entry.deliveries, due_ms, entry.was_lost)
    batch.size += len(key)
    known = entry.causes
    if known is not None and known.unstored is not NO_CAUSES:
        batch.causes[key] = known.unstored.merged_onto(batch.causes.get(key, NO_CAUSES))
        batch.size += len(known.unstored.last)
        entry.causes = KnownCauses(known.first, known.last, batch.number)


# ---- Copies of one message: a large content is stored once for all of them ----
#
# Persistent copies share a persistent content, transient copies a transient content. A crash keeps the persistent
# content with all its references, and drops the transient content with all of its own. So a message may have two
# contents, whose numbers must differ: the persistent content has the sequence of the first copy as its number, the
# transient content that of the last copy that refers to it.


class ContentNumbers(NamedTuple):
    """Numbers of a message's shared contents, persistent and transient; 0 if each record has its own content."""

    persistent: int
    transient: int


NO_CONTENTS = ContentNumbers(0, 0)


def put_shared_content(batch: Batch, message: SentMessage, queues: Sequence[Queue], first: int) -> ContentNumbers:
    """Store the content of a message once for all its copies, if it is large. Returns the content's numbers.

    The message is about to be accepted into `queues`, with consecutive sequences from `first` on. Only copies that this
    batch will store share the content.
    """
    if len(queues) < 2 or not _is_large(message):
        return NO_CONTENTS
    persistent = 0
    transient = 0
    last = 0
    for index, queue in enumerate(queues):
        if message.persistent and not queue.is_temporary:
            persistent += 1
        elif queue.lane_of(message).horizon != UNBOUNDED:
            transient += 1
            last = first + index
    if persistent > 1:
        put_content(batch, first, message, persistent, persistent=True)
    if transient > 1:
        put_content(batch, last, message, transient, persistent=False)
    return ContentNumbers(first if persistent > 1 else 0, last if transient > 1 else 0)


def put_copies(batch: Batch, copies: Sequence[Entry]) -> None:
    """Store transient copies of one message with this batch. The store must have none of these copies."""
    message = copies[0].message
    assert message is not None, "what has left memory is in the store already"
    if len(copies) > 1 and _is_large(message):
        number = max(entry.sequence for entry in copies)
        put_content(batch, number, message, len(copies), persistent=False)
        for entry in copies:
            entry.content_number = number
    for entry in copies:
        put(batch, entry)


def _is_large(message: SentMessage) -> bool:
    return len(message.body) + len(message.header) >= CONTENT_BYTES_MIN
