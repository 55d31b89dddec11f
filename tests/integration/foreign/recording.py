r"""Format of a recorded dialogue of a client and a broker, and a player of the client's part.

A line of a recording is one of

    # anything
    = connection 2                      the lines that follow belong to this connection
    > SEND\n                            bytes that the client sends, as in Python's b"..."; one line of its own
    > destination:/queue/{queue}.a\n    each, and all lines up to another kind of line in one write
    < CONNECTED 1.2                     what the client has got before it sends the next bytes: a version,
    < RECEIPT 77                        a receipt's id,
    < MESSAGE 1 2 body                  the second message of subscription 1, and its body, escaped too
    = closed                            the client closes the connection

Parts that vary are in braces: `{queue}`; `{ack 1 2}` and `{message-id 1 2}`, headers of the second
message of subscription 1; `{now+15000}`, a time in milliseconds. Heart-beats of the broker are left out.
"""

import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "recordings"
_NAMED = re.compile(rb"\{(ack|message-id) (\S+) (\d+)\}")
_RELEASE = re.compile(rb'destination:/control/release\n\n\{"subscriptions":\["(\w+)"\]')
_NOW = re.compile(rb"\{now\+(\d+)\}")


class ReceivedFrame(NamedTuple):
    """Frame of the broker."""

    command: str
    headers: dict[bytes, bytes]
    """Headers with their escapes."""
    body: bytes


class Listener:
    """Frames that the broker has sent on one connection, read without code of the broker."""

    def __init__(self) -> None:
        self._data = b""
        self.lines: list[str] = []
        """Lines as in a recording."""
        self.names: dict[tuple[bytes, bytes, bytes], bytes] = {}
        """Header values by `ack` or `message-id`, subscription, and number of the message."""
        self.passes_over_repeats = False
        """Whether messages are left out that a subscription has had before."""
        self.releases = 0
        """Number of requests `release` that the client has sent."""
        self.released: dict[bytes | None, int] = {}
        """Number of the last such request for each subscription."""
        self._counts: dict[bytes, int] = {}

    def hear(self, data: bytes) -> list[str]:
        """Return the lines that `data` adds."""
        self._data += data
        before = len(self.lines)
        while (frame := self._next()) is not None:
            if not (self._is_released(frame) or (self.passes_over_repeats and self._is_repeat(frame))):
                self.lines.append(self._line(frame))
        return self.lines[before:]

    def on_sent(self, data: bytes) -> None:
        """Note the releases in the client's bytes."""
        for match in _RELEASE.finditer(data):
            self.releases += 1
            self.released[match[1]] = self.releases

    def _is_released(self, frame: ReceivedFrame) -> bool:
        """Return whether a message was dispatched before a release that the client has sent since. The broker may take
        a turn between the frames before the release and the release."""
        dispatched_after = int(frame.headers.get(b"truenext-round", self.releases))
        return dispatched_after < self.released.get(frame.headers.get(b"subscription"), 0)

    def _is_repeat(self, frame: ReceivedFrame) -> bool:
        subscription = frame.headers.get(b"subscription")
        return any(
            (name, of, value) == (b"message-id", subscription, frame.headers.get(b"message-id"))
            for (name, of, _), value in self.names.items()
        )

    def _next(self) -> ReceivedFrame | None:
        data = self._data.lstrip(b"\n")
        head, blank, rest = data.partition(b"\n\n")
        if not blank:
            return None
        command, *lines = head.split(b"\n")
        headers = dict(line.split(b":", 1) for line in lines)
        size = int(headers[b"content-length"]) if b"content-length" in headers else rest.find(b"\0")
        if not 0 <= size < len(rest):
            return None
        self._data = rest[size + 1 :]
        return ReceivedFrame(command.decode(), headers, rest[:size])

    def _line(self, frame: ReceivedFrame) -> str:
        match frame.command:
            case "CONNECTED":
                return f"CONNECTED {frame.headers[b'version'].decode()}"
            case "RECEIPT":
                return f"RECEIPT {escaped(frame.headers[b'receipt-id'])}"
            case "MESSAGE":
                # A client of STOMP 1.0 need not name its subscriptions.
                subscription = frame.headers.get(b"subscription") or frame.headers[b"destination"]
                count = self._counts[subscription] = self._counts.get(subscription, 0) + 1
                for name in (b"ack", b"message-id"):
                    if name in frame.headers:
                        self.names[name, subscription, b"%d" % count] = frame.headers[name]
                return f"MESSAGE {escaped(subscription)} {count} {escaped(frame.body)}".rstrip()
        raise AssertionError(f"the broker said {frame}")


class Step(NamedTuple):
    """One step on a connection: bytes to send, a line to receive, or its end."""

    connection: int
    data: bytes = b""
    hears: str = ""


def read(text: str) -> Iterator[Step]:
    connection = 1
    pending = b""
    for line in [*text.splitlines(), "#"]:
        kind, _, rest = line.partition(" ")
        if kind == ">":
            pending += rest.encode("latin-1").decode("unicode_escape").encode("latin-1")
            continue
        if pending:
            yield Step(connection, data=pending)
            pending = b""
        if kind == "<":
            yield Step(connection, hears=rest)
        elif rest == "closed":
            yield Step(connection)
        elif kind == "=":
            connection = int(rest.removeprefix("connection "))


def escaped(data: bytes) -> str:
    return data.decode("latin-1").encode("unicode_escape").decode("ascii")


class Player:
    """Player of a recorded client: sends each part as soon as the broker's frames before it have come."""

    def __init__(self, port: int, queue: str, patience_seconds: float) -> None:
        self._port = port
        self._queue = queue.encode()
        self._patience_seconds = patience_seconds
        self._connections: dict[int, tuple[socket.socket, Listener, list[str]]] = {}
        """Socket, received frames, and lines that were due up to now."""

    def play(self, text: str) -> None:
        """Play a recording.

        Raises: AssertionError if the broker sends other frames than in the recording, or more
        """
        try:
            for step in read(text):
                self._play(step)
            assert not self._connections, "a recording ends when all its connections are closed"
        finally:
            for sock, _, _ in self._connections.values():
                sock.close()

    def _play(self, step: Step) -> None:
        if step.connection not in self._connections:
            sock = socket.create_connection(("127.0.0.1", self._port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[step.connection] = sock, Listener(), []
        sock, listener, expected = self._connections[step.connection]
        if step.hears:
            expected.append(step.hears)
            return
        self._hear(step.connection, lambda: len(listener.lines) >= len(expected))
        if step.data:
            data = step.data.replace(b"{queue}", self._queue)
            data = _NAMED.sub(lambda match: listener.names[match[1], match[2], match[3]], data)
            data = _NOW.sub(lambda match: b"%d" % (time.time() * 1000 + int(match[1])), data)
            # The broker may take a turn between both, and dispatch to the subscription what ABORT has returned.
            listener.passes_over_repeats |= b"ABORT\n" in data and b"UNSUBSCRIBE\n" in data
            listener.on_sent(data)
            sock.sendall(data)
        else:
            # The broker says what is left to say, and closes.
            sock.shutdown(socket.SHUT_WR)
            self._hear(step.connection, lambda: False)
            sock.close()
            del self._connections[step.connection]

    def _hear(self, connection: int, is_enough: Callable[[], bool]) -> None:
        """Read until `is_enough`, or until the broker closes, and check that exactly the due frames have come.

        The frames are compared without their order.
        """
        sock, listener, expected = self._connections[connection]
        deadline = time.monotonic() + self._patience_seconds
        while not is_enough():
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = sock.recv(65536)
            except TimeoutError:
                raise AssertionError(f"on connection {connection} only {listener.lines} was heard") from None
            if not data:
                break
            listener.hear(data)
        heard, missing = sorted(listener.lines), sorted(expected)
        assert heard == missing, f"on connection {connection} {heard} was heard, not {missing}"
