"""Server connection: one client's connection, as the broker (`Peer`) and the listener use it.

    socket ──▶ Input ──▶ Broker.execute
    socket ◀── Output ◀── turn of the broker
               Ending: how the connection ends, and its timers (life.py has the states)

A `WireSession` knows the client's protocol. This file has the login, the heart-beats, and the limits of idle
connections.
"""

import logging
import socket
from asyncio import AbstractEventLoop
from collections.abc import Callable, Collection
from functools import partial

from truenext.broker.broker import Broker
from truenext.broker.control import ClientInfo
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Login
from truenext.model.limits import CAPACITY_CHECK_INTERVAL_S, CONTROL_ONLY_IDLE_S
from truenext.model.restriction import Restriction
from truenext.server.client_socket import ClientSocket
from truenext.server.ending import LOGIN_TIMER, Ending, make_error_answer
from truenext.server.input import Input
from truenext.server.life import OPEN, WITHOUT_SOCKET
from truenext.server.output import Output
from truenext.tls import TlsSocket
from truenext.wire.session import SessionFactory
from truenext.wire.stomp.server import StompSession

logger = logging.getLogger(__name__)


def _warn_of_ineffective_header(
    broker: Broker, session: ConnectionState, client: str, frame: str, header: str, instead: str
) -> None:
    # No method: a bound method would make the connection refer to itself, so that it is freed late.
    broker.warnings.warn_of_ineffective_header(client, broker.users.name_of(session), frame, header, instead)


class ServerConnection:
    def __init__(
        self,
        sock: socket.socket,
        peer_name: str,
        broker: Broker,
        loop: AbstractEventLoop,
        *,
        identity: str,
        server_name: str,
        on_closed: Callable[["ServerConnection"], None],
        on_login: Callable[["ServerConnection", bool, Restriction | None], Restriction | None] = lambda *_: None,
        tls: TlsSocket | None = None,
        make_session: SessionFactory = StompSession,
    ) -> None:
        """`on_login` does the work of `Peer.assign_place`. With `tls`, all bytes pass through the TLS object.
        `make_session`, `identity` and `server_name`: see `SessionFactory`.
        """
        self._name = peer_name
        self._broker = broker
        self._loop = loop
        self._on_login = on_login
        self._session = broker.connect(self)
        self._restriction: Restriction | None = None
        """Reason for which this connection may only send control requests: a limit of connections, or a drain; None if
        it may do everything."""
        self._is_logged_in = False
        self._wire = make_session(
            session_id=self._session.id,
            identity=identity,
            server_name=server_name,
            on_ineffective_header=partial(_warn_of_ineffective_header, broker, self._session, peer_name),
        )
        replies = self._wire.replies
        self._socket = ClientSocket(sock, tls, loop)
        self._ending = Ending(self._session, self._wire, broker, self._socket, loop, peer_name)
        self._life = self._ending.life
        self._output = Output(self._session, replies, broker, self._socket, loop, self._ending)
        self._input = Input(self._session, self._wire, broker, self._socket, loop, self._output, self._ending)
        self._on_closed = on_closed
        self._ending.attach(self._input, self._output, on_closed=self._note_closed, on_outgoing=self._send_outgoing)
        self._wire.attach(self._send_outgoing_at_once, self._on_too_large)
        # Bound here, so that one look-up finds them.
        self.answer = self._output.answer
        self.deliver = self._output.deliver
        self.deliver_browse_slice = self._output.deliver_browse_slice
        self.end_pull_request = self._output.end_pull_request
        self.flush = self._output.flush
        self.cancel_unsent = self._output.cancel_unsent
        self.resume_reading = self._input.resume
        self.close_for_takeover = self._ending.take_over
        self.stop_reading = self._ending.stop
        self.end = self._ending.end
        self._ending.set_timer(self._wire.rules.opening_seconds_max, LOGIN_TIMER, self._on_opening_overdue)
        self._input.watch()

    @property
    def client_info(self) -> ClientInfo:
        tls = self._socket.tls
        version = None if tls is None else tls.version
        return ClientInfo(self._name, self._wire.client_id, self._wire.rules.protocol, version)

    @property
    def certificate_names(self) -> Collection[str]:
        return () if self._socket.tls is None else self._socket.tls.peer_names()

    @property
    def bytes_sent(self) -> int:
        return self._output.bytes_sent

    @property
    def has_sent_login(self) -> bool:
        return self._wire.is_connected

    @property
    def has_control_requests(self) -> bool:
        """True if the client's protocol has control requests."""
        return self._wire.rules.has_control_requests

    def check_socket(self) -> None:
        """End the connection if its socket has broken; called once a second."""
        self._input.check_socket()

    # ---- Login ----

    def assign_place(self, *, may_exceed: bool, restriction: Restriction | None = None) -> Restriction | None:
        self._restriction = self._on_login(self, may_exceed, restriction)
        return self._restriction

    def send_connected(self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool) -> None:
        """Answer the login, and start the agreed heart-beats."""
        wire, ending = self._wire, self._ending
        self._is_logged_in = True
        ending.cancel_timer(LOGIN_TIMER)
        self._add_outgoing()
        control_only = None if self._restriction is None else self._restriction.code
        self._output.add_frame(
            wire.encode_connected(
                login, secret, is_takeover=is_takeover, is_checked=is_checked, control_only=control_only
            )
        )
        self.flush()
        if self._restriction is not None:
            ending.set_timer(CONTROL_ONLY_IDLE_S, "control only", self._on_control_only_idle)
        self._start_heart_beats()

    def end_before_login(self, newer: int) -> None:
        """End the connection, whose client has sent no login yet, in favour of one of `newer` connections."""
        self._ending.refuse_at_once(self._wire.rules.displaced_login.format(newer=newer))

    def _send_outgoing(self) -> None:
        self._add_outgoing()
        self.flush()
        self._start_heart_beats()

    def _send_outgoing_at_once(self) -> None:
        if self._life.state is OPEN:
            self._send_outgoing()

    def _on_too_large(self, reason: str) -> None:
        logger.warning("message not sent: too large for the client", extra={"client": self._name, "reason": reason})
        # A turn of the broker encodes messages: its own commands come first.
        self._loop.call_soon(self._input.execute_due)

    def _add_outgoing(self) -> None:
        outgoing = self._wire.outgoing
        if outgoing:
            self._output.add_frame(bytes(outgoing))
            outgoing.clear()

    def _start_heart_beats(self) -> None:
        """Start the timers of heart-beats and of silence, if the session has agreed on them and they do not run."""
        wire, ending = self._wire, self._ending
        if wire.beat_check_s and not ending.has_timer("beat"):
            ending.set_timer(wire.beat_check_s, "beat", self._on_beat_due)
        if wire.silence_limit_s and not ending.has_timer("silence"):
            ending.set_timer(wire.silence_limit_s, "silence", self._on_silence)

    def send_error(self, error: RemoteProtocolError) -> None:
        """Send an ERROR for the last command, and keep the connection open."""
        reason = str(error)
        logger.debug("frame refused", extra={"client": self._name, "reason": reason})
        if error.code is Code.NOT_SUPPORTED:
            self._broker.warnings.warn_of_unsupported(self._name, self._broker.users.name_of(self._session), reason)
        frame_number = self._wire.mark_refused()
        receipt = self._wire.last_receipt
        answer = make_error_answer(reason, error.code, receipt, frame_number, error.cause)
        self._broker.answer(self._session, answer)

    # ---- The end ----

    def end_slow_client(self, reason: str) -> None:
        self._ending.refuse(reason, Code.TOO_SLOW)

    def end_exempt(self, reason: str, code: Code) -> None:
        self._ending.refuse(reason, code, is_exempt=True)

    def _note_closed(self) -> None:
        self._wire.detach()
        self._on_closed(self)

    # ---- Time ----

    def _on_opening_overdue(self) -> None:
        source, rules = self._input, self._wire.rules
        has_waited = source.has_waiting_commands
        if not (has_waited or source.is_paused):
            # Perhaps the broker was busy: what the client has sent in time is in the socket.
            source.on_readable()
        if self._is_logged_in or not self._wire.is_opening or self._life.state is not OPEN:
            return
        if has_waited and not self._broker.is_silent:
            self._ending.refuse(rules.unchecked_login, Code.BUSY)
        elif source.has_waiting_commands:
            # The login was in the socket: its check gets the whole time.
            self._ending.set_timer(rules.opening_seconds_max, LOGIN_TIMER, self._on_opening_overdue)
        elif source.is_paused:
            self._ending.set_timer(CAPACITY_CHECK_INTERVAL_S, LOGIN_TIMER, self._on_opening_overdue)
        else:
            tls = self._socket.tls
            is_shaking_hands = tls is not None and not tls.is_ready
            self._ending.refuse(
                f"no TLS handshake within {rules.opening_seconds_max:g} seconds"
                if is_shaking_hands
                else rules.late_opening,
                Code.LOGIN,
            )

    def _on_control_only_idle(self) -> None:
        assert self._restriction is not None, "this timer runs for control-only connections"
        # A control request may wait in the socket while reading is paused; a large frame is no control request.
        is_excused = self._input.may_have_unread_request
        seconds = CONTROL_ONLY_IDLE_S if is_excused else self._broker.control.idle_time_left(self._session)
        if seconds > 0:
            self._ending.set_timer(seconds, "control only", self._on_control_only_idle)
        else:
            self._ending.refuse(
                f"{self._restriction.reason}: this connection may only send control requests, and has sent none for "
                f"{CONTROL_ONLY_IDLE_S:g} seconds",
                Code.LIMIT,
            )

    def _on_beat_due(self) -> None:
        self._output.send_heart_beat()
        if self._life.state not in WITHOUT_SOCKET:
            self._ending.set_timer(self._wire.beat_check_s, "beat", self._on_beat_due)

    def _on_silence(self) -> None:
        """End the connection if no input has come for `silence_limit_s`; else schedule the next check."""
        source, limit_s = self._input, self._wire.silence_limit_s
        if source.silence_s >= limit_s and not source.is_paused:
            # Perhaps the broker itself was suspended: input of that time is in the socket.
            source.on_readable()
        is_excused = source.is_paused or self._broker.is_silent
        if source.silence_s >= limit_s and self._life.state is OPEN and not is_excused:
            self._broker.ends.soon(self._session, partial(self._ending.lose, "no heart-beat from the client"))
        if self._life.state is not OPEN:
            return
        # A client that is not read is checked again after a whole limit. A silent broker judges no client.
        remaining_s = limit_s if is_excused else limit_s - source.silence_s
        self._ending.set_timer(remaining_s, "silence", self._on_silence)
