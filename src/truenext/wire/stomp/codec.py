"""Decoder: makes frames from the bytes of a STOMP connection.

The decoder takes bytes as they arrive, in parts of any size, and returns whole frames. If the bytes are no frame by the
specification, it raises RemoteProtocolError, and must not be used afterwards. It allocates nothing for a frame whose
content-length exceeds the limit.

    frame = command EOL *(header EOL) EOL body NUL *(EOL)
    EOL   = LF, in STOMP 1.2 and before the version is known also CR LF

A frame whose header names have come before is read by its shape (shapes.py). This file decodes all other frames.

Two deviations of real clients are accepted: NULs between frames, where line ends may come, and line ends in place of an
empty body.
"""

from collections.abc import Callable
from sys import maxsize
from typing import Generic

from truenext.errors import Code, RemoteProtocolError
from truenext.model.header_lines import unescape
from truenext.model.limits import BODY_BYTES_MAX, HEADER_BYTES_MAX, HEADERS_MAX, LOGIN_BYTES_MAX
from truenext.wire.stomp.frame import UNESCAPED_COMMANDS, Frame, Version
from truenext.wire.stomp.shapes import Read, Shape, ShapeCache

COMMANDS_WITH_BODY = frozenset({"SEND", "MESSAGE", "ERROR"})
COMMANDS_WITHOUT_BODY = frozenset(
    {
        *("CONNECT", "STOMP", "CONNECTED", "SUBSCRIBE", "UNSUBSCRIBE", "ACK", "NACK"),
        *("BEGIN", "COMMIT", "ABORT", "RECEIPT", "DISCONNECT"),
    }
)
_BETWEEN_FRAMES = b"\n\r\0"
"""Bytes that may come between frames: heart-beats, line ends after a frame, and NULs that programs in C leave there."""
_NUMBER_LENGTH_MAX = 10
"""Maximum number of digits of a content-length. A longer number is above any limit."""

_SHAPES_MAX = 4
"""Maximum number of shapes that one connection tries for each frame."""
_SHAPE_CHECKS_AT = frozenset({1, 2, 4, 8, 16, 32})
"""Numbers of consecutive frames without a shape at which a shape is searched; after 32, at each _SHAPE_CHECK_INTERVAL.
Searches are rare, so that they cost little if a client's frames never have the same header names."""
_SHAPE_CHECK_INTERVAL = 64
_UNUSUAL_BYTES_PER_CALL = 8 * 1024
"""Bytes of headers with escapes or repeated names that one call decodes. The next call decodes the rest: such headers
take 0.4 us for each byte, which would be 0.1 s for one read of a socket."""
_MISSES_MAX = 16
"""Number of consecutive frames without a shape after which the shapes of the connection are dropped, because the client
now sends other frames."""


class Decoder(Generic[Read]):
    """Decoder for a client or a broker. A known shape converts its frames, for example to commands; all other frames
    become `Frame` objects."""

    __slots__ = (
        *(
            "_awaited_bytes",
            "_body_bytes_max",
            "_fault",
            "_has_rest",
            "_header_bytes_max",
            "_headers_max",
            "_misses",
            "_missing_bytes",
            "_on_names",
        ),
        *("_shapes", "_skipped_bytes", "_known_shapes", "has_more", "pending", "version"),
    )

    def __init__(
        self,
        shapes: ShapeCache[Read],
        body_bytes_max: int = BODY_BYTES_MAX,
        header_bytes_max: int = HEADER_BYTES_MAX,
        headers_max: int = HEADERS_MAX,
        *,
        on_names: Callable[[str, dict[str, str]], None] | None = None,
    ) -> None:
        """`on_names` is called with command and headers of the first plain frame (see shapes.py), and of later plain
        frames for which a shape is searched. So sooner or later `on_names` gets each header name that no shape of the
        connection has."""
        self._on_names = on_names
        self._body_bytes_max = body_bytes_max
        self._header_bytes_max = header_bytes_max
        self._headers_max = headers_max
        self.version: Version | None = None
        """Agreed version, which the caller sets; None before the login. Until then a frame must not be larger than a
        login."""
        self.pending = bytearray()
        """Beginning of an incomplete frame. This is always the same object; a caller that stops reading may clear
        it."""
        self.has_more = False
        """True if the caller must call `receive(b"")` now: `pending` may contain further frames, or the returned frames
        are followed by an error."""
        self._missing_bytes = 0
        """Number of bytes that must still come for the frame in `pending`; 0 if it is not known."""
        self._awaited_bytes = b""
        """Set of byte values. If `_missing_bytes` is 0, `pending` is decoded again only once one of these bytes has
        come."""
        self._fault: RemoteProtocolError | None = None
        """Error in the bytes after the frames that were returned last; the next call raises it."""
        self._skipped_bytes = 0
        """Number of bytes that came between frames before a version was agreed."""
        self._has_rest = False
        """True if the last call has left complete frames in `pending`, for the next call."""

        self._known_shapes = shapes
        self._shapes: tuple[Shape[Read], ...] = ()
        """Shapes that are tried for each frame of this connection, the most recently found first."""
        self._misses = 0
        """Number of plain frames (see shapes.py) that `_decode` has decoded since the last frame that was read by a
        shape."""

    def receive(self, data: bytes) -> list[Frame | Read]:
        """Return the frames that `data` completes. Before a version is agreed this is at most one frame; `receive(b"")`
        returns the next.

        Raises: RemoteProtocolError if the bytes are not STOMP, or exceed a limit. Complete frames before the fault are
        returned, and the next call raises. So the result does not depend on how the bytes are split.
        """
        if self._fault is not None:
            raise self._fault
        frames: list[Frame | Read] = []
        try:
            self._decode(data, frames)
        except RemoteProtocolError as error:
            if not frames:
                raise
            self._fault = error
        self.has_more = bool(frames) and (self.version is None or self._fault is not None or self._has_rest)
        return frames

    def _decode(self, data: bytes, frames: list[Frame | Read]) -> None:
        """Decode the frames that `data` completes, and add them to `frames`. The code that most frames need is inlined
        here, because calls for each frame would cost some percent."""
        if self.pending:
            self.pending += data
            if not self._may_be_complete(data):
                return
            data = bytes(self.pending)
            self.pending.clear()
        self._missing_bytes = 0
        self._awaited_bytes = b""
        self._has_rest = False
        unusual_bytes = 0
        version = self.version
        has_carriage_returns = version in (None, Version.V1_2) and b"\r" in data
        may_be_padded = version is Version.V1_0
        find = data.find
        start = 0
        size = len(data)
        while True:
            if self._shapes:
                start = self._read_by_shapes(data, start, frames)
            while start < size and data[start] in _BETWEEN_FRAMES:
                start += 1
            if version is None:
                self._skipped_bytes += start
                self._check_login(0)
            if start == size:
                return

            # The head.
            head_end = find(b"\n\n", start, start + self._header_bytes_max)
            body_start = head_end + 2
            if head_end < 0 or has_carriage_returns:
                head_end, body_start = self._find_unusual_head(data, start, head_end, has_carriage_returns)
                if head_end < 0:
                    break
            try:
                head = data[start:head_end].decode()
            except UnicodeDecodeError as error:
                what = "" if version is None else f": {error}"
                raise RemoteProtocolError(f"header is not UTF-8{what}", Code.MALFORMED_FRAME) from error
            command, *lines = head.split("\n")
            count = len(lines)
            headers: dict[str, str]
            if count == 1:
                # Most acknowledgements have one header; this is three times faster than the general way.
                name, colon, value = lines[0].partition(":")
                headers = {name: value} if colon else {}
            else:
                try:
                    headers = dict([line.split(":", 1) for line in lines])
                except ValueError:
                    headers = {}
            # As many names as lines and as many colons: no name is repeated, and no value has a colon.
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
                headers = self._parse_unusual_headers(command, head, has_carriage_returns)
            if count > self._headers_max:
                raise RemoteProtocolError(f"more than {self._headers_max} headers in one frame", Code.MALFORMED_FRAME)

            # The body.
            length = headers.get("content-length")
            if length is None:
                body_end = find(b"\0", body_start)
                if body_end < 0:
                    self._awaited_bytes = b"\0"
                    break
                if body_end - body_start > self._body_bytes_max:
                    raise RemoteProtocolError(f"body of more than {self._body_bytes_max} bytes", Code.MALFORMED_FRAME)
            else:
                body_end = self._find_body_end(data, start, body_start, command, length)
                if body_end < 0:
                    break
            if version is None:
                self._check_login(body_end - start)
            if command in COMMANDS_WITH_BODY:
                header_lines = data[start + len(command) + 1 : head_end + 1] if is_plain and count else b""
                frames.append(Frame(command, headers, data[body_start:body_end], header_lines))
            else:
                if body_end > body_start and data[body_start:body_end].strip(b"\r\n"):
                    self._refuse_body(command)
                frames.append(Frame(command, headers))
            if version is None:
                # The rest can only be decoded once this frame has settled the version.
                self.pending += memoryview(data)[body_end + 1 :]
                return
            if is_plain:
                self._misses = misses = self._misses + 1
                if misses in _SHAPE_CHECKS_AT or not misses % _SHAPE_CHECK_INTERVAL:
                    self._find_shape(version, command, headers, data, start)
            else:
                unusual_bytes += head_end - start
                if unusual_bytes > _UNUSUAL_BYTES_PER_CALL:
                    self._has_rest = True
                    self.pending += memoryview(data)[body_end + 1 :]
                    return
            start = body_end + 1
        self.pending += memoryview(data)[start:]
        self._check_pending()

    def _find_unusual_head(self, data: bytes, start: int, head_end: int, has_carriage_returns: bool) -> tuple[int, int]:
        """Return the end of a frame's header, and the start of its body. `head_end` is the position of the first blank
        line without a carriage return; -1 if there is none. The returned end is -1 if the header is incomplete."""
        limit = start + self._header_bytes_max
        if has_carriage_returns:
            crlf = data.find(b"\n\r\n", start, head_end + 1 if head_end >= 0 else limit)
            if crlf >= 0:
                return crlf, crlf + 3
        if head_end < 0:
            if data.find(b"\0", start, limit) >= 0:
                raise _malformed("NUL inside a frame's header")
            self._awaited_bytes = b"\n\0"
        return head_end, head_end + 2

    def _find_body_end(self, data: bytes, start: int, body_start: int, command: str, length: str) -> int:
        """Return the end of the body of a frame with this content-length; -1 if the body has not come whole yet."""
        # Like `are_digits`, without a call.
        if not (length.isdigit() and length.isascii()):
            raise _malformed(f"content-length{self._quoted(length)} is not a number of bytes")
        digits = length if len(length) <= _NUMBER_LENGTH_MAX else length.lstrip("0") or "0"
        body_bytes = int(digits) if len(digits) <= _NUMBER_LENGTH_MAX else maxsize
        if body_bytes > self._body_bytes_max:
            raise _malformed(f"content-length{self._quoted(length)} is more than {self._body_bytes_max} bytes")
        body_end = body_start + body_bytes
        if body_bytes and command not in COMMANDS_WITH_BODY:
            # Before any of the body is kept.
            self._refuse_body(command)
        if body_end >= len(data):
            self._missing_bytes = body_end + 1 - len(data)
            self._check_login(body_end - start)
            return -1
        if data[body_end]:
            what = "" if self.version is None else f"{digits} bytes of the "
            raise _malformed(f"no NUL after the {what}body")
        return body_end

    def _read_by_shapes(self, data: bytes, start: int, frames: list[Frame | Read]) -> int:
        """Read frames by the connection's shapes, from `start` on. Return the position of the first byte that no shape
        has read."""
        size = len(data)
        last = -1
        while last < start < size:
            last = start
            for shape in self._shapes:
                end = shape.read(data, start, frames, self._body_bytes_max)
                if end > start:
                    start = end
                    shape.uses += 1
                    self._misses = 0
        return start

    def _find_shape(self, version: Version, command: str, headers: dict[str, str], data: bytes, start: int) -> None:
        """Find a shape for the plain frame (see shapes.py) at `start`, and try this shape first on later frames. If
        there is none, and no shape has read any of the last _MISSES_MAX plain frames, drop all shapes of the
        connection."""
        if self._on_names is not None:
            self._on_names(command, headers)
        shape = self._known_shapes.get(version, command, tuple(headers))
        if shape is not None and shape.read(data, start, [], self._body_bytes_max) > start:
            others = [each for each in self._shapes if each is not shape]
            self._shapes = (shape, *others[: _SHAPES_MAX - 1])
        elif self._misses >= _MISSES_MAX:
            self._shapes = ()

    def _may_be_complete(self, data: bytes) -> bool:
        """Return whether `data`, the last bytes of `pending`, may complete the frame in `pending`."""
        if self._missing_bytes:
            self._missing_bytes -= len(data)
            return self._missing_bytes <= 0
        if self._awaited_bytes and not any(byte in data for byte in self._awaited_bytes):
            self._check_pending()
            return False
        return True

    def _parse_unusual_headers(self, command: str, head: str, has_carriage_returns: bool) -> dict[str, str]:
        """Return the headers of a frame in which headers may be repeated, escaped, padded or invalid.

        Raises: RemoteProtocolError if a header is invalid
        """
        if "\0" in head:
            raise _malformed("NUL inside a frame's header")
        if has_carriage_returns:
            head = _without_carriage_returns(head)
        headers: dict[str, str] = {}
        for line in head.split("\n")[1:]:
            name, colon, value = line.partition(":")
            if self.version is Version.V1_0:
                # The examples of STOMP 1.0 pad their headers, and many clients follow them.
                name, value = name.strip(" "), value.strip(" ")
            if not colon or not name:
                raise _malformed(f"header line{self._quoted(line)} is not name:value")
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
            raise _malformed(f"undefined escape {error.args[0]!r} in a header") from error

    def _refuse_body(self, command: str) -> None:
        """Refuse a frame that has a body but should have none. A SUBSCRIBE of STOMP 1.0 is not refused: its body is
        ignored, as the specification says.

        Raises: RemoteProtocolError for any other command
        """
        if command not in COMMANDS_WITHOUT_BODY:
            raise _malformed(unknown_command(command, self.version))
        if not (command == "SUBSCRIBE" and self.version is Version.V1_0):
            raise _malformed(f"{command} must have no body, and no content-length above 0")

    def _quoted(self, text: str) -> str:
        """Return text of the peer in quotes, for an error. Before the login the result is "", because the text may be a
        passcode."""
        return "" if self.version is None else f" {text[:100]!r}"

    def _check_login(self, size: int) -> None:
        """Check, before a version is agreed, that a peer has not sent more bytes than a login may have. `size` is the
        number of bytes of its frame so far.

        Raises: RemoteProtocolError if the peer has sent more
        """
        if self.version is None and self._skipped_bytes + size > LOGIN_BYTES_MAX:
            raise _malformed(f"more than {LOGIN_BYTES_MAX} bytes before CONNECT is complete")

    def _check_pending(self) -> None:
        size = len(self.pending)
        self._check_login(size)
        if not self._missing_bytes:
            if self._awaited_bytes == b"\n\0":
                if size > self._header_bytes_max:
                    raise _malformed(f"more than {self._header_bytes_max} bytes of headers in one frame")
                if self.pending.count(b"\n") > self._headers_max + 1:
                    # Now, and not after decoding it again with every piece that comes.
                    raise _malformed(f"more than {self._headers_max} headers in one frame")
            elif size > self._header_bytes_max + self._body_bytes_max:
                raise _malformed(f"frame without an end after {self._header_bytes_max + self._body_bytes_max} bytes")


def _malformed(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(reason, Code.MALFORMED_FRAME)


def unknown_command(command: str, version: Version | None) -> str:
    """Return the error for a frame with an unknown command. `version` is the agreed version, None before the login."""
    if version is None:
        return "unknown command before CONNECT is complete"
    capitals = command.upper()
    is_near = capitals != command and (capitals in COMMANDS_WITH_BODY or capitals in COMMANDS_WITHOUT_BODY)
    return f"unknown command {command[:100]!r}" + (f"; is {capitals} meant?" if is_near else "")


def _without_carriage_returns(head: str) -> str:
    """Replace the line ends of STOMP 1.2 (CR LF) by line feeds.

    `head` may end with the CR of its last line.

    Raises: RemoteProtocolError if there is any other carriage return, which should be escaped
    """
    lines = [line.removesuffix("\r") for line in head.split("\n")]
    if any("\r" in line for line in lines):
        raise _malformed("carriage return inside a header; STOMP 1.2 escapes it as \\r")
    return "\n".join(lines)
