"""Tests of the order of frames, and of the agreement on version and heart-beats.

The tables here are written from the STOMP specifications, not from protocol.py.
"""

import pytest

from truenext.errors import LocalProtocolError, RemoteProtocolError
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.protocol import ProtocolState, Side, StompProtocol, choose_version, parse_heart_beat
from truenext.wire.stomp.shapes import FRAME_SHAPES

REQUESTS = {"SEND", "SUBSCRIBE", "UNSUBSCRIBE", "ACK", "NACK", "BEGIN", "COMMIT", "ABORT", "DISCONNECT"}
LOGINS = {"CONNECT", "STOMP"}
ANSWERS = {"CONNECTED", "MESSAGE", "RECEIPT", "ERROR"}
STRANGE = {"", "connect", "Send", "SEND ", "PUBLISH", "GET / HTTP/1.1", "\u00c9"}
EVERYTHING = REQUESTS | LOGINS | ANSWERS | STRANGE

ALLOWED = {
    (Side.SERVER, ProtocolState.CONNECTING): LOGINS,
    (Side.SERVER, ProtocolState.CONNECTED): REQUESTS,
    (Side.SERVER, ProtocolState.CLOSED): set(),
    (Side.CLIENT, ProtocolState.CONNECTING): {"CONNECTED", "ERROR"},
    (Side.CLIENT, ProtocolState.CONNECTED): {"MESSAGE", "RECEIPT", "ERROR"},
    # A client that said DISCONNECT still reads what was under way.
    (Side.CLIENT, ProtocolState.CLOSED): {"MESSAGE", "RECEIPT", "ERROR"},
}
MAY_BE_SENT = {
    (Side.CLIENT, ProtocolState.CONNECTING): LOGINS,
    (Side.CLIENT, ProtocolState.CONNECTED): REQUESTS,
    (Side.CLIENT, ProtocolState.CLOSED): set(),
    (Side.SERVER, ProtocolState.CONNECTED): {"MESSAGE", "RECEIPT"},
    (Side.SERVER, ProtocolState.CLOSED): {"MESSAGE", "RECEIPT"},
}


def protocol_in(side: Side, state: ProtocolState, version: Version = Version.V1_2) -> StompProtocol[Frame]:
    """One side of a conversation, brought into a state by frames only."""
    protocol = StompProtocol(side, FRAME_SHAPES)
    if side is Side.CLIENT:
        protocol.send(Frame("CONNECT", {}))
    if state is ProtocolState.CONNECTING:
        return protocol
    protocol.check(Frame("CONNECT" if side is Side.SERVER else "CONNECTED", {}))
    protocol.set_version(version)
    if state is ProtocolState.CLOSED:
        if side is Side.SERVER:
            protocol.check(Frame("DISCONNECT", {}))
        else:
            protocol.send(Frame("DISCONNECT", {}))
    assert protocol.state is state
    return protocol


@pytest.mark.parametrize("command", sorted(EVERYTHING))
@pytest.mark.parametrize(("side", "state"), ALLOWED.keys())
def test_a_frame_may_come_exactly_when_the_specification_says_so(
    side: Side, state: ProtocolState, command: str
) -> None:
    protocol = protocol_in(side, state)
    allowed = command in ALLOWED[side, state]
    assert command not in protocol.stateless or allowed
    if allowed:
        protocol.check(Frame(command, {}))
    else:
        with pytest.raises(RemoteProtocolError):
            protocol.check(Frame(command, {}))
        assert protocol.state is state


@pytest.mark.parametrize("command", sorted(EVERYTHING - {"CONNECTED", "ERROR"}))
@pytest.mark.parametrize(("side", "state"), MAY_BE_SENT.keys())
def test_a_frame_may_be_sent_exactly_when_the_specification_says_so(
    side: Side, state: ProtocolState, command: str
) -> None:
    protocol = protocol_in(side, state)
    if command in MAY_BE_SENT[side, state]:
        assert protocol.send(Frame(command, {})).startswith(command.encode() + b"\n")
    else:
        with pytest.raises(LocalProtocolError):
            protocol.send(Frame(command, {}))
        assert protocol.state is state


@pytest.mark.parametrize("state", ProtocolState)
def test_a_server_may_always_say_error(state: ProtocolState) -> None:
    assert protocol_in(Side.SERVER, state).send(Frame("ERROR", {"message": "x"})) == b"ERROR\nmessage:x\n\n\0\n"


def test_a_broker_ends_its_frames_with_a_line_feed_and_a_client_does_not() -> None:
    """1.2, "Augmented BNF". PHP's stomp extension waits for one; other brokers need not like one."""
    server, client = (
        protocol_in(Side.SERVER, ProtocolState.CONNECTED),
        protocol_in(Side.CLIENT, ProtocolState.CONNECTED),
    )
    assert server.send(Frame("RECEIPT", {"receipt-id": "x"})) == b"RECEIPT\nreceipt-id:x\n\n\0\n"
    assert client.send(Frame("BEGIN", {"transaction": "x"})) == b"BEGIN\ntransaction:x\n\n\0"


@pytest.mark.parametrize("state", ProtocolState)
@pytest.mark.parametrize("command", ["CONNECTED", "ERROR"])
def test_client_cannot_send_frames_of_a_server(state: ProtocolState, command: str) -> None:
    with pytest.raises(LocalProtocolError):
        protocol_in(Side.CLIENT, state).send(Frame(command, {}))


@pytest.mark.parametrize(
    ("side", "state", "command", "follower"),
    [
        (Side.SERVER, ProtocolState.CONNECTING, "CONNECT", ProtocolState.CONNECTING),
        (Side.SERVER, ProtocolState.CONNECTED, "SEND", ProtocolState.CONNECTED),
        (Side.SERVER, ProtocolState.CONNECTED, "DISCONNECT", ProtocolState.CLOSED),
        (Side.CLIENT, ProtocolState.CONNECTING, "CONNECTED", ProtocolState.CONNECTED),
        (Side.CLIENT, ProtocolState.CONNECTING, "ERROR", ProtocolState.CLOSED),
        (Side.CLIENT, ProtocolState.CONNECTED, "MESSAGE", ProtocolState.CONNECTED),
        (Side.CLIENT, ProtocolState.CONNECTED, "RECEIPT", ProtocolState.CONNECTED),
        (Side.CLIENT, ProtocolState.CONNECTED, "ERROR", ProtocolState.CLOSED),
        (Side.CLIENT, ProtocolState.CLOSED, "RECEIPT", ProtocolState.CLOSED),
    ],
)
def test_a_frame_leads_to_the_next_state(
    side: Side, state: ProtocolState, command: str, follower: ProtocolState
) -> None:
    protocol = protocol_in(side, state)
    protocol.check(Frame(command, {}))
    assert protocol.state is follower


@pytest.mark.parametrize(("side", "state"), ALLOWED.keys())
def test_frames_that_need_no_check_are_those_that_change_nothing(side: Side, state: ProtocolState) -> None:
    steady = protocol_in(side, state).stateless
    if state is ProtocolState.CONNECTED:
        assert steady == ALLOWED[side, state] - {"DISCONNECT", "ERROR"}
    for command in steady:
        protocol = protocol_in(side, state)
        protocol.check(Frame(command, {}))
        assert protocol.state is state


def test_frame_out_of_turn_and_unknown_frame_have_different_errors() -> None:
    connecting = protocol_in(Side.SERVER, ProtocolState.CONNECTING)
    with pytest.raises(RemoteProtocolError, match="SEND is not allowed while connecting"):
        connecting.check(Frame("SEND", {}))
    with pytest.raises(RemoteProtocolError, match="unknown command before CONNECT is complete"):
        connecting.check(Frame("MESSAGE", {}))
    with pytest.raises(RemoteProtocolError, match=r"unknown command 'MESSAGE'$"):
        protocol_in(Side.SERVER, ProtocolState.CONNECTED).check(Frame("MESSAGE", {}))
    with pytest.raises(RemoteProtocolError, match="unknown command 'send'; is SEND meant"):
        protocol_in(Side.SERVER, ProtocolState.CONNECTED).check(Frame("send", {}))
    with pytest.raises(RemoteProtocolError, match="CONNECT is not allowed while connected"):
        protocol_in(Side.SERVER, ProtocolState.CONNECTED).check(Frame("CONNECT", {}))
    with pytest.raises(RemoteProtocolError, match="SEND is not allowed while closed"):
        protocol_in(Side.SERVER, ProtocolState.CLOSED).check(Frame("SEND", {}))
    with pytest.raises(RemoteProtocolError) as refused:
        protocol_in(Side.SERVER, ProtocolState.CONNECTED).check(Frame("X" * 100_000, {}))
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("accepted", "version"),
    [
        (None, Version.V1_0),
        ("1.0", Version.V1_0),
        ("1.1", Version.V1_1),
        ("1.2", Version.V1_2),
        ("1.0,1.1,2.0", Version.V1_1),
        ("1.0,1.1,1.2", Version.V1_2),
        ("1.2,1.1,1.0", Version.V1_2),
        ("1.2,1.2", Version.V1_2),
        (" 1.1 , 1.0", Version.V1_1),
        ("2.0,,1.0", Version.V1_0),
    ],
)
def test_the_highest_common_version_is_chosen(accepted: str | None, version: Version) -> None:
    """1.2, "Protocol Negotiation"."""
    assert choose_version(accepted) is version


@pytest.mark.parametrize("accepted", ["", ",", "2.0", "1.3,2.1", "1.20", "1", "1.2;1.1", "V1_2"])
def test_without_a_common_version_ours_are_named(accepted: str) -> None:
    with pytest.raises(RemoteProtocolError, match=r"Supported protocol versions are 1\.0 1\.1 1\.2"):
        choose_version(accepted)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0,0", (0, 0)), ("1000,0", (1000, 0)), ("0,30000", (0, 30000)), ("999999999,1", (999999999, 1))],
)
def test_a_heart_beat_is_two_numbers(text: str, numbers: tuple[int, int]) -> None:
    assert parse_heart_beat(text) == numbers


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "1",
        "1,",
        ",1",
        "1,2,3",
        "-1,0",
        "1.5,0",
        "a,b",
        "0, 0",
        "1e3,0",
        "\u0661,0",
        "\u00b2,0",
        "1" * 10 + ",0",
        "0," + "1" * 5000,
    ],
)
def test_malformed_heart_beat_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="heart-beat") as refused:
        parse_heart_beat(text)
    assert str(refused.value) in (
        "heart-beat is not two numbers of milliseconds",
        "heart-beat of more than 999999999 milliseconds (11 days)",
    )
    assert ("more than" in str(refused.value)) == (len(text) > 10)


def deliver(data: bytes, receiver: StompProtocol[Frame]) -> list[Frame]:
    """Receive and check the bytes one by one; return the frames."""
    frames: list[Frame] = []
    for position in range(len(data)):
        frames += receiver.receive(data[position : position + 1])
    for frame in frames:
        receiver.check(frame)
    return frames


@pytest.mark.parametrize("version", Version)
def test_a_client_and_a_server_understand_each_other(version: Version) -> None:
    client, server = StompProtocol(Side.CLIENT, FRAME_SHAPES), StompProtocol(Side.SERVER, FRAME_SHAPES)
    login = Frame("CONNECT", {"accept-version": version.value, "passcode": "a\\n:b"})
    (frame,) = deliver(client.send(login), server)
    assert frame.headers == login.headers
    assert server.version is client.version is Version.V1_0
    server.set_version(choose_version(frame.headers["accept-version"]))

    (frame,) = deliver(server.send(Frame("CONNECTED", {"version": server.version.value})), client)
    client.set_version(Version(frame.headers["version"]))
    assert client.version is server.version is version

    text = "a:b" if version is Version.V1_0 else "a:b\n\\c"
    (frame,) = deliver(client.send(Frame("SEND", {"text": text}, b"\0body")), server)
    assert (frame.headers["text"], frame.body) == (text, b"\0body")
    (frame,) = deliver(server.send(Frame("MESSAGE", {"text": text}, b"\0body")), client)
    assert (frame.headers["text"], frame.body) == (text, b"\0body")

    (frame,) = deliver(client.send(Frame("DISCONNECT", {"receipt": text})), server)
    assert server.state is client.state is ProtocolState.CLOSED
    (frame,) = deliver(server.send(Frame("RECEIPT", {"receipt-id": frame.headers["receipt"]})), client)
    assert frame.headers == {"receipt-id": text}


def test_client_decodes_frames_after_connected_by_the_agreed_version() -> None:
    client = protocol_in(Side.CLIENT, ProtocolState.CONNECTING)
    (frame,) = client.receive(b"CONNECTED\r\nversion:1.2\r\n\r\n\0\nMESSAGE\r\na\\c:\\r\r\n\r\nbody\0")
    client.check(frame)
    client.set_version(Version(frame.headers["version"]))
    (message,) = client.receive(b"")
    client.check(message)
    assert (message.headers, message.body) == ({"a:": "\r"}, b"body")


def test_a_refused_client_reads_the_error() -> None:
    client, server = StompProtocol(Side.CLIENT, FRAME_SHAPES), StompProtocol(Side.SERVER, FRAME_SHAPES)
    deliver(client.send(Frame("STOMP", {"accept-version": "3.0"})), server)
    with pytest.raises(RemoteProtocolError) as refused:
        choose_version("3.0")
    (frame,) = deliver(server.send(Frame("ERROR", {"message": str(refused.value)}, b"why")), client)
    assert (frame.command, frame.body) == ("ERROR", b"why")
    assert client.state is ProtocolState.CLOSED
    with pytest.raises(LocalProtocolError, match="SEND may not be sent while closed"):
        client.send(Frame("SEND", {}))
