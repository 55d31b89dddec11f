"""Tests that random and hostile bytes cause no other exception than RemoteProtocolError.

TRUENEXT_EXAMPLES=20000 pytest tests/unit/test_stomp_fuzz.py       longer
"""

import os

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.damage import damage
from truenext.errors import RemoteProtocolError
from truenext.model.answers import ErrorAnswer
from truenext.model.commands import Command, Disconnect, Login, ReceiptRequest, Send
from truenext.model.header_lines import decode_header_lines
from truenext.model.limits import BODY_BYTES_MAX
from truenext.wire.stomp import shapes
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Version
from truenext.wire.stomp.server import StompSession

bounded = settings(
    max_examples=int(os.environ.get("TRUENEXT_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

FRAMES = [
    b"CONNECT\naccept-version:1.0,1.1,1.2\nheart-beat:1000,1000\n\n\0",
    b"STOMP\naccept-version:1.1\n\n\0",
    b"SEND\ndestination:/queue/a\npriority:7\npersistent:true\ncontent-length:3\n\na\0b\0",
    b"SEND\ndestination:/queue/a\nx\\cy:\\n\\\\\nreceipt:r\n\nbody\0\n",
    b"SEND\ndestination: /queue/a \nreply-to:/temp-queue/r\ntransaction:t\n\n\0",
    b"SEND\r\ndestination:/queue/a\r\nexpires:1700000000000\r\ntruenext-producer:p\r\ntruenext-number:1\r\n\r\nbody\0\r\n",
    b"SEND\ndestination:/control/status\nreply-to:/queue/r\ncorrelation-id:c\n\n{}\0",
    "SEND\ndestination:/remote-temp-queue/s/r\nn\u00e4me:\u20ac\nredelivered:true\n\n\u00e9\0".encode(),
    b"SUBSCRIBE\nid:1\ndestination:/queue/a\nack:client\nactivemq.prefetchSize:10\n\n\0",
    b"SUBSCRIBE\nid:2\ndestination:/temp-queue/r\n\n\0\n\n",
    b"SUBSCRIBE\nid:3\ndestination:/queue/a?consumer.selector=a%20%3E%201&consumer.priority=3\n\n\0",
    b"SUBSCRIBE\nid:4\ndestination:a\nprefetch-count:10\ndurable:true\nauto-delete:false\nno-local:False\n\n\0",
    b"ACK\nid:5@1\nmessage-id:truenext-b1-5\nsubscription:1\n\n\0",
    b"NACK\nid:5@1\nmessage-id:truenext-b1-5\nsubscription:1\ntransaction:t\n\n\0",
    b"BEGIN\ntransaction:t\nreceipt:1\n\n\0",
    b"COMMIT\ntransaction:t\ntruenext-producer:p\ntruenext-number:2\ntruenext-gapless:true\n\n\0",
    b"ABORT\ntransaction:t\n\n\0",
    b"UNSUBSCRIBE\nid:1\ndestination:/queue/a\n\n\0",
    b"DISCONNECT\nreceipt:bye\n\n\0",
    b"MESSAGE\nmessage-id:1\n\nbody\0",
    b"\n\n\r\n",
]
TOKENS = [b"\0", b"\n", b"\r", b"\r\n", b"\n\n", b":", b"\\", b"\\r", b" ", b"-", b"@", b"9" * 20, b"\xff", b"\xc3"]
TOKENS += [b"content-length:", b"content-length:%d\n" % (BODY_BYTES_MAX + 1), b"receipt:", b"SEND\n", "\u0665".encode()]


@st.composite
def damaged_streams(draw: st.DrawFn) -> bytes:
    """Frames with bytes flipped, cut out, put in or said twice."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(FRAMES), min_size=1, max_size=6))))
    for _ in range(draw(st.integers(0, 4))):
        damage(draw, data, TOKENS)
    return bytes(data)


STREAMS = damaged_streams() | st.binary(max_size=200) | st.lists(st.sampled_from(TOKENS), max_size=30).map(b"".join)
SIZES = st.lists(st.integers(1, 60), max_size=30)
VERSIONS = st.sampled_from(Version)


def chunks(data: bytes, sizes: list[int]) -> list[bytes]:
    made = []
    for size in sizes:
        made.append(data[:size])
        data = data[size:]
    return [*made, data]


Outcome = tuple[list[tuple[str, dict[str, str], bytes]], bool]


def outcome(version: Version | None, pieces: list[bytes], then: Version) -> Outcome:
    """Return the frames a decoder makes of the pieces, and whether it accepted all bytes."""
    decoder = Decoder(shapes.FRAME_SHAPES)
    decoder.version = version
    contents = []
    try:
        for data in pieces:
            while frames := decoder.receive(data):
                data = b""
                contents += [(frame.command, frame.headers, frame.body) for frame in frames]
                decoder.version = decoder.version or then
    except RemoteProtocolError:
        return contents, False
    return contents, True


@bounded
@given(st.none() | VERSIONS, VERSIONS, STREAMS, SIZES)
def test_a_decoder_takes_the_same_bytes_alike_however_they_are_cut(
    version: Version | None, then: Version, data: bytes, sizes: list[int]
) -> None:
    frames, is_accepted = outcome(version, [data], then)
    bytewise, is_accepted_bytewise = outcome(
        version, [data[position : position + 1] for position in range(len(data))], then
    )
    pieces, is_accepted_in_pieces = outcome(version, chunks(data, sizes), then)
    assert is_accepted == is_accepted_bytewise == is_accepted_in_pieces
    if is_accepted:
        assert frames == bytewise == pieces
    else:
        assert frames == bytewise[: len(frames)]
        assert pieces == bytewise[: len(pieces)]


@bounded
@given(st.none() | VERSIONS, VERSIONS, STREAMS)
def test_decoder_returns_only_valid_frames(version: Version | None, then: Version, data: bytes) -> None:
    for command, headers, body in outcome(version, [data], then)[0]:
        assert command and not set("\0\n") & set(command)
        assert "" not in headers and not any("\0" in name + value for name, value in headers.items())
        assert len(body) == int(headers.get("content-length", len(body)))
        assert not body or command in ("SEND", "MESSAGE", "ERROR")


HOP_HEADERS = {
    *("receipt", "transaction", "truenext-producer", "truenext-number", "truenext-ttl", "truenext-gapless"),
    *("message-id", "subscription", "ack"),
    *("redelivered", "timestamp", "truenext-sequence", "truenext-deliveries", "truenext-attempts"),
}


def check_command(command: Command) -> None:
    if isinstance(command, Send):
        message = command.message
        assert 0 <= message.priority <= 9 and 0 <= message.expires_ms < 2**64
        headers = decode_header_lines(message.header)
        assert message.header.count(b"\n") == len(headers)
        assert int(headers["content-length"]) == len(message.body)
        assert not headers.keys() & HOP_HEADERS


def feed(server: StompSession, pieces: list[bytes]) -> None:
    """Feed the pieces to the server, up to the first that is refused."""
    for data in pieces:
        commands = server.receive(data)
        try:
            for command in commands:
                check_command(command)
        except RemoteProtocolError as error:
            # Nothing more is asked, and the client can be told.
            assert list(commands) == []
            answer = server.replies.encode_fault(
                ErrorAnswer(str(error)[:200], error.code, str(error), server.last_receipt)
            )
            assert answer.startswith(b"ERROR\n") and answer.index(b"\0\n") == len(answer) - 2
            return


def new_server() -> StompSession:
    return StompSession(session_id="s", identity="b1", server_name="truenext/0")


@bounded
@given(STREAMS, SIZES)
def test_hostile_bytes_before_the_login_are_refused_or_harmless(data: bytes, sizes: list[int]) -> None:
    feed(new_server(), chunks(data, sizes))


SECRET = "Qz7"
LOGINS = [
    f"CONNECT\naccept-version:1.2\nlogin:{SECRET}\npasscode:{SECRET}\n\n\0".encode(),
    f"CONNECT\naccept-version:1.2\npasscode\\c{SECRET}\n\n\0".encode(),
    f"STOMP\r\npasscode{SECRET}\r\n\r\n\0".encode(),
    *(
        f"CONNECT\n{name}:{SECRET}\n\n{SECRET}\0".encode()
        for name in ("accept-version", "heart-beat", "content-length", "receipt", "client-id", SECRET)
    ),
    f"CONNECT\nheart-beat:{'9' * 20},{SECRET}\n\n\0".encode(),
    f"CONNECT\naccept-version:3.0\nreceipt:{SECRET}\n\n\0".encode(),
    f"SEND\ndestination:/queue/{SECRET}\nreceipt:{SECRET}\n\n{SECRET}\0".encode(),
    f"{SECRET} / HTTP/1.1\r\nAuthorization: {SECRET}\r\n\r\n\0".encode(),
    f"connect\npasscode:{SECRET}\n\n{SECRET}\0".encode(),
    f"passcode:{SECRET}\xff\n\n\0".encode("latin-1"),
]


@bounded
@given(st.sampled_from(LOGINS), st.data())
def test_secret_of_a_broken_login_is_never_repeated_in_an_error(login: bytes, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(login)))
    token = data.draw(st.sampled_from([b"", *TOKENS]))
    server = new_server()
    try:
        for command in server.receive(login[:position] + token + login[position:]):
            assert isinstance(command, Login) and SECRET not in repr(command)
    except RemoteProtocolError as error:
        if not server.is_connected:
            answer = server.replies.encode_fault(
                ErrorAnswer(str(error)[:200], error.code, str(error), server.last_receipt)
            )
            assert SECRET not in str(error) and SECRET.encode() not in answer


@bounded
@given(VERSIONS, STREAMS, SIZES)
def test_hostile_bytes_after_the_login_are_refused_or_harmless(version: Version, data: bytes, sizes: list[int]) -> None:
    server = new_server()
    assert list(server.receive(b"CONNECT\naccept-version:%b\n\n\0" % version.value.encode())) == [Login()]
    assert server.is_connected
    feed(server, chunks(data, sizes))


@bounded
@given(VERSIONS, STREAMS)
def test_hostile_bytes_in_the_read_of_the_login_are_refused_or_harmless(version: Version, data: bytes) -> None:
    feed(new_server(), [b"CONNECT\naccept-version:%b\n\n\0" % version.value.encode() + data])


@bounded
@given(VERSIONS, STREAMS)
@example(Version.V1_2, b"DISCONNECT\n\n\0SEND\ndestination:/queue/a\n\n\0")
def test_server_returns_no_request_after_a_disconnect(version: Version, data: bytes) -> None:
    is_over = False
    try:
        for command in new_server().receive(b"CONNECT\naccept-version:%b\n\n\0" % version.value.encode() + data):
            assert not is_over or isinstance(command, ReceiptRequest)
            is_over = is_over or isinstance(command, Disconnect)
    except RemoteProtocolError:
        pass


@bounded
@given(
    VERSIONS,
    st.sampled_from(["SEND", "SUBSCRIBE", "UNSUBSCRIBE", "ACK", "NACK", "BEGIN", "COMMIT", "ABORT", "DISCONNECT"]),
    st.dictionaries(
        st.sampled_from([*sorted(HOP_HEADERS), "destination", "id", "ack", "priority", "persistent", "expires"])
        | st.sampled_from(["reply-to", "activemq.prefetchSize", "correlation-id", "selector"]),
        st.sampled_from(["/queue/a", "/temp-queue/r", "/remote-temp-queue//", "/control/x", "1", "5@s"])
        | st.sampled_from(["", "true", "auto", "truenext-b1-5", "client", "-1", "\u0665"])
        | st.sampled_from(["9" * 19, "9" * 20, "/queue/" + "x" * 300])
        | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n\\:"), max_size=10),
        max_size=8,
    ),
)
def test_random_values_of_known_headers_are_refused_or_harmless(
    version: Version, command: str, headers: dict[str, str]
) -> None:
    server = new_server()
    list(server.receive(b"CONNECT\naccept-version:%b\n\n\0" % version.value.encode()))
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    feed(server, [f"{command}\n{lines}\n\0".encode()])
