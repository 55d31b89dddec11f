"""What happens in one pass: work goes on, messages are dispatched, and the shell hears what it is to do.

work that goes on beside commands     a piece of each (work.py)
queues in which something happened    who gets what (dispatch/)
pages that somebody waits for         asked for; `page_read` hands them to whom they are for
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from truenext.engine.dispatch.wildcard import WildcardDispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from truenext.answers import Answer
    from truenext.batch import Batch
    from truenext.engine.background.browsing import BrowseSlice, Browsing
    from truenext.engine.background.bulk_work import FinishedPiece, Pieces
    from truenext.engine.dispatch.nothing_ready import NothingReady
    from truenext.engine.dispatch.plain import Deliveries, Dispatcher
    from truenext.engine.lifecycle.outcomes import Outcomes
    from truenext.engine.lifecycle.pull_requests import EndedPullRequest, PullRequests
    from truenext.engine.memory.reading import Reading
    from truenext.engine.memory.resident_set import ResidentSet
    from truenext.engine.memory.timers import TimerRead, Timers, TimersRead
    from truenext.engine.queues.queues import Queues
    from truenext.engine.queues.wildcards import Wildcards
    from truenext.engine.selecting.selections import Selections
    from truenext.engine.state.clients import Clients
    from truenext.engine.state.consumer import ConnectionState
    from truenext.engine.state.pages import Found, PageRead, Read
    from truenext.engine.state.queue import Queue
    from truenext.engine.state.wildcard import Wildcard
    from truenext.engine.writing.background_task import BackgroundTask
    from truenext.engine.writing.event_log import EventLog
    from truenext.engine.writing.ledger import Ledger


class Effects(NamedTuple):
    """What one turn asks the shell to do, answers first."""

    answers: list[tuple[ConnectionState, Answer]]
    deliveries: Deliveries
    """Per consumer, in order of dispatch."""
    reads: list[Read]
    """What is to be read from the store; `page_read` takes it."""
    browse_slices: list[BrowseSlice]
    """What browsers are shown."""
    timer_reads: list[TimerRead]
    """Pages of timers that are to be read; `timers_read` takes them."""
    finished: list[FinishedPiece]
    """Pieces of bulk work that are done, and are to be answered."""
    ended_pull_requests: list[EndedPullRequest]
    """What pulling clients are told behind what was dispatched."""


class Turn:
    def __init__(
        self,
        ledger: Ledger,
        events: EventLog,
        clients: Clients,
        queues: Queues,
        resident: ResidentSet,
        reading: Reading,
        selections: Selections,
        wildcards: Wildcards,
        outcomes: Outcomes,
        dispatcher: Dispatcher,
        pull_requests: PullRequests,
        nothing_ready: NothingReady,
        browsing: Browsing,
        pieces: Pieces,
        *,
        timers: Sequence[Timers],
        before: Sequence[BackgroundTask],
        after: Sequence[BackgroundTask],
        committed: Sequence[Callable[[], object]],
    ) -> None:
        """Work goes on in this order, `before` dispatch or `after` it. `committed` is told of each durable batch."""
        self._ledger = ledger
        self._events = events
        self._clients = clients
        self._queues = queues
        self._resident = resident
        self._reading = reading
        self._selections = selections
        self._wildcards = wildcards
        self._outcomes = outcomes
        self._dispatcher = dispatcher
        self._pull_requests = pull_requests
        self._nothing_ready = nothing_ready
        self._browsing = browsing
        self._pieces = pieces
        self._timers = timers
        self._before = [(work.source, work) for work in before]
        self._after = [(work.source, work) for work in after]
        self._tell_committed = committed
        self._early_pages: list[tuple[Read, PageRead]] = []
        """Pages, with what was asked for, that show a batch of which the store has not said yet that it is durable."""

    # ---- Whether there is anything to do ----

    @property
    def has_work(self) -> bool:
        """A turn would do something."""
        ledger = self._ledger
        if ledger.touched or ledger.touched_wildcards or ledger.has_answers:
            return True
        if not ledger.busy or ledger.is_stopped:
            return False
        return any(source in ledger.busy and work.is_due() for source, work in (*self._before, *self._after))

    @property
    def next_due_ms(self) -> int | None:
        """When a turn is needed though nothing else happens, in milliseconds since the epoch; None if never, or if that
        is known only when something else has happened.
        """
        busy = self._ledger.busy
        if not busy:
            return None
        times = [work.next_due_ms() for source, work in (*self._before, *self._after) if source in busy]
        return min((due_ms for due_ms in times if due_ms is not None), default=None)

    # ---- One pass ----

    def take(self) -> Effects:
        """Go on with all work, and dispatch wherever something changed; hand over what was to be said since the last
        turn."""
        ledger = self._ledger
        ledger.request_some_sequences()
        # With nothing to do all of this must cost next to nothing: somebody sends one message after the other.
        looks = self._go_on(self._before) if ledger.busy else []
        deliveries: Deliveries = {}
        if ledger.touched or ledger.touched_wildcards:
            self._dispatch(deliveries)
        reads = self._reading.take_reads()
        reads += looks
        if ledger.busy:
            reads += self._go_on(self._after)
        for read in reads:
            read.start()
        timer_reads = [wanted for timers in self._timers if (wanted := timers.wanted()) is not None]
        for consumer in deliveries:
            consumer.session.served[consumer] = None
        return Effects(
            ledger.take_answers(),
            deliveries,
            reads,
            self._browsing.take_slices(),
            timer_reads,
            self._pieces.take_finished(),
            self._pull_requests.take_ended() if self._pull_requests.ended else [],
        )

    def _go_on(self, works: list[tuple[object, BackgroundTask]]) -> list[Read]:
        """Returns the pages that are wanted."""
        ledger = self._ledger
        wanted: list[Read] = []
        for source, work in works:
            if source not in ledger.busy or ledger.is_stopped:
                continue
            if work.is_due():
                wanted += work.step()
            if not work.has_any:
                ledger.busy.pop(source, None)
        return wanted

    def _dispatch(self, deliveries: Deliveries) -> None:
        ledger = self._ledger
        touched, ledger.touched = ledger.touched, {}
        wildcards, ledger.touched_wildcards = ledger.touched_wildcards, {}
        joint: list[Queue] = []
        now_us = ledger.now_us
        for queue in touched:
            queue.used_us = now_us
            if queue.has_wildcards:
                joint.append(queue)
                continue
            if queue.is_paused:
                continue
            lane = self._dispatcher.dispatch(queue, deliveries)
            if lane is not None:
                self._reading.ask(lane)
            if queue.watcher is not None:
                self._selections.go_on_in(queue)
        together = self._dispatch_together(joint, wildcards, deliveries) if joint or wildcards else None
        if self._pull_requests.open:
            self._pull_requests.spend(deliveries)
        if self._pull_requests.no_wait:
            self._nothing_ready.look(touched, together)

    def _dispatch_together(
        self, joint: list[Queue], wildcards: dict[Wildcard, None], deliveries: Deliveries
    ) -> WildcardDispatch:
        """Queues from which somebody takes who takes from others as well."""
        dispatch = WildcardDispatch(
            self._ledger,
            self._events,
            self._clients,
            self._selections,
            self._wildcards,
            self._dispatcher,
            deliveries,
        )
        for lane in dispatch.run(joint, wildcards):
            self._reading.ask(lane)
        for queue in dispatch.looked_at():
            self._selections.go_on_in(queue)
        return dispatch

    # ---- What was read, and what is durable ----

    def page_read(self, read: Read, page: PageRead) -> None:
        """What a turn wanted to be read is there.

        Raises: StoreError if the store has lost something.
        """
        ledger = self._ledger
        if ledger.is_stopped:
            return
        if read.waits_for_commit and page.as_of > ledger.committed:
            # Its batch became durable a moment ago; all queues are to see that in one step.
            self._early_pages.append((read, page))
            return
        queue = read.lane.queue
        is_for_consumers = read.is_for_consumers and self._queues.is_there(queue)
        if is_for_consumers and not queue.has_groups and any(map(_is_of_group, page.found)):
            self._selections.start_groups(queue)
        read.on_page(page)
        read.end()
        self._resident.page_was_taken_in(read.lane)
        if is_for_consumers:
            for entry in self._reading.take_waiting():
                self._events.delayed(entry, is_holding=entry.sequence not in entry.lane.delayed)
            for entry in self._reading.take_failed():
                self._outcomes.dead_letter(entry)
            ledger.touched[queue] = None

    def timers_read(self, read: TimerRead, page: TimersRead) -> None:
        """The timers that a turn wanted are there."""
        for timers in self._timers:
            timers.page_read(read, page)

    def committed(self, batch: Batch) -> None:
        """The batch is durable, and so are all before it."""
        ledger = self._ledger
        ledger.start_committed(batch)
        for tell in self._tell_committed:
            tell()
        ledger.touch_waiting()
        if self._early_pages:
            pages, self._early_pages = self._early_pages, []
            for read, page in pages:
                self.page_read(read, page)
        ledger.end_committed()


def _is_of_group(found: Found) -> bool:
    return found.message is not None and found.message.group != ""
