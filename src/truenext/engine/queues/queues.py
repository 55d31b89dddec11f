"""Which queues there are: how they are found, made and let go.

    named by a client     made if it is not there and there is room (`named`)
    needed                made whether there is room or not: what failed must have a place to go (`needed`)
    sent to               all that a destination stands for (`queues_for`)

A queue that goes leaves nothing here, and nothing with whoever else keeps something of queues (`_leave_everywhere`).
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from truenext.destination import (
    ENDED_PREFIX,
    SCHEDULED_PREFIX,
    SUBSCRIPTION_PREFIX,
    Destination,
    DestinationKind,
    durable_key_of,
    stored_queue,
)
from truenext.engine.queues.promised import Promised
from truenext.engine.queues.unused import Unused, no_room, remembers
from truenext.engine.state.queue import Queue
from truenext.engine.writing.entries import introduce
from truenext.errors import Code, RemoteProtocolError
from truenext.limits import (
    PAUSE_BYTES,
    SUBSCRIPTIONS_MAX,
    UNUSED_QUEUE_SECONDS_SHORT,
    UNUSED_QUEUES_CHECKED_MAX,
    UNUSED_QUEUES_REMOVED_MAX,
)
from truenext.order import RANKS
from truenext.policy import DEFAULT_POLICY
from truenext.record import split_lane_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from truenext.commands import Send
    from truenext.engine.memory.resident_set import ResidentSet
    from truenext.engine.memory.spilling import Spilling
    from truenext.engine.queues.endings import Endings
    from truenext.engine.queues.topics import Topics
    from truenext.engine.queues.wildcards import Wildcards
    from truenext.engine.selecting.selections import Selections
    from truenext.engine.state.clients import Clients
    from truenext.engine.state.consumer import ConnectionState
    from truenext.engine.state.memory import Memory
    from truenext.engine.state.queue import Entry, Lane
    from truenext.engine.writing.event_log import EventLog
    from truenext.engine.writing.ledger import Ledger
    from truenext.engine.writing.numbers import Numbers
    from truenext.message import SentMessage
    from truenext.policy import Policies


class Queues:
    def __init__(
        self,
        by_name: dict[str, Queue],
        ledger: Ledger,
        events: EventLog,
        memory: Memory,
        clients: Clients,
        resident: ResidentSet,
        numbers: Numbers,
        topics: Topics,
        selections: Selections,
        wildcards: Wildcards,
        spilling: Spilling,
        endings: Endings,
        policies: Policies,
    ) -> None:
        self.by_name = by_name
        self._ledger = ledger
        self._events = events
        self._memory = memory
        self._clients = clients
        self._resident = resident
        self._numbers = numbers
        self._topics = topics
        self._selections = selections
        self._wildcards = wildcards
        self._spilling = spilling
        self._endings = endings
        self.policies = policies
        self.durable: dict[str, Queue] = {}
        """Of each durable subscription, by its key."""
        self.hidden: dict[str, Queue] = {}
        """Those in which scheduled sends wait (scheduled.py), by the names of the queues that it is for; of what is not
        for one queue, by ""."""
        self._by_number: dict[int, Queue] = {}
        """Those that the store may know, but those that have ended."""
        self._introduced: dict[Queue, int] = {}
        """Those that remember of which the store does not know durably yet, and the batch that tells it."""
        self._promised = Promised(memory)
        self._unused = Unused(by_name, ledger, memory)
        self._futile_until_us = 0
        """Until then no queue more can go."""

    # ---- Finding ----

    def lasting(self, name: str) -> Queue:
        """Raises: RemoteProtocolError if there is no such queue"""
        queue = self.by_name.get(name)
        if queue is None or queue.is_temporary:
            raise RemoteProtocolError(f"there is no queue {name!r}", Code.NOT_FOUND)
        return queue

    def known_durable(self, key: str) -> Queue:
        """Raises: RemoteProtocolError if there is no such durable subscription"""
        queue = self.durable.get(key)
        if queue is None:
            raise RemoteProtocolError(f"there is no durable subscription {key!r}", Code.NOT_FOUND)
        return queue

    def is_there(self, queue: Queue) -> bool:
        """It has neither gone nor ended."""
        return self.by_name.get(queue.name) is queue

    def has_ended(self, name: str) -> bool:
        """A durable subscription is no more: nobody can make its queue by sending to it."""
        return name.startswith(SUBSCRIPTION_PREFIX) and name not in self.by_name

    def lane_of(self, key: bytes) -> Lane | None:
        """None if there is no such lane any more, or nothing was in it in this run."""
        number, rank = split_lane_key(key)
        queue = self._by_number.get(number)
        return queue.lane_if_there(rank) if queue is not None and rank in RANKS else None

    def scheduled(self, name: str) -> int:
        """Scheduled sends that wait for a queue; of the name "", those that wait for what is not one queue."""
        queue = self.hidden.get(name)
        return 0 if queue is None else queue.waiting()

    # ---- Finding or making ----

    def named(self, destination: Destination) -> Queue | None:
        """The queue a client names, made on first use; None if it went with its connection.

        Raises: RemoteProtocolError if there can be no such queue more
        """
        queue = self.by_name.get(destination.name)
        if queue is not None:
            # Nothing is in it yet.
            queue.used_us = self._ledger.now_us
            return queue
        return self.make(destination) if self._check_can_make(destination) else None

    def needed(self, destination: Destination) -> Queue:
        """Made if it is not there, whether there is room or not: it was there once, or asked for (a move), or what
        failed must have a place to go.
        """
        return self.by_name.get(destination.name) or self.make(destination)

    def needed_if_connected(self, destination: Destination) -> Queue | None:
        """The same of one that a client names; None if it went with its connection."""
        is_gone = destination.kind is DestinationKind.TEMPORARY and destination.session not in self._clients.sessions
        return None if is_gone else self.needed(destination)

    def queues_for(self, send: Send, queue_of: Callable[[Destination], Queue | None]) -> list[Queue]:
        """Each once; none for those that went with their connections, or for a topic without subscriptions.

        Raises: what `queue_of` raises
        """
        destination = send.destination
        if not destination.is_multi_queue:
            queue = queue_of(destination)
            return [] if queue is None else [queue]
        return self.queues_of_parts(destination, send.message, queue_of)

    def queues_of_parts(
        self, destination: Destination, message: SentMessage, queue_of: Callable[[Destination], Queue | None]
    ) -> list[Queue]:
        """Where the copies of a message stand that is sent to a topic, or to several destinations."""
        queues: dict[Queue, None] = {}
        # A selector may ask for it.
        message.arrived_ms = self._ledger.now_ms
        for part in destination.parts or (destination,):
            if part.kind is DestinationKind.TOPIC:
                queues.update(dict.fromkeys(self._topics.queues_of(part.name, message)))
            elif (queue := queue_of(part)) is not None:
                queues[queue] = None
        return list(queues)

    def promise(self, send: Send, promised: set[str]) -> None:
        """What is sent in a transaction needs queues that need not be there before its COMMIT, which makes them without
        asking: keep the room for them. `promised` are those of the transaction, which grow.

        Raises: RemoteProtocolError if there can be no such queue; then nothing is kept
        """
        destination = send.destination
        if not destination.is_multi_queue and send.schedule is None:
            # As most often.
            name = destination.name
            if name in promised:
                return
            if name in self.by_name:
                promised.add(name)
                self._promised.keep(destination, is_there=True)
                return
        kept: list[str] = []
        try:
            for part in destination.parts or (destination,):
                if part.kind is not DestinationKind.TOPIC:
                    self._promise_one(part, promised, kept, is_there=part.name in self.by_name)
            if send.schedule is not None:
                name = "" if destination.is_multi_queue else destination.name
                waiting = Destination(DestinationKind.QUEUE, SCHEDULED_PREFIX + name)
                self._promise_one(waiting, promised, kept, is_there=name in self.hidden)
        except RemoteProtocolError:
            self.free_promised(kept)
            raise
        promised.update(kept)

    def _promise_one(self, destination: Destination, promised: set[str], kept: list[str], *, is_there: bool) -> None:
        name = destination.name
        if name in promised or name in kept or not (is_there or self._check_can_make(destination)):
            return
        self._promised.keep(destination, is_there=is_there)
        kept.append(name)

    def is_promised(self, queue: Queue) -> bool:
        """An open transaction sends to it."""
        return queue.name in self._promised

    def free_promised(self, promised: Iterable[str]) -> None:
        """The transaction has ended that sends to these."""
        self._promised.free(promised)

    def _check_can_make(self, destination: Destination) -> bool:
        """False if it went with its connection.

        Raises: RemoteProtocolError if there can be no such queue more
        """
        if self._promised.has_room_for(destination.name):
            return True
        if destination.kind is DestinationKind.TEMPORARY:
            owner = self._clients.sessions.get(destination.session)
            if owner is None:
                return False
            promised = self._promised.temporary_of(owner.id)
            if len(owner.temporary_queues) + len(promised) >= SUBSCRIPTIONS_MAX:
                raise RemoteProtocolError(
                    f"more than {SUBSCRIPTIONS_MAX} temporary queues of one connection", Code.LIMIT
                )
            if not promised and owner.may_be_answered_in(destination):
                return True
        self.check_room()
        return True

    def check_room(self) -> None:
        """Raises: RemoteProtocolError if there is none for one more queue, and no other queue can go"""
        if not self._memory.has_room_for_queue:
            self.make_room()
            if not self._memory.has_room_for_queue:
                raise no_room(len(self.by_name), self._memory)

    def make_room(self) -> None:
        """There is none for what is to be made: let queues go, if any can."""
        now_us = self._ledger.now_us
        if now_us >= self._futile_until_us and not self._let_unused_go(len(self.by_name)):
            # Who asks again and again must not have all looked at again and again.
            self._futile_until_us = now_us + int(UNUSED_QUEUE_SECONDS_SHORT * 1_000_000)

    # ---- Making ----

    def make(self, destination: Destination) -> Queue:
        number = 0
        if destination.kind is DestinationKind.QUEUE:
            # The store never hears of the others.
            number = self._numbers.new()
        queue = self._new_queue(destination, number)
        if destination.kind is DestinationKind.TEMPORARY:
            self._clients.sessions[destination.session].temporary_queues.append(queue)
        self.by_name[destination.name] = queue
        self._promised.made(destination.name)
        self._topics.add(queue)
        if number:
            self._by_number[number] = queue
            if remembers(queue):
                introduce(self._ledger.batch, queue)
                self._introduced[queue] = self._ledger.batch.number
        self._events.named(queue)
        self._wildcards.made(queue)
        return queue

    def make_hidden(self, name: str, number: int = 0) -> Queue:
        """For scheduled sends to a queue of this name; `number` is the store's, if it has one already."""
        number = number or self._numbers.new()
        queue = Queue(Destination(DestinationKind.QUEUE, SCHEDULED_PREFIX + name), number, DEFAULT_POLICY, self._memory)
        self.hidden[name] = queue
        self._promised.made(queue.name)
        return queue

    def restore(self, number: int, name: str) -> Queue:
        """Take over a queue that the store knows, and that is not hidden."""
        self._numbers.restore(number)
        queue = self._new_queue(stored_queue(name.removeprefix(ENDED_PREFIX)), number)
        queue.is_known_to_store = True
        if name.startswith(ENDED_PREFIX):
            self._endings.add(queue, 0)
        else:
            self.by_name[name] = self._by_number[number] = queue
            self._topics.add(queue)
            if queue.destination.topic:
                self.durable[durable_key_of(queue.destination)] = queue
        self._events.named(queue)
        return queue

    def restore_hidden(self, number: int, name: str) -> Queue:
        self._numbers.restore(number)
        queue = self.make_hidden(name.removeprefix(SCHEDULED_PREFIX), number)
        queue.is_known_to_store = True
        return queue

    def _new_queue(self, destination: Destination, number: int) -> Queue:
        name = destination.name
        is_lasting = destination.kind is DestinationKind.QUEUE
        return Queue(
            destination,
            number,
            self.policies.for_queue(destination.topic or name),
            self._memory,
            holds_dead_letters=is_lasting and self.policies.holds_dead_letters(name),
            used_us=self._ledger.now_us,
        )

    def await_introduction(self, session: ConnectionState, destination: Destination) -> None:
        """A queue that remembers must not be forgotten once it is confirmed to whoever made it."""
        if self._introduced:
            for part in destination.parts or (destination,):
                queue = self.by_name.get(part.name)
                if queue in self._introduced:
                    session.batch = max(session.batch, self._introduced[queue])

    @property
    def introduced_with(self) -> int:
        """The last batch that tells the store of a queue; 0 if it knows of all durably."""
        return max(self._introduced.values(), default=0)

    def committed(self) -> None:
        """A batch is durable."""
        if self._introduced:
            committed = self._ledger.committed
            self._introduced = {queue: batch for queue, batch in self._introduced.items() if batch > committed}

    # ---- Pausing ----

    def set_paused(self, queue: Queue, *, is_paused: bool) -> None:
        """Durable with the gathering batch."""
        # Also if it is so already: an answer that it is must not come before that is durable.
        self._ledger.administered_in = self._ledger.batch.number
        if queue.is_paused == is_paused:
            return
        queue.is_paused = is_paused
        batch = self._ledger.batch
        if not queue.is_known_to_store:
            introduce(batch, queue)
        batch.paused[queue.number] = is_paused
        batch.size += PAUSE_BYTES
        if is_paused:
            self._events.paused(queue)
        else:
            self._events.resumed(queue)

    # ---- Going ----

    def let_some_unused_go(self) -> None:
        """To be called once a second."""
        self._let_unused_go(UNUSED_QUEUES_CHECKED_MAX)

    def _let_unused_go(self, count: int) -> int:
        """Look at so many queues, or until UNUSED_QUEUES_REMOVED_MAX have gone: how many have."""
        gone = 0
        for queue in self._unused.some(count):
            if not self.may_go(queue):
                queue.let_go_of_places()
                continue
            self.let_go(queue)
            gone += 1
            if gone >= UNUSED_QUEUES_REMOVED_MAX:
                break
        return gone

    def may_go(self, queue: Queue) -> bool:
        """It remembers nothing, and nobody has or wants anything of it."""
        if queue.is_needed or remembers(queue) or self._clients.receivers_of(queue).consumers:
            return False
        if (
            self.is_promised(queue)
            or self.scheduled(queue.name)
            or any(queue in waiting for waiting in self._ledger.waiting_queues.values())
        ):
            return False
        if any(browser.queue is queue for browser in self._clients.browsing):
            return False
        if queue.has_lost_bodies:
            # `resident` does not say that nobody has a message of it.
            queue.has_lost_bodies = next(self._clients.taken_of(queue), None) is not None
        return not queue.has_lost_bodies

    def let_go(self, queue: Queue) -> None:
        """Nobody needs a queue any more."""
        self._leave_everywhere(queue)
        self._wildcards.gone(queue)
        self._numbers.free(queue)
        queue.let_go()

    def let_go_of_hidden(self, queue: Queue) -> None:
        del self.hidden[queue.name.removeprefix(SCHEDULED_PREFIX)]
        self._numbers.free(queue)
        queue.let_go()

    def drop(self, queue: Queue) -> None:
        """A temporary queue goes with its messages."""
        self._leave_everywhere(queue)
        if queue.destination.topic:
            self._topics.remove(queue)
        for lane in queue.lanes:
            self._resident.forget(lane)
        if self._spilling.end(queue):
            # Nothing comes to it once the last batch that has anything in it is durable.
            self._endings.add(queue, self._ledger.latest_batch)
        else:
            queue.let_go()

    def end(self, queue: Queue) -> int:
        """End a durable subscription that has no consumer, with all that is in it.

        Returns: the number of messages that go, those of open transactions included
        """
        count = queue.waiting()
        del self.durable[durable_key_of(queue.destination)]
        self._topics.remove(queue)
        if queue.is_paused:
            # Its number may be that of another queue.
            self.set_paused(queue, is_paused=False)
        acknowledged: list[Entry] = []
        for session in self._clients.sessions.values():
            for transaction in session.transactions.answering:
                acknowledged += transaction.leave_out(queue)
        count += len(acknowledged)
        # Before anything of a new queue of this name. It ends the open block as well: some may have been accepted just
        # now, and what is told of that asks their messages.
        self._events.ended(queue)
        for entry in chain(*queue.lanes, *(lane.recent for lane in queue.lanes), acknowledged):
            if entry.stored is None:
                # The others are on the pages that will be read.
                self._events.expired(entry)
        for entry in acknowledged:
            self._resident.left_memory(entry)
        self._leave_everywhere(queue)
        for lane in queue.lanes:
            self._resident.forget(lane)
        self._endings.end(queue)
        return count

    def _leave_everywhere(self, queue: Queue) -> None:
        del self.by_name[queue.name]
        self._by_number.pop(queue.stored_number, None)
        self._ledger.touched.pop(queue, None)
        self._selections.drop(queue)
