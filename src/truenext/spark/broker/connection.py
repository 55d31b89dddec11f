"""Blocking connection of a task or of the driver: sends frames, receives messages and receipts.

Spark may not call a task for as long as the rows take to process. So a separate thread sends the heart-beats. The
caller's thread does everything else.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from threading import Event, Lock, Thread
from typing import Any

import msgspec

from truenext.client.core.client import NO_ANSWER_HINT
from truenext.client.core.credentials import NO_CREDENTIALS, Credentials
from truenext.client.core.link import HEART_BEAT, AnswerHandler, Link
from truenext.client.password_file import current_password
from truenext.client.tls_context import check_files, make_context, reason_of
from truenext.clock import monotonic
from truenext.errors import Code, ConnectionLost, NoBroker, Refused, RemoteProtocolError
from truenext.model.destination import SPARK_CLIENT_ID
from truenext.model.limits import READ_BYTES
from truenext.model.url import Address
from truenext.spark.broker.tls_stream import TlsStream
from truenext.wire.stomp.frame import Frame, Version, encode

CONNECT_SECONDS = 10.0
"""Seconds within which an address must accept a connection. The broker must answer CONNECT within the same time.
Several addresses share the time."""
ANSWER_SECONDS = 60.0
"""Seconds within which the broker must answer a frame, even if it sends heart-beats."""
BUSY_PAUSE_SECONDS = 0.5
"""Longest pause, in seconds, before the next login at a broker that is busy with other logins."""
SHARE_SECONDS_MIN = 0.1
"""Shortest time, in seconds, for the last of several addresses, if the others have used up the time."""
FAILED_LAST_SECONDS = 60.0
"""Seconds for which an address that has failed is tried last. Each task opens a connection of its own, and should not
wait again for a machine that another task of this process has found without power."""
HEART_BEAT_SECONDS = 10.0
_REPLIES = "/temp-queue/answers"

_failed_at: dict[str, float] = {}
"""Time of the last failure of each URL at which no broker has answered since."""


class Answer(AnswerHandler, msgspec.Struct, eq=False):
    """Answer of the broker to one frame: a receipt or an error."""

    _connection: BrokerConnection
    receipt: Frame | None = None
    error: Exception | None = None

    @property
    def is_there(self) -> bool:
        return self.receipt is not None or self.error is not None

    def on_confirmed(self, frame: Frame) -> None:
        self.receipt = frame

    def on_refused(self, error: Refused) -> None:
        self.error = error
        self._connection.note_refusal(error)

    def on_connection_lost(self) -> None:
        self.error = ConnectionLost(f"the connection to {self._connection.url} was lost")


class BrokerConnection:
    """Connection to a broker, and context manager. The end of its block sends DISCONNECT, and held messages count no
    attempt."""

    def __init__(
        self, addresses: Sequence[Address], credentials: Credentials = NO_CREDENTIALS, timeout_s: float | None = None
    ) -> None:
        """Connect to the first address at which a broker answers. Addresses that have failed within
        FAILED_LAST_SECONDS, in this process, come last. If the broker is busy with other logins, try again for some
        seconds. `timeout_s` is the longest time of each step, which several addresses share; None means
        CONNECT_SECONDS.

        Raises: NoBroker if no broker answers; Refused if a broker refuses the login; ConfigurationError if a file of
        the credentials cannot be used
        """
        check_files(credentials, addresses)
        self._messages: deque[Frame] = deque()
        self._first_refusal: Refused | None = None
        self._write_lock = Lock()
        self._has_ended = Event()
        self._question_count = 0
        timeout_s = CONNECT_SECONDS if timeout_s is None else timeout_s
        busy_until = monotonic() + timeout_s
        while True:
            try:
                self._open_first(addresses, credentials, timeout_s)
                break
            except Refused as error:
                if error.code != Code.BUSY or monotonic() >= busy_until:
                    raise
            time.sleep(BUSY_PAUSE_SECONDS * (0.5 + random.random() / 2))
        self._beating = Thread(target=self._beat, name="truenext heart-beats", daemon=True)
        self._beating.start()

    @property
    def store_id(self) -> str:
        return self._link.store_id

    def __enter__(self) -> BrokerConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or not issubclass(kind, (ConnectionLost, OSError)):
                with contextlib.suppress(ConnectionLost, Refused):
                    # Once its receipt has come, the broker has requeued all messages that this connection held.
                    self.call("DISCONNECT", {})
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket without DISCONNECT. The broker then takes the connection for lost."""
        self._has_ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # ---- Out ----

    def post(self, command: str, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Write a frame without a receipt request. If the broker refuses the frame, the next `wait` raises the
        refusal."""
        self._link.write_tracked(encode(Frame(command, dict(headers), body), Version.V1_2), Answer(self))

    def post_all(self, frames: bytes, count: int) -> None:
        """Write `count` encoded frames without a receipt request, as `post` writes one frame."""
        self._link.write_all_tracked(frames, count, Answer(self))

    def start_call(self, command: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
        """Write a frame with a receipt request. Return the Answer, which is still to come."""
        answer = Answer(self)
        said = {"receipt": self._link.next_receipt_id, **headers}
        self._link.write_tracked(encode(Frame(command, said, body), Version.V1_2), answer)
        self.flush()
        return answer

    def call(self, command: str, headers: Mapping[str, str], body: bytes = b"") -> Frame:
        """Write a frame, and return its receipt.

        Raises: Refused if the broker refuses the frame; ConnectionLost if the connection is lost
        """
        return self.wait(self.start_call(command, headers, body))

    def ask(self, verb: str, question: Mapping[str, Any] | None = None) -> Any:
        """Send a control request, and return the decoded reply. Source: docs/reference/control.md

        Raises: Refused if the broker refuses the request; ConnectionLost if the connection is lost
        """
        if not self._question_count:
            self.post("SUBSCRIBE", {"id": "answers", "destination": _REPLIES})
        self._question_count += 1
        number = str(self._question_count)
        headers = {"destination": f"/control/{verb}", "reply-to": _REPLIES, "correlation-id": number}
        self.post("SEND", headers, json.dumps(question).encode() if question else b"")
        while True:
            frame = self.answer("answers", f"answer {verb}")
            if frame.headers.get("correlation-id") == number:
                return json.loads(frame.body)

    def browse(self, destination: str, selector: str | None = None) -> Iterator[Frame]:
        """Yield the waiting messages in the order of the queue, without taking them. Read the iterator to its end
        before the next `browse`.

        Raises: Refused if the broker refuses to browse; ConnectionLost if the connection is lost
        """
        self._subscribe("browse", destination, selector, {"browser": "true", "ack": "auto"})
        while (frame := self.answer("browse", f"show {destination}")).headers.get("browser") != "end":
            yield frame
        self.post("UNSUBSCRIBE", {"id": "browse"})

    def subscribe_to_pull(self, name: str, destination: str, ack: str, selector: str | None = None) -> None:
        """Subscribe under this name, so that `pull` can request messages."""
        self._subscribe(name, destination, selector, {"ack": ack, "truenext-pull": "true"})

    def _subscribe(self, name: str, destination: str, selector: str | None, options: Mapping[str, str]) -> None:
        optional = {} if selector is None else {"selector": selector}
        self.post("SUBSCRIBE", {"id": name, "destination": destination, **options, **optional})

    def pull(self, name: str, count: int, *, waits: bool = False, correlation: str = "") -> None:
        """Request `count` more messages. With 0 withdraw earlier requests. The broker's notice of unused requests
        carries this `correlation` id."""
        headers = {"destination": "/control/credit", "id": name, "messages": str(count)}
        headers["wait"] = "true" if waits else "false"
        if correlation:
            headers["correlation-id"] = correlation
        self.post("SEND", headers)

    def flush(self) -> None:
        """Write the frames that `post` has gathered.

        Raises: ConnectionLost if the connection is lost
        """
        chunks, self._link.out_chunks = self._link.out_chunks, []
        if chunks:
            self._write(b"".join(chunks))

    def _write(self, data: bytes) -> None:
        try:
            with self._write_lock:
                self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    def _beat(self) -> None:
        interval = self._link.heartbeat_interval_s
        while interval and not self._has_ended.wait(interval):
            try:
                self._write(HEART_BEAT)
            except ConnectionLost:
                # A connection that its owner has dropped without closing.
                self.close()
                return

    # ---- In ----

    def wait(self, answer: Answer) -> Frame:
        """Wait for the receipt of a frame.

        Raises: Refused with the first refusal that was not raised yet; ConnectionLost if the connection is lost
        """
        deadline = monotonic() + ANSWER_SECONDS
        while not answer.is_there:
            if not self._read(deadline):
                raise ConnectionLost(f"the broker {self.url} does not answer within {ANSWER_SECONDS:g} seconds")
        self._raise_refusal()
        if answer.error is not None:
            raise answer.error
        assert answer.receipt is not None, "it is there"
        return answer.receipt

    def next_message(self, subscription: str | tuple[str, ...], seconds: float) -> Frame | None:
        """Return the next MESSAGE of one subscription, or of any of several. None if no such MESSAGE arrives within
        `seconds`. Messages of other subscriptions are answers to earlier requests, and are dropped.

        Raises: Refused with the first refusal that was not raised yet; ConnectionLost if the connection is lost
        """
        messages = self._messages
        subscriptions = (subscription,) if isinstance(subscription, str) else subscription
        deadline = 0.0
        while True:
            while messages:
                frame = messages.popleft()
                if frame.headers.get("subscription") in subscriptions:
                    return frame
            if not deadline:
                self.flush()
                deadline = monotonic() + seconds
            is_over = not self._read(deadline)
            self._raise_refusal()
            if is_over:
                return None

    def answer(self, subscription: str, what: str = "answer") -> Frame:
        """Return the next MESSAGE of a subscription. After a pull that does not wait, a MESSAGE always comes: with a
        message, or with the notice that none is ready. `what` completes the error "the broker does not ...", for
        example `show /queue/a`.

        Raises: Refused with the first refusal that was not raised yet; ConnectionLost if no MESSAGE comes in time
        """
        frame = self.next_message(subscription, ANSWER_SECONDS)
        if frame is None:
            raise ConnectionLost(f"the broker {self.url} does not {what} within {ANSWER_SECONDS:g} seconds")
        return frame

    def put_back(self, message: Frame) -> None:
        """Put a message back, so that `next_message` returns it again."""
        self._messages.appendleft(message)

    def note_refusal(self, error: Refused) -> None:
        """Record the first refusal, because it is the cause of later ones."""
        self._first_refusal = self._first_refusal or error

    def _raise_refusal(self) -> None:
        error, self._first_refusal = self._first_refusal, None
        if error is not None:
            raise error

    def _read(self, deadline: float) -> bool:
        """Read the socket once. Return False if nothing comes before the deadline.

        Raises: ConnectionLost if the connection is lost
        """
        link = self._link
        now = monotonic()
        # After a long pause of the caller, everything received meanwhile is still unread.
        silence_ends = now + link.silence_limit_s if link.silence_limit_s else deadline
        self._socket.settimeout(max(0.0, min(deadline, silence_ends) - now))
        try:
            data = self._socket.recv(READ_BYTES)
        except (TimeoutError, BlockingIOError):
            if deadline <= silence_ends:
                return False
            _failed_at[self.url] = now
            raise ConnectionLost(f"the broker {self.url} has sent nothing, not even a heart-beat") from None
        except OSError as error:
            raise self._lost(error) from error
        if not data:
            raise ConnectionLost(f"the broker {self.url} has closed the connection")
        link.receive_data(data, now)
        return True

    def _lost(self, error: OSError) -> ConnectionLost:
        if not isinstance(error, ssl.SSLError):
            return ConnectionLost(f"the connection to {self.url} was lost: {error}")
        if self._link.is_up:
            return ConnectionLost(f"the connection to {self.url} was lost: {reason_of(error)}")
        # With TLS 1.3 the broker refuses a client's certificate after the client's part of the handshake.
        return ConnectionLost(f"{self.url}: {reason_of(error)}")

    def _on_frame(self, frame: Frame) -> None:
        if frame.command == "MESSAGE":
            self._messages.append(frame)

    def _open_first(self, addresses: Sequence[Address], credentials: Credentials, timeout_s: float) -> None:
        headers = credentials.headers(current_password(credentials))
        failures: list[NoBroker] = []
        now = monotonic()
        ends_at = now + timeout_s
        failed_first = now - FAILED_LAST_SECONDS
        in_order = sorted(addresses, key=lambda each: max(_failed_at.get(each.url, failed_first), failed_first))
        for number, address in enumerate(in_order):
            # Addresses that are still to be tried share the time that is left.
            share_s = (ends_at - monotonic()) / (len(addresses) - number)
            try:
                self._open(address, credentials, headers, max(share_s, SHARE_SECONDS_MIN))
            except NoBroker as error:
                _failed_at[address.url] = monotonic()
                failures.append(error)
            else:
                _failed_at.pop(address.url, None)
                return
        reasons = "; ".join(map(str, failures))
        raise _no_broker(
            f"no broker: {reasons}",
            is_listening=any(each.is_listening for each in failures),
            is_refused=all(each.is_refused for each in failures),
        )

    def _open(self, address: Address, credentials: Credentials, headers: dict[str, str], timeout_s: float) -> None:
        self._link = Link(1, HEART_BEAT_SECONDS, monotonic(), on_frame=self._on_frame)
        self._socket, self.url = _connect(address, credentials, timeout_s), address.url
        try:
            self._log_in(headers, timeout_s)
        except BaseException as error:
            self._socket.close()
            # A proxy may accept the connection, and close it because the broker behind it does not run.
            if isinstance(error, ConnectionLost):
                raise _no_broker(str(error), is_listening=True) from error
            if isinstance(error, RemoteProtocolError):
                raise _no_broker(f"{self.url}: {error}", is_listening=True) from error
            raise

    def _log_in(self, headers: dict[str, str], timeout_s: float) -> None:
        """Log in. Raises: ConnectionLost if the peer does not answer in time, or closes the connection;
        RemoteProtocolError if the peer is no broker; Refused if the broker refuses the login"""
        link = self._link
        link.send_connect({"truenext-client": "1", "client-id": SPARK_CLIENT_ID, **headers})
        self.flush()
        deadline = monotonic() + timeout_s
        while not link.is_up:
            if not self._read(deadline):
                waited_s = round(timeout_s, 1)
                raise ConnectionLost(
                    f"{self.url} accepts connections, but has not answered CONNECT within {waited_s:g} s: check that "
                    f"a truenext broker is there, or, {NO_ANSWER_HINT}"
                )
        link.require_truenext("Spark")


def _connect(address: Address, credentials: Credentials, timeout_s: float) -> socket.socket | TlsStream:
    """Return a connected socket.

    Raises: NoBroker if the address does not answer; ConfigurationError if a file for TLS cannot be used
    """
    try:
        connected = socket.create_connection((address.host, address.port), timeout_s)
    except OSError as error:
        is_refused = isinstance(error, ConnectionRefusedError)
        raise _no_broker(f"{address.url}: {error}", is_listening=False, is_refused=is_refused) from error
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not address.has_tls:
        return connected
    try:
        return TlsStream(connected, make_context(credentials), address.host)
    except BaseException as error:
        connected.close()
        if not isinstance(error, OSError):
            raise
        raise _no_broker(f"{address.url}: {reason_of(error, credentials)}", is_listening=True) from error


def _no_broker(reason: str, *, is_listening: bool, is_refused: bool = False) -> NoBroker:
    error = NoBroker(reason)
    error.is_listening = is_listening
    error.is_refused = is_refused
    return error
