"""Tests that the first bytes of clients and servers of other protocols are recognized."""

import struct

import pytest

from truenext.errors import OtherProtocolError
from truenext.wire.stomp.protocol_detector import ProtocolDetector, detector_for_client, detector_for_server

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


def pieces_of(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def recognized(pieces: list[bytes], opening: ProtocolDetector | None = None) -> OtherProtocolError:
    opening = opening or detector_for_client()
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
    check_forwarded(detector_for_client(), data, size)


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
