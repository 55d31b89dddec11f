"""Committer: makes batches durable, on a thread of its own, at once on the event loop, or by a log's answer to it.

Batches go to the store one after the other. While the thread writes a batch, the next one gathers in the engine.
Batches follow one another without a timer: the disk sets the pace (group commit).

If the disk will take a batch quickly (write_time.py), the event loop itself writes it: handing the batch to the thread
and back would cost more. Source: docs/decisions/0047-larger-batches-at-once.md

If the store is a copy of a log, the event loop begins a batch, and goes on with it when the log's answer is there. It
never waits: whatever is unusual is left to the thread. Source: docs/decisions/0099-a-log-in-postgresql.md
"""

import threading
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from math import inf
from queue import SimpleQueue

from truenext.broker.write_time import WriteTimeEstimate
from truenext.clock import monotonic
from truenext.errors import StoreError, TruenextError
from truenext.history.writer import HistoryWriter
from truenext.model.batch import Batch
from truenext.model.histogram import SHORT_TIME_BUCKETS, HistogramCounter
from truenext.model.limits import HISTORY_FLUSH_SECONDS
from truenext.store.log import BEAT_S
from truenext.store.store import Pending, Progress, Store

ANSWER_SECONDS_MAX = 0.1
"""Time after which the thread waits for a log's answer, instead of the event loop. It can tell why there is none."""

BEAT_CHECK_S = 0.1
"""Seconds between two readings of `is_row_due` by the broker."""

UNLOGGED_BYTES_MAX = 1024 * 1024
"""Bytes of history at which a log gets a row for the history alone. An event has four bytes or more, so that fewer than
GAP_EVENTS events are lost with a crash."""

_NO_SOCKET = -1


class CommitTotals:
    """Numbers of all batches that were made durable. The thread adds to them, and the event loop reads them."""

    def __init__(self) -> None:
        self.bytes = 0
        self.times = HistogramCounter(SHORT_TIME_BUCKETS)
        """Seconds that each batch took until it was durable."""

    def add(self, size: int, seconds: float) -> None:
        self.bytes += size
        self.times.add(seconds)


class Committer:
    def __init__(
        self,
        store: Store,
        history: HistoryWriter | None,
        loop: AbstractEventLoop,
        write_time: WriteTimeEstimate,
        *,
        has_log: bool = False,
        on_committed: Callable[[Batch], None],
        on_failed: Callable[[TruenextError], None],
    ) -> None:
        """`has_log` tells whether the store is a copy of a log. `on_committed` and `on_failed` are called on the event
        loop. After `on_failed` no batch is written any more."""
        self._store = store
        self._history = history
        self._loop = loop
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self.is_busy = False
        """True while there is a batch that is not durable yet. `commit` must not be called then."""
        self._handed_count = 0
        """Number of batches that the event loop has handed to the thread."""
        self._finished_count = 0
        """Number of batches of which the thread has written the history, too. Only the thread changes this number. A
        flag that both set could say that the thread is idle when it has just got another batch."""
        self._has_log = has_log
        self._beat_s = BEAT_S - BEAT_CHECK_S
        """Longest time in seconds between the begins of two rows of a log."""
        self._row_began = -inf
        """Time at which the last row of a log began."""
        self._unlogged: list[bytes] = []
        """History of the batches since the last row of a log. The history's own files get it with the next row: another
        broker, which has only the rows, must not have another history, or use a number again."""
        self._unlogged_bytes = 0
        self._write_time = write_time
        self.totals = CommitTotals()
        self._flush_timer: TimerHandle | None = None
        self._pending: tuple[Batch, Pending] | None = None
        """Batch for whose answer the event loop waits."""
        self._answer_timer: TimerHandle | None = None
        self._socket = _NO_SOCKET
        """Socket that the event loop watches, also between two batches."""
        self._is_sending = False
        """True while the event loop watches whether the socket is writable, too."""
        self._thread = threading.Thread(target=self._run, name="truenext-store", daemon=True)
        self._thread.start()

    def commit(self, batch: Batch) -> bool:
        """Make a batch durable. Returns True if the batch is durable now; if False, `on_committed` is called later.

        Raises: TruenextError if the event loop itself cannot write the batch. No batch may be committed after that.
        """
        assert not self.is_busy
        if self._has_log and not self._becomes_row(batch):
            return True
        if not self._has_log and self._is_thread_idle and self._write_time.is_quick(batch.size + len(batch.history)):
            self._apply(batch, is_inline=True)
            self._append_history(batch)
            if self._history is not None:
                self._flush_later()
            return True
        self.is_busy = True
        if not (self._has_log and self._is_thread_idle and self._begin(batch)):
            self._hand_over(batch)
        return False

    @property
    def _is_thread_idle(self) -> bool:
        """True while the thread has neither a batch nor history to write."""
        return self._handed_count == self._finished_count

    def close(self) -> None:
        """End the thread after its current work. A batch for whose answer the event loop waits is part of that."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._give_up_answer()
        self._unwatch()
        self._queue.put(None)
        self._thread.join()

    # ---- At once ----

    def _apply(self, batch: Batch, *, is_inline: bool) -> None:
        if self._has_log or not batch.is_empty():
            started = monotonic()
            self._store.apply(batch)
            size, seconds = batch.size + len(batch.history), monotonic() - started
            self._write_time.add_write(size, seconds, is_inline=is_inline)
            self.totals.add(size, seconds)

    # ---- Rows of a log ----

    @property
    def is_row_due(self) -> bool:
        """True if a log needs a row, even one that changes nothing."""
        return self._has_log and (
            monotonic() - self._row_began >= self._beat_s or self._unlogged_bytes >= UNLOGGED_BYTES_MAX
        )

    def log_each_batch(self) -> None:
        """Make a row of each batch from now on, because the broker stops: its last events must be in the log."""
        self._beat_s = 0.0

    def _becomes_row(self, batch: Batch) -> bool:
        """Return whether a batch must become a row of the log. If so, it gets the history of the batches before it that
        became none; else its own history waits."""
        self._unlogged.append(batch.history)
        self._unlogged_bytes += len(batch.history)
        batch.history = b""
        if batch.is_empty() and not self.is_row_due:
            return False
        batch.history = b"".join(self._unlogged)
        self._unlogged.clear()
        self._unlogged_bytes = 0
        self._row_began = monotonic()
        return True

    # ---- By an answer ----

    def _begin(self, batch: Batch) -> bool:
        """Begin to write a batch. Return False if the thread must write it."""
        pending = self._store.begin(batch)
        if pending is None:
            return False
        self._pending = batch, pending
        self._watch(pending)
        self._answer_timer = self._loop.call_later(ANSWER_SECONDS_MAX, self._give_up_answer)
        return True

    def _go_on(self) -> None:
        if self._pending is None:
            # The server has ended the connection: found by the next batch.
            self._unwatch()
            return
        batch, pending = self._pending
        # Before `advance`, which may close the socket: a loop cannot change what it watches of a closed one.
        self._unwatch_writing()
        try:
            progress = pending.advance()
        except Exception as error:
            self._end_answer()
            self._on_failed(_failure_of(error))
            return
        if progress is Progress.IN_DOUBT:
            self._give_up_answer()
        elif progress is Progress.APPLIED:
            self._end_answer()
            self._finish_pending(batch)
        else:
            self._watch(pending)

    def _finish_pending(self, batch: Batch) -> None:
        self.totals.add(batch.size + len(batch.history), monotonic() - self._row_began)
        try:
            self._append_history(batch)
        except TruenextError as error:
            self._on_failed(error)
            return
        self._done(batch)

    def _end_answer(self) -> None:
        self._pending = None
        if self._answer_timer is not None:
            self._answer_timer.cancel()

    def _give_up_answer(self) -> None:
        """Leave the batch for whose answer the event loop waits to the thread."""
        if self._pending is not None:
            batch, _ = self._pending
            self._end_answer()
            self._hand_over(batch)

    def _hand_over(self, batch: Batch) -> None:
        # From here on the connection is the thread's, which may close it.
        self._unwatch()
        self._handed_count += 1
        self._queue.put(batch)

    def _watch(self, pending: Pending) -> None:
        if pending.socket != self._socket:
            self._unwatch()
            self._loop.add_reader(pending.socket, self._go_on)
            self._socket = pending.socket
        if not pending.is_sent:
            self._loop.add_writer(self._socket, self._go_on)
            self._is_sending = True

    def _unwatch_writing(self) -> None:
        if self._is_sending:
            self._loop.remove_writer(self._socket)
            self._is_sending = False

    def _unwatch(self) -> None:
        self._unwatch_writing()
        if self._socket != _NO_SOCKET:
            self._loop.remove_reader(self._socket)
            self._socket = _NO_SOCKET

    # ---- History ----

    def _append_history(self, batch: Batch) -> None:
        if self._history is not None:
            self._history.append(batch.history)
            if batch.is_empty() and not self._has_log:
                # The store's journal does not have this history: an empty batch is not written there.
                self._history.flush()
        # Freed now, as it may be large: the batch stays referenced until the next one.
        batch.history = b""

    def _flush_later(self) -> None:
        """Flush the history files after HISTORY_FLUSH_SECONDS. Until then the store's journal has the events, so none
        is lost; only readers of the files wait."""
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
                self._finished_count += 1
            except Exception as error:
                self._loop.call_soon_threadsafe(self._on_failed, _failure_of(error))
                return

    def _done(self, batch: Batch) -> None:
        self.is_busy = False
        if self._history is not None:
            self._flush_later()
        self._on_committed(batch)


def _failure_of(error: Exception) -> TruenextError:
    return error if isinstance(error, TruenextError) else StoreError(f"the store failed: {error!r}")
