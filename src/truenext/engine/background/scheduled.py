"""Scheduled sends: wait in the store, and become messages when they are due.

    a scheduled send is accepted   -> `accept`        -> stores a record in a hidden queue, and a timer
    the timer is due               -> `step`          -> requests the record, and records due next: a DueSendsRead
    the records were read          -> `on_page_read`  -> removes the records and accepts the messages, in one batch

The hidden queue for sends to the queue `orders` is called /scheduled/orders; clients cannot use it. The hidden queue
/scheduled/ is for sends to a topic or to several destinations. Each record has a number, from the same counter as
sequences. A record contains the message, with its remaining schedule (model/schedule.py) as a line of JSON before the
header lines.

Waiting sends are listed or cancelled on request, a page at a time (`list_or_cancel`). No waiting send is in memory, so
pages must contain all of them. So `freeze` keeps sends from becoming due until a requested page was processed, and a
page is read only once all sends accepted before are durable.

A timer names one record. Timers are ordered by (due, number), over all queues (`scheduled_timer_key` in
model/record.py). Due timers are taken in this order, and so are the messages' sequences. A record that is still being
written makes later ones wait. In memory are only the first timers, and the number of sends in each queue.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from truenext.engine.background import bulk
from truenext.engine.lifecycle.arrivals import Arrivals
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.memory.timers import Timers
from truenext.engine.queues.queues import Queues
from truenext.engine.queues.topics import RouteAhead
from truenext.engine.selecting.scan import ComparisonBudget
from truenext.engine.state.pages import PageMessage, PageResult, SideRead
from truenext.engine.state.queue import Entry, Lane, Queue
from truenext.engine.writing.commit_state import BackgroundTask, CommitState
from truenext.engine.writing.entries import put, remove
from truenext.model import schedule, selector
from truenext.model.control_answers import ScheduledSendInfo
from truenext.model.destination import SCHEDULED_PREFIX, parse_stored_address
from truenext.model.disk_level import DiskLevel
from truenext.model.header_lines import decode_header_lines
from truenext.model.limits import (
    DUE_COPIES_PER_STEP,
    DUE_SENDS_PER_READ,
    PAGE_BYTES,
    ROUTING_STEP_NS,
    SCAN_NS_PER_TURN,
    SHOWN_BODY_BYTES,
)
from truenext.model.message import SentMessage, with_due, with_ttl
from truenext.model.record import (
    SCHEDULED_TIMERS,
    message_key,
    scheduled_timer_key,
    split_lane_key,
    split_scheduled_timer,
)
from truenext.model.schedule import Schedule

CRON_COPIES = 50
"""Number of copies that take as long as computing the next time of a cron expression. A step counts the computation as
this number of copies."""

_END = object()
_encode_schedule = msgspec.json.Encoder().encode
_decode_schedule = msgspec.json.Decoder(Schedule).decode


class DueSendsRead(SideRead):
    """Read of the records of those scheduled sends that are due first. The records may be in several lanes."""

    __slots__ = ("lanes",)

    def __init__(self, scheduler: Scheduler, lanes: dict[int, Lane]) -> None:
        """`lanes` has the lane of each record, by the record's number."""
        first = next(iter(lanes))
        super().__init__(scheduler.on_page_read, lanes[first], first - 1, len(lanes), PAGE_BYTES)
        self.lanes = lanes

    @property
    def keys(self) -> list[bytes]:
        """Keys of the records in the store."""
        return [message_key(lane.key, number) for number, lane in self.lanes.items()]

    def lanes_read(self) -> Collection[Lane]:
        return set(self.lanes.values())


@dataclass(slots=True, eq=False)
class DuePage:
    """Due sends that were read. If the queues of the next send take long to find, `ahead` finds them in several steps
    (topics.py, RouteAhead)."""

    lanes: dict[int, Lane]
    found_by_number: dict[int, PageMessage]
    is_end: bool
    ahead: RouteAhead | None = None
    ahead_number: int = 0
    ahead_steps: Iterator[None] | None = None


class Scheduler(BackgroundTask):
    def __init__(
        self,
        commit_state: CommitState,
        resident: ResidentSet,
        queues: Queues,
        arrivals: Arrivals,
    ) -> None:
        self._commit_state = commit_state
        self._resident = resident
        self._queues = queues
        self._arrivals = arrivals
        self.timers = Timers(commit_state, first=SCHEDULED_TIMERS)
        self._by_number: dict[int, Queue] = {}
        """Hidden queues (`Queues.hidden_by_name`) by number."""
        self._maybe_empty_queues: dict[Queue, None] = {}
        self._uncommitted_batches: dict[int, int] = {}
        """Batches of uncommitted records, by number of the record."""
        self._current_read: DueSendsRead | None = None
        """Read in progress; there is at most one."""
        self._page: DuePage | None = None
        """Due sends that were read; some wait for the next step."""
        self._read_limit = DUE_SENDS_PER_READ
        """Maximum number of records in the next read."""
        self._frozen_since_batch: int | None = None
        """Batch with which all records accepted before `freeze` are durable; None if sends are not frozen."""

    def restore_queue(self, number: int, name: str) -> Queue:
        """Restore the hidden queue that the store has under this number and name."""
        queue = self._by_number[number] = self._queues.restore_hidden(number, name)
        # Recovery may find no record of this queue.
        self._maybe_empty_queues[queue] = None
        return queue

    def accept(self, name: str, message: SentMessage, timing: Schedule) -> None:
        # A selector may refer to it.
        message.arrived_ms = self._commit_state.now_ms
        first = schedule.start_schedule(timing, self._commit_state.now_ms)
        if first is not None:
            self._add_record(name, message, first)

    # ---- Due sends ----

    @property
    def active_work_key(self) -> object:
        return self.timers

    @property
    def has_work(self) -> bool:
        return bool(self.timers.in_memory)

    def can_step(self) -> bool:
        first = self.timers.first
        if first is None or self._current_read is not None or self._frozen_since_batch is not None:
            return False
        commit_state = self._commit_state
        if not commit_state.has_capacity or commit_state.disk_level >= DiskLevel.NONE:
            return False
        if self._page is not None:
            return True
        due_ms, number, _ = split_scheduled_timer(first)
        if due_ms > commit_state.now_ms:
            return False
        batch = self._uncommitted_batches.get(number, 0)
        if batch == commit_state.batch.number:
            commit_state.is_batch_awaited = True
        return batch <= commit_state.last_committed

    def next_due_ms(self) -> int | None:
        first = self.timers.first
        due_ms = None if first is None else split_scheduled_timer(first)[0]
        # If a timer is due and `step` did nothing, the timer waits for another event.
        return due_ms if due_ms is not None and due_ms > self._commit_state.now_ms else None

    def step(self) -> list[DueSendsRead]:
        commit_state = self._commit_state
        if self._page is not None and self.can_step():
            self._send_page(self._page)
            return []
        while self.can_step():
            due: dict[int, Lane] = {}
            for timer in self.timers.in_memory[: self._read_limit]:
                due_ms, number, lane_key = split_scheduled_timer(timer)
                lane = self._lane_by_key(lane_key)
                if (
                    due_ms > commit_state.now_ms
                    or lane is None
                    or self._uncommitted_batches.get(number, 0) > commit_state.last_committed
                ):
                    break
                due[number] = lane
            if due:
                self._current_read = DueSendsRead(self, due)
                return [self._current_read]
            self.timers.pop_first()
        return []

    def on_page_read(self, read: DueSendsRead, page: PageResult) -> None:
        """Send due messages whose records were read."""
        self._current_read = None
        if self._frozen_since_batch is not None:
            return
        # At least one: a read returns one record, however large.
        self._read_limit = (
            min(2 * self._read_limit, DUE_SENDS_PER_READ) if page.is_end else max(len(page.messages) // 2, 1)
        )
        found_by_number = {found.sequence: found for found in page.messages}
        self._send_page(DuePage(read.lanes, found_by_number, is_end=page.is_end))

    def _send_page(self, page: DuePage) -> None:
        """Send the due messages of a page. If they are too many for one step, send some and keep the page."""
        self._page = page
        copies = 0
        while (first := self.timers.first) is not None and self._commit_state.has_capacity:
            due_ms, number, _ = split_scheduled_timer(first)
            lane, found = page.lanes.get(number), page.found_by_number.get(number)
            # Meanwhile the clock may have been set, or sends that are due earlier may have been accepted.
            if due_ms > self._commit_state.now_ms or lane is None or (found is None and not page.is_end):
                break
            # The record is missing if it was transient and a crash has dropped it. A damaged record stays in the store
            # for inspection.
            if found is not None and found.message is not None and number not in lane.removed:
                if copies > DUE_COPIES_PER_STEP or self._is_routed_ahead(page, number, found.message):
                    return
                copies += self._send_due(lane, found, found.message, page.ahead)
                page.ahead = None
            self.timers.pop_first()
        self._page = None

    def _is_routed_ahead(self, page: DuePage, number: int, record: SentMessage) -> bool:
        """Find the queues of the next due send before its message is accepted, if this search takes long. Returns
        whether the search continues in the next step."""
        if not self._queues.topics.may_take_long:
            return False
        timing, message = _decode_record(record)
        if not timing.to:
            return False
        destination = parse_stored_address(timing.to)
        if page.ahead_number != number:
            page.ahead, page.ahead_number = None, number
        elif page.ahead_steps is not None:
            if next(page.ahead_steps, _END) is not _END:
                return True
            page.ahead_steps = None
        if self._queues.routing_ns(destination, message, page.ahead) <= ROUTING_STEP_NS:
            return False
        page.ahead = page.ahead or self._queues.new_route_ahead()
        page.ahead_steps = self._queues.find_ahead(page.ahead, destination, self._due_message(message, timing))
        return True

    def on_committed(self) -> None:
        """Forget the batches of records that are durable now."""
        committed = self._commit_state.last_committed
        if self._uncommitted_batches:
            self._uncommitted_batches = {
                number: batch for number, batch in self._uncommitted_batches.items() if batch > committed
            }
        self.timers.on_committed()

    def remove_empty_queues(self) -> None:
        """Remove hidden queues that are empty. A queue stays while it is needed, and all stay while due sends are being
        read."""
        emptied, self._maybe_empty_queues = self._maybe_empty_queues, {}
        for queue in emptied:
            if queue.waiting_count():
                continue
            is_needed = self._queues.has_open_sends(queue) or any(lane.is_needed for lane in queue.lanes)
            if is_needed or self._current_read is not None:
                self._maybe_empty_queues[queue] = None
                continue
            del self._by_number[queue.number]
            self._queues.remove_hidden(queue)

    # ---- Waiting sends ----

    def freeze(self) -> int:
        """Keep sends from becoming due until `unfreeze`. Returns the batch that must be durable before a page is read;
        0 if that batch is durable."""
        if self._frozen_since_batch is None:
            # Sends on this page may be cancelled now. The page is read again.
            self._page = None
            self._frozen_since_batch = max(self._uncommitted_batches.values(), default=0)
        return self._frozen_since_batch if self._frozen_since_batch > self._commit_state.last_committed else 0

    def unfreeze(self) -> None:
        self._frozen_since_batch = None

    def next_read(self, request: bulk.ScheduledRequest) -> bulk.BulkRead | None:
        """Return the read for a piece that lists or cancels sends; None if nothing is left. Sends must be frozen."""
        queue = self._queues.hidden_by_name.get(request.queue)
        return None if queue is None else bulk.next_read(request, queue, self._commit_state.last_sequence)

    def list_or_cancel(
        self, request: bulk.ScheduledRequest, read: bulk.BulkRead, page: PageResult
    ) -> bulk.ScheduledResult:
        lane = read.lane
        chosen = selector.compile_selector(request.selector) if request.selector is not None else None
        budget = ComparisonBudget(SCAN_NS_PER_TURN)
        numbers = set(request.sequences) if request.sequences is not None else None
        to = set(request.to.split(",")) if request.to is not None else None
        result = bulk.ScheduledResult(count=0, to={}, left=0, next=None, until=read.until)
        sequence, is_end = read.after_sequence, page.is_end
        for found in page.messages:
            if not budget.take(chosen, found.message):
                is_end = False
                break
            sequence = found.sequence
            if sequence in lane.removed:
                continue
            if found.message is None:
                result.left += 1
                continue
            timing, message = _decode_record(found.message)
            number = timing.number or sequence
            if number > read.until or (numbers is not None and number not in numbers):
                continue
            if (to is not None and set(timing.to.split(",")) != to) or (
                chosen is not None and not chosen.matches(message)
            ):
                continue
            result.count += 1
            if isinstance(request, bulk.ListScheduled):
                result.sends.append(_send_info(number, timing, message))
            else:
                if numbers is not None:
                    result.sequences.append(number)
                if not request.dry_run:
                    self._remove_record(lane, sequence, message)
                    self.timers.remove(scheduled_timer_key(timing.due_ms, sequence, lane.key))
            if result.count == request.limit:
                is_end = False
                break
        result.next = read.next_position(sequence, is_end=is_end)
        return result

    # ---- Records ----

    def _send_due(self, lane: Lane, found: PageMessage, record: SentMessage, ahead: RouteAhead | None) -> int:
        """Send a due message. Returns the number of copies made; computing the next time of a cron expression counts as
        CRON_COPIES more."""
        copies = 0
        timing, message = _decode_record(record)
        name = lane.queue.name.removeprefix(SCHEDULED_PREFIX)
        self._remove_record(lane, found.sequence, message)
        is_sent, remaining = schedule.fire_schedule(timing, self._commit_state.now_ms)
        if is_sent:
            copies = self._arrivals.accept_with_batch(name, timing.to, self._due_message(message, timing), ahead)
        if timing.cron:
            copies += CRON_COPIES
        for next_timing in remaining:
            self._add_record(name, message, replace(next_timing, number=timing.number or found.sequence))
        return copies

    def _due_message(self, message: SentMessage, timing: Schedule) -> SentMessage:
        """Return the message to be sent now: with its due time as a header, and its expiry counted from now."""
        sent = with_due(message, timing.due_ms)
        return with_ttl(sent, timing.ttl_ms, self._commit_state.now_ms) if timing.ttl_ms else sent

    def _remove_record(self, lane: Lane, number: int, message: SentMessage) -> None:
        entry = Entry(number, None, lane, 0, message.persistent, 0)
        # Until the removal is durable a page may contain the record, and the clock may be set back.
        self._resident.remember_removed(entry)
        remove(self._commit_state.batch, entry)
        lane.unread -= 1
        if not lane.unread:
            self._maybe_empty_queues[lane.queue] = None

    def _add_record(self, name: str, message: SentMessage, timing: Schedule) -> None:
        queue = self._queues.hidden_by_name.get(name)
        if queue is None:
            queue = self._queues.create_hidden(name)
            self._by_number[queue.number] = queue
        lane = queue.lane_of(message)
        lane.horizon = 0
        number = self._commit_state.allocate_sequence()
        batch = self._commit_state.batch
        record = replace(message, header=_encode_schedule(timing) + b"\n" + message.header)
        put(batch, Entry(number, record, lane, batch.number, message.persistent, None))
        lane.unread += 1
        self._uncommitted_batches[number] = batch.number
        self.timers.set(scheduled_timer_key(timing.due_ms, number, lane.key))

    def _lane_by_key(self, key: bytes) -> Lane | None:
        """Return the lane with this key; None if the lane has had no records since the broker started."""
        number, rank = split_lane_key(key)
        queue = self._by_number.get(number)
        return None if queue is None else queue.find_lane(rank)


def _decode_record(record: SentMessage) -> tuple[Schedule, SentMessage]:
    text, _, header = record.header.partition(b"\n")
    return _decode_schedule(text), replace(record, header=header)


def _send_info(number: int, timing: Schedule, message: SentMessage) -> ScheduledSendInfo:
    is_whole = len(message.body) <= SHOWN_BODY_BYTES
    return ScheduledSendInfo(
        number=number,
        due_ms=timing.due_ms,
        to=timing.to,
        period_ms=timing.period_ms,
        repeat=timing.repeat,
        cron=timing.cron,
        zone=timing.zone,
        delay_ms=timing.delay_ms if timing.cron else 0,
        priority=message.priority,
        persistent=message.persistent,
        headers=decode_header_lines(message.header),
        size=len(message.body),
        # Without a partial character at the end.
        body=getincrementaldecoder("utf-8")("replace").decode(message.body[:SHOWN_BODY_BYTES], is_whole),
    )
