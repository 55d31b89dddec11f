"""Removal of expired messages in memory and in the store, even if no dispatch reaches them.

    a message with an expiry is accepted  -> arrivals.py     -> sets a timer for the message's block, due at the next
                                                                whole second
    the timer is due                      -> `step`          -> removes expired messages of the block from memory; for
                                                                the other messages a page is read: ExpiryBlockRead
    the page was read                     -> `on_page_read`  -> removes expired messages that only the page has

Messages above a lane's horizon are removed without coming into memory. Pages that were requested before the removal is
durable may still contain these messages; until all such pages were applied, `Lane.removed` excludes the messages.

Messages that consumers or open transactions hold do not expire. The block of such a message is checked again after
RECHECK_MS.
"""

from __future__ import annotations

from truenext.engine.lifecycle.arrivals import EXPIRY_ROUND_MS
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.memory.reading import PageReader
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.memory.timers import Timers
from truenext.engine.queues.queues import Queues
from truenext.engine.state.pages import PageMessage, PageResult, SideRead
from truenext.engine.state.queue import UNBOUNDED, Entry, Lane, is_expired
from truenext.engine.writing.commit_state import BackgroundTask
from truenext.engine.writing.engine_state import EngineState
from truenext.model.limits import PAGE_BYTES
from truenext.model.record import BLOCK_BITS, split_timer, timer_key

RECHECK_MS = 60_000
"""Time after which a block with held messages is checked again."""

EXPIRED_PER_STEP_MAX = 1000
"""Approximate number of expired messages that one step removes from memory."""

BLOCK_SIZE = 1 << BLOCK_BITS


class ExpiryBlockRead(SideRead):
    """Read of a page of a block whose timer is due, to find expired messages that only the store has."""

    __slots__ = ("had_uncommitted", "recheck_ms", "timer", "until")

    def __init__(
        self,
        expiry: ExpiryTask,
        lane: Lane,
        after_sequence: int,
        until: int,
        timer: bytes,
        recheck_ms: int,
        *,
        had_uncommitted: bool,
    ) -> None:
        super().__init__(expiry.on_page_read, lane, after_sequence, lane.queue.policy.page_size, PAGE_BYTES)
        self.until = until
        """First sequence after the block."""
        self.timer = timer
        self.recheck_ms = recheck_ms
        """Time at which the block must be checked again, because messages held now may be requeued later; 0 if no
        second check is needed."""
        self.had_uncommitted = had_uncommitted
        """True if the block had expired messages that were uncommitted when the timer was due. Since then, such a
        message may have become visible and been evicted; then the page lacks the message."""


class ExpiryTask(BackgroundTask):
    def __init__(
        self,
        state: EngineState,
        timers: Timers,
        resident: ResidentSet,
        page_reader: PageReader,
        queues: Queues,
        settlement: Settlement,
    ) -> None:
        self._commit_state = state.commit_state
        self._timers = timers
        self._clients = state.clients
        self._resident = resident
        self._page_reader = page_reader
        self._queues = queues
        self._settlement = settlement
        self._current_read: ExpiryBlockRead | None = None
        """Read in progress; there is at most one."""
        self._unsent_read: ExpiryBlockRead | None = None
        """The current read, until a step has returned it."""
        self._waiting_timers: list[bytes] = []
        """Timers of blocks with expired messages that are uncommitted. They are due again after the next commit."""

    # ---- Due timers ----

    @property
    def active_work_key(self) -> object:
        return self._timers

    @property
    def has_work(self) -> bool:
        return bool(self._timers.in_memory) or self._unsent_read is not None

    def can_step(self) -> bool:
        if self._unsent_read is not None:
            return True
        if self._current_read is not None or self._commit_state.is_full:
            return False
        due_ms = self._timers.next_due_ms
        return due_ms is not None and due_ms <= self._commit_state.now_ms

    def next_due_ms(self) -> int | None:
        due_ms = self._timers.next_due_ms
        # If a timer is due and `step` did nothing, the timer waits for another event.
        return due_ms if due_ms is not None and due_ms > self._commit_state.now_ms else None

    def step(self) -> list[ExpiryBlockRead]:
        """Process due timers until a page must be read, or EXPIRED_PER_STEP_MAX is reached."""
        self._process_due()
        read, self._unsent_read = self._unsent_read, None
        return [] if read is None else [read]

    def _process_due(self) -> None:
        remaining = EXPIRED_PER_STEP_MAX
        while remaining > 0 and self._unsent_read is None and self.can_step():
            due = self._timers.pop_due()
            assert due is not None, "one is due"
            _, lane_key, first = split_timer(due)
            lane = self._queues.lane_of(lane_key)
            if lane is None:
                self._timers.clear_unless_set_again(due)
                continue
            until = first + BLOCK_SIZE
            remaining -= 1 + self._expire_in_memory(lane, first, until)
            recheck_ms = 0
            if self._has_held(lane, first, until):
                recheck_ms = -(-(self._commit_state.now_ms + RECHECK_MS) // EXPIRY_ROUND_MS) * EXPIRY_ROUND_MS
            had_uncommitted = self._has_uncommitted(lane, first, until)
            if any(first <= sequence < until for sequence in _unloaded_sequences(lane)):
                after = max(first - 1, 0)
            elif lane.needs_page and lane.horizon < until - 1:
                after = max(first - 1, lane.horizon)
            else:
                self._finish_timer(lane, due, recheck_ms)
                continue
            self._request_read(
                ExpiryBlockRead(self, lane, after, until, due, recheck_ms, had_uncommitted=had_uncommitted)
            )

    def on_page_read(self, read: ExpiryBlockRead, page: PageResult) -> None:
        """Remove the expired messages of a page. All batches whose messages the page contains are durable."""
        lane, until = read.lane, read.until
        if self._queues.lane_of(lane.key) is not lane:
            # The lane has ended with its queue.
            self._current_read = None
            self._timers.clear_unless_set_again(read.timer)
            return
        _, _, first = split_timer(read.timer)
        # Messages that came into memory meanwhile are not above the horizon any more.
        self._expire_in_memory(lane, first, until)
        in_memory = {entry.sequence for entry in lane.unread_in_memory}
        expired: list[Entry] = []
        for found in page.messages:
            if found.sequence >= until:
                break
            is_known = found.sequence in lane.removed or found.sequence in in_memory
            if not is_known and is_expired(found.message, self._commit_state.now_ms):
                expired += self._unloaded_entries(lane, found)
        self._expire_entries(lane, expired)
        self._current_read = None
        last = page.messages[-1].sequence if page.messages else UNBOUNDED
        if page.is_end or last >= until - 1:
            if read.had_uncommitted and not self._has_uncommitted(lane, first, until):
                self._timers.put_back(read.timer)
            else:
                self._finish_timer(lane, read.timer, read.recheck_ms)
        else:
            self._request_read(
                ExpiryBlockRead(
                    self, lane, last, until, read.timer, read.recheck_ms, had_uncommitted=read.had_uncommitted
                )
            )

    def _request_read(self, read: ExpiryBlockRead) -> None:
        self._current_read = self._unsent_read = read
        self._commit_state.active_work[self._timers] = None

    def _finish_timer(self, lane: Lane, due: bytes, recheck_ms: int) -> None:
        _, _, first = split_timer(due)
        if self._has_uncommitted(lane, first, first + BLOCK_SIZE):
            self._waiting_timers.append(due)
            return
        if recheck_ms:
            self._timers.set(timer_key(recheck_ms, lane.key, first))
        self._timers.clear_unless_set_again(due)

    # ---- Removing messages ----

    def _expire_in_memory(self, lane: Lane, first: int, until: int) -> int:
        """Remove expired, visible messages of a block from memory. Returns how many were removed."""
        committed, now_ms = self._commit_state.last_committed, self._commit_state.now_ms

        def has_expired(entry: Entry) -> bool:
            return entry.batch <= committed and is_expired(entry.message, now_ms)

        expired = [entry for entry in lane.entries_between(first - 1, until - 1) if has_expired(entry)]
        self._expire_entries(lane, expired)
        return len(expired)

    def _unloaded_entries(self, lane: Lane, found: PageMessage) -> list[Entry]:
        """Return the entry of a message whose body only the store has, as a list of one. The list is empty if the
        message is in memory or held, or is about to become a dead letter."""
        assert found.message is not None, "it is known to be over"
        if found.sequence > lane.horizon and (lane.selected is None or found.sequence not in lane.selected.entries):
            return [self._page_reader.load_entry(lane, found, found.message)]
        entry = lane.delayed.get(found.sequence) or lane.unloaded.get(found.sequence)
        if entry is None or entry.message is not None or entry in self._resident.unread_given_up:
            return []
        entry.message = found.message
        self._resident.count_loaded_from_disk(entry, found.message)
        self._resident.load_causes(entry, found.causes)
        return [entry]

    def _expire_entries(self, lane: Lane, expired: list[Entry]) -> None:
        if expired:
            self._resident.remove_entries(lane, expired)
            for entry in expired:
                self._settlement.expire(entry)
                # Consumers need not wait for it to be read or committed any more.
                self._commit_state.touched_queues[lane.queue] = None

    def _has_uncommitted(self, lane: Lane, first: int, until: int) -> bool:
        """Return whether a block has expired messages that are not visible yet."""
        committed, now_ms = self._commit_state.last_committed, self._commit_state.now_ms
        in_memory = lane.entries_between(first - 1, until - 1, with_delayed=False)
        return any(one.batch > committed and is_expired(one.message, now_ms) for one in in_memory)

    def _has_held(self, lane: Lane, first: int, until: int) -> bool:
        """Return whether a held message of a block may have expired."""
        now_ms = self._commit_state.now_ms
        return any(
            entry.lane is lane and (entry.message is None or is_expired(entry.message, now_ms))
            for entry in self._clients.held_entries(lane.queue, first, until)
        )

    # ---- Uncommitted messages ----

    def on_committed(self) -> None:
        """Make the waiting timers due again."""
        waiting, self._waiting_timers = self._waiting_timers, []
        for due in waiting:
            self._timers.put_back(due)


def _unloaded_sequences(lane: Lane) -> list[int]:
    """Return the sequences of messages up to the lane's horizon that must be read before they can be checked."""
    return [*lane.unloaded, *(entry.sequence for entry in lane.delayed.values() if entry.message is None)]
