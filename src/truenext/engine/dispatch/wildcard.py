"""Dispatch from queues that have wildcard consumers.

These queues are served together. Each consumer's next message is found, and of all these messages the one with the
smallest key is dispatched first. So a wildcard consumer gets the true next of all its queues, and any other consumer
gets the true next of its queue. The work of a turn grows with the number of touched queues and dispatched messages,
times the number of wildcard consumers of these queues. Queues without changes cost nothing. Source: docs/contract.md,
"Wildcards"
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from heapq import heappop, heappush, heapreplace

from truenext.engine.dispatch.heads import DELAYED
from truenext.engine.dispatch.plain import Deliveries, Dispatcher
from truenext.engine.dispatch.selective import (
    ConsumerClass,
    GroupedQueueDispatch,
    QueueDispatch,
    RankedConsumer,
    express_receivers,
    remove_from_lane,
    service_preference,
)
from truenext.engine.queues.wildcards import Wildcards
from truenext.engine.selecting.selections import Selections
from truenext.engine.state.clients import NO_RECEIVERS, ClientRegistry, QueueReceivers
from truenext.engine.state.consumer import BrokerConsumer
from truenext.engine.state.queue import Entry, Lane, Queue
from truenext.engine.state.wildcard import NO_HEAD, Wildcard
from truenext.engine.writing.commit_state import CommitState
from truenext.model.order import RANKS

READ_AHEAD = 8
"""Maximum number of lanes of which pages are read at the same time for one wildcard consumer."""

SEARCHES_PER_DISPATCH = 4
"""Number of searches for wildcard consumers' next messages that use as much of a turn's budget as one dispatch."""

_NO_LANE: Lane | None = None
"""Constant None, typed as a lane or None. If None itself were assigned to `awaited_lane`, a type checker would conclude
that the attribute stays None, although the next call may set a lane."""


class WildcardDispatch:
    """Dispatch of one turn from all queues that have wildcard consumers."""

    __slots__ = (
        "_awaited_lanes",
        "_awaiting_page",
        "_classes_by_queue",
        "_commit_state",
        "_deliveries",
        "_dispatched_by_queue",
        "_dispatcher",
        "_events",
        "_first_by_source",
        "_first_uncommitted_cache",
        "_offers",
        "_queue_dispatches",
        "_receivers",
        "_scans",
        "_searched_last",
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
        self._scans = selections.scans
        self._wildcards = wildcards
        self._dispatcher = dispatcher
        self._deliveries = deliveries
        self._awaiting_page: set[BrokerConsumer] = set()
        """Wildcard consumers whose true next is unknown until a message is read or compared."""
        self._queue_dispatches: dict[Queue, QueueDispatch] = {}
        self._searched_last: dict[QueueDispatch, None] = {}
        self._classes_by_queue: dict[Queue, list[ConsumerClass]] = {}
        """By queue: classes of the consumers that have credit. Wildcard consumers are left out."""
        self._first_by_source: dict[Queue | Wildcard, Entry | None] = {}
        """First message that is offered to the classes of each queue, and true next of each wildcard consumer."""
        self._offers: list[tuple[int, int, int, Queue | Wildcard]] = []
        """Messages of `_first_by_source`, as a heap. An item is rank, sequence, a number that makes items distinct, and
        the queue or wildcard consumer. Items may be outdated."""
        self._first_uncommitted_cache: dict[tuple[Wildcard, int], int] = {}
        """Cached results of `_first_uncommitted`, by wildcard consumer and rank."""
        self._awaited_lanes: dict[Lane, None] = {}
        self._dispatched_by_queue: dict[Queue, tuple[list[Entry], list[int]]] = {}

    def update(self, queues: Iterable[Queue]) -> None:
        """Find the next messages of wildcard consumers in these queues without dispatching."""
        for queue in queues:
            self._update_heads(queue)
        self._touch_again()

    def run(self, queues: Mapping[Queue, bool | None], wildcards: Iterable[Wildcard]) -> Iterable[Lane]:
        """Dispatch messages, always the one with the smallest key of all these queues first, until no consumer has
        credit, no message is ready, or the budget of the turn is spent.

        `queues` are the queues that have changed; the value of a queue is True if `update` has searched it since.
        `wildcards` are the wildcard consumers that may have credit again. All other queues must be unchanged since
        their last search. Returns the lanes that were reached; the next pages of these lanes may have to be read.
        """
        wildcards = dict.fromkeys(wildcards)
        for queue in queues:
            receivers = self._receivers.get(queue, NO_RECEIVERS)
            wildcards.update(dict.fromkeys(receivers.wildcards))
            if receivers.express:
                self._wildcards.express_queues[queue] = None
        for wildcard in wildcards:
            wildcard.adjust_window(self._commit_state.now_ms)
        for queue, is_searched in queues.items():
            for consumer in self._receivers.get(queue, NO_RECEIVERS).consumers:
                if consumer.adjust_window(self._commit_state.now_ms):
                    self._events.window_changed(consumer, queue, consumer.window)
            if not is_searched:
                self._update_heads(queue)
            self._query_queue(queue)
        for wildcard in wildcards:
            self._query_wildcard(wildcard)
        self._dispatch_offers()
        if not self._offers:
            self._dispatch_express()
        self._touch_again()
        for queue, (entries, consumer_numbers) in self._dispatched_by_queue.items():
            self._events.dispatched(queue, entries, consumer_numbers)
        return self._awaited_lanes

    def queried_queues(self) -> Iterable[Queue]:
        """Return the queues that were searched."""
        return self._queue_dispatches

    def _touch_again(self) -> None:
        """Mark the queues in which the next turn must continue."""
        for queue, queue_dispatch in self._queue_dispatches.items():
            if queue_dispatch.is_cut:
                self._commit_state.touched_queues[queue] = None
        for rank, sequence, _, source in self._offers:
            entry = self._first_by_source.get(source)
            if entry is not None and (entry.lane.rank, entry.sequence) == (rank, sequence):
                self._commit_state.touched_queues[entry.lane.queue] = None

    def _dispatch_offers(self) -> None:
        offers = self._offers
        budget = self._dispatcher.budget
        while offers and budget > 0 and not any(queue_dispatch.is_cut for queue_dispatch in self._searched_last):
            budget -= 1
            self._searched_last.clear()
            rank, sequence, _, source = heappop(offers)
            entry = self._first_by_source.get(source)
            if entry is None or entry.sequence != sequence or entry.lane.rank != rank:
                continue
            queue = entry.lane.queue
            classes = [
                one
                for one in self._classes_by_queue.get(queue, ())
                if one.offered_entry is entry and one.has_receiver(rank)
            ]
            receivers: list[BrokerConsumer] = [one.receivers[0][4] for one in classes]
            receivers += [
                one
                for one in self._receivers.get(queue, NO_RECEIVERS).wildcards
                if one.has_credit() and self._queried_entry(one) is entry
            ]
            if receivers:
                receiver = min(receivers, key=lambda one: service_preference(one, one.number))
                remove_from_lane(entry)
                self._assign_entry(entry, receiver)
                for consumer_class in classes:
                    if consumer_class.receivers[0][4] is receiver:
                        heapreplace(consumer_class.receivers, _ranked(receiver))
                self._query_again(queue, entry)
                # A search costs about twice as much if groups have owners.
                budget -= len(self._receivers[queue].wildcards) // SEARCHES_PER_DISPATCH + queue.has_groups
            else:
                # Subscriptions of one connection share its unsent bytes.
                self._query_source_again(queue, source)

    def _assign_entry(self, entry: Entry, receiver: BrokerConsumer) -> None:
        queue = entry.lane.queue
        if queue.observer is None or self._scans.find_scan(receiver, queue) is None:
            self._awaited_lanes[entry.lane] = None
        self._dispatcher.dispatch_entry(entry, receiver, self._deliveries)
        entries, consumer_numbers = self._dispatched_by_queue.setdefault(queue, ([], []))
        entries.append(entry)
        consumer_numbers.append(receiver.number)
        if entry.group:
            # Uncommitted messages of the group may belong to another consumer now.
            self._first_uncommitted_cache.clear()

    def _query_again(self, queue: Queue, dispatched: Entry | None = None) -> None:
        """Find the next messages of a queue after a dispatch. `dispatched` is None if more than one message was
        dispatched."""
        self._update_heads(queue)
        self._query_queue(queue, dispatched)
        for wildcard in self._receivers.get(queue, NO_RECEIVERS).wildcards:
            self._query_wildcard(wildcard)

    def _query_source_again(self, queue: Queue, source: Queue | Wildcard) -> None:
        if source is queue:
            self._query_queue(queue)
        else:
            self._first_by_source[source] = None

    def _dispatch_express(self) -> None:
        express_queues = self._wildcards.express_queues
        for queue in list(express_queues):
            receivers = self._receivers.get(queue, NO_RECEIVERS)
            if not receivers.express:
                del express_queues[queue]
            elif not queue.is_paused:
                self._dispatch_express_in(queue, receivers)
                if self._dispatcher.budget <= 0:
                    # The others are first in the next turn.
                    del express_queues[queue]
                    express_queues[queue] = None
                    return

    def _dispatch_express_in(self, queue: Queue, receivers: QueueReceivers) -> None:
        if not express_receivers(queue, receivers.express if receivers.exclusive is None else [receivers.exclusive]):
            return
        queue_dispatch = self._queue_dispatch(queue)
        queue_dispatch.awaited_lane = _NO_LANE
        before = self._dispatched_count(queue)
        queue_dispatch.dispatch_express(receivers, self._assign_entry, self._dispatcher.budget)
        if queue_dispatch.awaited_lane is not None:
            self._awaited_lanes[queue_dispatch.awaited_lane] = None
        count = self._dispatched_count(queue) - before
        if count:
            self._dispatcher.budget -= count
            self._query_again(queue)

    def _dispatched_count(self, queue: Queue) -> int:
        dispatched = self._dispatched_by_queue.get(queue)
        return 0 if dispatched is None else len(dispatched[0])

    # ---- Search ----

    def _queue_dispatch(self, queue: Queue) -> QueueDispatch:
        queue_dispatch = self._queue_dispatches.get(queue)
        if queue_dispatch is not None:
            self._searched_last[queue_dispatch] = None
        if queue_dispatch is None or isinstance(queue_dispatch, GroupedQueueDispatch) is not queue.has_groups:
            queue_dispatch = self._queue_dispatches[queue] = self._dispatcher.new_queue_dispatch(queue)
            # Put the consumers into classes again, because the queue may have got groups since.
            self._classes_by_queue.pop(queue, None)
            self._searched_last[queue_dispatch] = None
        return queue_dispatch

    def _query_queue(self, queue: Queue, dispatched: Entry | None = None) -> None:
        """Find the first ready message of each class of the queue. Wildcard consumers are not in these classes.

        `dispatched` is the only message that has left the queue since the last search; None if more has changed. With
        `dispatched` and without groups, only the classes that were offered this message are searched again.
        """
        self._first_by_source[queue] = None
        receivers = self._receivers.get(queue, NO_RECEIVERS)
        if queue.is_paused or not receivers.consumers:
            return
        queue_dispatch = self._queue_dispatch(queue)
        queue_dispatch.awaited_lane = _NO_LANE
        classes = self._classes_by_queue.get(queue)
        if classes is None:
            classes = self._classes_by_queue[queue] = self._consumer_classes(queue, receivers)
            dispatched = None
        best = None
        for consumer_class in classes:
            entry = consumer_class.offered_entry
            # In a queue with groups any dispatch may change what others can get.
            if dispatched is None or entry is dispatched or queue.has_groups:
                has_receiver = consumer_class.has_receiver(RANKS[0])
                head = queue_dispatch.head_for(consumer_class.receivers[0][4]) if has_receiver else None
                consumer_class.offered_entry = entry = head if isinstance(head, Entry) else None
            if entry is not None and (
                best is None or (entry.lane.rank, entry.sequence) < (best.lane.rank, best.sequence)
            ):
                best = entry
        if queue_dispatch.awaited_lane is not None:
            self._awaited_lanes[queue_dispatch.awaited_lane] = None
        if best is not None:
            self._first_by_source[queue] = best
            heappush(self._offers, (best.lane.rank, best.sequence, queue.number, queue))

    def _consumer_classes(self, queue: Queue, receivers: QueueReceivers) -> list[ConsumerClass]:
        """Return the consumers of a queue that have credit and are no wildcard consumers, in classes. All consumers of
        a class have the same next message."""
        classes: dict[Hashable, ConsumerClass] = {}
        for consumer in receivers.consumers:
            if consumer.has_credit() and receivers.exclusive in (None, consumer):
                scan = self._scans.find_scan(consumer, queue)
                key = consumer if queue.has_groups else scan
                consumer_class = classes.get(key)
                if consumer_class is None:
                    consumer_class = classes[key] = ConsumerClass(len(classes), scan, None)
                heappush(consumer_class.receivers, _ranked(consumer))
        return list(classes.values())

    def queried_wildcards(self) -> list[Wildcard]:
        """Return the wildcard consumers whose true next was searched for in this turn."""
        return [one for one in self._first_by_source if isinstance(one, Wildcard)]

    def has_nothing_ready_for(self, wildcard: Wildcard) -> bool:
        """Return whether a wildcard consumer has credit, and there is certainly no message ready for this consumer.
        Call this method only for consumers of `queried_wildcards`."""
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
        """Update the heads of the lanes of a changed queue in its wildcard consumers."""
        receivers = self._receivers.get(queue, NO_RECEIVERS)
        for wildcard in receivers.wildcards:
            if wildcard.is_leaving:
                continue
            has_nothing = queue.is_paused or receivers.exclusive not in (None, wildcard)
            queue_dispatch = self._queue_dispatch(queue)
            # Do not read for a consumer without credit: if memory is short, the message would be evicted before its
            # dispatch, and read again for ever.
            may_read = wildcard.has_credit()
            for lane in queue.lanes:
                rank = lane.rank
                head = None if has_nothing else queue_dispatch.lane_head_for(wildcard, rank, may_read=may_read)
                if head is None:
                    sequence = NO_HEAD
                elif isinstance(head, Entry):
                    sequence = head.sequence
                else:
                    # What is being committed is in `Wildcards.uncommitted`; a delayed message blocks its queue.
                    has_nothing = head.reason is DELAYED
                    sequence = head.sequence if head.is_undecided else NO_HEAD
                wildcard.set_head(queue, rank, sequence)

    def _true_next(self, wildcard: Wildcard) -> Entry | None:
        """Return the true next message of a wildcard consumer. None if there is none, or if a message must be read or
        compared first."""
        if not wildcard.has_credit():
            return None
        for rank, heap in enumerate(wildcard.heads):
            while heap:
                sequence, _, queue = heap[0]
                if wildcard.head_at(queue, rank) != sequence:
                    heappop(heap)
                    continue
                if self._first_uncommitted(wildcard, rank) < sequence:
                    # All messages of this rank wait too.
                    break
                head = self._queue_dispatch(queue).lane_head_for(wildcard, rank)
                if isinstance(head, Entry):
                    if head.sequence == sequence:
                        return head
                    wildcard.set_head(queue, rank, head.sequence)
                elif head is None or not head.is_undecided:
                    wildcard.set_head(queue, rank, NO_HEAD)
                elif head.sequence == sequence:
                    self._request_pages(wildcard, rank)
                    return None
                else:
                    wildcard.set_head(queue, rank, head.sequence)
        return None

    def _request_pages(self, wildcard: Wildcard, rank: int) -> None:
        """Request the next pages of up to READ_AHEAD lanes of this rank, for a wildcard consumer that waits for a
        read."""
        self._awaiting_page.add(wildcard)
        for _, _, queue in wildcard.heads[rank][:READ_AHEAD]:
            has_scan = queue.observer is not None and self._scans.find_scan(wildcard, queue) is not None
            if not has_scan and wildcard.head_at(queue, rank) != NO_HEAD:
                self._awaited_lanes[queue.lane(rank)] = None

    def _first_uncommitted(self, wildcard: Wildcard, rank: int) -> int:
        """Return the sequence of the first message of this rank that is being committed and that the consumer could
        get; UNBOUNDED if there is none."""
        limit = self._first_uncommitted_cache.get((wildcard, rank))
        if limit is None:
            limit = self._first_uncommitted_cache[wildcard, rank] = self._wildcards.first_uncommitted(wildcard, rank)
        return limit


def _ranked(consumer: BrokerConsumer) -> RankedConsumer:
    return (*service_preference(consumer, consumer.number), consumer)
