"""Execution: executes the commands that were read from a connection, one after the other, until one must wait.

not logged in            the login waits until its password is checked
disk space is short      a SEND of a connection that only sends waits; it does so during a drain, too
many selectors           a SEND to a topic waits until its queues are found
5 ms are over            the remaining commands wait for a turn, so that other connections are served
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from truenext.broker.capacity import Capacity
from truenext.broker.client_warnings import ClientWarnings, warn_of_discarded_messages
from truenext.broker.connection_ends import ConnectionEnds
from truenext.broker.connection_list import ConnectionList
from truenext.broker.control_commands import ControlCommands
from truenext.broker.drain import Drain
from truenext.broker.event_loop import SlicedWork, Steps
from truenext.broker.peer import Peer, PendingCommand, WaitsFor
from truenext.broker.user_sessions import Action, UserSessions
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, RemoteProtocolError, StoreError
from truenext.model.answers import Receipt
from truenext.model.commands import (
    Abort,
    Ack,
    AckRun,
    Begin,
    Browse,
    Close,
    Command,
    Commit,
    ControlRequest,
    CreateTemporary,
    Credit,
    Disconnect,
    ForgetProducers,
    InvalidFrame,
    Login,
    Nack,
    OpenProducer,
    Pause,
    ReceiptRequest,
    Release,
    RemoveTemporary,
    Send,
    SendRun,
    Started,
    Subscribe,
    Unsubscribe,
    Wake,
)
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import EXECUTE_SLICE_US, REFUSALS_PER_PASS_MAX, ROUTING_SLICE_NS
from truenext.store.store import Store

_WATCHED_COMMANDS = (
    *(Nack, Subscribe, Browse, Unsubscribe, Close, Commit, Abort, Release, Disconnect, RemoveTemporary, ControlRequest),
)
"""Commands each of which may take milliseconds. The clock is read after each of these commands."""

FIRST_COMMANDS = 4
COMMANDS_PER_READING = 20
"""Number of commands between two readings of the clock, after the first reading, which follows FIRST_COMMANDS commands.
If these first commands have taken FIRST_COMMANDS_US, the clock is read after each command: a command with very many
headers takes 0.7 ms."""
FIRST_COMMANDS_US = 500


class Execution:
    """Executes commands. This class needs most other parts of the broker, because each kind of command concerns another
    part."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        peers: Mapping[ConnectionState, Peer],
        capacity: Capacity,
        users: UserSessions,
        ends: ConnectionEnds,
        control: ControlCommands,
        drain: Drain,
        connections: ConnectionList,
        warnings: ClientWarnings,
        *,
        begin_read: Callable[[], object],
        on_failed: Callable[[StoreError], object],
        monotonic_ns: Callable[[], int],
    ) -> None:
        """`begin_read` reads the clock and schedules a turn. `on_failed` is called if the store cannot be read."""
        self._engine = engine
        self._commit_state = engine.state.commit_state
        self._store = store
        self._peers = peers
        self._capacity = capacity
        self._users = users
        self._ends = ends
        self._control = control
        self._drain = drain
        self._connections = connections
        self._warnings = warnings
        self._begin_read = begin_read
        self._on_failed = on_failed
        self._monotonic_ns = monotonic_ns
        self._before_login: set[ConnectionState] = set()
        self.routing = SlicedWork(monotonic_ns, ROUTING_SLICE_NS)
        """Searches for the queues of messages. Each connection waits for the search of its own message."""
        # Bound methods: one look-up finds the action of a command.
        self.actions: dict[type[Any], Action] = {
            Login: self._log_in,
            InvalidFrame: _raise_invalid,
            Send: engine.commands.send,
            SendRun: engine.commands.send_run,
            OpenProducer: _do_nothing,
            Pause: _do_nothing,
            Ack: engine.commands.acknowledge,
            AckRun: engine.commands.acknowledge_run,
            Nack: engine.commands.nack,
            ReceiptRequest: self._answer_receipt_request,
            Subscribe: self._subscribe,
            Browse: engine.commands.browse,
            Unsubscribe: ends.unsubscribe,
            Close: ends.close_subscriptions,
            Begin: engine.commands.begin,
            Commit: engine.commands.commit,
            Abort: engine.commands.abort,
            Started: engine.commands.mark_started,
            Credit: self._request_credit,
            Wake: engine.commands.wake,
            Release: ends.release,
            Disconnect: ends.disconnect,
            ForgetProducers: self._forget_producers,
            CreateTemporary: engine.commands.create_temporary,
            RemoveTemporary: engine.commands.remove_temporary,
            ControlRequest: control.execute,
        }
        for command in _WATCHED_COMMANDS:
            self.actions[command] = self._watched(self.actions[command])
        users.guard(self.actions)

    def connect(self, session: ConnectionState) -> None:
        """Add a connection, whose first command is a login."""
        self._before_login.add(session)

    def remove(self, session: ConnectionState) -> None:
        """Forget a closed connection."""
        self._before_login.discard(session)

    def execute(self, session: ConnectionState, commands: Iterable[Command]) -> PendingCommand | None:
        """Execute the commands of a connection one after the other.

        `commands` is lazy: the bytes of the connection are decoded while commands are taken. Returns None if all
        commands were executed. If a command must wait, returns that point in `commands`, with the reason.

        Raises: RemoteProtocolError if a command is refused and the connection must end; earlier commands stay executed.
        """
        if self._commit_state.has_capacity:
            return self._execute(session, commands)
        capacity = self._capacity
        before = capacity.added_bytes
        try:
            return self._execute(session, commands)
        finally:
            capacity.count_added(session, capacity.added_bytes - before)

    def _execute(self, session: ConnectionState, commands: Iterable[Command]) -> PendingCommand | None:
        engine = self._engine
        self._begin_read()
        commit_state = self._commit_state
        is_disk_short = commit_state.disk_level is not DiskLevel.PLENTY
        needs_login = session in self._before_login
        actions = self.actions
        until_us = commit_state.now_us + EXECUTE_SLICE_US
        commit_state.is_read_long = engine.queues.topics.may_take_long
        control_only = self._control.only
        if needs_login or (control_only.idle_since and session in control_only.idle_since):
            commands = control_only.check_commands(session, commands)
        refused = 0
        interval = count = FIRST_COMMANDS
        for command in commands:
            try:
                if needs_login:
                    needs_login = False
                    if isinstance(command, Login) and not self._users.is_login_checked(session, command):
                        return PendingCommand(command, WaitsFor.LOGIN)
                if is_disk_short:
                    if engine.commands.sending.waits_while_disk_short(session, command):
                        return PendingCommand(command, WaitsFor.DISK)
                    self._count_contents(session, command)
                if commit_state.is_read_long and self._is_routed_ahead(session, command):
                    return PendingCommand(command, WaitsFor.ROUTES)
                actions[type(command)](session, command)
            except RemoteProtocolError as error:
                if not session.stays_after_refusal or isinstance(command, Login):
                    raise
                self._refuse_command(session, command, error)
                refused += 1
                if refused == REFUSALS_PER_PASS_MAX:
                    # One read may hold very many refused frames, of four bytes each.
                    return PendingCommand(None, WaitsFor.OTHERS)
            count -= 1
            if count and not commit_state.is_read_long:
                continue
            # One read may hold thousands of small frames, or commands that take long.
            now_us = self._monotonic_ns() // 1000
            if now_us >= until_us:
                return PendingCommand(None, WaitsFor.OTHERS)
            if commit_state.is_read_long:
                # The next command decides for itself.
                commit_state.is_read_long = engine.queues.topics.may_take_long
            if not count:
                if interval == FIRST_COMMANDS:
                    is_slow = now_us >= until_us - EXECUTE_SLICE_US + FIRST_COMMANDS_US
                    interval = 1 if is_slow else COMMANDS_PER_READING
                count = interval
        return None

    def _watched(self, action: Action) -> Action:
        """Return the action, with a reading of the clock after it, because the action may take long."""

        def watched_action(session: ConnectionState, command: Any) -> None:
            self._commit_state.is_read_long = True
            action(session, command)

        return watched_action

    def _is_routed_ahead(self, session: ConnectionState, command: Command) -> bool:
        """Return whether a command must wait because finding the queues of its messages takes long. If so, the search
        is begun, in slices."""
        steps = self._engine.commands.sending.find_queues_ahead(session, command)
        if steps is None or self._users.is_forbidden(session, command):
            return False
        self.routing.add(self._find_queues(session, steps))
        return True

    def find_some_queues(self) -> None:
        """Do a slice of the pending searches for queues of messages."""
        self.routing.run_slice()
        # Each connection has its turn, however long its messages take.
        self.routing.pending.rotate(-1)

    def _find_queues(self, session: ConnectionState, steps: Iterator[None]) -> Steps:
        for _ in steps:
            yield
            if not self._engine.commands.connecting.is_connected(session):
                return
        self._capacity.read_turns.wait(session)

    def _count_contents(self, session: ConnectionState, command: Command) -> None:
        """Give the engine the store's number of references to each content on which the command depends. Such a command
        is a SEND in a transaction that must free as much disk space as it needs."""
        contents = self._engine.commands.sending.contents_to_count(session, command)
        if contents:
            try:
                self._engine.commands.sending.count_contents(session, command, self._store.content_references(contents))
            except StoreError as error:
                self._on_failed(error)

    def _refuse_command(self, session: ConnectionState, command: Command, error: RemoteProtocolError) -> None:
        """Send an ERROR, and keep the connection open. A transaction that contains the command can only be aborted from
        now on."""
        name = getattr(command, "transaction", None)
        if name is not None:
            self._engine.commands.transactions.mark_rollback_only(session, name, error)
        self._peers[session].send_error(error)

    # ---- Commands ----

    def _log_in(self, session: ConnectionState, login: Login) -> None:
        peer = self._peers[session]
        found = self._users.find_user(session, login)
        secret, is_takeover = "", False
        if login.is_truenext_client:
            # This connection gets the place of the one that it takes over.
            secret, is_takeover = self._ends.take_over(session, login, "" if found is None else found.user.name)
        if login.connection_id:
            is_takeover = self._end_former(session, login)
        may_exceed = found is None or found.user.is_monitor or found.user.is_admin
        restriction = self._drain.restriction(peer.client_info.client_id, is_takeover=is_takeover)
        limit = peer.assign_place(may_exceed=may_exceed, restriction=restriction)
        if found is not None:
            self._users.log_in(session, found)
        elif login.user.strip() or login.passcode.strip():
            self._warnings.warn_of_unchecked_login(peer.client_info.address)
        if limit is not None:
            self._control.only.add(session, limit)
            if limit.code is Code.DRAINING:
                # The takeover of this connection would be free of the restriction.
                self._ends.forget_secret(session)
        self._before_login.remove(session)
        self._engine.commands.log_in(session, login)
        self._connections.add(session, self._commit_state.now_ms)
        peer.send_connected(login, secret, is_takeover=is_takeover, is_checked=found is not None)

    def _end_former(self, session: ConnectionState, login: Login) -> bool:
        """End an earlier connection of the same id and user: its client has lost it, and the broker does not know yet.
        Returns whether there was one.

        Raises: RemoteProtocolError if the id is another user's
        """
        former = self._engine.state.clients.sessions.get(login.connection_id)
        self._users.check_connection_id(session, login, former)
        if former is not None:
            self._peers[former].close_for_takeover(is_exempt=False)
        return former is not None

    def _subscribe(self, session: ConnectionState, subscribe: Subscribe) -> None:
        self._ends.close_parked_users(subscribe.durable_key)
        self._engine.commands.subscribe(session, subscribe)
        if subscribe.durable_key:
            warn_of_discarded_messages(self._engine)

    def _request_credit(self, session: ConnectionState, credit: Credit) -> None:
        withdrawn = self._engine.commands.pull(session, credit)
        if withdrawn is not None:
            # At once: messages of the next pull request must come after this end.
            self._peers[session].end_pull_request(withdrawn)
            self._peers[session].flush()

    def _forget_producers(self, session: ConnectionState, command: ForgetProducers) -> None:
        self._engine.state.producers_of(session).forget(session, command.names)

    def _answer_receipt_request(self, session: ConnectionState, confirm: ReceiptRequest) -> None:
        numbered = confirm.numbered_command
        receipt = Receipt(confirm.receipt)
        if numbered is not None:
            receipt.is_repeat, receipt.is_unknown = numbered.is_repeat, numbered.is_unknown
        self._commit_state.answer(session, receipt)


def _raise_invalid(_: ConnectionState, invalid: InvalidFrame) -> None:
    raise RemoteProtocolError(invalid.reason, invalid.code)


def _do_nothing(_: ConnectionState, command: Command) -> None:
    pass
