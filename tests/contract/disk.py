"""A store whose broker is opened, stopped cleanly, or crashed."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from select import select
from typing import Any

from tests.contract.fake_log import FakeLog, LogRows
from truenext.model.batch import Batch, Causes, Mark
from truenext.model.record import CONTENTS_LANE_KEY, lane_key, message_key, sequence_of, timer_key
from truenext.store.embedded import EmbeddedStore
from truenext.store.log import Log
from truenext.store.memory import MemoryStore
from truenext.store.store import Pending, Progress, Recovered, Store

KINDS = ["memory", "embedded", "checkpointing"]
"""Checkpointing is embedded with tiny segments that move into the checkpoint as soon as they may."""

COPIES = ["copy", "checkpointing copy", "new copy", "postgresql", "new postgresql"]
"""Kinds whose folder is a copy of a log, in memory or in PostgreSQL. A new one is made anew at each start: the folder
is deleted before, and the log has compacted what it may."""

NewLog = Callable[[], Log]

LANE = lane_key(1, 5)
OTHER_LANE = lane_key(1, 6)
NEXT_QUEUE = lane_key(2, 5)


class Disk:
    """Store that survives the stop or the crash of its broker."""

    store: Store

    def __init__(self, kind: str, folder: Path, new_log: NewLog | None = None) -> None:
        """`new_log` opens the log of a copy; by default that is one in memory."""
        self.kind = kind
        self.folder = folder
        self.memory = MemoryStore()
        self.log_rows = LogRows()
        self._new_log = new_log or (lambda: FakeLog(self.log_rows))
        self.number = 0
        self.open()

    def open(self) -> Recovered:
        if self.kind.startswith("new "):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.log_rows.compact()
        self.store = self.memory if self.kind == "memory" else self._open(self.folder)
        try:
            recovered = self.store.recover()
        except BaseException:
            self.store.close()
            raise
        self.number = 0
        return recovered

    def _open(self, folder: Path) -> EmbeddedStore:
        return embedded(self.kind, folder, self._new_log() if self.kind in COPIES else None)

    def check_new_copy(self) -> None:
        """Check that a folder made from the log alone has all that this one has."""
        self.store.close()
        states = []
        for folder in (self.folder, self.folder.with_name("made from the log")):
            store = self._open(folder)
            try:
                recovered = store.recover()
                lanes = (*recovered.counts, CONTENTS_LANE_KEY)
                pages = [store.read_page(lane, 0, 1000, 1 << 30).messages for lane in lanes]
                states.append((replace(recovered, history=[]), sorted(pages, key=str), all_timers(store)))
            finally:
                store.close()
        assert states[0] == states[1]

    def apply(self, **changes: Any) -> None:
        batch = self.batch(**changes)
        if batch.number % 2:
            self.store.apply(batch)
        else:
            begin_and_apply(self.store, batch)

    def batch(self, **changes: Any) -> Batch:
        self.number += 1
        batch = Batch(self.number)
        for name, value in changes.items():
            setattr(batch, name, value)
        batch.marks = {key: Mark(*mark) for key, mark in batch.marks.items()}
        batch.causes = {key: Causes(*causes) for key, causes in batch.causes.items()}
        return batch

    def crash(self) -> Recovered:
        self.store.close()
        return self.open()

    def stop(self) -> Recovered:
        self.apply(clean_stop=True)
        self.store.close()
        return self.open()


def embedded(kind: str, folder: Path, log: Log | None = None) -> EmbeddedStore:
    if kind.startswith("checkpointing"):
        return EmbeddedStore(folder, segment_bytes=200, segments_max=1, log=log)
    return EmbeddedStore(folder, segment_bytes=1 << 20, log=log)


ANSWER_S = 0.1
"""Time for which a test waits for the answer to a write that was begun."""


def is_applied(pending: Pending | None) -> bool:
    """Go on with a write as an event loop does. Return whether it has ended; otherwise it must be done again, by a call
    that may wait."""
    while pending is not None:
        progress = pending.advance()
        if progress is Progress.APPLIED:
            return True
        if progress is Progress.IN_DOUBT:
            break
        sending = [] if pending.is_sent else [pending.socket]
        if not any(select([pending.socket], sending, [], ANSWER_S)):
            break
    return False


def begin_and_apply(store: Store, batch: Batch) -> None:
    """Apply a batch as the broker does if the store has a log."""
    if not is_applied(store.begin(batch)):
        store.apply(batch)


def key(sequence: int, lane: bytes = LANE) -> bytes:
    return message_key(lane, sequence)


def put(*sequences: int, lane: bytes = LANE) -> dict[bytes, bytes]:
    return {key(sequence, lane): b"record %d" % sequence for sequence in sequences}


def timers(*due_ms: int, lane: bytes = LANE) -> dict[bytes, None]:
    return {timer_key(ms, lane, 0): None for ms in due_ms}


def all_timers(store: Store, limit: int = 1000) -> list[bytes]:
    """Page by page."""
    found: list[bytes] = []
    while True:
        page = store.read_timers(found[-1] if found else b"", limit)
        assert len(page.timers) <= limit
        assert page.timers or page.is_end
        found += page.timers
        if page.is_end:
            return found


def sequences(store: Store, lane: bytes = LANE, after: int = 0, limit: int = 1000) -> list[int]:
    return [sequence_of(message.key) for message in store.read_page(lane, after, limit).messages]
