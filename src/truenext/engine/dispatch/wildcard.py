"""Which consumer gets which message now, in queues that have wildcard consumers.

Those are served together: of all that is next for somebody, in whichever queue, the smallest K goes first. So what a
wildcard gets is its true next; what others get is that of their queue as ever. A turn costs what was touched and what
is dispatched, times the wildcards of these queues; a queue in which nothing happens costs nothing. Source: contract,
"Wildcards"
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from truenext.engine.dispatch.plain import Deliveries, Dispatcher
from truenext.engine.dispatch.selective import (
    BLOCKED_BY_RETRY,
    GroupedQueueDispatch,
    QueueDispatch,
    remove_from_lane,
    service_preference,
)
from truenext.engine.queues.wildcards import Wildcards
from truenext.engine.selecting.selections import Selections
from truenext.engine.state.clients import NO_RECEIVERS, ClientRegistry
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.queue import UNBOUNDED, Entry, Lane, Queue
from truenext.engine.state.wildcard import NO_HEAD, Wildcard
from truenext.engine.writing.commit_state import CommitState

READ_AHEAD = 8
"""Lanes of which something has to be read before anything else that are read at the same time for one wildcard."""

_NO_LANE: Lane | None = None
"""None for a type checker that is not to take it for the only value: what is called next may set a lane."""


class WildcardDispatch:
    """The dispatch of one turn."""

    __slots__ = (
        "_awaited_lanes",
        "_awaiting_page",
        "_commit_state",
        "_deliveries",
        "_dispatched_by_queue",
        "_dispatcher",
        "_events",
        "_first_by_consumer",
        "_first_by_source",
        "_first_uncommitted_cache",
        "_offers",
        "_queue_dispatches",
        "_receivers",
        "_scans",
        "_selections",
        "_wildcards",
    )

    def __init__(
        self,
        commit_state: CommitState,
        clients: ClientRegistry,
        selections: Selections,
        wildcards: Wildcards,
        dispatcher: Dispatcher,
        deliveries: Deliveries,
    ) -> None:
        self._commit_state = commit_state
        self._events = commit_state.events
        self._receivers = clients.receivers_by_queue
        self._selections = selections
        self._scans = selections.scans
        self._wildcards = wildcards
        self._dispatcher = dispatcher
        self._deliveries = deliveries
        self._awaiting_page: set[BrokerConsumer] = set()
        """Wildcards of which something has to be read or tested before it is known what is next."""
        self._queue_dispatches: dict[Queue, QueueDispatch] = {}
        self._first_by_consumer: dict[Queue, dict[BrokerConsumer, Entry]] = {}
        """What is next for those who take from that queue alone, and have credit."""
        self._first_by_source: dict[Queue | Wildcard, Entry | None] = {}
        """The first of these of each queue, and what is next for a wildcard."""
        self._offers: list[tuple[int, int, int, Queue | Wildcard]] = []
        """The same as a heap: rank and sequence, a number to tell them apart, whose it is. Some are no longer true."""
        self._first_uncommitted_cache: dict[tuple[Wildcard, int], int] = {}
        """What is being committed that a wildcard could take, by rank: its first sequence."""
        self._awaited_lanes: dict[Lane, None] = {}
        self._dispatched_by_queue: dict[Queue, tuple[list[Entry], list[int]]] = {}

    def run(self, queues: Iterable[Queue], wildcards: Iterable[Wildcard]) -> Iterable[Lane]:
        """Give out true nexts until nobody has credit or nothing is ready, where something has happened in these
        queues, and these may have credit again. Returns the lanes that somebody waits for until they are read, or came
        to."""
        wildcards = dict.fromkeys(wildcards)
        for queue in queues:
            receivers = self._receivers.get(queue, NO_RECEIVERS)
            wildcards.update(dict.fromkeys(receivers.wildcards))
            if any(consumer.has_express for consumer in receivers.consumers):
                self._wildcards.express_queues[queue] = None
        for wildcard in wildcards:
            wildcard.adjust_window(self._commit_state.now_ms)
        for queue in queues:
            for consumer in self._receivers.get(queue, NO_RECEIVERS).consumers:
                if consumer.adjust_window(self._commit_state.now_ms):
                    self._events.window_changed(consumer, queue, consumer.window)
            self._update_heads(queue)
            self._query_queue(queue)
        for wildcard in wildcards:
            self._query_wildcard(wildcard)
        self._dispatch_offers()
        self._dispatch_express()
        for queue, (entries, consumer_numbers) in self._dispatched_by_queue.items():
            self._events.dispatched(queue, entries, consumer_numbers)
        return self._awaited_lanes

    def queried_queues(self) -> Iterable[Queue]:
        """The queues that were asked for what is next in them."""
        return self._queue_dispatches

    def _dispatch_offers(self) -> None:
        offers = self._offers
        while offers:
            rank, sequence, _, source = heappop(offers)
            entry = self._first_by_source.get(source)
            if entry is None or entry.sequence != sequence or entry.lane.rank != rank:
                continue
            queue = entry.lane.queue
            receivers = [
                one
                for one, first in self._first_by_consumer.get(queue, {}).items()
                if first is entry and one.has_credit()
            ]
            receivers += [
                one
                for one in self._receivers.get(queue, NO_RECEIVERS).wildcards
                if one.has_credit() and self._queried_entry(one) is entry
            ]
            if receivers:
                receiver = min(receivers, key=lambda one: service_preference(one, one.number))
                remove_from_lane(entry)
                self._dispatch_entry(entry, receiver)
            else:
                # Subscriptions of one connection share its room.
                self._query_source_again(queue, source)

    def _dispatch_entry(self, entry: Entry, receiver: BrokerConsumer) -> None:
        queue = entry.lane.queue
        if queue.observer is None or self._scans.find_scan(receiver, queue) is None:
            self._awaited_lanes[entry.lane] = None
        self._dispatcher.dispatch_entry(entry, receiver, self._deliveries)
        entries, consumer_numbers = self._dispatched_by_queue.setdefault(queue, ([], []))
        entries.append(entry)
        consumer_numbers.append(receiver.number)
        if entry.group:
            # What is being committed of it may be another's now.
            self._first_uncommitted_cache.clear()
        self._update_heads(queue)
        self._query_queue(queue)
        for wildcard in self._receivers.get(queue, NO_RECEIVERS).wildcards:
            self._query_wildcard(wildcard)

    def _query_source_again(self, queue: Queue, source: Queue | Wildcard) -> None:
        if source is queue:
            self._query_queue(queue)
        else:
            self._first_by_source[source] = None

    def _dispatch_express(self) -> None:
        for queue in list(self._wildcards.express_queues):
            receivers = self._receivers.get(queue, NO_RECEIVERS)
            if not any(consumer.has_express for consumer in receivers.consumers):
                del self._wildcards.express_queues[queue]
            elif not queue.is_paused:
                consumers = receivers.all() if receivers.exclusive is None else [receivers.exclusive]
                queue_dispatch = self._queue_dispatch(queue)
                queue_dispatch.awaited_lane = _NO_LANE
                queue_dispatch.dispatch_express(consumers, self._dispatch_entry)
                if queue_dispatch.awaited_lane is not None:
                    self._awaited_lanes[queue_dispatch.awaited_lane] = None

    # ---- What is next ----

    def _queue_dispatch(self, queue: Queue) -> QueueDispatch:
        queue_dispatch = self._queue_dispatches.get(queue)
        if queue_dispatch is None or isinstance(queue_dispatch, GroupedQueueDispatch) is not queue.has_groups:
            queue_dispatch = self._queue_dispatches[queue] = self._dispatcher.new_queue_dispatch(queue)
        return queue_dispatch

    def _query_queue(self, queue: Queue) -> None:
        """What is next for those who take from this queue alone?"""
        self._first_by_source[queue] = None
        firsts = self._first_by_consumer[queue] = {}
        receivers = self._receivers.get(queue, NO_RECEIVERS)
        if queue.is_paused or not receivers.consumers:
            return
        queue_dispatch = self._queue_dispatch(queue)
        queue_dispatch.awaited_lane = _NO_LANE
        for consumer in receivers.consumers:
            if consumer.has_credit() and receivers.exclusive in (None, consumer):
                entry = queue_dispatch.first_for(consumer)
                if entry is not None:
                    firsts[consumer] = entry
        if queue_dispatch.awaited_lane is not None:
            self._awaited_lanes[queue_dispatch.awaited_lane] = None
        if firsts:
            best = min(firsts.values(), key=lambda entry: (entry.lane.rank, entry.sequence))
            self._first_by_source[queue] = best
            heappush(self._offers, (best.lane.rank, best.sequence, queue.number, queue))

    def queried_wildcards(self) -> list[Wildcard]:
        """Those for which it was asked what is next."""
        return [one for one in self._first_by_source if isinstance(one, Wildcard)]

    def has_nothing_ready_for(self, wildcard: Wildcard) -> bool:
        """Of one that was asked: nothing is ready for it, and nothing has to be read or tested before that is known."""
        return self._first_by_source[wildcard] is None and wildcard not in self._awaiting_page and wildcard.has_credit()

    def _query_wildcard(self, wildcard: Wildcard) -> None:
        self._awaiting_page.discard(wildcard)
        entry = self._first_by_source[wildcard] = self._true_next(wildcard)
        if entry is not None:
            heappush(self._offers, (entry.lane.rank, entry.sequence, -wildcard.number, wildcard))

    def _queried_entry(self, wildcard: Wildcard) -> Entry | None:
        if wildcard not in self._first_by_source:
            self._query_wildcard(wildcard)
        return self._first_by_source[wildcard]

    def _update_heads(self, queue: Queue) -> None:
        """Something has changed in a queue: see where its lanes begin for those who take from others as well."""
        receivers = self._receivers.get(queue, NO_RECEIVERS)
        for wildcard in receivers.wildcards:
            has_nothing = queue.is_paused or receivers.exclusive not in (None, wildcard)
            queue_dispatch = self._queue_dispatch(queue)
            for lane in queue.lanes:
                rank = lane.rank
                head = None if has_nothing else queue_dispatch.head_for(wildcard, rank)
                if head is None:
                    sequence = NO_HEAD
                elif isinstance(head, int):
                    has_nothing = head == BLOCKED_BY_RETRY
                    sequence = NO_HEAD if has_nothing else head
                else:
                    sequence = head.sequence
                wildcard.set_head(queue, rank, sequence)

    def _true_next(self, wildcard: Wildcard) -> Entry | None:
        """None also if something has to be read or tested before."""
        if not wildcard.has_credit():
            return None
        for rank, heap in enumerate(wildcard.heads):
            while heap:
                sequence, _, queue = heap[0]
                if wildcard.head_at(queue, rank) != sequence:
                    heappop(heap)
                    continue
                if self._first_uncommitted(wildcard, rank) < sequence:
                    # So do all of this rank wait.
                    break
                head = self._queue_dispatch(queue).head_for(wildcard, rank)
                if head is None or head == BLOCKED_BY_RETRY:
                    wildcard.set_head(queue, rank, NO_HEAD)
                elif isinstance(head, int):
                    if head == sequence:
                        self._request_pages(wildcard, rank)
                        return None
                    wildcard.set_head(queue, rank, head)
                elif head.sequence == sequence:
                    return head
                else:
                    wildcard.set_head(queue, rank, head.sequence)
        return None

    def _request_pages(self, wildcard: Wildcard, rank: int) -> None:
        """The first thing to do for it is to read; what comes soon is read at the same time."""
        self._awaiting_page.add(wildcard)
        for _, _, queue in wildcard.heads[rank][:READ_AHEAD]:
            has_scan = queue.observer is not None and self._scans.find_scan(wildcard, queue) is not None
            if not has_scan and wildcard.head_at(queue, rank) != NO_HEAD:
                self._awaited_lanes[queue.lane(rank)] = None

    def _first_uncommitted(self, wildcard: Wildcard, rank: int) -> int:
        """The first sequence of this rank that is being committed and that it could take."""
        limit = self._first_uncommitted_cache.get((wildcard, rank))
        if limit is None:
            limit = self._first_uncommitted_cache[wildcard, rank] = next(
                (entry.sequence for entry in self._wildcards.uncommitted[rank] if self._could_take(wildcard, entry)),
                UNBOUNDED,
            )
        return limit

    def _could_take(self, wildcard: Wildcard, entry: Entry) -> bool:
        lane = entry.lane
        queue = lane.queue
        if entry.batch <= self._commit_state.last_committed or queue not in wildcard.queues:
            return False
        if queue.is_paused or self._receivers.get(queue, NO_RECEIVERS).exclusive not in (None, wildcard):
            return False
        message = entry.message
        if wildcard.selector is not None and message is not None and not wildcard.selector.matches(message):
            return False
        if not entry.group:
            return True
        groups = self._selections.existing_groups_of(queue)
        return groups.is_open_to(wildcard, entry.group) and not groups.has_earlier_delayed(
            entry.group, lane.rank, entry.sequence
        )
