"""Overlay: the index of the journal. The overlay has the positions of the messages in the journal, and the journal's
changes to messages in the checkpoint. Reads go to the overlay first, then to the checkpoint.

The store's state is the checkpoint, changed by the journal's segments one after the other, oldest first. Before the
oldest segment is freed, its remaining messages are copied into the checkpoint. The overlay is only an index, and does
not use the disk. The threads of embedded.py and checkpointer.py call it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import islice
from sys import getsizeof

from truenext.model.batch import NO_CAUSES, Causes, Mark, ProducerState
from truenext.model.record import CONTENTS_LANE_KEY, LANE_KEY_SIZE, message_key, sequence_of, split_message_key
from truenext.store.changes import (
    PUT_HEADER_BYTES,
    PUTS_OFFSET,
    Changes,
    RareChanges,
    apply_names,
    apply_pauses,
    causes_of,
)
from truenext.store.spans import JournalLane, LaneSpans, Span, unpack_extent, unpack_span
from truenext.store.store import Recovered

_PUT_BYTES = 20
_CHUNK_BYTES = 1000
"""Estimated bytes of memory for a chunk without messages. A chunk (LaneSpans) has the positions of one lane's messages
in one segment."""
_KEY_BYTES = 200
_MARK_BYTES = 400
_TIMER_BYTES = 200
_NAME_BYTES = 400
"""Estimated bytes of memory for a producer or a queue. Each character of its name takes up to four bytes more."""
_RESOLVED_BYTES = 44
"""Estimated bytes of memory for one resolved COMMIT of a producer."""


class Overlay:
    """Index of all segments. All changes, and the making of views, need the store's lock. Any thread may read a
    view."""

    def __init__(self) -> None:
        self._lanes: dict[bytes, JournalLane] = {}
        self.indexes: tuple[SegmentIndex, ...] = ()
        """Segment indexes, oldest first. A change replaces the tuple, so that a reader can keep an old one."""
        self.views: set[OverlayView] = set()
        """Views that are being read. Each of these views is notified of every change. A view is removed when its reader
        is done."""
        self.last_checkpoint_segment = 0
        """Number of the last segment whose messages are in the checkpoint, or are being copied there."""

    # ---- Changes of a batch ----

    @property
    def memory(self) -> int:
        """Estimated bytes of memory of all segment indexes; the true number is lower."""
        return sum(index.memory for index in self.indexes)

    def apply_changes(self, changes: Changes, segment: int, offset: int) -> None:
        """Apply the changes of a batch. The payload of the batch is at `offset` in `segment`."""
        for view in self.views:
            view.save_before(changes)
        indexes = self.indexes
        index = indexes[-1] if indexes and indexes[-1].segment == segment else self._new_index(segment)
        index.records += changes.count
        rare = changes.rare
        if rare is not None and rare.drops_transients:
            self._drop_transients()
        # Removes before puts: a broker never uses a key again, but here one batch may remove a key and put it again.
        if changes.removes:
            self._remove(changes.removes, index, is_transient=False)
        if changes.transient_removes:
            self._remove(changes.transient_removes, index, is_transient=True)
        at = offset + PUTS_OFFSET
        if changes.puts:
            at = self._put(changes.puts, index, at, is_transient=False)
        if changes.transient_puts:
            self._put(changes.transient_puts, index, at, is_transient=True)
        if rare is not None:
            self._add_rare(rare, index)

    def _put(self, puts: list[tuple[bytes, int]], index: SegmentIndex, at: int, *, is_transient: bool) -> int:
        chunks, start = index.chunks, at
        index.memory += _PUT_BYTES * len(puts)
        chunk_key: bytes | None = None
        for key, length in puts:
            at += PUT_HEADER_BYTES
            lane_key, sequence = split_message_key(key)
            if lane_key != chunk_key:
                chunk_key = lane_key
                chunk = chunks.get(lane_key) or self._new_chunk(lane_key, index)
                sequences, lane = chunk.sequences, chunk.lane
            packed = at << 32 | length << 1 | is_transient
            if sequence > lane.last:
                lane.last = sequence
            if not sequences or sequence > sequences[-1]:
                sequences.append(sequence)
                chunk.packed.append(packed)
            else:
                chunk.insert(sequence, packed)
            chunk.live_count += 1
            at += length
        index.live_bytes += at - start
        return at

    def _new_chunk(self, lane_key: bytes, index: SegmentIndex) -> LaneSpans:
        lane = self._lanes.get(lane_key)
        if lane is None:
            lane = self._lanes[lane_key] = JournalLane()
        chunk = index.chunks[lane_key] = LaneSpans(index.segment, lane)
        index.memory += _CHUNK_BYTES
        lane.chunks.append(chunk)
        return chunk

    def _remove(self, keys: list[bytes], index: SegmentIndex, *, is_transient: bool) -> None:
        for at, segment in enumerate(self._delete(keys)):
            if segment <= self.last_checkpoint_segment:
                index.removed[keys[at]] = is_transient
                index.memory += _KEY_BYTES

    def _delete(self, keys: Iterable[bytes]) -> list[int]:
        """Remove messages, and return the number of each one's segment; 0 if the journal does not have the message."""
        segments: list[int] = []
        known_key, lane, found = b"", None, None
        index: SegmentIndex | None = None
        for key in keys:
            lane_key, sequence = split_message_key(key)
            if lane_key != known_key:
                known_key, lane, found = lane_key, self._lanes.get(lane_key), None
            found = None if lane is None else lane.find(sequence, found)
            if found is None:
                segments.append(0)
                continue
            chunk, at = found
            segment = chunk.segment
            if index is None or index.segment != segment:
                index = next(index for index in self.indexes if index.segment == segment)
            index.live_bytes -= PUT_HEADER_BYTES + chunk.remove(at)
            segments.append(segment)
            # The newest index keeps an empty chunk, which may be used again at once.
            if not chunk.live_count and index is not self.indexes[-1]:
                self._drop_chunk(lane_key, index)
        return segments

    def _drop_chunk(self, lane_key: bytes, index: SegmentIndex) -> None:
        lane, dropped = self._lanes[lane_key], index.chunks.pop(lane_key)
        lane.chunks = [chunk for chunk in lane.chunks if chunk is not dropped]
        if not lane.chunks:
            del self._lanes[lane_key]

    def _add_rare(self, rare: RareChanges, index: SegmentIndex) -> None:
        marks = len(index.marks)
        index.marks.update(rare.marks)
        # Only new keys: the mark of a content changes as often as it has references.
        index.memory += _MARK_BYTES * (len(index.marks) - marks)
        if rare.causes:
            self._add_causes(rare, index)
        for key in rare.unmarks:
            for one in self.indexes:
                one.marks.pop(key, None)
                one.causes.pop(key, None)
        index.queues.update(rare.queues)
        index.paused.update(rare.paused)
        for name in rare.forgotten_producers:
            index.producers.pop(name, None)
            index.forgotten_producers.add(name)
        index.producers.update(rare.producers)
        # A timer that is cleared and set in the same batch is set.
        index.timers.update(dict.fromkeys(rare.cleared_timers, False))
        index.timers.update(dict.fromkeys(rare.timers, True))
        index.memory += _TIMER_BYTES * (len(rare.cleared_timers) + len(rare.timers))
        index.sequence_limit = rare.sequence_limit or index.sequence_limit
        index.redelivered_below = rare.redelivered_below or index.redelivered_below
        if rare.clean_stop is not None:
            index.clean_stop = rare.clean_stop
        index.memory += sum(
            _NAME_BYTES + 4 * len(name) for name in (*rare.queues.values(), *rare.producers, *rare.forgotten_producers)
        )
        index.memory += sum(_RESOLVED_BYTES * len(state.resolved) for state in rare.producers.values())

    def _add_causes(self, rare: RareChanges, index: SegmentIndex) -> None:
        for key, causes in causes_of(rare).items():
            index.causes[key] = causes.merged_onto(index.causes.get(key, NO_CAUSES))
        index.memory += _KEY_BYTES * len(rare.causes) + sum(map(getsizeof, rare.texts))

    def _drop_transients(self) -> None:
        keys = [key for key, span in self.messages() if span.is_transient]
        self._delete(keys)
        for key in keys:
            for index in self.indexes:
                index.marks.pop(key, None)
                index.causes.pop(key, None)

    def _new_index(self, segment: int) -> SegmentIndex:
        if self.indexes:
            before = self.indexes[-1]
            for lane_key in [lane_key for lane_key, chunk in before.chunks.items() if not chunk.live_count]:
                self._drop_chunk(lane_key, before)
        index = SegmentIndex(segment)
        self.indexes = (*self.indexes, index)
        return index

    # ---- Reading ----

    def find(self, keys: Iterable[bytes]) -> list[tuple[LaneSpans, int] | None]:
        """Return for each key the chunk (LaneSpans) that has the message, and the index of the message in the chunk;
        None if the journal does not have the message."""
        all_found: list[tuple[LaneSpans, int] | None] = []
        known_key, lane, found = b"", None, None
        for key in keys:
            lane_key, sequence = split_message_key(key)
            if lane_key != known_key:
                known_key, lane, found = lane_key, self._lanes.get(lane_key), None
            found = None if lane is None else lane.find(sequence, found)
            all_found.append(found)
        return all_found

    def is_transient(self, key: bytes) -> bool | None:
        """Return whether the message with this key is transient; None if the journal does not have it."""
        (found,) = self.find((key,))
        return None if found is None else found[0].is_transient(found[1])

    def view(self, lane: bytes, after_sequence: int, limit: int) -> OverlayView:
        """Return a view of a lane as it is now: up to `limit` messages in the journal after `after_sequence`, and the
        journal's changes to the lane's messages in the checkpoint."""
        found = self._lanes.get(lane)
        spans = found.find_after(after_sequence, limit) if found is not None else []
        return self._add_view(OverlayView((lane,), spans, self.indexes, self._contents()))

    def view_keys(self, keys: list[bytes]) -> OverlayView:
        """Return a view of the messages with these keys, as they are now."""
        journal_keys: list[bytes] = []
        spans: list[tuple[int, int, int]] = []
        for key, found in zip(keys, self.find(keys), strict=True):
            if found is not None:
                chunk, at = found
                journal_keys.append(key)
                spans.append((chunk.sequences[at], chunk.segment, chunk.packed[at]))
        lanes = tuple({key[:LANE_KEY_SIZE] for key in keys})
        return self._add_view(OverlayView(lanes, spans, self.indexes, self._contents(), keys=journal_keys))

    def _add_view(self, view: OverlayView) -> OverlayView:
        self.views.add(view)
        return view

    def _contents(self) -> list[LaneSpans]:
        contents = self._lanes.get(CONTENTS_LANE_KEY)
        return contents.chunks[:] if contents is not None else []

    def timer_view(self) -> TimerView:
        """Return a view of the journal's timers, as they are now."""
        return TimerView(self.indexes)

    def messages(self, up_to_segment: int | None = None) -> Iterator[tuple[bytes, Span]]:
        """Yield all messages of the segments up to `up_to_segment`. Within a segment they are in key order."""
        for index in self.indexes:
            if up_to_segment is not None and index.segment > up_to_segment:
                return
            yield from iter_spans(index.segment, self.copy_segment(index.segment))

    def copy_segment(self, segment: int) -> list[tuple[bytes, array[int], array[int]]]:
        """Return a copy of a segment's index of messages, for `iter_spans`. The copy takes 16 bytes for each
        message."""
        return [
            (lane_key, index.chunks[lane_key].sequences[:], index.chunks[lane_key].packed[:])
            for index in self.indexes
            if index.segment == segment
            for lane_key in sorted(index.chunks)
        ]

    def live_bytes(self, segments: list[int]) -> int:
        """Return the bytes of the messages in these segments."""
        return sum(index.live_bytes for index in self.indexes if index.segment in segments)

    def forget_removed_transients(self) -> None:
        """Forget which transient messages the journal has removed from the checkpoint, as it drops them all."""
        for index in self.indexes:
            deleted = list(islice(index.removed.values(), index.deleted_count))
            index.deleted_count = deleted.count(False)
            index.removed = {key: False for key, is_transient in index.removed.items() if not is_transient}

    def counts(self) -> dict[bytes, int]:
        """Return the number of messages in the journal, by lane key."""
        return {key: sum(chunk.live_count for chunk in lane.chunks) for key, lane in self._lanes.items()}

    # ---- The checkpoint ----

    def remove_checkpointed(self, keys: Iterable[bytes]) -> None:
        """Remove messages from the overlay, because the checkpoint has them."""
        self._delete(keys)

    def drop_indexes(self, up_to_segment: int) -> None:
        """Remove the indexes of all segments up to `up_to_segment`, because the checkpoint has the content of these
        segments."""
        for index in self.indexes:
            if index.segment <= up_to_segment:
                for lane_key in list(index.chunks):
                    self._drop_chunk(lane_key, index)
        self.indexes = tuple(index for index in self.indexes if index.segment > up_to_segment)


def iter_spans(segment: int, copied: list[tuple[bytes, array[int], array[int]]]) -> Iterator[tuple[bytes, Span]]:
    """Yield keys and spans, in key order, from a copy that `Overlay.copy_segment` has made."""
    for lane_key, sequences, spans in copied:
        for sequence, packed in zip(sequences, spans, strict=True):
            if packed:
                yield message_key(lane_key, sequence), unpack_span(segment, packed)


# ---- The index of one segment, and several indexes over the checkpoint ----


@dataclass(slots=True, eq=False)
class SegmentIndex:
    """Index of one segment of the journal: positions of its messages, and all other changes in its batches."""

    segment: int
    records: int = 0
    """Number of changes in the segment's batches. A restart replays all of them."""
    memory: int = 0
    """Estimated bytes of memory of this index; the true number is lower."""
    live_bytes: int = 0
    """Bytes of the segment's messages, without those that were removed."""
    chunks: dict[bytes, LaneSpans] = field(default_factory=dict)
    """Positions of the segment's messages, by lane key."""
    removed: dict[bytes, bool] = field(default_factory=dict)
    """Keys of removed messages that may be in the checkpoint. The value is True for a transient message."""
    deleted_count: int = 0
    """Number of keys, from the beginning of `removed`, that are deleted from the checkpoint already."""
    marks: dict[bytes, Mark] = field(default_factory=dict)
    causes: dict[bytes, Causes] = field(default_factory=dict)
    """Causes of messages that have a mark in this segment. If a field is empty, an older index or the checkpoint may
    have the cause."""
    queues: dict[int, str] = field(default_factory=dict)
    paused: dict[int, bool] = field(default_factory=dict)
    producers: dict[str, ProducerState] = field(default_factory=dict)
    forgotten_producers: set[str] = field(default_factory=set)
    timers: dict[bytes, bool] = field(default_factory=dict)
    """Timers that were set (True) or cleared (False) in this segment. These timers override older segments and the
    checkpoint."""
    sorted_timers: list[bytes] | None = None
    """Keys of `timers`, sorted. None until the first read after a newer segment exists; from then on `timers` cannot
    change."""
    sequence_limit: int = 0
    redelivered_below: int = 0
    clean_stop: bool | None = None


def is_removed(key: bytes, indexes: tuple[SegmentIndex, ...]) -> bool:
    """Return whether the journal has removed this message, which may be in the checkpoint."""
    return any(key in index.removed for index in indexes)


def find_mark(key: bytes, marks: Iterable[dict[bytes, Mark]]) -> Mark | None:
    """Return the mark of a message from the first of `marks` that has one; None if none has."""
    for one in marks:
        mark = one.get(key)
        if mark is not None:
            return mark
    return None


def merge_causes(key: bytes, causes: Iterable[dict[bytes, Causes]]) -> Causes:
    """Return the causes of a message, merged from all of `causes`, which are ordered from new to old."""
    merged = NO_CAUSES
    for one in causes:
        before = one.get(key)
        if before is not None:
            merged = merged.merged_onto(before)
    return merged


def apply_journal(recovered: Recovered, indexes: tuple[SegmentIndex, ...]) -> Recovered:
    """Return the checkpoint's state with the changes of `indexes` applied. This state has no messages."""
    queues, producers = recovered.queues, dict(recovered.producers)
    paused = set(recovered.paused)
    for index in indexes:
        queues = apply_names(queues, index.queues)
        paused = apply_pauses(paused, index.paused)
        for name in index.forgotten_producers:
            producers.pop(name, None)
        producers.update(index.producers)
        recovered = replace(
            recovered,
            sequence_limit=max(index.sequence_limit, recovered.sequence_limit),
            redelivered_below=index.redelivered_below or recovered.redelivered_below,
            clean_stop=recovered.clean_stop if index.clean_stop is None else index.clean_stop,
        )
    by_use = sorted(producers.items(), key=lambda item: (item[1].last_used_ms, item[0]))
    return replace(recovered, queues=queues, paused=paused, producers=dict(by_use))


# ---- Views of the overlay at one moment, while it changes ----


class OverlayView:
    """Snapshot of the overlay for one lane, or for some messages.

    It is read without a lock, except for contents. Before the overlay changes, the old state is saved here. So a reader
    that already sees a change also finds the state before it.
    """

    def __init__(
        self,
        lanes: tuple[bytes, ...],
        spans: list[tuple[int, int, int]],
        indexes: tuple[SegmentIndex, ...],
        contents: list[LaneSpans],
        *,
        keys: list[bytes] | None = None,
    ) -> None:
        """Make a view. `spans` has sequence, segment and packed span of each message. `keys` are the messages' keys;
        None if all are in one lane."""
        self._lanes = lanes
        self._spans = spans
        self._keys = keys
        # The overlay drops contents once they are checkpointed.
        self._contents = contents
        self._removed_contents: dict[bytes, Span] = {}
        # Indexes that are empty now are left out: later changes are not of this moment.
        self._removed = [index.removed for index in indexes if index.removed]
        self._marks = [index.marks for index in reversed(indexes) if index.marks]
        self._causes = [index.causes for index in reversed(indexes) if index.causes]
        self._removed_since: set[bytes] = set()
        self._marks_before: dict[bytes, Mark | None] = {}
        self._causes_before: dict[bytes, Causes] = {}

    def keys(self) -> list[bytes]:
        """Return the keys of the view's messages that are in the journal, in order."""
        if self._keys is not None:
            return self._keys
        (lane,) = self._lanes
        return [message_key(lane, sequence) for sequence, _, _ in self._spans]

    def extents(self) -> list[tuple[int, int, int]]:
        """Return segment, offset and length of the record of each message in `keys`."""
        return [unpack_extent(segment, packed) for _, segment, packed in self._spans]

    def is_removed(self, key: bytes) -> bool:
        """Return whether the journal had removed this message at the moment of the view."""
        return any(key in removed for removed in self._removed) and key not in self._removed_since

    def mark(self, key: bytes) -> Mark | None:
        """Return the mark that the journal had for this message; None if it had none."""
        if not self._marks:
            return None
        mark = find_mark(key, self._marks)
        return self._marks_before.get(key, mark)

    def causes(self, key: bytes) -> Causes:
        """Return the causes that the journal had for this message. The checkpoint may have more."""
        if not self._causes:
            return NO_CAUSES
        causes = merge_causes(key, self._causes)
        return self._causes_before.get(key, causes)

    def content(self, key: bytes) -> Span | None:
        """Return the span of a content that the journal had at the moment of the view; None if the journal did not have
        the content. The caller must hold the lock, so that the overlay does not change meanwhile."""
        span = self._removed_contents.get(key)
        return span if span is not None else self._content(key)

    def _content(self, key: bytes) -> Span | None:
        sequence = sequence_of(key)
        for chunk in self._contents:
            at = bisect_left(chunk.sequences, sequence)
            if at < len(chunk.sequences) and chunk.sequences[at] == sequence and chunk.packed[at]:
                return unpack_span(chunk.segment, chunk.packed[at])
        return None

    def save_before(self, changes: Changes) -> None:
        """Save the part of the state that `changes` will replace. The overlay is about to apply `changes`."""
        for keys in (changes.removes, changes.transient_removes):
            for key in keys:
                if key.startswith(CONTENTS_LANE_KEY) and (span := self._content(key)) is not None:
                    self._removed_contents[key] = span
            self._removed_since.update(key for key in keys if key.startswith(self._lanes) and not self.is_removed(key))
        rare = changes.rare
        if rare is not None and self._marks:
            for key in (*rare.marks, *rare.unmarks):
                if key.startswith(self._lanes):
                    self._marks_before.setdefault(key, find_mark(key, self._marks))
                    if self._causes:
                        self._causes_before.setdefault(key, merge_causes(key, self._causes))


class TimerView:
    """Snapshot of the overlay's timers, read without a lock. Only the newest index's timers can change, so they are
    copied."""

    def __init__(self, indexes: tuple[SegmentIndex, ...]) -> None:
        self._older = [index for index in indexes[:-1] if index.timers]
        self._newest = dict(indexes[-1].timers) if indexes else {}

    def iter_after(self, after: bytes, checkpoint_timers: Iterator[bytes]) -> Iterator[bytes]:
        """Yield all timers after `after` that are set, in order. The journal's timers override `checkpoint_timers`."""
        sources = [_iter_after(sorted(self._newest), self._newest, after, 0)]
        for age, index in enumerate(reversed(self._older), 1):
            if index.sorted_timers is None:
                index.sorted_timers = sorted(index.timers)
            sources.append(_iter_after(index.sorted_timers, index.timers, after, age))
        last = b""
        for timer, _, is_set in merge(*sources, ((timer, len(sources), True) for timer in checkpoint_timers)):
            if timer != last:
                last = timer
                if is_set:
                    yield timer


def _iter_after(
    sorted_timers: list[bytes], timers: dict[bytes, bool], after: bytes, age: int
) -> Iterator[tuple[bytes, int, bool]]:
    for timer in islice(sorted_timers, bisect_right(sorted_timers, after), None):
        yield timer, age, timers[timer]
