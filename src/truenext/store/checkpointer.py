"""When does what the journal still says move into the checkpoint, and how?

On a thread of its own: what the oldest segment still says goes into the checkpoint, and the segment becomes a spare.
What was consumed before that never costs a write to LMDB. When nothing is to be moved, the same thread deletes what
unclean stops have dropped, and looks how much room the disk has.

A crash can interrupt a move anywhere. The checkpoint then has some of what the journal still holds: the position in it
moves only with the last of a segment, and recovery leaves out of the overlay what it finds in the checkpoint.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import islice, tee
from threading import Thread
from typing import TYPE_CHECKING

from truenext.batch import NO_CAUSES
from truenext.errors import StoreError
from truenext.store.checkpoint import TRANSACTION_BYTES_MAX
from truenext.store.checkpoint_format import Position
from truenext.store.overlay import alive
from truenext.store.segment_index import causes_said
from truenext.store.trouble import CAUSES, explained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from threading import Condition

    from truenext.store.checkpoint import Checkpoint
    from truenext.store.journal import Journal
    from truenext.store.messages_of_kind import Marks
    from truenext.store.overlay import Overlay
    from truenext.store.room import RoomOnDisk
    from truenext.store.spans import Span
    from truenext.store.views import View

logger = logging.getLogger(__name__)

SEGMENTS_MAX = 12
"""Segments of the journal that are kept while anything in them lives."""

SEGMENTS_BEHIND_MAX = 3
"""Further segments that the journal may grow by while the oldest are moved; then batches wait for the move. With a
spare and SEGMENT_BYTES, that makes half a gigabyte."""

SEGMENT_RECORDS_MAX = 50_000
"""Changes in one segment, or one batch: times all segments, what a restart has to replay."""

SEGMENT_MEMORY_MAX = 2_600_000
"""Bytes that one segment may cost in memory, roughly, but for its last batch: times all segments, 40 MB. Where these
are more, as batches are that large, older segments are moved sooner."""

TRANSACTION_KEYS_MAX = 1000
"""Messages or timers in one transaction of the checkpoint: each may touch a page of its own."""

LOOK_SECONDS = 1.0
"""Longest time until room is looked at again: others fill the disk as well, and make room."""

CLEAN_SECONDS = 0.01
"""Pause between two transactions that delete what unclean stops have dropped: nobody waits for that."""


class Checkpointer:
    """`enable`, `wait`, `is_segment_full` and `let_go` are for other threads."""

    def __init__(
        self,
        path: Path,
        journal: Journal,
        checkpoint: Checkpoint,
        overlay: Overlay,
        room: RoomOnDisk,
        changed: Condition,
        *,
        segments_max: int,
        sync_history: Callable[[], None],
    ) -> None:
        """`path` is the data folder. `changed` is held for the overlay; it tells of every move, every new segment, and
        every page that a move waits for. `sync_history` comes before a segment goes.
        """
        self._path = path
        self._journal = journal
        self._checkpoint = checkpoint
        self._overlay = overlay
        self._room = room
        self._changed = changed
        self._segments_max = segments_max
        self._sync_history = sync_history
        self._thread: Thread | None = None
        self._needs_cleaning = True
        self._views_in_the_way: set[View] = set()
        """Pages under way that may read the segment that is to be released."""
        self._is_closing = False
        self.is_enabled = False
        """A batch has been applied, or begun to be: nothing moves before, as only then its history has been taken."""
        self.failure: StoreError | None = None
        """Why nothing moves any more."""

    # ---- For others ----

    def start(self) -> None:
        self._thread = Thread(target=self._run, name="truenext-checkpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """A move that is under way is finished, but does not wait for room."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def enable(self) -> None:
        """The first batch is about to be applied."""
        with self._changed:
            self.is_enabled = True
            self._changed.notify_all()

    def is_segment_full(self, records: int) -> bool:
        """The newest segment should not get a batch of so many changes."""
        indexes = self._overlay.indexes
        if not indexes or indexes[-1].segment != self._journal.newest:
            return False
        index = indexes[-1]
        return index.memory >= SEGMENT_MEMORY_MAX or (
            index.records > 0 and index.records + records > SEGMENT_RECORDS_MAX
        )

    def wait(self) -> None:
        """Until the journal may grow by a segment.

        Raises: StoreError if nothing moves any more
        """
        with self._changed:
            if self._thread is not None:
                self._changed.wait_for(lambda: self.failure is not None or not self._is_behind())
            if self.failure is not None:
                raise self.failure

    def let_go(self, view: View) -> None:
        """What the view shows is not read any more."""
        with self._changed:
            self._overlay.views.discard(view)
            if view in self._views_in_the_way:
                self._changed.notify_all()

    def _is_behind(self) -> bool:
        # While nothing can move, acknowledgements go on as long as the journal finds a place for them.
        if self._room.is_full:
            return False
        segments, segments_max = self._journal.segments, self._segments_max + SEGMENTS_BEHIND_MAX
        # One batch may be large: a message for all subscriptions to a topic.
        is_large = len(segments) > 1 and self._overlay.memory > segments_max * SEGMENT_MEMORY_MAX
        return len(segments) >= segments_max or is_large

    # ---- On its own thread ----

    def _run(self) -> None:
        try:
            while True:
                self._room.provide()
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._is_closing or self._is_checkpoint_due() or self._room.is_spare_due,
                        timeout=CLEAN_SECONDS if self._needs_cleaning else LOOK_SECONDS,
                    )
                    if self._is_closing:
                        return
                    is_due = self._is_checkpoint_due()
                if is_due:
                    self._checkpoint_segment(self._journal.segments[0])
                elif self._needs_cleaning:
                    self._clean()
        except _Closing:
            return
        except Exception as error:
            if isinstance(error, CAUSES):
                failure = explained(f"write to the store in {self._path}", error, self._path)
            else:
                failure = StoreError(f"the store failed: {error!r}")
            failure.__cause__ = error
            logger.critical("the journal cannot move into the checkpoint", extra={"reason": str(failure)})
            with self._changed:
                self.failure = failure
                self._changed.notify_all()

    def _is_checkpoint_due(self) -> bool:
        segments = self._journal.segments
        if len(segments) < 2 or not self.is_enabled:
            return False
        if len(segments) > self._segments_max or self._overlay.memory > self._segments_max * SEGMENT_MEMORY_MAX:
            return True
        return not self._overlay.has_messages(segments[0])

    def _checkpoint_segment(self, segment: int) -> None:
        overlay = self._overlay
        with self._changed:
            overlay.checkpointing = segment
            held = overlay.held(segment)
            indexes = [index for index in overlay.indexes if index.segment <= segment]
        for index in indexes:
            gone = iter(index.gone.items())
            while keys := list(islice(gone, TRANSACTION_KEYS_MAX)):
                self._write(partial(self._checkpoint.delete, keys))
            # In order, as many then share a page.
            timers = iter(sorted(index.timers.items()))
            while piece := list(islice(timers, TRANSACTION_KEYS_MAX)):
                self._write(partial(self._checkpoint.set_timers, piece))
        for are_transient in (False, True):
            for messages in self._records(alive(segment, held), are_transient=are_transient):
                self._write(partial(self._checkpoint.put, messages, are_transient=are_transient))
        with self._changed:
            # Copied: to remove a message takes its mark out of every layer.
            marks = {key: (mark, NO_CAUSES) for index in indexes for key, mark in index.marks.items()}
            said = {key for index in indexes for key in index.causes}
            of_indexes = [index.causes for index in reversed(indexes)]
            with_causes = {key: (marks.pop(key)[0], causes_said(key, of_indexes)) for key in said}
        for some in _pieces(with_causes):
            self._write(partial(self._checkpoint.put_marks, some))
        self._sync_history()
        position = Position(segment, self._journal.last_frame(segment), self._journal.number)
        self._write(partial(self._checkpoint.finish, indexes, marks, position))
        with self._changed:
            overlay.drop_indexes(segment)
            # Those that begin later know nothing of this segment.
            self._views_in_the_way = set(overlay.views)
            self._changed.wait_for(lambda: self._views_in_the_way.isdisjoint(overlay.views))
            self._views_in_the_way = set()
        self._journal.free(segment)
        with self._changed:
            self._changed.notify_all()

    def _records(
        self, held: Iterable[tuple[bytes, Span]], *, are_transient: bool
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """Keys and records of one kind, in pieces that one transaction can take."""
        piece: list[tuple[bytes, bytes]] = []
        size = 0
        for key, record in self._read((key, span) for key, span in held if span.is_transient is are_transient):
            if piece and (size + len(record) > TRANSACTION_BYTES_MAX or len(piece) >= TRANSACTION_KEYS_MAX):
                yield piece
                piece, size = [], 0
            piece.append((key, record))
            size += len(record)
        if piece:
            yield piece

    def _read(self, spans: Iterable[tuple[bytes, Span]]) -> Iterator[tuple[bytes, bytes]]:
        keys, where = tee(spans)
        records = self._journal.read((span.segment, span.offset, span.length) for _, span in where)
        return zip((key for key, _ in keys), records, strict=True)

    def _clean(self) -> None:
        try:
            self._needs_cleaning = self._checkpoint.clean(TRANSACTION_KEYS_MAX)
        except CAUSES as error:
            self._room.expect_no_space(error)

    def _write(self, transaction: Callable[[], None]) -> None:
        """One transaction of a move, which waits for room where there is none. It can be done again: it is done as a
        whole or not at all.
        """
        while True:
            try:
                transaction()
                self._room.look()
                return
            except CAUSES as error:
                if self._room.make_room(error):
                    continue
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closing, timeout=LOOK_SECONDS):
                    raise _Closing


def _pieces(marks: Marks) -> Iterator[Marks]:
    """What one transaction can take."""
    piece: Marks = {}
    size = 0
    for key, (mark, causes) in marks.items():
        piece[key] = (mark, causes)
        size += sum(len(cause.encode()) for cause in causes)
        if size >= TRANSACTION_BYTES_MAX or len(piece) >= TRANSACTION_KEYS_MAX:
            yield piece
            piece, size = {}, 0
    if piece:
        yield piece


class _Closing(Exception):
    pass
