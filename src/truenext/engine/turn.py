"""Turn: one pass of the engine; and the results of the store.

Turn            does a step of each background task, then dispatch; returns the effects for the broker to carry out
TurnDispatch    dispatches in each queue that has changed (dispatch/)
StoreResults    applies pages that were read; makes messages of durable batches visible
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from truenext.engine.background.browsing import BrowseSlice
from truenext.engine.background.bulk_work import FinishedPiece
from truenext.engine.background.tasks import BackgroundTasks
from truenext.engine.dispatch.heads import COMMITTING, DELAYED, Wait
from truenext.engine.dispatch.plain import Deliveries, Dispatcher
from truenext.engine.dispatch.wildcard import WildcardDispatch
from truenext.engine.lifecycle.pull_requests import EndedPullRequest, PullRequests
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.memory.parts import MemoryParts
from truenext.engine.memory.reading import PageReader
from truenext.engine.memory.timers import TimerRead, TimersResult
from truenext.engine.queues.queues import Queues
from truenext.engine.queues.wildcards import Wildcards
from truenext.engine.selecting.selections import Selections
from truenext.engine.state.clients import ClientRegistry
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.pages import PageResult, StoreRead
from truenext.engine.state.queue import Queue
from truenext.engine.state.wildcard import Wildcard
from truenext.engine.writing.engine_state import EngineState
from truenext.model.answers import Answer
from truenext.model.batch import Batch
from truenext.model.limits import DISPATCHES_PER_TURN

SEARCHES_MIN = 1000
"""Maximum number of searches of one turn. A search finds the next message of one changed queue for one of its wildcard
consumers. Each turn that leaves some queues unsearched multiplies the maximum by SEARCHES_GROWTH."""
SEARCHES_GROWTH = 1.125


class Effects(NamedTuple):
    """Effects of one turn. The broker carries them out, answers first."""

    answers: list[tuple[ConnectionState, Answer]]
    deliveries: Deliveries
    """Entries dispatched to each consumer, in order of dispatch."""
    reads: list[StoreRead]
    """Pages to be read from the store. The broker passes each result to `StoreResults.on_page_read`."""
    browse_slices: list[BrowseSlice]
    """Messages to be sent to browsers, each slice to one browser."""
    timer_reads: list[TimerRead]
    """Pages of timers to be read. The broker passes each result to `StoreResults.on_timers_read`."""
    finished_pieces: list[FinishedPiece]
    """Finished pieces of bulk work, to be answered."""
    ended_pull_requests: list[EndedPullRequest]
    """Pull requests that have ended. Each client is notified after the deliveries of this turn."""


class TurnDispatch:
    """Dispatches messages in every queue that has changed."""

    def __init__(
        self,
        state: EngineState,
        selections: Selections,
        wildcards: Wildcards,
        page_reader: PageReader,
        dispatcher: Dispatcher,
        pull_requests: PullRequests,
    ) -> None:
        self._commit_state = state.commit_state
        self._clients = state.clients
        self._selections = selections
        self._wildcards = wildcards
        self._page_reader = page_reader
        self._dispatcher = dispatcher
        self._pull_requests = pull_requests
        self._no_wait_pull_ender = NoWaitPullEnder(state.clients, dispatcher, pull_requests)
        self._searches_factor = 1.0
        """Factor by which the next turn multiplies SEARCHES_MIN. Above 1 while turns leave queues unsearched."""

    @property
    def is_searching(self) -> bool:
        """Whether a search of queues with wildcard consumers continues in the next turn. Until the search has ended,
        messages that were read for wildcard consumers must stay in memory."""
        # Without touched wildcard consumers, all consumers of the search have ended meanwhile.
        return self._searches_factor > 1 and bool(self._commit_state.touched_wildcards)

    def run(self, deliveries: Deliveries) -> None:
        """Dispatch in the queues that have changed, up to the limit of one turn. Adds dispatched messages to
        `deliveries`."""
        commit_state = self._commit_state
        touched, commit_state.touched_queues = commit_state.touched_queues, {}
        wildcards, commit_state.touched_wildcards = commit_state.touched_wildcards, {}
        shared: dict[Queue, bool | None] = {}
        postponed: dict[Queue, bool | None] = {}
        now_us = commit_state.now_us
        dispatcher = self._dispatcher
        dispatcher.start_turn(len(touched))
        for queue, is_searched in touched.items():
            if queue.has_wildcards:
                queue.last_used_us = now_us
                shared[queue] = is_searched
                continue
            if dispatcher.budget <= 0:
                postponed[queue] = None
                continue
            queue.last_used_us = now_us
            if queue.is_paused:
                continue
            lane = dispatcher.dispatch(queue, deliveries)
            if lane is not None:
                self._page_reader.request_page(lane)
            if queue.observer is not None:
                self._selections.activate_queue(queue)
        wildcard_dispatch = self._dispatch_wildcards(shared, wildcards, deliveries) if shared or wildcards else None
        if postponed:
            # Before those that this turn had to leave unfinished, lest one queue keep all others waiting.
            commit_state.touched_queues = postponed | commit_state.touched_queues
            touched = {queue: None for queue in touched if queue not in postponed}
        if self._pull_requests.open_consumers:
            self._pull_requests.deduct_dispatched(deliveries)
        if self._pull_requests.no_wait_by_queue:
            self._no_wait_pull_ender.end_unsatisfied(touched, wildcard_dispatch)

    def _dispatch_wildcards(
        self, shared: dict[Queue, bool | None], wildcards: dict[Wildcard, None], deliveries: Deliveries
    ) -> WildcardDispatch | None:
        """Dispatch in queues that have wildcard consumers. If the queues that have changed need more searches than one
        turn does, search some and dispatch nothing."""
        dispatcher = self._dispatcher
        dispatcher.budget = max(dispatcher.budget, DISPATCHES_PER_TURN // 2)
        dispatch = WildcardDispatch(
            self._commit_state,
            self._clients,
            self._selections,
            self._wildcards,
            dispatcher,
            deliveries,
        )
        search_count = int(SEARCHES_MIN * self._searches_factor)
        receivers_of = self._clients.receivers_of
        if sum(len(receivers_of(queue).wildcards) for queue in shared if not shared[queue]) > search_count:
            self._search_some(dispatch, shared, wildcards, search_count)
            return None
        self._searches_factor = 1.0
        for lane in dispatch.run(shared, wildcards):
            self._page_reader.request_page(lane)
        for queue in dispatch.queried_queues():
            self._selections.activate_queue(queue)
        return dispatch

    def _search_some(
        self,
        dispatch: WildcardDispatch,
        shared: dict[Queue, bool | None],
        wildcards: dict[Wildcard, None],
        search_count: int,
    ) -> None:
        """Search some of the changed queues. Later turns search the other queues, and then dispatch: the true next of a
        wildcard consumer is known only when all its queues were searched."""
        receivers_of = self._clients.receivers_of
        commit_state = self._commit_state
        commit_state.touched_wildcards |= wildcards
        searched: list[Queue] = []
        for queue, is_searched in shared.items():
            if not is_searched and search_count > 0:
                search_count -= len(receivers_of(queue).wildcards)
                commit_state.touched_wildcards.update(dict.fromkeys(receivers_of(queue).wildcards))
                searched.append(queue)
        dispatch.update(searched)
        for queue in dispatch.queried_queues():
            self._selections.activate_queue(queue)
        # These queues were searched, and only lack dispatch. A queue that changes meanwhile is searched again.
        shared.update((queue, True) for queue in searched)
        commit_state.touched_queues = shared | commit_state.touched_queues
        # Else clients that keep changing as many queues could delay the dispatch for ever.
        self._searches_factor *= SEARCHES_GROWTH


class Turn:
    def __init__(
        self,
        state: EngineState,
        dispatch: TurnDispatch,
        tasks: BackgroundTasks,
        page_reader: PageReader,
        selections: Selections,
        settlement: Settlement,
        pull_requests: PullRequests,
    ) -> None:
        self._commit_state = state.commit_state
        self._clients = state.clients
        self.dispatch = dispatch
        self._tasks = tasks
        self._page_reader = page_reader
        self._selections = selections
        self._settlement = settlement
        self._pull_requests = pull_requests
        self._is_stopping = False

    @property
    def has_work(self) -> bool:
        commit_state = self._commit_state
        if self._is_stopping:
            return commit_state.has_answers
        if commit_state.touched_queues or commit_state.touched_wildcards or commit_state.has_answers:
            return True
        return self._tasks.can_step

    def stop(self) -> None:
        """Drop bulk work, and let turns only answer from now on. Else dispatch and tasks would add to the last batch
        for as long as messages wait or scheduled sends repeat."""
        self._is_stopping = True
        self._tasks.bulk.drop()

    def run(self) -> Effects:
        """Do a step of each task, dispatch in all queues that have changed, and return all effects since the last
        turn."""
        commit_state, tasks = self._commit_state, self._tasks
        if self._is_stopping:
            return Effects(commit_state.take_answers(), {}, [], [], [], tasks.bulk.take_finished_pieces(), [])
        self._selections.begin_pass()
        self._settlement.begin_turn()
        commit_state.request_sequences_if_low()
        # Without work this must cost next to nothing: a client may send one message after the other.
        work_reads = tasks.step_before_dispatch() if commit_state.active_work else []
        deliveries: Deliveries = {}
        if self._clients.full_sessions:
            for session in self._clients.take_freed_sessions():
                for consumer in session.consumers.values():
                    commit_state.touch(consumer)
        # Messages that are due and are not in their lanes again may be the true next ones.
        is_waiting = bool(commit_state.active_work) and tasks.retries.can_step()
        if (commit_state.touched_queues or commit_state.touched_wildcards) and not is_waiting:
            self.dispatch.run(deliveries)
        reads = self._page_reader.take_reads()
        reads += work_reads
        if commit_state.active_work:
            reads += tasks.step_after_dispatch()
        for read in reads:
            read.start()
        timer_reads = [page for timers in tasks.timers if (page := timers.next_read()) is not None]
        count_dispatched = self._clients.count_dispatched
        for consumer, entries in deliveries.items():
            session = consumer.session
            session.served_consumers[consumer] = None
            if count_dispatched(session, len(entries) * consumer.held_weight):
                # In its other queues these may have been the last consumers with credit: see `PullRequests.withdraw`.
                for each in session.consumers.values():
                    commit_state.touch(each)
        return Effects(
            commit_state.take_answers(),
            deliveries,
            reads,
            tasks.browsing.take_slices(),
            timer_reads,
            tasks.bulk.take_finished_pieces(),
            self._pull_requests.take_ended() if self._pull_requests.ended else [],
        )


class StoreResults:
    """Applies pages that the store has read, and batches that it has made durable."""

    def __init__(
        self,
        state: EngineState,
        memory: MemoryParts,
        queues: Queues,
        tasks: BackgroundTasks,
        settlement: Settlement,
    ) -> None:
        self._commit_state = state.commit_state
        self._events = state.commit_state.events
        self._queues = queues
        self._resident = memory.resident
        self._page_reader = memory.page_reader
        self._settlement = settlement
        self._timers = tasks.timers
        self._on_committed = (
            memory.resident.free_durable_entries,
            queues.wildcards.on_committed,
            memory.expiry_timers.on_committed,
            state.numbers.on_committed,
            queues.on_committed,
            tasks.expiry.on_committed,
            tasks.scheduler.on_committed,
        )
        """Functions called for each durable batch, in this order."""
        self._uncommitted_pages: list[tuple[StoreRead, PageResult]] = []
        """Pages, each with its request, that include a batch not reported as durable yet."""

    def on_page_read(self, read: StoreRead, page: PageResult) -> None:
        """Apply a page that a turn has requested.

        Raises: StoreError if the store lacks messages that it should have.
        """
        commit_state = self._commit_state
        if commit_state.is_stopped:
            return
        if read.waits_for_commit and page.as_of > commit_state.last_committed:
            # Its batch became durable a moment ago; all queues must see that in one step.
            self._uncommitted_pages.append((read, page))
            return
        queue = read.lane.queue
        is_for_consumers = read.is_for_consumers and self._queues.exists(queue)
        if (
            is_for_consumers
            and not queue.has_groups
            and any(found.message is not None and found.message.group for found in page.messages)
        ):
            self._queues.selections.start_groups(queue)
        read.on_page(page)
        read.finish()
        self._resident.on_page_applied(read.lane)
        if is_for_consumers:
            for entry in self._page_reader.take_delayed():
                self._events.delayed(entry, is_blocking=entry.sequence not in entry.lane.delayed)
            for entry in self._page_reader.take_exhausted():
                self._settlement.dead_letter(entry)
            commit_state.touched_queues[queue] = None

    def on_timers_read(self, read: TimerRead, page: TimersResult) -> None:
        """Apply a page of timers that a turn has requested."""
        for timers in self._timers:
            timers.on_page_read(read, page)

    def on_committed(self, batch: Batch) -> None:
        """Make the messages of a durable batch visible, and its answers ready to be sent. All batches before it are
        durable already."""
        commit_state = self._commit_state
        commit_state.set_committed(batch)
        for callback in self._on_committed:
            callback()
        commit_state.touch_waiting_queues()
        if self._uncommitted_pages:
            pages, self._uncommitted_pages = self._uncommitted_pages, []
            for read, page in pages:
                self.on_page_read(read, page)
        commit_state.queue_waiting_answers()


# ---- End of a pull request that does not wait: when no message is ready for the subscription ----
# It is checked right after dispatch, so ready messages were dispatched. If something must be read or compared first, or
# the connection has no credit, the request stays. It is checked again when anything happens in its queue, as when a
# page was read or messages were compared. Source: docs/contract.md, "Pull"


class NoWaitPullEnder:
    def __init__(self, clients: ClientRegistry, dispatcher: Dispatcher, pull_requests: PullRequests) -> None:
        self._clients = clients
        self._dispatcher = dispatcher
        self._pull_requests = pull_requests

    def end_unsatisfied(self, touched: Iterable[Queue], wildcard_dispatch: WildcardDispatch | None) -> None:
        """End each pull request that does not wait and for which no message is ready.

        `touched` are the queues that have changed. `wildcard_dispatch` is this turn's dispatch for wildcard consumers,
        None if there was none.
        """
        pull_requests = self._pull_requests
        for queue in touched:
            for consumer in list(pull_requests.no_wait_by_queue.get(queue, ())):
                if self._has_nothing_ready_for(consumer, queue):
                    pull_requests.end_with_notice(consumer)
        if wildcard_dispatch is not None:
            for wildcard in wildcard_dispatch.queried_wildcards():
                if wildcard in pull_requests.no_wait_by_queue and wildcard_dispatch.has_nothing_ready_for(wildcard):
                    pull_requests.end_with_notice(wildcard)

    def _has_nothing_ready_for(self, consumer: BrokerConsumer, queue: Queue) -> bool:
        if queue.is_paused or self._clients.receivers_of(queue).exclusive not in (None, consumer):
            return True
        queue_dispatch = self._dispatcher.new_queue_dispatch(queue)
        for lane in queue.lanes:
            head = queue_dispatch.lane_head_for(consumer, lane.rank)
            if head is None or (isinstance(head, Wait) and head.reason is COMMITTING):
                continue
            return isinstance(head, Wait) and head.reason is DELAYED
        return True
