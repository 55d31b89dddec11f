"""How batches become durable: on a thread of their own, or at once where that is quicker than asking somebody else.

One batch at a time goes to the store; while its thread writes it the next one gathers in the engine. There is no timer
in between: the disk sets the pace (group commit).

A batch that the disk takes quickly (write_time.py) is written by the event loop itself: handing it over and being
called back costs more than the write. Source: docs/decisions/0016-small-batches-at-once.md,
0047-larger-batches-at-once.md
"""

import threading
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from queue import SimpleQueue

from truenext.broker.write_time import WriteTimeEstimate
from truenext.clock import monotonic
from truenext.errors import StoreError, TruenextError
from truenext.history.writer import HistoryWriter
from truenext.model.batch import Batch
from truenext.model.limits import HISTORY_FLUSH_SECONDS
from truenext.store.store import Store


class Committer:
    def __init__(
        self,
        store: Store,
        history: HistoryWriter | None,
        loop: AbstractEventLoop,
        write_time: WriteTimeEstimate,
        *,
        on_committed: Callable[[Batch], None],
        on_failed: Callable[[TruenextError], None],
    ) -> None:
        """`on_committed` and `on_failed` are called on the loop; after `on_failed` no batch is ever written again."""
        self._store = store
        self._history = history
        self._loop = loop
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self.is_busy = False
        """A batch is on its way; the next must wait."""
        self._is_thread_idle = True
        """It has nothing to write, not even history."""
        self._write_time = write_time
        self._flush_timer: TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="truenext-store", daemon=True)
        self._thread.start()

    def commit(self, batch: Batch) -> bool:
        """Make a batch durable. True if it is; otherwise `on_committed` will say when it is.

        Raises: TruenextError if it cannot be written, and then none ever will be.
        """
        assert not self.is_busy
        if self._is_thread_idle and self._write_time.is_quick(batch.size + len(batch.history)):
            self._write_inline(batch)
            return True
        self.is_busy = True
        self._is_thread_idle = False
        self._queue.put(batch)
        return False

    def close(self) -> None:
        """End the thread, behind what it is doing."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._queue.put(None)
        self._thread.join()

    # ---- At once ----

    def _write_inline(self, batch: Batch) -> None:
        self._apply(batch, is_inline=True)
        self._append_history(batch)
        if self._history is not None:
            self._flush_later()

    def _apply(self, batch: Batch, *, is_inline: bool) -> None:
        if not batch.is_empty():
            started = monotonic()
            self._store.apply(batch)
            size = batch.size + len(batch.history)
            self._write_time.add_write(size, monotonic() - started, is_inline=is_inline)

    # ---- History ----

    def _append_history(self, batch: Batch) -> None:
        if self._history is not None:
            self._history.append(batch.history)
            if batch.is_empty():
                # The store does not have it either.
                self._history.flush()
        # It may be large, and the batch is known until the next one comes.
        batch.history = b""

    def _flush_later(self) -> None:
        """Those who read the files can wait a moment: what the history lacks is in the store's journal."""
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(HISTORY_FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        assert self._history is not None
        try:
            self._history.flush()
        except TruenextError as error:
            self._on_failed(error)
            return
        if not self._is_thread_idle:
            self._flush_later()

    # ---- On the thread ----

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                self._apply(batch, is_inline=False)
                self._loop.call_soon_threadsafe(self._done, batch)
                self._append_history(batch)
                self._is_thread_idle = True
            except Exception as error:
                failure = error if isinstance(error, TruenextError) else StoreError(f"the store failed: {error!r}")
                self._loop.call_soon_threadsafe(self._on_failed, failure)
                return

    def _done(self, batch: Batch) -> None:
        self.is_busy = False
        if self._history is not None:
            self._flush_later()
        self._on_committed(batch)
