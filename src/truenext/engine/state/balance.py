"""Does a transaction take as much from the disk as it gives? Source: docs/contract.md, "Memory and disk"

Counted only where there is no room: nothing is counted before the first SEND of a transaction that finds none.
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

CopyCount = Callable[[Destination, SentMessage], int]
"""In how many queues a message would be that is sent there now."""


class DiskBalance:
    """Bytes on the disk that one transaction takes away and brings."""

    __slots__ = ("_freed", "_sends_of_copies", "_sent", "_sent_to_spark", "shared_copies")

    def __init__(self) -> None:
        self._freed = 0
        self._sent = 0
        self._sent_to_spark = 0
        """Not among `_sent`."""
        self._sends_of_copies: list[Send] = []
        """Not among `_sent` either: how many copies there would be changes."""
        self.shared_copies: dict[int, list[Entry]] = {}
        """By number, the acknowledged copies of each content that may be used by others."""

    # ---- What it takes ----

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
        """Say of contents in `shared_copies` how many copies are left in the store."""
        for number, count in references.items():
            if count == len(self.shared_copies[number]):
                self._freed += _stored_bytes(self.shared_copies.pop(number)[0])

    # ---- What it gives ----

    def send(self, send: Send) -> None:
        destination = send.destination
        if destination.is_multi_queue and send.schedule is None:
            self._sends_of_copies.append(send)
        elif is_of_spark(destination):
            self._sent_to_spark += _record_bytes(send.message)
        elif destination.kind is not DestinationKind.TEMPORARY:
            self._sent += _record_bytes(send.message)

    def allows(self, send: Send, copy_count: CopyCount) -> bool:
        """With this send as well, what it gives is no more than what it takes."""
        sent, sent_to_spark = self._sent, self._sent_to_spark
        for one in (*self._sends_of_copies, send):
            size = _record_bytes(one.message)
            if one.destination.is_multi_queue and one.schedule is None:
                sent += _bytes_of_copies(size, copy_count(one.destination, one.message))
            elif is_of_spark(one.destination):
                sent_to_spark += size
            else:
                sent += size
        return sent + max(0, sent_to_spark - SPARK_SURPLUS_BYTES_MAX) <= self._freed


def is_of_spark(destination: Destination) -> bool:
    """Spark keeps there what it reads."""
    return destination.kind is DestinationKind.QUEUE and destination.name.startswith(SPARK_PREFIX)


def _bytes_of_copies(size: int, count: int) -> int:
    if count < 2 or size - RECORD_OVERHEAD_BYTES < CONTENT_BYTES_MIN:
        return count * size
    return size + count * REFERENCE_SIZE


def _record_bytes(message: SentMessage) -> int:
    return len(message.header) + len(message.body) + RECORD_OVERHEAD_BYTES


def _stored_bytes(entry: Entry) -> int:
    """Of its record, or of the content that it shares."""
    if entry.message is not None:
        return _record_bytes(entry.message)
    # It has left memory while its consumer held it.
    return entry.lane.queue.spilled_sizes[entry.sequence] - ENTRY_BYTES + RECORD_OVERHEAD_BYTES
