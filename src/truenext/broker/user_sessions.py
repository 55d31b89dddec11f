"""User sessions: as which user each connection is logged in, and what that user may do.

    login      the password is checked on a thread, the connection waits (logins.py); then it has a user
    command    `guard` puts a check (access.py) before each action; a refusal is logged
    reload     connections end whose user may do less than before

In a broker without users every command is allowed, and no connection has a user.
"""

import logging
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

from truenext.broker import access, connection_request, history_request, producer_request
from truenext.broker.connection_ids import ConnectionIds
from truenext.broker.logins import WRONG_CERTIFICATE, WRONG_LOGIN, Logins
from truenext.broker.peer import Peer
from truenext.broker.reply_rights import ReplyRights
from truenext.broker.security_log import SecurityLog
from truenext.broker.users import Users, is_certificate_name
from truenext.engine.dispatch.plain import Deliveries
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Browse, Command, ControlRequest, Login, Send, SendRun
from truenext.model.destination import Destination, DestinationKind
from truenext.model.grants import User
from truenext.model.limits import BROWSERS_MAX

Action = Callable[[ConnectionState, Any], None]
"""Executes a command of a connection."""

ID_REFUSAL_SECONDS = 60.0
"""Seconds after a logged login with a connection id of another user during which further ones of this user are not
logged."""


_UNTRUSTED = ("alert certificate unknown", "alert unknown ca", "alert bad certificate")
"""Ends of reasons why a TLS handshake has failed: alerts of Java, of others, and of others about the host name."""


class SessionUser(NamedTuple):
    """User of a connection, and the credential with which the connection has logged in."""

    user: User
    credential: str


class UserSessions:
    def __init__(
        self,
        users: Users | None,
        engine: Engine,
        peers: Mapping[ConnectionState, Peer],
        loop: AbstractEventLoop,
        *,
        has_pending_answer: Callable[[ConnectionState], bool],
    ) -> None:
        """`users` is None in a broker without users. `has_pending_answer` tells whether a connection waits for the
        answer to a control request."""
        self._engine = engine
        self._peers = peers
        self._loop = loop
        self._has_pending_answer = has_pending_answer
        self._users: dict[ConnectionState, SessionUser] = {}
        """User of each connection that has logged in; empty if the broker has no users."""
        self._last_targets: dict[ConnectionState, Destination] = {}
        """Destination of the last SEND of each connection, if its user has the right to send there. Destinations with
        temporary queues or topics are left out, because each SEND to these is checked."""
        self._checked_logins: dict[ConnectionState, str] = {}
        """Credential of each login that was checked and is not executed yet; "" if the login is wrong."""
        self._followers: set[ConnectionState] = set()
        """Open connections whose first request for a piece of the history was logged."""
        self._failed_logins: set[ConnectionState] = set()
        """Open connections whose failed login was logged."""
        self._logins = None if users is None else Logins(users, loop)
        self._reply_rights = None if users is None else ReplyRights(engine, self.name_of)
        self._ids = ConnectionIds()
        self._id_refusals: dict[str, float] = {}
        """Time from which on the next login with a connection id of another user is logged, by user."""
        self._log = SecurityLog(loop.time, lambda: engine.state.commit_state.now_ms)

    def user_of(self, session: ConnectionState) -> User | None:
        """Return the user of a connection; None before its login, after its end, and in a broker without users."""
        found = self._users.get(session)
        return None if found is None else found.user

    def name_of(self, session: ConnectionState) -> str:
        """Return the name of the connection's user; "" before its login, after its end, and in a broker without
        users."""
        found = self._users.get(session)
        return "" if found is None else found.user.name

    def sees_all(self, session: ConnectionState) -> bool:
        """Return whether answers to control requests show everything to a connection: its user has the right `monitor`,
        or the broker has no users."""
        user = self.user_of(session)
        return self._logins is None or (user is not None and user.is_monitor)

    def is_admin(self, session: ConnectionState) -> bool:
        """Return whether a connection may do all that the right `admin` allows: its user has this right, or the broker
        has no users."""
        user = self.user_of(session)
        return self._logins is None or (user is not None and user.is_admin)

    def remove(self, session: ConnectionState) -> None:
        """Forget a closed connection, and the rights to reply to its temporary queues and topics."""
        self._users.pop(session, None)
        self._followers.discard(session)
        self._last_targets.pop(session, None)
        self._checked_logins.pop(session, None)
        self._failed_logins.discard(session)
        if self._reply_rights is not None:
            self._reply_rights.connection_closed(session)

    def close(self) -> None:
        """End the thread that checks passwords."""
        if self._logins is not None:
            self._logins.close()

    # ---- Login ----

    def is_login_checked(self, session: ConnectionState, login: Login) -> bool:
        """Return whether a login may be executed now. If not, the password is checked on a thread. Then the connection
        is resumed, and executes the login again.

        Raises: RemoteProtocolError if the certificate belongs to no user, the login is empty, or too many logins failed
        or wait
        """
        if self._logins is None:
            return True
        if session not in self._checked_logins and not login.passcode:
            names = self._peers[session].certificate_names
            found = self._logins.users.find_by_certificate(names)
            if found is not None and login.user in ("", found[0].user.name):
                login.user, self._checked_logins[session] = found[0].user.name, found[1]
            elif names:
                self._log_failed_login(session, login, WRONG_CERTIFICATE)
                raise RemoteProtocolError(WRONG_CERTIFICATE, Code.LOGIN)
        if session not in self._checked_logins:
            if not (login.user or login.passcode):
                self._refuse_empty_login(session)
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

    def _refuse_empty_login(self, session: ConnectionState) -> NoReturn:
        """Refuse a login with neither user nor password. It guesses nothing, so it costs no hash, and counts as no
        failed login: a console learns so whether the broker has users.

        Raises: RemoteProtocolError
        """
        self._failed_logins.add(session)
        address = self._address(session)
        self._log.log_only(logging.WARNING, "login missing", address=address, user="", reason=WRONG_LOGIN)
        raise RemoteProtocolError(WRONG_LOGIN, Code.LOGIN)

    def _on_login_checked(self, session: ConnectionState, credential: str) -> None:
        peer = self._peers.get(session)
        if peer is not None and self._engine.commands.connecting.is_connected(session):
            self._checked_logins[session] = credential
            peer.resume_reading()

    def find_user(self, session: ConnectionState, login: Login) -> SessionUser | None:
        """Return the user of a checked login; None if the broker has no users.

        Raises: RemoteProtocolError if the login is wrong
        """
        if self._logins is None:
            return None
        credential = self._checked_logins.pop(session)
        entry = self._logins.users.get(login.user)
        if not credential or entry is None or credential not in entry.credentials:
            self._log_failed_login(session, login, WRONG_LOGIN)
            raise RemoteProtocolError(WRONG_LOGIN, Code.LOGIN)
        number = entry.credentials.index(credential) + 1
        self._log_event(logging.INFO, "login", session, login.user, credential=number)
        return SessionUser(entry.user, credential)

    def log_in(self, session: ConnectionState, user: SessionUser) -> None:
        """Record as which user a connection is logged in. From now on the connection may do what this user may do."""
        self._users[session] = user

    def note_lost(self, session: ConnectionState) -> None:
        """Keep the id of a JMS client's lost connection for its user."""
        name = self.name_of(session)
        if name and session.is_jms_client:
            self._ids.keep(session.id, name)

    def check_connection_id(self, session: ConnectionState, login: Login, former: ConnectionState | None) -> None:
        """Check that the connection id of a checked login is no other user's. `former` is the open connection with this
        id; None if there is none.

        A client on `failover:` tries again and again, so each user has one line a minute in the log.

        Raises: RemoteProtocolError if the id is another user's
        """
        if self._logins is None:
            return
        owner = self._ids.owner_of(login.connection_id) if former is None else self.name_of(former)
        if owner in ("", login.user):
            return
        reason = f"the connection id {login.connection_id} is another user's: make a new connection"
        now = self._loop.time()
        if now >= self._id_refusals.get(login.user, now):
            self._id_refusals[login.user] = now + ID_REFUSAL_SECONDS
            self._log_event(logging.WARNING, "login failed", session, login.user, reason=reason)
        self._failed_logins.add(session)
        raise RemoteProtocolError(reason, Code.IN_USE)

    def _log_failed_login(self, session: ConnectionState, login: Login, reason: str) -> None:
        assert self._logins is not None, "there are users"
        # A text that is no user's name may be a password.
        user = login.user if login.user in self._logins.users or not login.user else "unknown"
        self._log_event(logging.WARNING, "login failed", session, user, reason=reason)
        self._failed_logins.add(session)

    # ---- Commands ----

    def guard(self, actions: dict[type[Any], Action]) -> None:
        """Put the check of each command before its action, in a broker with users. A command without a check is
        refused.

        A SEND passes these steps:

        1. `send_as_user`: a SEND to the destination of the connection's last SEND, which was checked then, goes to the
           engine at once, if it names no producer and no other destination.
        2. `checked_action`: `access.COMMAND_CHECKS[Send]` requires the right to send to the queue or topic, logs a
           refusal, and makes the producer's name one of the user.
        3. `_send`: `ReplyRights.check` requires the right to reply, for temporary queues and topics of other users.
        4. `commands.send` of the engine.
        """
        if self._logins is None:
            return
        actions[Browse] = self._browse
        actions[Send] = self._send
        for command, action in actions.items():
            if command not in (Login, SendRun):
                actions[command] = self._guarded(access.COMMAND_CHECKS.get(command), action)
        checked_send, send_message, last_targets = actions[Send], self._engine.commands.send, self._last_targets
        send_run = self._engine.commands.send_run

        def send_as_user(session: ConnectionState, send: Send) -> None:
            # Most SENDs go to the destination of the last SEND, and equal addresses are one object. A SEND that names a
            # producer is checked, because the check makes the name one of the user.
            destination = send.destination
            is_last = last_targets.get(session) is destination
            if is_last and send.producer is None and not send.names_destinations:
                send_message(session, send)
            else:
                checked_send(session, send)
                if not is_last and not any(map(access.is_private, destination.parts or (destination,))):
                    last_targets[session] = destination

        def send_run_as_user(session: ConnectionState, run: SendRun) -> None:
            # If the run is not executed, its SENDs follow as single commands, and are checked.
            if last_targets.get(session) is run.destination:
                send_run(session, run)

        actions[Send] = send_as_user
        actions[SendRun] = send_run_as_user

    def _guarded(self, check: access.Check | None, action: Action) -> Action:
        users = self._users

        def checked_action(session: ConnectionState, command: Any) -> None:
            user = users[session].user
            try:
                if check is None:
                    raise access.ForbiddenError(user, type(command).__name__)
                check(user, session, command)
                action(session, command)
            except access.ForbiddenError as error:
                self._log_event(logging.WARNING, "request refused", session, user.name, reason=str(error))
                raise

        return action if check is access.check_nothing else checked_action

    def note_control_request(self, session: ConnectionState, request: ControlRequest) -> None:
        """Log a control request that was executed, and remember one that may change something. Of a connection that
        follows the history only the first such request is logged: it makes several in a second."""
        if request.verb == history_request.VERB:
            if session in self._followers:
                return
            self._followers.add(session)
        if not (request.verb in (connection_request.VERB, producer_request.VERB) or access.is_poll(request)):
            # The first two are requests of client libraries, made without their programs, about their own connections.
            user, target = self.name_of(session), access.target_of(request)
            log = self._log.log_only if access.only_reads(request) else self._log.log
            address = self._address(session)
            log(logging.INFO, "control request", address=address, user=user, verb=request.verb, **target)

    def recent_events(self) -> bytes:
        """Report the last refusals, failed logins and requested changes: a list of SecurityEvent as JSON."""
        return self._log.recent.report()

    def _send(self, session: ConnectionState, send: Send) -> None:
        if send.names_destinations or send.destination.session or send.destination.parts:
            assert self._reply_rights is not None, "there are users"
            self._reply_rights.check(self._users[session].user, session, send)
        self._engine.commands.send(session, send)

    def _browse(self, session: ConnectionState, browse: Browse) -> None:
        if browse.destination.kind is DestinationKind.DURABLE:
            queue = self._engine.queues.require_durable(browse.destination.name)
            access.check_browsed_subscription(self._users[session].user, queue)
        user = self.name_of(session)
        active = self._engine.state.clients.active_browsers
        if sum(self.name_of(browser.session) == user for browser in active) >= BROWSERS_MAX // 2:
            raise RemoteProtocolError(
                f"user {user!r} has half of the {BROWSERS_MAX} browsers that there may be at once; try again when "
                f"some of them have ended",
                Code.LIMIT,
            )
        self._engine.commands.browse(session, browse)

    def is_forbidden(self, session: ConnectionState, command: Command) -> bool:
        """Return whether a command is a SEND that will be refused, because its user lacks the right to send there."""
        found = self._users.get(session)
        if found is None or not isinstance(command, Send):
            return False
        try:
            access.require_send_rights(found.user, command)
        except access.ForbiddenError:
            return True
        return False

    def note_dispatched(self, deliveries: Deliveries) -> None:
        """Give users the right to reply to the temporary queues and topics that the reply-to of their new messages
        names."""
        if self._reply_rights is not None and self._reply_rights.has_callers:
            self._reply_rights.note_dispatched(deliveries)

    # ---- Reload ----

    def replace(self, users: Users) -> None:
        """Use the users of a reloaded file from now on. A connection ends if its user no longer exists or has lost a
        right, or if the password or certificate of its login is no longer valid for the user."""
        assert self._logins is not None and self._reply_rights is not None, "the broker was started with users"
        self._logins.replace_users(users)
        self._last_targets.clear()
        self._reply_rights.keep_users(users)
        self._ids.keep_users(users)
        self._id_refusals = {user: time for user, time in self._id_refusals.items() if user in users}
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
            self._log_event(logging.WARNING, "connection ended", session, user.name, reason=reason)
            end = partial(self._peers[session].end_exempt, reason, Code.FORBIDDEN)
            if self._has_pending_answer(session):
                # A `reload` that ends its own connection is answered first: the turn that sends the answer is scheduled
                # after the first `call_soon`, and before the second. Until the end the user may do nothing.
                self._users[session] = SessionUser(User(user.name, {}), credential)
                self._loop.call_soon(self._loop.call_soon, end)
            else:
                end()

    # ---- Security log ----

    def log_failed_handshake(self, session: ConnectionState, reason: str) -> None:
        """Log a client whose TLS handshake has failed, for example because the client has no certificate."""
        if reason.endswith(_UNTRUSTED):
            reason += ": the client does not trust the broker's certificate, or connects to a name that is not in it"
        self._log_event(logging.WARNING, "TLS failed", session, "", reason=reason)

    def has_logged_refusal(self, session: ConnectionState, code: Code) -> bool:
        """Return whether the security log has this refusal, so that no other log needs it: a failed login, or, after
        the login, a lack of rights."""
        return session in self._failed_logins or (code is Code.FORBIDDEN and session in self._users)

    @property
    def event_totals(self) -> Mapping[str, int]:
        """Number of the events of the security log by their text, also of those that are not logged."""
        return self._log.totals

    def flush_log(self) -> None:
        """Log how many events of earlier seconds were only counted; called once a second."""
        self._log.flush()

    def _log_event(self, level: int, text: str, session: ConnectionState, user: str, **fields: object) -> None:
        self._log.log(level, text, address=self._address(session), user=user, **fields)

    def _address(self, session: ConnectionState) -> str:
        """Return the address of a connection's client, without the port."""
        return self._peers[session].client_info.address.rpartition(":")[0]
