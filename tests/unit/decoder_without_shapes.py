"""The decoder from before there were shapes, kept as a reference for the meaning of frames.

It is a copy, and stays as it is: see test_stomp_shapes.py. It shares nothing with the decoder but names of commands,
limits and what a Frame is.
"""

from sys import maxsize

from truenext.errors import RemoteProtocolError
from truenext.model.header_lines import unescape
from truenext.model.limits import BODY_BYTES_MAX, HEADER_BYTES_MAX, HEADERS_MAX, LOGIN_BYTES_MAX
from truenext.wire.stomp.frame import UNESCAPED_COMMANDS, Frame, Version

COMMANDS_WITH_BODY = frozenset({"SEND", "MESSAGE", "ERROR"})
COMMANDS_WITHOUT_BODY = frozenset(
    {
        *("CONNECT", "STOMP", "CONNECTED", "SUBSCRIBE", "UNSUBSCRIBE", "ACK", "NACK"),
        *("BEGIN", "COMMIT", "ABORT", "RECEIPT", "DISCONNECT"),
    }
)
_BETWEEN_FRAMES = b"\n\r\0"
"""Heart-beats, line ends behind a frame, and what the terminators of C leave behind."""
_NUMBER_LENGTH_MAX = 10
"""Digits of a content-length: more is larger than any limit."""


class DecoderWithoutShapes:
    """Bytes to frames, for either side of a connection."""

    __slots__ = ("_awaits", "_body_bytes_max", "_fault", "_missing", "_pending", "version")

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._body_bytes_max = body_bytes_max
        self.version: Version | None = None
        """Agreed version, set by the caller; None before that, when a frame may be no larger than a login."""
        self._pending = bytearray()
        """The beginning of a frame that is not complete."""
        self._missing = 0
        """Bytes that must come before it is worth looking at `_pending` again; 0 if not known."""
        self._awaits = b""
        """Bytes one of which must come before it is worth looking again, if `_missing` is not known."""
        self._fault: RemoteProtocolError | None = None
        """Error in the bytes after the frames that were returned last."""

    def receive(self, data: bytes) -> list[Frame]:
        if self._fault is not None:
            raise self._fault
        frames: list[Frame] = []
        try:
            self._decode(data, frames)
        except RemoteProtocolError as error:
            if not frames:
                raise
            self._fault = error
        return frames

    def _decode(self, data: bytes, frames: list[Frame]) -> None:
        if self._pending:
            self._pending += data
            if not self._may_be_complete(data):
                return
            data = bytes(self._pending)
            self._pending.clear()
        self._missing = 0
        self._awaits = b""
        version = self.version
        has_carriage_returns = version in (None, Version.V1_2) and b"\r" in data
        may_be_padded = version is Version.V1_0
        find = data.find
        start = 0
        size = len(data)
        while True:
            while start < size and data[start] in _BETWEEN_FRAMES:
                start += 1
            if start == size:
                return

            head_end = find(b"\n\n", start, start + HEADER_BYTES_MAX)
            body_start = head_end + 2
            if has_carriage_returns:
                crlf = find(b"\n\r\n", start, head_end + 1 if head_end >= 0 else start + HEADER_BYTES_MAX)
                if crlf >= 0:
                    head_end = crlf
                    body_start = crlf + 3
            if head_end < 0:
                if find(b"\0", start, start + HEADER_BYTES_MAX) >= 0:
                    raise RemoteProtocolError("NUL inside a frame's header")
                self._awaits = b"\n\0"
                break
            try:
                head = data[start:head_end].decode()
            except UnicodeDecodeError as error:
                what = "" if version is None else f": {error}"
                raise RemoteProtocolError(f"header is not UTF-8{what}") from error
            command, *lines = head.split("\n")
            count = len(lines)
            headers: dict[str, str]
            if count == 1:
                # Most acknowledgements; three times faster than the general way.
                name, colon, value = lines[0].partition(":")
                headers = {name: value} if colon else {}
            else:
                try:
                    headers = dict([line.split(":", 1) for line in lines])
                except ValueError:
                    headers = {}
            # As many names as lines and as many colons: nothing is repeated, and no colon stands in a value.
            is_plain = not (
                len(headers) != count
                or head.count(":") != count
                or "\\" in head
                or "\r" in head
                or "\0" in head
                or "" in headers
                or (may_be_padded and " " in head)
            )
            if not is_plain:
                command = command.removesuffix("\r") if has_carriage_returns else command
                headers = self._careful_headers(command, head, has_carriage_returns)
            if count > HEADERS_MAX:
                raise RemoteProtocolError(f"more than {HEADERS_MAX} headers in one frame")

            has_body = command in COMMANDS_WITH_BODY
            length = headers.get("content-length")
            if length is None:
                body_end = find(b"\0", body_start)
                if body_end < 0:
                    self._awaits = b"\0"
                    break
                if body_end - body_start > self._body_bytes_max:
                    raise RemoteProtocolError(f"body of more than {self._body_bytes_max} bytes")
            else:
                # As `are_digits`, without a call.
                if not (length.isdigit() and length.isascii()):
                    raise RemoteProtocolError(f"content-length{self._quoted(length)} is not a number of bytes")
                digits = length if len(length) <= _NUMBER_LENGTH_MAX else length.lstrip("0") or "0"
                body_bytes = int(digits) if len(digits) <= _NUMBER_LENGTH_MAX else maxsize
                if body_bytes > self._body_bytes_max:
                    raise RemoteProtocolError(
                        f"content-length{self._quoted(length)} is more than {self._body_bytes_max} bytes"
                    )
                body_end = body_start + body_bytes
                if body_end > body_start and not has_body:
                    # Before anything is kept for it.
                    self._refuse_body(command)
                if body_end >= size:
                    self._missing = body_end + 1 - size
                    self._check_login(body_end - start)
                    break
                if data[body_end]:
                    what = "" if version is None else f"{digits} bytes of the "
                    raise RemoteProtocolError(f"no NUL after the {what}body")
            if version is None:
                self._check_login(body_end - start)
            if has_body:
                kept = data[start + len(command) + 1 : head_end + 1] if is_plain and count else b""
                frames.append(Frame(command, headers, data[body_start:body_end], kept))
            else:
                if body_end > body_start and data[body_start:body_end].strip(b"\r\n"):
                    self._refuse_body(command)
                frames.append(Frame(command, headers))
            if version is None:
                # What follows can only be read once this frame has settled the version.
                self._pending += memoryview(data)[body_end + 1 :]
                return
            start = body_end + 1
        self._pending += memoryview(data)[start:]
        self._check_pending()

    def _may_be_complete(self, data: bytes) -> bool:
        """True if the received bytes may complete the pending frame."""
        if self._missing:
            self._missing -= len(data)
            return self._missing <= 0
        if self._awaits and not any(byte in data for byte in self._awaits):
            self._check_pending()
            return False
        return True

    def _careful_headers(self, command: str, head: str, has_carriage_returns: bool) -> dict[str, str]:
        """The headers of a frame that is in some way unusual: repeated, escaped, padded, or wrong."""
        if "\0" in head:
            raise RemoteProtocolError("NUL inside a frame's header")
        if has_carriage_returns:
            head = _without_carriage_returns(head)
        headers: dict[str, str] = {}
        for line in head.split("\n")[1:]:
            name, colon, value = line.partition(":")
            if self.version is Version.V1_0:
                # The examples of STOMP 1.0 pad their headers, and many clients do as they do.
                name, value = name.strip(" "), value.strip(" ")
            if not colon or not name:
                raise RemoteProtocolError(f"header line{self._quoted(line)} is not name:value")
            if "\\" in line and self.version not in (None, Version.V1_0) and command not in UNESCAPED_COMMANDS:
                name, value = self._unescaped(name), self._unescaped(value)
            headers.setdefault(name, value)
        return headers

    def _unescaped(self, text: str) -> str:
        try:
            if self.version is Version.V1_1 and "\\r" in text.replace("\\\\", ""):
                raise KeyError("\\r")
            return unescape(text)
        except KeyError as error:
            raise RemoteProtocolError(f"undefined escape {error.args[0]!r} in a header") from error

    def _refuse_body(self, command: str) -> None:
        """STOMP 1.0 alone says of a command, SUBSCRIBE, that its body is ignored."""
        if command not in COMMANDS_WITHOUT_BODY:
            raise RemoteProtocolError(unknown_command(command, self.version))
        if not (command == "SUBSCRIBE" and self.version is Version.V1_0):
            raise RemoteProtocolError(f"{command} must have no body, and no content-length above 0")

    def _quoted(self, text: str) -> str:
        """Return the peer's text for an error message; nothing before the login, where it may be a passcode."""
        return "" if self.version is None else f" {text[:100]!r}"

    def _check_login(self, size: int) -> None:
        if self.version is None and size > LOGIN_BYTES_MAX:
            raise RemoteProtocolError(f"more than {LOGIN_BYTES_MAX} bytes before CONNECT is complete")

    def _check_pending(self) -> None:
        size = len(self._pending)
        self._check_login(size)
        if not self._missing:
            if self._awaits == b"\n\0":
                if size > HEADER_BYTES_MAX:
                    raise RemoteProtocolError(f"more than {HEADER_BYTES_MAX} bytes of headers in one frame")
                if self._pending.count(b"\n") > HEADERS_MAX + 1:
                    # Now, and not after having looked at it again with every piece that comes.
                    raise RemoteProtocolError(f"more than {HEADERS_MAX} headers in one frame")
            elif size > HEADER_BYTES_MAX + self._body_bytes_max:
                raise RemoteProtocolError(f"frame without an end after {HEADER_BYTES_MAX + self._body_bytes_max} bytes")


def unknown_command(command: str, version: Version | None) -> str:
    """Return the reason why a command is refused; `version` is the agreed one, None before the login."""
    if version is None:
        return "unknown command before CONNECT is complete"
    capitals = command.upper()
    is_near = capitals != command and (capitals in COMMANDS_WITH_BODY or capitals in COMMANDS_WITHOUT_BODY)
    return f"unknown command {command[:100]!r}" + (f"; is {capitals} meant?" if is_near else "")


def _without_carriage_returns(head: str) -> str:
    """Line ends of STOMP 1.2 made plain line feeds; a carriage return anywhere else must be escaped.

    The blank line's own CR is not in `head`, but the one before its line feed may be.
    """
    lines = [line.removesuffix("\r") for line in head.split("\n")]
    if any("\r" in line for line in lines):
        raise RemoteProtocolError("carriage return inside a header; STOMP 1.2 escapes it as \\r")
    return "\n".join(lines)
