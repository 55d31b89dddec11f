"""Ending: the ways in which one connection ends, and its timers.

    a frame is refused, or DISCONNECT    input is discarded; after the last answers our side of the socket is closed;
                                         then the client closes its side
    the socket ends without DISCONNECT   the connection is parked (in the contract: cut) if its protocol has takeovers,
                                         its client may take it over, and its end would count an attempt; else it is
                                         closed, and its client is lost
    missed heart-beats, unread answers   closed at once, and never parked (C22.5): the client is lost
    the client takes it over             closed at once, without an attempt
    a client needs its subscription      closed at once: it was parked, and used the same durable subscription
    the broker stops                     nothing is read; after the held messages were requeued our side is closed

`life.py` has the states. `ConnectionEnds` releases or keeps the messages of the connection.
"""

import logging
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from contextlib import suppress

from truenext.broker.broker import Broker
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, OtherProtocolError, RemoteProtocolError
from truenext.model.answers import CloseConnection, ErrorAnswer
from truenext.server.client_socket import ClientSocket
from truenext.server.input import Input
from truenext.server.life import OPEN, WITHOUT_SOCKET, ConnectionLife, Life, LifeEvent
from truenext.server.output import Output
from truenext.wire.session import WireSession

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""Longest time in which a client may read its last answers when its connection ends."""
LINGER_S = 2.0
"""Longest time in which a client may close its side of the socket after everything was sent."""
TAKEOVER_GRACE_S = 1.0
"""Longest time for which a connection stays parked. If the client has not taken the connection over by then, its
started messages count an attempt. One second is enough: a running client sees the broken socket, too, and reconnects at
once."""
LOGIN_TIMER = "login"
"""Name of the timer that runs until the client is logged in."""
_CLIENT_CLOSES = "client closes"
_REASON_LENGTH_MAX = 4000
"""Longest body of an ERROR, in characters."""


class Ending:
    input: Input
    output: Output
    on_closed: Callable[[], None]
    on_outgoing: Callable[[], None]

    def __init__(
        self,
        session: ConnectionState,
        wire: WireSession,
        broker: Broker,
        client_socket: ClientSocket,
        loop: AbstractEventLoop,
        client: str,
    ) -> None:
        """`client` is the client's address. Call `attach` before anything else."""
        self.life = ConnectionLife()
        self._session = session
        self._wire = wire
        self._rules, self._replies = wire.rules, wire.replies
        self._broker = broker
        self._socket = client_socket
        self._loop = loop
        self._client = client
        self._has_client_closed = False
        self._timers: dict[str, TimerHandle] = {}

    def attach(
        self,
        connection_input: Input,
        output: Output,
        *,
        on_closed: Callable[[], None],
        on_outgoing: Callable[[], None],
    ) -> None:
        """Add the input and output that end with the connection. `on_closed` is called when it has ended, `on_outgoing`
        when the wire session has bytes to send."""
        self.input = connection_input
        self.output = output
        self.on_closed = on_closed
        self.on_outgoing = on_outgoing
        self._socket.on_broken = self.on_socket_broken

    # ---- Timers ----

    def set_timer(self, seconds: float, name: str, action: Callable[[], None]) -> None:
        """Call `action` after `seconds`, unless the connection ends before."""
        self._timers[name] = self._loop.call_later(seconds, action)

    def has_timer(self, name: str) -> bool:
        """Return whether a timer was set under this name, and not cancelled. It may have run."""
        return name in self._timers

    def cancel_timer(self, name: str) -> None:
        self._timers.pop(name).cancel()

    def _cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    # ---- With last answers ----

    def refuse(self, reason: str, code: Code, receipt: str | None = None, *, is_exempt: bool = False) -> None:
        """Send an ERROR after the receipts of earlier frames, and end the connection, unless the connection is ending
        already.

        `receipt` is the receipt that the refused frame has requested. If `is_exempt`, the end counts no attempt.
        """
        if self.life.state is not OPEN:
            return
        if code is Code.DRAINING:
            self._broker.warnings.warn_of_drain(self._client, reason)
        elif not self._broker.users.has_logged_refusal(self._session, code):
            self._log_refused(reason)
        self._end_session(is_exempt=is_exempt)
        if self._socket.tls is not None and not self._socket.tls.is_ready:
            # No answer can be encrypted.
            self.close()
            return
        self._broker.answer(self._session, make_error_answer(reason, code, receipt))
        if self._is_login_sent():
            self._close_after_client()
        else:
            self._close_after_answers()

    def _is_login_sent(self) -> bool:
        """Return whether the client has sent its login and is not logged in."""
        return self.has_timer(LOGIN_TIMER) and self._wire.is_connected

    def _close_after_client(self) -> None:
        """Close the connection when the client has closed it, or after the time that its protocol gives the client."""
        if self._rules.closing_seconds:
            self.set_timer(self._rules.closing_seconds, _CLIENT_CLOSES, self._end_closing)
        else:
            self._close_after_answers()

    def _end_closing(self) -> None:
        self.cancel_timer(_CLIENT_CLOSES)
        self._close_after_answers()

    def _close_after_answers(self) -> None:
        self._broker.answer(self._session, CloseConnection())

    def on_refused(self, error: RemoteProtocolError, receipt: str | None) -> None:
        """Send an ERROR for a refused frame, and end the connection. `receipt` is the receipt that the frame
        requested."""
        self.refuse(str(error), error.code, receipt, is_exempt=error.code is Code.NO_SPACE)

    def on_other_protocol(self, error: OtherProtocolError) -> None:
        """End the connection of a client that speaks another protocol. The client gets `error.answer` instead of an
        ERROR."""
        self._broker.warnings.warn_of_other_protocol(self._client, error)
        self._end_session()
        if error.answer:
            self.output.add_frame(error.answer)
        self._broker.answer(self._session, CloseConnection())

    def on_plain_text(self) -> None:
        """Answer a client without TLS at a port with TLS, and end the connection."""
        reason = self._rules.plain_text
        self._log_refused(reason)
        self._end_session()
        self._socket.drop_tls()
        with suppress(OSError):
            self._socket.send(self._replies.encode_fault(make_error_answer(reason, Code.NOT_SUPPORTED, None)))
        self.half_close()

    def refuse_at_once(self, reason: str) -> None:
        """Send an ERROR, and close the connection without waiting until the socket has taken all of the ERROR."""
        self._log_refused(reason)
        self._end_session()
        self.output.add_frame(self._replies.encode_fault(make_error_answer(reason, Code.LIMIT, None)))
        self.output.flush()
        self.close()

    def on_disconnect(self) -> None:
        """End the connection once the receipt of its DISCONNECT was sent, if the client has requested one."""
        self.discard_input()
        self._close_after_client()

    def on_eof(self) -> None:
        """Handle the end of the client's input: park the connection, or end it after the pending answers, which the
        client may still read."""
        self._has_client_closed = True
        self._socket.unwatch_reads()
        if self.life.state is Life.LINGERING:
            self.close()
        elif self.has_timer(_CLIENT_CLOSES):
            self._end_closing()
        elif self.life.state is OPEN and not self._park(self._rules.missing_end):
            self._log_lost(self._rules.missing_end)
            self._end_session()
            self._close_after_answers()

    def discard_input(self) -> None:
        """From now on discard input. Commands that wait and the incomplete frame are discarded, too."""
        if self.life.state is OPEN:
            self.life.enter_after(LifeEvent.DISCARD)
            self.input.discard()

    def _end_session(self, *, is_exempt: bool = False) -> None:
        """Discard further input, and requeue the messages of a client that has sent no DISCONNECT. These messages count
        attempts as after a lost connection (C10.2), or none if `is_exempt`."""
        self.discard_input()
        self._broker.ends.lost(self._session, is_exempt=is_exempt)
        # Before the client can make its temporary destinations again, on a new connection.
        self._wire.detach()

    def on_last_answer(self) -> None:
        """Close our side of the socket once all was sent, or the whole socket after CLOSE_TIMEOUT_S."""
        self.life.enter_after(LifeEvent.LAST_ANSWER)
        self.set_timer(CLOSE_TIMEOUT_S, "close", self.close)

    def half_close(self) -> None:
        """Close our side of the socket after all was sent, and give the client LINGER_S to close its side. To close
        the socket at once could reset it, and the client would lose the last frame."""
        if self.life.state is Life.LINGERING:
            return
        self._cancel_timers()
        try:
            self._socket.half_close()
        except OSError:
            self.close()
            return
        if self._has_client_closed:
            self.close()
            return
        self.life.enter_after(LifeEvent.HALF_CLOSE)
        self.set_timer(LINGER_S, "linger", self.close)
        # Further input is read and discarded: closing a socket with unread input resets the connection.
        self.input.watch()

    # ---- At once ----

    def on_answers_unread(self, reason: str) -> None:
        """End the connection at once, as its client leaves too many bytes of answers unread. Does nothing if the
        connection is parked or has ended."""
        if self.life.state in WITHOUT_SOCKET:
            return
        self._log_refused(reason)
        # Logged as refused already, so it is not logged as lost.
        self.discard_input()
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """End the connection at once, without an answer: the connection counts as lost, and is not parked."""
        if self.life.state in WITHOUT_SOCKET:
            return
        if self.life.state is OPEN:
            self._log_lost(reason)
        self._end_session()
        self.close()

    def take_over(self, *, is_exempt: bool) -> None:
        """Close the connection at once, parked or not, because another connection takes this one over, or needs the
        durable subscription that this one uses. If `is_exempt`, the end counts no attempt."""
        logger.info(
            "connection ended for another connection, which takes it over or needs its durable subscription",
            extra={"client": self._client},
        )
        if self.life.state is Life.PARKED:
            self._end_parked(is_exempt=is_exempt)
            return
        self._end_session(is_exempt=is_exempt)
        self.close()

    def close(self) -> None:
        """Close the socket, and report the end of the connection. Does nothing if the connection is parked or
        closed."""
        if self.life.state not in WITHOUT_SOCKET:
            self._socket.close()
            self._report_closed()

    def _report_closed(self) -> None:
        self.life.enter_after(LifeEvent.CLOSE)
        self._cancel_timers()
        self._broker.connection_closed(self._session)
        self.output.forget_answers()
        self.on_closed()
        # They refer to one another: without this, a garbage collection would have to find them much later.
        del self.input, self.output, self.on_closed, self.on_outgoing, self._socket.on_broken

    # ---- Parked ----

    def on_socket_broken(self, reason: str) -> None:
        """Park the connection if its client can take the connection over; else end the connection at once."""
        if not (self.life.state is OPEN and self._park(reason)):
            self.lose(reason)

    def _park(self, reason: str) -> bool:
        """Park the connection if its protocol has takeovers, its client has a secret, and the end would count an
        attempt now: close the socket, and wait TAKEOVER_GRACE_S for a takeover. Returns False if the caller must end
        the connection instead."""
        if not (self._rules.has_takeover and self._broker.ends.park(self._session)):
            return False
        extra = {"client": self._client, "reason": reason}
        logger.info("client lost; its messages are kept for a takeover", extra=extra)
        self.input.discard()
        self.life.enter_after(LifeEvent.PARK)
        self._cancel_timers()
        self._socket.close()
        self.set_timer(TAKEOVER_GRACE_S, "takeover", self._on_takeover_overdue)
        return True

    def _on_takeover_overdue(self) -> None:
        self._broker.ends.soon(self._session, self._end_without_takeover)

    def _end_without_takeover(self) -> None:
        self._log_lost(f"no takeover within {TAKEOVER_GRACE_S:g} s")
        self._end_parked()

    def _end_parked(self, *, is_exempt: bool = False) -> None:
        self._broker.ends.lost(self._session, is_exempt=is_exempt)
        self._report_closed()

    # ---- The broker stops ----

    def stop(self) -> None:
        """Stop all reading, sending and timers."""
        if self.life.state is OPEN:
            self.input.discard()
        self.life.enter_after(LifeEvent.STOP)
        self._cancel_timers()
        if self.life.state not in WITHOUT_SOCKET:
            self._socket.unwatch_reads()
            self._socket.unwatch_writes()

    def end(self) -> None:
        """Close the connection. The broker calls this after `stop`, and after it has requeued the held messages."""
        if self.life.state is Life.PARKED:
            self._report_closed()
        else:
            self.half_close()

    def _log_refused(self, reason: str) -> None:
        logger.warning("client refused", extra={"client": self._client, "reason": reason})

    def _log_lost(self, reason: str) -> None:
        logger.info("client lost", extra={"client": self._client, "reason": reason})


def make_error_answer(
    reason: str, code: Code, receipt: str | None, frame: int = 0, cause: Code | None = None
) -> ErrorAnswer:
    """Make an ERROR. The reason may repeat text of the client, so it is cut: to 200 characters in the header `message`,
    to _REASON_LENGTH_MAX in the body."""
    return ErrorAnswer(reason.partition("\n")[0][:200], code, reason[:_REASON_LENGTH_MAX], receipt, frame, cause)
