"""The queues of the broker: finds, creates and removes queues.

    get_or_create    returns the queue that a client names; creates it if memory allows
    ensure           returns a queue; creates it even if memory is short, because a failed message needs a destination
    queues_for       returns all queues to which a message is sent

When a queue is removed, `_unregister` removes it from all indexes of queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from truenext.engine.memory.parts import MemoryParts
from truenext.engine.queues.subscription_cleanup import SubscriptionCleanup
from truenext.engine.queues.topics import RouteAhead, TopicRouter
from truenext.engine.queues.unused import QueueReservations, UnusedQueueFinder, must_keep, no_memory_error
from truenext.engine.queues.wildcards import Wildcards
from truenext.engine.selecting.selections import Selections
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.counts import Counts
from truenext.engine.state.memory import temporary_topic_size
from truenext.engine.state.queue import Entry, Lane, Queue
from truenext.engine.writing.engine_state import EngineState
from truenext.engine.writing.entries import introduce_queue
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Send
from truenext.model.destination import (
    ENDED_PREFIX,
    SCHEDULED_PREFIX,
    SUBSCRIPTION_PREFIX,
    Destination,
    DestinationKind,
    durable_key_of,
    parse_stored_queue_name,
)
from truenext.model.limits import (
    PAUSE_BYTES,
    SUBSCRIPTIONS_MAX,
    UNUSED_QUEUE_SECONDS_SHORT,
    UNUSED_QUEUES_CHECKED_MAX,
    UNUSED_QUEUES_REMOVED_MAX,
)
from truenext.model.message import SentMessage
from truenext.model.order import RANKS
from truenext.model.policy import DEFAULT_POLICY, Policies
from truenext.model.record import split_lane_key


class Queues:
    def __init__(self, state: EngineState, memory: MemoryParts, policies: Policies) -> None:
        self.by_name = state.queues_by_name
        self._commit_state = state.commit_state
        self._events = state.commit_state.events
        self._memory = state.memory
        self._clients = state.clients
        self._resident = resident = memory.resident
        self._numbers = numbers = state.numbers
        self.topics = TopicRouter()
        self.selections = Selections(state, memory.delays, resident, memory.page_reader)
        self.wildcards = Wildcards(state, self.selections)
        self.policies = policies
        self.durable_by_key: dict[str, Queue] = {}
        """Queue of each durable subscription, by the subscription's key."""
        self.hidden_by_name: dict[str, Queue] = {}
        """Queues of scheduled sends (background/scheduled.py), by name of the destination. The name "" is for sends to
        more than one queue."""
        self._by_number: dict[int, Queue] = {}
        """Queues that the store may know, by number; ended queues are left out."""
        self._introduction_batches: dict[Queue, int] = {}
        """Batch that adds a queue to the store, for queues that must be kept and are not durable yet."""
        self.removed = Counts()
        """Counts of the queues and durable subscriptions that were removed or have ended."""
        self.removed_temporary = Counts()
        """Counts of the removed queues and subscriptions that end with their connections."""
        self.subscription_cleanup = SubscriptionCleanup(self._commit_state, numbers, memory.spilling, self.removed)
        self._reservations = QueueReservations(self._memory)
        self._unused_finder = UnusedQueueFinder(self.by_name, self._commit_state, self._memory)
        self._no_removal_until_us = 0
        """Time until which `free_queue_memory` does nothing, because its last check of all queues removed none."""

    # ---- Finding ----

    def require_permanent(self, name: str) -> Queue:
        """Return the queue of this name, which must not be temporary.

        Raises: RemoteProtocolError if there is no such queue.
        """
        queue = self.by_name.get(name)
        if queue is None or queue.is_temporary:
            raise RemoteProtocolError(f"there is no queue {name!r}", Code.NOT_FOUND)
        return queue

    def require_durable(self, key: str) -> Queue:
        """Return the queue of the durable subscription with this key.

        Raises: RemoteProtocolError if there is no such durable subscription.
        """
        queue = self.durable_by_key.get(key)
        if queue is None:
            raise RemoteProtocolError(f"there is no durable subscription {key!r}", Code.NOT_FOUND)
        return queue

    def all_with_ended(self) -> list[Queue]:
        """Return all queues, including ended ones that still have messages in the store. Hidden queues are left out."""
        return [*self.by_name.values(), *self.subscription_cleanup.queues()]

    def exists(self, queue: Queue) -> bool:
        """Return whether the queue still exists: it was neither removed nor ended."""
        return self.by_name.get(queue.name) is queue

    def has_temporary(self, name: str) -> bool:
        """Return whether there is a temporary queue of this name."""
        return name in self.by_name

    def has_subscription_ended(self, name: str) -> bool:
        """Return whether this name belongs to a durable subscription that has ended. A send to this name creates no
        queue."""
        return name.startswith(SUBSCRIPTION_PREFIX) and name not in self.by_name

    def lane_of(self, key: bytes) -> Lane | None:
        """Return the lane with this key. None if the lane was removed, or has not been used in this run."""
        number, rank = split_lane_key(key)
        queue = self._by_number.get(number)
        return queue.find_lane(rank) if queue is not None and rank in RANKS else None

    def scheduled_count(self, name: str) -> int:
        """Return how many scheduled sends to the queue of this name wait. The name "" stands for sends to more than one
        queue."""
        queue = self.hidden_by_name.get(name)
        return 0 if queue is None else queue.waiting_count()

    # ---- Finding or creating ----

    def get_or_create(self, destination: Destination) -> Queue | None:
        """Return the queue that a client names, and create it on first use. None if the queue is temporary, and its
        connection has ended or creates it only by a command.

        Raises: RemoteProtocolError if the queue cannot be created.
        """
        queue = self.by_name.get(destination.name)
        if queue is not None:
            # It is still empty: until its message comes it must not count as unused.
            queue.last_used_us = self._commit_state.now_us
            return queue
        return self.create(destination) if self._check_can_create(destination) else None

    def ensure(self, destination: Destination) -> Queue:
        """Return the queue, and create it if missing. Memory is not checked: a request or a failed message needs the
        queue."""
        return self.by_name.get(destination.name) or self.create(destination)

    def ensure_if_connected(self, destination: Destination) -> Queue | None:
        """Return the queue, and create it if missing, as `ensure` does. None if the queue is temporary, and its
        connection has ended or creates it only by a command."""
        if destination.kind is DestinationKind.TEMPORARY and destination.name not in self.by_name:
            owner = self._clients.sessions.get(destination.session)
            if owner is None or not owner.creates_by_use(destination):
                return None
        return self.ensure(destination)

    def queues_for(self, send: Send, queue_of: Callable[[Destination], Queue | None]) -> list[Queue]:
        """Return the queues to which a message is sent, each once. Temporary queues that have ended are left out.

        Raises: the errors of `queue_of`.
        """
        destination = send.destination
        if not destination.is_multi_queue:
            queue = queue_of(destination)
            return [] if queue is None else [queue]
        return self.queues_for_copies(destination, send.message, queue_of, send.ahead)

    def queues_for_copies(
        self,
        destination: Destination,
        message: SentMessage,
        queue_of: Callable[[Destination], Queue | None],
        ahead: RouteAhead | None = None,
    ) -> list[Queue]:
        """Return the queues that get a copy of a message sent to a topic or to several destinations. `ahead` has the
        queues that were found before the message was accepted."""
        queues: dict[Queue, None] = {}
        # A selector may refer to it.
        message.arrived_ms = self._commit_state.now_ms
        topics: TopicRouter | RouteAhead = self.topics if ahead is None else ahead
        for part in destination.parts or (destination,):
            if part.kind is DestinationKind.TOPIC:
                queues.update(dict.fromkeys(topics.queues_of(part.name, message)))
            elif (queue := queue_of(part)) is not None:
                queues[queue] = None
        return list(queues)

    def create_for_schedule(self, destination: Destination, queue_of: Callable[[Destination], Queue | None]) -> None:
        """Create the missing queues to which a scheduled send will go when it is due.

        Raises: the errors of `queue_of`.
        """
        for part in destination.parts or (destination,):
            if part.kind is not DestinationKind.TOPIC:
                queue_of(part)

    def copy_count(self, send: Send) -> int:
        """Return how many queues would get a copy of the message, if it were sent now. Creates no queue."""
        missing: set[str] = set()

        def find(part: Destination) -> Queue | None:
            queue = self.by_name.get(part.name)
            if queue is None:
                missing.add(part.name)
            return queue

        return len(self.queues_for_copies(send.destination, send.message, find, send.ahead)) + len(missing)

    def routing_ns(self, destination: Destination, message: SentMessage, ahead: RouteAhead | None) -> int:
        """Return an upper estimate, in nanoseconds, of the comparisons needed to find the queues of a send to a topic
        or to several destinations."""
        topics: TopicRouter | RouteAhead = self.topics if ahead is None else ahead
        parts = destination.parts or (destination,)
        return sum(topics.cost_ns(part.name, message) for part in parts if part.kind is DestinationKind.TOPIC)

    def new_route_ahead(self) -> RouteAhead:
        return RouteAhead(self.topics)

    def find_ahead(self, ahead: RouteAhead, destination: Destination, message: SentMessage) -> Iterator[None]:
        """Find the queues of the topics to which a message is sent, a part of the search in each step."""
        message.arrived_ms = self._commit_state.now_ms
        for part in destination.parts or (destination,):
            if part.kind is DestinationKind.TOPIC:
                yield from ahead.find(part.name, message)

    def reserve(self, send: Send, reserved: set[str]) -> None:
        """Reserve memory for the queues of a SEND in a transaction, because COMMIT creates queues without a check. Adds
        the queues' names to `reserved`, the transaction's set of names.

        Raises: RemoteProtocolError if a queue cannot be created; then no memory is reserved.
        """
        destination = send.destination
        if not destination.is_multi_queue and send.schedule is None:
            # The usual case.
            name = destination.name
            if name in reserved:
                return
            if name in self.by_name:
                reserved.add(name)
                self._reservations.reserve(destination, exists=True)
                return
        new: list[str] = []
        try:
            for part in destination.parts or (destination,):
                if part.kind is not DestinationKind.TOPIC:
                    self._reserve_one(part, reserved, new, exists=part.name in self.by_name)
            if send.schedule is not None:
                name = "" if destination.is_multi_queue else destination.name
                waiting = Destination(DestinationKind.QUEUE, SCHEDULED_PREFIX + name)
                self._reserve_one(waiting, reserved, new, exists=name in self.hidden_by_name)
        except RemoteProtocolError:
            self.free_reserved(new)
            raise
        reserved.update(new)

    def _reserve_one(self, destination: Destination, reserved: set[str], new: list[str], *, exists: bool) -> None:
        name = destination.name
        if name in reserved or name in new or not (exists or self._check_can_create(destination)):
            return
        self._reservations.reserve(destination, exists=exists)
        new.append(name)

    def has_open_sends(self, queue: Queue) -> bool:
        return queue.name in self._reservations

    def free_reserved(self, reserved: Iterable[str]) -> None:
        """Free the reservations of an ended transaction."""
        self._reservations.free(reserved)

    def _check_can_create(self, destination: Destination) -> bool:
        """Return whether the queue can be created. False if the queue is temporary, and its connection has ended or
        creates it only by a command.

        Raises: RemoteProtocolError if a limit or the memory for queues does not allow the queue.
        """
        if self._reservations.has_reserved_space(destination.name):
            return True
        self.topics.check_can_add(destination)
        if destination.kind is DestinationKind.TEMPORARY:
            owner = self._clients.sessions.get(destination.session)
            if owner is None or not owner.creates_by_use(destination):
                return False
            if self._check_can_own_more(owner, destination):
                return True
        self.check_queue_memory()
        return True

    def _check_can_own_more(self, owner: ConnectionState, destination: Destination) -> bool:
        """Check that a connection may own one more temporary queue or topic. Returns whether it may have this one even
        if there is no memory.

        Raises: RemoteProtocolError if the connection owns too many.
        """
        reserved = self._reservations.reserved_temporary(owner.id)
        if len(owner.temporary_queues) + len(owner.temporary_topics) + len(reserved) >= SUBSCRIPTIONS_MAX:
            raise RemoteProtocolError(
                f"this connection has {SUBSCRIPTIONS_MAX} temporary queues and topics, the most allowed: use fewer, "
                "for example one for all replies",
                Code.LIMIT,
            )
        return not reserved and owner.is_first_reply_queue(destination)

    def check_queue_memory(self) -> None:
        """Check that there is memory for one more queue, and remove unused queues if there is none.

        Raises: RemoteProtocolError if there is still no memory.
        """
        if not self._memory.has_space_for_queue:
            self.free_queue_memory()
            if not self._memory.has_space_for_queue:
                raise no_memory_error(len(self.by_name), self._memory)

    def free_queue_memory(self) -> None:
        """Remove unused queues. Does nothing for some time after a call that has removed none."""
        now_us = self._commit_state.now_us
        if now_us >= self._no_removal_until_us and not self._remove_unused(len(self.by_name)):
            # A client that tries again and again must not cause a check of all queues each time.
            self._no_removal_until_us = now_us + int(UNUSED_QUEUE_SECONDS_SHORT * 1_000_000)

    # ---- Creating ----

    def create(self, destination: Destination) -> Queue:
        number = 0
        if destination.kind is DestinationKind.QUEUE:
            # The store never knows queues of other kinds.
            number = self._numbers.allocate()
        queue = self._new_queue(destination, number)
        if destination.kind is DestinationKind.TEMPORARY:
            self._clients.sessions[destination.session].temporary_queues.append(queue)
        self.by_name[destination.name] = queue
        self._reservations.on_queue_created(destination.name)
        self.topics.add(queue)
        if number:
            self._by_number[number] = queue
            if must_keep(queue):
                introduce_queue(self._commit_state.batch, queue)
                self._introduction_batches[queue] = self._commit_state.batch.number
        self._events.queue_named(queue)
        self.wildcards.on_queue_created(queue)
        return queue

    def create_temporary(self, destination: Destination, owner: ConnectionState) -> None:
        """Create a temporary queue or topic of a JMS client. Does nothing if there is one.

        Raises: RemoteProtocolError if the connection owns too many, or there is no memory.
        """
        is_topic = destination.kind is DestinationKind.TOPIC
        if destination.name in (owner.temporary_topics if is_topic else self.by_name):
            return
        if not self._check_can_own_more(owner, destination) or is_topic:
            self.check_queue_memory()
        if is_topic:
            owner.temporary_topics.add(destination.name)
            self._memory.queue_bytes += temporary_topic_size(destination.name)
        else:
            self.create(destination)

    def remove_temporary_topic(self, destination: Destination, owner: ConnectionState) -> None:
        """Remove a temporary topic of a JMS client. Does nothing if there is none."""
        if destination.name in owner.temporary_topics:
            owner.temporary_topics.remove(destination.name)
            self._memory.queue_bytes -= temporary_topic_size(destination.name)

    def forget_temporary_topics(self, owner: ConnectionState) -> None:
        """Remove all temporary topics of a connection that has ended."""
        self._memory.queue_bytes -= sum(map(temporary_topic_size, owner.temporary_topics))
        owner.temporary_topics.clear()

    def create_hidden(self, name: str, number: int = 0) -> Queue:
        """Create the queue for scheduled sends to this name. `number` is the queue's number in the store; 0 allocates
        one."""
        number = number or self._numbers.allocate()
        queue = Queue(Destination(DestinationKind.QUEUE, SCHEDULED_PREFIX + name), number, DEFAULT_POLICY, self._memory)
        self.hidden_by_name[name] = queue
        self._reservations.on_queue_created(queue.name)
        return queue

    def restore(self, number: int, name: str) -> Queue:
        """Restore a queue that the store has recovered. (`restore_hidden` restores queues of scheduled sends.)"""
        self._numbers.restore(number)
        queue = self._new_queue(parse_stored_queue_name(name.removeprefix(ENDED_PREFIX)), number)
        queue.is_known_to_store = True
        if name.startswith(ENDED_PREFIX):
            self.subscription_cleanup.add_ended_queue(queue, 0)
        else:
            self.by_name[name] = self._by_number[number] = queue
            self.topics.add(queue)
            if queue.destination.topic:
                self.durable_by_key[durable_key_of(queue.destination)] = queue
        self._events.queue_named(queue)
        return queue

    def restore_hidden(self, number: int, name: str) -> Queue:
        self._numbers.restore(number)
        queue = self.create_hidden(name.removeprefix(SCHEDULED_PREFIX), number)
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
            last_used_us=self._commit_state.now_us,
        )

    def await_introduction(self, session: ConnectionState, destination: Destination) -> None:
        """Delay the connection's receipts until each queue of this destination that must survive a crash is durable."""
        if self._introduction_batches:
            for part in destination.parts or (destination,):
                queue = self.by_name.get(part.name)
                if queue in self._introduction_batches:
                    session.last_batch = max(session.last_batch, self._introduction_batches[queue])

    @property
    def introduction_batch(self) -> int:
        """Last batch that adds a queue that must be kept to the store; 0 if all such queues are durable."""
        return max(self._introduction_batches.values(), default=0)

    def on_committed(self) -> None:
        """Forget the batches of `_introduction_batches` that are durable."""
        if self._introduction_batches:
            committed = self._commit_state.last_committed
            self._introduction_batches = {
                queue: batch for queue, batch in self._introduction_batches.items() if batch > committed
            }

    # ---- Pausing ----

    def set_paused(self, queue: Queue, *, is_paused: bool) -> None:
        """Pause or resume a queue. The change is durable with the gathering batch."""
        # Even if nothing changes: the answer must not be sent before the state that it reports is durable.
        self._commit_state.last_control_batch = self._commit_state.batch.number
        if queue.is_paused == is_paused:
            return
        queue.is_paused = is_paused
        self._commit_state.return_count += 1
        batch = self._commit_state.batch
        if not queue.is_known_to_store:
            introduce_queue(batch, queue)
        batch.paused[queue.number] = is_paused
        batch.size += PAUSE_BYTES
        if is_paused:
            self._events.paused(queue)
        else:
            self._events.resumed(queue)

    # ---- Removing ----

    def remove_some_unused(self) -> None:
        """Remove some unused queues; called once a second."""
        self._remove_unused(UNUSED_QUEUES_CHECKED_MAX)

    def _remove_unused(self, count: int) -> int:
        """Check up to `count` queues, and remove those that are removable, at most UNUSED_QUEUES_REMOVED_MAX. Returns
        how many were removed."""
        removed = 0
        for queue in self._unused_finder.candidates(count):
            if not self.is_removable(queue):
                queue.shrink()
                continue
            self.remove(queue)
            removed += 1
            if removed >= UNUSED_QUEUES_REMOVED_MAX:
                break
        return removed

    def is_removable(self, queue: Queue) -> bool:
        """Return whether the queue can be removed without loss: the queue is empty, unused, and has no state such as a
        pause."""
        if queue.is_needed or must_keep(queue) or self._clients.receivers_of(queue).consumers:
            return False
        if (
            self.has_open_sends(queue)
            or self.scheduled_count(queue.name)
            or any(queue in waiting for waiting in self._commit_state.waiting_queues.values())
        ):
            return False
        if any(browser.queue is queue for browser in self._clients.active_browsers):
            return False
        if queue.has_unloaded_held:
            # `resident_bytes` does not count unloaded messages that are held.
            queue.has_unloaded_held = next(self._clients.held_entries(queue), None) is not None
        return not queue.has_unloaded_held

    def remove(self, queue: Queue) -> None:
        self._unregister(queue)
        self.wildcards.on_queue_removed(queue)
        self._numbers.free(queue)
        queue.dispose()

    def remove_hidden(self, queue: Queue) -> None:
        del self.hidden_by_name[queue.name.removeprefix(SCHEDULED_PREFIX)]
        self._numbers.free(queue)
        queue.dispose()

    def drop_temporary(self, queue: Queue, session: ConnectionState) -> None:
        """Remove a temporary queue with all its messages, including those in open transactions of its connection."""
        for transaction in session.transactions.settling_transactions:
            for entry in transaction.drop_queue(queue):
                self._resident.unload(entry)
        self._unregister(queue)
        if queue.destination.topic:
            self.topics.remove(queue)
        for lane in queue.lanes:
            self._resident.forget_lane(lane)
        self.subscription_cleanup.end_temporary(queue)

    def end_durable_subscription(self, queue: Queue) -> int:
        """End a durable subscription that has no consumer, and drop all its messages.

        Returns how many messages were dropped, including those in open transactions.
        """
        count = queue.waiting_count()
        del self.durable_by_key[durable_key_of(queue.destination)]
        self.topics.remove(queue)
        if queue.is_paused:
            # Its number may be given to another queue.
            self.set_paused(queue, is_paused=False)
        acknowledged: list[Entry] = []
        for session in self._clients.sessions.values():
            for transaction in session.transactions.settling_transactions:
                acknowledged += transaction.drop_queue(queue)
        count += len(acknowledged)
        # Before any event of a new queue of this name. This also closes the open block of events: its entries may have
        # been accepted just now, and writing them needs their messages.
        self._events.subscription_ended(queue)
        given_up = [entry for lane in queue.lanes for entry in self._resident.given_up.of_lane(lane)]
        count += len(given_up)
        for entry in chain(*queue.lanes, *(lane.unread_in_memory for lane in queue.lanes), acknowledged, given_up):
            if entry.store_batch is None:
                # The others get this event when their pages are read.
                queue.counts.rare.expired += 1
                self._events.expired(entry)
        for entry in acknowledged:
            self._resident.unload(entry)
        self._unregister(queue)
        for lane in queue.lanes:
            self._resident.forget_lane(lane)
        self.subscription_cleanup.end_subscription(queue)
        return count

    def _unregister(self, queue: Queue) -> None:
        del self.by_name[queue.name]
        (self.removed_temporary if queue.is_temporary else self.removed).add(queue.counts)
        self._by_number.pop(queue.stored_number, None)
        self._commit_state.touched_queues.pop(queue, None)
        self.selections.drop_selection(queue)
