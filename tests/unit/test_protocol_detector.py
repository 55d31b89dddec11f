"""Tests that the first bytes of clients and servers of other protocols are recognized."""

import struct
from collections.abc import Callable

import pytest

from truenext.errors import OtherProtocolError
from truenext.wire.protocol_detector import (
    ProtocolDetector,
    detector_for_server,
    detector_of_openwire_port,
    detector_of_stomp_port,
)
from truenext.wire.stomp.server import StompSession

CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32)
OTHERS = [
    ("TLS", CLIENT_HELLO),
    ("HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ("HTTP", b"HEAD / HTTP/1.0\r\n\r\n"),
    ("HTTP", b"POST /queue/a HTTP/1.1\r\n\r\nSEND\n\n\0"),
    ("HTTP", b"OPTIONS * HTTP/1.1\r\n\r\n"),
    ("HTTP", b"CONNECT example.org:443 HTTP/1.1\r\n\r\n"),
    ("HTTP", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ("AMQP", b"AMQP\x00\x01\x00\x00"),
    ("AMQP", b"AMQP\x00\x00\x09\x01"),
    ("MQTT", b"\x10\x0f\x00\x04MQTT\x04\x02\x00\x3c\x00\x03abc"),
    ("MQTT", b"\x10\x8c\x01\x00\x04MQTT\x05" + bytes(133)),
    ("MQTT", b"\x10\x11\x00\x06MQIsdp\x03\x02\x00\x3c\x00\x03abc"),
    ("OpenWire", struct.pack(">I", 0xF0) + b"\x01ActiveMQ\x00\x00\x00\x0c" + bytes(200)),
]
SERVERS = [
    ("TLS", b"\x15\x03\x01\x00\x02\x02\x46"),
    ("TLS", b"\x15\x03\x03\x00\x02\x02\x0a"),
    ("HTTP", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
    ("HTTP", b'<!DOCTYPE HTML>\n<html lang="en">\n'),
    ("HTTP", b"<html><head><title>400 Bad Request</title></head>\r\n"),
    ("AMQP", b"AMQP\x00\x00\x09\x01"),
    ("OpenWire", struct.pack(">I", 0xF0) + b"\x01ActiveMQ\x00\x00\x00\x0c" + bytes(200)),
    ("SSH", b"SSH-2.0-OpenSSH_9.2p1\r\n"),
    ("Redis", b"-ERR unknown command 'CONNECT'\r\n"),
]
STOMP_SERVERS = [
    b"CONNECTED\nversion:1.2\n\n\0",
    b"ERROR\nmessage:no\n\n\0",
    b"\n\nCONNECTED\n\n\0",
    b"\r\nERROR\n\n\0",
    b"AMPQ\n\n\0",
    b"\0\0\0\0\0CONNECTED\n\n\0",
]
STOMP = [
    b"CONNECT\naccept-version:1.2\n\n\0",
    b"CONNECT\r\naccept-version:1.2\r\n\r\n\0",
    b"STOMP\naccept-version:1.2\n\n\0",
    b"\n\nCONNECT\n\n\0",
    b"\0\0\0\0\0CONNECT\n\n\0",
    b"CONNECTED\n\n\0",
    b"GETS\n\n\0",
    b"AMPQ\n\n\0",
    b"\x10CONNECT\n\n\0",
    b"\x16CONNECT\n\n\0",
]


WIRE_FORMAT_INFO = struct.pack(">I", 0xF0) + b"\x01ActiveMQ\x00\x00\x00\x0c" + bytes(200)
OF_STOMP = [
    b"CONNECT\naccept-version:1.2\n\n\0",
    b"CONNECT\r\naccept-version:1.2\r\n\r\n\0",
    b"STOMP\naccept-version:1.2\n\n\0",
    b"STOMP\r\n\r\n\0",
]


def pieces_of(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def recognized(pieces: list[bytes], opening: ProtocolDetector | None = None) -> OtherProtocolError:
    opening = opening or detector_of_stomp_port()
    with pytest.raises(OtherProtocolError) as error:
        for piece in pieces:
            assert opening.receive(piece) is None
    return error.value


@pytest.mark.parametrize(("protocol", "data"), OTHERS)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_first_bytes_of_another_protocol_are_named_however_they_are_cut(protocol: str, data: bytes, size: int) -> None:
    error = recognized(pieces_of(data, size))
    assert error.protocol == protocol
    assert str(error).startswith(f"the client speaks {protocol}, and this port speaks STOMP")


@pytest.mark.parametrize(
    ("detector", "scheme"), [(detector_of_stomp_port, "stomp"), (detector_of_openwire_port, "openwire")]
)
def test_reason_for_a_client_of_tls_names_the_address_with_tls(
    detector: Callable[[], ProtocolDetector], scheme: str
) -> None:
    reason = str(recognized([b"\x16\x03\x01"], detector()))
    assert reason.endswith(
        f"without TLS: connect without TLS, or add {scheme}+ssl://HOST:PORT to the addresses at which the broker "
        "listens (--listen)"
    )


@pytest.mark.parametrize(("protocol", "data"), SERVERS)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_first_bytes_of_a_server_of_another_protocol_are_named_however_they_are_cut(
    protocol: str, data: bytes, size: int
) -> None:
    error = recognized(pieces_of(data, size), detector_for_server())
    assert (error.protocol, error.answer) == (protocol, b"")
    assert str(error) == f"the server speaks {protocol}, not STOMP"


@pytest.mark.parametrize("data", STOMP_SERVERS)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_first_bytes_of_a_server_of_stomp_all_go_on(data: bytes, size: int) -> None:
    check_forwarded(detector_for_server(), data, size)


@pytest.mark.parametrize("data", STOMP)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_first_bytes_of_stomp_and_of_the_unknown_all_go_on(data: bytes, size: int) -> None:
    check_forwarded(detector_of_stomp_port(), data, size)


def check_forwarded(opening: ProtocolDetector, data: bytes, size: int) -> None:
    received = b""
    for piece in pieces_of(data, size):
        received += piece
        opened = opening.receive(piece)
        if opened is not None:
            assert opened == received
            return
    raise AssertionError("it is not decided at its end")


def test_http_is_answered_with_a_page_tls_with_an_alert_and_others_with_nothing() -> None:
    head, _, body = recognized([OTHERS[1][1]]).answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    assert status == "HTTP/1.1 400 Bad Request"
    assert f"Content-Length: {len(body)}" in lines and "Content-Type: text/plain; charset=utf-8" in lines
    assert "the client speaks HTTP, and this port speaks STOMP" in body.decode()
    # An alert record of TLS 1.0, two bytes: fatal, protocol_version (RFC 8446, 6.2).
    assert recognized([CLIENT_HELLO]).answer == b"\x15\x03\x01\x00\x02\x02\x46"
    assert all(recognized([data]).answer == b"" for protocol, data in OTHERS if protocol not in ("HTTP", "TLS"))


@pytest.mark.parametrize(
    ("protocol", "data"),
    [*(each for each in OTHERS if each[0] != "OpenWire"), *(("STOMP", data) for data in OF_STOMP)],
)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_first_bytes_of_another_protocol_at_an_openwire_port_are_named(protocol: str, data: bytes, size: int) -> None:
    error = recognized(pieces_of(data, size), detector_of_openwire_port())
    assert error.protocol == protocol
    assert str(error).startswith(f"the client speaks {protocol}, and this port speaks OpenWire")


@pytest.mark.parametrize("data", [WIRE_FORMAT_INFO, b"\0\0\0\x01\0", b"CONNECTED\n\n\0", b"\n\nCONNECT\n\n\0", b"\xff"])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_first_bytes_of_openwire_and_of_the_unknown_all_go_on_at_an_openwire_port(data: bytes, size: int) -> None:
    check_forwarded(detector_of_openwire_port(), data, size)


def test_stomp_and_openwire_at_the_port_of_the_other_are_told_how_to_listen_for_them() -> None:
    at_stomp, at_openwire = recognized([WIRE_FORMAT_INFO]), recognized([OF_STOMP[0]], detector_of_openwire_port())
    for error, protocol, scheme in ((at_stomp, "OpenWire", "openwire"), (at_openwire, "STOMP", "stomp")):
        assert str(error).endswith(
            f"for {protocol}, add {scheme}://HOST:PORT, with TLS {scheme}+ssl://HOST:PORT, to the addresses at which "
            "the broker listens (--listen)"
        )
    for protocol, data in OTHERS[:-1]:
        if protocol == "TLS":
            continue
        for detector in (detector_of_stomp_port(), detector_of_openwire_port()):
            assert "--listen" not in str(recognized([data], detector))


def test_stomp_client_at_an_openwire_port_gets_an_error_that_stomp_can_read() -> None:
    error = recognized([OF_STOMP[0]], detector_of_openwire_port())
    head, _, rest = error.answer.partition(b"\n\n")
    command, *lines = head.decode().split("\n")
    headers = dict(line.split(":", 1) for line in lines)
    assert (command, headers["message"]) == ("ERROR", str(error))
    assert headers["truenext-code"] == "not-supported"
    assert rest == str(error).encode() + b"\0\n" and headers["content-length"] == str(len(str(error)))


def test_http_and_tls_at_an_openwire_port_get_what_they_can_read() -> None:
    page = recognized([OTHERS[1][1]], detector_of_openwire_port()).answer.decode()
    assert page.startswith("HTTP/1.1 400 Bad Request\r\n") and page.endswith("connect with a client of OpenWire.\n")
    assert recognized([CLIENT_HELLO], detector_of_openwire_port()).answer == b"\x15\x03\x01\x00\x02\x02\x46"


def test_session_of_stomp_looks_at_the_first_bytes() -> None:
    session = StompSession(session_id="me", identity="b1", server_name="x")
    with pytest.raises(OtherProtocolError, match="the client speaks OpenWire"):
        list(session.receive(WIRE_FORMAT_INFO))
