"""Browsers: show the messages of a queue without any effect on the messages.

A browser has a position in its queue: a lane and a sequence. The position only moves forward. The browser shows the
messages after its position in slices. A turn shows one slice of one browser, so that other work is not held up:

    below the horizon      the entries of the lane
    above the horizon      a page of the store, and the entries that were in memory when the page was requested
    an evicted message     a page with this message alone

A browser's page never enters the lane, and moves no horizon. Messages accepted after the browse began are not shown, so
the browse ends however many messages come. Source: docs/contract.md, "Browsing"
"""

from __future__ import annotations

from heapq import merge
from sys import maxsize
from typing import NamedTuple

from truenext.engine.queues.queues import Queues
from truenext.engine.selecting.scan import ComparisonBudget
from truenext.engine.state.causes import causes_from_store, causes_size, merge_stored_causes
from truenext.engine.state.consumer import Browser
from truenext.engine.state.pages import PageMessage, PageResult, SideRead, damage_error
from truenext.engine.state.queue import UNBOUNDED, UNSTARTED, Entry, Lane, is_undeliverable
from truenext.engine.writing.commit_state import BackgroundTask
from truenext.engine.writing.engine_state import EngineState
from truenext.model.limits import (
    BROWSE_BYTES_PER_TURN,
    BROWSE_MESSAGES_PER_TURN,
    PAGE_BYTES_SHORT,
    PAGE_SIZE_SHORT,
    SCAN_NS_PER_TURN,
)


class BrowseSlice(NamedTuple):
    """Entries that one turn shows to one browser."""

    browser: Browser
    entries: list[Entry]
    is_end: bool
    """Whether the browse ends with these entries."""


class BrowseRead(SideRead):
    """Read of a page of messages that is shown to a browser. These messages do not enter the lane's memory."""

    __slots__ = ("browser", "last_sequence", "selected_sequences", "unread_in_memory")

    waits_for_commit = False

    def __init__(self, browsing: BrowseTask, browser: Browser, lane: Lane, limit: int, size_max: int) -> None:
        """Read the messages above the horizon that follow the browser's position."""
        super().__init__(browsing.on_page_read, lane, browser.after_sequence, limit, size_max)
        self.browser = browser
        self.last_sequence = browser.last_sequence
        """Last sequence to be shown; later messages on the page are ignored."""
        self.unread_in_memory = {
            entry.sequence: entry
            for entry in lane.entries_between(max(self.after_sequence, lane.horizon), self.last_sequence)
        }
        """Entries above the horizon that were in memory when the page was requested, in order. The page may lack these
        messages."""
        self.selected_sequences: set[int] = (
            set() if lane.selected is None else lane.selected.entries.keys() - self.unread_in_memory.keys()
        )
        """Sequences of selected entries that consumers hold. If the page has these messages, they are not shown."""


class BrowseEntryRead(BrowseRead):
    """Read of a single message whose entry is in memory and whose body was evicted."""

    __slots__ = ("entry",)

    def __init__(self, browsing: BrowseTask, browser: Browser, entry: Entry) -> None:
        super().__init__(browsing, browser, entry.lane, 1, BROWSE_BYTES_PER_TURN)
        self.after_sequence = entry.sequence - 1
        self.last_sequence = entry.sequence
        self.unread_in_memory = {}
        self.selected_sequences = set()
        self.entry = entry


class BrowseTask(BackgroundTask):
    def __init__(
        self,
        state: EngineState,
        queues: Queues,
    ) -> None:
        self._commit_state = state.commit_state
        self._memory = state.memory
        self._redelivered_below = state.commit_state.redelivered_below
        self._clients = state.clients
        self._queues = queues
        self._slices: list[BrowseSlice] = []
        self._current_read: BrowseRead | None = None
        """Read in progress. All browsers together have at most one, so that reads for consumers do not wait long."""
        self._pending_page: tuple[BrowseRead, PageResult] | None = None
        """Page that was read but not shown yet, with its request."""

    def start(self, browser: Browser) -> None:
        self._clients.active_browsers[browser] = None
        self._commit_state.active_work[self] = None

    def stop(self, browser: Browser) -> None:
        self._clients.active_browsers.pop(browser, None)

    @property
    def has_work(self) -> bool:
        return bool(self._clients.active_browsers) or self._pending_page is not None

    def can_step(self) -> bool:
        if self._pending_page is not None:
            return True
        return self._current_read is None and any(browser.has_credit() for browser in self._clients.active_browsers)

    def on_page_read(self, read: BrowseRead, page: PageResult) -> None:
        """Keep the page for the next turn.

        Raises: StoreError if the store lacks messages that it should have.
        """
        if not self._queues.exists(read.lane.queue):
            # The queue of a durable subscription, which has ended with all messages of the page.
            page.messages, page.is_end = [], True
        if not (page.messages or page.is_end):
            raise damage_error(read.lane, "no message was read, although the store says that there are more")
        self._current_read = None
        if not page.is_end:
            read.last_sequence = min(read.last_sequence, page.messages[-1].sequence)
        removed = read.lane.removed.keys() | read.selected_sequences
        page.messages = [found for found in page.messages if found.sequence not in removed]
        self._pending_page = (read, page)
        self._commit_state.active_work[self] = None

    def take_slices(self) -> list[BrowseSlice]:
        """Return the slices made since the last call."""
        shown, self._slices = self._slices, []
        return shown

    def step(self) -> list[BrowseRead]:
        """Show one slice to one browser that has credit. Returns the read that this browser needs next, if any."""
        shown: list[Entry] = []
        browsers = self._clients.active_browsers
        if self._pending_page is not None:
            (read, page), self._pending_page = self._pending_page, None
            browser = read.browser
            # A browser without credit requests the page again later.
            if browser in browsers and browser.has_credit():
                self._show_page(read, page, shown)
                if browser.is_done:
                    del browsers[browser]
                if shown:
                    self._slices.append(BrowseSlice(browser, shown, browser.is_done))
                return []
        if self._current_read is not None:
            return []
        for browser in browsers:
            if browser.has_credit():
                break
        else:
            return []
        self._current_read = self._show_slice(browser, shown)
        del browsers[browser]
        if not browser.is_done:
            browsers[browser] = None
        if shown or browser.is_done:
            self._slices.append(BrowseSlice(browser, shown, browser.is_done))
        return [] if self._current_read is None else [self._current_read]

    # ---- Slices and pages ----

    def _show_slice(self, browser: Browser, shown: list[Entry]) -> BrowseRead | None:
        """Show entries in memory to a browser. Returns the read of the page that the browser needs next, if any."""
        count = size = 0
        budget = ComparisonBudget(SCAN_NS_PER_TURN)
        while not browser.is_done:
            lane = browser.queue.find_lane(browser.rank)
            if lane is None:
                browser.next_lane()
                continue
            for entry in _entries_in_memory(lane, browser.after_sequence):
                message = entry.message
                if entry.sequence > browser.last_sequence:
                    break
                if message is None:
                    return BrowseEntryRead(self, browser, entry)
                if not budget.take(browser.selector, message):
                    return None
                self._show_entry(browser, entry, shown)
                count += 1
                size += len(message.header)
                if count >= BROWSE_MESSAGES_PER_TURN or size >= BROWSE_BYTES_PER_TURN:
                    return None
                if browser.is_done or not browser.has_credit():
                    return None
            after = max(browser.after_sequence, lane.horizon) if lane.needs_page else maxsize
            if after < browser.last_sequence:
                browser.after_sequence = after
                return self._new_read(browser, lane)
            browser.next_lane()
        return None

    def _new_read(self, browser: Browser, lane: Lane) -> BrowseRead:
        limit, size_max = min(browser.queue.policy.page_size, BROWSE_MESSAGES_PER_TURN), BROWSE_BYTES_PER_TURN
        if browser.selector is None:
            limit = min(limit, browser.shown_max)
        if self._memory.bytes_over_limit + BROWSE_BYTES_PER_TURN > 0 or self._memory.unsent_bytes_max == 1:
            limit, size_max = min(limit, PAGE_SIZE_SHORT), PAGE_BYTES_SHORT
        return BrowseRead(self, browser, lane, limit, size_max)

    def _show_page(self, read: BrowseRead, page: PageResult, shown: list[Entry]) -> None:
        browser = read.browser
        last = read.last_sequence
        budget = ComparisonBudget(SCAN_NS_PER_TURN)
        in_page = {found.sequence: found for found in page.messages if found.sequence <= last}
        for sequence, known in read.unread_in_memory.items():
            if sequence > last:
                break
            if known.message is None and sequence not in in_page:
                # It was written, and unloaded, after the page was read: the next page begins with it.
                last = sequence - 1
                break
        for sequence in merge(in_page, (sequence for sequence in read.unread_in_memory if sequence not in in_page)):
            if sequence > last:
                break
            recent, found = read.unread_in_memory.get(sequence), in_page.get(sequence)
            message = found.message if found is not None else None if recent is None else recent.message
            if not budget.take(browser.selector, message):
                return
            if recent is not None and (recent.message is not None or recent.batch > self._commit_state.last_committed):
                self._show_entry(browser, recent, shown)
            elif found is not None and (entry := self._entry_to_show(read, found)) is not None:
                self._show_entry(browser, entry, shown)
            if browser.is_done or not browser.has_credit():
                browser.after_sequence = sequence
                return
        browser.after_sequence = last

    def _entry_to_show(self, read: BrowseRead, found: PageMessage) -> Entry | None:
        """Return an entry to show for a message of a page. None if the message is damaged or is to become a dead
        letter."""
        lane = read.lane
        message = found.message
        attempts, deliveries, due_ms, was_lost = found.mark
        if message is None or is_undeliverable(lane.queue, attempts, due_ms):
            return None
        known = read.entry if isinstance(read, BrowseEntryRead) else read.unread_in_memory.get(found.sequence)
        causes = causes_from_store(found.causes)
        start_state = UNSTARTED
        if known is not None:
            # The store knows of all its failures, but not of each dispatch.
            deliveries, attempts, start_state = known.deliveries, known.attempts, known.start_state
            was_lost = known.was_lost
            causes = None if known.causes is None else merge_stored_causes(known.causes, found.causes)
        elif found.sequence < self._redelivered_below:
            deliveries = max(deliveries, 1)
        return Entry(
            sequence=found.sequence,
            message=message,
            lane=lane,
            batch=0,
            persistent=message.persistent,
            store_batch=0,
            deliveries=deliveries,
            attempts=attempts,
            start_state=start_state,
            was_lost=was_lost,
            causes=causes,
        )

    def _show_entry(self, browser: Browser, entry: Entry, shown: list[Entry]) -> None:
        browser.after_sequence = entry.sequence
        message = entry.message
        commit_state = self._commit_state
        if (
            message is None
            or entry.batch > commit_state.last_committed
            or 0 < message.expires_ms <= commit_state.now_ms
        ):
            return
        if browser.selector is not None and not browser.selector.matches(message):
            return
        shown.append(entry)
        browser.on_shown()
        memory = self._memory
        size = (
            len(message.body) + message.growth + len(message.header) + browser.frame_bytes + causes_size(entry.causes)
        )
        browser.session.unsent_bytes += size
        memory.unsent_bytes += size
        if memory.unsent_bytes > memory.unsent_threshold:
            memory.unsent_bytes_max = 1


def _entries_in_memory(lane: Lane, after_sequence: int) -> list[Entry]:
    """Return the entries in memory after a sequence, in order, at most one more than a slice can show. If messages of
    the lane are only in the store, the result ends at the horizon; a page brings the others."""
    up_to = lane.horizon if lane.needs_page else UNBOUNDED
    return lane.entries_between(after_sequence, up_to, limit=BROWSE_MESSAGES_PER_TURN + 1)
