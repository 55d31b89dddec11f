"""Salvage of a journal: reads the batches that are readable, wherever the damage is.

Every undamaged frame counts, also one after a damaged frame. If the salt of the checksums is lost, it is computed from
the frames.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from truenext.store import changes
from truenext.store.changes import Changes
from truenext.store.checkpoint_format import CheckpointPosition
from truenext.store.frame import (
    CHECKSUM,
    FLIP_BYTES_MAX,
    FRAME,
    describe_cut,
    has_flipped_bit,
    initial_value,
    iter_starts,
    may_follow,
    payload_at,
    size_for_first_frame,
)
from truenext.store.journal import describe_lost_tail
from truenext.store.salvage.damage import DamageReport, SalvageProgress
from truenext.store.spans import Span

SEARCH_BYTES_MAX = 1 << 34
"""Number of bytes whose checksums are computed to find an undamaged frame after a damaged one. The same byte may be
counted several times. A sender can put bytes that look like frames into a body; this maximum limits the search to about
ten seconds."""

UNKNOWN_BYTES = 1 << 62
"""Number of unread bytes if the true number is unknown. Any number of frames fits into that many bytes."""

READ_BYTES = 64 * 1024
"""Size of one read. If the disk cannot read a byte, this many bytes of the journal are lost."""


class SalvagedJournal:
    """Readable part of a journal. Read `batches` once, to its end. After that `record` reads single records."""

    def __init__(self, data: Path, damage_report: DamageReport, progress: SalvageProgress) -> None:
        """Find the segments. Raises: OSError if the folder cannot be read"""
        self._damage_report = damage_report
        self._progress = progress
        self._paths = self._find_segments(data)
        self._files: dict[int, int] = {}
        """Open file descriptor of each segment read so far."""
        self._last: int | None = None
        """Number of the last frame read; None if none is known."""
        self._unread = 0
        """Number of bytes after the last readable frame, in segments before the current one."""
        self._history = b""
        """History chunk of the last batch that had one."""
        self._torn = ""
        """Note that the journal ends with a part of a batch, which a crash may have left; empty if it does not."""
        self._is_last_flipped = False
        """True if exactly one bit of the journal's last frame is wrong."""
        self._seen = 0
        """Number of bytes that were read, or that need not be read."""
        self._size = sum(path.stat().st_size for path in self._paths.values())
        progress.update("journal", 0, self._size)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def record(self, span: Span) -> bytes:
        """Read a record. Raises: OSError if the disk cannot read it"""
        return os.pread(self._files[span.segment], span.length, span.offset)

    def batches(
        self,
        position: CheckpointPosition | None,
        salt: int | None,
        segment_bytes: int,
        last_history_chunk: tuple[int, int] | None,
    ) -> Iterator[tuple[Changes, int, int]]:
        """Yield every readable batch, with its segment and its offset in the segment.

        `position` and `salt` come from the checkpoint; None if they are lost there. `segment_bytes` is the minimum size
        of a segment. `last_history_chunk` is the run and the first event of the last chunk of a batch in the history's
        own files.

        Raises: OSError if the disk fails
        """
        paths = self._paths
        if position is not None:
            for segment in [segment for segment in paths if segment <= position.segment]:
                self._seen += paths.pop(segment).stat().st_size
            if position.segment and not paths:
                self._damage_report.add_damage("journal", f"segment {position.segment + 1:016x} is missing")
                return
        if paths and salt is None:
            salt = _recover_salt(paths)
            if salt is None:
                self._damage_report.add_damage("journal", "it cannot be read without the salt of its checksums")
                return
            self._damage_report.notes_besides_damage.append(
                "the salt of the journal's checksums was computed from the journal itself"
            )
        if paths:
            assert salt is not None, "it was worked out"
            expected = position.segment + 1 if position is not None else min(paths)
            self._last = position.frame if position is not None else None
            for segment, path in paths.items():
                if segment != expected:
                    self._damage_report.add_damage(
                        "journal", f"segments {expected:016x} to {segment - 1:016x} are missing"
                    )
                    # The number of frames in them is unknown.
                    self._unread = UNKNOWN_BYTES
                expected = segment + 1
                yield from self._segment_batches(
                    self._open_segment(segment, path, salt), segment_bytes, is_newest=segment == max(paths)
                )
                self._seen += path.stat().st_size
                self._progress.update("journal", self._seen, self._size)
        self._check_end(position.durable_frame if position is not None else 0, last_history_chunk)

    def _find_segments(self, data: Path) -> dict[int, Path]:
        paths = {}
        for path in sorted((data / "journal").glob("*.journal")):
            try:
                paths[int(path.stem, 16)] = path
            except ValueError:
                self._damage_report.add_damage(f"journal/{path.name}", "its name is not that of a segment")
        return paths

    def _open_segment(self, number: int, path: Path, salt: int) -> _SegmentContent:
        file = f"journal/{path.name}"
        self._files[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        buffer, unread = _read(self._files[number])
        for at in unread:
            self._damage_report.add_damage(file, f"{READ_BYTES} bytes from byte {at} on cannot be read from the disk")
        return _SegmentContent(number, file, buffer, salt)

    def _check_end(self, durable_frame: int, last_history_chunk: tuple[int, int] | None) -> None:
        """Report damage if the journal ends too early: before frame `durable_frame`, or before the batch of the
        history's last chunk."""
        if self._is_last_flipped:
            # The last frame is known to be damaged.
            return
        lost = describe_lost_tail(self._last or 0, durable_frame, self._history, last_history_chunk)
        if lost:
            self._damage_report.add_damage("journal", lost)
        elif self._torn:
            self._damage_report.notes_besides_damage.append(self._torn)

    def _segment_batches(
        self, segment: _SegmentContent, segment_bytes: int, *, is_newest: bool
    ) -> Iterator[tuple[Changes, int, int]]:
        if segment.size < segment_bytes:
            self._damage_report.add_damage(segment.file, describe_cut(segment.number, segment.size, segment_bytes))
        offset = 0
        while True:
            number, payload = segment.frame(offset, self._last)
            if payload is None:
                next_offset = self._next_frame(segment, offset)
                if next_offset is None:
                    break
                problem = f"bytes {offset} to {next_offset - 1} cannot be read, and a good frame follows"
                self._damage_report.add_damage(segment.file, problem)
                offset = next_offset
                number, payload = segment.frame(offset, self._last)
                assert payload is not None, "it was found there"
            last = self._last
            if last is not None and number != last + 1:
                missing = f"frame {last + 1} is" if number == last + 2 else f"frames {last + 1} to {number - 1} are"
                self._damage_report.add_damage(segment.file, f"{missing} missing before byte {offset}")
            self._last = number
            self._unread = 0
            batch = self._decode(payload, offset + FRAME.size, segment.file)
            if batch is not None:
                yield batch, segment.number, offset + FRAME.size
            offset += FRAME.size + len(payload)
        self._check_tail(segment, offset, segment_bytes, is_newest=is_newest)
        self._unread += segment.size - offset

    def _check_tail(self, segment: _SegmentContent, offset: int, segment_bytes: int, *, is_newest: bool) -> None:
        """Report why no undamaged frame starts at `offset`: one bit is wrong, the end of the segment was cut off, or a
        crash has left a part of a batch that was never confirmed."""
        last = self._last
        needed = 0 if last is None else size_for_first_frame(segment.content, segment.number, last + 1)
        if last is not None and has_flipped_bit(segment.content, offset, segment.number, last + 1, segment.salt):
            self._damage_report.add_damage(segment.file, f"one bit of frame {last + 1} at byte {offset} is wrong")
            self._is_last_flipped = is_newest
        elif segment_bytes <= segment.size < needed:
            self._damage_report.add_damage(segment.file, describe_cut(segment.number, segment.size, needed))
        elif is_newest and segment.may_be_torn(offset):
            self._torn = (
                f"{segment.file} ends, at byte {offset}, with a part of a batch that was never confirmed, "
                "left by a crash; the next start removes it"
            )

    def _decode(self, payload: memoryview, offset: int, file: str) -> Changes | None:
        try:
            batch = changes.decode_changes(payload)
        except ValueError as error:
            self._damage_report.add_damage(file, f"the batch at byte {offset} cannot be read: {error}")
            return None
        self._history = batch.history or self._history
        return batch

    def _next_frame(self, segment: _SegmentContent, offset: int) -> int | None:
        """Return the offset of the first undamaged frame after `offset`; None if there is none."""
        budget = SEARCH_BYTES_MAX
        for start, size, number in iter_starts(segment.buffer, segment.number, offset):
            if self._last is None or may_follow(number, self._last, self._unread + start - offset):
                if segment.frame(start, self._last)[1] is not None:
                    return start
                budget -= min(size, segment.size - start)
            if budget < 0:
                problem = f"the bytes after byte {start} were not searched: too many of them look like frames"
                self._damage_report.add_damage(segment.file, problem)
                return None
        return None


class _SegmentContent:
    """Content of one segment, with zeros where the disk cannot read it."""

    def __init__(self, number: int, file: str, buffer: bytearray, salt: int) -> None:
        self.number = number
        self.file = file
        """Path of the segment within the data folder."""
        self.buffer = buffer
        self.content = memoryview(buffer)
        self.size = len(buffer)
        self.salt = salt

    def frame(self, offset: int, last: int | None) -> tuple[int, memoryview | None]:
        """Return number and payload of the frame at `offset`. The payload is None unless the frame is undamaged and its
        number is greater than `last`."""
        if offset + FRAME.size > self.size:
            return 0, None
        number: int = FRAME.unpack_from(self.content, offset)[3]
        if last is not None and number <= last:
            return 0, None
        return number, payload_at(self.content, offset, self.number, number, self.salt)

    def may_be_torn(self, offset: int) -> bool:
        """Return whether the bytes at `offset` may be the start of a frame of this segment, of which a crash has left
        only a part."""
        if self.size <= offset + FRAME.size:
            return False
        in_segment: int = FRAME.unpack_from(self.content, offset)[2]
        return in_segment == self.number


def _recover_salt(paths: dict[int, Path]) -> int | None:
    """Compute the salt of the checksums from the first frames of the segments. The result is the salt on which most
    frames agree; None if no two frames agree."""
    found: Counter[int] = Counter()
    for segment, path in paths.items():
        with path.open("rb", buffering=0) as file:
            content = memoryview(_read(file.fileno())[0])
        offset = 0
        for _ in range(2):
            if offset + FRAME.size > len(content):
                break
            checksum, size, in_segment, _ = FRAME.unpack_from(content, offset)
            end = offset + FRAME.size + size
            if in_segment != segment or end > len(content) or size > FLIP_BYTES_MAX:
                break
            found[initial_value(content[offset + CHECKSUM.size : end], checksum)] += 1
            offset = end
    if not found:
        return None
    (salt, votes), *_ = found.most_common(1)
    # A single frame may be damaged, and even then gives some number.
    return salt if votes > 1 else None


def _read(file: int) -> tuple[bytearray, list[int]]:
    """Return a file's bytes, and the offsets of blocks that the disk cannot read. These blocks are zeros."""
    content = bytearray(os.fstat(file).st_size)
    unread = []
    for offset in range(0, len(content), READ_BYTES):
        try:
            block = os.pread(file, READ_BYTES, offset)
        except OSError:
            unread.append(offset)
        else:
            content[offset : offset + len(block)] = block
    return content, unread
