"""Checkpointer: a thread that copies the oldest segment's remaining messages into the checkpoint, and then frees the
segment. Messages consumed before this copy cost no write to LMDB. Between segments, the same thread deletes transient
messages that were dropped after unclean stops, and checks the disk space.

A crash may interrupt the copying at any point. Then the checkpoint has some messages that the journal still has, too.
The position in the journal is stored only by the last write for a segment. Recovery removes from the overlay the
messages that it finds in the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, tee
from threading import Condition, Thread
from typing import TypeVar

from truenext.errors import StoreError
from truenext.model.batch import NO_CAUSES
from truenext.model.disk_level import DiskLevel
from truenext.store.checkpoint import TRANSACTION_BYTES_MAX, TRANSACTION_KEYS_MAX, Checkpoint
from truenext.store.checkpoint_format import CheckpointPosition
from truenext.store.disk_space import COPY_FACTOR, DiskSpace
from truenext.store.journal import Journal
from truenext.store.overlay import Overlay, OverlayView, SegmentIndex, iter_spans, merge_causes
from truenext.store.pieces import split_into_pieces
from truenext.store.spans import Span
from truenext.store.store_errors import STORAGE_ERRORS, store_error

T = TypeVar("T")

logger = logging.getLogger(__name__)

SEGMENTS_MAX = 12
"""Number of segments above which the oldest one is checkpointed although it still has messages. Without messages it is
checkpointed earlier, and also while disk space is short and this frees some."""

LAG_SEGMENTS_MAX = 3
"""Number of additional segments that the journal may have while older ones are checkpointed. At this number batches
wait. All segments and a spare then take half a gigabyte."""

SEGMENT_RECORDS_MAX = 50_000
"""Largest number of changes in one segment, unless a single batch has more. With the number of segments this limits
what a restart replays."""

SEGMENT_MEMORY_MAX = 2_600_000
"""Estimated bytes of memory at which a segment's index gets no further batch. All indexes together take about 40 MB. If
large batches make them take more, older segments are checkpointed earlier."""

CHECK_INTERVAL_S = 1.0
"""Longest time between two checks of the disk space. Other programs may use or free space meanwhile."""

CLEANUP_INTERVAL_S = 0.01
"""Pause between two transactions that delete dropped transient messages. This work is not urgent."""


class Checkpointer:
    """Thread that makes checkpoints. Other threads call `enable`, `checkpoint_due_segments`, `wait_for_segment`,
    `is_segment_full`, `close_view` and `close`."""

    def __init__(
        self,
        journal: Journal,
        checkpoint: Checkpoint,
        overlay: Overlay,
        disk_space: DiskSpace,
        changed: Condition,
        *,
        segments_max: int,
        sync_history: Callable[[], None],
    ) -> None:
        """Make a checkpointer. `changed` is the condition that guards the overlay. `changed` is notified when a segment
        is new or checkpointed, and when a view ends for which a checkpoint waits. `sync_history` is called before a
        segment is freed."""
        self._journal = journal
        self._checkpoint = checkpoint
        self._overlay = overlay
        self._disk_space = disk_space
        self._changed = changed
        self._segments_max = segments_max
        self._sync_history = sync_history
        self._thread: Thread | None = None
        self._needs_cleanup = True
        self._blocking_views: set[OverlayView] = set()
        """Views that are being read, and may need the segment that is about to be freed."""
        self._is_closing = False
        self.is_enabled = False
        """True once the first batch is being applied. Before that, the history's own files may not have all recovered
        events."""
        self.failure: StoreError | None = None
        """Error that has ended the thread; None while it works."""

    # ---- For other threads ----

    def start(self) -> None:
        self._thread = Thread(target=self._run, name="truenext-checkpoint", daemon=True)
        self._thread.start()

    def checkpoint_due_segments(self) -> None:
        """Checkpoint segments until none is due, on the calling thread. To be called before `start`."""
        while self._is_checkpoint_due():
            self._checkpoint_segment(self._journal.segments[0])

    def work(self) -> None:
        """Do once what the thread does all the time, on the calling thread. To be called before `start`."""
        self._disk_space.allocate_reserves()
        self.checkpoint_due_segments()
        if self._needs_cleanup:
            self._clean_up()

    def close(self) -> None:
        """Stop the thread. A checkpoint in progress is finished first, unless this would wait for disk space."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def enable(self) -> None:
        """Allow checkpoints. To be called when the first batch is about to be applied."""
        with self._changed:
            self.is_enabled = True
            self._changed.notify_all()

    def is_segment_full(self, records: int) -> bool:
        """Return whether a batch with `records` changes must go into a new segment."""
        indexes = self._overlay.indexes
        if not indexes or indexes[-1].segment != self._journal.newest_segment:
            return False
        index = indexes[-1]
        return index.memory >= SEGMENT_MEMORY_MAX or (
            index.records > 0 and index.records + records > SEGMENT_RECORDS_MAX
        )

    def wait_for_segment(self) -> None:
        """Wait until the journal may have another segment.

        Raises: StoreError if checkpointing has failed
        """
        with self._changed:
            if self._thread is not None:
                self._changed.wait_for(lambda: self.failure is not None or not self._is_lagging())
            if self.failure is not None:
                raise self.failure

    def close_view(self, view: OverlayView) -> None:
        """Remove a view from the overlay, because it is no longer read."""
        with self._changed:
            self._overlay.views.discard(view)
            if view in self._blocking_views:
                self._changed.notify_all()

    def _is_lagging(self) -> bool:
        # On a full disk nothing is checkpointed, but acknowledgements go on as long as the journal has space for them.
        if self._disk_space.is_full:
            return False
        segments, segments_max = self._journal.segments, self._segments_max + LAG_SEGMENTS_MAX
        # One batch may be large: a message for all subscriptions to a topic.
        is_large = len(segments) > 1 and self._overlay.memory > segments_max * SEGMENT_MEMORY_MAX
        return len(segments) >= segments_max or is_large

    # ---- On its own thread ----

    def _run(self) -> None:
        try:
            while True:
                self._disk_space.allocate_reserves()
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._is_closing or self._is_checkpoint_due() or self._disk_space.is_spare_due,
                        timeout=CLEANUP_INTERVAL_S if self._needs_cleanup else CHECK_INTERVAL_S,
                    )
                    if self._is_closing:
                        return
                    is_due = self._is_checkpoint_due()
                if is_due:
                    self._checkpoint_segment(self._journal.segments[0])
                    continue
                if self.is_enabled and self._disk_space.level is not DiskLevel.PLENTY:
                    self._delete_removed(self._overlay.indexes)
                if self._needs_cleanup:
                    self._clean_up()
        except _Closing:
            return
        except Exception as error:
            if isinstance(error, STORAGE_ERRORS):
                failure = store_error(f"write to the store in {self._disk_space.path}", error, self._disk_space.path)
            else:
                failure = StoreError(f"the store failed: {error!r}")
            failure.__cause__ = error
            logger.critical("the journal cannot be copied into the checkpoint", extra={"reason": str(failure)})
            with self._changed:
                self.failure = failure
                self._changed.notify_all()

    def _is_checkpoint_due(self) -> bool:
        segments = self._journal.segments
        if len(segments) < 2 or not self.is_enabled:
            return False
        if len(segments) > self._segments_max or self._overlay.memory > self._segments_max * SEGMENT_MEMORY_MAX:
            return True
        if not self._overlay.live_bytes(segments[:1]):
            return True
        return self._disk_space.level is not DiskLevel.PLENTY and self._frees_space(segments[:-1])

    def _frees_space(self, segments: list[int]) -> bool:
        """Return whether the checkpoint of these segments takes no more space than it frees, and has room for the first
        one. A single message in the first segment keeps all later ones, although their messages may be gone.

        Raises: lmdb.Error, OSError if the space cannot be measured
        """
        if self._disk_space.has_backup:
            # The backup keeps the segments until it ends.
            return False
        if COPY_FACTOR * self._overlay.live_bytes(segments) > self._journal.size_of(segments):
            return False
        return COPY_FACTOR * self._overlay.live_bytes(segments[:1]) <= self._disk_space.room_for_checkpoint()

    def _checkpoint_segment(self, segment: int) -> None:
        overlay = self._overlay
        with self._changed:
            overlay.last_checkpoint_segment = segment
            copied = overlay.copy_segment(segment)
            indexes = [index for index in overlay.indexes if index.segment <= segment]
        self._delete_removed(indexes)
        for index in indexes:
            # In order, because many then share a page.
            timers = iter(sorted(index.timers.items()))
            while piece := list(islice(timers, TRANSACTION_KEYS_MAX)):
                self._write(partial(self._checkpoint.set_timers, piece))
        for are_transient in (False, True):
            spans = ((key, span) for key, span in iter_spans(segment, copied) if span.is_transient is are_transient)
            for messages in _transactions(self._read(spans), lambda message: len(message[1])):
                self._write(partial(self._checkpoint.put_messages, messages, are_transient=are_transient))
        with self._changed:
            # Copied, because removing a message takes its mark out of every index.
            marks = {key: (mark, NO_CAUSES) for index in indexes for key, mark in index.marks.items()}
            keys_with_causes = {key for index in indexes for key in index.causes}
            of_indexes = [index.causes for index in reversed(indexes)]
            with_causes = {key: (marks.pop(key)[0], merge_causes(key, of_indexes)) for key in keys_with_causes}
        for some in _transactions(with_causes.items(), lambda each: sum(len(cause.encode()) for cause in each[1][1])):
            self._write(partial(self._checkpoint.put_marks, dict(some)))
        self._sync_history()
        durable_frame = self._journal.last_frame_number
        self._journal.sync()
        position = CheckpointPosition(
            segment, self._journal.last_frame(segment), durable_frame, self._journal.last_digest_in(segment)
        )
        self._write(partial(self._checkpoint.finish_checkpoint, indexes, marks, position))
        with self._changed:
            overlay.drop_indexes(segment)
            # Later views do not read this segment.
            self._blocking_views = set(overlay.views)
            self._changed.wait_for(lambda: self._blocking_views.isdisjoint(overlay.views))
            self._blocking_views = set()
        self._journal.free(segment)
        with self._changed:
            self._changed.notify_all()

    def _delete_removed(self, indexes: Iterable[SegmentIndex]) -> None:
        """Delete from the checkpoint the messages that the journal has removed.

        While the disk level is PLENTY, this is part of the checkpoint of a segment. At other levels the messages are
        deleted at once: senders wait for the space of acknowledged messages, and acknowledgements alone may never fill
        a segment.
        """
        counts = [(index, len(index.removed)) for index in indexes]
        # What LMDB no longer has, or does not get because later frames have removed it, must be removed after a crash.
        self._journal.sync()
        for index, count in counts:
            while keys := self._removed_keys(index, count):
                self._write(partial(self._checkpoint.delete_messages, keys))
                index.deleted_count += len(keys)

    def _removed_keys(self, index: SegmentIndex, count: int) -> list[tuple[bytes, bool]]:
        start = index.deleted_count
        # A batch may be applied to the newest index meanwhile.
        with self._changed:
            return list(islice(index.removed.items(), start, min(count, start + TRANSACTION_KEYS_MAX)))

    def _read(self, spans: Iterable[tuple[bytes, Span]]) -> Iterator[tuple[bytes, bytes]]:
        keys, located = tee(spans)
        records = self._journal.read_extents((span.segment, span.offset, span.length) for _, span in located)
        return zip((key for key, _ in keys), records, strict=True)

    def _clean_up(self) -> None:
        try:
            self._needs_cleanup = self._checkpoint.delete_old_transients(TRANSACTION_KEYS_MAX)
        except STORAGE_ERRORS as error:
            self._disk_space.note_disk_full(error)

    def _write(self, transaction: Callable[[], None]) -> None:
        """Run one transaction. On a full disk, wait for space and repeat the transaction: a failed transaction has
        changed nothing."""
        while True:
            try:
                transaction()
                self._disk_space.update_level()
                return
            except STORAGE_ERRORS as error:
                if self._disk_space.delete_ballast(error):
                    continue
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closing, timeout=CHECK_INTERVAL_S):
                    raise _Closing


def _transactions(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    return split_into_pieces(items, size_of, TRANSACTION_BYTES_MAX, TRANSACTION_KEYS_MAX)


class _Closing(Exception):
    pass
