"""Detector of other protocols: recognizes them by the first bytes that a client or server sends.

    bytes --> the protocol of the port, or unknown: the bytes go on to the decoder
          --> TLS, HTTP, AMQP, ...: a client gets an answer that it can read, if its protocol has one
          --> too few to decide: wait for more bytes

Only the first bytes of each protocol are compared, so a few bytes decide, in however many pieces they come.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from truenext.errors import Code, OtherProtocolError

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
    *(("STOMP", tuple(command + end)) for command in (b"CONNECT", b"STOMP") for end in (b"\n", b"\r")),
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


class _Port(NamedTuple):
    """Protocol of a port, as the errors name it."""

    protocol: str
    versions: str
    other: str
    """Protocol for which a broker may have another port."""


_STOMP_PORT = _Port("STOMP", "STOMP 1.0 to 1.2", "OpenWire")
_OPENWIRE_PORT = _Port("OpenWire", "OpenWire", "STOMP")


def detector_of_stomp_port() -> ProtocolDetector:
    """Return a detector for one client of a port that speaks STOMP."""
    return ProtocolDetector(_AT_STOMP_PORT, partial(_client_error, _STOMP_PORT))


def detector_of_openwire_port() -> ProtocolDetector:
    """Return a detector for one client of a port that speaks OpenWire."""
    return ProtocolDetector(_AT_OPENWIRE_PORT, partial(_client_error, _OPENWIRE_PORT))


def detector_for_server() -> ProtocolDetector:
    """Return a detector for a server that is to speak STOMP."""
    return ProtocolDetector(_SERVER_PREFIXES, _server_error)


def _of_others(port: _Port) -> _Prefixes:
    return tuple((protocol, prefix) for protocol, prefix in _CLIENT_PREFIXES if protocol != port.protocol)


_AT_STOMP_PORT, _AT_OPENWIRE_PORT = _of_others(_STOMP_PORT), _of_others(_OPENWIRE_PORT)


def _server_error(protocol: str) -> OtherProtocolError:
    return OtherProtocolError(f"the server speaks {protocol}, not STOMP", protocol, b"")


def _client_error(port: _Port, protocol: str) -> OtherProtocolError:
    reason = f"the client speaks {protocol}, and this port speaks {port.versions}"
    answer = b""
    if protocol == "TLS":
        reason += f" without TLS: connect without TLS, or {_add_listener(f'{port.protocol.lower()}+ssl://HOST:PORT')}"
        answer = _TLS_ALERT
    elif protocol == "HTTP":
        answer = _http_answer(f"{reason}: connect with a client of {port.protocol}.\n".encode())
    elif protocol == port.other:
        scheme = protocol.lower()
        reason += f": for {protocol}, {_add_listener(f'{scheme}://HOST:PORT, with TLS {scheme}+ssl://HOST:PORT,')}"
        if protocol == "STOMP":
            answer = _stomp_answer(reason)
    return OtherProtocolError(reason, protocol, answer)


def _add_listener(address: str) -> str:
    return f"add {address} to the addresses at which the broker listens (--listen)"


def _http_answer(text: bytes) -> bytes:
    lines = (
        "HTTP/1.1 400 Bad Request",
        "Content-Type: text/plain; charset=utf-8",
        f"Content-Length: {len(text)}",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode() + text


def _stomp_answer(reason: str) -> bytes:
    lines = (
        "ERROR",
        f"message:{reason}",
        f"truenext-code:{Code.NOT_SUPPORTED.value}",
        "content-type:text/plain",
        f"content-length:{len(reason)}",
    )
    return "".join(f"{line}\n" for line in (*lines, "")).encode() + reason.encode() + b"\0\n"
