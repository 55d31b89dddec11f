"""Dispatch from queues without selectors, groups and wildcard consumers.

Lanes are served in order of rank, each from its head on:

    head is being committed      the lane waits, because its later messages must not overtake the head; the lanes of
                                 lower priority are served
    head must be read first      the lane and all lanes of lower priority wait: the head is ready, so it is next
    head blocks until it is due  the lane and all lanes of lower priority wait

Source: docs/contract.md, "True next"
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice, repeat

from truenext.engine.dispatch.selective import GroupedQueueDispatch, QueueDispatch, express_receivers
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.memory.horizon import is_first_uncommitted
from truenext.engine.memory.reading import PageReader
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.selecting.selections import Selections
from truenext.engine.state.causes import causes_size
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.queue import NO_ENTRIES, Entry, Lane, Queue
from truenext.engine.writing.engine_state import EngineState
from truenext.model.limits import DISPATCHES_PER_TURN, GROWTH_BYTES_PER_DISPATCH

QUEUE_SHARE_MIN = 2
"""Number of messages that each queue may dispatch in a turn, even if very many queues have changed."""

RankedConsumer = tuple[int, int, int, int, "BrokerConsumer"]
"""Item of a heap of consumers, of which the first is served first: service rank, messages held, last dispatch number,
index among the queue's consumers, and the consumer."""

Deliveries = dict["BrokerConsumer", list["Entry"]]


class Dispatcher:
    """Dispatches the messages of one queue, always the true next one first. selective.py finds this message if there
    are selectors or groups."""

    def __init__(
        self,
        state: EngineState,
        selections: Selections,
        resident: ResidentSet,
        page_reader: PageReader,
        settlement: Settlement,
    ) -> None:
        self._commit_state = state.commit_state
        self._events = state.commit_state.events
        self._memory = state.memory
        self._clients = state.clients
        self._selections = selections
        self._resident = resident
        self._page_reader = page_reader
        self._settlement = settlement
        self.budget = 0
        """Work that this turn may still do: each dispatched or expired message counts one, and so does each queue.
        Messages that grow count more."""
        self._queue_share = 0
        """Number of messages that this turn may dispatch from one queue."""

    def start_turn(self, queue_count: int) -> None:
        """Begin a turn in `queue_count` queues. When the turn's budget is spent, the next turn serves the other queues.
        Each queue has a share of the budget, so that a queue with many messages does not keep others waiting."""
        self.budget = DISPATCHES_PER_TURN
        self._queue_share = max(DISPATCHES_PER_TURN // max(queue_count, 1), QUEUE_SHARE_MIN)

    def dispatch(self, queue: Queue, deliveries: Deliveries) -> Lane | None:
        """Dispatch messages, always the true next one first, until no consumer has credit, no message is ready, or the
        budget is spent. If the budget is spent, the queue is marked for the next turn.

        Adds dispatched entries to `deliveries`. Returns the last lane that was reached; its next page may have to be
        read.
        """
        self.budget -= 1
        receivers_of_queue = self._clients.receivers_by_queue.get(queue)
        if receivers_of_queue is None:
            return None
        owner = receivers_of_queue.exclusive
        consumers: Sequence[BrokerConsumer] = receivers_of_queue.consumers if owner is None else [owner]
        if queue.observer is not None:
            return self._dispatch_selective(queue, consumers, deliveries)
        receivers: list[RankedConsumer] = []
        now_ms = self._commit_state.now_ms
        for index, consumer in enumerate(consumers):
            if consumer.adjust_window(now_ms):
                self._events.window_changed(consumer, queue, consumer.window)
            if consumer.has_credit():
                receivers.append(
                    (consumer.service_rank, len(consumer.held), consumer.last_dispatch_number, index, consumer)
                )
        heapify(receivers)
        entries: list[Entry] = []
        consumer_numbers: list[int] = []
        last = None
        if receivers:
            for lane in queue.lanes:
                if lane.arrived or lane.requeued or lane.unread:
                    last = lane
                    if not self._dispatch_lane(lane, receivers, deliveries, entries, consumer_numbers):
                        break
                elif lane.arrived is not NO_ENTRIES:
                    lane.free_arrived()
        if not receivers and receivers_of_queue.express:
            express = receivers_of_queue.express if owner is None else consumers
            last = self._dispatch_express(queue, express, deliveries, entries, consumer_numbers) or last
        if entries:
            self._events.dispatched(queue, entries, consumer_numbers)
            self.budget -= len(entries)
        return last

    def _dispatch_selective(
        self, queue: Queue, consumers: Sequence[BrokerConsumer], deliveries: Deliveries
    ) -> Lane | None:
        entries: list[Entry] = []
        consumer_numbers: list[int] = []

        def dispatch_entry(entry: Entry, consumer: BrokerConsumer) -> None:
            entries.append(entry)
            consumer_numbers.append(consumer.number)
            self.dispatch_entry(entry, consumer, deliveries)

        for consumer in consumers:
            if consumer.adjust_window(self._commit_state.now_ms):
                self._events.window_changed(consumer, queue, consumer.window)
        queue_dispatch = self.new_queue_dispatch(queue)
        limit = min(self.budget, self._queue_share)
        queue_dispatch.dispatch(consumers, dispatch_entry, limit)
        receivers = self._clients.receivers_of(queue)
        if receivers.express:
            queue_dispatch.dispatch_express(receivers, dispatch_entry, limit - len(entries))
        if queue_dispatch.is_cut:
            self._commit_state.touched_queues[queue] = None
        if entries:
            self._events.dispatched(queue, entries, consumer_numbers)
        self.budget -= len(entries) + queue_dispatch.expired_count
        return queue_dispatch.awaited_lane

    def new_queue_dispatch(self, queue: Queue) -> QueueDispatch:
        """Return a new dispatch of a queue whose consumers may have different next messages. Before that, free groups
        of suspended consumers."""
        kind = QueueDispatch
        if queue.has_groups:
            kind = GroupedQueueDispatch
            self._selections.existing_groups_of(queue).free_groups_of_suspended(queue)
        selection = self._selections.by_queue.get(queue)
        return kind(
            queue,
            self._selections.scans,
            selection,
            self._commit_state,
            self._resident,
            self._page_reader,
            self._settlement,
        )

    def dispatch_entry(self, entry: Entry, consumer: BrokerConsumer, deliveries: Deliveries) -> None:
        """Assign an entry that has left its lane to a consumer. `_dispatch_lane` has the same code inlined, for speed;
        tests/unit/test_dispatch.py compares the results of the two."""
        message = entry.message
        assert message is not None, "what has left memory is read first"
        entry.deliveries += 1
        entry.dispatched_us = self._commit_state.now_us
        if not consumer.held and consumer.auto_window is not None:
            consumer.auto_window.start_sample(entry.sequence, self._commit_state.now_ms)
        consumer.held[entry.sequence] = entry
        size = len(message.body) + message.growth + len(message.header) + consumer.frame_bytes
        if entry.causes is not None:
            size += causes_size(entry.causes)
        consumer.session.unsent_bytes += size
        self._memory.unsent_bytes += size
        self.budget -= message.growth // GROWTH_BYTES_PER_DISPATCH
        if self._memory.unsent_bytes > self._memory.unsent_threshold:
            self._memory.unsent_bytes_max = 1
        self._clients.dispatch_count += 1
        consumer.last_dispatch_number = self._clients.dispatch_count
        deliveries.setdefault(consumer, []).append(entry)
        if entry.group:
            self._selections.existing_groups_of(entry.lane.queue).on_dispatched(entry, consumer)

    def _dispatch_express(
        self,
        queue: Queue,
        consumers: Sequence[BrokerConsumer],
        deliveries: Deliveries,
        entries: list[Entry],
        consumer_numbers: list[int],
    ) -> Lane | None:
        """Dispatch messages beyond the windows of express consumers, while no consumer has credit. Such a message is
        more urgent than a whole window of messages that its consumer holds. Returns the lane at which dispatch stopped,
        because a message there may have to be read first; None if it stopped at none."""
        preferred = express_receivers(queue, consumers)
        for lane in queue.lanes:
            while lane.arrived or lane.requeued or lane.unread:
                while preferred and not preferred[-1].has_express_credit(lane.rank):
                    preferred.pop()
                if not preferred:
                    # Less urgent messages have no receiver either.
                    return None
                consumer = preferred[-1]
                count_before = len(entries)
                window, consumer.window = consumer.window, len(consumer.held) + 1
                receiver = (consumer.service_rank, len(consumer.held), consumer.last_dispatch_number, 0, consumer)
                may_continue = self._dispatch_lane(lane, [receiver], deliveries, entries, consumer_numbers)
                consumer.window = window
                if len(entries) == count_before:
                    if not may_continue:
                        return lane
                    break
                consumer.on_express_dispatch()
        return None

    def _dispatch_lane(
        self,
        lane: Lane,
        receivers: list[RankedConsumer],
        deliveries: Deliveries,
        entries: list[Entry],
        consumer_numbers: list[int],
    ) -> bool:
        """Dispatch the ready messages of one lane. Returns whether the lanes after this one may be served."""
        if len(receivers) == 1 and len(lane.arrived) > 1 and not lane.requeued and lane.selected is None:
            consumer = receivers[0][4]
            self._dispatch_run(lane, consumer, deliveries, entries, consumer_numbers)
            if not consumer.has_credit():
                heappop(receivers)
                return False
        memory, clients, commit_state = self._memory, self._clients, self._commit_state
        committed, now_ms, now_us = commit_state.last_committed, commit_state.now_ms, commit_state.now_us
        for _ in repeat(None, min(self.budget, self._queue_share) - len(entries)):
            entry = lane.head()
            if entry is None:
                if lane.needs_page:
                    return False
                if not lane.unread or is_first_uncommitted(lane, committed):
                    return True
                # All messages above the horizon are still in memory.
                self._resident.load_unread_in_memory(lane)
                continue
            if entry.batch > committed:
                return True
            message = entry.message
            if message is None or entry.due_us:
                return False
            lane.pop()
            if 0 < message.expires_ms <= now_ms:
                self._settlement.expire(entry)
                self.budget -= 1
                continue
            consumer = receivers[0][4]
            entry.deliveries += 1
            entry.dispatched_us = now_us
            held = consumer.held
            if not held and consumer.auto_window is not None:
                consumer.auto_window.start_sample(entry.sequence, now_ms)
            held[entry.sequence] = entry
            entries.append(entry)
            consumer_numbers.append(consumer.number)
            session = consumer.session
            size = len(message.body) + message.growth + len(message.header) + consumer.frame_bytes
            if entry.causes is not None:
                size += causes_size(entry.causes)
            session.unsent_bytes += size
            memory.unsent_bytes += size
            if memory.unsent_bytes > memory.unsent_threshold:
                memory.unsent_bytes_max = 1
            clients.dispatch_count += 1
            consumer.last_dispatch_number = clients.dispatch_count
            if consumer in deliveries:
                deliveries[consumer].append(entry)
            else:
                deliveries[consumer] = [entry]
            if message.growth:
                self.budget -= message.growth // GROWTH_BYTES_PER_DISPATCH
                if self.budget <= len(entries):
                    break
            if consumer.has_credit():
                heapreplace(
                    receivers,
                    (consumer.service_rank, len(held), consumer.last_dispatch_number, receivers[0][3], consumer),
                )
                if receivers[0][4] is consumer:
                    continue
            else:
                heappop(receivers)
            # Subscriptions of one connection share its unsent bytes: the next ones may just have lost their credit.
            while receivers and not receivers[0][4].has_credit():
                heappop(receivers)
            if not receivers:
                return False
        commit_state.touched_queues[lane.queue] = None
        return False

    def _dispatch_run(
        self,
        lane: Lane,
        consumer: BrokerConsumer,
        deliveries: Deliveries,
        entries: list[Entry],
        consumer_numbers: list[int],
    ) -> None:
        """Dispatch ready messages to the only receiver of a lane without requeued messages, with the same effect as
        `_dispatch_lane`. Stops at the first message that needs `_dispatch_lane`, which then continues."""
        memory, session, held, commit_state = self._memory, consumer.session, consumer.held, self._commit_state
        committed, now_ms, now_us = commit_state.last_committed, commit_state.now_ms, commit_state.now_us
        arrived = lane.arrived
        room = min(self.budget - len(entries), self._queue_share - len(entries), consumer.window - len(held))
        unsent, all_unsent, unsent_max = session.unsent_bytes, memory.unsent_bytes, memory.unsent_bytes_max
        frame_bytes = consumer.frame_bytes
        had_none = not held
        run: list[Entry] = []
        for entry in islice(arrived, max(room, 0)):
            message = entry.message
            if (
                entry.batch > committed
                or message is None
                or entry.due_us
                or 0 < message.expires_ms <= now_ms
                or message.growth
                or unsent >= unsent_max
            ):
                break
            entry.deliveries += 1
            entry.dispatched_us = now_us
            held[entry.sequence] = entry
            run.append(entry)
            size = len(message.body) + len(message.header) + frame_bytes
            if entry.causes is not None:
                size += causes_size(entry.causes)
            unsent += size
            all_unsent += size
            if all_unsent > memory.unsent_threshold:
                memory.unsent_bytes_max = unsent_max = 1
        if not run:
            return
        if len(run) == len(arrived):
            arrived.clear()
        else:
            for _ in run:
                arrived.popleft()
        session.unsent_bytes, memory.unsent_bytes = unsent, all_unsent
        if had_none and consumer.auto_window is not None:
            consumer.auto_window.start_sample(run[0].sequence, now_ms)
        clients = self._clients
        clients.dispatch_count += len(run)
        consumer.last_dispatch_number = clients.dispatch_count
        entries += run
        consumer_numbers += [consumer.number] * len(run)
        if consumer in deliveries:
            deliveries[consumer] += run
        else:
            deliveries[consumer] = run
