"""Net effect of consecutive rows of a log: the changes that compaction makes to `kept` and `fact` (layout.py).

It is a pure function of the payloads of the rows, so that two brokers that compact the same rows make the same changes.
The overlay, which is the index of a folder's journal, finds out which messages and facts of the rows are left.
"""

from __future__ import annotations

from collections.abc import Iterator

from truenext.model.batch import NO_CAUSES, NO_MARK, Causes, Mark
from truenext.model.events import chunk_position, next_event
from truenext.store.changes import PUT_HEADER_BYTES, PUTS_OFFSET, Changes, decode_changes
from truenext.store.log import KeptMessage
from truenext.store.overlay import Overlay, SegmentIndex, iter_spans

_SEGMENT = 1
"""Number of the only segment. It is greater than that of the overlay's last checkpoint, which is 0."""


class NetEffect:
    """Net effect of the rows whose payloads were added. It keeps the records of messages that are left."""

    def __init__(self) -> None:
        self._overlay = Overlay()
        self._records: dict[bytes, bytes] = {}
        """Record of each message that these rows put and do not remove."""
        self.record_bytes = 0
        self.row_count = 0
        self.drops_transients = False
        """True if all transient messages before these rows are dropped. The first row drops them."""
        self.next_history: tuple[int, int] | None = None
        """Lowest run and lowest event that these rows have not used; None if they have no history."""

    def add(self, payload: bytes) -> bool:
        """Add the next row. Return False if it must be the first one of another net effect, because it drops
        transients: the marks before it may be those of dropped messages, which cannot be told from persistent ones.

        Raises: ValueError if the payload is damaged
        """
        changes = decode_changes(memoryview(payload))
        if changes.rare is not None and changes.rare.drops_transients:
            if self.row_count:
                return False
            self.drops_transients = True
        for keys in (changes.removes, changes.transient_removes):
            if keys:
                self._remove(keys)
        self._overlay.apply_changes(changes, _SEGMENT, 0)
        self._put(payload, changes)
        if changes.history:
            self.next_history = chunk_position(changes.history)[0] + 1, next_event(changes.history)
        self.row_count += 1
        return True

    def clear(self) -> None:
        """Free the memory of the changes. Lanes of the overlay and their chunks refer to one another, and the broker's
        garbage collector seldom looks for such cycles."""
        self._overlay.drop_indexes(_SEGMENT)
        self._records.clear()

    def _remove(self, keys: list[bytes]) -> None:
        records, index = self._records, self.index
        for key in keys:
            record = records.pop(key, None)
            if record is not None:
                self.record_bytes -= len(record)
            if index.marks:
                index.marks.pop(key, None)
                index.causes.pop(key, None)

    def _put(self, payload: bytes, changes: Changes) -> None:
        at = PUTS_OFFSET
        for puts in (changes.puts, changes.transient_puts):
            for key, length in puts:
                at += PUT_HEADER_BYTES
                self._records[key] = payload[at : at + length]
                at += length
                self.record_bytes += length

    @property
    def index(self) -> SegmentIndex:
        """Changes to all facts, and `removed`: the messages to remove from `kept`, True for a transient one."""
        indexes = self._overlay.indexes
        return indexes[0] if indexes else SegmentIndex(_SEGMENT)

    @property
    def change_count(self) -> int:
        """Number of messages and facts to change."""
        index = self.index
        facts = len(index.timers) + len(index.producers) + len(index.forgotten_producers) + len(index.queues)
        return len(self._records) + len(index.removed) + len(index.marks) + facts

    def puts(self) -> Iterator[KeptMessage]:
        """Yield the messages and contents to add to `kept`, in the order of their keys."""
        index = self.index
        for key, span in iter_spans(_SEGMENT, self._overlay.copy_segment(_SEGMENT)):
            mark, causes = index.marks.get(key, NO_MARK), index.causes.get(key, NO_CAUSES)
            yield KeptMessage(key, self._records[key], span.is_transient, mark, causes)

    def marks(self) -> dict[bytes, tuple[Mark, Causes]]:
        """Return new marks and causes of messages that are in `kept`, and stay there. A cause that is empty stays as it
        is."""
        index = self.index
        return {
            key: (mark, index.causes.get(key, NO_CAUSES))
            for key, mark in index.marks.items()
            if key not in self._records
        }
