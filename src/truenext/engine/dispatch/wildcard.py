"""Which consumer gets which message now, in queues that have wildcard consumers.

Those are served together: of all that is next for somebody, in whichever queue, the smallest K goes first. So what a
wildcard gets is its true next; what others get is that of their queue as ever. A turn costs what was touched and what
is dispatched, times the wildcards of these queues; a queue in which nothing happens costs nothing. Source: contract,
"Wildcards"
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from truenext.engine.dispatch.selective import HOLDS, GroupChoosing, preference, take
from truenext.engine.state.clients import NO_RECEIVERS
from truenext.engine.state.queue import WHOLE
from truenext.engine.state.wildcard import NOWHERE, Wildcard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from truenext.engine.dispatch.plain import Deliveries, Dispatcher
    from truenext.engine.dispatch.selective import Choosing
    from truenext.engine.queues.wildcards import Wildcards
    from truenext.engine.selecting.selections import Selections
    from truenext.engine.state.clients import Clients
    from truenext.engine.state.consumer import BrokerConsumer
    from truenext.engine.state.queue import Entry, Lane, Queue
    from truenext.engine.writing.event_log import EventLog
    from truenext.engine.writing.ledger import Ledger

READ_AHEAD = 8
"""Lanes of which something has to be read before anything else that are read at the same time for one wildcard."""


class WildcardDispatch:
    """The dispatch of one turn."""

    __slots__ = (
        "_awaiting_page",
        "_best",
        "_choosings",
        "_deliveries",
        "_dispatcher",
        "_events",
        "_firsts",
        "_given",
        "_lanes",
        "_ledger",
        "_limits",
        "_offers",
        "_receivers",
        "_scans",
        "_selections",
        "_wildcards",
    )

    def __init__(
        self,
        ledger: Ledger,
        events: EventLog,
        clients: Clients,
        selections: Selections,
        wildcards: Wildcards,
        dispatcher: Dispatcher,
        deliveries: Deliveries,
    ) -> None:
        self._ledger = ledger
        self._events = events
        self._receivers = clients.of_queue
        self._selections = selections
        self._scans = selections.scans
        self._wildcards = wildcards
        self._dispatcher = dispatcher
        self._deliveries = deliveries
        self._awaiting_page: set[BrokerConsumer] = set()
        """Wildcards of which something has to be read or tested before it is known what is next."""
        self._choosings: dict[Queue, Choosing] = {}
        self._firsts: dict[Queue, dict[BrokerConsumer, Entry]] = {}
        """What is next for those who take from that queue alone, and have credit."""
        self._best: dict[Queue | Wildcard, Entry | None] = {}
        """The first of these of each queue, and what is next for a wildcard."""
        self._offers: list[tuple[int, int, int, Queue | Wildcard]] = []
        """The same as a heap: rank and sequence, a number to tell them apart, whose it is. Some are no longer true."""
        self._limits: dict[tuple[Wildcard, int], int] = {}
        """What is being committed that a wildcard could take, by rank: its first sequence."""
        self._lanes: dict[Lane, None] = {}
        self._given: dict[Queue, tuple[list[Entry], list[int]]] = {}

    def run(self, queues: Iterable[Queue], wildcards: Iterable[Wildcard]) -> Iterable[Lane]:
        """Give out true nexts until nobody has credit or nothing is ready, where something has happened in these
        queues, and these may have credit again. Returns the lanes that somebody waits for until they are read, or came
        to."""
        wildcards = dict.fromkeys(wildcards)
        for queue in queues:
            receivers = self._receivers.get(queue, NO_RECEIVERS)
            wildcards.update(dict.fromkeys(receivers.wildcards))
            if any(consumer.has_express for consumer in receivers.consumers):
                self._wildcards.expressive[queue] = None
        for wildcard in wildcards:
            wildcard.adjust_window(self._ledger.now_ms)
        for queue in queues:
            for consumer in self._receivers.get(queue, NO_RECEIVERS).consumers:
                if consumer.adjust_window(self._ledger.now_ms):
                    self._events.window_changed(consumer, queue, consumer.window)
            self._look_at(queue)
            self._ask_queue(queue)
        for wildcard in wildcards:
            self._ask(wildcard)
        self._give_out()
        self._express()
        for queue, (entries, getters) in self._given.items():
            self._events.dispatched(queue, entries, getters)
        return self._lanes

    def looked_at(self) -> Iterable[Queue]:
        """The queues that were asked for what is next in them."""
        return self._choosings

    def _give_out(self) -> None:
        offers = self._offers
        while offers:
            rank, sequence, _, bidder = heappop(offers)
            entry = self._best.get(bidder)
            if entry is None or entry.sequence != sequence or entry.lane.rank != rank:
                continue
            queue = entry.lane.queue
            receivers = [
                one for one, first in self._firsts.get(queue, {}).items() if first is entry and one.has_credit()
            ]
            receivers += [
                one
                for one in self._receivers.get(queue, NO_RECEIVERS).wildcards
                if one.has_credit() and self._next(one) is entry
            ]
            if receivers:
                receiver = min(receivers, key=lambda one: preference(one, one.number))
                take(entry)
                self._give(entry, receiver)
            else:
                # Subscriptions of one connection share its room.
                self._ask_again(queue, bidder)

    def _give(self, entry: Entry, receiver: BrokerConsumer) -> None:
        queue = entry.lane.queue
        if queue.watcher is None or self._scans.of(receiver, queue) is None:
            self._lanes[entry.lane] = None
        self._dispatcher.give(entry, receiver, self._deliveries)
        entries, getters = self._given.setdefault(queue, ([], []))
        entries.append(entry)
        getters.append(receiver.number)
        if entry.group:
            # What is being committed of it may be another's now.
            self._limits.clear()
        self._look_at(queue)
        self._ask_queue(queue)
        for wildcard in self._receivers.get(queue, NO_RECEIVERS).wildcards:
            self._ask(wildcard)

    def _ask_again(self, queue: Queue, bidder: Queue | Wildcard) -> None:
        if bidder is queue:
            self._ask_queue(queue)
        else:
            self._best[bidder] = None

    def _express(self) -> None:
        for queue in list(self._wildcards.expressive):
            receivers = self._receivers.get(queue, NO_RECEIVERS)
            if not any(consumer.has_express for consumer in receivers.consumers):
                del self._wildcards.expressive[queue]
            elif not queue.is_paused:
                consumers = receivers.all() if receivers.exclusive is None else [receivers.exclusive]
                choosing = self._choosing_of(queue)
                choosing.last = None
                choosing.express(consumers, self._give)
                if choosing.last is not None:
                    self._lanes[choosing.last] = None

    # ---- What is next ----

    def _choosing_of(self, queue: Queue) -> Choosing:
        choosing = self._choosings.get(queue)
        if choosing is None or isinstance(choosing, GroupChoosing) is not queue.has_groups:
            choosing = self._choosings[queue] = self._dispatcher.choosing(queue)
        return choosing

    def _ask_queue(self, queue: Queue) -> None:
        """What is next for those who take from this queue alone?"""
        self._best[queue] = None
        firsts = self._firsts[queue] = {}
        receivers = self._receivers.get(queue, NO_RECEIVERS)
        if queue.is_paused or not receivers.consumers:
            return
        choosing = self._choosing_of(queue)
        choosing.last = None
        for consumer in receivers.consumers:
            if consumer.has_credit() and receivers.exclusive in (None, consumer):
                entry = choosing.first_for(consumer)
                if entry is not None:
                    firsts[consumer] = entry
        if choosing.last is not None:
            self._lanes[choosing.last] = None
        if firsts:
            best = min(firsts.values(), key=lambda entry: (entry.lane.rank, entry.sequence))
            self._best[queue] = best
            heappush(self._offers, (best.lane.rank, best.sequence, queue.number, queue))

    def asked(self) -> list[Wildcard]:
        """Those for which it was asked what is next."""
        return [one for one in self._best if isinstance(one, Wildcard)]

    def has_nothing_for(self, wildcard: Wildcard) -> bool:
        """Of one that was asked: nothing is ready for it, and nothing has to be read or tested before that is known."""
        return self._best[wildcard] is None and wildcard not in self._awaiting_page and wildcard.has_credit()

    def _ask(self, wildcard: Wildcard) -> None:
        self._awaiting_page.discard(wildcard)
        entry = self._best[wildcard] = self._true_next(wildcard)
        if entry is not None:
            heappush(self._offers, (entry.lane.rank, entry.sequence, -wildcard.number, wildcard))

    def _next(self, wildcard: Wildcard) -> Entry | None:
        if wildcard not in self._best:
            self._ask(wildcard)
        return self._best[wildcard]

    def _look_at(self, queue: Queue) -> None:
        """Something has changed in a queue: see where its lanes begin for those who take from others as well."""
        receivers = self._receivers.get(queue, NO_RECEIVERS)
        for wildcard in receivers.wildcards:
            is_over = queue.is_paused or receivers.exclusive not in (None, wildcard)
            choosing = self._choosing_of(queue)
            for lane in queue.lanes:
                rank = lane.rank
                head = None if is_over else choosing.head_for(wildcard, rank)
                if head is None:
                    sequence = NOWHERE
                elif isinstance(head, int):
                    is_over = head == HOLDS
                    sequence = NOWHERE if is_over else head
                else:
                    sequence = head.sequence
                wildcard.note_head(queue, rank, sequence)

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
                if self._limit(wildcard, rank) < sequence:
                    # So do all of this rank wait.
                    break
                head = self._choosing_of(queue).head_for(wildcard, rank)
                if head is None or head == HOLDS:
                    wildcard.note_head(queue, rank, NOWHERE)
                elif isinstance(head, int):
                    if head == sequence:
                        self._wait_for(wildcard, rank)
                        return None
                    wildcard.note_head(queue, rank, head)
                elif head.sequence == sequence:
                    return head
                else:
                    wildcard.note_head(queue, rank, head.sequence)
        return None

    def _wait_for(self, wildcard: Wildcard, rank: int) -> None:
        """The first thing to do for it is to read; what comes soon is read at the same time."""
        self._awaiting_page.add(wildcard)
        for _, _, queue in wildcard.heads[rank][:READ_AHEAD]:
            has_scan = queue.watcher is not None and self._scans.of(wildcard, queue) is not None
            if not has_scan and wildcard.head_at(queue, rank) != NOWHERE:
                self._lanes[queue.lane(rank)] = None

    def _limit(self, wildcard: Wildcard, rank: int) -> int:
        """The first sequence of this rank that is being committed and that it could take."""
        limit = self._limits.get((wildcard, rank))
        if limit is None:
            limit = self._limits[wildcard, rank] = next(
                (entry.sequence for entry in self._wildcards.in_flight[rank] if self._could_take(wildcard, entry)),
                WHOLE,
            )
        return limit

    def _could_take(self, wildcard: Wildcard, entry: Entry) -> bool:
        lane = entry.lane
        queue = lane.queue
        if entry.batch <= self._ledger.committed or queue not in wildcard.queues:
            return False
        if queue.is_paused or self._receivers.get(queue, NO_RECEIVERS).exclusive not in (None, wildcard):
            return False
        message = entry.message
        if wildcard.selector is not None and message is not None and not wildcard.selector.matches(message):
            return False
        if not entry.group:
            return True
        groups = self._selections.groups_of(queue)
        return groups.is_open_to(wildcard, entry.group) and not groups.does_wait(entry.group, lane.rank, entry.sequence)
