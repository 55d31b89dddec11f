"""OpenWire session: negotiates the wire format, and refuses each login, because the broker does not speak the rest of
OpenWire yet.

A client must send its WireFormatInfo in time. It may send its ConnectionInfo much later: a pool opens connections and
uses them when it needs them.
"""

from collections.abc import Callable, Iterator, Sequence
from struct import Struct, pack

from truenext.errors import Code, RemoteProtocolError
from truenext.model.answers import ErrorAnswer, Receipt
from truenext.model.commands import Command, Login
from truenext.model.destination import Destination
from truenext.model.limits import BODY_BYTES_MAX, HEADER_BYTES_MAX, LOGIN_BYTES_MAX
from truenext.wire.protocol_detector import ProtocolDetector, detector_of_openwire_port
from truenext.wire.session import Delivery, ProtocolRules

OPENING_SECONDS_MAX = 15.0
"""Seconds from the accept of a connection to its complete WireFormatInfo. A client that is slow to start needs a TLS
handshake in a process that loads its classes meanwhile."""
OPENWIRE_RULES = ProtocolRules(
    opening_seconds_max=OPENING_SECONDS_MAX,
    login_bytes_max=LOGIN_BYTES_MAX,
    late_opening=f"no WireFormatInfo within {OPENING_SECONDS_MAX:g} seconds",
    unchecked_login="",
    displaced_login="no ConnectionInfo yet, and {newer} newer connections wait to log in: start the connection at once",
    plain_text="this port speaks TLS: connect with ssl://, not with tcp://",
    missing_end="no ShutdownInfo",
    has_takeover=False,
    has_control_requests=False,
)

_WIRE_FORMAT_INFO, _CONNECTION_INFO, _KEEP_ALIVE_INFO, _SHUTDOWN_INFO = 1, 3, 10, 11
_CONNECTION_ERROR, _EXCEPTION_RESPONSE = 16, 31
_MAGIC = b"ActiveMQ"
_VERSION = 12
_HEAD = Struct(">iBi?")
"""Size, type, number and wish for a response, with which a command begins."""
_FALSE, _LONG = b"\x01\x00", b"\x06"
"""Value false, and tag of a long, in a primitive map."""


class OpenWireReplies:
    """Encoder of refusals to one client."""

    parts_per_message = 1
    heart_beat = _HEAD.pack(6, _KEEP_ALIVE_INFO, 0, False)

    def __init__(self) -> None:
        self.is_negotiated = False
        """True once the client has sent its WireFormatInfo. Nothing may be sent before."""

    def encode_deliveries(
        self,
        subscription: str,
        deliveries: Sequence[Delivery],
        parts: list[bytes],
        round_number: int = 0,
        *,
        is_browse: bool = False,
    ) -> None:
        raise AssertionError("a connection without a login gets no messages")

    def encode_end_of_browse(self, subscription: str, destination: Destination) -> bytes:
        raise AssertionError("a connection without a login has no browsers")

    def encode_end_of_pull_request(
        self, subscription: str, destination: Destination, unused: int, correlation: str | None
    ) -> bytes:
        raise AssertionError("a connection without a login does not pull")

    def encode_receipt(self, receipt: Receipt) -> bytes:
        raise AssertionError("a connection without a login gets no responses")

    def encode_fault(self, fault: ErrorAnswer) -> bytes:
        """Encode an ExceptionResponse to the command whose number the receipt is, or without a receipt a
        ConnectionError. The result is empty before the client's WireFormatInfo."""
        if not self.is_negotiated:
            return b""
        throwable = b"\x01" + _string("javax.jms.JMSException") + _string(fault.summary)
        if fault.receipt is None:
            return _command(_CONNECTION_ERROR, throwable + b"\x00")
        return _command(_EXCEPTION_RESPONSE, pack(">i", int(fault.receipt)) + throwable)


class OpenWireSession:
    """Broker's side of OpenWire on one connection."""

    rules = OPENWIRE_RULES
    client_id = ""
    is_connected = False
    beat_check_s = 0.0
    silence_limit_s = 0.0

    def __init__(
        self,
        *,
        session_id: str,
        identity: str,
        server_name: str,
        on_ineffective_header: Callable[[str, str, str], None] = lambda *_: None,
    ) -> None:
        self.replies = OpenWireReplies()
        self.pending = bytearray()
        self.outgoing = bytearray()
        self.last_receipt: str | None = None
        self.is_closed = False
        self._detector: ProtocolDetector | None = detector_of_openwire_port()
        self._login_bytes = 0
        """Bytes of the frames before the login, without those of KeepAliveInfos."""

    @property
    def is_opening(self) -> bool:
        return not self.replies.is_negotiated

    def receive(self, data: bytes) -> Iterator[Command]:
        if self._detector is not None:
            opened = self._detector.receive(data)
            if opened is None:
                return
            self._detector, data = None, opened
        self.pending += data
        while not self.is_closed:
            frame = self._take_frame()
            if frame is None:
                return
            yield from self._interpret(frame)

    def _take_frame(self) -> bytes | None:
        """Return the next complete frame with its size; None if there is none.

        Raises: RemoteProtocolError if the frame is empty, or the client sends too much before its login
        """
        pending = self.pending
        if len(pending) < 4:
            return None
        size = 4 + int.from_bytes(pending[:4], "big")
        if size == 4:
            raise _malformed("a frame of OpenWire has no bytes")
        if self._login_bytes + size > LOGIN_BYTES_MAX:
            raise _malformed(f"more than {LOGIN_BYTES_MAX} bytes before ConnectionInfo is complete")
        if len(pending) < size:
            return None
        frame = bytes(pending[:size])
        del pending[:size]
        return frame

    def _interpret(self, frame: bytes) -> Iterator[Command]:
        yield from ()
        self.last_receipt = None
        kind = frame[4]
        if kind != _KEEP_ALIVE_INFO:
            self._login_bytes += len(frame)
        if self.is_opening:
            if kind != _WIRE_FORMAT_INFO or frame[5:13] != _MAGIC:
                raise _malformed("the first command of the client is no WireFormatInfo of OpenWire")
            self.outgoing += _wire_format_info()
            self.replies.is_negotiated = True
        elif kind == _CONNECTION_INFO and len(frame) >= _HEAD.size:
            _, _, number, is_response_required = _HEAD.unpack_from(frame)
            self.last_receipt = str(number) if is_response_required else None
            raise RemoteProtocolError("this broker does not speak OpenWire yet: connect with STOMP", Code.NOT_SUPPORTED)
        elif kind == _SHUTDOWN_INFO:
            self.is_closed = True
        elif kind not in (0, _KEEP_ALIVE_INFO):
            raise _malformed(f"command {kind} of OpenWire before ConnectionInfo")

    def accept_last(self) -> None:
        pass

    def mark_refused(self) -> int:
        return 0

    def encode_connected(self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool) -> bytes:
        raise AssertionError("each login is refused")


def _wire_format_info() -> bytes:
    """Encode the broker's WireFormatInfo: loose encoding, no cache, and no KeepAliveInfos."""
    longs = {"MaxFrameSize": BODY_BYTES_MAX + HEADER_BYTES_MAX, "MaxInactivityDuration": 0}
    flags = ("TightEncodingEnabled", "CacheEnabled", "StackTraceEnabled", "SizePrefixDisabled")
    entries = [_name(name) + _LONG + pack(">q", value) for name, value in longs.items()]
    entries += [_name(name) + _FALSE for name in flags]
    properties = pack(">i", len(entries)) + b"".join(entries)
    body = _MAGIC + pack(">i?i", _VERSION, True, len(properties)) + properties
    return pack(">iB", 1 + len(body), _WIRE_FORMAT_INFO) + body


def _command(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(6 + len(body), kind, 0, False) + body


def _string(text: str) -> bytes:
    """Encode a text of the broker, which has no characters that modified UTF-8 encodes in another way."""
    return b"\x01" + _name(text)


def _name(text: str) -> bytes:
    encoded = text.encode()
    return pack(">H", len(encoded)) + encoded


def _malformed(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(reason, Code.MALFORMED_FRAME)
