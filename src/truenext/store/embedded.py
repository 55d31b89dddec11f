"""The store of one broker on its own disk: a journal, and behind it a checkpoint in LMDB.

The data folder:

    lock           the pid of the broker that uses the folder, which holds a flock on this file
    journal/       what happened last, see journal.py and changes.py
    lmdb/          what happened before that, see checkpoint.py

    apply          the batch goes into the journal, durable by one write; then the overlay knows of it
    move           on a thread of its own: what the oldest segment still says goes into the checkpoint, and the
                   segment becomes a spare. What was consumed before that never costs a write to LMDB.
    page, recover  the checkpoint, with the journal laid over it (overlay.py)

A crash can interrupt a move anywhere. The checkpoint then has some of what the journal still holds: the position in
it moves only with the last of a segment, and recovery leaves out of the overlay what it finds in the checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace
from heapq import merge
from itertools import islice
from threading import Condition, Thread
from typing import TYPE_CHECKING

from truenext.batch import Batch
from truenext.errors import StoreError
from truenext.limits import PAGE_BYTES
from truenext.record import LANE_KEY_SIZE
from truenext.room import Room
from truenext.store import folder
from truenext.store.changes import Changes, Rest, changes_of, decode, encode
from truenext.store.checkpoint import MAP_SIZE, Checkpoint, Position
from truenext.store.journal import SEGMENT_BYTES, Journal
from truenext.store.overlay import Overlay, Place, is_gone, mark_of
from truenext.store.store import Page, Recovered, StoredMessage
from truenext.store.trouble import CAUSES, disagreement, explained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)

SEGMENTS_MAX = 16
"""Segments of the journal that are kept while anything in them lives: with SEGMENT_BYTES, half a gigabyte."""

SEGMENTS_BEHIND_MAX = 4
"""Further segments that the journal may grow by while the oldest are moved; then batches wait for the move."""

SEGMENT_RECORDS_MAX = 50_000
"""Puts and removes in one segment, roughly: with SEGMENTS_MAX, what a restart has to replay."""

MOVE_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of records in one transaction of the checkpoint, or one message: its dirty pages are private memory."""

MOVE_KEYS_MAX = 1000
"""Messages in one transaction of the checkpoint: each may touch a page of its own."""


class EmbeddedStore:
    def __init__(
        self,
        path: Path,
        *,
        map_size: int = MAP_SIZE,
        segment_bytes: int = SEGMENT_BYTES,
        segments_max: int = SEGMENTS_MAX,
    ) -> None:
        """Lock and open the data folder, which is made if it is missing.

        The history in a batch is kept as long as its segment; `sync_history` (see there) comes before that goes.

        Raises: StoreInUseError if another broker uses it, StoreError if it cannot be used.
        """
        self._path = path
        self._segments_max = segments_max
        self.sync_history: Callable[[], None] = _nothing
        """Makes what the history's own files have durable; the history of every batch applied so far is in them."""
        self._applied = 0
        self._refusal = "recover() comes first"
        self._overlay = Overlay()
        self._queues: set[int] = set()
        self._changed = Condition()
        """Held for the overlay, and for the segments that it names; tells of every move and every new segment."""
        self._mover: Thread | None = None
        self._is_closing = False
        self._move_failure: StoreError | None = None
        with ExitStack() as opened:
            try:
                folder.make(path)
                opened.callback(os.close, folder.lock(path))
                self._checkpoint = Checkpoint(path / "lmdb", map_size=map_size)
                opened.callback(self._checkpoint.close)
                (path / "journal").mkdir(mode=0o700, exist_ok=True)
                self._journal = Journal(path / "journal", salt=self._checkpoint.salt, segment_bytes=segment_bytes)
                opened.callback(self._journal.close)
                for one in (path / "lmdb", path / "journal", path):
                    folder.sync_folder(one)
            except CAUSES as error:
                raise explained(f"open the store in {path}", error) from error
            self._opened = opened.pop_all()

    # ---- The promise of store.py ----

    def recover(self) -> Recovered:
        try:
            recovered = self._recover()
        except CAUSES as error:
            raise explained(f"read the store in {self._path}", error) from error
        self._refusal = ""
        self._mover = Thread(target=self._move_when_due, name="truenext-checkpoint", daemon=True)
        self._mover.start()
        return recovered

    def apply(self, batch: Batch) -> None:
        if self._refusal:
            raise StoreError(f"batch {batch.number} is refused: {self._refusal}")
        if self._move_failure is not None:
            raise self._move_failure
        # Set before anything can fail. After a failed write nobody knows what is on the disk, so that a second try
        # could confirm what is not there.
        self._refusal = f"batch {batch.number} could not be written; start the broker again"
        changes = changes_of(batch)
        try:
            self._check(batch, changes)
            segment, offset = self._append(encode(batch, changes.rest))
        except CAUSES as error:
            raise explained(f"write to the store in {self._path}", error) from error
        with self._changed:
            self._overlay.add(changes, segment, offset)
            self._applied = batch.number
        if batch.queues:
            self._queues.update(batch.queues)
        self._refusal = ""

    def page(self, lane: bytes, after_sequence: int, limit: int, size_max: int = PAGE_BYTES) -> Page:
        try:
            with self._changed:
                merged = merge(
                    self._page_of_journal(lane, after_sequence, limit + 1),
                    self._page_of_checkpoint(lane, after_sequence),
                    key=lambda message: message.key,
                )
                return Page.of(merged, limit, size_max, as_of=self._applied)
        except CAUSES as error:
            raise explained(f"read the store in {self._path}", error) from error

    @property
    def room(self) -> Room:
        return Room.PLENTY

    def close(self) -> None:
        """Let go of files and locks. Nothing is written. No page may be under way."""
        self._refusal = "the store is closed"
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._mover is not None:
            self._mover.join()
        self._opened.close()

    # ---- Writing ----

    def _check(self, batch: Batch, changes: Changes) -> None:
        """A message that is not where the broker thinks, or is where it must not be, means that one was lost or would
        be seen twice: better no batch at all.
        """
        overlay = self._overlay
        for keys, are_transient in ((changes.removes, False), (changes.transient_removes, True)):
            if len(keys) > 1 and len(set(keys)) != len(keys):
                raise disagreement(batch.number, "removes a message twice")
            old = []
            for key in keys:
                place = overlay.place(key)
                if place is None:
                    old.append(key)
                elif place.is_transient is not are_transient:
                    raise disagreement(batch.number, f"removes message {key.hex()}, which is not there")
            if old:
                self._check_old(batch, old, are_transient=are_transient)
        for puts in (changes.puts, changes.transient_puts):
            for key, _ in puts:
                if overlay.place(key) is not None:
                    raise disagreement(batch.number, "puts a message that is there already")
        if not self._queues.isdisjoint(batch.queues):
            raise disagreement(batch.number, "puts a queue that is there already")

    def _check_old(self, batch: Batch, keys: list[bytes], *, are_transient: bool) -> None:
        with self._changed:
            layers = self._overlay.layers
            gone = next((key for key in keys if is_gone(key, layers)), None)
        kinds = self._checkpoint.kinds(keys)
        gone = gone or next((key for key in keys if kinds.get(key) is not are_transient), None)
        if gone is not None:
            raise disagreement(batch.number, f"removes message {gone.hex()}, which is not there")

    def _append(self, payload: bytes) -> tuple[int, int]:
        journal, layers = self._journal, self._overlay.layers
        is_long = bool(layers) and layers[-1].segment == journal.newest and layers[-1].records >= SEGMENT_RECORDS_MAX
        if is_long or not journal.has_place(len(payload)):
            with self._changed:
                if self._mover is not None:
                    self._changed.wait_for(lambda: self._move_failure is not None or not self._is_behind())
                if self._move_failure is not None:
                    raise self._move_failure
            journal.roll(len(payload))
            with self._changed:
                self._changed.notify_all()
        return journal.append(payload)

    def _is_behind(self) -> bool:
        return len(self._journal.segments) >= self._segments_max + SEGMENTS_BEHIND_MAX

    # ---- Moving what the journal still says into the checkpoint ----

    def _move_when_due(self) -> None:
        try:
            while True:
                self._journal.prepare()
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closing or self._is_move_due() or self._journal.needs_spare)
                    if self._is_closing:
                        return
                    is_due = self._is_move_due()
                if is_due:
                    self._move(self._journal.segments[0])
        except Exception as error:
            if isinstance(error, CAUSES):
                failure = explained(f"write to the store in {self._path}", error)
            else:
                failure = StoreError(f"the store failed: {error!r}")
            failure.__cause__ = error
            logger.critical("the journal cannot move into the checkpoint", extra={"reason": str(failure)})
            with self._changed:
                self._move_failure = failure
                self._changed.notify_all()

    def _is_move_due(self) -> bool:
        segments = self._journal.segments
        if len(segments) < 2:
            return False
        return len(segments) > self._segments_max or next(self._overlay.messages(segments[0]), None) is None

    def _move(self, segment: int) -> None:
        overlay = self._overlay
        with self._changed:
            overlay.moving = segment
            alive = list(overlay.messages(segment))
            layers = [layer for layer in overlay.layers if layer.segment <= segment]
        for layer in layers:
            gone = iter(layer.gone.items())
            while keys := list(islice(gone, MOVE_KEYS_MAX)):
                self._checkpoint.delete(keys)
        for are_transient in (False, True):
            for messages in self._records(alive, are_transient=are_transient):
                self._checkpoint.put(messages, are_transient=are_transient)
        with self._changed:
            # Copied: whoever removes a message takes its mark out of every layer.
            marks = {key: mark for layer in layers for key, mark in layer.marks.items()}
        self.sync_history()
        self._checkpoint.finish(layers, marks, Position(segment, self._journal.last_frame(segment)))
        with self._changed:
            overlay.leave_to_checkpoint((key for key, _ in alive), segment)
            overlay.drop_layers(segment)
            self._journal.release(segment)
            self._changed.notify_all()

    def _records(self, alive: list[tuple[bytes, Place]], *, are_transient: bool) -> Iterator[list[tuple[bytes, bytes]]]:
        """Keys and records of one kind, in pieces that one transaction can take."""
        piece: list[tuple[bytes, bytes]] = []
        size = 0
        for key, place in alive:
            if place.is_transient is not are_transient:
                continue
            if piece and (size + place.length > MOVE_BYTES_MAX or len(piece) >= MOVE_KEYS_MAX):
                yield piece
                piece, size = [], 0
            piece.append((key, self._journal.read(place.segment, place.offset, place.length)))
            size += place.length
        if piece:
            yield piece

    # ---- Reading ----

    def _page_of_journal(self, lane: bytes, after_sequence: int, limit: int) -> Iterator[StoredMessage]:
        layers = self._overlay.layers
        for key, place in self._overlay.page(lane, after_sequence, limit):
            record = self._journal.read(place.segment, place.offset, place.length)
            yield StoredMessage(key, record, *(mark_of(key, layers) or (0, 0)))

    def _page_of_checkpoint(self, lane: bytes, after_sequence: int) -> Iterator[StoredMessage]:
        overlay, layers = self._overlay, self._overlay.layers
        with closing(self._checkpoint.page(lane, after_sequence)) as entries:
            for key, record, attempts, deliveries in entries:
                # A message that is being moved is in both.
                if not is_gone(key, layers) and overlay.place(key) is None:
                    yield StoredMessage(key, record, *(mark_of(key, layers) or (attempts, deliveries)))

    # ---- Recovery ----

    def _recover(self) -> Recovered:
        overlay, checkpoint = self._overlay, self._checkpoint
        recovered, position = checkpoint.read()
        # The move of this one may have begun.
        overlay.moving = position.segment + 1
        history = []
        for segment, offset, payload in self._journal.replay(position.segment, position.frame):
            changes = decode(payload)
            overlay.add(changes, segment, offset)
            if changes.history:
                history.append(changes.history)

        queues, producers = recovered.queues, recovered.producers
        for layer in overlay.layers:
            queues.update(layer.queues)
            for name in layer.forgotten_producers:
                producers.pop(name, None)
            producers.update(layer.producers)
            recovered = replace(
                recovered,
                sequence_limit=layer.sequence_limit or recovered.sequence_limit,
                clean_stop=recovered.clean_stop if layer.clean_stop is None else layer.clean_stop,
            )
        if not recovered.clean_stop:
            self._drop_transients()
        self._leave_out_what_is_in_both()
        self._queues = set(queues)
        return replace(
            recovered,
            counts=self._counts(),
            history=history,
            producers=dict(sorted(producers.items(), key=lambda item: (item[1].used_ms, item[0]))),
        )

    def _drop_transients(self) -> None:
        self._checkpoint.drop_transients()
        if any(place.is_transient for _, place in self._overlay.messages()):
            # Written down, because after a clean stop of this run the transients in the journal would count again.
            rest = Rest(drops_transients=True)
            segment, offset = self._append(encode(Batch(0), rest))
            self._overlay.add(Changes([], [], [], [], rest), segment, offset)

    def _leave_out_what_is_in_both(self) -> None:
        overlay, checkpoint = self._overlay, self._checkpoint
        for layer in overlay.layers:
            here = checkpoint.kinds(layer.gone)
            layer.gone = {key: kind for key, kind in layer.gone.items() if key in here}
        moved = checkpoint.kinds(key for key, _ in overlay.messages(overlay.moving))
        overlay.leave_to_checkpoint([key for key in moved if not is_gone(key, overlay.layers)], overlay.moving)

    def _counts(self) -> dict[bytes, int]:
        gone = {key for layer in self._overlay.layers for key in layer.gone}
        counts = Counter(self._checkpoint.counts())
        counts.update(self._overlay.counts())
        counts.subtract(Counter(key[:LANE_KEY_SIZE] for key in gone))
        return {lane: count for lane, count in counts.items() if count}


def _nothing() -> None:
    pass
