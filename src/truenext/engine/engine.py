"""Engine: the pure core of the broker, put together from its parts.

Commands go in, effects come out; there is no clock, socket, disk or task here. The caller passes the time (`tick`),
makes the batches durable one after the other and reports that (`on_committed`), and carries out what `turn` returns.
Everything is single-threaded and nothing blocks.

    command -> accept / acknowledge / requeue -> the gathering batch
    turn    -> dispatch in every queue that changed -> deliveries, answers

    take_batch()          hands the gathering batch over; the next one starts
    on_committed(batch)   what waited for the batch becomes visible, its answers leave
    on_page_read(...)     a page that a turn requested from the store is there
    on_timers_read(...)   the same for timers
    evict()               messages leave memory where it is short

The parts decide what happens; where a feature goes: docs/architecture.md
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from sys import maxsize

from truenext.engine.background.browsing import BrowseTask
from truenext.engine.background.bulk_work import BulkPieceExecutor, BulkTask
from truenext.engine.background.expiry import ExpiryTask
from truenext.engine.background.retries import RetryTask
from truenext.engine.background.scheduled import Scheduler
from truenext.engine.commands.acknowledging import Acknowledging
from truenext.engine.commands.administering import Administering
from truenext.engine.commands.connecting import Connecting
from truenext.engine.commands.pulling import Pulling
from truenext.engine.commands.releasing import Releasing
from truenext.engine.commands.sending import Sending
from truenext.engine.commands.subscribing import Subscribing
from truenext.engine.commands.transactions import Transactions
from truenext.engine.dispatch.plain import Dispatcher
from truenext.engine.lifecycle.arrivals import Arrivals
from truenext.engine.lifecycle.pull_requests import PullRequests
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.lifespan import EngineLifespan
from truenext.engine.memory.delays import DelayedEntries
from truenext.engine.memory.eviction import Eviction, owner_close_reason
from truenext.engine.memory.reading import PageReader
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.memory.spilled_subscriptions import SpilledSubscriptions
from truenext.engine.memory.timers import Timers
from truenext.engine.queues.queues import Queues
from truenext.engine.queues.subscription_cleanup import SubscriptionCleanup
from truenext.engine.queues.wildcards import Wildcards
from truenext.engine.selecting.selections import Selections
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.engine_state import EngineState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.queue import Queue
from truenext.engine.state.transaction import TransactionLimits
from truenext.engine.turn import StoreResults, Turn, TurnDispatch
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import EventLog, NoEventLog
from truenext.engine.writing.numbers import QueueNumberAllocator
from truenext.engine.writing.producers import ProducerRegistry
from truenext.model.batch import Batch
from truenext.model.disk_level import DiskLevel
from truenext.model.policy import Policies, WhenFull
from truenext.model.record import SCHEDULED_TIMERS


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
        transaction_limits: TransactionLimits | None = None,
        event_log: EventLog | None = None,
        random: Callable[[], float] = lambda: 0.5,
    ) -> None:
        """`sequence_limit` and `redelivered_below` are the store's: no sequence from the first on was ever allocated,
        and messages below the second may have been dispatched without a record of it. Limits of memory: see
        MemoryBudget. `random` returns random numbers from 0 to 1, for the jitter of delays."""
        # State.
        state = EngineState(MemoryBudget(memory_limit, queues_memory_limit))
        self.memory = memory = state.memory
        self.clients = clients = state.clients
        # Writing.
        self.commit_state = commit_state = CommitState(event_log or NoEventLog(), sequence_limit=sequence_limit)
        numbers = QueueNumberAllocator(commit_state)
        self._producers = producers = ProducerRegistry(commit_state)
        # Memory.
        delays = DelayedEntries(commit_state)
        expiry_timers = Timers(commit_state, end=SCHEDULED_TIMERS)
        self._resident_set = resident = ResidentSet(commit_state, memory)
        page_reader = PageReader(memory, resident, delays, redelivered_below=redelivered_below)
        self._spilling = spilling = SpilledSubscriptions(commit_state, numbers)
        self._eviction = Eviction(commit_state, state, resident, spilling)
        # Selectors, groups and queues.
        self.selections = selections = Selections(commit_state, state, delays, resident, page_reader)
        self.wildcards = wildcards = Wildcards(commit_state, state, selections)
        subscription_cleanup = SubscriptionCleanup(commit_state, numbers, spilling)
        self._queues = queues = Queues(
            commit_state, state, resident, numbers, selections, wildcards, subscription_cleanup, policies or Policies()
        )
        # Life of a message.
        arrivals = Arrivals(commit_state, resident, selections, wildcards, queues, expiry_timers)
        settlement = Settlement(commit_state, delays, resident, queues, arrivals, random)
        # Background tasks.
        expiry = ExpiryTask(commit_state, expiry_timers, clients, resident, page_reader, queues, settlement)
        self._scheduler = scheduler = Scheduler(commit_state, resident, queues, arrivals)
        browsing = BrowseTask(commit_state, state, queues, redelivered_below=redelivered_below)
        self.bulk_pieces = bulk = BulkPieceExecutor(
            commit_state, clients, resident, queues, arrivals, settlement, scheduler
        )
        self.bulk_task = bulk_task = BulkTask(commit_state, clients, bulk)
        pull_requests = PullRequests(commit_state.events)
        # Commands.
        limits = transaction_limits or TransactionLimits()
        sending = Sending(commit_state, memory, queues, arrivals, scheduler, producers, when_full, limits)
        acknowledging = Acknowledging(commit_state, state, settlement, limits)
        transactions = Transactions(commit_state, memory, queues, arrivals, settlement, producers, sending, limits)
        subscribing = Subscribing(
            commit_state, state, selections, queues, wildcards, settlement, pull_requests, browsing
        )
        releasing = Releasing(commit_state, selections, settlement, transactions, pull_requests)
        pulling = Pulling(commit_state, pull_requests, releasing)
        self._connecting = connecting = Connecting(
            commit_state, state, queues, settlement, acknowledging, transactions, subscribing, releasing
        )
        administering = Administering(commit_state, resident, queues, arrivals, settlement)
        # Turns, results of the store, start and stop.
        dispatcher = Dispatcher(commit_state, state, selections, resident, page_reader, settlement)
        timers = (expiry_timers, scheduler.timers)
        retries = RetryTask(commit_state, delays, settlement)
        self._turn_dispatch = TurnDispatch(
            commit_state, clients, selections, wildcards, page_reader, dispatcher, pull_requests
        )
        self._turn = Turn(
            commit_state,
            self._turn_dispatch,
            page_reader,
            selections,
            pull_requests,
            clients,
            retries,
            browsing,
            bulk_task,
            timers=timers,
            tasks_before_dispatch=(
                expiry,
                scheduler,
                wildcards,
                retries,
                selections,
                subscription_cleanup,
            ),
        )
        results = StoreResults(
            commit_state,
            queues,
            selections,
            resident,
            page_reader,
            settlement,
            timers=timers,
            on_committed=(
                resident.free_durable_entries,
                wildcards.on_committed,
                expiry_timers.on_committed,
                numbers.on_committed,
                queues.on_committed,
                expiry.on_committed,
                scheduler.on_committed,
            ),
        )
        run = EngineLifespan(
            commit_state,
            delays,
            resident,
            queues,
            scheduler,
            producers,
            connecting,
            redelivered_below=redelivered_below,
        )

        # The parts' own methods: a call through the engine costs nothing extra.
        self.restore_queue = run.restore_queue
        self.restore_lane = run.restore_lane
        self.restore_pause = run.restore_pause
        self.restore_producers = producers.restore
        self.take_forgotten_producers = producers.take_forgotten
        self.query_producer = producers.query
        self.forget_producers = producers.forget
        self.start = run.start
        self.stop = run.stop
        self.final_batches = run.final_batches
        self.tick = commit_state.tick

        self.connect = connecting.connect
        self.log_in = connecting.log_in
        self.is_connected = connecting.is_connected
        self.park = connecting.park
        self.disconnect = connecting.disconnect
        self.on_all_sent = connecting.on_all_sent
        self.acknowledge_sent = acknowledging.acknowledge_first
        self.hold_partially_sent = connecting.hold_partially_sent
        self.resolve_partially_sent = connecting.resolve_partially_sent
        self.answer = commit_state.answer

        self.send = sending.send
        self.find_queues_ahead = sending.find_queues_ahead
        self.waits_while_disk_short = sending.waits_while_disk_short
        self.contents_to_count = sending.contents_to_count
        self.count_contents = sending.count_contents
        self.waits_with_send = sending.waits_with_send
        self.acknowledge = acknowledging.acknowledge
        self.nack = acknowledging.nack
        self.mark_started = acknowledging.mark_started
        self.begin = transactions.begin
        self.commit = transactions.commit
        self.abort = transactions.abort
        self.mark_rollback_only = transactions.mark_rollback_only
        self.check_release = releasing.check_request
        self.release = releasing.release
        self.wake = releasing.wake
        self.pull = pulling.pull
        self.subscribe = subscribing.subscribe
        self.take_discarded_subscription = subscribing.take_discarded_subscription
        self.browse = subscribing.browse
        self.unsubscribe = subscribing.unsubscribe
        self.durable_subscribers = subscribing.durable_subscribers
        self.require_durable = queues.require_durable
        self.has_temporary = queues.has_temporary
        self.has_topic_subscription = queues.has_topic_subscription

        self.pause = administering.pause
        self.resume = administering.resume
        self.change_policies = administering.change_policies
        self.expect_reply = administering.expect_reply
        self.reply = administering.reply

        self.turn = self._turn.run
        self.take_answers = commit_state.take_answers
        self.on_page_read = results.on_page_read
        self.on_timers_read = results.on_timers_read
        self.on_committed = results.on_committed

    # ---- Queries of the shell ----

    @property
    def routing_may_take_long(self) -> bool:
        """Finding the queues of a send to a topic may take longer than a step may."""
        return self._queues.routing_may_take_long

    @property
    def has_work(self) -> bool:
        """A turn has work to do."""
        return self._turn.has_work or self._eviction.is_unfinished

    @property
    def next_due_ms(self) -> int | None:
        """Time of the next turn that is needed even if nothing else happens: see Turn."""
        return self._turn.next_due_ms

    def queues(self) -> Iterable[Queue]:
        return self._queues.by_name.values()

    def scheduled_count(self, name: str) -> int:
        """Number of scheduled sends for a queue; for the name "", of those that are not for one queue."""
        return self._queues.scheduled_count(name)

    def scheduled_queue_names(self) -> list[str]:
        """Return the names of queues for which messages were scheduled; "" for those that are not for one queue."""
        return list(self._queues.hidden_by_name)

    # ---- Batches ----

    def take_batch(self) -> Batch | None:
        """Close and return the gathering batch, to be made durable; None if it is empty and nothing waits for it."""
        self._producers.forget_old()
        return self.commit_state.close_batch() if self.commit_state.has_batch else None

    # ---- Periodic work ----

    def evict(self) -> dict[ConnectionState, str]:
        """Evict messages where memory is short; those that the store does not have yet join the gathering batch.

        Not allowed before the last turn's deliveries are written. Returns connections that must be closed, and why.
        """
        if self._turn_dispatch.is_searching:
            return {}
        queues = self._eviction.enforce_memory_limits(self._queues.by_name.values())
        return {self.clients.sessions[queue.destination.session]: owner_close_reason(queue) for queue in queues}

    def find_stalled_connection(
        self, bytes_sent: Callable[[ConnectionState], int]
    ) -> tuple[ConnectionState, str] | None:
        """Return a connection that must be closed, and why; called about once a second. `bytes_sent` returns the bytes
        that its socket has ever taken."""
        needs_space = self.commit_state.disk_level is not DiskLevel.PLENTY or self.memory.bytes_over_limit > 0
        return self._spilling.find_stalled_connection(self.clients.sessions, bytes_sent, needs_space=needs_space)

    def stretch_windows(self) -> Generator[None, None, None]:
        """Enlarge automatic windows whose consumers wait for more; called once in a while, in steps."""
        for session in list(self.clients.sessions.values()):
            self._connecting.stretch_windows(session)
            yield

    def remove_unused_queues(self) -> None:
        """Remove queues that are not needed; called once a second."""
        if not self.commit_state.is_stopped:
            self._scheduler.remove_empty_queues()
            self._resident_set.forget_durable_removals()
            self._queues.remove_some_unused()
