"""A disk that is slow or full when a test says so: a store in front of the one that keeps the messages."""

import threading
from collections.abc import Collection

from truenext.broker.write_time import WriteTimeEstimate
from truenext.model.batch import Batch
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import PAGE_BYTES
from truenext.store.memory import MemoryStore
from truenext.store.store import Page, Recovered, TimerPage
from truenext.testing.clock import AdvanceableLoop, LoopTimer
from truenext.testing.faults import Faults


class FaultyStore:
    """The store of one run of the broker."""

    def __init__(self, store: MemoryStore, loop: AdvanceableLoop, faults: Faults) -> None:
        self._memory_store = store
        self._loop = loop
        self._faults = faults
        self._is_killed = False
        self._batch_delay_over: threading.Event | None = None
        """Of the batch that waits for its time to be over."""
        self._timer: LoopTimer | None = None
        self.may_be_slow = False
        """While the broker starts or stops no batch takes long."""

    # ---- Faults ----

    @property
    def is_slow(self) -> bool:
        return self.may_be_slow and self._faults.disk_delay_s > 0

    @property
    def is_delaying(self) -> bool:
        """A batch waits for the clock."""
        return self._timer is not None

    def end_batch_delay(self) -> None:
        """What waits is durable now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._batch_delay_over is not None:
            self._batch_delay_over.set()

    def kill(self) -> None:
        """What is not durable will not be."""
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

    def recover(self) -> Recovered:
        return self._memory_store.recover()

    def apply(self, batch: Batch) -> None:
        if self.is_slow:
            # On the store's thread, see `FaultyWriteTimeEstimate`.
            done = threading.Event()
            self._loop.call_soon_threadsafe(self._delay_batch, done)
            while not (done.wait(0.05) or self._is_killed):
                pass
        if not self._is_killed:
            self._memory_store.apply(batch)

    def read_page(self, lane: bytes, after_sequence: int, limit: int, size_max: int = PAGE_BYTES) -> Page:
        return self._memory_store.read_page(lane, after_sequence, limit, size_max)

    def read_messages(self, keys: Collection[bytes], size_max: int = PAGE_BYTES) -> Page:
        return self._memory_store.read_messages(keys, size_max)

    def content_references(self, numbers: Collection[int]) -> dict[int, int]:
        return self._memory_store.content_references(numbers)

    def read_timers(self, after: bytes, limit: int) -> TimerPage:
        return self._memory_store.read_timers(after, limit)

    def close(self) -> None:
        self._memory_store.close()


class FaultyWriteTimeEstimate(WriteTimeEstimate):
    """What the broker knows of the disk: while it is slow, the event loop writes nothing itself."""

    def __init__(self, store: FaultyStore) -> None:
        super().__init__()
        self._store = store

    def is_quick(self, size: int) -> bool:
        return not self._store.is_slow and super().is_quick(size)
