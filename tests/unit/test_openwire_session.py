"""Tests of the session of OpenWire, which negotiates the wire format and refuses each login."""

import struct

import pytest

from truenext.errors import Code, OtherProtocolError, RemoteProtocolError
from truenext.model.answers import ErrorAnswer
from truenext.model.limits import LOGIN_BYTES_MAX
from truenext.wire.openwire.session import OpenWireSession

WIRE_FORMAT_INFO = b"\x01ActiveMQ" + struct.pack(">i?ii", 12, True, 4, 0)
FAULT = ErrorAnswer("no", Code.NOT_SUPPORTED, "no", None)


def frame_of(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def command(kind: int, *, number: int = 7, is_response_required: bool = True, body: bytes = b"") -> bytes:
    return frame_of(struct.pack(">Bi?", kind, number, is_response_required) + body)


def new_session() -> OpenWireSession:
    return OpenWireSession(session_id="me", identity="b1", server_name="x")


def receive(session: OpenWireSession, data: bytes, size: int) -> None:
    for at in range(0, len(data), size):
        assert list(session.receive(data[at : at + size])) == []


def negotiated() -> OpenWireSession:
    session = new_session()
    receive(session, frame_of(WIRE_FORMAT_INFO), 100)
    session.outgoing.clear()
    return session


def read_map(data: bytes) -> dict[str, int | bool]:
    (count,) = struct.unpack_from(">i", data)
    at, values = 4, dict[str, int | bool]()
    for _ in range(count):
        (length,) = struct.unpack_from(">H", data, at)
        name, tag = data[at + 2 : at + 2 + length].decode(), data[at + 2 + length]
        at += 3 + length
        values[name] = struct.unpack_from(">?" if tag == 1 else ">q", data, at)[0]
        assert tag in (1, 6)
        at += 1 if tag == 1 else 8
    assert at == len(data)
    return values


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_wire_format_info_is_answered_once_with_loose_encoding(size: int) -> None:
    session = new_session()
    assert session.is_opening and not session.outgoing
    assert session.replies.encode_fault(FAULT) == b"", "nothing is sent before the client's"
    receive(session, frame_of(WIRE_FORMAT_INFO), size)
    answer = bytes(session.outgoing)
    length, kind, magic, version, has_properties, properties = struct.unpack_from(">iB8si?i", answer)
    assert (length, kind, magic, version, has_properties) == (len(answer) - 4, 1, b"ActiveMQ", 12, True)
    values = read_map(answer[-properties:])
    assert not values["TightEncodingEnabled"] and not values["CacheEnabled"] and values["MaxFrameSize"] > 0
    assert not session.pending and session.replies.encode_fault(FAULT) != b""


@pytest.mark.parametrize("is_response_required", [False, True])
def test_login_is_refused_with_the_answer_that_its_client_waits_for(is_response_required: bool) -> None:
    session = negotiated()
    login = command(3, number=258, is_response_required=is_response_required, body=bytes(20))
    with pytest.raises(RemoteProtocolError, match="does not speak OpenWire yet") as refused:
        list(session.receive(login))
    assert refused.value.code is Code.NOT_SUPPORTED
    fault = ErrorAnswer("no", Code.NOT_SUPPORTED, "no", session.last_receipt)
    answer = session.replies.encode_fault(fault)
    throwable = b"\x01\x01\x00\x16javax.jms.JMSException\x01\x00\x02no"
    if is_response_required:
        assert answer == frame_of(b"\x1f" + bytes(5) + struct.pack(">i", 258) + throwable)
    else:
        assert answer == frame_of(b"\x10" + bytes(5) + throwable + b"\0")


def test_client_may_end_without_a_login() -> None:
    session = negotiated()
    receive(session, command(11), 3)
    assert session.is_closed


@pytest.mark.parametrize("data", [command(10), frame_of(b"\0")])
def test_keep_alive_infos_do_not_count_towards_the_bytes_of_a_login(data: bytes) -> None:
    session = negotiated()
    if data[4] == 0:
        with pytest.raises(RemoteProtocolError, match=f"more than {LOGIN_BYTES_MAX} bytes"):
            receive(session, data * LOGIN_BYTES_MAX, 1000)
    else:
        receive(session, data * LOGIN_BYTES_MAX, 1000)


@pytest.mark.parametrize("size", [LOGIN_BYTES_MAX, 2**31 - 1, 2**32 - 1])
def test_larger_login_is_refused_before_it_is_complete(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"more than {LOGIN_BYTES_MAX} bytes before ConnectionInfo"):
        list(negotiated().receive(struct.pack(">I", size)))


@pytest.mark.parametrize("data", [command(3), frame_of(b"\0"), frame_of(b"\x01activemq" + bytes(9))])
def test_first_command_other_than_wire_format_info_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="is no WireFormatInfo") as refused:
        list(new_session().receive(data))
    assert refused.value.code is Code.MALFORMED_FRAME


@pytest.mark.parametrize("session", [new_session(), negotiated()])
def test_frame_without_bytes_is_refused(session: OpenWireSession) -> None:
    with pytest.raises(RemoteProtocolError, match="has no bytes"):
        list(session.receive(frame_of(b"") + frame_of(WIRE_FORMAT_INFO)))


def test_other_protocol_is_named() -> None:
    with pytest.raises(OtherProtocolError, match="the client speaks STOMP, and this port speaks OpenWire"):
        list(new_session().receive(b"CONNECT\naccept-version:1.2\n\n\0"))
