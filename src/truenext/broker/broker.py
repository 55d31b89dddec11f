"""Broker: drives the engine, with one event loop, one store thread and many connections.

    connection --execute--> engine        at once, as the bytes come (execution.py)
    turn:      engine --> store thread    the gathering batch, if a client waits for it
               engine --> connections     answers and deliveries, joined to one write per connection
    committed: a batch is durable --> turn

A turn runs once in each pass of the event loop in which anything happened. The broker owns the order of a turn
(`_run_turn`) and the time of each commit. Each other subject has its own file, which calls only files to its right:

    execution --> control_commands --> drain, user_sessions --> reply_rights, connection_ids, logins
        |-------> connection_ends --> takeovers
        |-------> capacity --> incomplete_frames, read_turns
    broker -----> slow_clients, stuck_check, disk_level_log, unread_answers, silence
"""

import logging
import secrets
import time
from asyncio import AbstractEventLoop, Future, TimerHandle
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from truenext.broker.backups import Backups
from truenext.broker.capacity import Capacity
from truenext.broker.client_warnings import ClientWarnings, warn_of_forgotten_producers
from truenext.broker.committer import BEAT_CHECK_S, Committer
from truenext.broker.connection_ends import ConnectionEnds
from truenext.broker.connection_list import ConnectionList
from truenext.broker.control import QueryContext, Vitals, own_address
from truenext.broker.control_commands import ControlCommands
from truenext.broker.disk_level_log import DiskLevelLog
from truenext.broker.drain import Drain
from truenext.broker.event_loop import Alarm, SlicedWork
from truenext.broker.execution import Execution
from truenext.broker.health import BrokerFacts, BrokerState
from truenext.broker.history_request import HistoryRequests
from truenext.broker.pager import Pager
from truenext.broker.peer import Peer, PendingCommand, WaitsFor
from truenext.broker.rates import Rates
from truenext.broker.reload import NO_FILE, ReloadResult
from truenext.broker.silence import Silence
from truenext.broker.slow_clients import end_slow_clients
from truenext.broker.stuck_check import StuckCheck
from truenext.broker.unread_answers import UnreadAnswers
from truenext.broker.unread_heads import UnreadHeads
from truenext.broker.user_sessions import UserSessions
from truenext.broker.users import Users
from truenext.broker.write_time import WriteTimeEstimate
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.queue import Queue
from truenext.errors import Code, ConfigurationError, StoreError, TruenextError
from truenext.history.writer import HistoryWriter
from truenext.model.answers import Answer
from truenext.model.batch import Batch
from truenext.model.commands import Command
from truenext.model.control_answers import CommitsReport, HistoryReport
from truenext.model.limits import LAZY_COMMIT_SECONDS
from truenext.model.policy import Policies
from truenext.model.selector import prepare_compiler
from truenext.store.log import Log
from truenext.store.store import Store

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0

HAND_OVER_DELAY_S = 0.2
"""Time after which the broker stops to hand over. The answer to the request is sent before."""


class Broker:
    def __init__(
        self,
        engine: Engine,
        store: Store,
        loop: AbstractEventLoop,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        history: HistoryWriter | None = None,
        write_time: WriteTimeEstimate | None = None,
        users: Users | None = None,
        log: Log | None = None,
        backups: Backups | None = None,
        policy_source: Callable[[str, str], str] = lambda *_: "default",
    ) -> None:
        """`clock_ns` returns nanoseconds since the epoch, `monotonic_ns` those of a monotonic clock. `write_time` is an
        earlier estimate for this disk. Without `users` every client may do everything. `log` is the log of which the
        store is a copy. Without `backups` the broker makes none."""
        self._engine = engine
        self._commands = engine.commands
        self._commit_state = engine.state.commit_state
        self._store = store
        self._log = log
        self.silence = None if log is None else Silence(log)
        """Silence of the broker; None if it has no log, so that it is never silent."""
        self._history = history
        self._backups = backups or Backups()
        self._history_requests = HistoryRequests(
            None if history is None else history.folder, loop, lambda: self._commit_state.events.next_event
        )
        self._loop = loop
        self._clock_ns = clock_ns
        self._monotonic_ns = monotonic_ns
        self._started_ns = monotonic_ns()
        self._peers: dict[ConnectionState, Peer] = {}
        self._is_turn_due = False
        self._has_ticked = False
        """True if the clock was read since the last turn, so that the next turn need not read it."""
        self._lazy_commit: TimerHandle | None = None
        self._check_timer: TimerHandle | None = None
        self._beat_timer: TimerHandle | None = None
        self._idle: Future[None] | None = None
        """Future that is done once the batch being written is durable. Only `_drain` sets and awaits this future."""
        self.failure: Future[None] = loop.create_future()
        """Error that has ended this broker; not done while the broker works."""
        self._has_failed = False
        """True once `failure` is set. A flag is quicker to read than a future; it is read several times a message."""
        self.reload: Callable[[], ReloadResult] = lambda: NO_FILE
        """Reloads the configuration file. The code that starts a broker with a file replaces this function."""
        self.policy_source = policy_source
        """Returns what sets a setting of a queue's policy, by the names of queue and setting."""
        self.end: Callable[[], object] = lambda: None
        """Ends the broker cleanly. The code that starts a broker replaces this function."""
        self.heir: str | None = None
        """Name of the member to which this broker hands over; None if it was not asked to."""
        estimate = write_time or WriteTimeEstimate()
        self.committer = Committer(
            store,
            history,
            loop,
            estimate,
            has_log=log is not None,
            on_committed=self._on_committed,
            on_failed=self._on_failed,
        )
        self.pager = Pager(
            engine, store, loop, tick=self._tick, schedule_turn=self._schedule_turn, on_failed=self._on_failed
        )
        self._alarm = Alarm(loop, self._schedule_turn)
        self._sliced_work = SlicedWork(monotonic_ns)
        self._stuck_check = StuckCheck(engine, self.pager, monotonic_ns)
        self._rates = Rates(engine, monotonic_ns)
        self._disk_level_log = DiskLevelLog(store)
        self.warnings = ClientWarnings(loop.time)
        self.capacity = Capacity(
            engine,
            store,
            loop,
            monotonic_ns,
            user_name_of=lambda session: self.users.name_of(session),
            resume=lambda session: self._peers[session].resume_reading(),
            schedule_turn=self._schedule_turn,
        )
        self.unread_answers = UnreadAnswers(engine.state.memory, loop)
        self.ends = ConnectionEnds(
            engine,
            self._peers,
            self.capacity,
            tick=self._tick,
            schedule_turn=self._schedule_turn,
            drop_answers=lambda session: self.control.requests.connection_closed(session),
            note_lost=lambda session: self.users.note_lost(session),
            monotonic_ns=monotonic_ns,
        )
        self.users = UserSessions(
            users,
            engine,
            self._peers,
            loop,
            has_pending_answer=lambda session: self.control.requests.pending_count(session) > 0,
        )
        self.connections = ConnectionList(self._peers, user_name_of=self.users.name_of, is_open=self.ends.is_open)
        self.drain = Drain(engine, self.ends.partially_sent_entries, self._name_of)
        self.control = self._make_control_commands()
        self._execution = self._make_execution()

    def _make_control_commands(self) -> ControlCommands:
        return ControlCommands(
            self._engine,
            self._sliced_work,
            self.users,
            self.drain,
            self._loop.time,
            self._backups,
            self._history_requests,
            query_context=partial(
                QueryContext,
                self._engine,
                self._stuck_check.detector,
                self.pager,
                lambda: self.reload(),
                lambda session: self._peers[session].client_info,
                self._store,
                self._log,
                self.hand_over,
                self._vitals,
            ),
            connections=self.connections,
            close_connection=self._close_connection,
            policy_source=lambda queue, setting: self.policy_source(queue, setting),
            schedule_turn=self._schedule_turn,
        )

    def _vitals(self) -> Vitals:
        totals, history = self.committer.totals, self._history
        return Vitals(
            (self._monotonic_ns() - self._started_ns) / 1e9,
            CommitsReport(totals.times.count, totals.bytes, round(totals.times.sum, 6)),
            None if history is None else HistoryReport(history.appended_bytes),
        )

    def _make_execution(self) -> Execution:
        return Execution(
            self._engine,
            self._store,
            self._peers,
            self.capacity,
            self.users,
            self.ends,
            self.control,
            self.drain,
            self.connections,
            self.warnings,
            begin_read=self._begin_read,
            on_failed=self._on_failed,
            monotonic_ns=self._monotonic_ns,
        )

    def _close_connection(self, session: ConnectionState, reason: str) -> None:
        self.ends.soon(session, partial(self._peers[session].end_exempt, reason, Code.CLOSED))

    def _name_of(self, queue: Queue) -> tuple[str, str]:
        """Return the name of a queue as its clients write it, and the address of the client that owns the queue; "" if
        the queue is not temporary."""
        if not queue.is_temporary:
            return queue.name, ""
        owner = self._engine.state.clients.sessions.get(queue.destination.session)
        # The connection may have ended just now.
        client = "" if owner is None else self._peers[owner].client_info.address
        return own_address(queue.destination), client

    # ---- Connections ----

    def connect(self, peer: Peer) -> ConnectionState:
        session = self._commands.connect(secrets.token_hex(8))
        self._peers[session] = peer
        self._execution.connect(session)
        return session

    def execute(self, session: ConnectionState, commands: Iterable[Command]) -> PendingCommand | None:
        """Execute the commands of a client, see `Execution.execute`. The test kit overrides this method."""
        if self.is_silent:
            return PendingCommand(None, WaitsFor.SILENCE)
        return self._execution.execute(session, commands)

    def answer(self, session: ConnectionState, answer: Answer) -> None:
        """Send an answer to a connection after the answers to all its earlier commands."""
        self._commit_state.answer(session, answer)
        self._schedule_turn()

    def on_all_sent(self, session: ConnectionState) -> None:
        """Note that the connection's socket has taken all messages that were delivered so far."""
        self._commands.on_all_sent(session)
        if self.control.requests.in_flight:
            self.control.requests.on_all_sent(session)
        # Within a turn, the end of the turn decides whether another turn is due.
        if not self._is_turn_due and (self._commit_state.has_batch or self._engine.has_work):
            self._schedule_turn()

    def connection_closed(self, session: ConnectionState) -> None:
        """Forget a closed connection. The connection gets no answer any more."""
        self.ends.closed(session)
        self._peers.pop(session, None)
        self._execution.remove(session)
        self.control.remove(session)
        self.connections.remove(session)
        self.capacity.remove(session)
        self.users.remove(session)

    def change_policies(self, policies: Policies) -> None:
        """Replace the policies of all queues in one step."""
        self._tick()
        self._commands.administering.change_policies(policies)
        self._schedule_turn()

    def _begin_read(self) -> None:
        self._tick()
        self._has_ticked = True
        self._schedule_turn()

    # ---- Start, stop, turns and commits ----

    async def start(self, *, after_clean_stop: bool = True, identity: str = "") -> None:
        """Start the broker. Returns once the start is durable; only then may connections be accepted. `identity` is
        that of the store, for the history.

        Raises: StoreError if the store cannot be written.
        """
        prepare_compiler()
        self._history_requests.identity = identity
        self._tick()
        epoch = 0 if self._log is None else self._log.status.epoch
        self._engine.lifespan.start(after_clean_stop=after_clean_stop, epoch=epoch, identity=identity)
        await self._drain()
        if self._log is not None:
            self._beat()
        UnreadHeads(self._engine.lifespan.unread_lanes, self._store, self.pager).read()
        self._disk_level_log.update()
        self._check_timer = self._loop.call_later(CHECK_INTERVAL_S, self._periodic_checks)

    async def stop(self) -> None:
        """Write all batches, requeue held messages, write the final state. The caller has stopped all reading before.

        Raises: StoreError if the store cannot be written.
        """
        if self._log is not None:
            self._log.begin_stop()
            self.committer.log_each_batch()
        self._cancel_beat()
        self._engine.turn.stop()
        self._sliced_work.drop()
        self._execution.routing.drop()
        self._stuck_check.drop()
        self.ends.drop_due()
        await self._drain()
        for session in list(self._peers):
            self.ends.drop_unsent(session)
        self._commands.connecting.stop()
        await self._drain()
        for batch in self._engine.lifespan.final_batches():
            if self._has_failed:
                # The mark of a clean stop is not written either: the stop is not clean.
                await self.failure
            self._write(batch)
            await self._drain()
        await self._drain()
        if self._log is not None:
            self._note_stop(self._log)

    def close(self) -> None:
        """End the store's threads after their current work. Without `stop` before, the store is left as by a crash."""
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._cancel_beat()
        self._alarm.cancel()
        self.users.close()
        self._backups.close()
        self._history_requests.close()
        self.pager.close()
        self.committer.close()

    async def _drain(self) -> None:
        """Write all batches, and send the answers that wait for these batches."""
        self._turn()
        while self.committer.is_busy or self._commit_state.has_batch:
            if not self.committer.is_busy:
                self._commit_now()
            if self._has_failed:
                await self.failure
            if self.committer.is_busy:
                self._idle = self._loop.create_future()
                await self._idle
            self._turn()
        self._idle = None

    def _schedule_turn(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        # Work that this turn makes possible must not schedule a turn: the end of this turn decides whether one is due.
        self._is_turn_due = True
        is_silent = self.is_silent
        if not (self._has_failed or is_silent):
            self._run_turn()
        self._is_turn_due = False
        if self._has_failed or is_silent:
            # The next confirmed append ends the silence, and runs a turn.
            self._stuck_check.detector.forget()
            return
        self.capacity.read_turns.on_turn_done()
        if (
            self._engine.has_work
            or self._sliced_work.pending
            or self._stuck_check.pending
            or self._execution.routing.pending
            or self.capacity.read_turns.has_waiting
            or self.ends.due
        ):
            self._schedule_turn()

    def _run_turn(self) -> None:
        """Run one turn, in this order:
        1. Commit, if a client waits for the batch: the disk then works while the turn dispatches and writes to sockets.
        2. Dispatch, then at once the stuck check: at any other time a ready message may just wait for the next turn.
        3. Flush: each connection gets its answers and messages in one write.
        4. Evict. This may drop bodies of messages, so it comes after the messages were written to the sockets.
        5. Commit what the turn itself has changed, then do a slice of long work.
        """
        engine, commit_state = self._engine, self._commit_state
        if not self._has_ticked:
            self._tick()
        self._has_ticked = False
        to_flush: dict[Peer, None] = {}
        if commit_state.is_batch_awaited:
            self._commit()
            if not self.committer.is_busy:
                # Durable already: a client that waits for each receipt goes on while its message is dispatched.
                for peer, session in self._answer(commit_state.take_answers()).items():
                    if session.consumers:
                        # The connection may get messages in this turn as well; then both leave together.
                        to_flush[peer] = None
                    else:
                        peer.flush()
        answers, deliveries, reads, browse_slices, timer_reads, finished, ended_pull_requests = engine.turn.run()
        for read in reads:
            self.pager.read(read)
        for timer_read in timer_reads:
            self.pager.read_timers(timer_read)
        if self._stuck_check.pending:
            self._stuck_check.run_slice()
        peers = self._peers
        self.users.note_dispatched(deliveries)
        if answers:
            to_flush |= dict.fromkeys(self._answer(answers))
        for consumer, entries in deliveries.items():
            peer = peers[consumer.session]
            peer.deliver(consumer, entries)
            to_flush[peer] = None
        for browse_slice in browse_slices:
            peer = peers[browse_slice.browser.session]
            peer.deliver_browse_slice(browse_slice)
            to_flush[peer] = None
        for ended in ended_pull_requests:
            peer = peers[ended.consumer.session]
            peer.end_pull_request(ended)
            to_flush[peer] = None
        for peer in to_flush:
            peer.flush()
        for piece, done in finished:
            self.control.send_answer(piece.session, piece.control, msgspec.json.encode(done))
        self.ends.run_due()
        for session, reason in engine.evict().items():
            self.ends.soon(session, partial(peers[session].end_slow_client, reason))
        self._alarm.set(engine.tasks.next_due_ms, commit_state.now_ms)
        self._commit()
        if self._sliced_work.pending:
            self._sliced_work.run_slice()
        if self._execution.routing.pending:
            self._execution.find_some_queues()

    def _tick(self) -> None:
        self._commit_state.set_disk_level(self._store.disk_level)
        self._commit_state.tick(self._clock_ns() // 1000, self._monotonic_ns() // 1000)

    def _answer(self, answers: list[tuple[ConnectionState, Answer]]) -> dict[Peer, ConnectionState]:
        """Pass answers to their connections. Returns these connections; the caller must flush each."""
        answered: dict[Peer, ConnectionState] = {}
        for session, answer in answers:
            peer = self._peers.get(session)
            if peer is not None:
                peer.answer(answer)
                answered[peer] = session
        return answered

    def _periodic_checks(self) -> None:
        self._tick()
        self.users.flush_log()
        self._check_log()
        self._disk_level_log.update()
        if self._rates.are_due:
            self._sliced_work.add(self._rates.count())
        if self._stuck_check.begin():
            self._sliced_work.add(self._engine.stretch_windows())
        warn_of_forgotten_producers(self._engine)
        self._engine.remove_unused_queues()
        self._engine.state.jms_producers.forget_old()
        if not self.is_silent:
            end_slow_clients(self._engine, self._peers, self.control.requests, self.capacity, self._loop.time())
        self._schedule_turn()
        self._check_timer = self._loop.call_later(CHECK_INTERVAL_S, self._periodic_checks)

    def _check_log(self) -> None:
        """Stop if the log has failed. A broker without a write would not notice that another one has taken over, and
        its consumers would wait for ever."""
        if self._log is not None and self._log.failure is not None and not self._has_failed:
            self._on_failed(self._log.failure)

    def _commit(self) -> None:
        """Commit the gathering batch if the store is idle: at once if a client waits for it, else a little later. The
        delay saves syncs that would delay batches with a receipt (docs/decisions/0047-larger-batches-at-once.md)."""
        if self.committer.is_busy or self._has_failed:
            return
        if self._commit_state.is_batch_awaited:
            self._commit_now()
        elif self._lazy_commit is None and self._commit_state.has_batch:
            self._lazy_commit = self._loop.call_later(LAZY_COMMIT_SECONDS, self._commit_lazily)

    def _commit_lazily(self) -> None:
        self._lazy_commit = None
        if not self.committer.is_busy:
            self._commit_now()

    def _commit_now(self, *, even_if_empty: bool = False) -> None:
        """Commit the gathering batch. If the event loop itself writes it, schedule a turn for the results."""
        if self._has_failed:
            return
        batch = self._engine.take_batch(even_if_empty=even_if_empty)
        if batch is not None:
            self._write(batch)
            self.capacity.on_batch_closed()

    def _write(self, batch: Batch) -> None:
        try:
            if self.committer.commit(batch):
                self._tick()
                self._engine.store_results.on_committed(batch)
                if not self._is_turn_due and self._engine.has_work:
                    self._schedule_turn()
        except TruenextError as error:
            self._on_failed(error)

    def _on_committed(self, batch: Batch) -> None:
        self._tick()
        try:
            self._engine.store_results.on_committed(batch)
        except StoreError as error:
            self._on_failed(error)
            return
        self._has_ticked = True
        if self.silence is not None and not self.silence.is_silent():
            self.silence.wake_all()
        # A turn that is due follows at once. Another one beside it would schedule turns of its own, for ever.
        if not self._is_turn_due:
            self._turn()
        self.capacity.resume_waiting()
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    # ---- Standing by of others ----

    @property
    def is_silent(self) -> bool:
        """True if another broker may have taken over the log, as far as this one knows."""
        return self.silence is not None and self.silence.is_silent()

    def health_facts(self, loop_held_s: float) -> BrokerFacts:
        """Return the facts for the health of a running broker, whose event loop has stood still for `loop_held_s`. Any
        thread may call this."""
        wait = None if self._log is None else self._log.status.wait
        return BrokerFacts(
            state=BrokerState.RUNNING,
            loop_held_s=round(loop_held_s, 3),
            draining=self._commit_state.is_draining,
            silent=self.is_silent,
            awaited=wait.awaited.value if wait else "",
            disk_level=self._store.disk_level.name.lower(),
        )

    def _beat(self) -> None:
        """Commit a batch, even an empty one, if a row is due: brokers that stand by take a log without new rows for
        that of a dead broker."""
        if self.committer.is_row_due and not self.committer.is_busy:
            self._commit_now(even_if_empty=True)
        self._beat_timer = self._loop.call_later(BEAT_CHECK_S, self._beat)

    def _cancel_beat(self) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()

    def hand_over(self, to: str | None) -> str:
        """Begin a clean stop that names the member `to`, or the one that is least behind, as the broker that takes
        over. Returns its name.

        Raises: ConfigurationError if there is none
        """
        if self._log is None:
            raise ConfigurationError("this broker has no log (--store), so no other one can take over")
        self.heir = self._log.choose_heir(to)
        self._loop.call_later(HAND_OVER_DELAY_S, self.end)
        return self.heir

    def _note_stop(self, log: Log) -> None:
        """Write that this broker has stopped. If that fails, another broker waits before it takes over."""
        try:
            log.hand_over(self.heir or "")
        except StoreError as error:
            logger.warning("the database does not know of the clean stop", extra={"reason": str(error)})

    def _on_failed(self, error: TruenextError) -> None:
        # No retry: after a failed sync the disk may hold less than we believe.
        logger.critical("the store failed; the broker stops", extra={"reason": str(error)})
        self.fail(error)

    def fail(self, error: TruenextError) -> None:
        """Stop for good: from now on no command is confirmed and no batch is written. `failure` is set to the error."""
        if not self._has_failed:
            self._has_failed = True
            self.failure.set_exception(error)
            # Retrieved, so that asyncio does not report the error again if `failure` is never awaited (a failed start).
            self.failure.exception()
        if self._idle is not None and not self._idle.done():
            self._idle.set_exception(error)
