"""Execution of bulk requests, piece by piece. A piece begins once the piece before is durable.

    piece is requested    `BulkTask.add`                 refuses invalid requests
    piece is the next     `BulkPieceExecutor.next_read`  returns the read of the page that the piece needs
    page was read         `BulkPieceExecutor.execute`    moves or removes messages in one batch; returns the result

bulk.py defines the requests, and plans which messages a piece moves or removes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from truenext.engine.background import bulk
from truenext.engine.background.scheduled import Scheduler
from truenext.engine.lifecycle.arrivals import Arrivals
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.queues.queues import Queues
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.pages import PageResult
from truenext.engine.state.queue import Queue
from truenext.engine.writing.commit_state import BackgroundTask
from truenext.engine.writing.engine_state import EngineState
from truenext.errors import Code, NoSpaceError, RemoteProtocolError
from truenext.model.commands import ControlRequest
from truenext.model.disk_level import DISK_FULL, DiskLevel
from truenext.model.limits import PIECES_MAX


class BulkPieceExecutor:
    """Executor of single pieces of bulk work. `BulkTask` passes it one piece after the other."""

    def __init__(
        self,
        state: EngineState,
        resident: ResidentSet,
        queues: Queues,
        arrivals: Arrivals,
        settlement: Settlement,
        scheduler: Scheduler,
    ) -> None:
        self._commit_state = state.commit_state
        self._events = state.commit_state.events
        self._clients = state.clients
        self._resident = resident
        self._queues = queues
        self._arrivals = arrivals
        self._settlement = settlement
        self._scheduler = scheduler

    def check_request(self, request: bulk.BulkRequest) -> None:
        """Check that messages can be moved or removed. Nothing is checked if the queue was removed after an earlier
        piece of the same work: the result of the piece will say that nothing is left.

        Raises: RemoteProtocolError if there is no such queue, the queue has no dead letters to re-drive, or there is no
        memory for the target queue. NoSpaceError if the disk has no space for moved messages.
        """
        was_removed = request.until is not None and request.queue not in self._queues.by_name
        if not (isinstance(request, bulk.ScheduledRequest) and request.queue == "") and not was_removed:
            self._require_queue(request)

    def _was_removed_since(self, request: bulk.BulkRequest) -> bool:
        """Return whether the queue was removed as unused after an earlier piece, so that nothing is left to do."""
        name = request.queue
        return (
            request.until is not None
            and name not in self._queues.by_name
            and not self._queues.has_subscription_ended(name)
        )

    def _require_queue(self, request: bulk.BulkRequest) -> Queue:
        """Return the queue that has the messages, or for which messages are scheduled.

        Raises: RemoteProtocolError if there is no such queue, the queue has no dead letters to re-drive, or there is no
        memory for the target queue. NoSpaceError if the disk has no space for moved messages.
        """
        queue = self._queues.require_permanent(request.queue)
        queue.last_used_us = self._commit_state.now_us
        if isinstance(request, bulk.Purge | bulk.ScheduledRequest):
            return queue
        if isinstance(request, bulk.Redrive) and not queue.holds_dead_letters:
            raise RemoteProtocolError(
                f"{request.queue!r} is not a dead-letter queue: its messages cannot be moved back", Code.DESTINATION
            )
        if isinstance(request, bulk.Move) and request.to not in self._queues.by_name:
            self._queues.check_queue_memory()
        if self._commit_state.disk_level >= DiskLevel.NONE:
            raise NoSpaceError(f"{DISK_FULL}: moving writes messages again; free space first")
        return queue

    @property
    def can_execute(self) -> bool:
        """Whether the last piece is durable. Before that, pages still contain the messages that this piece has
        removed."""
        return self._commit_state.last_control_batch <= self._commit_state.last_committed

    def next_read(self, request: bulk.BulkRequest) -> bulk.BulkRead | None:
        """Return the read of the page that a piece needs; None if nothing is left to do. Pass the result to `execute`.

        Call it only if `can_execute`, and if no other piece has a read. For scheduled sends call `freeze_scheduled`
        first.

        Raises: RemoteProtocolError if the queue or durable subscription has ended, or there is no memory for the target
        queue. NoSpaceError if the disk has no space for moved messages.
        """
        if isinstance(request, bulk.ScheduledRequest):
            read = self._scheduler.next_read(request)
            if read is None:
                self._scheduler.unfreeze()
        elif self._was_removed_since(request):
            return None
        else:
            read = bulk.next_read(request, self._require_queue(request), self._commit_state.last_sequence)
            if read is not None:
                self._resident.pin(read.lane)
        if read is not None:
            read.start()
        return read

    def empty_result(self, request: bulk.BulkRequest) -> bulk.BulkResult:
        """Return the result of a piece for which `next_read` has returned None."""
        result = bulk.empty_result(request)
        queue = self._queues.by_name.get(request.queue)
        if queue is not None and not isinstance(request, bulk.ScheduledRequest):
            until = self._commit_state.last_sequence if request.until is None else request.until
            result.left = bulk.count_held(self._clients.held_entries(queue), request, until)
        return result

    def freeze_scheduled(self) -> bool:
        """Stop scheduled sends from becoming due, until a piece is executed or `unfreeze_scheduled` is called. Returns
        whether all sends accepted before the freeze are durable. After False, call this method again when the next
        batch is durable.
        """
        batch = self._scheduler.freeze()
        self._commit_state.is_batch_awaited |= batch == self._commit_state.batch.number
        return not batch

    def unfreeze_scheduled(self) -> None:
        """Undo `freeze_scheduled`, because the piece is not executed."""
        self._scheduler.unfreeze()

    def execute(self, request: bulk.BulkRequest, read: bulk.BulkRead, page: PageResult) -> bulk.BulkResult:
        """Move or remove messages of a page, or list or cancel scheduled sends. One batch has all removals and the
        replacements of moved messages."""
        read.finish()
        commit_state = self._commit_state
        lane = read.lane
        if isinstance(request, bulk.ScheduledRequest):
            self._scheduler.unfreeze()
            scheduled_result = self._scheduler.list_or_cancel(request, read, page)
            if scheduled_result.count and isinstance(request, bulk.Unschedule) and not request.dry_run:
                commit_state.last_control_batch = commit_state.batch.number
            return scheduled_result
        if not self._queues.exists(lane.queue):
            return bulk.empty_result(request, f"queue {lane.queue.name!r} does not exist any more")
        removals, result = bulk.plan_piece(
            request, read, page, commit_state.last_committed, commit_state.now_ms, self._queues.has_subscription_ended
        )
        self._resident.unpin(lane)
        held = self._clients.held_entries(lane.queue)
        result.left += bulk.count_held(held, request, read.until, result.next)
        if request.dry_run or not removals:
            return result
        batch = commit_state.last_control_batch = commit_state.batch.number
        self._resident.remove_entries(lane, [removal.entry for removal in removals])
        for entry, arrival in removals:
            if arrival is None:
                lane.queue.counts.rare.purged += 1
                self._events.removed(entry)
                self._settlement.complete(entry)
                continue
            destination, message = arrival
            queue = self._queues.ensure(destination)
            lane.queue.counts.rare.moved += 1
            self._events.moved(entry, queue, commit_state.next_sequence)
            self._settlement.complete(entry)
            self._arrivals.accept(queue, message, batch)
        # The removed messages may have blocked later ones.
        commit_state.touched_queues[lane.queue] = None
        return result


class BulkPiece(NamedTuple):
    session: ConnectionState
    """Connection that sent the request."""
    control: ControlRequest
    request: bulk.BulkRequest


class FinishedPiece(NamedTuple):
    piece: BulkPiece
    result: bulk.BulkResult


class BulkTask(BackgroundTask):
    """Executes pieces of bulk work one after the other, in the order of the requests."""

    def __init__(self, state: EngineState, operations: BulkPieceExecutor) -> None:
        self._commit_state = state.commit_state
        self._clients = state.clients
        self._operations = operations
        self._pieces: deque[BulkPiece] = deque()
        """Pieces to be executed. The first one is in progress if `_current_read` is set."""
        self._current_read: bulk.BulkRead | None = None
        self._finished: list[FinishedPiece] = []

    def add(self, session: ConnectionState, control: ControlRequest) -> None:
        """Add the piece that a control request asks for.

        Raises: RemoteProtocolError if the request is invalid, or the connection waits for too many answers.
        NoSpaceError if the disk has no space for moved messages.
        """
        request = bulk.parse_request(control.verb, control.body)
        self._operations.check_request(request)
        if self.pending_answer_count(session) >= PIECES_MAX:
            raise RemoteProtocolError(
                f"{control.verb}: {PIECES_MAX} control requests of this connection have no answer yet, the most "
                "allowed: wait for an answer",
                Code.LIMIT,
            )
        self._pieces.append(BulkPiece(session, control, request))
        self._commit_state.active_work[self] = None

    def pending_answer_count(self, session: ConnectionState) -> int:
        """Return the number of answers that a connection waits for."""
        return sum(piece.session is session for piece in self._pieces)

    def drop(self) -> None:
        """Drop all pieces, because the broker stops."""
        self._pieces.clear()
        self._current_read = None

    def take_finished_pieces(self) -> list[FinishedPiece]:
        """Return the pieces finished since the last call. The broker answers these."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def has_work(self) -> bool:
        return bool(self._pieces)

    def can_step(self) -> bool:
        return bool(self._pieces) and self._current_read is None and self._operations.can_execute

    def step(self) -> Sequence[bulk.BulkRead]:
        while self.can_step():
            piece = self._pieces[0]
            if piece.session.id not in self._clients.sessions:
                self._pieces.popleft()
                self._operations.unfreeze_scheduled()
                continue
            if isinstance(piece.request, bulk.ScheduledRequest) and not self._operations.freeze_scheduled():
                break
            try:
                read = self._operations.next_read(piece.request)
            except NoSpaceError:
                # There was space when it was requested, and other pieces may free some.
                self._pieces.rotate(-1)
                if isinstance(self._pieces[0].request, bulk.Move | bulk.Redrive):
                    break
                continue
            except RemoteProtocolError as error:
                # It was possible when it was requested: the durable subscription has ended since.
                self._finish_piece(bulk.empty_result(piece.request, str(error)))
                continue
            if read is not None:
                read.handler = self.on_page_read
                self._current_read = read
                return (read,)
            self._finish_piece(self._operations.empty_result(piece.request))
        return ()

    def on_page_read(self, read: bulk.BulkRead, page: PageResult) -> None:
        if read is self._current_read:
            self._current_read = None
            self._finish_piece(self._operations.execute(self._pieces[0].request, read, page))

    def _finish_piece(self, result: bulk.BulkResult) -> None:
        self._finished.append(FinishedPiece(self._pieces.popleft(), result))
