"""The pure core of the broker: the rooms of the engine, built and put together.

Commands go in, effects come out; there is no clock, socket, disk or task here. The caller says what time it is
(`tick`), makes the batches durable one after the other and reports it (`on_committed`), and carries out what `turn`
returns. Everything is single-threaded and nothing blocks.

    command -> accept / acknowledge / give back -> the gathering batch
    turn    -> dispatch in every queue that changed -> deliveries, answers

    take_batch()         hands the gathering batch over; the next one starts
    committed(batch)     what waited for it becomes visible, its answers leave
    page_read(...)       what a turn wanted to be read from the store is there
    timers_read(...)     the same for timers
    evict()              messages leave memory where it is short

What happens is decided in the rooms; where a feature goes: docs/architecture.md
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
        """`sequence_limit` and `redelivered_below` are the store's: no sequence from the one on was ever given out, and
        what is below the other may have been dispatched without a trace. Of the limits of memory see Memory. `random`
        gives random numbers from 0 to 1, for the jitter of delays.
        """
        # What there is.
        state = EngineState(MemoryBudget(memory_limit, queues_memory_limit))
        self.memory = memory = state.memory
        self.clients = clients = state.clients
        # What is written down.
        self.commit_state = commit_state = CommitState(event_log or NoEventLog(), sequence_limit=sequence_limit)
        numbers = QueueNumberAllocator(commit_state)
        self._producers = producers = ProducerRegistry(commit_state)
        # What is in memory.
        delays = DelayedEntries(commit_state)
        expiry_timers = Timers(commit_state, end=SCHEDULED_TIMERS)
        self._resident_set = resident = ResidentSet(commit_state, memory)
        page_reader = PageReader(memory, resident, delays, redelivered_below=redelivered_below)
        self._spilling = spilling = SpilledSubscriptions(commit_state, numbers)
        self._eviction = Eviction(commit_state, state, resident, spilling)
        # What somebody wants of a queue, and which queues there are.
        self.selections = selections = Selections(commit_state, state, delays, resident, page_reader)
        self.wildcards = wildcards = Wildcards(commit_state, state, selections)
        subscription_cleanup = SubscriptionCleanup(commit_state, numbers, spilling)
        self._queues = queues = Queues(
            commit_state, state, resident, numbers, selections, wildcards, subscription_cleanup, policies or Policies()
        )
        # What becomes of a message.
        arrivals = Arrivals(commit_state, resident, selections, wildcards, queues, expiry_timers)
        settlement = Settlement(commit_state, delays, resident, queues, arrivals, random)
        # What goes on beside commands.
        expiry = ExpiryTask(commit_state, expiry_timers, clients, resident, page_reader, queues, settlement)
        self._scheduler = scheduler = Scheduler(commit_state, resident, queues, arrivals)
        browsing = BrowseTask(commit_state, state, queues, redelivered_below=redelivered_below)
        self.bulk_pieces = bulk = BulkPieceExecutor(
            commit_state, clients, resident, queues, arrivals, settlement, scheduler
        )
        self.bulk_task = bulk_task = BulkTask(commit_state, clients, bulk)
        pull_requests = PullRequests(commit_state.events)
        # What each command does.
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
        # One pass, what the store says, and a whole run.
        dispatcher = Dispatcher(commit_state, state, selections, resident, page_reader, settlement)
        timers = (expiry_timers, scheduler.timers)
        self._turn = Turn(
            commit_state,
            TurnDispatch(commit_state, clients, selections, wildcards, page_reader, dispatcher, pull_requests),
            page_reader,
            pull_requests,
            browsing,
            bulk_task,
            timers=timers,
            tasks_before_dispatch=(
                expiry,
                scheduler,
                wildcards,
                RetryTask(commit_state, delays, settlement),
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

        # The rooms' own functions, so that it costs nothing to come by here.
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

    # ---- What the shell asks ----

    @property
    def has_work(self) -> bool:
        """A turn would do something."""
        return self._turn.has_work

    @property
    def next_due_ms(self) -> int | None:
        """When a turn is needed though nothing else happens: see Turn."""
        return self._turn.next_due_ms

    def queues(self) -> Iterable[Queue]:
        return self._queues.by_name.values()

    def scheduled_count(self, name: str) -> int:
        """Scheduled sends that wait for a queue; of the name "", those that wait for what is not one queue."""
        return self._queues.scheduled_count(name)

    def scheduled_queue_names(self) -> list[str]:
        """Names of queues for which something has been scheduled; "" is for what is not one queue."""
        return list(self._queues.hidden_by_name)

    # ---- Batches ----

    def take_batch(self) -> Batch | None:
        """The gathering batch, to be made durable; None if there is nothing to write and nobody waits."""
        self._producers.forget_old()
        return self.commit_state.close_batch() if self.commit_state.has_batch else None

    # ---- Now and then ----

    def evict(self) -> dict[ConnectionState, str]:
        """Make messages leave memory where it is short; the batch may grow by what the store does not have yet.

        Not before what the last turn dispatched is written. Returns connections that must be ended, and why.
        """
        queues = self._eviction.enforce_memory_limits(self._queues.by_name.values())
        return {self.clients.sessions[queue.destination.session]: owner_close_reason(queue) for queue in queues}

    def find_stalled_connection(
        self, bytes_sent: Callable[[ConnectionState], int]
    ) -> tuple[ConnectionState, str] | None:
        """To be called once a second or so: a connection that must be ended, and why. `bytes_sent` says how much its
        socket has ever taken.
        """
        needs_space = self.commit_state.disk_level is not DiskLevel.PLENTY or self.memory.bytes_over_limit > 0
        return self._spilling.find_stalled_connection(self.clients.sessions, bytes_sent, needs_space=needs_space)

    def stretch_windows(self) -> Generator[None, None, None]:
        """To be done now and then, in steps: who waits for more than its window lets it have gets more."""
        for session in list(self.clients.sessions.values()):
            self._connecting.stretch_windows(session)
            yield

    def remove_unused_queues(self) -> None:
        """To be called once a second: queues go that nobody needs."""
        if not self.commit_state.is_stopped:
            self._scheduler.remove_empty_queues()
            self._resident_set.forget_durable_removals()
            self._queues.remove_some_unused()
