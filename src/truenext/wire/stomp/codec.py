"""Which frames are in the bytes that have come so far.

Bytes go in as they arrive, cut anywhere; whole frames come out. Either they are a frame by the specification, or the
decoder raises RemoteProtocolError, and is then of no further use. Nothing is allocated for a frame that its own header
says is too large.

    frame = command EOL *(header EOL) EOL body NUL *(EOL)
    EOL   = LF, in STOMP 1.2 and before the version is known also CR LF
"""

from truenext.envelope import unescape
from truenext.errors import RemoteProtocolError
from truenext.limits import BODY_BYTES_MAX, HEADER_BYTES_MAX, HEADERS_MAX, LOGIN_BYTES_MAX
from truenext.wire.stomp.frame import UNESCAPED_COMMANDS, Frame, Version

COMMANDS_WITH_BODY = frozenset({"SEND", "MESSAGE", "ERROR"})
_LINE_FEED = 10
_CARRIAGE_RETURN = 13
_NUMBER_LENGTH_MAX = 10
"""Digits of a content-length: more is larger than any limit."""


class Decoder:
    """Bytes to frames, for either side of a connection."""

    __slots__ = ("_awaits", "_missing", "_pending", "version")

    def __init__(self) -> None:
        self.version: Version | None = None
        """None until it is agreed; set by whoever agrees. Until then a frame may be no larger than a login."""
        self._pending = bytearray()
        """The beginning of a frame that is not complete."""
        self._missing = 0
        """Bytes that must come before it is worth looking at `_pending` again; 0 if not known."""
        self._awaits = b""
        """Bytes one of which must come before it is worth looking again, if `_missing` is not known."""

    def receive(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes; while no version is agreed one at a time, the next by `receive(b"")`.

        Raises: RemoteProtocolError if the bytes are not STOMP, or a limit is passed.
        """
        if self._pending:
            self._pending += data
            if self._missing:
                self._missing -= len(data)
                if self._missing > 0:
                    return []
            elif self._awaits and not any(byte in data for byte in self._awaits):
                self._check_pending()
                return []
            data = bytes(self._pending)
            self._pending.clear()
        self._missing = 0
        self._awaits = b""
        frames: list[Frame] = []
        position = 0
        size = len(data)
        while True:
            # Heart-beats, and line ends behind a frame.
            while position < size and (data[position] == _LINE_FEED or data[position] == _CARRIAGE_RETURN):
                position += 1
            if position == size:
                return frames
            end = self._frame(data, position, size, frames)
            if end < 0:
                self._pending += memoryview(data)[position:]
                self._check_pending()
                return frames
            position = end
            if self.version is None:
                # What follows can only be read once this frame has settled the version.
                self._pending += memoryview(data)[position:]
                return frames

    def _frame(self, data: bytes, start: int, size: int, frames: list[Frame]) -> int:
        """Decode the frame at `start` into `frames`; returns where it ends, -1 if it has not come in full."""
        head_end = data.find(b"\n\n", start, start + HEADER_BYTES_MAX)
        body_start = head_end + 2
        if self.version is not Version.V1_1 and self.version is not Version.V1_0:
            crlf = data.find(b"\n\r\n", start, head_end + 1 if head_end >= 0 else start + HEADER_BYTES_MAX)
            if crlf >= 0:
                head_end = crlf
                body_start = crlf + 3
        if head_end < 0:
            if size - start > HEADER_BYTES_MAX:
                raise RemoteProtocolError(f"header without an end after {HEADER_BYTES_MAX} bytes")
            if data.find(b"\0", start) >= 0:
                raise RemoteProtocolError("NUL inside a frame's header")
            self._awaits = b"\n\0"
            return -1
        raw = data[start:head_end]
        try:
            head = raw.decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(f"header is not UTF-8: {error}") from error
        if "\0" in head:
            raise RemoteProtocolError("NUL inside a frame's header")
        if "\r" in head and self.version is not Version.V1_1 and self.version is not Version.V1_0:
            head = _without_carriage_returns(head)
            raw = b""
        lines = head.split("\n")
        command = lines[0]
        count = len(lines) - 1
        if count > HEADERS_MAX:
            raise RemoteProtocolError(f"{count} headers in one frame; at most {HEADERS_MAX}")
        headers: dict[str, str] = {}
        for line in lines[:0:-1]:
            # From the last to the first, so that of repeated headers the first remains.
            name, colon, value = line.partition(":")
            if not colon or not name:
                raise RemoteProtocolError(f"header line {line[:100]!r} is not name:value")
            headers[name] = value
        # The number of colons tells whether one stands unescaped in a value.
        if "\\" in head or head.count(":") != count or len(headers) != count or "\r" in head:
            raw = b""
            headers = self._unescaped(command, headers)
        if self.version is Version.V1_0 and (": " in head or " :" in head or " \n" in head or head.endswith(" ")):
            # The examples of STOMP 1.0 pad their headers, and many clients do as they do.
            raw = b""
            headers = {name.strip(): value.strip() for name, value in headers.items()}

        length = headers.get("content-length")
        if length is None:
            body_end = data.find(b"\0", body_start)
            if body_end < 0:
                self._awaits = b"\0"
                return -1
            if body_end - body_start > BODY_BYTES_MAX:
                raise RemoteProtocolError(f"body of more than {BODY_BYTES_MAX} bytes")
        else:
            body_end = body_start + _content_length(length)
            if self.version is None and body_end - start > LOGIN_BYTES_MAX:
                raise RemoteProtocolError(f"more than {LOGIN_BYTES_MAX} bytes before CONNECT is complete")
            if body_end >= size:
                self._missing = body_end + 1 - size
                return -1
            if data[body_end]:
                raise RemoteProtocolError(f"no NUL after the {length} bytes of the body")
        if body_end > body_start and command not in COMMANDS_WITH_BODY:
            raise RemoteProtocolError(f"{command[:100]} must not have a body")
        if self.version is None and body_end - start > LOGIN_BYTES_MAX:
            raise RemoteProtocolError(f"more than {LOGIN_BYTES_MAX} bytes before CONNECT is complete")
        frames.append(
            Frame(
                command, headers, data[body_start:body_end], raw[len(command) + 1 :] + b"\n" if raw and count else b""
            )
        )
        return body_end + 1

    def _unescaped(self, command: str, headers: dict[str, str]) -> dict[str, str]:
        if self.version is None or self.version is Version.V1_0 or command in UNESCAPED_COMMANDS:
            return headers
        plain: dict[str, str] = {}
        try:
            for name, value in headers.items():
                if self.version is Version.V1_1 and ("\\r" in name.replace("\\\\", "") + value.replace("\\\\", "")):
                    raise KeyError("\\r")
                plain[unescape(name)] = unescape(value)
        except KeyError as error:
            raise RemoteProtocolError(f"undefined escape {error.args[0]!r} in a header") from error
        return plain

    def _check_pending(self) -> None:
        size = len(self._pending)
        if self.version is None and size > LOGIN_BYTES_MAX:
            raise RemoteProtocolError(f"more than {LOGIN_BYTES_MAX} bytes before CONNECT is complete")
        if not self._missing:
            limit = HEADER_BYTES_MAX if self._awaits == b"\n\0" else HEADER_BYTES_MAX + BODY_BYTES_MAX
            if size > limit:
                raise RemoteProtocolError(f"frame without an end after {limit} bytes")


def _without_carriage_returns(head: str) -> str:
    """Line ends of STOMP 1.2 made plain line feeds; a carriage return anywhere else must be escaped.

    The blank line's own CR is not in `head`, but the one before its line feed may be.
    """
    lines = [line.removesuffix("\r") for line in head.split("\n")]
    if any("\r" in line for line in lines):
        raise RemoteProtocolError("carriage return inside a header; STOMP 1.2 escapes it as \\r")
    return "\n".join(lines)


def _content_length(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise RemoteProtocolError(f"content-length {text[:100]!r} is not a number of bytes")
    if len(text) > _NUMBER_LENGTH_MAX or int(text) > BODY_BYTES_MAX:
        raise RemoteProtocolError(f"content-length {text[:100]} is more than {BODY_BYTES_MAX} bytes")
    return int(text)
