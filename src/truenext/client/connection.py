"""How a program talks to a broker, one thing after the other: a blocking STOMP 1.2 client.

What arrives while something else is awaited is kept in order, so nothing is lost between `receive` and a receipt.
"""

import socket
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType

from truenext.errors import RemoteProtocolError, TruenextError
from truenext.limits import READ_BYTES
from truenext.url import parse_url
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.protocol import Protocol, Side
from truenext.wire.stomp.shapes import FRAMES

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
"""A piece of work is durable when it is answered, and the disk may be busy; all queues are told of in slices."""


class ConnectionLost(TruenextError):
    """The broker is not there, or no longer."""


class Refused(TruenextError):
    """The broker answered with an ERROR; the message says why."""


class Connection:
    """One connection to a broker. Use it in a `with` block; it says DISCONNECT at the end."""

    def __init__(self, url: str, *, login: str | None = None, passcode: str | None = None) -> None:
        """Connect to `stomp://HOST:PORT`; `login` and `passcode` for brokers that ask who we are.

        Raises: ConfigurationError if the URL is not one, ConnectionLost, Refused
        """
        address = parse_url(url)
        self._url = url
        self._protocol = Protocol(Side.CLIENT, FRAMES)
        self._frames: deque[Frame] = deque()
        """Decoded and not yet looked at."""
        self._arrived: deque[Frame] = deque()
        """Messages that came while a receipt was awaited."""
        self._receipts = 0
        self._asks = False
        """It has subscribed to the answers to its questions."""
        try:
            self._sock = socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise ConnectionLost(f"no broker at {url}: {reason or error}") from error
        # What is written is wanted at once; waiting for more would add 40 ms where an ACK goes before a question.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._log_in(address.host, login, passcode)
        except BaseException:
            self._sock.close()
            raise

    def _log_in(self, host: str, login: str | None, passcode: str | None) -> None:
        headers = {"accept-version": "1.2", "host": host}
        if login is not None:
            headers["login"] = login
        if passcode is not None:
            headers["passcode"] = passcode
        self._write(Frame("CONNECT", headers))
        connected = self._next(time.monotonic() + CONNECT_SECONDS)
        if connected is None or connected.headers.get("version") != "1.2":
            raise RemoteProtocolError(f"{self._url} does not speak STOMP 1.2")
        self._protocol.agree(Version.V1_2)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._confirmed(Frame("DISCONNECT", {}))
        finally:
            self._sock.close()

    def send(self, destination: str, body: bytes, headers: dict[str, str], *, is_confirmed: bool = True) -> None:
        """Send a message; if `is_confirmed`, returns once the broker has it as safe as it will be.

        Raises: ConnectionLost, Refused
        """
        frame = Frame("SEND", {"destination": destination, **headers}, body)
        if is_confirmed:
            self._confirmed(frame)
        else:
            self._write(frame)

    def subscribe(self, destination: str, *, subscription: str = "0", window: int = 1) -> None:
        """Ask for the messages of a destination, to be acknowledged one by one.

        Raises: ConnectionLost, Refused
        """
        headers = {
            "id": subscription,
            "destination": destination,
            "ack": "client-individual",
            "activemq.prefetchSize": str(window),
        }
        self._confirmed(Frame("SUBSCRIBE", headers))

    def browse(self, destination: str, selector: str | None = None, *, subscription: str = "0") -> Iterator[Frame]:
        """What waits at a destination, as far as the selector wants it, in order; all stays where it is.

        Raises: ConnectionLost, Refused
        """
        headers = {"id": subscription, "destination": destination, "browser": "true"}
        if selector is not None:
            headers["selector"] = selector
        self._confirmed(Frame("SUBSCRIBE", headers))
        while (message := self.receive(None)) is not None and message.headers.get("browser") != "end":
            yield message

    def receive(self, timeout: float | None) -> Frame | None:
        """The next MESSAGE; None if none comes within `timeout` seconds (None waits for ever).

        Raises: ConnectionLost, Refused
        """
        if self._arrived:
            return self._arrived.popleft()
        return self._next(None if timeout is None else time.monotonic() + timeout)

    def acknowledge(self, message: Frame, *, is_confirmed: bool = False) -> None:
        """Say that a message was handled.

        Raises: ConnectionLost, Refused
        """
        frame = Frame("ACK", {"id": message.headers["ack"]})
        if is_confirmed:
            self._confirmed(frame)
        else:
            self._write(frame)

    def ask(self, verb: str, body: bytes = b"", *, timeout: float = ANSWER_SECONDS) -> bytes:
        """The broker's answer to a question, JSON.

        Raises: ConnectionLost, Refused
        """
        replies = "/temp-queue/replies"
        if not self._asks:
            self.subscribe(replies, subscription="replies")
            self._asks = True
        self._write(Frame("SEND", {"destination": f"/control/{verb}", "reply-to": replies}, body))
        reply = self.receive(timeout)
        if reply is None:
            raise ConnectionLost(f"{self._url} does not answer within {timeout:g} seconds")
        self.acknowledge(reply)
        return reply.body

    def _confirmed(self, frame: Frame) -> None:
        """Send a frame and wait for its receipt."""
        self._receipts += 1
        receipt = str(self._receipts)
        frame.headers["receipt"] = receipt
        self._write(frame)
        while True:
            answer = self._next(None)
            assert answer is not None
            if answer.command == "RECEIPT":
                if answer.headers.get("receipt-id") == receipt:
                    return
            else:
                self._arrived.append(answer)

    def _write(self, frame: Frame) -> None:
        try:
            self._sock.settimeout(None)
            self._sock.sendall(self._protocol.send(frame))
        except OSError as error:
            # What the broker said before it hung up explains more than the broken pipe does.
            self._read_refusal()
            raise ConnectionLost(f"connection to {self._url} lost: {error}") from error

    def _read_refusal(self) -> None:
        try:
            while data := self._sock.recv(READ_BYTES):
                for frame in self._protocol.receive(data):
                    if frame.command == "ERROR":
                        raise Refused(_reason(frame))
        except OSError:
            return

    def _next(self, deadline: float | None) -> Frame | None:
        """The next frame, unless the deadline (monotonic seconds) comes first."""
        pending = self._frames
        while not pending:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._sock.settimeout(left)
            else:
                self._sock.settimeout(None)
            try:
                data = self._sock.recv(READ_BYTES)
            except TimeoutError:
                return None
            except OSError as error:
                raise ConnectionLost(f"connection to {self._url} lost: {error}") from error
            if not data:
                raise ConnectionLost(f"connection to {self._url} lost: closed by the broker")
            pending.extend(self._protocol.receive(data))
        frame = pending.popleft()
        self._protocol.check(frame)
        if frame.command == "ERROR":
            raise Refused(_reason(frame))
        return frame


def _reason(error: Frame) -> str:
    return error.body.decode(errors="replace").strip() or error.headers.get("message", "no reason given")
