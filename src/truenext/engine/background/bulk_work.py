"""How work on many messages is done that somebody has asked for: piece by piece, each once the one before is durable.

    asked for      `Pieces.ask`           whatever is wrong with it is said at once
    its turn       `Bulk.read_for`        the page that it needs
    it is there    `Bulk.do`              messages move or go, all in one batch; the answer

What a piece is, and which messages it takes: bulk.py
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from truenext.disk_level import DISK_FULL, DiskLevel
from truenext.engine.background import bulk
from truenext.engine.writing.background_task import BackgroundTask
from truenext.errors import Code, NoSpaceError, RemoteProtocolError
from truenext.limits import PIECES_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from truenext.commands import ControlRequest
    from truenext.engine.background.scheduled import Scheduler
    from truenext.engine.lifecycle.arrivals import Arrivals
    from truenext.engine.lifecycle.outcomes import Outcomes
    from truenext.engine.memory.resident_set import ResidentSet
    from truenext.engine.queues.queues import Queues
    from truenext.engine.state.clients import Clients
    from truenext.engine.state.consumer import ConnectionState
    from truenext.engine.state.pages import PageRead
    from truenext.engine.state.queue import Queue
    from truenext.engine.writing.event_log import EventLog
    from truenext.engine.writing.ledger import Ledger


class Bulk:
    """One piece: what it needs, and how it is done."""

    def __init__(
        self,
        ledger: Ledger,
        events: EventLog,
        clients: Clients,
        resident: ResidentSet,
        queues: Queues,
        arrivals: Arrivals,
        outcomes: Outcomes,
        scheduler: Scheduler,
    ) -> None:
        self._ledger = ledger
        self._events = events
        self._clients = clients
        self._resident = resident
        self._queues = queues
        self._arrivals = arrivals
        self._outcomes = outcomes
        self._scheduler = scheduler

    def check(self, asked: bulk.Wanted) -> None:
        """Whether messages can be moved or removed. Of work that has begun, and whose queue is no more, the answer says
        what is so.

        Raises: RemoteProtocolError if there is no such queue or too many, NoSpaceError
        """
        is_gone = asked.until is not None and asked.queue not in self._queues.by_name
        if not (isinstance(asked, bulk.OfScheduled) and asked.queue == "") and not is_gone:
            self._queue_of(asked)

    def _has_gone_since(self, asked: bulk.Wanted) -> bool:
        """There was a piece before, and nothing is left since: the queue has gone (unused.py)."""
        name = asked.queue
        return asked.until is not None and name not in self._queues.by_name and not self._queues.has_ended(name)

    def _queue_of(self, asked: bulk.Wanted) -> Queue:
        """The queue that they are in, or for which they are scheduled."""
        queue = self._queues.lasting(asked.queue)
        queue.used_us = self._ledger.now_us
        if isinstance(asked, bulk.Purge | bulk.OfScheduled):
            return queue
        if isinstance(asked, bulk.Redrive) and not queue.holds_dead_letters:
            raise RemoteProtocolError(
                f"{asked.queue!r} is no dead-letter queue: nothing in it can be moved back", Code.DESTINATION
            )
        if isinstance(asked, bulk.Move) and asked.to not in self._queues.by_name:
            self._queues.check_room()
        if self._ledger.disk_level is DiskLevel.NONE:
            raise NoSpaceError(f"{DISK_FULL}: what is moved is written once more")
        return queue

    @property
    def can_do(self) -> bool:
        """No page can show any more what was taken."""
        return self._ledger.administered_in <= self._ledger.committed

    def read_for(self, asked: bulk.Wanted) -> bulk.BulkLook | None:
        """What has to be read for a piece, which `do` takes; None if nothing is left to do.

        Not before the last piece is durable (`can_do`), and one at a time; of what is scheduled while it is held
        (`hold_scheduled`).

        Raises: as `check`
        """
        if isinstance(asked, bulk.OfScheduled):
            look = self._scheduler.read_for(asked)
            if look is None:
                self._scheduler.end_hold()
        elif self._has_gone_since(asked):
            return None
        else:
            look = bulk.read_for(asked, self._queue_of(asked), self._ledger.last_sequence)
            if look is not None:
                self._resident.pin(look.lane)
        if look is not None:
            look.start()
        return look

    def nothing(self, asked: bulk.Wanted) -> bulk.Done:
        """The answer where `read_for` says that there is nothing to do."""
        answer = bulk.nothing(asked)
        queue = self._queues.by_name.get(asked.queue)
        if queue is not None and not isinstance(asked, bulk.OfScheduled):
            until = self._ledger.last_sequence if asked.until is None else asked.until
            answer.left = bulk.left_with(self._clients.taken_of(queue), asked, until)
        return answer

    def hold_scheduled(self) -> bool:
        """Nothing becomes due until a piece is done, or `end_hold_scheduled`. Whether all is durable that was accepted
        before; if it is not, it is to be asked again with the next commit.
        """
        batch = self._scheduler.hold()
        self._ledger.is_awaited |= batch == self._ledger.batch.number
        return not batch

    def end_hold_scheduled(self) -> None:
        """The piece is not done."""
        self._scheduler.end_hold()

    def do(self, asked: bulk.Wanted, read: bulk.BulkLook, page: PageRead) -> bulk.Done:
        """Move or remove messages of a page, all in one batch with what they become; or show or cancel what is
        scheduled.
        """
        read.end()
        ledger = self._ledger
        lane = read.lane
        if isinstance(asked, bulk.OfScheduled):
            self._scheduler.end_hold()
            showing = self._scheduler.look_at(asked, read, page)
            if showing.moved and isinstance(asked, bulk.Unschedule) and not asked.dry_run:
                ledger.administered_in = ledger.batch.number
            return showing
        if not self._queues.is_there(lane.queue):
            return bulk.nothing(asked, f"{lane.queue.name!r} has ended")
        here, answer = bulk.take(asked, read, page, ledger.committed, ledger.now_ms, self._queues.has_ended)
        self._resident.unpin(lane)
        if answer.next is None:
            answer.left += bulk.left_with(self._clients.taken_of(lane.queue), asked, read.until)
        if asked.dry_run or not here:
            return answer
        batch = ledger.administered_in = ledger.batch.number
        self._resident.remove_from_lane(lane, [taken.entry for taken in here])
        for entry, arrival in here:
            if arrival is None:
                self._events.removed(entry)
                self._outcomes.complete(entry)
                continue
            destination, message = arrival
            queue = self._queues.needed(destination)
            self._events.moved(entry, queue, ledger.next_sequence)
            self._outcomes.complete(entry)
            self._arrivals.accept(queue, message, batch)
        # It may have held back what stands behind it.
        ledger.touched[lane.queue] = None
        return answer


class Piece(NamedTuple):
    session: ConnectionState
    """Who has asked."""
    question: ControlRequest
    asked: bulk.Wanted


class FinishedPiece(NamedTuple):
    piece: Piece
    answer: bulk.Done


class Pieces(BackgroundTask):
    """One after the other, in the order in which they were asked for."""

    def __init__(self, ledger: Ledger, clients: Clients, bulk_: Bulk) -> None:
        self._ledger = ledger
        self._clients = clients
        self._bulk = bulk_
        self._pieces: deque[Piece] = deque()
        """The first is under way if `_look` is there."""
        self._look: bulk.BulkLook | None = None
        self._finished: list[FinishedPiece] = []

    def ask(self, session: ConnectionState, question: ControlRequest) -> None:
        """Raises: RemoteProtocolError if it cannot be done, or too many answers are waited for; NoSpaceError"""
        asked = bulk.wanted(question.verb, question.body)
        self._bulk.check(asked)
        if self.owed(session) >= PIECES_MAX:
            raise RemoteProtocolError(
                f"{question.verb}: this connection waits for {PIECES_MAX} answers already, the most it may",
                Code.LIMIT,
            )
        self._pieces.append(Piece(session, question, asked))
        self._ledger.busy[self] = None

    def owed(self, session: ConnectionState) -> int:
        """How many answers a connection waits for."""
        return sum(piece.session is session for piece in self._pieces)

    def drop(self) -> None:
        """Nothing more is done: the broker ends."""
        self._pieces.clear()
        self._look = None

    def take_finished(self) -> list[FinishedPiece]:
        """What was done since the last call, and is to be answered."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def has_any(self) -> bool:
        return bool(self._pieces)

    def is_due(self) -> bool:
        return bool(self._pieces) and self._look is None and self._bulk.can_do

    def step(self) -> Sequence[bulk.BulkLook]:
        while self.is_due():
            piece = self._pieces[0]
            if piece.session.id not in self._clients.sessions:
                self._pieces.popleft()
                self._bulk.end_hold_scheduled()
                continue
            if isinstance(piece.asked, bulk.OfScheduled) and not self._bulk.hold_scheduled():
                break
            try:
                look = self._bulk.read_for(piece.asked)
            except NoSpaceError:
                # There was when it was asked for, and others may make some.
                self._pieces.rotate(-1)
                if isinstance(self._pieces[0].asked, bulk.Move | bulk.Redrive):
                    break
                continue
            except RemoteProtocolError as error:
                # When it was asked for this could be done: a durable subscription was still there.
                self._finish(bulk.nothing(piece.asked, str(error)))
                continue
            if look is not None:
                look.receiver = self
                self._look = look
                return (look,)
            self._finish(self._bulk.nothing(piece.asked))
        return ()

    def page_read(self, look: bulk.BulkLook, page: PageRead) -> None:
        if look is self._look:
            self._look = None
            self._finish(self._bulk.do(self._pieces[0].asked, look, page))

    def _finish(self, answer: bulk.Done) -> None:
        self._finished.append(FinishedPiece(self._pieces.popleft(), answer))
