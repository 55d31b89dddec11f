"""Sends that are to be sent later: they wait in the store, and become messages when they are due.

    a scheduled send is accepted   -> `accept`     -> a record in a hidden queue, and a timer
    its timer is due               -> `step`       -> the record is to be read, with those due next: a DueLook
    they are there                 -> `page_read`  -> the records go, and the messages are accepted, in one batch

The hidden queue of `orders` is called /scheduled/orders, and nobody can name it; that of all topics, and of several
destinations at once, has no name behind /scheduled/. What waits there has a number instead of a sequence, from the same
counter: its place among those that were scheduled. Its record is that of the message, with what is still to be done
(schedule.py) as a line of JSON before its header lines.

Whoever asks is shown what waits, or has it cancelled, a page at a time (`look_at`): as in bulk.py, but that
nothing of it is in memory. So that a page has all of it, nothing becomes due from when the page is wanted until it was
looked at (`hold`), and it is read once all is durable that was accepted before that.

A timer names one record, and stands in the order of (due, number), over all queues (record.py, `scheduled_timer`).
Those that are due are taken from the front, so that sequences are given in that order: one that is still being written
makes those behind it wait. Nothing is kept in memory but the first timers, and how many wait in each queue.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from truenext import schedule, selector
from truenext.destination import SCHEDULED_PREFIX
from truenext.disk_level import DiskLevel
from truenext.engine.background import bulk
from truenext.engine.memory.timers import Timers
from truenext.engine.state.pages import Look, PageRead
from truenext.engine.state.queue import Entry, Lane
from truenext.engine.writing.background_task import BackgroundTask
from truenext.engine.writing.entries import put, remove
from truenext.envelope import read_header
from truenext.limits import DUE_SENDS_PER_READ, PAGE_BYTES, SHOWN_BODY_BYTES
from truenext.message import SentMessage, with_ttl
from truenext.record import SCHEDULED_TIMERS, message_key, scheduled_timer, split_lane_key, split_scheduled_timer
from truenext.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Collection

    from truenext.engine.lifecycle.arrivals import Arrivals
    from truenext.engine.memory.resident_set import ResidentSet
    from truenext.engine.queues.queues import Queues
    from truenext.engine.state.pages import Found
    from truenext.engine.state.queue import Queue
    from truenext.engine.writing.ledger import Ledger

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Schedule).decode


class DueLook(Look):
    """What is due first, wherever it is: no page of one lane."""

    __slots__ = ("_scheduler", "lanes")

    def __init__(self, scheduler: Scheduler, lanes: dict[int, Lane]) -> None:
        """`lanes` are those of what is due, by number."""
        first = next(iter(lanes))
        super().__init__(lanes[first], first - 1, len(lanes), PAGE_BYTES)
        self._scheduler = scheduler
        self.lanes = lanes

    @property
    def keys(self) -> list[bytes]:
        """Of the records."""
        return [message_key(lane.key, number) for number, lane in self.lanes.items()]

    def lanes_looked_at(self) -> Collection[Lane]:
        return set(self.lanes.values())

    def on_page(self, page: PageRead) -> None:
        self._scheduler.page_read(self, page)


class Scheduler(BackgroundTask):
    def __init__(
        self,
        ledger: Ledger,
        resident: ResidentSet,
        queues: Queues,
        arrivals: Arrivals,
    ) -> None:
        self._ledger = ledger
        self._resident = resident
        self._queues = queues
        self._arrivals = arrivals
        self.timers = Timers(ledger, first=SCHEDULED_TIMERS)
        self._by_number: dict[int, Queue] = {}
        """The hidden queues (`Queues.hidden`)."""
        self._emptied: dict[Queue, None] = {}
        """Those in which nothing may be left."""
        self._unwritten: dict[int, int] = {}
        """Numbers of what is not durable yet, and the batch that it is durable with."""
        self._look: DueLook | None = None
        """One at a time."""
        self._piece = DUE_SENDS_PER_READ
        """Records that are read with the next look, at most."""
        self._held_since: int | None = None
        """Nothing becomes due; the batch with which all is durable that was accepted before."""

    def restore_queue(self, number: int, name: str) -> Queue:
        """Take over a hidden queue; `name` is its own."""
        queue = self._by_number[number] = self._queues.restore_hidden(number, name)
        # Unless it is said to have messages.
        self._emptied[queue] = None
        return queue

    def accept(self, name: str, message: SentMessage, wanted: Schedule) -> None:
        # A selector may ask for it.
        message.arrived_ms = self._ledger.now_ms
        started = schedule.start_schedule(wanted, self._ledger.now_ms)
        if started is not None:
            self._add(name, message, started)

    # ---- What is due ----

    @property
    def source(self) -> object:
        return self.timers

    @property
    def has_any(self) -> bool:
        return bool(self.timers.in_memory)

    def is_due(self) -> bool:
        first = self.timers.first
        if first is None or self._look is not None or self._held_since is not None:
            return False
        ledger = self._ledger
        if ledger.is_full or ledger.disk_level is DiskLevel.NONE:
            return False
        due_ms, number, _ = split_scheduled_timer(first)
        if due_ms > ledger.now_ms:
            return False
        written_with = self._unwritten.get(number, 0)
        if written_with == ledger.batch.number:
            ledger.is_awaited = True
        return written_with <= ledger.committed

    def next_due_ms(self) -> int | None:
        first = self.timers.first
        due_ms = None if first is None else split_scheduled_timer(first)[0]
        # If one is due and nothing is done, something else has to happen before.
        return due_ms if due_ms is not None and due_ms > self._ledger.now_ms else None

    def step(self) -> list[DueLook]:
        ledger = self._ledger
        while self.is_due():
            due: dict[int, Lane] = {}
            for timer in self.timers.in_memory[: self._piece]:
                due_ms, number, lane_key = split_scheduled_timer(timer)
                lane = self._lane_of(lane_key)
                if due_ms > ledger.now_ms or lane is None or self._unwritten.get(number, 0) > ledger.committed:
                    break
                due[number] = lane
            if due:
                self._look = DueLook(self, due)
                return [self._look]
            self.timers.take_first()
        return []

    def page_read(self, look: DueLook, page: PageRead) -> None:
        """Send what is due and was read."""
        self._look = None
        if self._held_since is not None:
            return
        # One is read however large it is.
        self._piece = min(2 * self._piece, DUE_SENDS_PER_READ) if page.is_end else max(len(page.found) // 2, 1)
        there = {found.sequence: found for found in page.found}
        while (first := self.timers.first) is not None and not self._ledger.is_full:
            due_ms, number, _ = split_scheduled_timer(first)
            lane, found = look.lanes.get(number), there.get(number)
            # Meanwhile the clock may have been set, and what is due before these may have been accepted.
            if due_ms > self._ledger.now_ms or lane is None or (found is None and not page.is_end):
                break
            self.timers.take_first()
            # A transient that a crash has dropped is not there; a damaged one stays for whoever looks into it.
            if found is not None and found.message is not None and number not in lane.removed:
                self._come_due(lane, found, found.message)

    def committed(self) -> None:
        """A batch is durable."""
        committed = self._ledger.committed
        if self._unwritten:
            self._unwritten = {number: batch for number, batch in self._unwritten.items() if batch > committed}
        self.timers.committed()

    def let_go(self) -> None:
        """Hidden queues go in which nothing is, and of which no page is under way."""
        emptied, self._emptied = self._emptied, {}
        for queue in emptied:
            if queue.waiting():
                continue
            is_needed = self._queues.is_promised(queue) or any(lane.is_needed for lane in queue.lanes)
            if is_needed or self._look is not None:
                self._emptied[queue] = None
                continue
            del self._by_number[queue.number]
            self._queues.let_go_of_hidden(queue)

    # ---- What waits ----

    def hold(self) -> int:
        """Nothing becomes due until `end_hold`. Returns the batch that has to be durable before a page is read; 0 if it
        is."""
        if self._held_since is None:
            self._held_since = max(self._unwritten.values(), default=0)
        return self._held_since if self._held_since > self._ledger.committed else 0

    def end_hold(self) -> None:
        self._held_since = None

    def read_for(self, asked: bulk.OfScheduled) -> bulk.BulkLook | None:
        """What is to be read for a piece, while all is held; None if nothing is left."""
        queue = self._queues.hidden.get(asked.queue)
        return None if queue is None else bulk.read_for(asked, queue, self._ledger.last_sequence)

    def look_at(self, asked: bulk.OfScheduled, read: bulk.BulkLook, page: PageRead) -> bulk.ScheduledShown:
        """Show what waits and is on a page, or cancel it."""
        lane = read.lane
        wants = selector.compile_selector(asked.selector).matches if asked.selector is not None else None
        numbers = set(asked.sequences) if asked.sequences is not None else None
        to = set(asked.to.split(",")) if asked.to is not None else None
        answer = bulk.ScheduledShown(moved=0, to={}, left=0, next=None, until=read.until)
        at, is_end = read.after_sequence, page.is_end
        for found in page.found:
            at = found.sequence
            if at in lane.removed:
                continue
            if found.message is None:
                answer.left += 1
                continue
            wanted, message = _opened(found.message)
            number = wanted.number or at
            if number > read.until or (numbers is not None and number not in numbers):
                continue
            if (to is not None and set(wanted.to.split(",")) != to) or (wants is not None and not wants(message)):
                continue
            answer.moved += 1
            if isinstance(asked, bulk.Scheduled):
                answer.sends.append(_shown(number, wanted, message))
            else:
                if numbers is not None:
                    answer.sequences.append(number)
                if not asked.dry_run:
                    self._remove(lane, at, message)
                    self.timers.remove(scheduled_timer(wanted.due_ms, at, lane.key))
            if answer.moved == asked.limit:
                is_end = False
                break
        answer.next = read.next(at, is_end=is_end)
        return answer

    # ---- Inside ----

    def _come_due(self, lane: Lane, found: Found, record: SentMessage) -> None:
        wanted, message = _opened(record)
        name = lane.queue.name.removeprefix(SCHEDULED_PREFIX)
        self._remove(lane, found.sequence, message)
        is_sent, rest = schedule.fire(wanted, self._ledger.now_ms)
        if is_sent:
            sent = with_ttl(message, wanted.ttl_ms, self._ledger.now_ms) if wanted.ttl_ms else message
            self._arrivals.come_due(name, wanted.to, sent)
        for again in rest:
            self._add(name, message, replace(again, number=wanted.number or found.sequence))

    def _remove(self, lane: Lane, number: int, message: SentMessage) -> None:
        entry = Entry(number, None, lane, 0, message.persistent, 0)
        # Until this is durable a page may show it, and the clock may be set back.
        self._resident.left_with_page(entry)
        remove(self._ledger.batch, entry)
        lane.unread -= 1
        if not lane.unread:
            self._emptied[lane.queue] = None

    def _add(self, name: str, message: SentMessage, wanted: Schedule) -> None:
        queue = self._queues.hidden.get(name)
        if queue is None:
            queue = self._queues.make_hidden(name)
            self._by_number[queue.number] = queue
        lane = queue.lane_of(message)
        lane.horizon = 0
        number = self._ledger.take_sequence()
        batch = self._ledger.batch
        record = _with_header(message, _encode(wanted) + b"\n" + message.header)
        put(batch, Entry(number, record, lane, batch.number, message.persistent, None))
        lane.unread += 1
        self._unwritten[number] = batch.number
        self.timers.set(scheduled_timer(wanted.due_ms, number, lane.key))

    def _lane_of(self, key: bytes) -> Lane | None:
        """None if nothing was in it in this run, or when it began."""
        number, rank = split_lane_key(key)
        queue = self._by_number.get(number)
        return None if queue is None else queue.lane_if_there(rank)


def _opened(record: SentMessage) -> tuple[Schedule, SentMessage]:
    text, _, header = record.header.partition(b"\n")
    return _decode(text), _with_header(record, header)


def _shown(number: int, wanted: Schedule, message: SentMessage) -> bulk.ScheduledSendInfo:
    is_whole = len(message.body) <= SHOWN_BODY_BYTES
    return bulk.ScheduledSendInfo(
        number=number,
        due_ms=wanted.due_ms,
        to=wanted.to,
        period_ms=wanted.period_ms,
        repeat=wanted.repeat,
        cron=wanted.cron,
        delay_ms=wanted.delay_ms if wanted.cron else 0,
        priority=message.priority,
        persistent=message.persistent,
        headers=read_header(message.header),
        size=len(message.body),
        # Not with half a character at its end.
        body=getincrementaldecoder("utf-8")("replace").decode(message.body[:SHOWN_BODY_BYTES], is_whole),
    )


def _with_header(message: SentMessage, header: bytes) -> SentMessage:
    group = message.group
    return SentMessage(
        message.priority, message.persistent, message.expires_ms, header, message.body, message.arrived_ms, group
    )
