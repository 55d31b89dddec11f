"""Disk balance of a transaction: bytes that its acknowledgements free against bytes that its sends need.

A transaction has a balance from its first SEND that finds the disk full. Source: docs/contract.md, "Memory and disk"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from truenext.engine.state.memory import ENTRY_BYTES
from truenext.engine.state.queue import Entry
from truenext.model.commands import Send
from truenext.model.destination import SPARK_PREFIX, Destination, DestinationKind
from truenext.model.limits import CONTENT_BYTES_MIN, SPARK_SURPLUS_BYTES_MAX
from truenext.model.message import SentMessage
from truenext.model.record import RECORD_OVERHEAD_BYTES, REFERENCE_SIZE

CopyCount = Callable[[Send], int]
"""Function that returns how many queues would get a copy of the message, if it were sent now."""


class DiskBalance:
    """Bytes on disk that one transaction frees and needs. The difference decides which sends are allowed while the disk
    is full."""

    __slots__ = ("_freed", "_sends_of_copies", "_sent", "_sent_to_spark", "shared_copies")

    def __init__(self) -> None:
        self._freed = 0
        self._sent = 0
        self._sent_to_spark = 0
        """Bytes sent to queues of Spark; not included in `_sent`."""
        self._sends_of_copies: list[Send] = []
        """Sends to several queues. `_sent` does not include these, because the number of copies may still change."""
        self.shared_copies: dict[int, list[Entry]] = {}
        """Acknowledged entries whose content other copies may share, by content number. The transaction frees a content
        if it acknowledges all copies."""

    # ---- Bytes freed ----

    def acknowledge(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if not entry.persistent or entry.store_batch is None:
                continue
            if entry.content_number:
                self._freed += REFERENCE_SIZE
                self.shared_copies.setdefault(entry.content_number, []).append(entry)
            else:
                self._freed += _stored_bytes(entry)

    def count_contents(self, references: Mapping[int, int]) -> None:
        """Count as freed each content of which this transaction has acknowledged all copies. `references` has the
        store's number of copies by content number."""
        for number, count in references.items():
            if count == len(self.shared_copies[number]):
                self._freed += _stored_bytes(self.shared_copies.pop(number)[0])

    # ---- Bytes needed ----

    def send(self, send: Send) -> None:
        destination = send.destination
        if destination.is_multi_queue and send.schedule is None:
            self._sends_of_copies.append(send)
        elif is_of_spark(destination):
            self._sent_to_spark += _record_bytes(send.message)
        elif destination.kind is not DestinationKind.TEMPORARY:
            self._sent += _record_bytes(send.message)

    def allows(self, send: Send, copy_count: CopyCount) -> bool:
        """Return whether the transaction, with this send, needs at most as many bytes as it frees."""
        sent, sent_to_spark = self._sent, self._sent_to_spark
        for one in (*self._sends_of_copies, send):
            size = _record_bytes(one.message)
            if one.destination.is_multi_queue and one.schedule is None:
                sent += _bytes_of_copies(size, copy_count(one))
            elif is_of_spark(one.destination):
                sent_to_spark += size
            else:
                sent += size
        return sent + max(0, sent_to_spark - SPARK_SURPLUS_BYTES_MAX) <= self._freed


def is_of_spark(destination: Destination) -> bool:
    """Return whether a queue is used by queries of Spark."""
    return destination.kind is DestinationKind.QUEUE and destination.name.startswith(SPARK_PREFIX)


def _bytes_of_copies(size: int, count: int) -> int:
    if count < 2 or size - RECORD_OVERHEAD_BYTES < CONTENT_BYTES_MIN:
        return count * size
    return size + count * REFERENCE_SIZE


def _record_bytes(message: SentMessage) -> int:
    return len(message.header) + len(message.body) + RECORD_OVERHEAD_BYTES


def _stored_bytes(entry: Entry) -> int:
    """Return the bytes of an entry's record; if copies share the content, the bytes of the content."""
    if entry.message is not None:
        return _record_bytes(entry.message)
    # The body was evicted while a consumer held the message.
    return entry.lane.queue.spilled_sizes[entry.sequence] - ENTRY_BYTES + RECORD_OVERHEAD_BYTES
