"""STOMP client that sends only what its test says, so that the test knows exactly what was sent, and when."""

import contextlib
import json
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from tests.integration import over_tls
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version, encode
from truenext.wire.stomp.shapes import FRAME_SHAPES

RECEIVE_SECONDS = 20.0
"""Longest wait for an expected frame: a loaded machine is slow, not broken."""

TRUENEXT_CLIENT = {"truenext-client": "1"}
"""Headers of CONNECT that make a client a truenext client."""


class UnexpectedError(AssertionError):
    """ERROR frame that the test did not expect."""


class RawClient:
    """Blocking STOMP connection. Frames are kept in their order until a test asks for them."""

    def __init__(self, port: int, *, receive_buffer: int = 0) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer:
            # Before the connection is made, as the window is agreed with it.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._sock.settimeout(RECEIVE_SECONDS)
        try:
            self._sock.connect(("127.0.0.1", port))
        except OSError:
            self._sock.close()
            raise
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if over_tls.IS_ON:
            self._sock = over_tls.client_context().wrap_socket(self._sock, server_hostname="localhost")
        self._decoder = Decoder(FRAME_SHAPES)
        self._version = Version.V1_2
        self._frames: deque[Frame] = deque()
        self._messages: deque[Frame] = deque()
        """Messages that came while the test waited for another frame."""
        self._errors: deque[Frame] = deque()
        """Errors that do not end the connection, kept in the same way."""
        self._receipts = 0
        self.connected = Frame("", {})
        """CONNECTED frame of the broker."""
        self.local_port = self._sock.getsockname()[1]
        """Port by which the broker names this client in its log."""

    # ---- Bytes and frames ----

    def reset(self) -> None:
        """Close the connection with a reset."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def write(self, data: bytes) -> None:
        self._sock.settimeout(RECEIVE_SECONDS)
        self._sock.sendall(data)

    def stop_writing(self) -> None:
        """Close the sending half, also for a thread that waits to write."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def read(self, seconds: float = RECEIVE_SECONDS) -> bytes:
        """Return the next bytes; empty at the end of the connection. Raises TimeoutError."""
        self._sock.settimeout(max(seconds, 0.0001))
        try:
            return self._sock.recv(256 * 1024)
        except ConnectionResetError:
            return b""

    def next_frame(self, seconds: float = RECEIVE_SECONDS) -> Frame:
        """Return the next frame of any kind. Raises TimeoutError, or EOFError at the end of the connection."""
        deadline = time.monotonic() + seconds
        while not self._frames:
            data = b""
            if not self._decoder.has_more and not (data := self.read(deadline - time.monotonic())):
                raise EOFError("the broker closed the connection")
            self._frames.extend(self._decoder.receive(data))
        return self._frames.popleft()

    def send_frame(self, command: str, headers: dict[str, str], body: bytes = b"", *, confirmed: bool = False) -> None:
        """Write a frame; if `confirmed`, ask for a receipt and wait for it."""
        if confirmed:
            headers = headers | {"receipt": self.new_receipt()}
        self.write(encode(Frame(command, headers, body), self._version))
        if confirmed:
            self.await_receipt(headers["receipt"])

    def send_connect(
        self, version: str, heart_beat: str, *, client_id: str | None = None, headers: dict[str, str] | None = None
    ) -> Frame:
        fields = {"accept-version": version, "host": "test", "heart-beat": heart_beat} | (headers or {})
        self.send_frame("CONNECT", fields if client_id is None else fields | {"client-id": client_id})
        return self.await_connected()

    def await_connected(self, seconds: float = RECEIVE_SECONDS) -> Frame:
        connected = self.next_frame(seconds)
        assert connected.command == "CONNECTED", connected
        self._version = self._decoder.version = Version(connected.headers["version"])
        self.connected = connected
        self._frames.extend(self._decoder.receive(b""))
        return connected

    # ---- What comes ----

    def new_receipt(self) -> str:
        self._receipts += 1
        return f"receipt-{self._receipts}"

    def await_receipt(self, receipt: str) -> Frame:
        """Wait for the receipt; it must be the next one."""
        while (frame := self.next_frame()).command != "RECEIPT":
            self._keep(frame)
        assert frame.headers["receipt-id"] == receipt, f"{frame.headers['receipt-id']} instead of {receipt}"
        return frame

    def message(self, seconds: float = RECEIVE_SECONDS) -> Frame:
        """Return the next MESSAGE."""
        while not self._messages:
            self._keep(self.next_frame(seconds))
        return self._messages.popleft()

    def messages(self, count: int) -> list[Frame]:
        return [self.message() for _ in range(count)]

    def only(self, count: int) -> list[Frame]:
        """Return the next `count` messages and all that arrived after them, which a test expects to be none."""
        return self.messages(count) + self.arrived()

    def arrived(self) -> list[Frame]:
        """Return all messages that were ready for this connection up to now.

        Messages that have left the broker's memory are missing: they come once they were read from the store. The
        second round of requests is answered after the dispatches of the turn of the first.
        """
        for _ in range(2):
            self.send_frame("BEGIN", {"transaction": "are we there"}, confirmed=True)
            self.send_frame("ABORT", {"transaction": "are we there"}, confirmed=True)
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def error(self) -> Frame:
        """Return the ERROR that ends the connection, and drop the frames before it."""
        while (frame := self.next_frame()).command != "ERROR":
            pass
        assert not self._frames, f"after the ERROR came {self._frames}"
        self.await_end()
        return frame

    def await_end(self) -> None:
        """Wait until the broker closes; it may send nothing before."""
        while data := self.read():
            # The line feed behind the last frame may come by itself.
            assert not data.strip(b"\n"), f"instead of the end came {data[:200]!r}"
        self.close()

    def await_silent_end(self) -> None:
        """Wait until the broker closes, and drop what it sends before."""
        while self.read():
            pass
        self.close()

    # ---- What a client says ----

    def send(
        self,
        queue: str,
        body: bytes,
        *,
        persistent: bool = False,
        priority: int | None = None,
        transaction: str | None = None,
        confirmed: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        fields = {"destination": f"/queue/{queue}"}
        if persistent:
            fields["persistent"] = "true"
        if priority is not None:
            fields["priority"] = str(priority)
        if transaction is not None:
            fields["transaction"] = transaction
        self.send_frame("SEND", fields | (headers or {}), body, confirmed=confirmed)

    def subscribe(
        self,
        queue: str,
        *,
        ack: str = "client-individual",
        prefetch: int | None = 1000,
        subscription: str = "1",
        headers: dict[str, str] | None = None,
    ) -> None:
        """Subscribe to a queue; with `prefetch` None the broker chooses the window."""
        headers = {"id": subscription, "destination": f"/queue/{queue}", "ack": ack} | (headers or {})
        if prefetch is not None:
            headers["activemq.prefetchSize"] = str(prefetch)
        self.send_frame("SUBSCRIBE", headers, confirmed=True)

    def unsubscribe(self, subscription: str = "1") -> None:
        self.send_frame("UNSUBSCRIBE", {"id": subscription}, confirmed=True)

    def ack(self, message: Frame, *, transaction: str | None = None, confirmed: bool = False) -> None:
        self.send_frame("ACK", self._naming(message, transaction), confirmed=confirmed)

    def nack(
        self,
        message: Frame,
        *,
        transaction: str | None = None,
        confirmed: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_frame("NACK", self._naming(message, transaction) | (headers or {}), confirmed=confirmed)

    def begin(self, transaction: str, *, headers: dict[str, str] | None = None) -> None:
        self.send_frame("BEGIN", {"transaction": transaction} | (headers or {}))

    def commit(self, transaction: str, *, confirmed: bool = True, headers: dict[str, str] | None = None) -> None:
        self.send_frame("COMMIT", {"transaction": transaction} | (headers or {}), confirmed=confirmed)

    def abort(self, transaction: str, *, confirmed: bool = True) -> None:
        self.send_frame("ABORT", {"transaction": transaction}, confirmed=confirmed)

    # ---- What is truenext's own ----

    def started(self, message: Frame) -> None:
        self.send_frame("SEND", {"destination": "/control/started", "id": message.headers["ack"]})

    def pull(self, messages: int, *, subscription: str = "1", waits: bool = True, name: str = "") -> None:
        """Request messages for a pulling subscription."""
        headers = {"destination": "/control/credit", "id": subscription, "messages": str(messages)}
        headers |= {} if waits else {"wait": "false"}
        self.send_frame("SEND", headers | ({"correlation-id": name} if name else {}))

    def wake(self, subscription: str = "1") -> None:
        self.send_frame("SEND", {"destination": "/control/wake", "id": subscription})

    def release(self, *subscriptions: str, keep: Sequence[Frame] = (), confirmed: bool = False, **others: Any) -> None:
        request = {"subscriptions": subscriptions, "keep": [message.headers["ack"] for message in keep]} | others
        self.send_frame("SEND", {"destination": "/control/release"}, json.dumps(request).encode(), confirmed=confirmed)

    def next_error(self) -> Frame:
        """Return the next ERROR that does not end the connection."""
        while not self._errors:
            self._keep(self.next_frame())
        return self._errors.popleft()

    # ---- The end ----

    def disconnect(self) -> None:
        """Send DISCONNECT, and wait until the broker has closed."""
        self.send_frame("DISCONNECT", {}, confirmed=True)
        self.await_end()

    def hang_up(self) -> None:
        """Close the sending half without a DISCONNECT; what the broker still sends can be read."""
        self._sock.shutdown(socket.SHUT_WR)

    def crash(self) -> None:
        """Reset the connection at once, as a killed client does: unread frames are lost."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._sock.close()

    def close_at_end(self) -> None:
        """Close after the broker has closed; its last frames are lost. A closed client stays closed."""
        with contextlib.suppress(OSError):
            while self.read():
                pass
        self.close()

    # ---- Inside ----

    def _keep(self, frame: Frame) -> None:
        if frame.command == "ERROR" and "truenext-frame" in frame.headers:
            self._errors.append(frame)
            return
        if frame.command == "ERROR":
            raise UnexpectedError(frame.body.decode() or frame.headers["message"])
        assert frame.command == "MESSAGE", f"unexpected {frame}"
        self._messages.append(frame)

    def _naming(self, message: Frame, transaction: str | None) -> dict[str, str]:
        headers = message.headers
        if self._version is Version.V1_2:
            names = {"id": headers["ack"]}
        else:
            names = {"message-id": headers["message-id"]}
            if "subscription" in headers:
                names["subscription"] = headers["subscription"]
        return names if transaction is None else names | {"transaction": transaction}


def numbered(producer: str, number: int) -> dict[str, str]:
    """Return the headers of a SEND or COMMIT that may be repeated."""
    return {"truenext-producer": producer, "truenext-number": str(number)}


def bodies(messages: list[Frame]) -> list[str]:
    return [message.body.decode() for message in messages]
