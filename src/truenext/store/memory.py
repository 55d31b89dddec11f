"""MemoryStore: a store without a disk, for tests and for brokers whose messages may end with the process.

The object has the role of the disk: a second call of `recover` acts as a restart. After a restart the store has all
applied batches. It has transient messages only if the last batch that sets `clean_stop` has set it to True.

This store checks more than a store must. A mark without a message, or a content without references, is a bug of the
broker. A disk might keep these for years unnoticed. This store rejects such a batch, so that tests find the bug.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection
from functools import partial
from itertools import islice
from threading import Lock

from truenext.errors import StoreError
from truenext.model.batch import NO_CAUSES, NO_MARK, Batch, Causes, Mark, ProducerState
from truenext.model.destination import may_rename
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import PAGE_BYTES
from truenext.model.record import (
    CONTENTS_LANE_KEY,
    LANE_KEY_SIZE,
    content_key,
    message_key,
    referenced_content_number,
    split_lane_key,
)
from truenext.store.changes import apply_names, apply_pauses, dereference_contents
from truenext.store.checkpoint_format import new_identity
from truenext.store.disk_space import level_of_limit
from truenext.store.store import JournalSize, Page, Recovered, TimerPage, UndecodedMessage


class MemoryStore:
    """Store whose messages live as long as the object."""

    def __init__(self, *, limit: int | None = None) -> None:
        """Create an empty store. Records may use `limit` bytes; None means no limit."""
        self._limit = limit
        self._used = 0
        self.journal_size: JournalSize | None = None
        self.disk_level = DiskLevel.PLENTY
        self._messages: dict[bytes, bytes] = {}
        self._transients: dict[bytes, bytes] = {}
        self._lanes: dict[bytes, dict[bytes, None]] = {}
        """Keys of all messages, persistent and transient, by lane key. Only pages sort the keys, which is cheap because
        keys are added nearly in order. A list that is always sorted would make each removal slower."""
        self._marks: dict[bytes, Mark] = {}
        self._causes: dict[bytes, Causes] = {}
        self._queues: dict[int, str] = {}
        self._paused: set[int] = set()
        self._producers: dict[str, ProducerState] = {}
        self._timers: list[bytes] = []
        """Timers, sorted, each once."""
        self._identity = new_identity()
        self._sequence_limit = 1
        self._redelivered_below = 0
        self._clean_stop = True
        self._last_applied = 0
        self._unwritable_reason = "recover() was not called"
        self._lock = Lock()
        """Held while a batch is applied, and while state is read, so that no reader sees a part of a batch."""

    @property
    def disk_level_bytes(self) -> dict[str, int]:
        return {} if self._limit is None else {"used": self._used, "limit": self._limit}

    def recover(self) -> Recovered:
        with self._lock:
            if not self._clean_stop:
                for key, record in self._transients.items():
                    self._marks.pop(key, None)
                    self._causes.pop(key, None)
                    self._remove_from_lane(key)
                    self._used -= len(record)
                self._transients.clear()
                self._update_disk_level()
            self._last_applied = 0
            self._unwritable_reason = ""
            return Recovered(
                identity=self._identity,
                clean_stop=self._clean_stop,
                sequence_limit=self._sequence_limit,
                redelivered_below=self._redelivered_below,
                queues=dict(self._queues),
                paused=set(self._paused),
                counts={lane: len(keys) for lane, keys in self._lanes.items() if lane != CONTENTS_LANE_KEY},
                producers=dict(sorted(self._producers.items(), key=lambda item: (item[1].last_used_ms, item[0]))),
            )

    def apply(self, batch: Batch) -> None:
        if self._unwritable_reason:
            raise StoreError(f"batch {batch.number} is refused: {self._unwritable_reason}")
        self._unwritable_reason = f"batch {batch.number} could not be written; start the broker again"
        with self._lock:
            self._check_references(batch)
            batch = dereference_contents(batch, lambda key: self._marks.get(key, NO_MARK))
            self._check_batch(batch)
            self._write(batch)
            self._last_applied = batch.number
        self._unwritable_reason = ""

    def begin(self, batch: Batch) -> None:
        return None

    def read_page(self, lane: bytes, after_sequence: int, limit: int, size_max: int = PAGE_BYTES) -> Page:
        with self._lock:
            after = message_key(lane, after_sequence)
            keys = sorted(key for key in self._lanes.get(lane, ()) if key > after)
            messages = (self._stored(key) for key in keys)
            return Page.of(messages, limit, size_max, as_of=self._last_applied)

    def read_messages(self, keys: Collection[bytes], size_max: int = PAGE_BYTES) -> Page:
        with self._lock:
            existing = [key for key in sorted(keys) if key in self._messages or key in self._transients]
            return Page.of(map(self._stored, existing), len(existing), size_max, as_of=self._last_applied)

    def content_references(self, numbers: Collection[int]) -> dict[int, int]:
        with self._lock:
            return {number: self._marks.get(content_key(number), NO_MARK).attempts for number in numbers}

    def read_timers(self, after: bytes, limit: int) -> TimerPage:
        with self._lock:
            following = islice(self._timers, bisect_right(self._timers, after), None)
            return TimerPage.of(following, limit, as_of=self._last_applied)

    def close(self) -> None:
        """Reject further batches. Nothing is released: `recover` opens the store again."""
        self._unwritable_reason = "the store is closed"

    def _stored(self, key: bytes) -> UndecodedMessage:
        same_kind = self._messages if key in self._messages else self._transients
        record = same_kind[key]
        number = referenced_content_number(record)
        content = same_kind.get(content_key(number), b"") if number else b""
        return UndecodedMessage(key, record, self._marks.get(key, NO_MARK), content, self._causes.get(key, NO_CAUSES))

    def _check_references(self, batch: Batch) -> None:
        """Check that each content is put with as many references as its mark says, and that `dereferenced` names each
        removed reference. Raises: StoreError"""
        for messages, puts, removes, dereferenced in (
            (self._messages, batch.puts, batch.removes, batch.dereferenced),
            (self._transients, batch.transient_puts, batch.transient_removes, batch.transient_dereferenced),
        ):
            put = Counter(content_key(number) for number in map(referenced_content_number, puts.values()) if number)
            counted = Counter({key: batch.marks[key].attempts for key in puts if key.startswith(CONTENTS_LANE_KEY)})
            _require(batch, put == counted, "puts contents whose number of references differs from their marks")
            removed = (messages.get(key, b"") for key in removes)
            removed_references = Counter(
                content_key(number) for number in map(referenced_content_number, removed) if number
            )
            _require(
                batch,
                removed_references == Counter(dereferenced),
                "has a `dereferenced` that does not match the references that it removes",
            )

    def _check_batch(self, batch: Batch) -> None:
        """Check the rest of a batch, before any of it is applied. Raises: StoreError"""
        require = partial(_require, batch)
        removes = [*batch.removes, *batch.transient_removes]
        puts = [*batch.puts, *batch.transient_puts]
        removed, put = set(removes), set(puts)
        require(
            len(removed) == len(removes)
            and self._messages.keys() >= set(batch.removes)
            and self._transients.keys() >= set(batch.transient_removes),
            "removes a message that does not exist",
        )
        require(
            len(put) == len(puts) and not any(key in self._messages or key in self._transients for key in put),
            "puts a message that exists already",
        )
        for number, name in batch.queues.items():
            require(may_rename(self._queues.get(number), name), "puts a queue that exists already")
        removed_queues = {number for number, name in batch.queues.items() if not name}
        if removed_queues:
            remaining = (self._messages.keys() | self._transients.keys()) - removed | put
            require(
                removed_queues.isdisjoint(split_lane_key(key[:LANE_KEY_SIZE])[0] for key in remaining),
                "removes the name of a queue that has messages",
            )
            require(
                removed_queues.isdisjoint(apply_pauses(self._paused, batch.paused)),
                "removes the name of a queue that is paused",
            )

        require(
            batch.paused.keys() <= self._queues.keys() | batch.queues.keys(),
            "pauses a queue that does not exist",
        )

        unmarked = set(batch.unmarks)
        for key in batch.marks.keys() - unmarked:
            exists = key in put or ((key in self._messages or key in self._transients) and key not in removed)
            require(exists, f"marks message {key.hex()}, which does not exist")
        require(batch.causes.keys() <= batch.marks.keys(), "sets causes of a message that it does not mark")
        for key in removed - unmarked:
            require(key not in self._marks, f"leaves the mark of message {key.hex()}, which it removes")

    def _write(self, batch: Batch) -> None:
        for messages, keys in ((self._messages, batch.removes), (self._transients, batch.transient_removes)):
            for key in keys:
                self._used -= len(messages.pop(key))
                self._remove_from_lane(key)
        for messages, puts in ((self._messages, batch.puts), (self._transients, batch.transient_puts)):
            for key, record in puts.items():
                messages[key] = record
                self._used += len(record)
                self._lanes.setdefault(key[:LANE_KEY_SIZE], {})[key] = None
        self._marks.update(batch.marks)
        for key, causes in batch.causes.items():
            self._causes[key] = causes.merged_onto(self._causes.get(key, NO_CAUSES))
        for key in batch.unmarks:
            self._marks.pop(key, None)
            self._causes.pop(key, None)
        self._queues = apply_names(self._queues, batch.queues)
        self._paused = apply_pauses(self._paused, batch.paused)
        for name in batch.forgotten_producers:
            self._producers.pop(name, None)
        self._producers.update(batch.producers)
        for timer in batch.cleared_timers:
            at = bisect_left(self._timers, timer)
            if self._timers[at : at + 1] == [timer]:
                del self._timers[at]
        for timer in batch.timers:
            at = bisect_left(self._timers, timer)
            if self._timers[at : at + 1] != [timer]:
                self._timers.insert(at, timer)
        self._sequence_limit = batch.sequence_limit or self._sequence_limit
        self._redelivered_below = batch.redelivered_below or self._redelivered_below
        if batch.clean_stop is not None:
            self._clean_stop = batch.clean_stop
        self._update_disk_level()

    def _update_disk_level(self) -> None:
        if self._limit is not None:
            self.disk_level = level_of_limit(self._limit, self._used, self.disk_level)

    def _remove_from_lane(self, key: bytes) -> None:
        lane = key[:LANE_KEY_SIZE]
        keys = self._lanes[lane]
        del keys[key]
        if not keys:
            del self._lanes[lane]


def _require(batch: Batch, fact: bool, problem: str) -> None:
    if not fact:
        raise StoreError(
            f"the store in memory disagrees with the broker: batch {batch.number} {problem}. This is a bug of "
            "truenext: please report it with this text"
        )
