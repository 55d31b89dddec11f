"""How batches become durable: on a thread of their own, or at once where that is quicker than asking somebody else.

One batch at a time goes to the store; while its thread writes it the next one gathers in the engine. There is no timer
in between: the disk sets the pace (group commit).

A small batch on a fast disk is written by the event loop itself: handing it over and being called back costs more than
the write. Source: docs/decisions/0016-small-batches-at-once.md
"""

import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter

from truenext.batch import Batch
from truenext.errors import StoreError, TruenextError
from truenext.history.writer import History
from truenext.limits import WRITE_AT_ONCE_BYTES_MAX, WRITE_AT_ONCE_SECONDS_MAX
from truenext.store.store import Store

WEIGHT = 0.1
"""Of the last write in the average of how long they take."""


class Committer:
    def __init__(
        self,
        store: Store,
        history: History | None,
        loop: AbstractEventLoop,
        *,
        committed: Callable[[Batch], None],
        failed: Callable[[TruenextError], None],
    ) -> None:
        """`committed` and `failed` are called on the loop; after `failed` no batch is ever written again."""
        self._store = store
        self._history = history
        self._loop = loop
        self._committed = committed
        self._failed = failed
        self._handed_over: SimpleQueue[Batch | None] = SimpleQueue()
        self.is_busy = False
        """A batch is on its way; the next must wait."""
        self._is_thread_idle = True
        """It has nothing to write, not even history."""
        self._seconds = 0.0
        """How long a small write takes, on average."""
        self._unwritten: list[bytes] = []
        """History of batches that were written at once."""
        self._thread = threading.Thread(target=self._run, name="truenext-store", daemon=True)
        self._thread.start()

    def commit(self, batch: Batch) -> bool:
        """Make a batch durable. True if it is; otherwise `committed` will say when it is.

        Raises: TruenextError if it cannot be written, and then none ever will be.
        """
        assert not self.is_busy
        if (
            batch.size + len(batch.history) <= WRITE_AT_ONCE_BYTES_MAX
            and self._seconds <= WRITE_AT_ONCE_SECONDS_MAX
            and self._is_thread_idle
        ):
            self._write(batch)
            return True
        self._write_history()
        self.is_busy = True
        self._is_thread_idle = False
        self._handed_over.put(batch)
        return False

    def close(self) -> None:
        """End the thread, behind what it is doing."""
        self._handed_over.put(None)
        self._thread.join()
        self._write_history()

    # ---- At once ----

    def _write(self, batch: Batch) -> None:
        # A segment of the journal may go with the next batch, and with it the only copy of the history of the last one.
        self._write_history()
        if not batch.is_empty():
            started = perf_counter()
            self._store.apply(batch)
            self._seconds += WEIGHT * (perf_counter() - started - self._seconds)
        if self._history is not None and batch.history:
            # Later: nobody has to wait for that, what must not be lost of it is in the batch.
            if not self._unwritten:
                self._loop.call_soon(self._write_history)
            self._unwritten.append(batch.history)

    def _write_history(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if self._history is not None:
            try:
                for chunk in unwritten:
                    self._history.append(chunk)
            except TruenextError as error:
                self._failed(error)

    # ---- On the thread ----

    def _run(self) -> None:
        while (batch := self._handed_over.get()) is not None:
            try:
                if not batch.is_empty():
                    started = perf_counter()
                    self._store.apply(batch)
                    if batch.size <= WRITE_AT_ONCE_BYTES_MAX:
                        self._seconds += WEIGHT * (perf_counter() - started - self._seconds)
                self._loop.call_soon_threadsafe(self._done, batch)
                if self._history is not None:
                    self._history.append(batch.history)
                self._is_thread_idle = True
            except Exception as error:
                failure = error if isinstance(error, TruenextError) else StoreError(f"the store failed: {error!r}")
                self._loop.call_soon_threadsafe(self._failed, failure)
                return

    def _done(self, batch: Batch) -> None:
        self.is_busy = False
        self._committed(batch)
