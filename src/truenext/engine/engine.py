"""What happens to every message: the pure core of the broker.

Commands go in, effects come out; there is no clock, socket, disk or task here. The caller says what time it is
(`tick`), makes the batches durable one after the other and reports it (`committed`), and carries out what `turn`
returns. Everything is single-threaded and nothing blocks.

    command -> accept / acknowledge / give back -> the gathering batch
    turn    -> dispatch in every queue that changed -> deliveries, answers

    take_batch()         hands the gathering batch over; the next one starts
    committed(batch)     what waited for it becomes visible, its answers leave
    page_read(...)       what a turn wanted to be read from the store is there
    timers_read(...)     the same for timers
    relieve()            messages leave memory where it is short
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter
from sys import maxsize
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from truenext.answers import Answer
from truenext.batch import DUE_NEVER, Batch, ProducerState
from truenext.commands import Abort, Ack, AckMode, Begin, Browse, Command, Commit, Nack, Send, Subscribe, Unsubscribe
from truenext.destination import (
    ENDED_PREFIX,
    SUBSCRIPTION_PREFIX,
    Destination,
    Kind,
    accepted_address,
    durable_key_of,
    durable_subscription,
    queue_called,
    stored_queue,
)
from truenext.engine import bulk
from truenext.engine.account import Account, NoAccount
from truenext.engine.browse import Browser, BrowseRead, Browsing, Showing
from truenext.engine.consumer import Consumer
from truenext.engine.copies import NONE, Contents, share_new
from truenext.engine.delays import Delays
from truenext.engine.dispatch import Deliveries, Dispatcher
from truenext.engine.endings import EndingRead, Endings
from truenext.engine.expiry import BlockLook, Expiry, is_expired
from truenext.engine.joint import JointDispatch
from truenext.engine.lane import WHOLE, Entry, Lane
from truenext.engine.ledger import Ledger
from truenext.engine.memory import Memory, consumer_size
from truenext.engine.numbers import Numbers
from truenext.engine.paging import BodyRead, Look, PageRead, Paging, Read
from truenext.engine.producers import Producers
from truenext.engine.queue import Queue
from truenext.engine.redelivery import EXHAUSTED, EXPIRED, POISON, Reason, dead_letter, delay_of, is_given_up
from truenext.engine.schedule import HIDDEN_PREFIX, DueLook, Scheduler
from truenext.engine.selecting import ScanRead, Selections, bytes_to_join
from truenext.engine.session import Session
from truenext.engine.spilling import Spilling
from truenext.engine.timers import TimerRead, Timers, TimersRead
from truenext.engine.topics import Topics
from truenext.engine.transaction import Transaction, begin, make_room
from truenext.engine.unused import Unused, no_room, no_room_for_consumer, remembers
from truenext.engine.wildcard import Wildcard, Wildcards
from truenext.engine.writing import introduce, mark, put, remove
from truenext.errors import NoRoomError, RemoteProtocolError
from truenext.limits import (
    BROWSERS_MAX,
    PAUSE_BYTES,
    STORE_TRANSACTION_BYTES_MAX,
    SUBSCRIPTIONS_MAX,
    UNSENT_BYTES_MAX,
)
from truenext.message import Message
from truenext.order import RANKS
from truenext.policy import Expired, Policies, Policy, StoreAndDispatch, WhenFull
from truenext.record import DUE_TIMERS, split_lane_key
from truenext.room import FULL, Room
from truenext.schedule import Schedule

# A member of an enumeration costs more to look up than a name; these are asked for with every message.
_PLENTY = Room.PLENTY
_QUEUE = Kind.QUEUE

_C = TypeVar("_C", bound=Consumer)


class Effects(NamedTuple):
    """What one turn asks the shell to do, answers first."""

    answers: list[tuple[Session, Answer]]
    deliveries: Deliveries
    """Per consumer, in order of dispatch."""
    reads: list[Read]
    """What is to be read from the store; `page_read` takes it."""
    showings: list[Showing]
    """What browsers are shown."""
    timer_reads: list[TimerRead]
    """Pages of timers that are to be read; `timers_read` takes them."""


class Engine:
    def __init__(
        self,
        *,
        sequence_limit: int = 1,
        redelivered_below: int = 0,
        memory_limit: int = maxsize,
        queues_memory_limit: int = maxsize,
        policies: Policies | None = None,
        when_full: WhenFull = WhenFull.SLOW,
        account: Account | None = None,
        chance: Callable[[], float] = lambda: 0.5,
    ) -> None:
        """`sequence_limit` and `redelivered_below` are the store's: no sequence from the one on was ever given out, and
        what is below the other may have been dispatched without a trace. Of the limits of memory see Memory. `chance`
        gives random numbers from 0 to 1, for the jitter of delays.
        """
        self._chance = chance
        self._account = account or NoAccount()
        ledger = self.ledger = Ledger(self._account, sequence_limit=sequence_limit)
        self.delays = Delays(ledger)
        self.memory = Memory(memory_limit, queues_memory_limit)
        self._redelivered_below = redelivered_below
        self._paging = Paging(ledger, self.memory, self.delays, redelivered_below=redelivered_below)
        self._browsing = Browsing(ledger, self.memory, redelivered_below=redelivered_below)
        self._early_pages: list[tuple[Read, PageRead]] = []
        """True up to a batch that is durable, but not known to be."""
        self._policies = policies or Policies()
        self._when_full = when_full
        self._sessions: dict[str, Session] = {}
        self._queues: dict[str, Queue] = {}
        self._topics = Topics()
        self._durable: dict[str, Queue] = {}
        """Of each durable subscription, by its key."""
        self._numbers = Numbers(ledger, self._account)
        self._endings = Endings(ledger, self._account, self._numbers)
        self._spilling = Spilling(ledger, self._numbers, self._endings)
        self._paging.begin_spilling = self._spilling.begin
        self._numbered: dict[int, Queue] = {}
        """Those that the store may know."""
        self._introduced: dict[Queue, int] = {}
        """Those that remember of which the store does not know durably yet, and the batch that tells it."""
        self._unused = Unused(self._queues, self.memory, is_needed_elsewhere=self._is_needed, let_go=self._let_go)
        self._producers = Producers(ledger)
        self._timers = Timers(ledger, end=DUE_TIMERS)
        self._expiry = Expiry(
            ledger,
            self._timers,
            self._paging,
            lane_of=self._lane_of,
            is_held=self._is_held,
            expire=self._expire_and_touch,
        )
        self._scheduler = Scheduler(ledger, self._paging, self.memory, self._numbers, send=self._send_scheduled)
        self._selections = Selections(self.memory, self._paging, self.delays)
        self._paging.begin_groups = self._selections.begin_groups
        self._dispatcher = Dispatcher(ledger, self._account, self.memory, self._paging, self._expire)
        self._wildcards = Wildcards(ledger, self._queues, self._account, self._selections)
        self._consumer_number = 0
        self._acknowledgements = 0
        """Of consumers with express; says who was the last."""
        self._bulk_in = 0
        """The last batch that moved or removed messages because somebody asked for it."""

    # ---- Start and stop ----

    def restore_queue(self, number: int, name: str) -> Queue:
        """Take over a queue that the store knows."""
        self._numbers.restore(number)
        if name.startswith(HIDDEN_PREFIX):
            return self._scheduler.restore_queue(number, name)
        queue = self._new_queue(stored_queue(name.removeprefix(ENDED_PREFIX)), number)
        if name.startswith(ENDED_PREFIX):
            queue.is_known_to_store = True
            self._endings.add(queue, 0)
        else:
            queue.is_known_to_store = True
            self._queues[name] = self._numbered[number] = queue
            self._topics.add(queue)
            if queue.destination.topic:
                self._durable[durable_key_of(queue.destination)] = queue
        self._account.named(queue)
        return queue

    def restore_lane(self, queue: Queue, rank: int, count: int) -> None:
        """The store has `count` messages of a queue and rank; they are read when somebody wants them."""
        lane = queue.lane(rank)
        lane.horizon = 0
        lane.unread = count

    def restore_pause(self, queue: Queue) -> None:
        queue.is_paused = True

    def restore_producers(self, states: Iterable[tuple[str, ProducerState]]) -> None:
        self._producers.restore(states)

    def take_forgotten_producers(self) -> tuple[int, str]:
        """How many were forgotten before their time since the last call, and the last of them."""
        return self._producers.take_forgotten()

    def tick(self, now_us: int, steady_us: int) -> None:
        """It is so many microseconds since the epoch, and by a clock that does not jump. To be called before commands
        and turns."""
        self.ledger.tick(now_us, steady_us)

    def start(self, *, after_clean_stop: bool = True) -> None:
        """Ask for what must be durable before anybody is listened to: sequences, and that this run has not ended."""
        self._account.started(after_clean_stop=after_clean_stop)
        for name in self._scheduler.names():
            if name and self._scheduler.count(name) and name not in self._queues:
                self._make_queue(Destination(Kind.QUEUE, name))
        for queue in chain(self._queues.values(), self._endings.queues()):
            if count := queue.waiting():
                self._account.recovered(queue, count)
            if queue.is_paused:
                self._account.paused(queue)
            queue.used_us = self.ledger.now_us
        self.ledger.batch.clean_stop = False
        self.ledger.batch.redelivered_below = self._redelivered_below
        self.ledger.request_sequences()
        self.ledger.is_awaited = True

    def stop(self) -> None:
        """Take back, without an attempt, what anybody holds; nobody is served from here on, nothing expires or becomes
        due, and pages are not looked at: what waits is about to be written down."""
        self.ledger.is_stopped = True
        for session in list(self._sessions.values()):
            self.disconnect(session, is_clean=True)

    def last_batches(self) -> Iterator[Batch]:
        """What a clean stop writes down: waiting transients, delivery counts, the numbers of producers that only sent
        transients, and last that the stop was clean.

        Each must be durable before the next is asked for. To be called after `stop`, with no batch in flight.
        """
        lasting = (queue for queue in self._queues.values() if not queue.is_temporary)
        # Some may leave memory in between, and with that their lanes.
        waiting = [entry for queue in lasting for lane in queue.lanes for entry in lane]
        for entry in waiting + self._paging.doomed():
            if self.ledger.batch.size >= STORE_TRANSACTION_BYTES_MAX:
                yield self.ledger.hand_over()
            self._write_down(entry)
        for name, state in self._producers.unstored():
            if self.ledger.batch.size >= STORE_TRANSACTION_BYTES_MAX:
                yield self.ledger.hand_over()
            self.ledger.batch.producers[name] = state
            self.ledger.batch.size += len(name)
        self.ledger.batch.clean_stop = True
        yield self.ledger.hand_over()

    # ---- What the shell asks before it reads on ----

    @property
    def has_room(self) -> bool:
        """More commands may be taken: sequences are left, and the gathering batch is not too large."""
        return self.ledger.has_room

    def must_wait(self, session: Session, command: Command) -> bool:
        """While room is short this is for whoever only sends to wait with, and whatever is behind it."""
        if self._when_full is not WhenFull.SLOW or not session.only_sends:
            return False
        # A transaction makes room only if it takes messages away, and none are held here.
        return isinstance(command, Begin) or (
            isinstance(command, Send) and command.destination.kind is not Kind.TEMPORARY
        )

    @property
    def is_batch_awaited(self) -> bool:
        return self.ledger.is_awaited

    @property
    def has_batch(self) -> bool:
        """There is something to write, or somebody waits for what need not be written any more."""
        return self.ledger.has_batch

    @property
    def has_work(self) -> bool:
        """A turn would do something."""
        return (
            bool(self.ledger.touched)
            or self.ledger.has_answers
            or self._browsing.has_work
            or self._selections.has_work
            or bool(self._wildcards.joining)
            or (bool(self._timers.in_memory) and self._expiry.is_due())
            or self._endings.is_due()
            or (bool(self._scheduler.timers.in_memory) and self._scheduler.is_due())
        )

    @property
    def next_due_ms(self) -> int | None:
        """When a turn is needed though nothing else happens, in milliseconds since the epoch; None if never, or if that
        is known only when something else has happened.
        """
        if not self._timers.in_memory and not self._scheduler.timers.in_memory and self.delays.next_us is None:
            return None
        times = (self._timers.next_due_ms, self._scheduler.next_due_ms)
        due_ms = min((each for each in times if each is not None and each > self.ledger.now_ms), default=None)
        if self.delays.next_us is not None:
            delayed_ms = self.ledger.now_ms + max(0, -(-(self.delays.next_us - self.ledger.now_us) // 1000))
            due_ms = min(due_ms or delayed_ms, delayed_ms)
        return due_ms

    @property
    def now_ms(self) -> int:
        """Milliseconds since the epoch, as of the last tick."""
        return self.ledger.now_ms

    @property
    def last_committed(self) -> int:
        """The last batch that is known to be durable."""
        return self.ledger.committed

    @property
    def is_joint_commit_under_way(self) -> bool:
        """Something is not durable yet in a queue from which somebody takes who takes from others as well."""
        in_flight = chain(*self._wildcards.in_flight)
        return any(entry.batch > self.ledger.committed for entry in in_flight)

    def queues(self) -> Iterable[Queue]:
        return self._queues.values()

    def sessions(self) -> Iterable[Session]:
        return self._sessions.values()

    # ---- Connections ----

    def connect(self, session_id: str) -> Session:
        session = self._sessions[session_id] = Session(session_id)
        return session

    def is_connected(self, session: Session) -> bool:
        return session.id in self._sessions

    def disconnect(self, session: Session, *, is_clean: bool) -> None:
        """End a connection: what it held goes back in one step.

        If not `is_clean`, what the client had begun counts as an attempt: what it acknowledged in open transactions,
        and the first message of each subscription. Not so in auto mode: those never left the broker.
        """
        if self._sessions.pop(session.id, None) is None:
            return
        for transaction in session.transactions.values():
            self.memory.open -= transaction.size
            for entry in transaction.acknowledged + transaction.refused:
                self._give_back(entry, Reason.RELEASED if is_clean else Reason.LOST)
        session.transactions.clear()
        for consumer in session.consumers.values():
            has_begun = not is_clean and consumer.mode is not AckMode.AUTO
            self._release(consumer, has_begun=has_begun)
        session.consumers.clear()
        for browser in session.browsers.values():
            self._browsing.browsers.pop(browser, None)
            self._end_use(browser)
        for queue in session.temporary_queues:
            self._drop(queue)
        self._count_taken(session)

    def taken(self, session: Session) -> None:
        """The socket has taken all bytes of all messages dispatched to the connection."""
        had_no_room = session.unsent_bytes >= self.memory.unsent_max
        self._count_taken(session)
        served, session.served = session.served, {}
        for consumer in session.consumers.values() if had_no_room else served:
            held = consumer.held
            if had_no_room or len(held) >= consumer.window:
                self.ledger.touched[consumer.queue] = None
            if held and consumer.mode is AckMode.AUTO:
                if not consumer.is_of_many:
                    self._account.acknowledged_all(consumer.queue, held.values())
                for entry in held.values():
                    if consumer.is_of_many:
                        self._account.acknowledged(entry)
                    self._forget(entry)
                held.clear()

    def taken_before_loss(self, consumer: Consumer, count: int) -> None:
        """The socket took the first `count` messages dispatched to a consumer in auto mode, and will take no more."""
        for sequence in list(consumer.held)[:count]:
            self._acknowledged(consumer.held.pop(sequence))

    def set_aside(self, consumer: Consumer) -> Entry:
        """Take the first message that a consumer holds from it; it is nobody's until `set_right`."""
        return consumer.held.pop(next(iter(consumer.held)))

    def set_right(self, entry: Entry, *, is_taken: bool) -> None:
        """Acknowledge a message that was set aside, or give it back."""
        if is_taken and self._queues.get(entry.lane.queue.name) is entry.lane.queue:
            self._acknowledged(entry)
        else:
            self._give_back(entry, Reason.RELEASED)

    def answer(self, session: Session, answer: Answer) -> None:
        """Say something to a connection once all that it asked for so far is durable, in order."""
        self.ledger.answer(session, answer)

    # ---- Commands ----

    def send(self, session: Session, send: Send) -> None:
        """Raises: RemoteProtocolError if there is no such transaction, or a limit is reached."""
        if send.transaction is not None:
            if send.producer is not None:
                raise RemoteProtocolError("a send inside a transaction has no number of its own: number the COMMIT")
            transaction = session.transaction(send.transaction)
            size = len(send.message.header) + len(send.message.body)
            make_room(session.transactions, size=size)
            if not self.memory.has_room_to_open(size):
                raise NoRoomError(
                    f"open transactions of all connections hold {self.memory.open} bytes, and may hold "
                    f"{self.memory.open_max} (--memory-limit); commit, or try again later"
                )
            self._admit(session, send)
            self._check_queues(send)
            transaction.sends.append(send)
            transaction.size += size
            self.memory.open += size
            return
        producer = send.producer
        if producer is not None and self._is_repeat(session, producer, send.number):
            send.is_repeat = True
            return
        self._admit(session, send)
        message = send.message
        destination = send.destination
        if send.schedule is not None:
            # Whatever can be refused is refused now.
            self._queues_for(send)
            self._await_introduction(session, destination)
            is_stored = message.persistent
            self._schedule(destination, message, send.schedule)
        elif destination.is_spread:
            is_stored = self._spread(send)
            self._await_introduction(session, destination)
        else:
            is_stored = message.persistent and destination.kind is _QUEUE
            # Most queues are there.
            queue = self._queues.get(destination.name)
            if queue is None:
                queue = self._queue(destination)
                self._await_introduction(session, destination)
            if queue is not None:
                visible_at_once = not is_stored or queue.policy.store_and_dispatch is StoreAndDispatch.CONCURRENT
                self._accept(queue, message, 0 if visible_at_once else self.ledger.batch.number)
        if producer is not None:
            self._producers.record(producer, send.number, is_stored=is_stored)
        if is_stored:
            session.batch = self.ledger.batch.number

    def subscribe(self, session: Session, subscribe: Subscribe) -> None:
        """Raises: RemoteProtocolError if the subscription is taken, or the queue is another connection's, or somebody
        uses the durable subscription, or there is no room.
        """
        session.check_subscription(subscribe.subscription, subscribe.destination)
        destination = subscribe.destination
        if destination.kind is Kind.QUEUES and not subscribe.durable:
            self._subscribe_to_many(session, subscribe)
            return
        selector = subscribe.selector
        text = selector.text if selector is not None else ""
        there = None if destination.kind in (Kind.TOPIC, Kind.PATTERN) else self._queues.get(destination.name)
        size = 0 if selector is None or there is None else bytes_to_join(there, selector)
        self._check_room_for_consumer(subscribe, size)
        if subscribe.durable:
            queue: Queue | None = self._durable_subscription(session, subscribe.durable, destination, text)
        else:
            if destination.kind is Kind.TOPIC or destination.kind is Kind.PATTERN:
                destination = Destination(
                    Kind.TEMPORARY,
                    f"/{session.id}//{subscribe.subscription}",
                    session.id,
                    topic=destination.name,
                    selector=text,
                )
            queue = self._queue(destination)
        assert queue is not None, "the owner of a temporary queue is connected"
        self._await_introduction(session, queue.destination)
        consumer = self._new_consumer(Consumer, session, queue, subscribe)
        if queue.destination.topic:
            # What waits in a subscription to a topic is what its selector wants.
            selector = None
        if selector is not None or queue.groups is not None:
            self._selections.subscribe(consumer, queue, selector)
        self._account.subscribed(consumer, queue)
        session.consumers[subscribe.subscription] = consumer
        self._begin_use(consumer)
        queue.join(consumer)
        self.ledger.touched[queue] = None

    def _subscribe_to_many(self, session: Session, subscribe: Subscribe) -> None:
        """To all queues whose names match a pattern."""
        # Nothing is ever in it.
        queue = Queue(subscribe.destination, 0, Policy(), Memory())
        wildcard = self._new_consumer(Wildcard, session, queue, subscribe)
        size = self._wildcards.size_to_join(wildcard)
        self._check_room_for_consumer(subscribe, size)
        self._wildcards.subscribe(wildcard, size)
        session.consumers[subscribe.subscription] = wildcard
        self._begin_use(wildcard)
        self._join_some()

    def _join_some(self) -> None:
        """Go on with whoever takes from many queues and has not joined all of them."""
        self.ledger.touched.update(dict.fromkeys(self._wildcards.go_on()))

    def _check_room_for_consumer(self, subscribe: Subscribe | Browse, size: int) -> None:
        """`size` is what it makes queues take that are there.

        Raises: RemoteProtocolError if there is no room for it, and no queue can go
        """
        size += consumer_size(subscribe.subscription, subscribe.destination)
        size += self.memory.bytes_to_use(subscribe.selector)
        if not self.memory.has_room_for_consumer(size):
            self._unused.make_room(self.ledger.now_us)
            if not self.memory.has_room_for_consumer(size):
                raise no_room_for_consumer(size, self.memory)

    def _begin_use(self, consumer: Consumer) -> None:
        """A consumer or a browser is there; to be followed by `_end_use`."""
        self.memory.queues += consumer_size(consumer.subscription, consumer.queue.destination)
        self.memory.use(consumer.wanted)

    def _end_use(self, consumer: Consumer) -> None:
        self.memory.queues -= consumer_size(consumer.subscription, consumer.queue.destination)
        self.memory.no_longer_use(consumer.wanted)

    def _new_consumer(self, kind: type[_C], session: Session, queue: Queue, subscribe: Subscribe) -> _C:
        self._consumer_number += 1
        return kind(
            session,
            queue,
            subscribe,
            self.memory,
            number=self._consumer_number,
            served_at=self._dispatcher.dispatches,
            now_ms=self.ledger.now_ms,
        )

    def browse(self, session: Session, browse: Browse) -> None:
        """Raises: RemoteProtocolError if the subscription is taken, the queue is another connection's, there is no such
        durable subscription, or too many browse.
        """
        session.check_subscription(browse.subscription, browse.destination)
        browsing = self._browsing.browsers
        if len(browsing) >= BROWSERS_MAX:
            raise RemoteProtocolError(f"more than {BROWSERS_MAX} are browsing; try again when others are done")
        self._check_room_for_consumer(browse, 0)
        name = browse.destination.name
        if browse.destination.kind is Kind.DURABLE:
            queue = self._known_durable(name)
        else:
            # One that is not there is empty, and is not made for being looked at.
            queue = self._queues.get(name) or Queue(browse.destination, 0, self._policies.of(name), Memory())
        browser = Browser(session, queue, browse, self.memory, last_sequence=self.ledger.next_sequence - 1)
        session.browsers[browse.subscription] = browser
        browsing[browser] = None
        self._begin_use(browser)

    def unsubscribe(self, session: Session, unsubscribe: Unsubscribe) -> None:
        """Raises: RemoteProtocolError if there is no such subscription, or somebody else uses it."""
        if unsubscribe.durable:
            self._unsubscribe_durable(session, unsubscribe)
            return
        browser = session.browsers.pop(unsubscribe.subscription, None)
        if browser is not None:
            self._browsing.browsers.pop(browser, None)
            self._end_use(browser)
            return
        consumer = session.consumers.pop(unsubscribe.subscription, None)
        if consumer is None:
            raise RemoteProtocolError(f"there is no subscription {unsubscribe.subscription!r} on this connection")
        self._release(consumer, has_begun=False)
        queue = consumer.queue
        if queue.is_subscription:
            session.temporary_queues.remove(queue)
            for transaction in session.transactions.values():
                for entry in transaction.leave_out(queue):
                    self._paging.went(entry)
            self._drop(queue)

    def _durable_subscription(self, session: Session, key: str, destination: Destination, selector: str) -> Queue:
        """The one of this name, made now if it is not there, or is to something else or wants something else."""
        if destination.session or destination.kind not in (Kind.TOPIC, Kind.PATTERN):
            raise RemoteProtocolError(f"{destination.address}: durable subscriptions are to topics that last")
        queue = self._durable.get(key)
        if queue is not None and queue.consumers:
            raise RemoteProtocolError(f"somebody uses the durable subscription {key!r}")
        wanted = durable_subscription(key, destination.name, selector)
        if queue is not None and queue.destination != wanted:
            self._end(queue)
            queue = None
        if queue is None:
            self._check_room_for_queue()
            queue = self._durable[key] = self._make_queue(wanted)
        return queue

    def _unsubscribe_durable(self, session: Session, unsubscribe: Unsubscribe) -> None:
        queue = self._known_durable(unsubscribe.durable)
        consumer = session.consumers.get(unsubscribe.subscription)
        if any(other is not consumer for other in queue.consumers):
            raise RemoteProtocolError(f"somebody uses the durable subscription {unsubscribe.durable!r}")
        if consumer is not None and consumer.queue is queue:
            del session.consumers[unsubscribe.subscription]
            self._release(consumer, has_begun=False)
        self._end(queue)
        session.batch = self.ledger.batch.number

    def _known_durable(self, key: str) -> Queue:
        queue = self._durable.get(key)
        if queue is None:
            raise RemoteProtocolError(f"there is no durable subscription {key!r}")
        return queue

    def _end(self, queue: Queue) -> None:
        """A durable subscription goes, which nobody uses, with all that is in it."""
        del self._queues[queue.name], self._numbered[queue.number], self._durable[durable_key_of(queue.destination)]
        self._topics.remove(queue)
        self.ledger.touched.pop(queue, None)
        if queue.is_paused:
            # Its number may be that of another queue.
            self._set_paused(queue, is_paused=False)
        acknowledged: list[Entry] = []
        for session in self._sessions.values():
            for transaction in session.transactions.values():
                acknowledged += transaction.leave_out(queue)
        # Some may have been accepted just now, and what is told of that asks their messages.
        self._account.end_block()
        for entry in chain(*queue.lanes, *(lane.recent for lane in queue.lanes), acknowledged):
            if entry.stored is None:
                # The others are on the pages that will be read.
                self._account.expired(entry)
        for entry in acknowledged:
            self._paging.went(entry)
        self._selections.drop(queue)
        for lane in queue.lanes:
            self._paging.forget(lane)
        self._endings.end(queue)

    def acknowledge(self, session: Session, ack: Ack) -> None:
        """Raises: RemoteProtocolError if the message is not held, or the transaction not open."""
        consumer = session.consumer_of(ack.subscription, ack.sequence)
        self.ledger.touched[consumer.queue] = None
        if consumer.auto is not None:
            consumer.auto.answered += 1
        if consumer.has_express:
            self._acknowledgements += 1
            consumer.answered_at = self._acknowledgements
        if ack.transaction is None and consumer.mode is AckMode.INDIVIDUAL:
            # The general way below, without its lists.
            entry = consumer.held.pop(ack.sequence)
            account = self._account
            if account.acknowledging is consumer.queue:
                account.entries.append(entry)
            else:
                account.acknowledged(entry)
            if self._forget(entry):
                session.batch = self.ledger.batch.number
            return
        covered = consumer.covered_by(ack.sequence)
        if ack.transaction is not None:
            transaction = self._with_room(session, ack.transaction, len(covered))
            transaction.acknowledged.extend(map(consumer.held.pop, covered))
            return
        for sequence in covered:
            if self._acknowledged(consumer.held.pop(sequence)):
                session.batch = self.ledger.batch.number

    def refuse(self, session: Session, nack: Nack) -> None:
        """Raises: RemoteProtocolError if the message is not held, or the transaction not open."""
        consumer = session.consumer_of(nack.subscription, nack.sequence)
        self.ledger.touched[consumer.queue] = None
        if consumer.auto is not None:
            consumer.auto.answered += 1
        covered = consumer.covered_by(nack.sequence)
        if nack.transaction is not None:
            transaction = self._with_room(session, nack.transaction, len(covered))
            transaction.refused.extend(map(consumer.held.pop, covered))
            if nack.delay_ms is not None or nack.is_poison:
                transaction.wishes |= dict.fromkeys(covered, nack)
            return
        for sequence in covered:
            self._fail(consumer.held.pop(sequence), Reason.REFUSED, nack)
        session.batch = self.ledger.latest_batch

    def begin(self, session: Session, command: Begin) -> None:
        """Raises: RemoteProtocolError if the name is taken or there are too many."""
        begin(session.transactions, command.transaction)

    def commit(self, session: Session, commit: Commit) -> None:
        """Raises: RemoteProtocolError if the transaction is not open and its number not recorded."""
        if commit.producer is not None and self._is_repeat(session, commit.producer, commit.number):
            commit.is_repeat = True
            if commit.transaction in session.transactions:
                self._abort(session, commit.transaction)
            return
        transaction = session.transactions.get(commit.transaction)
        if transaction is None:
            raise RemoteProtocolError(
                f"transaction {commit.transaction!r} is not open: it was rolled back, or committed under another number"
            )
        # Everything that can be refused is asked for first: from here on all of it happens.
        spread = [self._queues_for(send, self._needed_queue_for) for send in transaction.sends]
        del session.transactions[commit.transaction]
        self.memory.open -= transaction.size
        is_stored = transaction.acknowledges_stored() or any(
            send.message.persistent and (send.schedule is not None or not all(queue.is_temporary for queue in queues))
            for queues, send in zip(spread, transaction.sends, strict=True)
        )
        batch = self.ledger.batch.number if is_stored else 0
        scheduled: list[tuple[Send, Schedule]] = []
        for queues, send in zip(spread, transaction.sends, strict=True):
            if send.schedule is not None:
                scheduled.append((send, send.schedule))
                continue
            contents = self._share(send.message, queues)
            for queue in queues:
                self._accept(queue, send.message, batch, contents)
        # Behind the others, whose sequences are one block.
        for send, schedule in scheduled:
            self._schedule(send.destination, send.message, schedule)
        for entry in transaction.acknowledged:
            self._acknowledged(entry)
        for entry in transaction.refused:
            self._fail(entry, Reason.REFUSED, transaction.wishes.get(entry.sequence))
        if commit.producer is not None:
            self._producers.record(commit.producer, commit.number, is_stored=is_stored, is_send=False)
        if is_stored or transaction.refused:
            session.batch = self.ledger.latest_batch
        elif self._introduced:
            for send in transaction.sends:
                self._await_introduction(session, send.destination)

    def abort(self, session: Session, abort: Abort) -> None:
        """Raises: RemoteProtocolError if the transaction is not open."""
        session.transaction(abort.transaction)
        self._abort(session, abort.transaction)

    # ---- Bulk work ----

    def check_bulk(self, asked: bulk.Wanted) -> None:
        """Whether messages can be moved or removed. Of work that has begun, and whose queue is no more, the answer says
        what is so.

        Raises: RemoteProtocolError if there is no such queue or too many, NoRoomError
        """
        is_gone = asked.until is not None and asked.queue not in self._queues
        if not (isinstance(asked, bulk.OfScheduled) and asked.queue == "") and not is_gone:
            self._queue_of_bulk(asked)

    def _has_gone_since(self, asked: bulk.Wanted) -> bool:
        """There was a piece before, and nothing is left since: the queue has gone (unused.py)."""
        return asked.until is not None and asked.queue not in self._queues and not self._has_ended(asked.queue)

    def _queue_of_bulk(self, asked: bulk.Wanted) -> Queue:
        """The queue that they are in, or for which they are scheduled."""
        queue = self._lasting_queue(asked.queue)
        queue.used_us = self.ledger.now_us
        if isinstance(asked, bulk.Purge | bulk.OfScheduled):
            return queue
        if isinstance(asked, bulk.Redrive) and not queue.holds_dead_letters:
            raise RemoteProtocolError(f"{asked.queue!r} is no dead-letter queue: nothing in it can be moved back")
        if isinstance(asked, bulk.Move) and asked.to not in self._queues:
            self._check_room_for_queue()
        if self.ledger.room is Room.NONE:
            raise NoRoomError(f"{FULL}: what is moved is written once more")
        return queue

    def read_for_bulk(self, asked: bulk.Wanted) -> bulk.BulkLook | None:
        """What has to be read for a piece of work, which `do_bulk` takes; None if nothing is left to do.

        Not before the last piece is durable (`can_do_bulk`), and one at a time; of what is scheduled while it is held
        (`hold_scheduled`).

        Raises: as `check_bulk`
        """
        last = self.ledger.next_sequence - 1
        if isinstance(asked, bulk.OfScheduled):
            look = self._scheduler.read_for(asked)
            if look is None:
                self._scheduler.release()
        elif self._has_gone_since(asked):
            return None
        else:
            look = bulk.read_for(asked, self._queue_of_bulk(asked), last)
            if look is not None:
                self._paging.pin(look.lane)
        if look is not None:
            look.begin()
        return look

    def nothing_for_bulk(self, asked: bulk.Wanted) -> bulk.Done:
        """The answer where `read_for_bulk` says that there is nothing to do."""
        answer = bulk.nothing(asked)
        queue = self._queues.get(asked.queue)
        if queue is not None and not isinstance(asked, bulk.OfScheduled):
            until = self.ledger.next_sequence - 1 if asked.until is None else asked.until
            answer.left = bulk.left_with(self._taken_of(queue), asked, until)
        return answer

    def _taken_of(self, queue: Queue) -> Iterator[Entry]:
        """What consumers hold of a queue, and what open transactions have acknowledged or refused."""
        yield from queue.held()
        for session in self._sessions.values():
            for transaction in session.transactions.values():
                for entry in (*transaction.acknowledged, *transaction.refused):
                    if entry.lane.queue is queue:
                        yield entry

    def hold_scheduled(self) -> bool:
        """Nothing becomes due until a piece is done, or `release_scheduled`. Whether all is durable that was accepted
        before; if it is not, it is to be asked again with the next commit.
        """
        batch = self._scheduler.hold()
        self.ledger.is_awaited |= batch == self.ledger.batch.number
        return not batch

    def release_scheduled(self) -> None:
        """The piece is not done."""
        self._scheduler.release()

    @property
    def can_do_bulk(self) -> bool:
        """No page can show any more what was taken."""
        return self._bulk_in <= self.ledger.committed

    def do_bulk(self, asked: bulk.Wanted, read: bulk.BulkLook, page: PageRead) -> bulk.Done:
        """Move or remove messages of a page, all in one batch with what they become; or show or cancel what is
        scheduled.
        """
        read.end()
        lane = read.lane
        if isinstance(asked, bulk.OfScheduled):
            self._scheduler.release()
            showing = self._scheduler.look_at(asked, read, page)
            if showing.moved and isinstance(asked, bulk.Unschedule) and not asked.dry_run:
                self._bulk_in = self.ledger.batch.number
            return showing
        if self._queues.get(lane.queue.name) is not lane.queue:
            return bulk.nothing(asked, f"{lane.queue.name!r} has ended")
        here, answer = bulk.take(asked, read, page, self.ledger.committed, self.ledger.now_ms, self._has_ended)
        self._paging.unpin(lane)
        if answer.next is None:
            answer.left += bulk.left_with(self._taken_of(lane.queue), asked, read.until)
        if asked.dry_run or not here:
            return answer
        batch = self._bulk_in = self.ledger.batch.number
        self._paging.take_out(lane, [taken.entry for taken in here])
        for entry, arrival in here:
            if arrival is None:
                self._account.removed(entry)
                self._forget(entry)
                continue
            destination, message = arrival
            queue = self._needed_queue(destination)
            self._account.moved(entry, queue, self.ledger.next_sequence)
            self._forget(entry)
            self._accept(queue, message, batch)
        # It may have held back what stands behind it.
        self.ledger.touched[lane.queue] = None
        return answer

    def _has_ended(self, name: str) -> bool:
        """A durable subscription is no more: nobody can make its queue by sending to it."""
        return name.startswith(SUBSCRIPTION_PREFIX) and name not in self._queues

    # ---- Pausing ----

    def pause(self, name: str) -> bool:
        """Nothing is dispatched from a queue any more, which is made if it is not there; true if it was not. Durable
        with the next answer.

        Raises: RemoteProtocolError if there can be no such queue.
        """
        queue = self._queues.get(name)
        is_made = queue is None or queue.is_temporary
        if is_made:
            queue = self._queue(queue_called(name))
        assert queue is not None, "it belongs to no connection"
        self._set_paused(queue, is_paused=True)
        if queue.wildcards:
            # What is being committed in it holds back nobody in other queues any more.
            self.ledger.touched[queue] = None
        return is_made

    def resume(self, name: str) -> None:
        """Raises: RemoteProtocolError if there is no such queue."""
        queue = self._lasting_queue(name)
        self._set_paused(queue, is_paused=False)
        self.ledger.touched[queue] = None

    def _lasting_queue(self, name: str) -> Queue:
        queue = self._queues.get(name)
        if queue is None or queue.is_temporary:
            raise RemoteProtocolError(f"there is no queue {name!r}")
        return queue

    def _set_paused(self, queue: Queue, *, is_paused: bool) -> None:
        # Also if it is so already: an answer that it is must not come before that is durable.
        self._bulk_in = self.ledger.batch.number
        if queue.is_paused == is_paused:
            return
        queue.is_paused = is_paused
        if not queue.is_known_to_store:
            introduce(self.ledger.batch, queue)
        self.ledger.batch.paused[queue.number] = is_paused
        self.ledger.batch.size += PAUSE_BYTES
        if is_paused:
            self._account.paused(queue)
        else:
            self._account.resumed(queue)

    def expect_reply(self, destination: Destination) -> None:
        """Somebody asks, and is to be answered in this temporary queue, which is made if it is not there.

        Raises: RemoteProtocolError if there are too many
        """
        self._queue(destination)

    def reply(self, send: Send) -> None:
        """Answer a question once what it made the broker do is durable."""
        queue = self._queues.get(send.destination.name)
        if queue is not None:
            is_durable = self._bulk_in <= self.ledger.committed
            self._accept(queue, send.message, 0 if is_durable else self._bulk_in)

    # ---- Turns and batches ----

    def take_answers(self) -> list[tuple[Session, Answer]]:
        """What is to be said, without the rest of a turn."""
        return self.ledger.take_answers()

    def turn(self) -> Effects:
        """Dispatch wherever something changed; hand over what was to be said since the last turn."""
        self.ledger.request_some_sequences()
        # With nothing to do all of this must cost next to nothing: somebody sends one message after the other.
        if self._timers.in_memory:
            self._expiry.step()
        if self._scheduler.timers.in_memory:
            self._scheduler.step()
            self.ledger.is_awaited |= self._scheduler.awaits()
        deliveries: Deliveries = {}
        if self._wildcards.joining:
            self._join_some()
        if not self.ledger.is_stopped:
            for entry in self.delays.take_due():
                self._end_delay(entry)
        looks: list[Look] = []
        if (scanned := self._selections.step()) is not None:
            self.ledger.touched[scanned[0]] = None
            if scanned[1] is not None:
                looks.append(scanned[1])
        if self.ledger.touched:
            touched = self.ledger.take_touched()
            joined: list[Queue] = []
            now_us = self.ledger.now_us
            for queue in touched:
                queue.used_us = now_us
                if queue.wildcards:
                    joined.append(queue)
                    continue
                if queue.is_paused:
                    continue
                lane = self._dispatcher.dispatch(queue, deliveries)
                if lane is not None:
                    self._paging.ask(lane)
                if queue.selecting is not None:
                    self._selections.go_on(queue.selecting)
            if joined:
                self._dispatch_together(joined, deliveries)
        reads = [*self._paging.take_reads(), *looks]
        looks = self._endings.wanted()
        if self._expiry.is_wanted:
            looks += self._expiry.wanted()
        if self._scheduler.is_wanted:
            looks += self._scheduler.wanted()
        showings: list[Showing] = []
        if self._browsing.has_work:
            showings, pages = self._browsing.turn()
            looks += pages
        for look in looks:
            look.begin()
        reads += looks
        timer_reads = [read for read in (self._timers.wanted(), self._scheduler.timers.wanted()) if read is not None]
        for consumer in deliveries:
            consumer.session.served[consumer] = None
        return Effects(self.take_answers(), deliveries, reads, showings, timer_reads)

    def _dispatch_together(self, joined: list[Queue], deliveries: Deliveries) -> None:
        """Queues from which somebody takes who takes from others as well."""
        dispatch = JointDispatch(
            self.ledger,
            self._wildcards,
            self._dispatcher,
            self._paging,
            self._expire,
            deliveries=deliveries,
        )
        for lane in dispatch.run(joined):
            self._paging.ask(lane)
        for queue in dispatch.looked_at():
            if queue.selecting is not None:
                self._selections.go_on(queue.selecting)

    def page_read(self, read: Read, page: PageRead) -> None:
        """What a turn wanted to be read is there.

        Raises: StoreError if the store has lost something.
        """
        if self.ledger.is_stopped:
            return
        if isinstance(read, BrowseRead):
            read.end()
            queue = read.lane.queue
            if self._queues.get(queue.name) is not queue:
                # A durable subscription, which has ended with all that the page shows.
                page.found, page.is_end = [], True
            self._browsing.page_read(read, page)
            return
        if isinstance(read, EndingRead):
            read.end()
            self._endings.page_read(read, page)
            return
        if page.as_of > self.ledger.committed:
            # Its batch became durable a moment ago; all queues are to see that in one step.
            self._early_pages.append((read, page))
            return
        if isinstance(read, BlockLook):
            read.end()
            self._expiry.page_read(read, page)
            return
        if isinstance(read, DueLook):
            read.end()
            self._scheduler.page_read(read, page)
            return
        if isinstance(read, BodyRead):
            for entry in self._paging.body_read(read, page):
                self._dead_letter(entry, entry.message)
            self.ledger.touched[read.lane.queue] = None
            return
        if isinstance(read, ScanRead):
            failed = self._selections.page_read(read, page)
        else:
            failed = self._paging.page_read(read, page)
        for entry in self._paging.take_waiting():
            self._account.delayed(entry, is_holding=entry.sequence not in entry.lane.delayed)
        for entry in failed:
            self._paging.left_with_page(entry)
            self._dead_letter(entry, entry.message)
        self.ledger.touched[read.lane.queue] = None

    def timers_read(self, read: TimerRead, page: TimersRead) -> None:
        """The timers that a turn wanted are there."""
        self._timers.page_read(read, page)
        self._scheduler.timers.page_read(read, page)

    def relieve(self) -> dict[Session, str]:
        """Make messages leave memory where it is short; the batch may grow by what the store does not have yet.

        Not before what the last turn dispatched is written. Returns connections that must be ended, and why.
        """
        queues = self._paging.relieve(self._queues.values())
        return {self._sessions[queue.destination.session]: _why(queue) for queue in queues}

    def stalled(self, bytes_taken: Callable[[Session], int]) -> tuple[Session, str] | None:
        """To be called once a second or so: a connection that must be ended, and why. `bytes_taken` says how much its
        socket has ever taken.
        """
        needs_room = self.ledger.room is not _PLENTY or self.memory.excess > 0
        found = self._spilling.stalled(self._sessions, bytes_taken, needs_room=needs_room)
        if found is None:
            return None
        session, queue = found
        return session, (
            f"took and acknowledged nothing for {queue.policy.stalled_subscriber_ms / 1000:g} seconds, and others need "
            f"the room of what waits for its subscription to {queue.destination.topic}: read and acknowledge what "
            "comes, or unsubscribe; see stalled_subscriber_ms"
        )

    def stretch_windows(self) -> Iterator[None]:
        """To be done now and then, in steps: who waits for more than its window lets it have gets more."""
        for session in list(self._sessions.values()):
            for consumer in session.consumers.values():
                if consumer.stretch_window(self.ledger.now_ms):
                    self.ledger.touched[consumer.queue] = None
            yield

    def let_unused_go(self) -> None:
        """To be called once a second: queues go that nobody needs (unused.py)."""
        if not self.ledger.is_stopped:
            self._scheduler.let_go()
            self._paging.forget_taken_out()
            self._unused.look(self.ledger.now_us)

    def change_policies(self, policies: Policies) -> None:
        """Give every queue its policy anew, in one step.

        What waits and has failed too often by its new policy is given up. To be followed by a turn and by `relieve`.
        """
        self._policies = policies
        # A dead-letter queue may be made meanwhile.
        for queue in list(self._queues.values()):
            queue.policy = policies.of(queue.policy_name)
            queue.holds_dead_letters = policies.holds_dead_letters(queue.name) and not queue.is_temporary
            self._paging.policy_changed(queue)
            if not queue.keeps_failures:
                for lane in queue.lanes:
                    self._give_up(lane)
                # What stands behind a message that had to be read is next now.
                self.ledger.touched[queue] = None

    def _give_up(self, lane: Lane) -> None:
        """Dead-letter what is in memory and has failed too often."""
        failed = [entry for entry in lane if is_given_up(lane.queue, entry.attempts, entry.due_us)]
        if failed:
            failed.sort(key=attrgetter("sequence"))
            self._paging.take_out(lane, failed)
            for entry in failed:
                if entry.message is None:
                    # Its mark says that it has failed so often, unless it was stored only after that.
                    if not entry.marked:
                        mark(self.ledger.batch, entry, self.delays.due_ms(entry))
                    self._paging.doom(entry)
                else:
                    self._dead_letter(entry, entry.message)

    def take_batch(self) -> Batch | None:
        """The gathering batch, to be made durable; None if there is nothing to write and nobody waits."""
        self._producers.forget_old()
        if not self.has_batch:
            return None
        return self.ledger.hand_over()

    def committed(self, batch: Batch) -> None:
        """The batch is durable, and so are all before it."""
        ledger = self.ledger
        ledger.begin_committed(batch)
        self._paging.let_go()
        self._wildcards.committed()
        self._timers.committed()
        self._numbers.committed()
        if self._introduced:
            self._introduced = {queue: number for queue, number in self._introduced.items() if number > batch.number}
        self._expiry.committed()
        self._scheduler.committed()
        ledger.touch_waiting()
        if self._early_pages:
            pages, self._early_pages = self._early_pages, []
            for read, page in pages:
                self.page_read(read, page)
        ledger.end_committed()

    # ---- Inside ----

    def _with_room(self, session: Session, name: str, count: int) -> Transaction:
        """The open transaction, once it is sure that `count` messages more are not too many."""
        transaction = session.transaction(name)
        make_room(session.transactions, count=count)
        return transaction

    def _admit(self, session: Session, send: Send) -> None:
        """Raises: NoRoomError if the store has no room for what this connection sends."""
        session.has_sent = True
        if self.ledger.room is _PLENTY or send.destination.kind is Kind.TEMPORARY:
            return
        if self.ledger.room is Room.NONE or (session.only_sends and self._when_full is WhenFull.REFUSE):
            raise NoRoomError(f"{FULL}; try again when messages were consumed")

    def _count_taken(self, session: Session) -> None:
        """The connection's socket has nothing waiting any more."""
        memory = self.memory
        memory.unsent -= session.unsent_bytes
        session.unsent_bytes = 0
        if memory.unsent_max < UNSENT_BYTES_MAX and memory.unsent <= memory.unsent_mark:
            memory.unsent_max = UNSENT_BYTES_MAX
            for one in self._sessions.values():
                for consumer in one.consumers.values():
                    self.ledger.touched[consumer.queue] = None

    def _accept(self, queue: Queue, message: Message, batch: int, contents: Contents = NONE) -> None:
        """Give a new message its place. It is visible with `batch`, 0 is at once, whether itself stored or not. Of
        `contents` see `_share`.
        """
        ledger = self.ledger
        sequence = ledger.next_sequence
        ledger.next_sequence = sequence + 1
        if sequence >= ledger.sequence_limit:
            batch = max(batch, ledger.reserved_with(sequence))
        message.arrived_ms = ledger.now_ms
        is_stored = message.persistent and not queue.is_temporary
        entry = Entry(sequence, message, queue.lane_of(message), batch, is_stored, None)
        group = message.group
        if group:
            entry.group = group
            if queue.groups is None:
                self._selections.begin_groups(queue)
        if contents is not NONE:
            if is_stored:
                entry.content = contents.persistent
            elif entry.lane.horizon != WHOLE:
                entry.content = contents.transient
        if is_stored:
            put(ledger.batch, entry)
        self._paging.add(entry, message)
        if queue.selecting is not None:
            queue.selecting.arrived(entry)
        if message.expires_ms and not queue.is_temporary:
            self._expiry.accepted(entry.lane, sequence, message.expires_ms)
        account = self._account
        if account.accepting is queue and account.accepting_batch == batch and not group:
            account.entries.append(entry)
        else:
            account.accepted(entry)
        if batch:
            if queue.wildcards and batch > ledger.committed:
                self._wildcards.accepted(entry)
            if batch == ledger.batch.number:
                ledger.is_awaited = True
            if batch in ledger.waiting_queues:
                ledger.waiting_queues[batch][queue] = None
            else:
                ledger.waiting_queues[batch] = {queue: None}
        else:
            ledger.touched[queue] = None

    def _spread(self, send: Send) -> bool:
        """Give a message its places in all queues that its destination stands for, in one batch; each copy is visible
        as if it were the only one. True if any is stored.
        """
        message = send.message
        is_stored = False
        queues = self._queues_for(send)
        contents = self._share(message, queues)
        for queue in queues:
            batch = 0
            if message.persistent and not queue.is_temporary:
                is_stored = True
                if queue.policy.store_and_dispatch is not StoreAndDispatch.CONCURRENT:
                    batch = self.ledger.batch.number
            self._accept(queue, message, batch, contents)
        return is_stored

    def _share(self, message: Message, queues: list[Queue]) -> Contents:
        """What all these queues are to have is stored once, with the gathering batch, as far as it is stored; for
        `_accept`.
        """
        if len(queues) < 2:
            return NONE
        message.arrived_ms = self.ledger.now_ms
        return share_new(self.ledger.batch, message, queues, self.ledger.next_sequence)

    def _queues_for(self, send: Send, queue_of: Callable[[Destination], Queue | None] | None = None) -> list[Queue]:
        """Each once; none for those that went with their connections, or for a topic without subscriptions.

        Raises: RemoteProtocolError if they are too many, unless `queue_of` makes them
        """
        destination = send.destination
        queue_of = queue_of or self._queue
        if not destination.is_spread:
            queue = queue_of(destination)
            return [] if queue is None else [queue]
        return self._queues_of_parts(destination, send.message, queue_of)

    def _check_queues(self, send: Send) -> None:
        """What is sent in a transaction needs queues that need not be there before its COMMIT.

        Raises: RemoteProtocolError if there can be no such queue
        """
        for part in send.destination.parts or (send.destination,):
            if part.kind is not Kind.TOPIC and part.name not in self._queues:
                self._check_can_make(part)

    def _queues_of_parts(
        self, destination: Destination, message: Message, queue_of: Callable[[Destination], Queue | None]
    ) -> list[Queue]:
        """Where the copies of a message stand that is sent to a topic, or to several destinations."""
        queues: dict[Queue, None] = {}
        # A selector may ask for it.
        message.arrived_ms = self.ledger.now_ms
        for part in destination.parts or (destination,):
            if part.kind is Kind.TOPIC:
                queues.update(dict.fromkeys(self._topics.queues_of(part.name, message)))
            elif (queue := queue_of(part)) is not None:
                queues[queue] = None
        return list(queues)

    def scheduled(self, name: str) -> int:
        """Scheduled sends that wait for a queue; of the name "", those that wait for what is not one queue."""
        return self._scheduler.count(name)

    def scheduled_for(self) -> list[str]:
        """Names of queues for which something has been scheduled; "" is for what is not one queue."""
        return self._scheduler.names()

    def _schedule(self, destination: Destination, message: Message, schedule: Schedule) -> None:
        name = destination.name
        if destination.is_spread:
            name, schedule = "", replace(schedule, to=destination.address)
        self._scheduler.accept(name, message, schedule)
        self.ledger.is_awaited |= message.persistent

    def _send_scheduled(self, name: str, to: str, message: Message) -> None:
        """Accept what is due, in the queue of this name, or everywhere that the address `to` stands for now."""
        if to:
            queues = self._queues_of_parts(accepted_address(to), message, self._needed_queue)
        else:
            queues = [self._needed_queue(Destination(Kind.QUEUE, name))]
        contents = self._share(message, queues)
        for queue in queues:
            self._accept(queue, message, self.ledger.batch.number, contents)

    def _needed_queue(self, destination: Destination) -> Queue:
        """Made if it is not there, whether there is room or not: it was there once, or asked for (a move), or what
        failed must have a place to go.
        """
        return self._queues.get(destination.name) or self._make_queue(destination)

    def _needed_queue_for(self, destination: Destination) -> Queue | None:
        """The same of one that a client names; None if it went with its connection."""
        is_gone = destination.kind is Kind.TEMPORARY and destination.session not in self._sessions
        return None if is_gone else self._needed_queue(destination)

    def _fail(self, entry: Entry, reason: Reason, nack: Nack | None = None) -> None:
        """Give back a message that a consumer failed with, to be tried again as its queue's policy or the NACK says."""
        policy = entry.lane.queue.policy
        if nack is None:
            self._give_back(entry, reason, delay_ms=delay_of(policy, entry.attempts + 1, self._chance))
            return
        if nack.is_poison:
            entry.due_us = DUE_NEVER
        delay_ms = nack.delay_ms
        if delay_ms is None:
            delay_ms = delay_of(policy, entry.attempts + 1, self._chance)
        self._give_back(entry, reason, delay_ms=delay_ms)

    def _give_back(self, entry: Entry, reason: Reason, *, delay_ms: int = 0) -> None:
        """Put a message at its place again, once it is due, or into the dead-letter queue."""
        lane = entry.lane
        queue = lane.queue
        if self._queues.get(queue.name) is not queue:
            # A temporary queue that went with its connection.
            self._paging.went(entry)
            return
        has_failed = reason is not Reason.RELEASED
        if has_failed:
            entry.attempts += 1
        # Also without a failure: the policy may have changed while somebody held it.
        if is_given_up(queue, entry.attempts, entry.due_us):
            self._dead_letter(entry, entry.message)
            return
        is_away = False
        if has_failed:
            entry.due_us = 0
            is_away = delay_ms > 0 and self.delays.delay(entry, delay_ms)
            if entry.stored is not None:
                mark(self.ledger.batch, entry, self.delays.due_ms(entry))
        if entry.due_us:
            self._account.delayed(entry, reason, is_holding=not is_away)
        else:
            self._account.returned(entry, reason)
        if is_away:
            lane.delay(entry)
        else:
            lane.give_back(entry)
            if queue.selecting is not None:
                queue.selecting.came_back(entry)
        self._paging.came_back(entry)
        self.ledger.touched[queue] = None

    def _dead_letter(self, entry: Entry, message: Message | None, cause: str = "") -> None:
        """Move a message that is in no lane any more to where failed ones go; at once, if it is in memory."""
        if message is None:
            # Should the broker end before it is read, it is moved when it is read after that.
            mark(self.ledger.batch, entry, self.delays.due_ms(entry))
            self._paging.doom(entry)
            return
        origin = entry.lane.queue
        if not cause:
            cause = POISON if entry.due_us == DUE_NEVER else EXHAUSTED
        destination, letter = dead_letter(
            message, origin.name, origin.policy, attempts=entry.attempts, cause=cause, now_ms=self.ledger.now_ms
        )
        dead_letters = self._needed_queue(destination)
        self._account.dead_lettered(entry, dead_letters, self.ledger.next_sequence)
        self._forget(entry)
        self._accept(dead_letters, letter, self.ledger.batch.number)

    def _end_delay(self, entry: Entry) -> None:
        """A message is due; whatever has become of it meanwhile."""
        lane = entry.lane
        queue = lane.queue
        if lane.delayed.get(entry.sequence) is entry:
            lane.end_delay(entry.sequence)
            lane.give_back(entry)
            if queue.selecting is not None:
                queue.selecting.came_back(entry)
            self._account.due(entry)
        elif entry.message is not None or lane.bodiless.get(entry.sequence) is entry:
            # It held the others back, and has not left memory wholly meanwhile.
            self._account.due(entry)
        if self._queues.get(queue.name) is queue:
            self.ledger.touched[queue] = None

    def _release(self, consumer: Consumer, *, has_begun: bool) -> None:
        """End a consumer; `has_begun` charges an attempt to the first message it holds."""
        self._end_use(consumer)
        queues = consumer.all_queues()
        if isinstance(consumer, Wildcard):
            self._wildcards.left(consumer)
        for queue in queues:
            if isinstance(consumer, Wildcard):
                queue.leave_of_many(consumer)
            else:
                queue.leave(consumer)
            if consumer.is_exclusive:
                queue.choose_owner()
            # Nobody may come by again before it goes.
            queue.let_go_of_places()
            if consumer.scan_of(queue) is not None:
                self._selections.leave(consumer, queue)
            if queue.groups is not None:
                queue.groups.left(consumer)
        for entry in consumer.held.values():
            self._give_back(entry, Reason.LOST if has_begun else Reason.RELEASED)
            has_begun = False
        consumer.held.clear()
        consumer.session.served.pop(consumer, None)
        for queue in queues:
            self._account.unsubscribed(consumer, queue)
            # Of those of a wildcard most have nobody else to whom this makes a difference.
            if queue.consumers or queue.groups is not None or consumer.is_exclusive or not consumer.is_of_many:
                self.ledger.touched[queue] = None

    def _abort(self, session: Session, name: str) -> None:
        transaction = session.transactions.pop(name)
        self.memory.open -= transaction.size
        for entry in transaction.acknowledged + transaction.refused:
            self._fail(entry, Reason.ABORTED)
        if len(transaction) > len(transaction.sends):
            session.batch = self.ledger.latest_batch

    def _is_repeat(self, session: Session, producer: str, number: int) -> bool:
        known = self._producers.repeated(producer, number)
        if known is None:
            return False
        # The first may have made a queue that remembers, though nothing else of it is stored.
        session.batch = max(session.batch, known.batch, *self._introduced.values())
        return True

    def _acknowledged(self, entry: Entry) -> bool:
        """True if the store has to be told."""
        self._account.acknowledged(entry)
        return self._forget(entry)

    def _expire(self, entry: Entry) -> None:
        """The time of a message has come that stands in no lane any more."""
        queue = entry.lane.queue
        if is_given_up(queue, entry.attempts, entry.due_us):
            # It had failed already, and only had to be read.
            self._dead_letter(entry, entry.message)
            return
        if queue.policy.expired is Expired.DEAD_LETTER and not queue.keeps_failures:
            self._dead_letter(entry, entry.message, EXPIRED)
            return
        self._account.expired(entry)
        self._forget(entry)

    def _expire_and_touch(self, entry: Entry) -> None:
        self._expire(entry)
        # Whoever waited for it to be read or to be committed waits no longer.
        self.ledger.touched[entry.lane.queue] = None

    def _lane_of(self, key: bytes) -> Lane | None:
        number, rank = split_lane_key(key)
        queue = self._numbered.get(number)
        return queue.lane_if_there(rank) if queue is not None and rank in RANKS else None

    def _is_held(self, lane: Lane, first: int, until: int) -> bool:
        """Somebody has a message of a lane, with a sequence from the one on and before the other, that may have
        expired.
        """
        of_transactions = (
            entry
            for session in self._sessions.values()
            for transaction in session.transactions.values()
            for entry in chain(transaction.acknowledged, transaction.refused)
        )
        # Most consumers hold nothing so old.
        of_consumers = (
            entry
            for consumer in lane.queue.all_consumers()
            if consumer.held and min(consumer.held) < until
            for entry in consumer.held.values()
        )
        return any(
            entry.lane is lane
            and first <= entry.sequence < until
            and (entry.message is None or is_expired(entry.message, self.ledger.now_ms))
            for entry in chain(of_consumers, of_transactions)
        )

    def _forget(self, entry: Entry) -> bool:
        """A message is done with: acknowledged, expired or moved. True if the store has to be told."""
        self._paging.went(entry)
        if entry.lane.aside is not None:
            self._paging.forgot_stray(entry)
        if entry.stored is None:
            return False
        remove(self.ledger.batch, entry)
        # What is in a temporary queue nobody sees after any end of the broker.
        return entry.persistent or not entry.lane.queue.is_temporary

    def _queue(self, destination: Destination) -> Queue | None:
        """The queue a client names, made on first use; None if it went with its connection."""
        queue = self._queues.get(destination.name)
        if queue is not None:
            # Nothing is in it yet.
            queue.used_us = self.ledger.now_us
            return queue
        return self._make_queue(destination) if self._check_can_make(destination) else None

    def _check_can_make(self, destination: Destination) -> bool:
        """False if it went with its connection.

        Raises: RemoteProtocolError if there can be no such queue more
        """
        if destination.kind is Kind.TEMPORARY:
            owner = self._sessions.get(destination.session)
            if owner is None:
                return False
            if len(owner.temporary_queues) >= SUBSCRIPTIONS_MAX:
                raise RemoteProtocolError(f"more than {SUBSCRIPTIONS_MAX} temporary queues of one connection")
            if owner.may_be_answered_in(destination):
                return True
        self._check_room_for_queue()
        return True

    def _await_introduction(self, session: Session, destination: Destination) -> None:
        """A queue that remembers must not be forgotten once it is confirmed to whoever made it."""
        if self._introduced:
            for part in destination.parts or (destination,):
                queue = self._queues.get(part.name)
                if queue in self._introduced:
                    session.batch = max(session.batch, self._introduced[queue])

    def _check_room_for_queue(self) -> None:
        """Raises: RemoteProtocolError if there is none, and no other queue can go"""
        if not self.memory.has_room_for_queue:
            self._unused.make_room(self.ledger.now_us)
            if not self.memory.has_room_for_queue:
                raise no_room(len(self._queues), self.memory)

    def _is_needed(self, queue: Queue) -> bool:
        """By what it does not know of itself."""
        return bool(
            self._scheduler.count(queue.name)
            or any(queue in waiting for waiting in self.ledger.waiting_queues.values())
            or any(browser.queue is queue for browser in self._browsing.browsers)
            or (queue.has_lost_bodies and self._has_anybody_any(queue))
        )

    def _has_anybody_any(self, queue: Queue) -> bool:
        """Somebody holds a message of a queue, or an open transaction has one."""
        queue.has_lost_bodies = next(self._taken_of(queue), None) is not None
        return queue.has_lost_bodies

    def _let_go(self, queue: Queue) -> None:
        """Nobody needs a queue any more."""
        del self._queues[queue.name], self._numbered[queue.number]
        self.ledger.touched.pop(queue, None)
        self._wildcards.gone(queue)
        self._selections.drop(queue)
        self._numbers.give_back(queue)
        queue.let_go()

    def _make_queue(self, destination: Destination) -> Queue:
        number = 0
        if destination.kind is Kind.QUEUE:
            # The store never hears of the others.
            number = self._numbers.new()
        queue = self._new_queue(destination, number)
        if destination.kind is Kind.TEMPORARY:
            self._sessions[destination.session].temporary_queues.append(queue)
        self._queues[destination.name] = queue
        self._topics.add(queue)
        if number:
            self._numbered[number] = queue
            if remembers(queue):
                introduce(self.ledger.batch, queue)
                self._introduced[queue] = self.ledger.batch.number
        self._account.named(queue)
        self._wildcards.made(queue)
        return queue

    def _new_queue(self, destination: Destination, number: int) -> Queue:
        name = destination.name
        is_lasting = destination.kind is Kind.QUEUE
        holds_dead_letters = is_lasting and self._policies.holds_dead_letters(name)
        policy = self._policies.of(destination.topic or name)
        return Queue(
            destination,
            number,
            policy,
            self.memory,
            holds_dead_letters=holds_dead_letters,
            used_us=self.ledger.now_us,
        )

    def _drop(self, queue: Queue) -> None:
        """A temporary queue goes with its messages."""
        del self._queues[queue.name]
        if queue.destination.topic:
            self._topics.remove(queue)
        self._selections.drop(queue)
        self.ledger.touched.pop(queue, None)
        for lane in queue.lanes:
            self._paging.forget(lane)
        if not self._spilling.end(queue):
            queue.let_go()

    def _write_down(self, entry: Entry) -> None:
        """Store a waiting transient, and of any message how often it was dispatched."""
        if entry.stored is None:
            put(self.ledger.batch, entry)
        if entry.deliveries or entry.attempts:
            mark(self.ledger.batch, entry, self.delays.due_ms(entry))


def _why(queue: Queue) -> str:
    """The connection that owns a temporary queue must be ended."""
    if queue.is_reply_queue:
        return "does not read what waits in its temporary queues"
    return (
        f"its subscription to {queue.destination.topic} holds {queue.resident + queue.spilled} bytes, and memory_limit "
        f"of that topic's policy is {queue.policy.memory_limit}: read faster, or have that raised"
    )
