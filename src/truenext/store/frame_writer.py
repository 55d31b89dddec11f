"""Frame writer: appends batches to the journal, and to the log before, if the folder is a copy of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Condition

from truenext.store.checkpointer import Checkpointer
from truenext.store.disk_space import DiskSpace
from truenext.store.journal import Journal
from truenext.store.log import EMPTY_PAYLOAD, Log, next_digest
from truenext.store.store import Pending
from truenext.store.store_errors import STORAGE_ERRORS


class FrameWriter:
    """Writer of one journal. All methods that append return segment and offset of the payload in the journal; one
    thread calls them. They raise StoreError if the log or the checkpointer has failed, and lmdb.Error or OSError if the
    disk fails."""

    def __init__(
        self, journal: Journal, log: Log | None, checkpointer: Checkpointer, disk_space: DiskSpace, changed: Condition
    ) -> None:
        """`changed` is notified when a segment is new."""
        self._journal = journal
        self._log = log
        self._checkpointer = checkpointer
        self._disk_space = disk_space
        self._changed = changed
        self._empty_rows: list[bytes] = []
        """Digests of the empty rows that the log has behind the last batch, and the journal has not yet."""

    def append_batch(self, parts: list[bytes], records: int) -> tuple[int, int]:
        """Append a batch with `records` changes, whose payload consists of `parts`. On return the batch is durable.
        Call `append_empty_frames` when the overlay has the batch."""
        if self._log is None:
            return self.append_frame(parts, records)
        digest, self._empty_rows = self._append_to_log(self._log, parts)
        return self.append_frame(parts, records, digest)

    def begin_batch(self, parts: list[bytes], records: int) -> tuple[Pending, bytes] | None:
        """Begin to append a batch to the log alone, without waiting for anything, and return the digest of the row,
        too. When the log has the row, call `append_frame`. Return None if `append_batch` must do all."""
        journal = self._journal
        if self._log is None or self._needs_segment(sum(map(len, parts)), records):
            return None
        digest = next_digest(journal.last_digest, parts)
        pending = self._log.begin_append(journal.last_frame_number + 1, journal.last_digest, digest, parts)
        return None if pending is None else (pending, digest)

    def append_row(self, parts: list[bytes], records: int) -> tuple[int, int]:
        """Append a row that the log has to the journal alone."""
        return self.append_frame(parts, records, next_digest(self._journal.last_digest, parts))

    def append_frame(self, parts: list[bytes], records: int, digest: bytes = b"") -> tuple[int, int]:
        """Append a frame to the journal alone. `digest` is that of the log's row, if there is a log."""
        journal = self._journal
        size = sum(map(len, parts))
        if self._needs_segment(size, records):
            self._checkpointer.wait_for_segment()
            self.retry_without_ballast(partial(journal.start_segment, size))
            with self._changed:
                self._changed.notify_all()
        return journal.append(parts, size, digest)

    @property
    def has_empty_rows(self) -> bool:
        return bool(self._empty_rows)

    def append_empty_frames(self) -> None:
        """Append the frames of the empty rows behind a batch. They may start a segment, and the one before is freed if
        the overlay has no message in it."""
        for digest in self._empty_rows:
            self.append_frame([EMPTY_PAYLOAD], 0, digest)
        self._empty_rows = []

    def retry_without_ballast(self, action: Callable[[], None]) -> None:
        """Call `action`. If the disk is full, delete the ballast and call `action` again. A failed call must change
        nothing.

        Raises: lmdb.Error, OSError if the second call fails, or for another reason
        """
        try:
            action()
        except STORAGE_ERRORS as error:
            self._disk_space.delete_ballast(error)
            action()

    def _append_to_log(self, log: Log, parts: list[bytes]) -> tuple[bytes, list[bytes]]:
        """Append a row, and empty rows behind it until one is confirmed. Return the digest of the row, and those of the
        empty rows."""
        number, before = self._journal.last_frame_number, self._journal.last_digest
        digests: list[bytes] = []
        is_confirmed = False
        while not is_confirmed:
            number += 1
            digests.append(next_digest(before, parts))
            is_confirmed = log.append(number, before, digests[-1], parts)
            before, parts = digests[-1], [EMPTY_PAYLOAD]
        return digests[0], digests[1:]

    def _needs_segment(self, size: int, records: int) -> bool:
        """Return whether a payload of `size` bytes with `records` changes must go into a new segment."""
        return not self._journal.fits(size) or self._checkpointer.is_segment_full(records)
