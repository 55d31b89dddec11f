"""How do journal, overlay and checkpoint make one store? That of one broker, on its own disk.

The data folder:

    lock           the pid of the broker that uses the folder, which holds a flock on this file
    journal/       what happened last, see journal.py and changes.py
    lmdb/          what happened before that, see checkpoint.py
    ballast        place on the disk, deleted when a write finds the disk full, so that it can go on, see room.py

    apply          the batch goes into the journal, durable by one write; then the overlay knows of it
    page, recover  the checkpoint, with the journal laid over it (overlay.py)

Meanwhile, on a thread of its own, what the oldest segment still says moves into the checkpoint (checkpointer.py).
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from heapq import merge
from operator import attrgetter
from threading import Condition, Lock
from typing import TYPE_CHECKING

from truenext.batch import NO_MARK, Batch, Mark
from truenext.destination import may_be_named
from truenext.errors import StoreError
from truenext.limits import PAGE_BYTES
from truenext.record import CONTENTS, LANE_KEY_SIZE, REFERENCE_SIZE, content_key, reference_of
from truenext.store import folder
from truenext.store.changes import Changes, Rest, changes_of, decode, encode
from truenext.store.checkpoint import MAP_SIZE, Checkpoint
from truenext.store.checkpointer import SEGMENTS_MAX, Checkpointer
from truenext.store.contents import settled
from truenext.store.journal import SEGMENT_BYTES, Journal
from truenext.store.missing import missing_at_end
from truenext.store.overlay import Overlay
from truenext.store.room import RoomOnDisk
from truenext.store.segment_index import is_gone, laid_over, mark_of
from truenext.store.store import Page, Recovered, StoredMessage, TimerPage
from truenext.store.trouble import CAUSES, damage, disagreement, explained

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    import lmdb

    from truenext.room import Room
    from truenext.store.views import View


class EmbeddedStore:
    def __init__(
        self,
        path: Path,
        *,
        map_size: int = MAP_SIZE,
        segment_bytes: int = SEGMENT_BYTES,
        segments_max: int = SEGMENTS_MAX,
        disk_limit: int | None = None,
    ) -> None:
        """Lock and open the data folder, which is made if it is missing, with segments of `segment_bytes`.

        `disk_limit` is how many bytes journal and checkpoint may use, as far as `room` says; None is what the disk has.

        The history in a batch is kept as long as its segment; `sync_history` (see there) comes before that goes.

        Raises: StoreInUseError if another broker uses it, ConfigurationError if it is a folder of others' files,
            StoreError if it cannot be used.
        """
        self._path = path
        self.sync_history: Callable[[], None] = _nothing
        """Makes what the history's own files have durable. What `recover` found, and the history of every batch, is in
        them when the next batch is applied."""
        self.history_told: tuple[int, int] | None = None
        """Run and first event of the last chunk of a batch that the history's own files have; to be set before
        `recover`, which then misses what the journal has not."""
        self._applied = 0
        self._unwritable_reason = "recover() comes first"
        self._overlay = Overlay()
        self._queues: dict[int, str] = {}
        self._lock = Lock()
        self._changed = Condition(self._lock)
        """Held for the overlay; tells of every move, every new segment, and every page that a move waits for."""
        with ExitStack() as opened:
            try:
                folder.check_no_foreign_files(path)
                folder.make(path)
                opened.callback(os.close, folder.lock(path))
                may_be_new = not folder.has_journal(path)
                self._checkpoint = Checkpoint(
                    path / "lmdb", may_be_new=may_be_new, map_size=map_size, segment_bytes=segment_bytes
                )
                opened.callback(self._checkpoint.close)
                (path / "journal").mkdir(mode=0o700, exist_ok=True)
                self._journal = Journal(
                    path / "journal", salt=self._checkpoint.salt, segment_bytes=self._checkpoint.segment_bytes
                )
                opened.callback(self._journal.close)
                for one in (path / "lmdb", path / "journal", path):
                    folder.sync_folder(one)
            except CAUSES as error:
                raise explained(f"open the store in {path}", error, path) from error
            self._room = RoomOnDisk(path, self._journal, self._checkpoint, self._changed, limit=disk_limit)
            self._checkpointer = Checkpointer(
                path,
                self._journal,
                self._checkpoint,
                self._overlay,
                self._room,
                self._changed,
                segments_max=segments_max,
                sync_history=lambda: self.sync_history(),
            )
            opened.callback(self._checkpointer.close)
            self._opened = opened.pop_all()

    # ---- The promise of store.py ----

    @property
    def room(self) -> Room:
        return self._room.room

    @property
    def room_bytes(self) -> dict[str, int]:
        return self._room.bytes

    def recover(self) -> Recovered:
        try:
            recovered = self._recover()
            self._room.look()
        except CAUSES as error:
            raise explained(f"read the store in {self._path}", error, self._path) from error
        self._unwritable_reason = ""
        self._checkpointer.start()
        return recovered

    def apply(self, batch: Batch) -> None:
        if self._unwritable_reason:
            raise StoreError(f"batch {batch.number} is refused: {self._unwritable_reason}")
        if self._checkpointer.failure is not None:
            raise self._checkpointer.failure
        # Set before anything can fail. After a failed write nobody knows what is on the disk, so that a second try
        # could confirm what is not there.
        self._unwritable_reason = f"batch {batch.number} could not be written; start the broker again"
        if not self._checkpointer.is_enabled:
            self._checkpointer.enable()
        try:
            if batch.dereferenced or batch.transient_dereferenced:
                batch = settled(batch, self._mark_of())
            changes = changes_of(batch)
            self._check(batch, changes)
            segment, offset = self._append(encode(batch, changes.rest), changes.count)
        except CAUSES as error:
            raise explained(f"write to the store in {self._path}", error, self._path) from error
        with self._lock:
            self._overlay.add(changes, segment, offset)
            self._applied = batch.number
        for number, name in batch.queues.items():
            if name:
                self._queues[number] = name
            else:
                del self._queues[number]
        if batch.clean_stop is not None or batch.sequence_limit:
            # A run begins or ends, or has given out half a million sequences.
            self._write_down_end(batch.sequence_limit)
        self._unwritable_reason = ""

    def page(self, lane: bytes, after_sequence: int, limit: int, size_max: int = PAGE_BYTES) -> Page:
        return self._page(
            lambda: self._overlay.view(lane, after_sequence, limit + 1),
            lambda snapshot, _: self._checkpoint.page(snapshot, lane, after_sequence),
            limit,
            size_max,
        )

    def messages(self, keys: Collection[bytes], size_max: int = PAGE_BYTES) -> Page:
        in_order = sorted(keys)

        def of_checkpoint(snapshot: lmdb.Transaction[bytes], view: View) -> Iterator[StoredMessage]:
            of_journal = set(view.keys())
            old = (key for key in in_order if key not in of_journal and not view.is_gone(key))
            return self._checkpoint.some(snapshot, old)

        return self._page(lambda: self._overlay.view_of(in_order), of_checkpoint, len(in_order), size_max)

    def timers(self, after: bytes, limit: int) -> TimerPage:
        try:
            with self._lock:
                snapshot = self._checkpoint.snapshot()
                view = self._overlay.timer_view()
                as_of = self._applied
            with snapshot:
                following = view.behind(after, self._checkpoint.timers(snapshot, after))
                return TimerPage.of(following, limit, as_of=as_of)
        except CAUSES as error:
            raise explained(f"read the store in {self._path}", error, self._path) from error

    def make_room(self, error: OSError) -> None:
        """Give up the ballast for a write to the history that found the disk full, as `error` says.

        Raises: `error`, if it says anything else
        """
        self._room.make_room(error)

    def close(self) -> None:
        """Let go of files and locks. Nothing is written. No page may be under way."""
        self._unwritable_reason = "the store is closed"
        self._opened.close()

    # ---- Writing ----

    def _check(self, batch: Batch, changes: Changes) -> None:
        """A message that is not where the broker thinks, or is where it must not be, means that one was lost or would
        be seen twice: better no batch at all.
        """
        overlay = self._overlay
        if changes.removes:
            self._check_removes(batch, changes.removes, are_transient=False)
        if changes.transient_removes:
            self._check_removes(batch, changes.transient_removes, are_transient=True)
        for puts in (batch.puts, batch.transient_puts):
            for key in puts:
                if overlay.kind(key) is not None:
                    raise disagreement(batch.number, "puts a message that is there already")
        if batch.queues and not all(
            may_be_named(self._queues.get(number), name) for number, name in batch.queues.items()
        ):
            raise disagreement(batch.number, "puts a queue that is there already")

    def _mark_of(self) -> Callable[[bytes], Mark]:
        """The marks of messages, as long as no batch is written."""
        marks = [index.marks for index in reversed(self._overlay.indexes) if index.marks]
        # In this order: what the overlay does not say any more the checkpoint has.
        return lambda key: mark_of(key, marks) or self._checkpoint.mark(key)

    def _check_removes(self, batch: Batch, keys: list[bytes], *, are_transient: bool) -> None:
        if len(keys) > 1 and len(set(keys)) != len(keys):
            raise disagreement(batch.number, "removes a message twice")
        kind = self._overlay.kind
        old = []
        for key in keys:
            found = kind(key)
            if found is None:
                old.append(key)
            elif found is not are_transient:
                raise disagreement(batch.number, f"removes message {key.hex()}, which is not there")
        if old:
            self._check_old(batch, old, are_transient=are_transient)

    def _check_old(self, batch: Batch, keys: list[bytes], *, are_transient: bool) -> None:
        with self._changed:
            indexes = self._overlay.indexes
            gone = next((key for key in keys if is_gone(key, indexes)), None)
        kinds = self._checkpoint.kinds(keys)
        gone = gone or next((key for key in keys if kinds.get(key) is not are_transient), None)
        if gone is not None:
            raise disagreement(batch.number, f"removes message {gone.hex()}, which is not there")

    def _append(self, parts: list[bytes], records: int) -> tuple[int, int]:
        journal = self._journal
        size = sum(map(len, parts))
        if not journal.has_place(size) or self._checkpointer.is_segment_full(records):
            self._checkpointer.wait()
            self._with_ballast(partial(journal.roll, size))
            with self._changed:
                self._changed.notify_all()
        return journal.append(parts, size)

    def _with_ballast(self, action: Callable[[], None]) -> None:
        """Do what changes nothing where it finds the disk full; then once more, without the ballast.

        Raises: lmdb.Error, OSError
        """
        try:
            action()
        except CAUSES as error:
            self._room.make_room(error)
            action()

    def _write_down_end(self, sequence_limit: int) -> None:
        """Say outside the journal what it has. Without room on the disk that is left: what was said before stays true.

        Raises: StoreError
        """
        try:
            try:
                self._with_ballast(partial(self._checkpoint.write_down, self._journal.number, sequence_limit))
            except CAUSES as error:
                self._room.expect_no_space(error)
        except CAUSES as error:
            raise explained(f"write to the store in {self._path}", error, self._path) from error

    # ---- Reading ----

    def _page(
        self,
        view_now: Callable[[], View],
        of_checkpoint: Callable[[lmdb.Transaction[bytes], View], Iterator[StoredMessage]],
        limit: int,
        size_max: int,
    ) -> Page:
        """What journal and checkpoint have, as of the same moment."""
        try:
            with self._lock:
                snapshot = self._checkpoint.snapshot()
                view = view_now()
                as_of = self._applied
            try:
                with snapshot:
                    merged = self._merged(view, of_checkpoint(snapshot, view))
                    return Page.of(self._with_contents(merged, view, snapshot), limit, size_max, as_of=as_of)
            finally:
                self._checkpointer.let_go(view)
        except CAUSES as error:
            raise explained(f"read the store in {self._path}", error, self._path) from error

    def _merged(self, view: View, of_checkpoint: Iterator[StoredMessage]) -> Iterator[StoredMessage]:
        checkpointed = self._page_of_checkpoint(view, of_checkpoint)
        return _once(merge(self._page_of_journal(view), checkpointed, key=attrgetter("key")))

    def _with_contents(
        self, messages: Iterable[StoredMessage], view: View, snapshot: lmdb.Transaction[bytes]
    ) -> Iterator[StoredMessage]:
        for message in messages:
            if len(message.record) == REFERENCE_SIZE and (number := reference_of(message.record)):
                message.content = self._content(content_key(number), view, snapshot)
            yield message

    def _content(self, key: bytes, view: View, snapshot: lmdb.Transaction[bytes]) -> bytes:
        """Of a reference that the view shows; empty if it is missing."""
        with self._lock:
            span = view.content(key)
        if span is None:
            return self._checkpoint.content(snapshot, key)
        return next(self._journal.read([(span.segment, span.offset, span.length)]))

    def _page_of_journal(self, view: View) -> Iterator[StoredMessage]:
        for key, record in zip(view.keys(), self._journal.read(view.extents()), strict=True):
            yield StoredMessage(key, record, view.mark(key) or NO_MARK, causes=view.causes(key))

    def _page_of_checkpoint(self, view: View, messages: Iterator[StoredMessage]) -> Iterator[StoredMessage]:
        for message in messages:
            key = message.key
            if not view.is_gone(key):
                message.mark = view.mark(key) or message.mark
                message.causes = view.causes(key).over(message.causes)
                yield message

    # ---- Recovery ----

    def _recover(self) -> Recovered:
        overlay, checkpoint = self._overlay, self._checkpoint
        recovered, position = checkpoint.read()
        # The move of this one may have begun.
        overlay.checkpointing = position.segment + 1
        history = []
        for segment, offset, payload in self._journal.replay(position.segment, position.frame):
            changes = decode(payload)
            overlay.add(changes, segment, offset)
            if changes.history:
                history.append(changes.history)
        missing = missing_at_end(
            self._journal.number, position.written, history[-1] if history else b"", self.history_told
        )
        if missing:
            raise damage("journal", missing, self._path)
        self._journal.settle()

        recovered = laid_over(recovered, overlay.indexes)
        if not recovered.clean_stop:
            self._drop_transients()
        self._leave_out_what_is_in_both()
        # From here on what the overlay has of that segment is in no checkpoint.
        overlay.checkpointing = position.segment
        self._queues = dict(recovered.queues)
        return replace(recovered, counts=self._counts(), history=history)

    def _drop_transients(self) -> None:
        self._with_ballast(self._checkpoint.drop_transients)
        if any(span.is_transient for _, span in self._overlay.messages()):
            # Written down, because after a clean stop of this run the transients in the journal would count again.
            rest = Rest(drops_transients=True)
            segment, offset = self._append(encode(Batch(0), rest), 0)
            self._overlay.add(Changes([], [], [], [], rest), segment, offset)

    def _leave_out_what_is_in_both(self) -> None:
        overlay, checkpoint = self._overlay, self._checkpoint
        for index in overlay.indexes:
            here = checkpoint.kinds(index.gone)
            index.gone = {key: kind for key, kind in index.gone.items() if key in here}
        checkpointed = checkpoint.kinds(key for key, _ in overlay.messages(overlay.checkpointing))
        overlay.leave_to_checkpoint(key for key in checkpointed if not is_gone(key, overlay.indexes))

    def _counts(self) -> dict[bytes, int]:
        gone = {key for index in self._overlay.indexes for key in index.gone}
        counts = self._checkpoint.counts()
        counts.update(self._overlay.counts())
        counts.subtract(Counter(key[:LANE_KEY_SIZE] for key in gone))
        return {lane: count for lane, count in counts.items() if count and lane != CONTENTS}


def _once(messages: Iterable[StoredMessage]) -> Iterator[StoredMessage]:
    """A message that is being moved is in both: the journal's, which comes first, is taken."""
    last = b""
    for message in messages:
        if message.key != last:
            last = message.key
            yield message


def _nothing() -> None:
    pass
