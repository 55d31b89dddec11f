"""Broker: drives the engine with one event loop, one store thread and many connections.

    connection --execute--> engine        at once, as the bytes come
    turn:      engine --> store thread    the gathering batch, if a client waits for it
               engine --> connections     answers and deliveries, joined to one write per connection
    committed: a batch is durable --> turn

A turn runs once per pass of the event loop in which anything happened, however many connections it came from.

One file, as one object owns the connections, the order of a turn, and the time of each commit.
"""

import logging
import secrets
import time
from asyncio import AbstractEventLoop, Future, TimerHandle
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from truenext.broker import access, connection_request, control, producer_request
from truenext.broker.capacity import Capacity
from truenext.broker.committer import Committer
from truenext.broker.control_only import ControlOnlyConnections
from truenext.broker.control_requests import AnswerGenerator, ControlRequests
from truenext.broker.event_loop import Alarm, SlicedWork, Steps
from truenext.broker.logins import WRONG_CERTIFICATE, WRONG_LOGIN, Logins
from truenext.broker.pager import Pager
from truenext.broker.reload import NO_FILE, ReloadResult
from truenext.broker.reply_rights import ReplyRights
from truenext.broker.security_log import SecurityLog
from truenext.broker.takeovers import TakeoverSecrets
from truenext.broker.users import Users, is_certificate_name
from truenext.broker.write_time import WriteTimeEstimate
from truenext.engine.background import bulk
from truenext.engine.background.browsing import BrowseSlice
from truenext.engine.engine import Engine
from truenext.engine.lifecycle.pull_requests import EndedPullRequest
from truenext.engine.memory.timers import TimerRead, TimersResult
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState, Subscriber
from truenext.engine.state.pages import PageResult, SideRead, StoreRead
from truenext.engine.state.producer import user_producer
from truenext.engine.state.queue import Entry, Lane, Queue
from truenext.engine.stuck import StuckQueueDetector
from truenext.errors import Code, RemoteProtocolError, StoreError, TruenextError
from truenext.history.writer import HistoryWriter
from truenext.model.answers import Answer, Receipt
from truenext.model.batch import Batch
from truenext.model.commands import (
    Abort,
    Ack,
    AckMode,
    Begin,
    Browse,
    Command,
    Commit,
    ControlRequest,
    Credit,
    Disconnect,
    InvalidFrame,
    Login,
    Nack,
    ReceiptRequest,
    Release,
    Send,
    Started,
    Subscribe,
    Unsubscribe,
    Wake,
)
from truenext.model.destination import Destination, DestinationKind
from truenext.model.disk_level import DiskLevel
from truenext.model.grants import User
from truenext.model.limits import (
    ANSWER_SECONDS_MAX,
    ANSWER_STALL_SECONDS,
    EXECUTE_SLICE_US,
    INCOMPLETE_FRAME_PROGRESS_BYTES,
    INCOMPLETE_FRAME_SECONDS,
    LAZY_COMMIT_SECONDS,
    REFUSALS_PER_PASS_MAX,
    ROUTING_SLICE_NS,
)
from truenext.model.policy import Policies
from truenext.model.selector import prepare_compiler
from truenext.store.store import Store

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Time between two periodic checks, such as the one for stuck queues."""


_WATCHED_COMMANDS = (Nack, Subscribe, Browse, Unsubscribe, Commit, Abort, Release, Disconnect, ControlRequest)
"""Commands of which one may take milliseconds."""

OTHER_PROTOCOL_SECONDS = 60.0
"""Time after the warning of a client of another protocol in which others of that protocol are logged as debug."""

_OTHER_PROTOCOL = "client refused: it speaks another protocol, and this port speaks STOMP"


class Peer(Protocol):
    """Client's connection as the broker uses it: `server.connection.ServerConnection`, or a test's."""

    def answer(self, answer: Answer) -> None:
        """Add an answer to the next flush."""

    def deliver(self, consumer: BrokerConsumer, entries: list[Entry]) -> None:
        """Add messages to the next flush."""

    def deliver_browse_slice(self, browse_slice: BrowseSlice) -> None:
        """Add messages for a browser to the next flush."""

    def flush(self) -> None:
        """Write all that was added; call `Broker.on_all_sent` once the socket has taken all of it."""

    def send_connected(self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool) -> None:
        """Answer an accepted login; `secret` is "" if the client requested none. `is_checked` tells whether there are
        users."""

    def send_error(self, error: RemoteProtocolError) -> None:
        """Send an ERROR for the last command, and keep the connection open."""

    def close_for_takeover(self, *, is_exempt: bool) -> None:
        """Close the connection at once, as another connection of the client takes it over."""

    def end_pull_request(self, ended: EndedPullRequest) -> None:
        """Add the end of a pull request to the next flush."""

    def cancel_unsent(
        self, consumers: Collection[BrokerConsumer] | None
    ) -> tuple[dict[BrokerConsumer, int], list[Subscriber]]:
        """Drop unsent messages of some consumers (None: of all).

        Returns how many messages of each consumer in auto mode the socket has taken since the last call of
        `Broker.on_all_sent`, and the subscriber of each message that is partially sent or encrypted, in order. If the
        connection goes on, these messages are sent, and `Broker.partial_frame_sent` called for each.
        """

    def assign_place(self, *, may_exceed: bool) -> str:
        """Assign a place to the connection at its login. Returns the limit that it exceeds, if it `may_exceed` one, and
        because of which it may only send control requests and must not be idle (`idle_time_left`); "" if none.

        Raises: RemoteProtocolError if there is no place
        """

    def resume_reading(self) -> None:
        """Read the socket again: there is capacity, see `Broker.wait_for_capacity`."""

    def end_slow_client(self, reason: str) -> None:
        """End the connection of a client that reads or sends so slowly that the broker keeps too much for it."""

    def end_user(self, reason: str) -> None:
        """End the connection of a user that may not do any more what it may have done."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that the socket has taken since the connection began."""

    @property
    def client_info(self) -> control.ClientInfo:
        """Address and client id of the client."""

    @property
    def certificate_names(self) -> Collection[str]:
        """Names and fingerprint of the checked certificate that the client has shown; none without TLS."""


class WaitsFor(Enum):
    """Reason for which a command waits."""

    DISK = "disk space"
    OTHERS = "other connections to be served"
    ROUTES = "the queues of its messages to be found"
    LOGIN = "its password to be checked"


class PendingCommand(NamedTuple):
    """Commands of a connection that `Broker.execute` could not execute yet, and the reason."""

    command: Command | None
    """First of them; None if it is the next of those that `Broker.execute` was given."""
    waits_for: WaitsFor


class SessionUser(NamedTuple):
    """User of a connection, and the credential with which it has logged in."""

    user: User
    credential: str


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
    ) -> None:
        """`clock_ns` returns nanoseconds since the epoch, `monotonic_ns` nanoseconds of a clock that does not jump.
        `write_time` is an earlier estimate for this disk, if there is one. Without `users` every client may do
        everything."""
        self._engine = engine
        self._commit_state = engine.state.commit_state
        self._loop = loop
        self._clock_ns = clock_ns
        self._monotonic_ns = monotonic_ns
        self._committer = Committer(
            store,
            history,
            loop,
            write_time or WriteTimeEstimate(),
            on_committed=self._on_committed,
            on_failed=self._on_failed,
        )
        self._store = store
        self._pager = Pager(
            store, loop, on_page=self._on_page_read, on_timers=self._on_timers_read, on_failed=self._on_failed
        )
        self._alarm = Alarm(loop, self._schedule_turn)
        self._peers: dict[ConnectionState, Peer] = {}
        self._takeovers = TakeoverSecrets()
        self._before_login: set[ConnectionState] = set()
        self._control_only = ControlOnlyConnections(loop.time)
        self.capacity = Capacity(
            engine.state.commit_state,
            engine.state.memory,
            loop,
            disk_level=lambda: store.disk_level,
            resume=lambda session: self._peers[session].resume_reading(),
            waits_for_disk=self._waits_for_disk,
        )
        self._parked: set[ConnectionState] = set()
        """Connections without a socket that wait for a takeover."""
        self._partially_sent: dict[ConnectionState, deque[Entry | None]] = {}
        """Messages that were partially sent, or encrypted, when their consumer ended or released its messages; in
        order, with None for one that is not of a consumer in auto mode."""
        self._sliced_work = SlicedWork(monotonic_ns)
        self._routing = SlicedWork(monotonic_ns, ROUTING_SLICE_NS)
        """Searches for the queues of messages whose commands wait for that."""
        self._control_requests = ControlRequests(self._sliced_work, self._start_answer, self._send_answer)
        self.reload: Callable[[], ReloadResult] = lambda: NO_FILE
        """Reloads the configuration file; set by the code that knows the file."""
        self._has_logged_login = False
        self._logged_disk_level = DiskLevel.PLENTY
        """Worst disk level logged since the last PLENTY."""
        self._other_protocols: dict[str, float] = {}
        """Protocols of refused clients, each with the time of the loop from which its next warning is logged."""
        self._ineffective_headers: set[tuple[str, str]] = set()
        """Users, "" without users, with the names of headers of which the log has warned them."""
        self._is_turn_due = False
        self._has_ticked = False
        """The clock was read for the turn that is due, at a command or a durable batch."""
        self._lazy_commit: TimerHandle | None = None
        self._stuck_audit = StuckQueueDetector()
        self._check_timer: TimerHandle | None = None
        self._stuck_check = SlicedWork(monotonic_ns)
        """Steps of the check for stuck queues that is running, if one is."""
        self._idle: Future[None] | None = None
        """Future that is done when the batch in flight is durable; used by `_drain` only."""
        self.failure: Future[None] = loop.create_future()
        """Set to the error that ends this broker, if one does."""
        self._has_failed = False
        """True once `failure` is set: quicker to read, several times for each message."""
        # Bound methods, so that one look-up finds the action of a command.
        self._actions: dict[type[Any], Callable[[ConnectionState, Any], None]] = {
            Login: self._log_in,
            InvalidFrame: _raise_invalid,
            Send: engine.commands.send,
            Ack: engine.commands.acknowledge,
            Nack: engine.commands.nack,
            ReceiptRequest: self._answer_receipt_request,
            Subscribe: self._subscribe,
            Browse: engine.commands.browse,
            Unsubscribe: self._unsubscribe,
            Begin: engine.commands.begin,
            Commit: engine.commands.commit,
            Abort: engine.commands.abort,
            Started: engine.commands.mark_started,
            Credit: self._request_credit,
            Wake: engine.commands.wake,
            Release: self._release,
            Disconnect: self._disconnect,
            ControlRequest: self._control,
        }
        for command in _WATCHED_COMMANDS:
            self._actions[command] = self._watched(self._actions[command])
        self._users: dict[ConnectionState, SessionUser] = {}
        """Users of the connections that are logged in; empty if the broker has no users."""
        self._last_targets: dict[ConnectionState, Destination] = {}
        """Destination of the last SEND of each connection, which its user has the right to send to; none with temporary
        queues and topics, which are checked for each SEND."""
        self._logins: Logins | None = None
        """Checker of logins; None if the broker has no users."""
        self._reply_rights: ReplyRights | None = None
        """Rights to send to temporary queues of other users; None if the broker has no users."""
        self._security_log = SecurityLog(loop.time)
        self._checked_logins: dict[ConnectionState, str] = {}
        """Credentials of logins that were checked and not executed yet; "" if a login is wrong."""
        if users is not None:
            self._logins = Logins(users, loop)
            self._reply_rights = ReplyRights(engine, self._user_name)
            self._guard_actions()

    # ---- Connections ----

    def connect(self, peer: Peer) -> ConnectionState:
        """Register a connection."""
        session = self._engine.commands.connect(secrets.token_hex(8))
        self._peers[session] = peer
        self._before_login.add(session)
        return session

    def log_other_protocol(self, client: str, protocol: str) -> None:
        """Log a client of another protocol: one warning a minute for each protocol, as a port scan makes many."""
        now = self._loop.time()
        if now < self._other_protocols.get(protocol, now):
            logger.debug(_OTHER_PROTOCOL, extra={"client": client, "protocol": protocol})
            return
        self._other_protocols[protocol] = now + OTHER_PROTOCOL_SECONDS
        logger.warning(_OTHER_PROTOCOL, extra={"client": client, "protocol": protocol})

    def warn_of_ineffective_header(self, session: ConnectionState, frame: str, header: str, instead: str) -> None:
        """Log a client's header that has an effect in other brokers only; once for each header and user."""
        user = self._user_name(session)
        if (user, header) not in self._ineffective_headers:
            self._ineffective_headers.add((user, header))
            logger.warning(
                "a header of another broker has no effect here",
                extra={
                    "header": header,
                    "frame": frame,
                    "user": user,
                    "client": self._client_info(session).address,
                    "instead": instead,
                },
            )

    def idle_time_left(self, session: ConnectionState) -> float:
        """Return the seconds that a control-only connection may still be idle; a pending answer counts as activity."""
        if self._control_requests.pending_count(session) or self._engine.tasks.bulk.pending_answer_count(session):
            self._control_only.note_activity(session)
        return self._control_only.seconds_left(session)

    def execute(self, session: ConnectionState, commands: Iterable[Command]) -> PendingCommand | None:
        """Execute the commands of a client one after the other.

        Returns the commands that must wait, and the reason; None if all were executed.

        Raises: RemoteProtocolError at a refused command that ends the connection; those before it stay executed.
        """
        capacity = self.capacity
        if not capacity.is_full:
            return self._execute(session, commands)
        before = capacity.added_bytes
        try:
            return self._execute(session, commands)
        finally:
            capacity.charge(session, capacity.added_bytes - before)

    def _execute(self, session: ConnectionState, commands: Iterable[Command]) -> PendingCommand | None:
        engine = self._engine
        self._tick()
        self._has_ticked = True
        is_disk_short = self._commit_state.disk_level is not DiskLevel.PLENTY
        needs_login = session in self._before_login
        actions = self._actions
        commit_state = self._commit_state
        until_us = commit_state.now_us + EXECUTE_SLICE_US
        commit_state.is_read_long = engine.queues.routing_may_take_long
        self._schedule_turn()
        if needs_login or (self._control_only.idle_since and session in self._control_only.idle_since):
            commands = self._control_only.check_commands(session, commands)
        refused = 0
        commands = iter(commands)
        for command in commands:
            try:
                if needs_login:
                    needs_login = False
                    if (
                        self._logins is not None
                        and isinstance(command, Login)
                        and not self._is_login_checked(session, command)
                    ):
                        return PendingCommand(command, WaitsFor.LOGIN)
                if is_disk_short:
                    if engine.commands.sending.waits_while_disk_short(session, command):
                        return PendingCommand(command, WaitsFor.DISK)
                    self._count_contents(session, command)
                if commit_state.is_read_long and self._is_routed_ahead(session, command):
                    return PendingCommand(command, WaitsFor.ROUTES)
                actions[type(command)](session, command)
            except RemoteProtocolError as error:
                if not session.is_truenext_client or isinstance(command, Login):
                    raise
                self._refuse_command(session, command, error)
                refused += 1
                if refused < REFUSALS_PER_PASS_MAX:
                    continue
            else:
                if not commit_state.is_read_long or self._monotonic_ns() // 1000 < until_us:
                    continue
            # One read may hold very many refused frames, of four bytes each, or commands that take long.
            return PendingCommand(None, WaitsFor.OTHERS)
        return None

    def _watched(self, action: Callable[[ConnectionState, Any], None]) -> Callable[[ConnectionState, Any], None]:
        """Return an action after which the time of its read is checked."""

        def watched_action(session: ConnectionState, command: Any) -> None:
            self._commit_state.is_read_long = True
            action(session, command)

        return watched_action

    def _is_routed_ahead(self, session: ConnectionState, command: Command) -> bool:
        """Return whether a command waits because it takes long to find the queues of its messages; if so, begin."""
        steps = self._engine.commands.sending.find_queues_ahead(session, command)
        if steps is None or self._is_forbidden(session, command):
            return False
        self._routing.add(self._find_queues(session, steps))
        return True

    def _is_forbidden(self, session: ConnectionState, command: Command) -> bool:
        """Return whether a SEND will be refused, as its user may not send there."""
        found = self._users.get(session)
        if found is None or not isinstance(command, Send):
            return False
        try:
            access.COMMAND_CHECKS[Send](found.user, session, command)
        except access.ForbiddenError:
            return True
        return False

    def _find_queues(self, session: ConnectionState, steps: Iterator[None]) -> Steps:
        for _ in steps:
            yield
            if not self._engine.commands.connecting.is_connected(session):
                return
        self.capacity.wait_for_others(session)

    def _count_contents(self, session: ConnectionState, command: Command) -> None:
        """Tell the engine how many copies the store has of shared contents, if the command depends on that."""
        contents = self._engine.commands.sending.contents_to_count(session, command)
        if contents:
            try:
                self._engine.commands.sending.count_contents(session, command, self._store.content_references(contents))
            except StoreError as error:
                self._on_failed(error)

    def _refuse_command(self, session: ConnectionState, command: Command, error: RemoteProtocolError) -> None:
        """Send an ERROR, and keep the connection open. The command's transaction becomes rollback-only."""
        name = getattr(command, "transaction", None)
        if name is not None:
            self._engine.commands.transactions.mark_rollback_only(session, name)
        self._peers[session].send_error(error)

    def answer(self, session: ConnectionState, answer: Answer) -> None:
        """Answer a connection, after the answers to all its earlier commands."""
        self._commit_state.answer(session, answer)
        self._schedule_turn()

    def on_all_sent(self, session: ConnectionState) -> None:
        """Note that the socket has taken all messages that were delivered to the connection so far."""
        self._engine.commands.on_all_sent(session)
        if self._control_requests.in_flight:
            self._control_requests.on_all_sent(session)
        # Within a turn, the end of the turn decides that.
        if not self._is_turn_due and (self._commit_state.has_batch or self._engine.has_work):
            self._schedule_turn()

    def park_for_takeover(self, session: ConnectionState) -> bool:
        """Park a connection whose socket ended without a DISCONNECT, so that its client may take it over. Only state
        that would count an attempt is kept. Returns False if there is none, or no takeover is possible."""
        if not self._takeovers.has_secret(session):
            return False
        self._tick()
        self._cancel_unsent(session, None)
        self._release_partially_sent(session)
        self._control_requests.connection_closed(session)
        self.capacity.remove(session)
        self._schedule_turn()
        is_parked = self._engine.commands.connecting.park(session)
        if is_parked:
            self._parked.add(session)
        return is_parked

    def connection_lost(self, session: ConnectionState, *, is_exempt: bool = False) -> None:
        """End the session of a client that sent no DISCONNECT; answers may still follow until `connection_closed`.

        If `is_exempt`, its held messages count no attempt, as after a DISCONNECT.
        """
        self._tick()
        self._cancel_unsent(session, None)
        self._engine.commands.disconnect(session, is_clean=is_exempt)
        self._takeovers.remove(session)
        self._control_requests.connection_closed(session)
        self._schedule_turn()

    def connection_closed(self, session: ConnectionState) -> None:
        """Remove a closed connection: no answer can be sent to it any more."""
        self._release_partially_sent(session)
        self._peers.pop(session, None)
        self._before_login.discard(session)
        self._control_only.remove(session)
        self._parked.discard(session)
        self._control_requests.connection_closed(session)
        self.capacity.remove(session)
        self._users.pop(session, None)
        self._last_targets.pop(session, None)
        if self._reply_rights is not None:
            self._reply_rights.connection_closed(session)
        self._checked_logins.pop(session, None)

    def partial_frame_sent(self, session: ConnectionState) -> None:
        """Note that the socket has taken all of a partially sent message, see `Peer.cancel_unsent`."""
        messages = self._partially_sent.get(session)
        if messages:
            self._settle(messages.popleft(), is_sent=True)

    def _waits_for_disk(self, session: ConnectionState) -> bool:
        """Return whether the next SEND of the connection would wait for disk space."""
        return (
            self._store.disk_level is not DiskLevel.PLENTY
            and self._engine.commands.sending.waits_with_send(session)
            and not session.is_truenext_client
        )

    @property
    def is_writing(self) -> bool:
        """A batch is being written to the disk."""
        return self._committer.is_busy

    @property
    def is_reading(self) -> bool:
        """Pages or timers are being read from the store."""
        return self._pager.is_busy

    def change_policies(self, policies: Policies) -> None:
        """Replace the policies of all queues in one step."""
        self._tick()
        self._engine.commands.administering.change_policies(policies)
        self._schedule_turn()

    # ---- Start and stop ----

    async def start(self, *, after_clean_stop: bool = True) -> None:
        """Start a run; returns once its start is durable. No connection may be accepted before.

        Raises: StoreError if the store cannot be written.
        """
        prepare_compiler()
        self._tick()
        self._engine.lifespan.start(after_clean_stop=after_clean_stop)
        await self._drain()
        self._log_disk_level()
        self._check_timer = self._loop.call_later(CHECK_INTERVAL_S, self._periodic_checks)

    async def stop(self) -> None:
        """Finish batches, requeue held messages, write the final state. Connections must not be read any more.

        Raises: StoreError if the store cannot be written.
        """
        self._engine.tasks.bulk.drop()
        self._sliced_work.drop()
        self._routing.drop()
        self._stuck_check.drop()
        await self._drain()
        for session in list(self._peers):
            self._cancel_unsent(session, None)
            self._release_partially_sent(session)
        self._engine.commands.connecting.stop()
        await self._drain()
        for batch in self._engine.lifespan.final_batches():
            if self._has_failed:
                # The mark of a clean stop is not written either: the stop is not clean.
                await self.failure
            self._write(batch)
            await self._drain()
        await self._drain()

    def close(self) -> None:
        """End the store's threads once their current work is done. Without `stop`, the store is left as by a crash."""
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._alarm.cancel()
        if self._logins is not None:
            self._logins.close()
        self._pager.close()
        self._committer.close()

    async def _drain(self) -> None:
        """Write until no batch gathers or is in flight, and the answers that waited for them are sent."""
        self._turn()
        while self._committer.is_busy or self._commit_state.has_batch:
            if not self._committer.is_busy:
                self._commit_now()
            if self._has_failed:
                await self.failure
            if self._committer.is_busy:
                self._idle = self._loop.create_future()
                await self._idle
            self._turn()
        self._idle = None

    # ---- Turns ----

    def _schedule_turn(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        # Work that this turn makes possible must not schedule a turn: the end of this turn decides that.
        self._is_turn_due = True
        if not self._has_failed:
            self._run_turn()
        self._is_turn_due = False
        if self._has_failed:
            return
        self.capacity.on_turn_done()
        if (
            self._engine.has_work
            or self._sliced_work.pending
            or self._stuck_check.pending
            or self._routing.pending
            or self.capacity.has_given_way
        ):
            self._schedule_turn()

    def _run_turn(self) -> None:
        engine, commit_state = self._engine, self._commit_state
        if not self._has_ticked:
            self._tick()
        self._has_ticked = False
        to_flush: dict[Peer, None] = {}
        # The disk first: it works while we write to sockets.
        if commit_state.is_batch_awaited:
            self._commit()
            if not self._committer.is_busy:
                # Durable already: a client that waits for each receipt goes on while its message is dispatched.
                for peer, session in self._answer(commit_state.take_answers()).items():
                    if session.consumers:
                        # The connection may get messages in this turn as well; then both leave together.
                        to_flush[peer] = None
                    else:
                        peer.flush()
        answers, deliveries, reads, browse_slices, timer_reads, finished, ended_pull_requests = engine.turn.run()
        for read in reads:
            self._pager.read(read)
        for timer_read in timer_reads:
            self._pager.read_timers(timer_read)
        # Directly after dispatch: at other times a queue may rightly have a ready message and a consumer with credit.
        if self._stuck_check.pending:
            self._stuck_check.run_slice()
        peers = self._peers
        if self._reply_rights is not None and self._reply_rights.has_callers:
            self._reply_rights.note_dispatched(deliveries)
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
            self._send_answer(piece.session, piece.control, msgspec.json.encode(done))
        for session, reason in engine.evict().items():
            peers[session].end_slow_client(reason)
        self._alarm.set(engine.tasks.next_due_ms, commit_state.now_ms)
        self._commit()
        if self._sliced_work.pending:
            self._sliced_work.run_slice()
        if self._routing.pending:
            self._routing.run_slice()
            # Each connection has its turn, however long its messages take.
            self._routing.pending.rotate(-1)

    def _tick(self) -> None:
        self._commit_state.disk_level = self._store.disk_level
        self._commit_state.tick(self._clock_ns() // 1000, self._monotonic_ns() // 1000)

    def _answer(self, answers: list[tuple[ConnectionState, Answer]]) -> dict[Peer, ConnectionState]:
        """Pass answers to their peers. Returns these peers, which must be flushed, and their connections."""
        answered: dict[Peer, ConnectionState] = {}
        for session, answer in answers:
            peer = self._peers.get(session)
            if peer is not None:
                peer.answer(answer)
                answered[peer] = session
        return answered

    def _log_disk_level(self) -> None:
        """Log when the disk level gets worse, and when it is PLENTY again."""
        level = self._store.disk_level
        if level == self._logged_disk_level or DiskLevel.PLENTY < level < self._logged_disk_level:
            return
        self._logged_disk_level = level
        sizes: dict[str, object] = {f"{name}_bytes": size for name, size in self._store.disk_level_bytes.items()}
        short = {"disk_level": level.name.lower()} | sizes
        if level is DiskLevel.PLENTY:
            logger.warning("disk has free space for messages again: producers continue", extra=sizes)
        elif level is DiskLevel.LITTLE:
            logger.warning("disk is almost full: connections that only send wait, or are refused", extra=short)
        elif level is DiskLevel.NONE:
            logger.warning(
                "disk is full: sends are refused, except in transactions that free as much as they send",
                extra=short,
            )
        else:
            logger.warning("disk is full, a write has failed: all sends are refused", extra=short)

    def _periodic_checks(self) -> None:
        self._tick()
        self._security_log.flush()
        self._log_disk_level()
        if not self._stuck_check.pending:
            self._stuck_check.add(self._check_stuck_queues())
            self._sliced_work.add(self._engine.stretch_windows())
        forgotten, last = self._engine.state.producers.take_forgotten()
        if forgotten:
            logger.warning(
                "producers forgotten early, as there are too many: their repeats are not recognized",
                extra={"producers": forgotten, "last": last},
            )
        self._engine.remove_unused_queues()
        stalled = self._engine.find_stalled_connection(lambda session: self._peers[session].bytes_sent)
        if stalled is not None:
            session, reason = stalled
            self._peers[session].end_slow_client(reason)
        blocking = self._control_requests.find_blocking(
            self._loop.time(), lambda session: self._peers[session].bytes_sent
        )
        if blocking is not None:
            self._peers[blocking].end_slow_client(
                f"the client has read almost nothing of the answer to its control request for {ANSWER_STALL_SECONDS} "
                f"seconds, or not all of it for {ANSWER_SECONDS_MAX} seconds, and other requests wait: read and "
                "acknowledge the answer"
            )
        stalled_sender = self.capacity.find_stalled_sender()
        if stalled_sender is not None:
            self._peers[stalled_sender].end_slow_client(
                f"the client has sent less than {INCOMPLETE_FRAME_PROGRESS_BYTES} bytes of a large frame in "
                f"{INCOMPLETE_FRAME_SECONDS} seconds, and other connections wait for its memory: send each frame "
                "without a pause, or send smaller frames"
            )
        self._schedule_turn()
        self._check_timer = self._loop.call_later(CHECK_INTERVAL_S, self._periodic_checks)

    def _check_stuck_queues(self) -> Steps:
        stuck = yield from self._stuck_audit.check(self._engine, self._read_lanes)
        for queue in stuck:
            logger.error("queue is stuck: a message is ready and a consumer has credit", extra={"queue": queue.name})

    def _read_lanes(self) -> set[Lane]:
        return {read.lane for read in self._pager.pending if not isinstance(read, SideRead)}

    def _commit(self) -> None:
        """Commit the gathering batch if the store is idle: at once if a client waits for it, else a little later.

        A batch that no client waits for (an acknowledgement without a receipt) would otherwise cost a sync of its
        own, and delay the next batch that a client does wait for. Source: docs/decisions/0047-larger-batches-at-once.md
        """
        if self._committer.is_busy or self._has_failed:
            return
        if self._commit_state.is_batch_awaited:
            self._commit_now()
        elif self._lazy_commit is None and self._commit_state.has_batch:
            self._lazy_commit = self._loop.call_later(LAZY_COMMIT_SECONDS, self._commit_lazily)

    def _commit_lazily(self) -> None:
        self._lazy_commit = None
        if not self._committer.is_busy:
            self._commit_now()

    def _commit_now(self) -> None:
        """Commit the gathering batch. If it is durable at once, schedule a turn for its results."""
        if self._has_failed:
            return
        batch = self._engine.take_batch()
        if batch is not None:
            self._write(batch)
            self.capacity.on_batch_closed()

    def _write(self, batch: Batch) -> None:
        try:
            if self._committer.commit(batch):
                # The write took time.
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
        # A turn that is due follows at once. Another one beside it would schedule turns of its own, for ever.
        if not self._is_turn_due:
            self._turn()
        self.capacity.resume_waiting()
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _on_page_read(self, read: StoreRead, page: PageResult) -> None:
        self._tick()
        try:
            self._engine.store_results.on_page_read(read, page)
        except StoreError as error:
            self._on_failed(error)
            return
        self._schedule_turn()

    def _on_timers_read(self, read: TimerRead, page: TimersResult) -> None:
        self._engine.store_results.on_timers_read(read, page)
        self._schedule_turn()

    def _on_failed(self, error: TruenextError) -> None:
        # No retry: after a failed sync the disk may hold less than we believe.
        logger.critical("the store failed; the broker stops", extra={"reason": str(error)})
        self.fail(error)

    def fail(self, error: TruenextError) -> None:
        """Stop for good: no command is confirmed and no batch written any more; `failure` gets the error."""
        if not self._has_failed:
            self._has_failed = True
            self.failure.set_exception(error)
            # Retrieved, so that asyncio does not report the error again if `failure` is never awaited (a failed start).
            self.failure.exception()
        if self._idle is not None and not self._idle.done():
            self._idle.set_exception(error)

    # ---- What commands do that the engine does not ----

    def _answer_receipt_request(self, session: ConnectionState, confirm: ReceiptRequest) -> None:
        numbered = confirm.numbered_command
        receipt = Receipt(confirm.receipt)
        if numbered is not None:
            receipt.is_repeat, receipt.is_unknown = numbered.is_repeat, numbered.is_unknown
        self._commit_state.answer(session, receipt)

    def _control(self, session: ConnectionState, request: ControlRequest) -> None:
        self._engine.commands.administering.expect_reply(request.reply_to)
        self._control_only.note_activity(session)
        if request.verb in bulk.VERBS:
            # Raises at once if the request is invalid.
            self._engine.tasks.bulk.add(session, request)
            return
        if request.verb in control.QUEUE_CHANGES:
            changed = control.apply_queue_change(self._engine, request.verb, request.body)
            self._engine.commands.administering.reply(
                control.make_reply_message(request, changed, self._commit_state.now_ms)
            )
            return
        if request.verb == producer_request.VERB:
            known, batch = producer_request.make_producer_report(
                self._engine, request.body, partial(user_producer, self._user_name(session))
            )
            self._engine.commands.administering.reply(
                control.make_reply_message(request, known, self._commit_state.now_ms), batch
            )
            return
        if request.verb == connection_request.VERB:
            connection_request.check_body(request.body)
            self._control_requests.add(session, request, about=session)
            return
        control.check_verb(request.verb)
        found = self._users.get(session)
        sees_all = found is None or found.user.is_monitor
        self._control_requests.add(session, request, about=None if sees_all else session)

    def _start_answer(self, verb: str, about: ConnectionState | None) -> AnswerGenerator:
        if verb == connection_request.VERB:
            assert about is not None, "`_control` names the connection"
            found = self._users.get(about)
            return connection_request.make_connection_report(self._engine, about, found and found.user)
        may_see: Callable[[Queue], bool] | None = None
        if about is not None:
            found = self._users.get(about)
            may_see = _see_nothing if found is None else partial(access.may_see, found.user)
        context = control.QueryContext(
            self._engine,
            self._stuck_audit,
            self._pager,
            self.reload,
            self._client_info,
            self._store.disk_level_bytes,
            may_see,
        )
        return control.QUERIES[verb](context)

    def _client_info(self, session: ConnectionState) -> control.ClientInfo:
        return self._peers[session].client_info

    def _send_answer(self, session: ConnectionState, request: ControlRequest, body: bytes) -> bool:
        """Send the answer to a control request. Returns False if the connection has ended."""
        self._control_only.note_activity(session)
        self._engine.commands.administering.reply(control.make_reply_message(request, body, self._commit_state.now_ms))
        self._schedule_turn()
        return self._engine.commands.connecting.is_connected(session)

    def _subscribe(self, session: ConnectionState, subscribe: Subscribe) -> None:
        if self._parked and subscribe.durable_key:
            self._close_parked_users(subscribe.durable_key)
        self._engine.commands.subscribe(session, subscribe)
        if subscribe.durable_key:
            self._log_discarded()

    def _log_discarded(self) -> None:
        discarded = self._engine.commands.subscribing.take_discarded_subscription()
        if discarded is None:
            return
        client, _, name = discarded.durable_key.partition(",")
        logger.warning(
            "messages discarded: a durable subscription was subscribed to with another topic or another selector",
            extra={
                "client_id": client,
                "subscription": name,
                "messages": discarded.message_count,
                "topic": discarded.old_destination.topic,
                "selector": discarded.old_destination.selector,
                "new_topic": discarded.new_destination.topic,
                "new_selector": discarded.new_destination.selector,
            },
        )

    def _close_parked_users(self, name: str) -> None:
        """Close parked connections that use a durable subscription, so that another client can use it."""
        for session in self._engine.commands.subscribing.durable_subscribers(name):
            if session in self._parked:
                self._peers[session].close_for_takeover(is_exempt=False)

    def _unsubscribe(self, session: ConnectionState, unsubscribe: Unsubscribe) -> None:
        if self._parked and unsubscribe.durable_key:
            self._close_parked_users(unsubscribe.durable_key)
        consumer = session.consumers.get(unsubscribe.subscription)
        if consumer is not None:
            self._cancel_unsent(session, [consumer])
        self._engine.commands.unsubscribe(session, unsubscribe)

    def _disconnect(self, session: ConnectionState, disconnect: Disconnect) -> None:
        self._cancel_unsent(session, None)
        self._engine.commands.disconnect(session, is_clean=True, is_requested=True)
        self._takeovers.remove(session)
        if disconnect.forgotten_producers:
            self._engine.state.producers.forget(session, disconnect.forgotten_producers)

    def _log_in(self, session: ConnectionState, login: Login) -> None:
        found = None if self._logins is None else self._find_user(session, login)
        secret, former = "", None
        if login.is_truenext_client:
            secret, former = self._takeovers.take_over(session, login, "" if found is None else found.user.name)
        if former is not None:
            # This connection gets its place.
            self._peers[former].close_for_takeover(is_exempt=True)
        may_exceed = found is None or found.user.is_monitor or found.user.is_admin
        limit = self._peers[session].assign_place(may_exceed=may_exceed)
        if found is not None:
            self._users[session] = found
        elif login.user.strip() or login.passcode.strip():
            self._log_unchecked_login(session)
        if limit:
            self._control_only.add(session, limit)
        self._before_login.remove(session)
        self._engine.commands.log_in(session, login)
        self._peers[session].send_connected(login, secret, is_takeover=former is not None, is_checked=found is not None)

    def _request_credit(self, session: ConnectionState, credit: Credit) -> None:
        withdrawn = self._engine.commands.pull(session, credit)
        if withdrawn is not None:
            # At once: messages of the next pull request must come after this end.
            self._peers[session].end_pull_request(withdrawn)
            self._peers[session].flush()

    def _release(self, session: ConnectionState, request: Release) -> None:
        # Checked first: a refused request must not drop unsent messages.
        self._cancel_unsent(session, self._engine.commands.releasing.check_request(session, request))
        self._engine.commands.release(session, request)

    def _cancel_unsent(self, session: ConnectionState, consumers: Collection[BrokerConsumer] | None) -> None:
        peer = self._peers.get(session)
        if peer is None:
            return
        sent, subscribers = peer.cancel_unsent(consumers)
        for consumer, count in sent.items():
            self._engine.commands.acknowledging.acknowledge_first(consumer, count)
        for subscriber in subscribers:
            entry = None
            if isinstance(subscriber, BrokerConsumer) and subscriber.mode is AckMode.AUTO:
                entry = self._engine.commands.acknowledging.hold_partially_sent(subscriber)
            self._partially_sent.setdefault(session, deque()).append(entry)

    def _release_partially_sent(self, session: ConnectionState) -> None:
        """Release the partially sent messages of a connection, which ends."""
        for entry in self._partially_sent.pop(session, ()):
            self._settle(entry, is_sent=False)

    def _settle(self, entry: Entry | None, *, is_sent: bool) -> None:
        """Acknowledge or release a partially sent message of a consumer in auto mode."""
        if entry is not None:
            self._engine.commands.acknowledging.resolve_partially_sent(entry, is_sent=is_sent)
            self._schedule_turn()

    # ---- Users ----

    def _guard_actions(self) -> None:
        """Put the check of each command in front of its action. A command without a check is refused."""
        self._actions[Browse] = self._browse_as_user
        self._actions[Send] = self._send_as_user
        self._actions[ControlRequest] = self._control_as_user
        for command, action in self._actions.items():
            if command is not Login:
                check = access.COMMAND_CHECKS.get(command)
                self._actions[command] = self._guarded(check, action)
        checked_send, send_message, last_targets = self._actions[Send], self._engine.commands.send, self._last_targets

        def send_as_user(session: ConnectionState, send: Send) -> None:
            # Most go where the last one went, and equal addresses are one object. A producer's name must be the user's.
            destination = send.destination
            is_last = last_targets.get(session) is destination
            if is_last and send.producer is None and not send.has_reply_to:
                send_message(session, send)
            else:
                checked_send(session, send)
                if not is_last and not any(map(access.is_private, destination.parts or (destination,))):
                    last_targets[session] = destination

        self._actions[Send] = send_as_user

    def _guarded(
        self, check: access.Check | None, action: Callable[[ConnectionState, Any], None]
    ) -> Callable[[ConnectionState, Any], None]:
        users = self._users

        def checked_action(session: ConnectionState, command: Any) -> None:
            user = users[session].user
            try:
                if check is None:
                    raise access.ForbiddenError(user, type(command).__name__)
                check(user, session, command)
                action(session, command)
            except access.ForbiddenError as error:
                self._log_security(logging.WARNING, "request refused", session, user.name, reason=str(error))
                raise

        return action if check is access.check_nothing else checked_action

    def _user_name(self, session: ConnectionState) -> str:
        """Return the name of the connection's user; "" if the broker has no users."""
        found = self._users.get(session)
        return "" if found is None else found.user.name

    def _is_login_checked(self, session: ConnectionState, login: Login) -> bool:
        """Return whether a login may be executed; if not, the connection is resumed when its password was checked."""
        assert self._logins is not None, "there are users"
        if session not in self._checked_logins and not login.passcode:
            names = self._peers[session].certificate_names
            found = self._logins.users.find_by_certificate(names)
            if found is not None and login.user in ("", found[0].user.name):
                login.user, self._checked_logins[session] = found[0].user.name, found[1]
            elif names:
                self._log_failed_login(session, login, WRONG_CERTIFICATE)
                raise RemoteProtocolError(WRONG_CERTIFICATE, Code.LOGIN)
        if session not in self._checked_logins:
            on_checked = partial(self._on_login_checked, session)
            try:
                credential = self._logins.check(login, self._address(session), on_checked)
            except RemoteProtocolError as error:
                self._log_failed_login(session, login, str(error))
                raise
            if not credential:
                return False
            self._checked_logins[session] = credential
        return True

    def _on_login_checked(self, session: ConnectionState, credential: str) -> None:
        peer = self._peers.get(session)
        if peer is not None and self._engine.commands.connecting.is_connected(session):
            self._checked_logins[session] = credential
            peer.resume_reading()

    def _find_user(self, session: ConnectionState, login: Login) -> SessionUser:
        assert self._logins is not None, "there are users"
        credential = self._checked_logins.pop(session)
        entry = self._logins.users.get(login.user)
        if not credential or entry is None or credential not in entry.credentials:
            self._log_failed_login(session, login, WRONG_LOGIN)
            raise RemoteProtocolError(WRONG_LOGIN, Code.LOGIN)
        number = entry.credentials.index(credential) + 1
        self._log_security(logging.INFO, "login", session, login.user, credential=number)
        return SessionUser(entry.user, credential)

    def _log_failed_login(self, session: ConnectionState, login: Login, reason: str) -> None:
        assert self._logins is not None, "there are users"
        # A text that is no user's name may be a password.
        user = login.user if login.user in self._logins.users or not login.user else "unknown"
        self._log_security(logging.WARNING, "login failed", session, user, reason=reason)

    def _log_security(self, level: int, text: str, session: ConnectionState, user: str, **fields: object) -> None:
        self._security_log.log(level, text, address=self._address(session), user=user, **fields)

    def _address(self, session: ConnectionState) -> str:
        """Return the address of a connection's client, without the port."""
        return self._client_info(session).address.rpartition(":")[0]

    def log_failed_handshake(self, session: ConnectionState, reason: str) -> None:
        """Log a client that has failed to begin TLS, as without the certificate that it needs."""
        self._log_security(logging.WARNING, "TLS failed", session, "", reason=reason)

    def logs_refusal(self, code: Code) -> bool:
        """Return whether the security log has the refusals with this code."""
        return self._logins is not None and code in (Code.LOGIN, Code.BUSY, Code.FORBIDDEN)

    def _control_as_user(self, session: ConnectionState, request: ControlRequest) -> None:
        self._control(session, request)
        if request.verb not in (connection_request.VERB, producer_request.VERB):
            # Clients ask these by themselves, and about themselves.
            user, queue = self._user_name(session), access.queue_of(request)
            self._log_security(logging.INFO, "control request", session, user, verb=request.verb, queue=queue)

    def _send_as_user(self, session: ConnectionState, send: Send) -> None:
        if send.has_reply_to or send.destination.session or send.destination.parts:
            assert self._reply_rights is not None, "there are users"
            self._reply_rights.check(self._users[session].user, session, send)
        self._engine.commands.send(session, send)

    def _browse_as_user(self, session: ConnectionState, browse: Browse) -> None:
        if browse.destination.kind is DestinationKind.DURABLE:
            queue = self._engine.queues.require_durable(browse.destination.name)
            access.check_browsed_subscription(self._users[session].user, queue)
        self._engine.commands.browse(session, browse)

    def replace_users(self, users: Users) -> None:
        """Use other users from now on. Connections end if their user is gone or may do less than before, or if their
        password does not hold any more."""
        assert self._logins is not None and self._reply_rights is not None, "the broker was started with users"
        self._logins.replace_users(users)
        self._last_targets.clear()
        self._ineffective_headers = {(user, header) for user, header in self._ineffective_headers if user in users}
        self._reply_rights.keep_users(users)
        for session, (user, credential) in list(self._users.items()):
            entry = users.get(user.name)
            if entry is None:
                reason = f"user {user.name!r} was removed"
            elif credential not in entry.credentials:
                kind = "certificate name" if is_certificate_name(credential) else "password"
                reason = f"the {kind} that this connection logged in with is not one of user {user.name!r} any more"
            elif not entry.user.has_all_of(user):
                reason = f"user {user.name!r} has fewer grants than before"
            else:
                self._users[session] = SessionUser(entry.user, credential)
                continue
            self._log_security(logging.WARNING, "connection ended", session, user.name, reason=reason)
            end = partial(self._peers[session].end_user, reason)
            if self._control_requests.pending_count(session):
                # Let a `reload` that ends its own connection be answered: the turn that sends the answer is scheduled
                # behind the first call. Until then the user may do nothing.
                self._users[session] = SessionUser(User(user.name, {}), credential)
                self._loop.call_soon(self._loop.call_soon, end)
            else:
                end()

    def _log_unchecked_login(self, session: ConnectionState) -> None:
        """Log that logins are not checked; only once, as many clients send a login each time."""
        if not self._has_logged_login:
            self._has_logged_login = True
            client = self._client_info(session).address
            logger.warning("login and passcode are not checked: there are no users", extra={"client": client})


def _see_nothing(_: Queue) -> bool:
    """Hide all queues from a connection that has ended."""
    return False


def _raise_invalid(_: ConnectionState, invalid: InvalidFrame) -> None:
    raise RemoteProtocolError(invalid.reason, invalid.code)
