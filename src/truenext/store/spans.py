"""Positions of a lane's messages in the journal, by sequence.

A message takes 16 bytes, in two arrays for each lane and segment. One object for each message would take too much
memory, because half a gigabyte of journal can hold very many messages.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import NamedTuple

_COMPACTION_MIN = 64
"""Number of entries in a chunk, removed ones included, above which removed entries may be taken out."""


class Span(NamedTuple):
    """Position of a record in the journal."""

    segment: int
    offset: int
    length: int
    is_transient: bool


def unpack_span(segment: int, packed: int) -> Span:
    return Span(*unpack_extent(segment, packed), bool(packed & 1))


def unpack_extent(segment: int, packed: int) -> tuple[int, int, int]:
    """Return segment, offset and length of a packed span in this segment."""
    return segment, packed >> 32, packed >> 1 & 0x7FFFFFFF


class LaneSpans:
    """Positions of one lane's messages in one segment. Such an object is a chunk of a JournalLane."""

    __slots__ = ("lane", "live_count", "packed", "segment", "sequences")

    def __init__(self, segment: int, lane: JournalLane) -> None:
        self.segment = segment
        self.lane = lane
        self.sequences = array("Q")
        """Sequences of the messages, in ascending order."""
        self.packed = array("Q")
        """Packed span of each message: one number for its offset, its length and its kind. 0 for a removed message."""
        self.live_count = 0

    def insert(self, sequence: int, packed: int) -> None:
        """Insert a message in order of sequence. Only a salvage calls this method; a broker's sequences rise, so that
        each new message is appended."""
        at = bisect_left(self.sequences, sequence)
        if self.sequences[at] == sequence:
            self.packed[at] = packed
        else:
            self.sequences.insert(at, sequence)
            self.packed.insert(at, packed)

    def is_transient(self, at: int) -> bool:
        return bool(self.packed[at] & 1)

    def remove(self, at: int) -> int:
        """Remove a message, and return the length of its record."""
        packed = self.packed
        length = packed[at] >> 1 & 0x7FFFFFFF
        packed[at] = 0
        self.live_count -= 1
        if self.live_count * 4 < len(packed) > _COMPACTION_MIN:
            # Keeps memory, and the removed entries that a page skips, in proportion to the live ones.
            live = [n for n, one in enumerate(packed) if one]
            self.sequences = array("Q", [self.sequences[n] for n in live])
            self.packed = array("Q", [packed[n] for n in live])
        return length


class JournalLane:
    """Positions of one lane's messages in all segments of the journal."""

    __slots__ = ("chunks", "last")

    def __init__(self) -> None:
        self.chunks: list[LaneSpans] = []
        """Chunks of the lane, oldest segment first. A chunk is removed by replacing the list: one thread may check a
        batch while another checkpoints earlier ones."""
        self.last = 0
        """Highest sequence put so far."""

    def find(self, sequence: int, last: tuple[LaneSpans, int] | None = None) -> tuple[LaneSpans, int] | None:
        """Return a message's chunk, and the index in the chunk; None if the journal does not have the message. `last`
        is an earlier result. If it is for the message before this one, the search is quick."""
        if last is not None:
            chunk, at = last[0], last[1] + 1
            if at < len(chunk.sequences) and chunk.sequences[at] == sequence and chunk.packed[at]:
                return chunk, at
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
        """Return sequence, segment and packed span of up to `limit` messages after `after_sequence`, in order."""
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
                # Never in a broker, which puts the messages of a lane in order.
                found.sort()
        return found[:limit]
