"""What did the overlay say at one moment, while it goes on to change?"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING

from truenext.model.batch import NO_CAUSES
from truenext.model.record import CONTENTS_LANE_KEY, message_key, sequence_of
from truenext.store.segment_index import find_mark, merge_causes
from truenext.store.spans import unpack_extent, unpack_span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from truenext.model.batch import Causes, Mark
    from truenext.store.changes import Changes
    from truenext.store.segment_index import SegmentIndex
    from truenext.store.spans import LaneSpans, Span


class OverlayView:
    """What the overlay says of one lane, or of some messages, at one moment, while it goes on to change; see
    `Overlay.view`.

    Read without a lock, but for contents. Whatever changes is noted here before it is changed there, so that it is here
    once it is seen.
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
        """`spans` has sequence, segment and packed span of each; `keys` are theirs, None if all are of one lane."""
        self._lanes = lanes
        self._spans = spans
        self._keys = keys
        # Once they have moved the overlay has these no more.
        self._contents = contents
        self._removed_contents: dict[bytes, Span] = {}
        # What a layer gets later is not of this moment.
        self._removed = [index.removed for index in indexes if index.removed]
        self._marks = [index.marks for index in reversed(indexes) if index.marks]
        self._causes = [index.causes for index in reversed(indexes) if index.causes]
        self._removed_since: set[bytes] = set()
        self._marks_before: dict[bytes, Mark | None] = {}
        self._causes_before: dict[bytes, Causes] = {}

    def keys(self) -> list[bytes]:
        """Of the first messages that the journal has, in order."""
        if self._keys is not None:
            return self._keys
        (lane,) = self._lanes
        return [message_key(lane, sequence) for sequence, _, _ in self._spans]

    def extents(self) -> list[tuple[int, int, int]]:
        """Where they are: segment, offset and length."""
        return [unpack_extent(segment, packed) for _, segment, packed in self._spans]

    def is_removed(self, key: bytes) -> bool:
        """A message of the checkpoint was removed since."""
        return any(key in removed for removed in self._removed) and key not in self._removed_since

    def mark(self, key: bytes) -> Mark | None:
        """What the journal says of the message, if anything."""
        if not self._marks:
            return None
        mark = find_mark(key, self._marks)
        return self._marks_before.get(key, mark)

    def causes(self, key: bytes) -> Causes:
        """What the journal says of why consumers failed with the message; the checkpoint may say more."""
        if not self._causes:
            return NO_CAUSES
        causes = merge_causes(key, self._causes)
        return self._causes_before.get(key, causes)

    def content(self, key: bytes) -> Span | None:
        """Where the journal has, or had, a content. Not while the overlay changes."""
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
        """These are about to happen."""
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
    """What the overlay says of timers at one moment, while it goes on to change. Read without a lock: only the newest
    layer's timers change, and of those this has a copy.
    """

    def __init__(self, indexes: tuple[SegmentIndex, ...]) -> None:
        self._older = [index for index in indexes[:-1] if index.timers]
        self._newest = dict(indexes[-1].timers) if indexes else {}

    def overrides(self, timer: bytes) -> bool:
        """What the checkpoint says of it does not count."""
        return timer in self._newest or any(timer in index.timers for index in self._older)

    def iter_after(self, after: bytes, checkpoint_timers: Iterator[bytes]) -> Iterator[bytes]:
        """Those that are set, in order, laid over what the checkpoint has."""
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
