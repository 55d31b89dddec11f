"""Decoder: makes frames of the bytes of a STOMP connection.

Bytes go in as they arrive, cut anywhere; whole frames come out. The decoder raises RemoteProtocolError at bytes that
are not a frame by the specification, and is then of no further use. It allocates nothing for a frame whose own
header says that it is too large.

    frame = command EOL *(header EOL) EOL body NUL *(EOL)
    EOL   = LF, in STOMP 1.2 and before the version is known also CR LF

Frames with the header names of earlier ones are decoded by their shape (shapes.py); this file is the general way.

Deviations of real clients are accepted: NULs where line ends may come between frames, and line ends where a frame
has no body.
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
"""Heart-beats, line ends after a frame, and NULs that programs in C leave after it."""
_NUMBER_LENGTH_MAX = 10
"""Digits of a content-length: a longer one is above any limit."""

_SHAPES_MAX = 4
"""Shapes that one connection keeps using."""
_SHAPE_CHECKS_AT = frozenset({1, 2, 4, 8, 16, 32})
"""Numbers of frames decoded the general way after which a shape is searched; later at an interval. Searches are
rare, as they must cost nothing for a client whose frames do not repeat."""
_SHAPE_CHECK_INTERVAL = 64
_UNUSUAL_BYTES_PER_CALL = 8 * 1024
"""Bytes of headers with escapes or repeated names after which a call leaves the rest to the next one: they take 0.4 us
a byte, 0.1 s for one read of a socket."""
_MISSES_MAX = 16
"""Frames without a shape after which a connection has changed its pattern: its shapes are dropped."""


class Decoder(Generic[Read]):
    """Decoder of either side of a connection; frames of a known shape become what the shape reads."""

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
        """`on_names` is called with command and headers of the first plain frame, and of others of which a shape is
        searched: names that no shape has are among them."""
        self._on_names = on_names
        self._body_bytes_max = body_bytes_max
        self._header_bytes_max = header_bytes_max
        self._headers_max = headers_max
        self.version: Version | None = None
        """Agreed version, set by the caller; None before. Until then a frame may be no larger than a login."""
        self.pending = bytearray()
        """Beginning of an incomplete frame; always the same object. A caller that stops reading may clear it."""
        self.has_more = False
        """True if `receive(b"")` must follow: there may be more frames, or an error after the returned ones."""
        self._missing_bytes = 0
        """Bytes that must come before `pending` is decoded again; 0 if unknown."""
        self._awaited_bytes = b""
        """Bytes one of which must come before `pending` is decoded again, if `_missing_bytes` is unknown."""
        self._fault: RemoteProtocolError | None = None
        """Error in the bytes after the frames that were returned last."""
        self._skipped_bytes = 0
        """Bytes between frames that came before a version was agreed."""
        self._has_rest = False
        """The last call has left complete frames in `pending`."""

        self._known_shapes = shapes
        self._shapes: tuple[Shape[Read], ...] = ()
        """Shapes of this connection's frames, the one learned last first."""
        self._misses = 0
        """Number of plain frames (`_decode`) since the last frame that was read by its shape."""

    def receive(self, data: bytes) -> list[Frame | Read]:
        """Return the frames that `data` completes; before a version is agreed only one, the next by `receive(b"")`.

        Raises: RemoteProtocolError if the bytes are not STOMP, or exceed a limit; after complete frames only the
        next call does, so that it does not matter how the bytes were cut.
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
        """Decode the frames that `data` completes. What most frames need is inlined: a call costs some percent."""
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
        """Return the end of a frame's header, and the start of its body, if the first blank line without a carriage
        return is at `head_end`, or not there (-1). The returned end is -1 if the header has not ended yet."""
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
        """Return the end of a frame's body, given its content-length; -1 if it has not come yet."""
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
        """Read frames by their shapes, from `start` on; return the position of the first byte that was not read."""
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
        """Find the shape of a plain frame that begins at `start`, for later frames."""
        if self._on_names is not None:
            self._on_names(command, headers)
        shape = self._known_shapes.get(version, command, tuple(headers))
        if shape is not None and shape.read(data, start, [], self._body_bytes_max) > start:
            others = [each for each in self._shapes if each is not shape]
            self._shapes = (shape, *others[: _SHAPES_MAX - 1])
        elif self._misses >= _MISSES_MAX:
            self._shapes = ()

    def _may_be_complete(self, data: bytes) -> bool:
        """Whether `data`, the last bytes of `pending`, may complete the frame there."""
        if self._missing_bytes:
            self._missing_bytes -= len(data)
            return self._missing_bytes <= 0
        if self._awaited_bytes and not any(byte in data for byte in self._awaited_bytes):
            self._check_pending()
            return False
        return True

    def _parse_unusual_headers(self, command: str, head: str, has_carriage_returns: bool) -> dict[str, str]:
        """Return the headers of a frame that is unusual: repeated, escaped, padded, or invalid."""
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
        """Refuse the body of a command without one. STOMP 1.0 says of SUBSCRIBE alone that its body is ignored.

        Raises: RemoteProtocolError
        """
        if command not in COMMANDS_WITHOUT_BODY:
            raise _malformed(unknown_command(command, self.version))
        if not (command == "SUBSCRIBE" and self.version is Version.V1_0):
            raise _malformed(f"{command} must have no body, and no content-length above 0")

    def _quoted(self, text: str) -> str:
        """Quote text of the peer for an error. Nothing of a login is quoted: it may be a passcode."""
        return "" if self.version is None else f" {text[:100]!r}"

    def _check_login(self, size: int) -> None:
        """Check that a peer without an agreed version has not sent too much; `size` is that of its frame so far."""
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
    """Return why a frame is refused; `version` is the agreed one, None before the login."""
    if version is None:
        return "unknown command before CONNECT is complete"
    capitals = command.upper()
    is_near = capitals != command and (capitals in COMMANDS_WITH_BODY or capitals in COMMANDS_WITHOUT_BODY)
    return f"unknown command {command[:100]!r}" + (f"; is {capitals} meant?" if is_near else "")


def _without_carriage_returns(head: str) -> str:
    """Replace the line ends of STOMP 1.2 by line feeds; a carriage return anywhere else must be escaped.

    The blank line's own CR is not in `head`, but the one before its line feed may be.
    """
    lines = [line.removesuffix("\r") for line in head.split("\n")]
    if any("\r" in line for line in lines):
        raise _malformed("carriage return inside a header; STOMP 1.2 escapes it as \\r")
    return "\n".join(lines)
