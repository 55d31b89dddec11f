"""EmbeddedStore: the store of one broker on its own disk, made of journal, overlay and checkpoint.

The data folder:

    lock           process id of the broker that uses the folder, and holds a flock on this file
    journal/       the latest batches, see journal.py and changes.py
    lmdb/          the checkpoint: the state before these batches, see checkpoint.py
    ballast        reserved disk space, freed when a write finds the disk full, see disk_space.py
    origin         the newest server of the log that the folder has followed, see postgresql/log_end.py

    apply                  writes the batch to the journal, durable by one write; then to the overlay
    read_page, recover     read the checkpoint together with the overlay, the journal's index (overlay.py)

With a log (log.py), `apply` and `begin` write the batch to the log first. Then the journal is not synced for each
batch: the folder is a copy, and `recover` fetches from the log what the folder lacks.

Meanwhile a thread copies the oldest segment's remaining messages into the checkpoint (checkpointer.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from heapq import merge
from operator import attrgetter
from pathlib import Path
from threading import Condition, Lock
from time import sleep
from typing import TypeVar

import lmdb

from truenext.clock import monotonic
from truenext.errors import StoreError
from truenext.model.batch import NO_MARK, Batch, Mark
from truenext.model.destination import may_rename
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import PAGE_BYTES
from truenext.model.record import (
    CONTENTS_LANE_KEY,
    LANE_KEY_SIZE,
    REFERENCE_SIZE,
    content_key,
    referenced_content_number,
)
from truenext.store import folder
from truenext.store.changes import (
    Changes,
    RareChanges,
    apply_names,
    changes_of,
    decode_changes,
    dereference_contents,
    encode_batch,
)
from truenext.store.checkpoint import MAP_SIZE, Checkpoint
from truenext.store.checkpointer import SEGMENTS_MAX, Checkpointer
from truenext.store.copying import prepare_copy
from truenext.store.disk_space import DiskSpace
from truenext.store.frame_writer import FrameWriter
from truenext.store.held_state import HeldState
from truenext.store.journal import SEGMENT_BYTES, Journal, JournalEnd, describe_lost_tail
from truenext.store.log import BEAT_S, EMPTY_PAYLOAD, Log, LogPosition
from truenext.store.overlay import Overlay, OverlayView, apply_journal, find_mark, is_removed
from truenext.store.store import JournalSize, Page, Pending, Progress, Recovered, TimerPage, UndecodedMessage
from truenext.store.store_errors import (
    STORAGE_ERRORS,
    damage_error,
    disagreement_error,
    store_error,
    translated_errors,
)
from truenext.store.upgrade.upgrade import upgrade

BEGUN_BYTES_MAX = 512 * 1024
"""Size of a batch above which `begin` leaves the batch to `apply`: the caller of `begin` must not be kept long. Two
receipts for 200 messages of 1 KiB fit."""
BEGUN_CHANGES_MAX = 2500
"""Number of changes above which `begin` leaves a batch to `apply`. Removes from many queues take longest: so many took
6 ms in `begin`, and again in `Pending.advance`."""


T = TypeVar("T")

HOLD_PATIENCE_S = 10.0
"""Time in seconds for which `hold_state` waits for a moment at which no batch is half applied."""
HOLD_RETRY_S = 0.01


class EmbeddedStore:
    def __init__(
        self,
        path: Path,
        *,
        map_size: int = MAP_SIZE,
        segment_bytes: int = SEGMENT_BYTES,
        segments_max: int = SEGMENTS_MAX,
        disk_limit: int | None = None,
        log: Log | None = None,
    ) -> None:
        """Lock and open the data folder. A missing folder is made, with segments of `segment_bytes`.

        Journal and checkpoint may use `disk_limit` bytes, from which `disk_level` follows; None means the whole disk.
        With a `log` the folder is a copy of this log, and is made anew from it if it is missing, damaged or another's.
        The store closes the log. A folder of an earlier format is converted, if it is no copy.

        The journal keeps the history of a batch until the batch's segment is freed. `sync_history` is called before
        that.

        Raises: StoreInUseError if another broker uses the folder; ConfigurationError if the folder has files that are
        not truenext's, or is a copy of a log and none is given, or the other way round; StoreError if the folder cannot
        be used
        """
        self._path = path
        self._log = log
        self.sync_history: Callable[[], None] = lambda: None
        """Function that makes the history's own files durable. Before a batch is applied, these files must have the
        history that `recover` has returned and that of every earlier batch."""
        self.last_history_chunk: tuple[int, int] | None = None
        """Run and first event of the last chunk of a batch in the history's own files. Set it before `recover`, which
        then checks that the journal has this batch."""
        self.restore_history: Callable[[Iterable[bytes]], None] = lambda chunks: None
        """Function that gets the history of the journal before that of any row of a log. It skips chunks that the
        history's own files have. Only a store with a log calls it."""
        self.follow_history: Callable[[bytes], None] = lambda chunk: None
        """Function that gets the history of each row that the folder lacked, in order, before `recover` returns: there
        may be too many rows for `Recovered`. A row may have several chunks, one behind the other."""
        self.flush_history: Callable[[], None] = lambda: None
        """Function that makes what `follow_history` was given readable for other processes."""
        self.while_standing_by: Callable[[], None] = lambda: None
        """Function that is called several times a second while the broker stands by."""
        self.on_taken_over: Callable[[], None] = lambda: None
        """Function that is called once the broker has taken over the log, before the rest of `recover`."""
        self._last_applied = 0
        self._applied_end = JournalEnd(0, 0, 0)
        """End of the last batch that the overlay has, too."""
        self._unwritable_reason = "recover() was not called"
        self._overlay = Overlay()
        self._queues: dict[int, str] = {}
        self._lock = Lock()
        self._changed = Condition(self._lock)
        """Guards the overlay. Notified when a segment is new or checkpointed, and when a checkpoint has waited for a
        view and the view ends."""
        is_copy = log is not None
        with ExitStack() as resources:
            if log is not None:
                resources.callback(log.close)
            with translated_errors(f"open the store in {path}", path):
                folder.check_no_foreign_files(path)
                folder.make(path)
                resources.callback(os.close, folder.lock(path))
                if log is not None:
                    prepare_copy(path, log, map_size=map_size, segment_bytes=segment_bytes)
                may_be_new = not folder.has_journal(path)
                self._checkpoint = Checkpoint(
                    path / "lmdb",
                    may_be_new=may_be_new,
                    map_size=map_size,
                    segment_bytes=segment_bytes,
                    is_copy=is_copy,
                    upgrade=lambda env: None if is_copy else upgrade(env, path),
                )
                resources.callback(self._checkpoint.close)
                (path / "journal").mkdir(mode=0o700, exist_ok=True)
                self._journal = Journal(
                    path / "journal",
                    salt=self._checkpoint.salt,
                    segment_bytes=self._checkpoint.segment_bytes,
                    is_copy=is_copy,
                )
                resources.callback(self._journal.close)
                for one in (path / "lmdb", path / "journal", path):
                    folder.sync_folder(one)
                if log is not None:
                    log.frames = self._journal
            self._disk_space = DiskSpace(path, self._journal, self._checkpoint, self._changed, limit=disk_limit)
            self._checkpointer = Checkpointer(
                self._journal,
                self._checkpoint,
                self._overlay,
                self._disk_space,
                self._changed,
                segments_max=segments_max,
                sync_history=lambda: self.sync_history(),
            )
            resources.callback(self._checkpointer.close)
            self._writer = FrameWriter(self._journal, log, self._checkpointer, self._disk_space, self._changed)
            self._resources = resources.pop_all()

    # ---- Methods of Store ----

    @property
    def disk_level(self) -> DiskLevel:
        level = self._disk_space.level
        return level if self._log is None else max(level, self._log.disk_level)

    @property
    def disk_level_bytes(self) -> dict[str, int]:
        sizes = self._disk_space.bytes
        return sizes if self._log is None else {**sizes, **self._log.disk_level_bytes}

    @property
    def journal_size(self) -> JournalSize:
        return JournalSize(len(self._journal.segments), self._journal.size)

    def recover(self) -> Recovered:
        with self._reading():
            recovered = self._recover()
            self._applied_end = self._journal.end
            self._disk_space.update_level()
        self._unwritable_reason = ""
        self._checkpointer.start()
        if self._log is not None:
            self._log.start()
        return recovered

    def apply(self, batch: Batch) -> None:
        if self._unwritable_reason:
            raise StoreError(f"batch {batch.number} is refused: {self._unwritable_reason}")
        if self._checkpointer.failure is not None:
            raise self._checkpointer.failure
        # Set before anything can fail. After a failed write the content of the disk is unknown, so that a second try
        # could confirm a batch that is not there.
        self._unwritable_reason = _unwritable_reason(batch)
        if not self._checkpointer.is_enabled:
            self._checkpointer.enable()
        try:
            if batch.dereferenced or batch.transient_dereferenced:
                batch = dereference_contents(batch, self._mark_lookup())
            changes = changes_of(batch)
            for keys, are_transient in self._check_batch(batch, changes):
                self._require_in_checkpoint(batch, keys, are_transient=are_transient)
            segment, offset = self._writer.append_batch(encode_batch(batch, changes.rare), changes.count)
        except STORAGE_ERRORS as error:
            raise store_error(f"write to the store in {self._path}", error, self._path) from error
        self._finish(batch, changes, segment, offset)

    def begin(self, batch: Batch) -> Pending | None:
        if not self._may_begin(batch):
            return None
        changes = changes_of(batch)
        if changes.count > BEGUN_CHANGES_MAX:
            return None
        try:
            if self._check_batch(batch, changes):
                # The checkpoint may have to be read from the disk.
                return None
        except StoreError:
            # The store becomes unwritable by `apply`.
            return None
        parts = encode_batch(batch, changes.rare)
        begun = self._writer.begin_batch(parts, changes.count)
        if begun is None:
            return None
        append, digest = begun
        return _PendingApply(append, partial(self._write_frame, batch, changes, parts, digest))

    def _may_begin(self, batch: Batch) -> bool:
        return (
            not self._unwritable_reason
            and self._checkpointer.failure is None
            and batch.size + len(batch.history) <= BEGUN_BYTES_MAX
            and not (batch.dereferenced or batch.transient_dereferenced)
        )

    def _write_frame(self, batch: Batch, changes: Changes, parts: list[bytes], digest: bytes) -> None:
        self._unwritable_reason = _unwritable_reason(batch)
        with translated_errors(f"write to the store in {self._path}", self._path):
            segment, offset = self._writer.append_frame(parts, changes.count, digest)
        self._finish(batch, changes, segment, offset)

    def _finish(self, batch: Batch, changes: Changes, segment: int, offset: int) -> None:
        """Note that a batch is durable."""
        with self._lock:
            self._overlay.apply_changes(changes, segment, offset)
            self._last_applied = batch.number
            self._applied_end = self._journal.end
        if self._writer.has_empty_rows:
            with translated_errors(f"write to the store in {self._path}", self._path):
                self._writer.append_empty_frames()
        self._queues = apply_names(self._queues, batch.queues) if batch.queues else self._queues
        if batch.clean_stop is not None or batch.sequence_limit:
            # A run starts or ends, or has given out half a million sequences.
            self._save_journal_end(batch.sequence_limit)
        self._unwritable_reason = ""

    def read_page(self, lane: bytes, after_sequence: int, limit: int, size_max: int = PAGE_BYTES) -> Page:
        return self._page(
            lambda: self._overlay.view(lane, after_sequence, limit + 1),
            lambda snapshot, _: self._checkpoint.page(snapshot, lane, after_sequence),
            limit,
            size_max,
        )

    def read_messages(self, keys: Collection[bytes], size_max: int = PAGE_BYTES) -> Page:
        sorted_keys = sorted(keys)

        def checkpoint_messages(snapshot: lmdb.Transaction[bytes], view: OverlayView) -> Iterator[UndecodedMessage]:
            journal_keys = set(view.keys())
            old = (key for key in sorted_keys if key not in journal_keys and not view.is_removed(key))
            return self._checkpoint.find(snapshot, old)

        return self._page(lambda: self._overlay.view_keys(sorted_keys), checkpoint_messages, len(sorted_keys), size_max)

    def content_references(self, numbers: Collection[int]) -> dict[int, int]:
        with self._reading():
            with self._lock:
                indexes, mark_of = self._overlay.indexes, self._mark_lookup()
            # A batch that is written meanwhile can only lower the number.
            keys = {number: content_key(number) for number in numbers}
            return {number: 0 if is_removed(key, indexes) else mark_of(key).attempts for number, key in keys.items()}

    def read_timers(self, after: bytes, limit: int) -> TimerPage:
        with self._reading():
            with self._lock:
                snapshot = self._checkpoint.snapshot()
                view = self._overlay.timer_view()
                as_of = self._last_applied
            with snapshot:
                following = view.iter_after(after, self._checkpoint.timers(snapshot, after))
                return TimerPage.of(following, limit, as_of=as_of)

    def hold_state(self, hold_other: Callable[[], T]) -> tuple[HeldState, T]:
        """Return the state after the last batch for which `apply` has returned, or after one that follows at once. It
        can be read while further batches are applied. The caller closes it. Also return the result of `hold_other`,
        which is called at the same moment, when every batch waits.

        Any thread may call this. One state may be held at a time.

        Raises: StoreError if the state cannot be read
        """
        until = monotonic() + HOLD_PATIENCE_S
        with self._reading():
            while (held := self._try_to_hold(hold_other)) is None:
                if monotonic() > until:
                    raise StoreError("the store does not end a batch, so that its state cannot be copied")
                sleep(HOLD_RETRY_S)
        return held

    def _try_to_hold(self, hold_other: Callable[[], T]) -> tuple[HeldState, T] | None:
        with self._lock:
            snapshot = self._checkpoint.snapshot()
            # The checkpointer may have noted a frame that is durable, but not in the overlay.
            if self._checkpoint.position(snapshot).durable_frame > self._applied_end.frame:
                snapshot.abort()
                return None
            try:
                other = hold_other()
                return HeldState(self._checkpoint, snapshot, self._journal, self._applied_end), other
            except BaseException:
                snapshot.abort()
                raise

    @property
    def disk_space(self) -> DiskSpace:
        """Space of the disk, for a backup."""
        return self._disk_space

    def delete_ballast(self, error: OSError) -> None:
        """Delete the ballast, because a write to the history has found the disk full, as `error` says.

        Raises: `error` itself, if it has another reason
        """
        self._disk_space.delete_ballast(error)

    def close(self) -> None:
        """Release files and locks, without writing. No page may be in progress."""
        self._unwritable_reason = "the store is closed"
        self._resources.close()

    # ---- Writing ----

    def _check_batch(self, batch: Batch, changes: Changes) -> list[tuple[list[bytes], bool]]:
        """Check that the batch removes only messages that exist, and puts only new ones. Otherwise a message would be
        lost, or be seen twice. Return the keys of removed messages that must be in the checkpoint, and whether they are
        transient. Raises: StoreError"""
        overlay = self._overlay
        in_checkpoint = []
        for removes, are_transient in ((changes.removes, False), (changes.transient_removes, True)):
            if removes and (old := self._check_removes(batch, removes, are_transient=are_transient)):
                in_checkpoint.append((old, are_transient))
        for puts in (batch.puts, batch.transient_puts):
            if puts and any(overlay.find(puts)):
                raise disagreement_error(batch.number, "puts a message that exists already")
        if batch.queues and not all(
            may_rename(self._queues.get(number), name) for number, name in batch.queues.items()
        ):
            raise disagreement_error(batch.number, "puts a queue that exists already")
        return in_checkpoint

    def _mark_lookup(self) -> Callable[[bytes], Mark]:
        """Return a function from a message key to the mark. The function is valid until the next batch is written. If
        another thread may write a batch, the caller must hold the lock."""
        marks = [index.marks for index in reversed(self._overlay.indexes) if index.marks]
        # In this order: a mark that the overlay drops meanwhile is in the checkpoint.
        return lambda key: find_mark(key, marks) or self._checkpoint.mark(key)

    def _check_removes(self, batch: Batch, keys: list[bytes], *, are_transient: bool) -> list[bytes]:
        """Return the keys that the journal does not have. Raises: StoreError"""
        if len(keys) > 1 and len(set(keys)) != len(keys):
            raise disagreement_error(batch.number, "removes a message twice")
        old = []
        for at, found in enumerate(self._overlay.find(keys)):
            if found is None:
                old.append(keys[at])
            elif found[0].is_transient(found[1]) is not are_transient:
                raise disagreement_error(batch.number, f"removes message {keys[at].hex()}, which does not exist")
        return old

    def _require_in_checkpoint(self, batch: Batch, keys: list[bytes], *, are_transient: bool) -> None:
        with self._changed:
            indexes = self._overlay.indexes
            missing = next((key for key in keys if is_removed(key, indexes)), None)
        kinds = self._checkpoint.transient_by_key(keys)
        missing = missing or next((key for key in keys if kinds.get(key) is not are_transient), None)
        if missing is not None:
            raise disagreement_error(batch.number, f"removes message {missing.hex()}, which does not exist")

    def _save_journal_end(self, sequence_limit: int) -> None:
        """Record in the checkpoint which frame of the journal is durable. On a full disk nothing is recorded; the last
        recorded number is still right.

        Raises: StoreError if the write fails for another reason
        """
        if self._log is not None:
            # Frames of a copy are not durable yet.
            return
        with translated_errors(f"write to the store in {self._path}", self._path):
            try:
                self._writer.retry_without_ballast(
                    partial(self._checkpoint.save_journal_end, self._journal.last_frame_number, sequence_limit)
                )
            except STORAGE_ERRORS as error:
                self._disk_space.note_disk_full(error)

    # ---- Reading ----

    def _page(
        self,
        make_view: Callable[[], OverlayView],
        checkpoint_messages: Callable[[lmdb.Transaction[bytes], OverlayView], Iterator[UndecodedMessage]],
        limit: int,
        size_max: int,
    ) -> Page:
        """Return a page from journal and checkpoint. Journal and checkpoint are read as of the same moment."""
        with self._reading():
            with self._lock:
                snapshot = self._checkpoint.snapshot()
                view = make_view()
                as_of = self._last_applied
            try:
                with snapshot:
                    checkpointed = self._checkpoint_messages(view, checkpoint_messages(snapshot, view))
                    merged = _deduplicated(merge(self._journal_messages(view), checkpointed, key=attrgetter("key")))
                    return Page.of(self._with_contents(merged, view, snapshot), limit, size_max, as_of=as_of)
            finally:
                self._checkpointer.close_view(view)

    def _reading(self) -> AbstractContextManager[None]:
        return translated_errors(f"read the store in {self._path}", self._path)

    def _with_contents(
        self, messages: Iterable[UndecodedMessage], view: OverlayView, snapshot: lmdb.Transaction[bytes]
    ) -> Iterator[UndecodedMessage]:
        for message in messages:
            if len(message.record) == REFERENCE_SIZE and (number := referenced_content_number(message.record)):
                message.content = self._content(content_key(number), view, snapshot)
            yield message

    def _content(self, key: bytes, view: OverlayView, snapshot: lmdb.Transaction[bytes]) -> bytes:
        """Return the record of a content as it was at the moment of the view; empty if it is missing."""
        with self._lock:
            span = view.content(key)
        if span is None:
            return self._checkpoint.content(snapshot, key)
        return next(self._journal.read_extents([(span.segment, span.offset, span.length)]))

    def _journal_messages(self, view: OverlayView) -> Iterator[UndecodedMessage]:
        for key, record in zip(view.keys(), self._journal.read_extents(view.extents()), strict=True):
            yield UndecodedMessage(key, record, view.mark(key) or NO_MARK, causes=view.causes(key))

    def _checkpoint_messages(
        self, view: OverlayView, messages: Iterator[UndecodedMessage]
    ) -> Iterator[UndecodedMessage]:
        for message in messages:
            key = message.key
            if not view.is_removed(key):
                message.mark = view.mark(key) or message.mark
                message.causes = view.causes(key).merged_onto(message.causes)
                yield message

    # ---- Recovery ----

    def _recover(self) -> Recovered:
        overlay, checkpoint = self._overlay, self._checkpoint
        recovered, position = checkpoint.read()
        # The next segment may have been checkpointed in part.
        overlay.last_checkpoint_segment = position.segment + 1
        history = []
        for segment, offset, payload in self._journal.replay(position):
            changes = decode_changes(payload)
            overlay.apply_changes(changes, segment, offset)
            if changes.history:
                history.append(changes.history)
        lost = describe_lost_tail(
            self._journal.last_frame_number,
            position.durable_frame,
            history[-1] if history else b"",
            self.last_history_chunk if self._log is None else None,
        )
        if lost:
            raise damage_error("journal", lost, self._path)
        self._journal.finish_replay()

        recovered = apply_journal(recovered, overlay.indexes)
        if not recovered.clean_stop and self._log is None:
            self._drop_transients()
        self._remove_duplicates()
        # From here on no message of that segment is both in the overlay and in the checkpoint.
        overlay.last_checkpoint_segment = position.segment
        if self._log is not None:
            self.restore_history(history)
            history = []
            recovered = self._catch_up(self._log)
        began = monotonic()
        self._queues = recovered.queues
        recovered = replace(recovered, counts=self._counts(), history=history)
        if self._log is not None and monotonic() > began + BEAT_S:
            # Without a row for long, another broker would take over.
            self._follow(EMPTY_PAYLOAD, self._writer.append_batch)
        return recovered

    def _drop_transients(self) -> None:
        self._writer.retry_without_ballast(self._checkpoint.drop_transients)
        if any(span.is_transient for _, span in self._overlay.messages()):
            # Recorded, because after a clean stop of this run the transients in the journal would count again.
            rare = RareChanges(drops_transients=True)
            segment, offset = self._writer.append_batch(encode_batch(Batch(0), rare), 0)
            self._overlay.apply_changes(Changes([], [], [], [], rare), segment, offset)

    # ---- Copy of a log ----

    def _catch_up(self, log: Log) -> Recovered:
        """Follow the log while the broker stands by, take it over, and return the state then."""
        self._checkpointer.is_enabled = True
        self._follow_rows(log)
        while log.stands_by(self._position) or not log.take_over(self._position):
            self._follow_rows(log)
            self._checkpointer.work()
            self.flush_history()
            self.while_standing_by()
        self.on_taken_over()
        self._follow_rows(log)
        recovered = apply_journal(self._checkpoint.read()[0], self._overlay.indexes)
        if not recovered.clean_stop:
            # A row, because all copies must drop them. If transients are in the log, only its rows tell.
            parts = encode_batch(Batch(0), RareChanges(drops_transients=True))
            self._follow(b"".join(parts), self._writer.append_batch)
        return recovered

    def _follow_rows(self, log: Log) -> None:
        for payload in log.rows_after(self._position):
            self._follow(payload, self._writer.append_row)
            self._checkpointer.checkpoint_due_segments()

    @property
    def _position(self) -> LogPosition:
        return LogPosition(self._journal.last_frame_number, self._journal.last_digest)

    def _follow(self, payload: bytes, append: Callable[[list[bytes], int], tuple[int, int]]) -> None:
        """Apply a row of the log. `append` appends it to the journal."""
        changes = decode_changes(memoryview(payload))
        if changes.rare is not None and changes.rare.drops_transients:
            # After a power cut, rows that follow again must find in the checkpoint what they remove.
            self._journal.sync()
            # Before the frame: the frame says that this was done.
            self._writer.retry_without_ballast(self._checkpoint.drop_transients)
            self._overlay.forget_removed_transients()
        segment, offset = append([payload], changes.count)
        with self._lock:
            self._overlay.apply_changes(changes, segment, offset)
        self._writer.append_empty_frames()
        if changes.history:
            self.follow_history(changes.history)

    def _remove_duplicates(self) -> None:
        overlay, checkpoint = self._overlay, self._checkpoint
        for index in overlay.indexes:
            stored = checkpoint.transient_by_key(index.removed)
            index.removed = {key: kind for key, kind in index.removed.items() if key in stored}
        checkpointed = checkpoint.transient_by_key(key for key, _ in overlay.messages(overlay.last_checkpoint_segment))
        overlay.remove_checkpointed(key for key in checkpointed if not is_removed(key, overlay.indexes))

    def _counts(self) -> dict[bytes, int]:
        removed = {key for index in self._overlay.indexes for key in index.removed}
        counts = self._checkpoint.counts()
        counts.update(self._overlay.counts())
        counts.subtract(Counter(key[:LANE_KEY_SIZE] for key in removed))
        return {lane: count for lane, count in counts.items() if count and lane != CONTENTS_LANE_KEY}


class _PendingApply:
    """Batch that was begun: when the log has its row, the journal gets its frame."""

    def __init__(self, append: Pending, write_frame: Callable[[], None]) -> None:
        self.socket = append.socket
        self._append = append
        self._write_frame = write_frame

    @property
    def is_sent(self) -> bool:
        return self._append.is_sent

    def advance(self) -> Progress:
        progress = self._append.advance()
        if progress is Progress.APPLIED:
            self._write_frame()
        return progress


def _unwritable_reason(batch: Batch) -> str:
    return f"batch {batch.number} could not be written; start the broker again"


def _deduplicated(messages: Iterable[UndecodedMessage]) -> Iterator[UndecodedMessage]:
    """Yield each message once. A message that is being checkpointed comes twice, from the journal first and then from
    the checkpoint; only the first is yielded."""
    last = b""
    for message in messages:
        if message.key != last:
            last = message.key
            yield message
