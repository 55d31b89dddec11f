"""Server connection: reads, writes and ends the socket of one client, and enforces heart-beats.

The socket is driven directly, not through a transport: in auto mode a message counts as acknowledged once the socket
has taken its bytes, so we must know exactly which bytes it has taken, at the moment the connection is lost too.

    reading --ERROR or DISCONNECT--> closing: remaining answers are sent, further input is discarded --> closed

One file, as the end of a connection depends on the bytes that were read, written, and taken by the socket.
"""

import logging
import socket
import ssl
from asyncio import AbstractEventLoop, TimerHandle
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import chain

from truenext.broker.broker import Broker
from truenext.broker.control import ClientInfo
from truenext.broker.peer import WaitsFor
from truenext.engine.background.browsing import BrowseSlice
from truenext.engine.lifecycle.pull_requests import EndedPullRequest
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState, Subscriber
from truenext.engine.state.queue import Entry
from truenext.errors import Code, OtherProtocolError, RemoteProtocolError
from truenext.model.answers import Answer, CloseConnection, ErrorAnswer, Receipt
from truenext.model.commands import AckMode, Command, Login
from truenext.model.limits import (
    CONTROL_ONLY_IDLE_S,
    HEART_BEAT_GRACE_FACTOR,
    INCOMPLETE_FRAME_BYTES,
    LOGIN_BYTES_MAX,
    LOGIN_SECONDS_MAX,
    READ_BYTES,
    UNSENT_ANSWER_BYTES_MAX,
    UNSENT_BYTES_MAX,
)
from truenext.tls import NoTlsError, TlsSocket, reason_of
from truenext.wire.stomp.replies import PARTS_PER_MESSAGE
from truenext.wire.stomp.server import StompSession

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""Longest time for a client to read the remaining answers when its connection ends."""
LINGER_S = 2.0
"""Longest time for a client to close its side after everything was sent."""
TAKEOVER_GRACE_S = 1.0
"""Time for a client whose socket broke to take its connection over, before its started messages count an attempt.
The client sees the broken socket as well, and reconnects at once."""
WRITE_BYTES = 256 * 1024
"""Largest write, if the data is large or the socket could not take everything."""
_REASON_LENGTH_MAX = 4000
"""Characters of an ERROR's body."""
LARGE_WRITE_BYTES = 2 * UNSENT_BYTES_MAX
"""Bytes above which a flush is written in parts: one large message, or a few."""


class Cancelled(Enum):
    """Owner of a message that was sent in part, or encrypted, when `cancel_unsent` cancelled it."""

    MESSAGE = "message"


Owner = Subscriber | Cancelled | None
"""Owner of an unsent frame; None for one that is no message."""


def _warn_of_ineffective_header(
    broker: Broker, session: ConnectionState, client: str, frame: str, header: str, instead: str
) -> None:
    # No method: a connection that refers to itself is freed late.
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
        on_login: Callable[["ServerConnection", bool], str] = lambda *_: "",
        tls: TlsSocket | None = None,
    ) -> None:
        """`on_login` implements `Peer.assign_place`. With `tls`, all bytes pass through it."""
        self._sock = sock
        self._tls = tls
        self._channel: socket.socket | TlsSocket = sock if tls is None else tls
        self._name = peer_name
        self._broker = broker
        self._loop = loop
        self._on_closed = on_closed
        self._on_login = on_login
        self._session = broker.connect(self)
        self._control_only_reason = ""
        """Limit that this connection exceeds, which may only send control requests; "" if it exceeds none."""
        self._stomp = StompSession(
            session_id=self._session.id,
            identity=identity,
            server_name=server_name,
            on_ineffective_header=partial(_warn_of_ineffective_header, broker, self._session, peer_name),
        )
        self._replies = self._stomp.replies
        self._pending = self._stomp.pending
        """Beginning of an incomplete frame."""
        self._capacity = broker.capacity
        self._incomplete_frames = broker.capacity.incomplete_frames
        self._has_large_frame = False
        """The incomplete frame counts towards the memory for such frames."""
        self._is_reading = True
        """Input is executed; otherwise it is discarded."""
        self._is_reading_paused = False
        """The socket is not read until the broker has capacity."""
        self._waiting: Iterator[Command] | None = None
        """Commands that were read, and wait for disk space or until other connections were served."""
        self._is_closing = False
        """No answer follows; the socket is closed once it has taken all bytes."""
        self._is_stopping = False
        """The broker stops: bytes that the socket does not take at once stay unsent."""
        self._has_client_closed = False
        """The client has closed its side."""
        self._is_closed = False
        """The socket is closed."""
        self._is_parked = False
        """The connection has no socket and waits for a takeover, see `ConnectionEnds.park`."""
        self._last_received_at = loop.time()
        """Loop time of the last input."""
        self._needs_socket_check = False
        """Input has come since the last check of the socket."""
        self._has_sent = False
        self._parts: list[bytes] = []
        """Parts of frames for the next flush."""
        self.bytes_sent = 0
        self._part_owners: list[tuple[Subscriber | None, int]] = []
        """Owners of `_parts`, in order: subscriber and number of its messages; None and 1 for any other part."""
        self._has_messages = False
        """`_parts` or `_unsent` hold a message."""
        self._unsent: deque[tuple[bytes, Owner]] = deque()
        """Frames that the socket could not take yet, and their owners. Empty except for slow readers."""
        self._unsent_messages: Counter[Subscriber] = Counter()
        """Number of unsent messages by subscriber."""
        self._unsent_answer_bytes = 0
        self._first_unsent_offset = 0
        """Bytes of the first unsent frame that the socket has taken."""
        self._sent_counts: dict[BrokerConsumer, int] = {}
        """Number of messages of consumers in auto mode that the socket took since the last `Broker.on_all_sent`."""
        self._timers: dict[str, TimerHandle] = {}
        self._set_timer(LOGIN_SECONDS_MAX, "login", self._on_login_overdue)
        loop.add_reader(sock, self._on_readable)

    @property
    def client_info(self) -> ClientInfo:
        return ClientInfo(self._name, self._stomp.client_id)

    @property
    def certificate_names(self) -> Collection[str]:
        return () if self._tls is None else self._tls.peer_names()

    # ---- Reading ----

    def _on_readable(self) -> None:
        if self._is_reading and not self._capacity.may_read(self._session):
            self._pause_reading(needs_disk=False)
            return
        size = READ_BYTES if self._stomp.is_connected else LOGIN_BYTES_MAX
        if (self._has_large_frame or self._incomplete_frames.is_full) and self._is_reading:
            size = min(size, self._capacity.bytes_to_read(self._session, len(self._pending)))
            if not size:
                self._is_reading_paused = True
                self._loop.remove_reader(self._sock)
                return
        try:
            data = self._channel.recv(size)
        except (BlockingIOError, InterruptedError):
            # With TLS a part of a record may have come, and the end of the socket behind it.
            self._needs_socket_check = self._needs_socket_check or self._tls is not None
            self._flush_tls()
            return
        except NoTlsError:
            self._refuse_plain_text()
            return
        except OSError as error:
            if isinstance(error, ssl.SSLError) and not self.has_sent_connect:
                self._broker.users.log_failed_handshake(self._session, reason_of(error))
            self._on_socket_broken(f"connection broken: {error}")
            return
        self._flush_tls()
        if not data:
            self._on_eof()
        elif self._is_reading:
            self._last_received_at = self._loop.time()
            self._needs_socket_check = True
            self._execute(self._stomp.receive(data))
            if self._has_large_frame or len(self._pending) >= INCOMPLETE_FRAME_BYTES:
                self._note_incomplete_frame(len(data))

    def _flush_tls(self) -> None:
        """Send what TLS itself has to send, once the socket takes it."""
        if self._tls is not None and self._tls.has_unsent and not self._unsent and not self._is_closed:
            self._watch_socket(self._loop.add_writer, self._on_writable)

    def _refuse_plain_text(self) -> None:
        """Answer a client that speaks STOMP without TLS, and end the connection."""
        reason = "this port speaks TLS: connect to stomp+ssl://, not to stomp://"
        logger.warning("client refused", extra={"client": self._name, "reason": reason})
        self._end_reading()
        self._broker.ends.lost(self._session)
        with suppress(OSError):
            self._sock.send(self._replies.encode_fault(_make_error_answer(reason, Code.NOT_SUPPORTED, None)))
        self._tls = None
        self._channel = self._sock
        self._half_close()

    def _note_incomplete_frame(self, received: int) -> None:
        """Report the size of the incomplete frame to the broker, after `received` bytes more."""
        size = len(self._pending)
        self._has_large_frame = size >= INCOMPLETE_FRAME_BYTES
        self._capacity.note_incomplete_frame(self._session, size, received)

    def _end_reading(self) -> None:
        """Discard further input, commands that wait, and the incomplete frame."""
        self._is_reading = False
        self._waiting = None
        self._pending.clear()
        if self._has_large_frame:
            self._note_incomplete_frame(0)

    def check_socket(self) -> None:
        """End the connection if its socket has broken; called once a second. uvloop reports a broken socket once,
        even if there was data to read before the end, so it is checked here, and not with each message."""
        if self._needs_socket_check and not self._is_closed:
            self._needs_socket_check = False
            if self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._on_socket_broken("connection broken")

    def _on_eof(self) -> None:
        """Handle the end of the client's input. Pending answers are still sent, as the client may read them."""
        self._has_client_closed = True
        self._loop.remove_reader(self._sock)
        if "linger" in self._timers:
            self._close()
        elif self._is_reading and not self._park_for_takeover("no DISCONNECT"):
            logger.info("client lost", extra={"client": self._name, "reason": "no DISCONNECT"})
            self._end_reading()
            self._broker.ends.lost(self._session)
            self._broker.answer(self._session, CloseConnection())

    def _pause_reading(self, *, needs_disk: bool) -> None:
        self._is_reading_paused = True
        self._loop.remove_reader(self._sock)
        self._capacity.wait(self._session, needs_disk=needs_disk)

    def resume_reading(self) -> None:
        self._is_reading_paused = False
        self._last_received_at = self._loop.time()
        if not self._is_reading:
            return
        commands, self._waiting = self._waiting, None
        if commands is not None:
            self._execute(commands)
            if self._has_large_frame:
                self._note_incomplete_frame(0)
        if not (self._is_reading_paused or self._is_closed):
            self._watch_socket(self._loop.add_reader, self._on_readable)

    def _watch_socket(
        self, add: Callable[[socket.socket, Callable[[], None]], object], action: Callable[[], None]
    ) -> None:
        try:
            add(self._sock, action)
        except RuntimeError:
            # uvloop raises it after it has seen the socket break.
            self._loop.call_soon(self._on_socket_broken, "connection broken")

    def _execute(self, commands: Iterator[Command]) -> None:
        try:
            waiting = self._broker.execute(self._session, commands)
        except OtherProtocolError as error:
            self._refuse_other_protocol(error)
            return
        except RemoteProtocolError as error:
            is_exempt = error.code is Code.NO_SPACE
            self._refuse_client(str(error), error.code, self._stomp.last_receipt, is_exempt=is_exempt)
            return
        if waiting is not None:
            if waiting.command is None:
                self._stomp.accept_last()
                self._waiting = commands
            else:
                self._waiting = chain([waiting.command], commands)
            if waiting.waits_for is WaitsFor.DISK:
                self._pause_reading(needs_disk=True)
                return
            self._is_reading_paused = True
            self._loop.remove_reader(self._sock)
            if waiting.waits_for is WaitsFor.OTHERS:
                self._capacity.wait_for_others(self._session)
        elif self._stomp.is_closed:
            self._end_reading()
            self._broker.answer(self._session, CloseConnection())

    def send_connected(self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool) -> None:
        """Send CONNECTED, and start the agreed heart-beats."""
        self._timers.pop("login").cancel()
        self._add_frame(self._stomp.encode_connected(login, secret, is_takeover=is_takeover, is_checked=is_checked))
        self.flush()
        if self._control_only_reason:
            self._set_timer(CONTROL_ONLY_IDLE_S, "control only", self._on_control_only_idle)
        if self._stomp.send_interval_ms:
            # Twice as often as agreed: a beat omitted after other output is then made up in time.
            self._set_timer(self._stomp.send_interval_ms / 2000, "beat", self._on_beat_due)
        if self._stomp.receive_interval_ms:
            self._set_timer(self._silence_limit_s, "silence", self._on_silence)

    @property
    def has_sent_connect(self) -> bool:
        return self._stomp.is_connected

    def assign_place(self, *, may_exceed: bool) -> str:
        self._control_only_reason = self._on_login(self, may_exceed)
        return self._control_only_reason

    def end_before_login(self, reason: str) -> None:
        """End the connection at once, as another one needs its place."""
        logger.info("client refused", extra={"client": self._name, "reason": reason})
        self._end_reading()
        self._broker.ends.lost(self._session)
        self._add_frame(self._replies.encode_fault(_make_error_answer(reason, Code.LIMIT, None)))
        self.flush()
        self._close()

    def close_for_takeover(self, *, is_exempt: bool) -> None:
        """Close the connection, as another one of its client takes it over: nothing more is read or sent."""
        logger.info("the client has connected anew: its old connection was taken over", extra={"client": self._name})
        if self._is_parked:
            self._end_parked(is_exempt=is_exempt)
            return
        self._end_reading()
        self._broker.ends.lost(self._session, is_exempt=is_exempt)
        self._close()

    def send_error(self, error: RemoteProtocolError) -> None:
        """Send an ERROR for the last command, and keep the connection open."""
        reason = str(error)
        logger.debug("frame refused", extra={"client": self._name, "reason": reason})
        frame_number = self._stomp.mark_refused()
        receipt = self._stomp.last_receipt
        self._broker.answer(self._session, _make_error_answer(reason, error.code, receipt, frame_number))

    def end_slow_client(self, reason: str) -> None:
        self._refuse_client(reason, Code.TOO_SLOW)

    def end_user(self, reason: str) -> None:
        self._refuse_client(reason, Code.FORBIDDEN, is_exempt=True)

    def _refuse_client(self, reason: str, code: Code, receipt: str | None = None, *, is_exempt: bool = False) -> None:
        """Send an ERROR after the due receipts, and end the connection."""
        if not self._is_reading:
            return
        if not self._broker.users.logs_refusal(code):
            logger.warning("client refused", extra={"client": self._name, "reason": reason})
        self._end_reading()
        self._broker.ends.lost(self._session, is_exempt=is_exempt)
        if self._tls is not None and not self._tls.is_ready:
            # No answer can be encrypted.
            self._close()
            return
        self._broker.answer(self._session, _make_error_answer(reason, code, receipt))
        self._broker.answer(self._session, CloseConnection())

    def _refuse_other_protocol(self, error: OtherProtocolError) -> None:
        """Answer a client of another protocol in that protocol, if possible, and end the connection."""
        self._broker.warnings.warn_of_other_protocol(self._name, error.protocol)
        self._end_reading()
        self._broker.ends.lost(self._session)
        if error.answer:
            self._add_frame(error.answer)
        self._broker.answer(self._session, CloseConnection())

    # ---- Writing ----

    def answer(self, answer: Answer) -> None:
        if isinstance(answer, Receipt):
            self._add_frame(self._replies.encode_receipt(answer))
        elif isinstance(answer, ErrorAnswer):
            self._add_frame(self._replies.encode_fault(answer))
        else:
            self._is_closing = True
            self._set_timer(CLOSE_TIMEOUT_S, "close", self._close)

    def deliver(self, consumer: BrokerConsumer, entries: list[Entry]) -> None:
        self._replies.encode_deliveries(consumer.subscription, entries, self._parts, consumer.session.release_count)
        self._part_owners.append((consumer, len(entries)))
        self._has_messages = True

    def deliver_browse_slice(self, browse_slice: BrowseSlice) -> None:
        browser = browse_slice.browser
        self._replies.encode_deliveries(
            browser.subscription, browse_slice.entries, self._parts, browser.session.release_count, is_browse=True
        )
        self._part_owners.append((browser, len(browse_slice.entries)))
        self._has_messages = True
        if browse_slice.is_end:
            self._add_frame(self._replies.encode_end_of_browse(browser.subscription, browser.queue.destination))

    def end_pull_request(self, ended: EndedPullRequest) -> None:
        consumer = ended.consumer
        self._add_frame(
            self._replies.encode_end_of_pull_request(
                consumer.subscription, consumer.destination, ended.unused, ended.correlation
            )
        )

    def flush(self) -> None:
        parts = self._parts
        if parts and not self._is_closed:
            if self._unsent:
                self._buffer_unsent(0, None)
            else:
                data = parts[0] if len(parts) == 1 else b"".join(parts)
                # Most of a large write is left for later: to send it all at once would delay other connections.
                sent = self._send(data if len(data) <= LARGE_WRITE_BYTES else memoryview(data)[:WRITE_BYTES])
                if sent == len(data):
                    parts.clear()
                    self._part_owners.clear()
                    if self._has_messages:
                        self._has_messages = False
                        self._broker.on_all_sent(self._session)
                else:
                    self._buffer_unsent(sent, data)
                    if not self._is_closed and not self._is_stopping:
                        self._watch_socket(self._loop.add_writer, self._on_writable)
        if self._is_closing and not self._unsent and not self._is_closed:
            self._half_close()

    def _add_frame(self, frame: bytes) -> None:
        self._parts.append(frame)
        self._part_owners.append((None, 1))

    def _send(self, data: bytes | bytearray | memoryview) -> int:
        """Write to the socket. Returns the number of bytes that it took."""
        self._has_sent = True
        try:
            sent = self._channel.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            # Not at once: a turn that writes to many connections must not find one closed meanwhile.
            self._loop.call_soon(self._on_socket_broken, f"cannot write to the connection: {error}")
            return 0
        self.bytes_sent += sent
        return sent

    def _buffer_unsent(self, sent: int, data: bytes | None) -> None:
        """Move `_parts` to `_unsent`. The socket took the first `sent` bytes; `data` is all parts joined, or None."""
        at = 0
        is_one_frame = len(self._part_owners) == 1 and self._part_owners[0][1] == 1
        for consumer, count in self._part_owners:
            size = 1 if consumer is None else PARTS_PER_MESSAGE
            for _ in range(count):
                # Most likely a large frame, so it is not copied again.
                frame = data if data is not None and is_one_frame else b"".join(self._parts[at : at + size])
                at += size
                self._unsent.append((frame, consumer))
                if consumer is None:
                    self._unsent_answer_bytes += len(frame)
            if consumer is not None:
                self._unsent_messages[consumer] += count
        self._parts.clear()
        self._part_owners.clear()
        self._count_sent(sent)
        answers = self._unsent_answer_bytes
        if answers > UNSENT_ANSWER_BYTES_MAX:
            reason = f"the client has {answers} bytes of unread answers, at most {UNSENT_ANSWER_BYTES_MAX}: read them"
            logger.warning("client refused", extra={"client": self._name, "reason": reason})
            # Logged as refused already, so it is not logged as lost.
            self._end_reading()
            self._end_lost(reason)

    def _count_sent(self, sent: int) -> None:
        self._first_unsent_offset += sent
        unsent = self._unsent
        while unsent and self._first_unsent_offset >= len(unsent[0][0]):
            frame, consumer = unsent.popleft()
            self._first_unsent_offset -= len(frame)
            if isinstance(consumer, Cancelled):
                self._broker.ends.partial_frame_sent(self._session)
                continue
            if consumer is None:
                self._unsent_answer_bytes -= len(frame)
                continue
            self._unsent_messages[consumer] -= 1
            if isinstance(consumer, BrokerConsumer) and consumer.mode is AckMode.AUTO:
                self._sent_counts[consumer] = self._sent_counts.get(consumer, 0) + 1

    def _on_writable(self) -> None:
        if self._tls is not None and not self._unsent:
            try:
                self._tls.flush()
            except OSError as error:
                self._on_socket_broken(f"cannot write to the connection: {error}")
                return
            if self._tls.has_unsent:
                return
        data = bytearray()
        start = self._first_unsent_offset
        for frame, _ in self._unsent:
            data += memoryview(frame)[start : start + WRITE_BYTES - len(data)]
            start = 0
            if len(data) >= WRITE_BYTES:
                break
        self._count_sent(self._send(data))
        if not self._unsent and not self._is_closed:
            self._loop.remove_writer(self._sock)
            self._sent_counts.clear()
            self._has_messages = False
            self._broker.on_all_sent(self._session)
            if self._is_closing:
                self._half_close()

    def cancel_unsent(
        self, consumers: Collection[BrokerConsumer] | None
    ) -> tuple[dict[BrokerConsumer, int], list[Subscriber]]:
        owners: Collection[Subscriber] | None = None
        if self._tls is not None:
            # Of what is encrypted the client may have the first messages: they must not be dispatched again.
            self._count_sent(self._tls.take_sent_records())
        if consumers is None:
            sent, self._sent_counts = self._sent_counts, {}
        else:
            sent = {
                consumer: self._sent_counts.pop(consumer) for consumer in consumers if consumer in self._sent_counts
            }
            owners = {consumer for consumer in consumers if self._unsent_messages.pop(consumer, 0)}
            if not owners:
                # Do not copy `_unsent`: it may hold very many answers, and subscriptions may end very often.
                return sent, []
        partly_sent: list[tuple[bytes, Owner]] = []
        partially_sent: list[Subscriber] = []
        # These bytes will be sent in any case: the socket has taken some of their frame, or they are encrypted.
        size = self._first_unsent_offset + (0 if self._tls is None else self._tls.encrypted_count)
        while size > 0:
            frame, owner = self._unsent.popleft()
            size -= len(frame)
            if isinstance(owner, Subscriber) and (owners is None or owner in owners):
                self._unsent_messages[owner] -= 1
                partially_sent.append(owner)
                owner = Cancelled.MESSAGE
            partly_sent.append((frame, owner))
        remaining = [
            (frame, owner)
            for frame, owner in self._unsent
            if owner is None or (owners is not None and owner not in owners)
        ]
        self._unsent = deque(partly_sent + remaining)
        if consumers is None:
            self._unsent_messages.clear()
        return sent, partially_sent

    # ---- The end ----

    def _half_close(self) -> None:
        """Close our side after all is sent, and wait a little for the client's, lest a reset lose the last frame."""
        if "linger" in self._timers:
            return
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        try:
            if self._tls is not None:
                self._tls.close_notify()
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close()
            return
        if self._has_client_closed:
            self._close()
            return
        self._set_timer(LINGER_S, "linger", self._close)
        # Further input is read and discarded: closing a socket with unread input resets the connection.
        self._watch_socket(self._loop.add_reader, self._on_readable)

    def _end_lost(self, reason: str) -> None:
        """End the connection at once, without an answer: its client is lost, or is given up."""
        if self._is_closed:
            return
        if self._is_reading:
            logger.info("client lost", extra={"client": self._name, "reason": reason})
            self._end_reading()
        self._broker.ends.lost(self._session)
        self._close()

    def _on_socket_broken(self, reason: str) -> None:
        """Park the connection, as its client may be there still, or end it."""
        if not (self._is_closed or (self._is_reading and self._park_for_takeover(reason))):
            self._end_lost(reason)

    def _park_for_takeover(self, reason: str) -> bool:
        """Close the socket, and keep the session for a takeover, if its end would count an attempt now. Nothing more
        is read or written. Returns False if the connection must end instead."""
        if not self._broker.ends.park(self._session):
            return False
        logger.info("client lost; its messages are kept for a takeover", extra={"client": self._name, "reason": reason})
        self._end_reading()
        self._is_parked = True
        self._close_socket()
        self._set_timer(TAKEOVER_GRACE_S, "takeover", self._on_takeover_overdue)
        return True

    def _on_takeover_overdue(self) -> None:
        reason = f"no takeover within {TAKEOVER_GRACE_S:g} seconds"
        logger.info("client lost", extra={"client": self._name, "reason": reason})
        self._end_parked()

    def _end_parked(self, *, is_exempt: bool = False) -> None:
        self._broker.ends.lost(self._session, is_exempt=is_exempt)
        self._report_closed()

    def stop_reading(self) -> None:
        """Stop reading, all timers, and the sending of unsent bytes: the broker stops."""
        self._end_reading()
        self._is_stopping = True
        for timer in self._timers.values():
            timer.cancel()
        if not self._is_closed:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)

    def end(self) -> None:
        """Close at a stop of the broker, after the held messages of the client were requeued."""
        self._timers.clear()
        if self._is_parked:
            self._report_closed()
        else:
            self._half_close()

    def _close(self) -> None:
        if not self._is_closed:
            self._close_socket()
            self._report_closed()

    def _close_socket(self) -> None:
        self._is_closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()

    def _report_closed(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._broker.connection_closed(self._session)
        self._on_closed(self)

    # ---- Time ----

    def _set_timer(self, seconds: float, name: str, action: Callable[[], None]) -> None:
        self._timers[name] = self._loop.call_later(seconds, action)

    def _on_login_overdue(self) -> None:
        if self._waiting is None:
            self._refuse_client(f"no CONNECT within {LOGIN_SECONDS_MAX:g} seconds", Code.LOGIN)
        else:
            self._refuse_client(f"the login was not checked within {LOGIN_SECONDS_MAX:g} seconds", Code.BUSY)

    def _on_control_only_idle(self) -> None:
        # A control request may wait in the socket while reading is paused; a large frame is no control request.
        is_excused = self._is_reading_paused and not self._has_large_frame
        seconds = CONTROL_ONLY_IDLE_S if is_excused else self._broker.control.idle_time_left(self._session)
        if seconds > 0:
            self._set_timer(seconds, "control only", self._on_control_only_idle)
        else:
            self._refuse_client(
                f"{self._control_only_reason}: this connection may only send control requests, and has sent none for "
                f"{CONTROL_ONLY_IDLE_S:g} seconds",
                Code.LIMIT,
            )

    def _on_beat_due(self) -> None:
        if not self._has_sent and not self._unsent:
            self._add_frame(b"\n")
            self.flush()
        self._has_sent = False
        if not self._is_closed:
            self._set_timer(self._stomp.send_interval_ms / 2000, "beat", self._on_beat_due)

    @property
    def _silence_limit_s(self) -> float:
        """Seconds of silence after which the connection ends."""
        return self._stomp.receive_interval_ms * HEART_BEAT_GRACE_FACTOR / 1000

    def _on_silence(self) -> None:
        """End the connection if the client has been silent for too long; else check again when it would be."""
        if self._silence_s >= self._silence_limit_s and not self._is_reading_paused:
            # Perhaps the broker itself was suspended: input of that time is in the socket.
            self._on_readable()
        if self._silence_s >= self._silence_limit_s and self._is_reading and not self._is_reading_paused:
            self._end_lost("no heart-beat from the client")
        if self._is_closed or not self._is_reading:
            return
        # A client that is not read is checked again after a whole limit.
        remaining_s = self._silence_limit_s if self._is_reading_paused else self._silence_limit_s - self._silence_s
        self._set_timer(remaining_s, "silence", self._on_silence)

    @property
    def _silence_s(self) -> float:
        """Seconds since the last input."""
        return self._loop.time() - self._last_received_at


def _make_error_answer(reason: str, code: Code, receipt: str | None, frame: int = 0) -> ErrorAnswer:
    """Make an ERROR, cut to a length at which a client still recognizes what it sent itself."""
    return ErrorAnswer(reason.partition("\n")[0][:200], code, reason[:_REASON_LENGTH_MAX], receipt, frame)
