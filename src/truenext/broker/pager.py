"""Pager: a thread that reads pages from the store, one after the other, so that the event loop does not wait. The event
loop passes each page to the engine."""

import logging
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from truenext.engine.background.scheduled import DueSendsRead
from truenext.engine.engine import Engine
from truenext.engine.memory.timers import TimerRead, TimersResult
from truenext.engine.state.pages import PageMessage, PageResult, StoreRead
from truenext.errors import StoreError, TruenextError
from truenext.model.record import DamagedRecord, decode_record, referenced_content_number, sequence_of
from truenext.store.store import Page, Store, UndecodedMessage

logger = logging.getLogger(__name__)


class StoreCall(NamedTuple):
    """Call of the store that is neither for a page nor for timers."""

    read: Callable[[], Any]
    """Function that reads the store, on the pager's thread."""
    on_read: Callable[[Any], object]
    """Function that gets the result, on the event loop."""


class Pager:
    def __init__(
        self,
        engine: Engine,
        store: Store,
        loop: AbstractEventLoop,
        *,
        tick: Callable[[], object],
        schedule_turn: Callable[[], object],
        on_failed: Callable[[TruenextError], None],
    ) -> None:
        """`tick` reads the clock. `on_failed` is called on the event loop; after that nothing is read any more."""
        self._results = engine.store_results
        self._store = store
        self._loop = loop
        self._tick = tick
        self._schedule_turn = schedule_turn
        self._on_failed = on_failed
        self._queue: SimpleQueue[StoreRead | TimerRead | StoreCall | None] = SimpleQueue()
        self.pending: set[StoreRead] = set()
        """Requested reads of messages that are not done."""
        self._pending_timer_reads = 0
        """Number of requested reads of timers that are not done."""
        self._thread = threading.Thread(target=self._run, name="truenext-pager", daemon=True)
        self._thread.start()

    def read(self, read: StoreRead) -> None:
        self.pending.add(read)
        self._queue.put(read)

    def read_timers(self, read: TimerRead) -> None:
        self._pending_timer_reads += 1
        self._queue.put(read)

    def call(self, read: Callable[[], Any], on_read: Callable[[Any], object]) -> None:
        """Call `read` after all reads requested before, and pass its result to `on_read`."""
        self._queue.put(StoreCall(read, on_read))

    @property
    def is_busy(self) -> bool:
        """True while a read, of messages or timers, is not done."""
        return bool(self.pending or self._pending_timer_reads)

    def close(self) -> None:
        """End the thread after its current read; drop the other reads."""
        while not self._queue.empty():
            self._queue.get()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (read := self._queue.get()) is not None:
            try:
                if isinstance(read, StoreCall):
                    self._loop.call_soon_threadsafe(self._call_done, read.on_read, read.read())
                    continue
                if isinstance(read, TimerRead):
                    timers = self._store.read_timers(read.after, read.limit)
                    timers_read = TimersResult(timers.timers, timers.as_of, timers.is_end)
                    self._loop.call_soon_threadsafe(self._timers_done, read, timers_read)
                    continue
                page = read_page(self._store, read)
                self._loop.call_soon_threadsafe(self._done, read, _decode_page(read, page))
            except Exception as error:
                failure = error if isinstance(error, TruenextError) else StoreError(f"the store failed: {error!r}")
                self._loop.call_soon_threadsafe(self._on_failed, failure)
                return

    def _done(self, read: StoreRead, page: PageResult) -> None:
        self.pending.discard(read)
        self._tick()
        try:
            self._results.on_page_read(read, page)
        except StoreError as error:
            self._on_failed(error)
            return
        self._schedule_turn()

    def _call_done(self, on_read: Callable[[Any], object], result: object) -> None:
        on_read(result)
        self._schedule_turn()

    def _timers_done(self, read: TimerRead, timers_read: TimersResult) -> None:
        self._pending_timer_reads -= 1
        self._results.on_timers_read(read, timers_read)
        self._schedule_turn()


def read_page(store: Store, read: StoreRead) -> Page:
    """Read a page of a lane, or the messages of scheduled sends that are due.

    Raises: StoreError if the store cannot be read
    """
    if isinstance(read, DueSendsRead):
        return store.read_messages(read.keys, read.size_max)
    return store.read_page(read.lane.key, read.after_sequence, read.limit, read.size_max)


def _decode_page(read: StoreRead, page: Page) -> PageResult:
    return PageResult([_decode_message(read, stored) for stored in page.messages], page.as_of, page.is_end)


def _decode_message(read: StoreRead, stored: UndecodedMessage) -> PageMessage:
    sequence = sequence_of(stored.key)
    try:
        message = decode_record(stored.key, stored.record, stored.content)
    except DamagedRecord as error:
        # The record stays in the store, for inspection; it is never delivered.
        lane = read.lanes[sequence] if isinstance(read, DueSendsRead) else read.lane
        logger.error(
            "message is damaged and will not be delivered",
            extra={"queue": lane.queue.name, "sequence": sequence, "reason": str(error)},
        )
        message = None
    content = referenced_content_number(stored.record) if stored.content else 0
    return PageMessage(sequence, message, stored.mark, content, stored.causes)
