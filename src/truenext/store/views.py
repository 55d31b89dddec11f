"""What did the overlay say at one moment, while it goes on to change?"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING

from truenext.batch import NO_CAUSES
from truenext.record import CONTENTS, message_key, sequence_of
from truenext.store.segment_index import causes_said, mark_of
from truenext.store.spans import extent_of, span_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from truenext.batch import Causes, Mark
    from truenext.store.changes import Changes
    from truenext.store.segment_index import SegmentIndex
    from truenext.store.spans import Chunk, Span


class View:
    """What the overlay says of one lane, or of some messages, at one moment, while it goes on to change; see
    `Overlay.view`.

    Read without a lock, but for contents. Whatever changes is noted here before it is changed there, so that it is here
    once it is seen.
    """

    def __init__(
        self,
        lanes: tuple[bytes, ...],
        found: list[tuple[int, int, int]],
        indexes: tuple[SegmentIndex, ...],
        contents: list[Chunk],
        *,
        keys: list[bytes] | None = None,
    ) -> None:
        """`found` has sequence, segment and packed span of each; `keys` are theirs, None if all are of one lane."""
        self._lanes = lanes
        self._found = found
        self._keys = keys
        # Once they have moved the overlay has these no more.
        self._contents = contents
        self._contents_gone: dict[bytes, Span] = {}
        # What a layer gets later is not of this moment.
        self._gone = [index.gone for index in indexes if index.gone]
        self._marks = [index.marks for index in reversed(indexes) if index.marks]
        self._causes = [index.causes for index in reversed(indexes) if index.causes]
        self._gone_since: set[bytes] = set()
        self._marks_before: dict[bytes, Mark | None] = {}
        self._causes_before: dict[bytes, Causes] = {}

    def keys(self) -> list[bytes]:
        """Of the first messages that the journal has, in order."""
        if self._keys is not None:
            return self._keys
        (lane,) = self._lanes
        return [message_key(lane, sequence) for sequence, _, _ in self._found]

    def extents(self) -> list[tuple[int, int, int]]:
        """Where they are: segment, offset and length."""
        return [extent_of(segment, packed) for _, segment, packed in self._found]

    def is_gone(self, key: bytes) -> bool:
        """A message of the checkpoint was removed since."""
        return any(key in gone for gone in self._gone) and key not in self._gone_since

    def mark(self, key: bytes) -> Mark | None:
        """What the journal says of the message, if anything."""
        if not self._marks:
            return None
        mark = mark_of(key, self._marks)
        return self._marks_before.get(key, mark)

    def causes(self, key: bytes) -> Causes:
        """What the journal says of why consumers failed with the message; the checkpoint may say more."""
        if not self._causes:
            return NO_CAUSES
        said = causes_said(key, self._causes)
        return self._causes_before.get(key, said)

    def content(self, key: bytes) -> Span | None:
        """Where the journal has, or had, a content. Not while the overlay changes."""
        span = self._contents_gone.get(key)
        return span if span is not None else self._content(key)

    def _content(self, key: bytes) -> Span | None:
        sequence = sequence_of(key)
        for chunk in self._contents:
            at = bisect_left(chunk.sequences, sequence)
            if at < len(chunk.sequences) and chunk.sequences[at] == sequence and chunk.packed[at]:
                return span_of(chunk.segment, chunk.packed[at])
        return None

    def keep(self, changes: Changes) -> None:
        """These are about to happen."""
        for keys in (changes.removes, changes.transient_removes):
            for key in keys:
                if key.startswith(CONTENTS) and (span := self._content(key)) is not None:
                    self._contents_gone[key] = span
            self._gone_since.update(key for key in keys if key.startswith(self._lanes) and not self.is_gone(key))
        rest = changes.rest
        if rest is not None and self._marks:
            for key in (*rest.marks, *rest.unmarks):
                if key.startswith(self._lanes):
                    self._marks_before.setdefault(key, mark_of(key, self._marks))
                    if self._causes:
                        self._causes_before.setdefault(key, causes_said(key, self._causes))


class TimerView:
    """What the overlay says of timers at one moment, while it goes on to change. Read without a lock: only the newest
    layer's timers change, and of those this has a copy.
    """

    def __init__(self, indexes: tuple[SegmentIndex, ...]) -> None:
        self._older = [index for index in indexes[:-1] if index.timers]
        self._newest = dict(indexes[-1].timers) if indexes else {}

    def knows(self, timer: bytes) -> bool:
        """What the checkpoint says of it does not count."""
        return timer in self._newest or any(timer in index.timers for index in self._older)

    def behind(self, after: bytes, of_checkpoint: Iterator[bytes]) -> Iterator[bytes]:
        """Those that are set, in order, laid over what the checkpoint has."""
        said = [_behind(sorted(self._newest), self._newest, after, 0)]
        for age, index in enumerate(reversed(self._older), 1):
            if index.timers_in_order is None:
                index.timers_in_order = sorted(index.timers)
            said.append(_behind(index.timers_in_order, index.timers, after, age))
        last = b""
        for timer, _, is_set in merge(*said, ((timer, len(said), True) for timer in of_checkpoint)):
            if timer != last:
                last = timer
                if is_set:
                    yield timer


def _behind(
    in_order: list[bytes], timers: dict[bytes, bool], after: bytes, age: int
) -> Iterator[tuple[bytes, int, bool]]:
    for timer in islice(in_order, bisect_right(in_order, after), None):
        yield timer, age, timers[timer]
