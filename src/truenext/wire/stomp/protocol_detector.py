"""Detector of other protocols: recognizes them by the first bytes that a client or server sends.

    bytes --> STOMP, or unknown: the bytes go on to the decoder
          --> TLS, HTTP, AMQP, ...: a client gets an answer that it can read, if its protocol has one
          --> too few to decide: wait for more bytes

Only the first bytes of each protocol are compared, so a few bytes decide, in however many pieces they come.
"""

from collections.abc import Callable

from truenext.errors import OtherProtocolError

_METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT")
_ANY = None

_Prefix = tuple[int | None, ...]
_Prefixes = tuple[tuple[str, _Prefix], ...]

_BOTH_SIDES: _Prefixes = (
    ("AMQP", tuple(b"AMQP")),
    # A WIREFORMAT_INFO after its length, which is small.
    ("OpenWire", (0x00, _ANY, _ANY, _ANY, 0x01, *b"ActiveMQ")),
)
_CLIENT_PREFIXES: _Prefixes = (
    *_BOTH_SIDES,
    ("TLS", (0x16, 0x03)),
    # STOMP has a line end after CONNECT, HTTP a space.
    *(("HTTP", tuple(method + b" ")) for method in _METHODS),
    ("HTTP", tuple(b"PRI * HTTP/2")),
    # A CONNECT: its length in one to four bytes, then the name of the protocol, which version 3.1 spells differently.
    *(
        ("MQTT", (0x10, *[_ANY] * size, 0x00, len(name), *name))
        for size in range(1, 5)
        for name in (b"MQTT", b"MQIsdp")
    ),
)
_SERVER_PREFIXES: _Prefixes = (
    *_BOTH_SIDES,
    # An alert: CONNECT is not a ClientHello.
    ("TLS", (0x15, 0x03)),
    ("HTTP", tuple(b"HTTP/")),
    # Some HTTP servers read CONNECT as a request of HTTP/0.9, and answer with a page without a status line.
    *(("HTTP", tuple(page)) for page in (b"<!DOCTYPE", b"<!doctype", b"<html", b"<HTML")),
    ("SSH", tuple(b"SSH-")),
    ("Redis", tuple(b"-ERR ")),
)

_TLS_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"
"""Answer to a client that speaks TLS: the fatal alert protocol_version."""


class ProtocolDetector:
    """Detector for one connection. The detector buffers the first bytes until the protocol is known."""

    def __init__(self, prefixes: _Prefixes, make_error: Callable[[str], OtherProtocolError]) -> None:
        self._data = b""
        self._prefixes = prefixes
        self._make_error = make_error

    def receive(self, data: bytes) -> bytes | None:
        """Add bytes. Return all bytes so far if they cannot be another protocol; None if more bytes must decide.

        Raises: OtherProtocolError if the bytes are of another protocol
        """
        self._data = data = self._data + data
        may_be_other = False
        for protocol, prefix in self._prefixes:
            if all(byte is _ANY or byte == received for byte, received in zip(prefix, data, strict=False)):
                if len(data) >= len(prefix):
                    raise self._make_error(protocol)
                may_be_other = True
        return None if may_be_other else data


def detector_for_client() -> ProtocolDetector:
    return ProtocolDetector(_CLIENT_PREFIXES, _client_error)


def detector_for_server() -> ProtocolDetector:
    return ProtocolDetector(_SERVER_PREFIXES, _server_error)


def _server_error(protocol: str) -> OtherProtocolError:
    return OtherProtocolError(f"the server speaks {protocol}, not STOMP", protocol, b"")


def _client_error(protocol: str) -> OtherProtocolError:
    reason = f"the client speaks {protocol}, and this port speaks STOMP 1.0 to 1.2"
    if protocol == "TLS":
        reason += " without TLS"
        return OtherProtocolError(reason, protocol, _TLS_ALERT)
    return OtherProtocolError(reason, protocol, _http_answer(reason) if protocol == "HTTP" else b"")


def _http_answer(reason: str) -> bytes:
    text = f"{reason}: connect with a client of STOMP.\n".encode()
    lines = (
        "HTTP/1.1 400 Bad Request",
        "Content-Type: text/plain; charset=utf-8",
        f"Content-Length: {len(text)}",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode() + text
