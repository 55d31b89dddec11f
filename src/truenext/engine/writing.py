"""What the store is told of a message: it is there, it failed, it is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.record import encode, message_key

if TYPE_CHECKING:
    from truenext.batch import Batch
    from truenext.engine.lane import Entry


def put(batch: Batch, entry: Entry) -> None:
    """The message is to be stored; its queue is introduced to the store first if that does not know it."""
    queue = entry.queue
    if not queue.is_known_to_store:
        queue.is_known_to_store = True
        batch.queues[queue.number] = queue.name
    message = entry.message
    key = message_key(queue.lane_of(message).key, entry.sequence)
    record = encode(key, message)
    (batch.puts if message.persistent else batch.transient_puts)[key] = record
    batch.size += len(record)


def remove(batch: Batch, entry: Entry) -> None:
    """A stored message is gone."""
    message = entry.message
    key = message_key(entry.queue.lane_of(message).key, entry.sequence)
    (batch.removes if message.persistent else batch.transient_removes).append(key)
    if entry.marked:
        batch.unmarks.append(key)
    batch.size += len(key)


def mark(batch: Batch, entry: Entry) -> None:
    """How often a stored message was dispatched, and how often a consumer failed with it."""
    entry.marked = True
    key = message_key(entry.queue.lane_of(entry.message).key, entry.sequence)
    batch.marks[key] = (entry.attempts, entry.deliveries)
    batch.size += len(key)
