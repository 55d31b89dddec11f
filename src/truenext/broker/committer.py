"""How batches become durable without the event loop waiting.

One batch at a time goes to the store's own thread; while it is written the next one gathers in the engine. There is no
timer in between: the disk sets the pace (group commit).
"""

import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable
from queue import SimpleQueue

from truenext.batch import Batch
from truenext.errors import StoreError, TruenextError
from truenext.history.writer import History
from truenext.store.store import Store


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
        self._thread = threading.Thread(target=self._run, name="truenext-store", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Make a batch durable; `committed` will say when it is."""
        assert not self.is_busy
        self.is_busy = True
        self._handed_over.put(batch)

    def close(self) -> None:
        """End the thread, behind what it is doing."""
        self._handed_over.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._handed_over.get()) is not None:
            try:
                if not batch.is_empty():
                    self._store.apply(batch)
                self._loop.call_soon_threadsafe(self._done, batch)
                if self._history is not None:
                    # Nobody has to wait for that: what must not be lost of it is in the batch.
                    self._history.append(batch.history)
            except Exception as error:
                failure = error if isinstance(error, TruenextError) else StoreError(f"the store failed: {error!r}")
                self._loop.call_soon_threadsafe(self._failed, failure)
                return

    def _done(self, batch: Batch) -> None:
        self.is_busy = False
        self._committed(batch)
