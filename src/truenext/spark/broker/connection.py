"""A blocking connection of a task, or of the driver: frames out, messages and receipts in.

A task that Spark does not ask for rows says nothing to the broker, for as long as whatever reads the rows takes. So a
thread sends the heart-beats. Everything else is done by the caller's thread.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from threading import Event, Lock, Thread
from typing import Any

from truenext.client.core.link import HEART_BEAT, Link
from truenext.clock import monotonic
from truenext.errors import ConnectionLost, NoBroker, Refused
from truenext.model.limits import READ_BYTES
from truenext.model.url import Address
from truenext.wire.stomp.frame import Frame, Version, encode

CONNECT_SECONDS = 10.0
"""Until an address has taken a connection, and then until the broker has said CONNECTED."""
ANSWER_SECONDS = 60.0
"""Until the broker has answered a frame, while it still sends heart-beats."""
HEART_BEAT_SECONDS = 10.0
_REPLIES = "/temp-queue/answers"


class Answer:
    """What the broker says to one frame."""

    __slots__ = ("_connection", "error", "receipt")

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self.receipt: Frame | None = None
        self.error: Exception | None = None

    @property
    def is_there(self) -> bool:
        return self.receipt is not None or self.error is not None

    # As link.AnswerHandler.

    def on_confirmed(self, frame: Frame) -> None:
        self.receipt = frame

    def on_refused(self, error: Refused) -> None:
        self.error = error
        self._connection.note_refusal(error)

    def on_connection_lost(self) -> None:
        self.error = ConnectionLost("the connection was lost")


class BrokerConnection:
    """A context manager; its end says DISCONNECT, and then what it holds returns without an attempt."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        """Connect to the first address that has a broker.

        Raises: NoBroker, Refused
        """
        self._messages: deque[Frame] = deque()
        """MESSAGEs that came and were not taken."""
        self._first_refusal: Refused | None = None
        self._write_lock = Lock()
        self._has_ended = Event()
        self._question_count = 0
        self._link = Link(1, HEART_BEAT_SECONDS, monotonic(), on_frame=self._on_frame)
        self._socket = _connect(addresses)
        try:
            self._log_in()
        except BaseException:
            self._socket.close()
            raise
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
                    # With its receipt all has returned that this connection held.
                    self.call("DISCONNECT", {})
        finally:
            self.close()

    def close(self) -> None:
        """End it without a word; the broker counts it as lost."""
        self._has_ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # ---- Out ----

    def post(self, command: str, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Write a frame of which no receipt is asked for. A refusal is raised by the next `wait`."""
        self._link.write_tracked(encode(Frame(command, dict(headers), body), Version.V1_2), Answer(self))

    def post_all(self, frames: bytes, count: int) -> None:
        """Write so many frames that are encoded already, as `post` does."""
        self._link.write_all_tracked(frames, count, Answer(self))

    def start_call(self, command: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
        """Write a frame, and ask for its receipt."""
        answer = Answer(self)
        said = {"receipt": self._link.next_receipt_id, **headers}
        self._link.write_tracked(encode(Frame(command, said, body), Version.V1_2), answer)
        self.flush()
        return answer

    def call(self, command: str, headers: Mapping[str, str], body: bytes = b"") -> Frame:
        """Write a frame, and return its receipt.

        Raises: Refused, ConnectionLost
        """
        return self.wait(self.start_call(command, headers, body))

    def ask(self, verb: str, question: Mapping[str, Any] | None = None) -> Any:
        """Return what the broker answers to a question of docs/control.md.

        Raises: Refused, ConnectionLost
        """
        if not self._question_count:
            self.post("SUBSCRIBE", {"id": "answers", "destination": _REPLIES})
        self._question_count += 1
        number = str(self._question_count)
        headers = {"destination": f"/control/{verb}", "reply-to": _REPLIES, "correlation-id": number}
        self.post("SEND", headers, json.dumps(question).encode() if question else b"")
        while True:
            frame = self.next_message("answers", ANSWER_SECONDS)
            if frame is None:
                raise ConnectionLost(f"the broker does not answer {verb} within {ANSWER_SECONDS:g} seconds")
            if frame.headers.get("correlation-id") == number:
                return json.loads(frame.body)

    def browse(self, destination: str, selector: str | None = None) -> Iterator[Frame]:
        """Yield what waits, in its order; nothing is taken. To be gone through to its end before another browse.

        Raises: Refused, ConnectionLost
        """
        headers = {"id": "browse", "destination": destination, "browser": "true", "ack": "auto"}
        if selector is not None:
            headers["selector"] = selector
        self.post("SUBSCRIBE", headers)
        while (frame := self.next_message("browse", ANSWER_SECONDS)) is not None:
            if frame.headers.get("browser") == "end":
                self.post("UNSUBSCRIBE", {"id": "browse"})
                return
            yield frame
        raise ConnectionLost(f"the broker does not show {destination} within {ANSWER_SECONDS:g} seconds")

    def subscribe_to_pull(self, name: str, destination: str, ack: str, selector: str | None = None) -> None:
        """Begin a subscription of this name, which gets what `pull` asks for."""
        headers = {"id": name, "destination": destination, "ack": ack, "truenext-pull": "true"}
        if selector is not None:
            headers["selector"] = selector
        self.post("SUBSCRIBE", headers)

    def pull(self, name: str, count: int, *, waits: bool = False, correlation: str = "") -> None:
        """Ask for so many messages more; with 0 withdraw what was asked for. The notice of what does not come has this
        correlation id."""
        headers = {"destination": "/control/credit", "id": name, "messages": str(count)}
        headers["wait"] = "true" if waits else "false"
        if correlation:
            headers["correlation-id"] = correlation
        self.post("SEND", headers)

    def flush(self) -> None:
        """Raises: ConnectionLost"""
        chunks, self._link.out_chunks = self._link.out_chunks, []
        if chunks:
            self._write(b"".join(chunks))

    def _write(self, data: bytes) -> None:
        try:
            with self._write_lock:
                self._socket.sendall(data)
        except OSError as error:
            raise ConnectionLost(f"the connection was lost: {error}") from error

    def _beat(self) -> None:
        interval = self._link.heartbeat_interval_s
        while interval and not self._has_ended.wait(interval):
            try:
                self._write(HEART_BEAT)
            except ConnectionLost:
                # If its user has forgotten it, nobody else closes the socket.
                self.close()
                return

    # ---- In ----

    def wait(self, answer: Answer) -> Frame:
        """Wait for the receipt of a frame.

        Raises: Refused, with the first refusal since the last one that was raised; ConnectionLost
        """
        deadline = monotonic() + ANSWER_SECONDS
        while not answer.is_there:
            if not self._read(deadline):
                raise ConnectionLost(f"the broker does not answer within {ANSWER_SECONDS:g} seconds")
        self._raise_refusal()
        if answer.error is not None:
            raise answer.error
        assert answer.receipt is not None, "it is there"
        return answer.receipt

    def next_message(self, subscription: str, seconds: float) -> Frame | None:
        """Return the next MESSAGE of this subscription; None if none comes within so many seconds. Messages of others
        are dropped: they are left of what was asked before.

        Raises: Refused, ConnectionLost
        """
        messages = self._messages
        deadline = 0.0
        while True:
            while messages:
                frame = messages.popleft()
                if frame.headers.get("subscription") == subscription:
                    return frame
            if not deadline:
                self.flush()
                deadline = monotonic() + seconds
            is_over = not self._read(deadline)
            self._raise_refusal()
            if is_over:
                return None

    def answer(self, subscription: str) -> Frame:
        """Return the next MESSAGE of a subscription that has pulled without waiting: a message, or that none is ready.

        Raises: Refused, ConnectionLost
        """
        frame = self.next_message(subscription, ANSWER_SECONDS)
        if frame is None:
            raise ConnectionLost(f"the broker does not answer within {ANSWER_SECONDS:g} seconds")
        return frame

    def put_back(self, message: Frame) -> None:
        """Have `next_message` return it once more."""
        self._messages.appendleft(message)

    def note_refusal(self, error: Refused) -> None:
        """Of several refusals the first is the cause of the others."""
        self._first_refusal = self._first_refusal or error

    def _raise_refusal(self) -> None:
        error, self._first_refusal = self._first_refusal, None
        if error is not None:
            raise error

    def _read(self, deadline: float) -> bool:
        """Read once; False if nothing came until the deadline.

        Raises: ConnectionLost
        """
        link = self._link
        now = monotonic()
        # Behind a long pause of its caller, all that came meanwhile is still to be read.
        silence_ends = now + link.silence_limit_s if link.silence_limit_s else deadline
        self._socket.settimeout(max(0.0, min(deadline, silence_ends) - now))
        try:
            data = self._socket.recv(READ_BYTES)
        except (TimeoutError, BlockingIOError):
            if deadline <= silence_ends:
                return False
            raise ConnectionLost("the broker has sent nothing, not even a heart-beat") from None
        except OSError as error:
            raise ConnectionLost(f"the connection was lost: {error}") from error
        if not data:
            raise ConnectionLost("the broker has closed the connection")
        link.receive_data(data, now)
        return True

    def _on_frame(self, frame: Frame) -> None:
        if frame.command == "MESSAGE":
            self._messages.append(frame)

    def _log_in(self) -> None:
        link = self._link
        link.send_connect({"truenext-rounds": "true", "truenext-started": "true", "truenext-keep-open": "true"})
        self.flush()
        deadline = monotonic() + CONNECT_SECONDS
        while not link.is_up:
            if not self._read(deadline):
                raise NoBroker(f"nothing has answered as a broker within {CONNECT_SECONDS:g} seconds")
        link.require_truenext("a source of Spark")


def _connect(addresses: Sequence[Address]) -> socket.socket:
    failures = []
    for address in addresses:
        try:
            connected = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
        except OSError as error:
            failures.append(f"{address.url}: {error}")
            continue
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected
    raise NoBroker(f"no broker: {'; '.join(failures)}")
