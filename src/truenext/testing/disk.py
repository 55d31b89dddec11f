"""Store of a test broker: keeps all data in memory, and acts as a slow or full disk when the test says so."""

import threading

from truenext.broker.write_time import WriteTimeEstimate
from truenext.client.core.waiting import DelayedCall
from truenext.model.batch import Batch
from truenext.model.disk_level import DiskLevel
from truenext.store.memory import MemoryStore
from truenext.store.store import JournalSize
from truenext.testing.clock import AdvanceableLoop
from truenext.testing.faults import Faults


class FaultyStore:
    """Store for one run of a test broker. It wraps the store in memory, and is slow or full when the test says so."""

    def __init__(self, store: MemoryStore, loop: AdvanceableLoop, faults: Faults) -> None:
        self._memory_store = store
        self._loop = loop
        self._faults = faults
        self._is_killed = False
        self._batch_delay_over: threading.Event | None = None
        self._timer: DelayedCall | None = None
        self.may_be_slow = False
        """False while the broker starts or stops. Then batches are not delayed."""
        self.recover = store.recover
        self.begin = store.begin
        self.read_page = store.read_page
        self.read_messages = store.read_messages
        self.content_references = store.content_references
        self.read_timers = store.read_timers
        self.close = store.close

    # ---- Faults ----

    @property
    def is_slow(self) -> bool:
        return self.may_be_slow and self._faults.disk_delay_s > 0

    @property
    def is_delaying(self) -> bool:
        """True while the store delays a batch, until the broker's clock has advanced."""
        return self._timer is not None

    def end_batch_delay(self) -> None:
        """End the delay of the current batch, so that it becomes durable now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._batch_delay_over is not None:
            self._batch_delay_over.set()

    def kill(self) -> None:
        """Discard the current batch if it is not durable, and all later batches."""
        self._is_killed = True
        self.end_batch_delay()

    def _delay_batch(self, done: threading.Event) -> None:
        self._batch_delay_over = done
        if self.is_slow and not self._is_killed:
            self._timer = self._loop.call_later(self._faults.disk_delay_s, self.end_batch_delay)
        else:
            done.set()

    # ---- The store ----

    @property
    def disk_level(self) -> DiskLevel:
        return DiskLevel.FULL if self._faults.is_disk_full else self._memory_store.disk_level

    @property
    def disk_level_bytes(self) -> dict[str, int]:
        return self._memory_store.disk_level_bytes

    @property
    def journal_size(self) -> JournalSize | None:
        return self._memory_store.journal_size

    def apply(self, batch: Batch) -> None:
        if self.is_slow:
            # This runs on the store's thread, see `FaultyWriteTimeEstimate`.
            done = threading.Event()
            self._loop.call_soon_threadsafe(self._delay_batch, done)
            while not (done.wait(0.05) or self._is_killed):
                pass
        if not self._is_killed:
            self._memory_store.apply(batch)


class FaultyWriteTimeEstimate(WriteTimeEstimate):
    """Estimate of write times for a FaultyStore. While the disk is slow, no write counts as quick. So the store's
    thread makes all writes, and the event loop none."""

    def __init__(self, store: FaultyStore) -> None:
        super().__init__()
        self._store = store

    def is_quick(self, size: int) -> bool:
        return not self._store.is_slow and super().is_quick(size)
