"""Tables of the checkpoint for one kind of messages, persistent or transient: messages, marks and counts.

Each mark belongs to a message, and each lane has the number of its messages. So damage to one table is detected by
comparison with the other tables. All methods read and write in transactions of the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path

import lmdb

from truenext.errors import StoreError
from truenext.model.batch import NO_MARK, Causes, Mark
from truenext.model.record import LANE_KEY_SIZE, message_key
from truenext.store.checkpoint_format import NUMBER, decode_mark, encode_mark
from truenext.store.checksummed import ChecksummedDatabase
from truenext.store.store import UndecodedMessage
from truenext.store.store_errors import damage_error

Marks = dict[bytes, tuple[Mark, Causes]]
"""Mark and new causes of each message, by message key."""

_KEYS_AROUND = 2
"""Number of keys that are checked on each side of a key that was not found."""


class MessageTables:
    def __init__(
        self,
        messages: lmdb._Database,
        marks: ChecksummedDatabase,
        counts: ChecksummedDatabase,
        generation: bytes,
        data: Path,
    ) -> None:
        """Use these databases. `generation` is the prefix of the keys of all messages; the prefix is empty for
        persistent messages. `data` is the data folder."""
        self.messages = messages
        self.marks = marks
        self.counts = counts
        self.generation = generation
        self._data = data

    def _damage(self, problem: str) -> StoreError:
        return damage_error("checkpoint", problem, self._data)

    def _missing(self, key: bytes) -> StoreError:
        return self._damage(f"message {key.hex()} is missing, but its mark is there")

    # ---- Reading ----

    def read_counts(self, txn: lmdb.Transaction[bytes]) -> Counter[bytes]:
        """Return the number of messages by lane key.

        Raises: StoreError if the counts do not agree with the number of stored messages
        """
        counts = Counter({lane: NUMBER.unpack(count)[0] for lane, count in self.counts.items(txn)})
        total, stored = counts.total(), txn.stat(self.messages)["entries"]
        # Messages that are not counted would never be read. Only those of earlier generations have no count.
        if total > stored or (total < stored and not self.generation):
            raise self._damage(f"the counts say {total} messages, and {stored} exist")
        return counts

    def has(self, cursor: lmdb.Cursor[bytes], key: bytes) -> bool:
        """Return whether `key`, in its stored form, is in the database of `cursor`.

        If the key is missing, its neighbours must be in order. Otherwise damage may hide the key, and an acknowledged
        message would be dispatched again.

        Raises: StoreError if the neighbours are out of order
        """
        is_positioned = cursor.set_range(key)
        if is_positioned and cursor.key() == key:
            return True
        is_ordered = not is_positioned or cursor.key() > key
        if is_ordered and (cursor.prev() if is_positioned else cursor.last()):
            is_ordered = cursor.key() < key
        if not is_ordered:
            raise self._damage(f"the keys around {key.hex()} are out of order")
        return False

    def find(self, txn: lmdb.Transaction[bytes], key: bytes) -> UndecodedMessage | None:
        """Return the message with this key, or None. Raises: StoreError if the message is missing but its mark
        exists"""
        record, value = self.record(txn, key), self.marks.get(txn, self.generation + key)
        if record is not None:
            return stored_message(key, record, value)
        if value is not None:
            raise self._missing(key)
        return None

    def record(self, txn: lmdb.Transaction[bytes], key: bytes) -> bytes | None:
        return txn.get(self.generation + key, db=self.messages)

    def mark(self, txn: lmdb.Transaction[bytes], key: bytes) -> Mark | None:
        mark = self.marks.get(txn, self.generation + key)
        return None if mark is None else decode_mark(mark)[0]

    def page(self, txn: lmdb.Transaction[bytes], lane: bytes, after_sequence: int) -> Iterator[UndecodedMessage]:
        """Yield a lane's messages after `after_sequence`, in order. If a message shares a content, the content is not
        read.

        Raises: StoreError if a message is missing or out of order, or its mark is damaged
        """
        prefix = self.generation
        cursor = txn.cursor(self.messages)
        last = prefix + message_key(lane, after_sequence)
        first = prefix + message_key(lane, after_sequence + 1)
        if not cursor.set_range(first):
            return
        marks = self.marks.iter_from(txn, first)
        mark = next(marks, None)
        lane, size = prefix + lane, len(prefix)
        for key, record in cursor.iternext():
            # Before the key is taken for the end of the lane: more of the lane may follow it.
            if key <= last or len(key) != len(last):
                raise self._damage(f"message {key.hex()} is out of order: it follows {last.hex()}")
            # A mark belongs to a message: damage to one of the two shows in the other.
            if mark is not None and mark[0] < key:
                raise self._missing(mark[0])
            if not key.startswith(lane):
                return
            last = key
            own = None
            if mark is not None and mark[0] == key:
                own = mark[1]
                mark = next(marks, None)
            yield stored_message(key[size:] if size else key, record, own)
        if mark is not None:
            raise self._missing(mark[0])

    def check_order_around(self, txn: lmdb.Transaction[bytes], key: bytes) -> None:
        """Check the order of the keys around a key that was not found. If a key there is damaged, the search may have
        missed the message.

        Raises: StoreError if the keys are out of order
        """
        cursor = txn.cursor(self.messages)
        if not (cursor.set_range(self.generation + key) or cursor.last()):
            return
        for _ in range(_KEYS_AROUND):
            if not cursor.prev():
                break
        # If there is nothing before the key either, this starts with the first.
        around = islice(cursor.iternext(values=False), 2 * _KEYS_AROUND)
        for before, after in pairwise(around):
            if before >= after:
                raise self._damage(f"message {after.hex()} is out of order: it follows {before.hex()}")

    # ---- Writing ----

    def put(self, txn: lmdb.Transaction[bytes], messages: list[tuple[bytes, bytes]]) -> None:
        """Write keys and records. Raises: StoreError if one of the keys exists already"""
        generation = self.generation
        stored = [(generation + key, record) for key, record in messages] if generation else messages
        if txn.cursor(self.messages).putmulti(stored, overwrite=False)[1] != len(messages):
            raise StoreError(
                "the store disagrees with the broker: two messages have one key. This is a bug of truenext: please "
                "report it with this text"
            )
        self._count(txn, Counter(key[:LANE_KEY_SIZE] for key, _ in messages))

    def put_marks(self, txn: lmdb.Transaction[bytes], marks: Marks) -> Marks:
        """Write the marks of messages that are in these tables, and return the other marks. An empty new cause keeps
        the stored cause."""
        not_found: Marks = {}
        cursor = txn.cursor(self.messages)
        for key, (mark, causes) in marks.items():
            stored = self.generation + key
            if not cursor.set_key(stored):
                not_found[key] = (mark, causes)
                continue
            before = self.marks.get(txn, stored)
            if before is not None:
                causes = causes.merged_onto(decode_mark(before)[1])
            self.marks.put(txn, stored, encode_mark(mark, causes))
        return not_found

    def delete(self, txn: lmdb.Transaction[bytes], keys: Iterable[bytes]) -> None:
        """Delete messages with their marks. Raises: StoreError if one of the messages is missing"""
        change: Counter[bytes] = Counter()
        for key in keys:
            stored = self.generation + key
            if not txn.delete(stored, db=self.messages):
                raise self._damage(f"message {key.hex()} is missing, and cannot be deleted")
            self.marks.delete(txn, stored)
            change[key[:LANE_KEY_SIZE]] -= 1
        self._count(txn, change)

    def _count(self, txn: lmdb.Transaction[bytes], change: Counter[bytes]) -> None:
        counts = self.counts
        for lane, difference in change.items():
            before = counts.get(txn, lane) if self.has(counts.cursor(txn), lane) else None
            count = difference + (0 if before is None else NUMBER.unpack(before)[0])
            if count:
                counts.put(txn, lane, NUMBER.pack(count))
            else:
                counts.delete(txn, lane)

    # ---- Entries of earlier generations ----

    def has_old_generations(self, txn: lmdb.Transaction[bytes]) -> bool:
        """Return whether there are messages or marks of an earlier generation."""
        return any(self._is_first_old(cursor) for cursor in self._mark_and_message_cursors(txn))

    def delete_old_generations(self, txn: lmdb.Transaction[bytes], keys_max: int) -> None:
        """Delete up to `keys_max` messages and marks of earlier generations."""
        for cursor in self._mark_and_message_cursors(txn):
            while keys_max and self._is_first_old(cursor):
                cursor.delete()
                keys_max -= 1

    def _mark_and_message_cursors(self, txn: lmdb.Transaction[bytes]) -> tuple[lmdb.Cursor[bytes], lmdb.Cursor[bytes]]:
        return self.marks.cursor(txn), txn.cursor(self.messages)

    def _is_first_old(self, cursor: lmdb.Cursor[bytes]) -> bool:
        """Move the cursor to the first entry. Return whether this entry is of an earlier generation."""
        return cursor.first() and cursor.key()[: len(self.generation)] < self.generation


def stored_message(key: bytes, record: bytes, mark: bytes | None) -> UndecodedMessage:
    """Make a message from its stored parts. `mark` is the stored value of its mark; None if it has none."""
    if mark is None:
        return UndecodedMessage(key, record, NO_MARK)
    own, causes = decode_mark(mark)
    return UndecodedMessage(key, record, own, causes=causes)
