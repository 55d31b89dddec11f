"""Journal: a write-ahead log of batches. One write makes a batch durable, before the next batch is written.

The journal is a row of segments. A segment is a file of fixed size, allocated and filled with zeros before use. So
making a batch durable is one write of data, and nothing else. A segment that is no longer needed becomes a spare
segment, which is used again without a new allocation.

    00000000000000a7.journal    segment 0xa7
    spare-*                     spare segments, content ignored
    00000000000000a6.kept       segment 0xa6, which only a log that has lost rows needs

A segment is a row of frames (frame.py) from its start. The bytes after the last frame are zeros, the rest of an
unconfirmed frame after a crash, or old data of a reused file.

The journal of a copy of a log (log.py) is durable only after `sync`, as the log has all its frames. So a crash may tear
any frame after the last `sync`: such a journal ends with the frame before, and the rest comes from the log again. For
its last frame the journal knows the digest of the log's row. The newest freed segments are kept for some time: if the
log loses rows, their frames bring them back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from truenext.errors import StoreError
from truenext.model.checksum import crc32
from truenext.model.events import chunk_position
from truenext.store.checkpoint_format import CheckpointPosition
from truenext.store.folder import allocate, clear, is_clear, sync_folder, write
from truenext.store.frame import (
    CHECKSUM,
    FRAME,
    REST,
    describe_cut,
    has_flipped_bit,
    iter_starts,
    may_follow,
    payload_at,
    size_for_first_frame,
)
from truenext.store.log import next_digest
from truenext.store.store_errors import damage_error

SEGMENT_BYTES = 32 * 1024 * 1024
"""Size of a segment. Nearly every batch is smaller. A larger batch gets a segment of its own size."""

SPARES_MAX = 2
"""Largest number of spare segments. Further ones are deleted."""

KEPT_MAX = 12
"""Largest number of freed segments that a copy of a log keeps."""

SUSPECTS_MAX = 1000
"""Maximum number of positions after the last frame that look like frames and are checked. A sender can put such bytes
into a body."""

WRITE_BYTES_MAX = 1024 * 1024
"""Largest number of bytes that one write takes. A larger payload takes several writes."""

READ_BYTES_MAX = 256 * 1024
"""Largest number of bytes that one read takes. A larger record takes a larger read."""

READ_GAP_MAX = 4 * 1024
"""Largest gap, in bytes, between two records that one read takes together. This saves system calls."""


class JournalEnd(NamedTuple):
    """Position behind the last frame of a journal."""

    segment: int
    offset: int
    frame: int
    """Number of the last frame."""


class Journal:
    """Journal in one folder. One thread calls `append`; any thread may call `read_extents`. A segment must not be freed
    while one of its records is read."""

    def __init__(self, folder: Path, *, salt: int, segment_bytes: int = SEGMENT_BYTES, is_copy: bool = False) -> None:
        """Count the spare segments, and delete spare segments of another size. `salt` is any u32 that never changes for
        this journal. `is_copy` tells whether the folder is a copy of a log.

        Raises: OSError if the folder cannot be read
        """
        self._folder = folder
        self._salt = salt
        self._segment_bytes = segment_bytes
        self._is_copy = is_copy
        self._open_flags = os.O_RDWR | os.O_CLOEXEC | (0 if is_copy else os.O_DSYNC)
        self._files: dict[int, int] = {}
        """Open file descriptor of each segment, oldest first."""
        self._sizes: dict[int, int] = {}
        self._end = 0
        """Offset in the newest segment at which the next frame starts."""
        self._last_start = 0
        """Offset of the newest segment's last replayed frame; 0 if there is none."""
        self._size = 0
        self.last_frame_number = 0
        """Number of the last frame; 0 if the journal has none."""
        self._last_frames: dict[int, int] = {}
        """Number of each segment's last frame. For a segment without frames, the number of the last frame before that
        segment."""
        self.last_digest = b""
        """Digest of the last frame's row; empty if the folder is no copy of a log."""
        self._last_digests: dict[int, bytes] = {}
        """Digests that belong to `_last_frames`."""
        self.newest_segment = 0
        """Number of the segment to which frames are appended; 0 if the journal has none."""
        self._spare_count = 0
        self._spares_lock = Lock()
        """Guards the spare and the kept segments, and each segment that becomes one of them."""
        self._kept: dict[int, int] = {}
        """Size of each kept segment, oldest first."""
        self._held: dict[int, int] = {}
        """Open file descriptor of each segment that a backup reads, oldest first. If one is freed, it is deleted."""
        for path in sorted(folder.glob("*.kept")):
            if is_copy:
                self._kept[int(path.stem, 16)] = path.stat().st_size
            else:
                path.unlink()
        for spare in folder.glob("spare-*"):
            if spare.stat().st_size == segment_bytes:
                self._spare_count += 1
            else:
                spare.unlink()

    # ---- Recovery ----

    def replay(self, position: CheckpointPosition) -> Iterator[tuple[int, int, memoryview]]:
        """Yield segment, offset and payload of each frame after the `position` of the checkpoint. Segments up to this
        position are freed. In a copy of a log, segments after a torn frame are deleted.

        Read the iterator once, to its end. Then call `finish_replay`, if the frames are accepted.

        Raises: StoreError if a frame is damaged or a segment is missing; OSError if the disk fails
        """
        after_segment = position.segment
        self.last_frame_number, self.last_digest = position.frame, position.digest
        self.newest_segment = after_segment
        paths = {int(path.stem, 16): path for path in sorted(self._folder.glob("*.journal"))}
        # The newest segment is never freed.
        if after_segment and max(paths, default=0) <= after_segment and not self._is_copy:
            raise self._damage(f"segment {after_segment + 1:016x} is missing")
        for segment in [segment for segment in paths if segment <= after_segment]:
            self._retire(paths.pop(segment))
        self._forget_unconnected(after_segment)
        for segment, path in paths.items():
            if self._is_copy and not self._continues(segment, path):
                path.unlink()
                continue
            if segment != self.newest_segment + 1:
                raise self._damage(f"segment {self.newest_segment + 1:016x} is missing")
            self._files[segment] = os.open(path, self._open_flags)
            self._sizes[segment] = os.fstat(self._files[segment]).st_size
            self.newest_segment = segment
            yield from self._replay_segment(segment)
            self._last_frames[segment] = self.last_frame_number
            self._last_digests[segment] = self.last_digest

    def finish_replay(self) -> None:
        """Accept the replayed frames: make them durable, and clear the bytes after them. Frames can be appended after
        this.

        Raises: OSError if the disk fails
        """
        if self._files:
            self._rewrite_last()
            self._clear_tail()

    def _continues(self, segment: int, path: Path) -> bool:
        """Return whether the first frame of a segment follows the last frame that was replayed."""
        if segment != self.newest_segment + 1:
            return False
        with path.open("rb") as file:
            return bool(size_for_first_frame(memoryview(file.read(FRAME.size)), segment, self.last_frame_number + 1))

    def _replay_segment(self, segment: int) -> Iterator[tuple[int, int, memoryview]]:
        size = self._sizes[segment]
        if not self._is_copy:
            self._check_size(segment, self._segment_bytes)
        buffer = _read_all(self._files[segment], size)
        content = memoryview(buffer)
        offset = 0
        self._last_start = 0
        while (payload := payload_at(content, offset, segment, self.last_frame_number + 1, self._salt)) is not None:
            self.last_frame_number += 1
            self._last_start = offset
            if self.last_digest:
                self.last_digest = next_digest(self.last_digest, (payload,))
            yield segment, offset + FRAME.size, payload
            offset += FRAME.size + len(payload)
        self._end = offset
        self._size = size
        if self._is_copy:
            return
        self._check_nothing_after(buffer, segment, offset)
        if has_flipped_bit(content, offset, segment, self.last_frame_number + 1, self._salt):
            raise self._damage(
                f"one bit of frame {self.last_frame_number + 1} at byte {offset} of segment {segment:016x} is wrong"
            )
        self._check_size(segment, size_for_first_frame(content, segment, self.last_frame_number + 1))

    def _check_size(self, segment: int, expected: int) -> None:
        size = self._sizes[segment]
        if size < expected:
            raise self._damage(describe_cut(segment, size, expected))

    def _check_nothing_after(self, content: bytearray, segment: int, end: int) -> None:
        """Check that no undamaged frame follows byte `end`. Such a frame would prove that data is lost, because a crash
        tears only the last frame. Raises: StoreError"""
        whole, last = memoryview(content), self.last_frame_number
        starts = (
            (at, number) for at, _, number in iter_starts(content, segment, end) if may_follow(number, last, at - end)
        )
        for at, number in islice(starts, SUSPECTS_MAX):
            if payload_at(whole, at, segment, number, self._salt) is not None:
                raise self._damage(
                    f"frame {last + 1} at byte {end} of segment {segment:016x} is unreadable, "
                    f"and frame {number} after it is readable"
                )

    def _rewrite_last(self) -> None:
        """Write the last frame again. If the first write failed, or the broker was killed during the write, the frame
        may be only in the system's memory. A sync would not be enough, because the system reports a failed write only
        once."""
        file = self._files[self.newest_segment]
        for offset in range(self._last_start, self._end, WRITE_BYTES_MAX):
            write(file, os.pread(file, min(WRITE_BYTES_MAX, self._end - offset), offset), offset)

    def _clear_tail(self) -> None:
        """Write zeros over the bytes of an unconfirmed frame that a crash has left, so that these bytes never follow a
        later frame."""
        file = self._files[self.newest_segment]
        for offset in range(self._end, self._size, WRITE_BYTES_MAX):
            end = min(offset + WRITE_BYTES_MAX, self._size)
            if not is_clear(os.pread(file, end - offset, offset)):
                clear(file, offset, end)

    def _damage(self, problem: str) -> StoreError:
        return damage_error("journal", problem, self._folder.parent)

    # ---- Work ----

    @property
    def segments(self) -> list[int]:
        """Numbers of the segments, oldest first."""
        return list(self._files)

    @property
    def end(self) -> JournalEnd:
        """End of the journal, for the thread that appends."""
        return JournalEnd(self.newest_segment, self._end, self.last_frame_number)

    @property
    def needs_spare(self) -> bool:
        return not self._spare_count

    @property
    def size(self) -> int:
        """Bytes of all segments, unused bytes included."""
        return sum(list(self._sizes.values()))

    def size_of(self, segments: list[int]) -> int:
        """Return the bytes of these segments, unused bytes included."""
        return sum(self._sizes[segment] for segment in segments)

    @property
    def spare_size(self) -> int:
        """Bytes of all spare segments."""
        return self._spare_count * self._segment_bytes

    def last_frame(self, segment: int) -> int:
        """Return the number of the segment's last frame. For a segment without frames, return the number of the last
        frame before the segment."""
        return self._last_frames[segment]

    def last_digest_in(self, segment: int) -> bytes:
        """Return the digest that belongs to `last_frame`; empty if the folder is no copy of a log."""
        return self._last_digests[segment]

    def fits(self, size: int) -> bool:
        """Return whether the newest segment has space for a payload of `size` bytes."""
        return self._end + FRAME.size + size <= self._size

    def append(self, parts: list[bytes], size: int, digest: bytes = b"") -> tuple[int, int]:
        """Append a payload, and return its segment and offset. On return the payload is durable, unless the folder is a
        copy of a log; then `digest` is that of the log's row. The payload consists of `parts`, which have `size` bytes
        together. If the payload does not fit, call `start_segment` first.

        Raises: OSError if the disk fails; after that nothing may be appended
        """
        segment, offset = self.newest_segment, self._end
        file = self._files[segment]
        number = self.last_frame_number + 1
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
        self.last_frame_number = self._last_frames[segment] = number
        self.last_digest = self._last_digests[segment] = digest
        self._end = offset + FRAME.size + size
        return segment, offset + FRAME.size

    def start_segment(self, size: int) -> None:
        """Start a new segment, with space for a payload of `size` bytes.

        Raises: OSError if the disk is full or fails
        """
        segment = self.newest_segment + 1
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
        file = os.open(path, self._open_flags)
        self._files[segment] = file
        self._last_frames[segment] = self.last_frame_number
        self._last_digests[segment] = self.last_digest
        self.newest_segment = segment
        self._end = 0
        self._size = self._sizes[segment] = os.fstat(file).st_size

    def sync(self) -> None:
        """Make all frames durable. Another thread may append meanwhile. To be called by the thread that calls `free`.

        Raises: OSError if the disk fails
        """
        if self._is_copy:
            for file in list(self._files.values()):
                os.fdatasync(file)

    def allocate_spare(self) -> None:
        """Allocate a spare segment if there is none. Another thread may append meanwhile.

        Raises: OSError if the disk is full or fails
        """
        with self._spares_lock:
            if not self._spare_count:
                allocate(self._folder / "spare-0", self._segment_bytes)
                self._spare_count += 1

    def read_extents(self, extents: Iterable[tuple[int, int, int]]) -> Iterator[bytes]:
        """Yield the bytes of each extent, which is a segment, an offset and a length. One read takes neighbouring
        extents.

        Raises: OSError if the disk fails
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
        """Turn a segment into a spare segment, or in a copy of a log keep it. Nothing may need or read the segment any
        more. Another thread may append meanwhile.

        Raises: OSError if the disk fails
        """
        with self._spares_lock:
            os.close(self._files.pop(segment))
            del self._last_frames[segment], self._last_digests[segment], self._sizes[segment]
            self._retire(self._path(segment))

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    # ---- Segments for a backup ----

    def hold(self, first: int, last: int) -> dict[int, int]:
        """Keep the content of the segments from `first` to `last` until `release`, and return a file descriptor of
        each. None of them may be freed before the call returns. Any thread may call it."""
        with self._spares_lock:
            for segment in range(first, last + 1):
                # A new store has none.
                if segment in self._files:
                    self._held[segment] = os.dup(self._files[segment])
            return dict(self._held)

    def release(self) -> None:
        """Keep no segments any more. Any thread may call it."""
        with self._spares_lock:
            while self._held:
                os.close(self._held.popitem()[1])

    @property
    def is_held(self) -> bool:
        """Whether segments are kept for a backup."""
        with self._spares_lock:
            return bool(self._held)

    @property
    def held_size(self) -> int:
        """Bytes of the segments that only a backup needs."""
        with self._spares_lock:
            return sum(os.fstat(file).st_size for segment, file in self._held.items() if segment not in self._files)

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:016x}.journal"

    # ---- Frames for a log that has lost rows ----

    @property
    def oldest_frame(self) -> int:
        with self._spares_lock:
            return next((first for first, _, _ in self._starts()), self.last_frame_number + 1)

    def frames_after(self, number: int) -> Iterator[bytes]:
        with ExitStack() as files:
            with self._spares_lock:
                starts = self._starts()
                following = [first for first, _, _ in starts[1:]] + [self.last_frame_number + 1]
                opened = [
                    (first, segment, files.enter_context(path.open("rb")))
                    for (first, segment, path), end in zip(starts, following, strict=True)
                    if end > number + 1
                ]
            for first, segment, file in opened:
                for found, payload in self._frames_in(memoryview(file.read()), segment, first):
                    if found == number + 1:
                        number = found
                        yield bytes(payload)
        if number < self.last_frame_number:
            raise self._damage(f"frame {number + 1} is missing or unreadable")

    def _starts(self) -> list[tuple[int, int, Path]]:
        """Return number of the first frame, segment and file of all segments with frames, oldest first."""
        paths = [(segment, self._kept_path(segment)) for segment in self._kept]
        paths += [(segment, self._path(segment)) for segment in list(self._files)]
        firsts = [(_first_frame(path, segment), segment, path) for segment, path in paths]
        return [(first, segment, path) for first, segment, path in firsts if 0 < first <= self.last_frame_number]

    def _frames_in(self, content: memoryview, segment: int, number: int) -> Iterator[tuple[int, memoryview]]:
        """Yield number and payload of the frames of a segment, from its first frame `number` on."""
        offset = 0
        while number <= self.last_frame_number:
            payload = payload_at(content, offset, segment, number, self._salt)
            if payload is None:
                return
            yield number, payload
            offset += FRAME.size + len(payload)
            number += 1

    @property
    def kept_size(self) -> int:
        """Bytes of all kept segments."""
        return sum(list(self._kept.values()))

    def delete_kept(self) -> bool:
        """Delete all kept segments, and return whether there was one. Any thread may call it."""
        with self._spares_lock:
            had_some = bool(self._kept)
            while self._kept:
                self._kept_path(self._kept.popitem()[0]).unlink()
        return had_some

    def _kept_path(self, segment: int) -> Path:
        return self._folder / f"{segment:016x}.kept"

    def _retire(self, path: Path) -> None:
        """Free the segment in the file `path`."""
        if int(path.stem, 16) in self._held:
            path.unlink()
            return
        if not self._is_copy:
            self._make_spare(path)
            return
        segment = int(path.stem, 16)
        self._kept[segment] = path.stat().st_size
        path.rename(self._kept_path(segment))
        while len(self._kept) > KEPT_MAX:
            oldest = min(self._kept)
            del self._kept[oldest]
            self._make_spare(self._kept_path(oldest))

    def _forget_unconnected(self, last: int) -> None:
        """Delete the kept segments that do not lead to segment `last` without a gap."""
        for segment in sorted(self._kept, reverse=True):
            if segment == last:
                last -= 1
            else:
                del self._kept[segment]
                self._kept_path(segment).unlink()

    def _make_spare(self, path: Path) -> None:
        if self._spare_count >= SPARES_MAX or path.stat().st_size != self._segment_bytes:
            path.unlink()
        else:
            path.rename(self._folder / f"spare-{path.stem}")
            self._spare_count += 1


def _blocks(parts: list[bytes]) -> Iterator[bytes]:
    """Join the parts to fewer, larger ones, and yield these."""
    block: list[bytes] = []
    size = 0
    for part in parts:
        if block and size + len(part) > WRITE_BYTES_MAX:
            yield b"".join(block)
            block, size = [], 0
        block.append(part)
        size += len(part)
    yield b"".join(block)


def _first_frame(path: Path, segment: int) -> int:
    """Return the number of a segment's first frame; 0 if the segment has none."""
    with path.open("rb") as file:
        header = file.read(FRAME.size)
    if len(header) < FRAME.size:
        return 0
    _, _, in_segment, number = FRAME.unpack(header)
    return int(number) if in_segment == segment else 0


def _read_all(file: int, size: int) -> bytearray:
    content = bytearray(size)
    with memoryview(content) as whole:
        offset = 0
        while offset < size and (read := os.preadv(file, [whole[offset:]], offset)):
            offset += read
    return content


# ---- Proof of frames that are missing at the end ----
#
# A crash tears the last frame, which was not confirmed. So the end of a journal looks the same whether a crash tore
# that frame or a disk lost a hundred of them. Records elsewhere tell the two apart. Each of them is a lower bound,
# which stays true whatever is written later:
#
#     checkpoint     "durable frame" names a frame that was durable: the last one of a clean stop, the first one of a
#                    run, one that reserved sequences, the last one when a segment had been checkpointed
#     history        The history's own files get a chunk of a batch only once the frame of that batch is durable.
#                    Events are numbered over all runs; the history does not know batches and frames. So it proves
#                    something only about the run that the journal ends with: it may have been switched off, deleted, or
#                    copied back.
#
# Source: docs/decisions/0019-damage.md


def describe_lost_tail(
    last: int, durable_frame: int, journal_history: bytes, last_history_chunk: tuple[int, int] | None
) -> str:
    """Describe which data is missing after frame `last`. The text is empty if nothing proves a loss. According to the
    checkpoint, frame `durable_frame` was durable. `journal_history` is the last history in the journal.
    `last_history_chunk` is the run and the first event of the last chunk of a batch in the history's own files.
    """
    if last < durable_frame:
        first = last + 1
        missing = f"frame {first} is" if first == durable_frame else f"frames {first} to {durable_frame} are"
        return f"{missing} missing at its end; the checkpoint says that frame {durable_frame} was durable"
    if journal_history and last_history_chunk is not None:
        run, event = chunk_position(journal_history)
        if run == last_history_chunk[0] and event < last_history_chunk[1]:
            return (
                f"frames are missing at its end, after frame {last}: the history has a batch of run {run} that begins "
                f"with event {last_history_chunk[1]}, and the last batch of the journal begins with event {event} "
                "(a store that was copied back needs the history of that copy, or none)"
            )
    return ""
