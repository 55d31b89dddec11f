"""How do bytes become durable with one write? A write-ahead journal: batches in order, each durable before the next.

It is a row of segments, files of one size that are allocated and filled with zeros before they are used, so that
making a batch durable is one write of data and nothing else. A segment that is no longer needed becomes a spare, and
a later one again without being allocated anew.

    00000000000000a7.journal    segment 0xa7
    spare-*                     nothing that counts

A segment is a row of frames (frame.py) from its beginning on. What stands behind the last frame is zeros, what a crash
left of one that was not confirmed, or what an earlier life of the file left.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock

from truenext.errors import StoreError
from truenext.model.checksum import crc32
from truenext.model.events import chunk_position
from truenext.store.folder import allocate, clear, sync_folder, write
from truenext.store.frame import (
    CHECKSUM,
    FRAME,
    REST,
    SEGMENT_OFFSET,
    describe_cut,
    has_flipped_bit,
    may_follow,
    payload_at,
    size_for_first_frame,
)
from truenext.store.store_errors import damage_error

SEGMENT_BYTES = 32 * 1024 * 1024
"""Size of a segment; larger than nearly every batch. One that is larger still gets a segment of its own size."""

SPARES_MAX = 2
"""Spare segments kept; more are deleted."""

SUSPECTS_MAX = 1000
"""Places behind the last frame that are looked at closely: what a sender put into a body must not cost hours."""

WRITE_BYTES_MAX = 1024 * 1024
"""Bytes of a payload that are copied to be written together; a larger one takes several writes."""

READ_BYTES_MAX = 256 * 1024
"""Bytes read together, or one record."""

READ_GAP_MAX = 4 * 1024
"""Bytes between two records that are read with them, rather than asking the system twice."""


class Journal:
    """`append` is for one thread; `read_extents` for any; the segments it reads must not be released meanwhile."""

    def __init__(self, folder: Path, *, salt: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        """`salt` is any u32 that stays the same for the life of the journal.

        Raises: OSError
        """
        self._folder = folder
        self._salt = salt
        self._segment_bytes = segment_bytes
        self._files: dict[int, int] = {}
        """Open file of each segment, oldest first."""
        self._sizes: dict[int, int] = {}
        """Bytes of each segment's file."""
        self._end = 0
        """Where the next frame goes, in the newest segment."""
        self._last_start = 0
        """Where the last frame that was replayed begins in it, or its beginning."""
        self._size = 0
        """Size of the newest segment."""
        self._number = 0
        """Number of the last frame."""
        self._last_frames: dict[int, int] = {}
        """Number of the last frame in or before each segment."""
        self._newest = 0
        self._spare_count = 0
        self._spares_lock = Lock()
        for spare in folder.glob("spare-*"):
            if spare.stat().st_size == segment_bytes:
                self._spare_count += 1
            else:
                spare.unlink()

    # ---- Recovery ----

    def replay(self, after_segment: int, after_number: int) -> Iterator[tuple[int, int, memoryview]]:
        """Segment, offset and payload of every frame behind `after_segment`, whose last frame was `after_number`.

        To be read to its end, once; then, if what was read counts, `finish_replay`. Older segments become spares.

        Raises: StoreError if a frame is damaged, OSError
        """
        self._number = after_number
        self._newest = after_segment
        paths = {int(path.stem, 16): path for path in sorted(self._folder.glob("*.journal"))}
        # The newest segment is never released.
        if after_segment and max(paths, default=0) <= after_segment:
            raise self._damage(f"segment {after_segment + 1:016x} is missing")
        for segment in [segment for segment in paths if segment <= after_segment]:
            self._make_spare(paths.pop(segment))
        for segment, path in paths.items():
            if segment != self._newest + 1:
                raise self._damage(f"segment {self._newest + 1:016x} is missing")
            self._files[segment] = os.open(path, os.O_RDWR | os.O_DSYNC | os.O_CLOEXEC)
            self._sizes[segment] = os.fstat(self._files[segment]).st_size
            self._newest = segment
            yield from self._replay_segment(segment)
            self._last_frames[segment] = self._number

    def finish_replay(self) -> None:
        """What was replayed counts from here on; before that nothing is appended.

        Raises: OSError
        """
        if self._files:
            self._rewrite_last()
            self._clear_tail()

    def _replay_segment(self, segment: int) -> Iterator[tuple[int, int, memoryview]]:
        size = self._sizes[segment]
        self._check_size(segment, self._segment_bytes)
        buffer = _read_all(self._files[segment], size)
        content = memoryview(buffer)
        offset = 0
        self._last_start = 0
        while (payload := payload_at(content, offset, segment, self._number + 1, self._salt)) is not None:
            self._number += 1
            self._last_start = offset
            yield segment, offset + FRAME.size, payload
            offset += FRAME.size + len(payload)
        self._end = offset
        self._size = size
        self._check_nothing_after(buffer, segment, offset)
        if has_flipped_bit(content, offset, segment, self._number + 1, self._salt):
            raise self._damage(
                f"one bit of frame {self._number + 1} at byte {offset} of segment {segment:016x} is wrong"
            )
        self._check_size(segment, size_for_first_frame(content, segment, self._number + 1))

    def _check_size(self, segment: int, expected: int) -> None:
        size = self._sizes[segment]
        if size < expected:
            raise self._damage(describe_cut(segment, size, expected))

    def _check_nothing_after(self, content: bytearray, segment: int, end: int) -> None:
        """A crash can only tear the last frame, so a good frame behind a bad one means that a disk lost something."""
        whole = memoryview(content)
        needle = struct.pack("<Q", segment)
        at = content.find(needle, end + SEGMENT_OFFSET)
        suspects = 0
        while at >= 0 and suspects < SUSPECTS_MAX:
            start = at - SEGMENT_OFFSET
            if start + FRAME.size <= len(content):
                number = FRAME.unpack_from(content, start)[3]
                if may_follow(number, self._number, start - end):
                    suspects += 1
                    if payload_at(whole, start, segment, number, self._salt) is not None:
                        raise self._damage(
                            f"frame {self._number + 1} at byte {end} of segment {segment:016x} is unreadable, "
                            f"and frame {number} after it is readable"
                        )
            at = content.find(needle, at + 1)

    def _rewrite_last(self) -> None:
        """The last frame may be in the system's memory only: its write failed, or the broker was killed meanwhile. Now
        that it counts it must not be lost. To sync the file would not do, as a system tells of a failure only once.
        """
        file = self._files[self._newest]
        for offset in range(self._last_start, self._end, WRITE_BYTES_MAX):
            write(file, os.pread(file, min(WRITE_BYTES_MAX, self._end - offset), offset), offset)

    def _clear_tail(self) -> None:
        """What a crash left of a frame that was not confirmed must not stand behind those to come."""
        file = self._files[self._newest]
        for offset in range(self._end, self._size, WRITE_BYTES_MAX):
            end = min(offset + WRITE_BYTES_MAX, self._size)
            if os.pread(file, end - offset, offset).strip(b"\0"):
                clear(file, offset, end)

    def _damage(self, problem: str) -> StoreError:
        return damage_error("journal", problem, self._folder.parent)

    # ---- Work ----

    @property
    def last_frame_number(self) -> int:
        """Of the last frame; 0 is none yet."""
        return self._number

    @property
    def newest_segment(self) -> int:
        """Number of the segment that frames go to; 0 is none yet."""
        return self._newest

    @property
    def segments(self) -> list[int]:
        """Oldest first."""
        return list(self._files)

    @property
    def needs_spare(self) -> bool:
        return not self._spare_count

    @property
    def size(self) -> int:
        """Bytes of its segments, those that nothing was written to included."""
        return sum(list(self._sizes.values()))

    @property
    def spare_size(self) -> int:
        """Bytes of its spares."""
        return self._spare_count * self._segment_bytes

    def last_frame(self, segment: int) -> int:
        """Number of the last frame in or before the segment."""
        return self._last_frames[segment]

    def fits(self, size: int) -> bool:
        """A payload of `size` bytes fits into the newest segment."""
        return self._end + FRAME.size + size <= self._size

    def append(self, parts: list[bytes], size: int) -> tuple[int, int]:
        """Segment and offset of the payload, which is `parts`, of `size` bytes together; it is durable. Where it has
        no place, `start_segment` comes first.

        Raises: OSError; nothing may be appended after that.
        """
        segment, offset = self._newest, self._end
        file = self._files[segment]
        number = self._number + 1
        rest = REST.pack(size, segment, number)
        checksum = crc32(rest, self._salt)
        if size <= WRITE_BYTES_MAX:
            payload = b"".join(parts)
            write(file, b"%b%b%b" % (CHECKSUM.pack(crc32(payload, checksum)), rest, payload), offset)
        else:
            for part in parts:
                checksum = crc32(part, checksum)
            at = offset
            for block in _blocks([CHECKSUM.pack(checksum), rest, *parts]):
                write(file, block, at)
                at += len(block)
        self._number = self._last_frames[segment] = number
        self._end = offset + FRAME.size + size
        return segment, offset + FRAME.size

    def start_segment(self, size: int) -> None:
        """Begin a new segment with place for a payload of `size` bytes.

        Raises: OSError
        """
        segment = self._newest + 1
        path = self._path(segment)
        needed = FRAME.size + size
        with self._spares_lock:
            spare = next(self._folder.glob("spare-*"), None) if needed <= self._segment_bytes else None
            if spare is None:
                allocate(path, max(needed, self._segment_bytes))
            else:
                spare.rename(path)
                self._spare_count -= 1
        sync_folder(self._folder)
        file = os.open(path, os.O_RDWR | os.O_DSYNC | os.O_CLOEXEC)
        self._files[segment] = file
        self._last_frames[segment] = self._number
        self._newest = segment
        self._end = 0
        self._size = self._sizes[segment] = os.fstat(file).st_size

    def allocate_spare(self) -> None:
        """See to it that the next `start_segment` need not allocate. May be called while another thread appends.

        Raises: OSError
        """
        with self._spares_lock:
            if not self._spare_count:
                allocate(self._folder / "spare-0", self._segment_bytes)
                self._spare_count += 1

    def read_extents(self, extents: Iterable[tuple[int, int, int]]) -> Iterator[bytes]:
        """What is in each of the extents: segment, offset, length. Neighbours are read together.

        Raises: OSError
        """
        run: list[tuple[int, int]] = []
        in_segment = start = end = 0
        for segment, offset, length in extents:
            if run and not (
                segment == in_segment
                and end <= offset <= end + READ_GAP_MAX
                and offset + length <= start + READ_BYTES_MAX
            ):
                yield from self._read_run(in_segment, start, end, run)
                run = []
            if not run:
                in_segment, start = segment, offset
            run.append((offset, length))
            end = offset + length
        if run:
            yield from self._read_run(in_segment, start, end, run)

    def _read_run(self, segment: int, start: int, end: int, run: list[tuple[int, int]]) -> Iterator[bytes]:
        content = os.pread(self._files[segment], end - start, start)
        for offset, length in run:
            yield content[offset - start : offset - start + length]

    def free(self, segment: int) -> None:
        """The segment is not needed any more, nor read. May be called while another thread appends.

        Raises: OSError
        """
        os.close(self._files.pop(segment))
        del self._last_frames[segment], self._sizes[segment]
        with self._spares_lock:
            self._make_spare(self._path(segment))

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:016x}.journal"

    def _make_spare(self, path: Path) -> None:
        if self._spare_count >= SPARES_MAX or path.stat().st_size != self._segment_bytes:
            path.unlink()
        else:
            path.rename(self._folder / f"spare-{path.stem}")
            self._spare_count += 1


def _blocks(parts: list[bytes]) -> Iterator[bytes]:
    """The same bytes in fewer, larger parts."""
    block: list[bytes] = []
    size = 0
    for part in parts:
        if block and size + len(part) > WRITE_BYTES_MAX:
            yield b"".join(block)
            block, size = [], 0
        block.append(part)
        size += len(part)
    yield b"".join(block)


def _read_all(file: int, size: int) -> bytearray:
    content = bytearray(size)
    with memoryview(content) as whole:
        offset = 0
        while offset < size and (read := os.preadv(file, [whole[offset:]], offset)):
            offset += read
    return content


# ---- What does the journal lack at its end? ----
#
# A crash tears the last frame, which nobody was told of; so the end of a journal looks the same whether a crash tore
# that frame or a disk lost a hundred of them. What was written down elsewhere tells them apart. Each of these is a
# lower bound, which stays true whatever is written later:
#
#     checkpoint     "durable frame" names a frame that was durable: the last one of a clean stop, the first one of a
#                    run, one that reserved sequences, the last one when a segment had been checkpointed
#     history        A chunk of a batch is in the history's own files only once the frame of that batch is durable.
#                    Events are numbered over all runs; the history does not know batches and frames. So it says
#                    something only of the run that the journal ends with: it may have been switched off, deleted, or
#                    restored from a copy.
#
# Source: docs/decisions/0019-damage.md


def describe_lost_tail(
    last: int, durable_frame: int, journal_chunk: bytes, last_history_chunk: tuple[int, int] | None
) -> str:
    """What is missing after the frame `last`, in words; empty if nothing proves that anything is.

    `durable_frame` is what the checkpoint says, `journal_chunk` the last chunk that the journal has of it, and
    `last_history_chunk` run and first event of the last chunk of a batch that the history's own files have.
    """
    if last < durable_frame:
        first = last + 1
        missing = f"frame {first} is" if first == durable_frame else f"frames {first} to {durable_frame} are"
        return f"{missing} missing at its end; the checkpoint says that frame {durable_frame} was durable"
    if journal_chunk and last_history_chunk is not None:
        run, event = chunk_position(journal_chunk)
        if run == last_history_chunk[0] and event < last_history_chunk[1]:
            return (
                f"frames are missing at its end, after frame {last}: the history has a batch of run {run} that begins "
                f"with event {last_history_chunk[1]}, and the last batch of the journal begins with event {event} "
                "(a store that was restored from a copy needs the history of that copy, or none)"
            )
    return ""
