"""Engine: the pure core of the broker, put together from its parts.

Commands go in, effects come out; there is no clock, socket, disk or task here. The broker passes the time (`tick`), and
carries out the effects that a turn returns. The broker makes batches durable one after the other, and reports each
(`on_committed`). The engine is single-threaded, and never blocks.

    command -> accept / acknowledge / requeue -> the gathering batch          engine.commands
    turn    -> dispatch in every queue that changed -> deliveries, answers    engine.turn

    take_batch()          returns the gathering batch; the next one starts
    on_committed(batch)   makes the batch's messages visible; the next turn sends its answers      engine.store_results
    on_page_read(...)     applies a page that a turn requested from the store; on_timers_read: a page of timers
    evict()               removes messages from memory where memory is short

Parts are made in groups. Each group needs only the groups above it:

    state       time, gathering batch, memory budget, clients, numbers, producers    writing/engine_state.py
    memory      delayed and evicted messages, timers, pages                          memory/parts.py
    queues      queues, with selections, wildcard consumers and topics               queues/queues.py
    life        arrival, settlement and pull requests                                lifecycle/parts.py
    tasks       expiry, scheduled sends, retries, browsing, bulk work                background/tasks.py
    commands    commands of clients and of the broker                                commands/commands.py

docs/architecture.md says in which part a new feature belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from truenext.engine.background.tasks import BackgroundTasks
from truenext.engine.commands.commands import Commands
from truenext.engine.dispatch.plain import Dispatcher
from truenext.engine.lifecycle.parts import LifecycleParts
from truenext.engine.lifespan import EngineLifespan
from truenext.engine.memory.eviction import owner_close_reason
from truenext.engine.memory.parts import MemoryParts
from truenext.engine.queues.queues import Queues
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.queue import Entry, Queue
from truenext.engine.state.transaction import TransactionLimits
from truenext.engine.turn import StoreResults, Turn, TurnDispatch
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.engine_state import EngineState
from truenext.engine.writing.event_log import NoEventLog
from truenext.model.batch import Batch
from truenext.model.policy import Policies, WhenFull


class Engine:
    def __init__(
        self,
        commit_state: CommitState | None = None,
        *,
        memory: MemoryBudget | None = None,
        policies: Policies | None = None,
        when_full: WhenFull = WhenFull.SLOW,
        transaction_limits: TransactionLimits | None = None,
        random: Callable[[], float] = lambda: 0.5,
    ) -> None:
        """`random` returns random numbers from 0 to 1, for the jitter of delays."""
        self.state = state = EngineState(commit_state or CommitState(NoEventLog()), memory or MemoryBudget())
        self._memory = parts = MemoryParts(state)
        self.queues = queues = Queues(state, parts, policies or Policies())
        life = LifecycleParts(state.commit_state, parts, queues, random)
        self.tasks = tasks = BackgroundTasks(state, parts, queues, life)
        limits = transaction_limits or TransactionLimits()
        self.commands = Commands(state, parts.resident, queues, life, tasks, when_full, limits)

        selections, page_reader = queues.selections, parts.page_reader
        dispatcher = Dispatcher(state, selections, parts.resident, page_reader, life.settlement)
        dispatch = TurnDispatch(state, selections, queues.wildcards, page_reader, dispatcher, life.pull_requests)
        self.turn = Turn(state, dispatch, tasks, page_reader, selections, life.settlement, life.pull_requests)
        self.store_results = StoreResults(state, parts, queues, tasks, life.settlement)
        self.lifespan = EngineLifespan(state, parts.delays, parts.resident, queues, tasks.scheduler)

    @property
    def has_work(self) -> bool:
        """Whether a turn has work to do."""
        return self.turn.has_work or self._memory.eviction.is_unfinished

    # ---- Batches ----

    def take_batch(self, *, even_if_empty: bool = False) -> Batch | None:
        """Close and return the gathering batch, to be made durable. Returns None if it is empty and nothing waits for
        it, unless `even_if_empty`."""
        self.state.producers.forget_old()
        commit_state = self.state.commit_state
        return commit_state.close_batch() if even_if_empty or commit_state.has_batch else None

    # ---- Messages in no lane, and in no holder ----

    def delayed_entries(self) -> Iterator[Entry]:
        """Return an iterator of the messages whose delays have not ended now, and some that were settled or removed
        during their delay, in no particular order."""
        return self._memory.delays.entries()

    def is_given_up(self, entry: Entry) -> bool:
        """Return whether a message was given up, and is not dead-lettered yet."""
        resident = self._memory.resident
        return entry in resident.given_up or entry in resident.unread_given_up

    def given_up_count(self, queue: Queue) -> int:
        """Return how many messages of a queue were given up, and are not dead-lettered yet."""
        resident = self._memory.resident
        if not (resident.given_up or resident.unread_given_up):
            return 0
        waiting = resident.given_up, resident.unread_given_up
        return sum(len(each.of_lane(lane)) for lane in queue.lanes for each in waiting)

    # ---- Periodic work ----

    def evict(self) -> dict[ConnectionState, str]:
        """Evict messages where memory is short. Messages that the store lacks are added to the gathering batch.

        Call it only after the last turn's deliveries were written to the connections. Returns the connections that must
        be closed, each with the reason.
        """
        if self.turn.dispatch.is_searching:
            return {}
        queues = self._memory.eviction.enforce_memory_limits(self.queues.by_name.values())
        return {self.state.clients.sessions[queue.destination.session]: owner_close_reason(queue) for queue in queues}

    def find_stalled_connection(
        self, bytes_sent: Callable[[ConnectionState], int]
    ) -> tuple[ConnectionState, str] | None:
        """Return a connection that must be closed, with the reason: disk space or memory is short, and the connection
        does not take its messages. None if there is none.

        Called about once a second. `bytes_sent` returns how many bytes a connection's socket has taken so far.
        """
        state = self.state
        needs_space = state.commit_state.is_disk_short or state.memory.bytes_over_limit > 0
        return self._memory.spilling.find_stalled_connection(
            state.clients.sessions, bytes_sent, needs_space=needs_space
        )

    def stretch_windows(self) -> Generator[None, None, None]:
        """Enlarge automatic windows that were full for long while nothing was settled; one connection in each step."""
        for session in list(self.state.clients.sessions.values()):
            self.commands.connecting.stretch_windows(session)
            yield

    def remove_unused_queues(self) -> None:
        """Remove unused queues. Drop the notes of removed messages whose removal is durable. Called once a second."""
        if not self.state.commit_state.is_stopped:
            self.tasks.scheduler.remove_empty_queues()
            self._memory.resident.forget_durable_removals()
            self.queues.remove_some_unused()
