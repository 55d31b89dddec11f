"""Where in the journal is each message of a lane?

A message costs 16 bytes here, in two arrays that each lane has of each segment; half a gigabyte of journal must not
cost memory by the number of its messages.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import NamedTuple

_COMPACTION_MIN = 64
"""Messages of a chunk, gone ones too, from which on it is worth to look for those that are gone."""


class Span(NamedTuple):
    """Where the journal has a record."""

    segment: int
    offset: int
    length: int
    is_transient: bool


def unpack_span(segment: int, packed: int) -> Span:
    return Span(*unpack_extent(segment, packed), bool(packed & 1))


def unpack_extent(segment: int, packed: int) -> tuple[int, int, int]:
    """Segment, offset and length."""
    return segment, packed >> 32, packed >> 1 & 0x7FFFFFFF


class LaneSpans:
    """The messages of one lane in one segment."""

    __slots__ = ("lane", "live_count", "packed", "segment", "sequences")

    def __init__(self, segment: int, lane: JournalLane) -> None:
        self.segment = segment
        self.lane = lane
        self.sequences = array("Q")
        """In order."""
        self.packed = array("Q")
        """The span of each but for its segment, packed into one number; 0 for one that is gone."""
        self.live_count = 0

    def insert(self, sequence: int, packed: int) -> None:
        """In front of others, as it is not in a broker; else it is appended."""
        at = bisect_left(self.sequences, sequence)
        if self.sequences[at] == sequence:
            self.packed[at] = packed
        else:
            self.sequences.insert(at, sequence)
            self.packed.insert(at, packed)

    def remove(self, at: int) -> None:
        packed = self.packed
        packed[at] = 0
        self.live_count -= 1
        if self.live_count * 4 < len(packed) > _COMPACTION_MIN:
            # So that neither memory nor a page has to do with more than a few that are gone for each that is not.
            live = [n for n, one in enumerate(packed) if one]
            self.sequences = array("Q", [self.sequences[n] for n in live])
            self.packed = array("Q", [packed[n] for n in live])


class JournalLane:
    """The messages of one lane in all segments."""

    __slots__ = ("chunks", "last")

    def __init__(self) -> None:
        self.chunks: list[LaneSpans] = []
        """Oldest segment first. One that goes is left out of a new list: a batch is checked while another thread moves
        what was before it."""
        self.last = 0
        """No sequence behind this one was ever put."""

    def find(self, sequence: int) -> tuple[LaneSpans, int] | None:
        """The chunk of a message, and where in that it is."""
        if sequence > self.last:
            return None
        for chunk in self.chunks:
            if chunk.live_count:
                sequences = chunk.sequences
                if sequences[0] <= sequence <= sequences[-1]:
                    at = bisect_left(sequences, sequence)
                    if sequences[at] == sequence and chunk.packed[at]:
                        return chunk, at
        return None

    def find_after(self, after_sequence: int, limit: int) -> list[tuple[int, int, int]]:
        """Up to `limit` triples of sequence, segment and packed span, in order."""
        found: list[tuple[int, int, int]] = []
        for chunk in self.chunks:
            if not chunk.live_count or (len(found) >= limit and found[limit - 1][0] < chunk.sequences[0]):
                continue
            segment, known = chunk.segment, len(found)
            start = bisect_right(chunk.sequences, after_sequence)
            while start < len(chunk.sequences) and len(found) - known < limit:
                end = start + limit
                pairs = zip(chunk.sequences[start:end], chunk.packed[start:end], strict=True)
                found += [(sequence, segment, packed) for sequence, packed in pairs if packed]
                start = end
            if known and len(found) > known and found[known] < found[known - 1]:
                # Not in a broker, which puts the messages of a lane in their order.
                found.sort()
        return found[:limit]
