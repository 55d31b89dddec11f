"""Tests that frames are decoded as they were encoded, however their bytes are cut.

The yardstick are the STOMP 1.0, 1.1 and 1.2 specifications; the sections are named at the tests.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from truenext.errors import Code, RemoteProtocolError
from truenext.model.header_lines import encode_header_lines
from truenext.model.limits import ANSWER_BYTES_MAX, BODY_BYTES_MAX, HEADER_BYTES_MAX, HEADERS_MAX, LOGIN_BYTES_MAX
from truenext.wire.stomp import shapes
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version, encode, header_line
from truenext.wire.stomp.protocol import Side, StompProtocol

VERSIONS = list(Version)
ESCAPING_VERSIONS = [Version.V1_1, Version.V1_2]
Content = tuple[str, dict[str, str], bytes]


def decoder(version: Version | None) -> Decoder[Frame]:
    made = Decoder(shapes.FRAME_SHAPES)
    made.version = version
    return made


def content(frame: Frame) -> Content:
    return frame.command, frame.headers, frame.body


def decode(version: Version | None, chunks: Iterable[bytes], then: Version | None = None) -> list[Content]:
    """Decode all frames of the chunks; `then` is the version that the first frame settles."""
    receiver = decoder(version)
    contents: list[Content] = []
    for data in chunks:
        while frames := receiver.receive(data):
            data = b""
            contents += [content(frame) for frame in frames]
            receiver.version = receiver.version or then
    return contents


def one(version: Version | None, data: bytes) -> Frame:
    (frame,) = decoder(version).receive(data)
    return frame


def cut(data: bytes, *positions: int) -> list[bytes]:
    ends = [0, *sorted(positions), len(data)]
    return [data[start:end] for start, end in pairwise(ends)]


def bytewise(data: bytes) -> list[bytes]:
    return [data[position : position + 1] for position in range(len(data))]


# ---- However the bytes are cut ----

COMMON_STREAM: list[tuple[bytes, Content]] = [
    (b"SEND\ndestination:/queue/a\n\nhello\0", ("SEND", {"destination": "/queue/a"}, b"hello")),
    (b"\n\n\n", ("", {}, b"")),
    (b"SEND\nn:1\ncontent-length:7\n\na\0b\n\n\0c\0\n", ("SEND", {"n": "1", "content-length": "7"}, b"a\0b\n\n\0c")),
    (b"BEGIN\ntransaction:t\n\n\0", ("BEGIN", {"transaction": "t"}, b"")),
    (b"DISCONNECT\n\n\0\n", ("DISCONNECT", {}, b"")),
    (b"BEGIN\ntransaction:lf\n\n\n\n\0", ("BEGIN", {"transaction": "lf"}, b"")),
    (b"\0\n\0\0SUBSCRIBE\nid:nul\n\n\n\0", ("SUBSCRIBE", {"id": "nul"}, b"")),
    (b"ACK\ncontent-length:0\nid:1\n\n\0", ("ACK", {"content-length": "0", "id": "1"}, b"")),
    (b"SEND\nfoo:World\nfoo:Hello\nempty:\n\n\n\n\0", ("SEND", {"foo": "World", "empty": ""}, b"\n\n")),
    (
        "SEND\nn\u00e4me:\u20ac \U0001f600\n\n\u00e9\0\n\n".encode(),
        ("SEND", {"n\u00e4me": "\u20ac \U0001f600"}, "\u00e9".encode()),
    ),
]
STREAMS: dict[Version, list[tuple[bytes, Content]]] = {
    Version.V1_0: [
        *COMMON_STREAM,
        (b"SEND\ndestination: /queue/a \n p :q\n\nx\0", ("SEND", {"destination": "/queue/a", "p": "q"}, b"x")),
        (b"SEND\na:\\n\\c\\\\:\n\n\0", ("SEND", {"a": "\\n\\c\\\\:"}, b"")),
        (b"SEND\na:1\na : 2\n\n\0", ("SEND", {"a": "1"}, b"")),
    ],
    Version.V1_1: [
        *COMMON_STREAM,
        (b"SEND\na\\c\\n:\\\\n \\\\\\\\r\n\n\\c\0", ("SEND", {"a:\n": "\\n \\\\r"}, b"\\c")),
        (b"SEND\n a : b \nc:d:e\n\n\0", ("SEND", {" a ": " b ", "c": "d:e"}, b"")),
        (b"MESSAGE\na:x\r\n\n\r\n\0", ("MESSAGE", {"a": "x\r"}, b"\r\n")),
    ],
    Version.V1_2: [
        *COMMON_STREAM,
        (b"\r\n\n\r\n", ("", {}, b"")),
        (b"SEND\r\na:b\r\nc:d\r\n\r\n\r\nx\0\r\n", ("SEND", {"a": "b", "c": "d"}, b"\r\nx")),
        (b"SEND\na:b\n\r\n\n\nx\0", ("SEND", {"a": "b"}, b"\n\nx")),
        (b"SEND\r\na:b\n\n\r\nx\0", ("SEND", {"a": "b"}, b"\r\nx")),
        (b"SEND\r\na:b\r\n\nx\0", ("SEND", {"a": "b"}, b"x")),
        (b"DISCONNECT\r\n\r\n\0", ("DISCONNECT", {}, b"")),
        (b"\r\n\0\r\nABORT\r\na:b\r\n\r\n\r\n\r\n\0", ("ABORT", {"a": "b"}, b"")),
        (b"SEND\r\ncontent-length:5\r\n\r\n\0\r\n\r\n\0", ("SEND", {"content-length": "5"}, b"\0\r\n\r\n")),
        (b"SEND\na\\c\\r\\n:\\\\r\\\\\\r\n\n\\c\0", ("SEND", {"a:\r\n": "\\r\\\r"}, b"\\c")),
        (b"SEND\n a : b \nc:d:e\n\n\0", ("SEND", {" a ": " b ", "c": "d:e"}, b"")),
    ],
}


def stream(version: Version) -> tuple[bytes, list[Content]]:
    pieces = STREAMS[version]
    return b"".join(data for data, _ in pieces), [frame for _, frame in pieces if frame[0]]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stream_gives_its_frames_in_order(version: Version) -> None:
    data, expected = stream(version)
    assert decode(version, [data]) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stream_cut_in_two_anywhere_gives_the_same_frames(version: Version) -> None:
    data, expected = stream(version)
    for position in range(len(data) + 1):
        assert decode(version, cut(data, position)) == expected, position


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stream_cut_in_three_anywhere_gives_the_same_frames(version: Version) -> None:
    data, expected = stream(version)
    positions = random.Random(version.value)
    for _ in range(500):
        first, second = positions.randrange(len(data)), positions.randrange(len(data))
        assert decode(version, cut(data, first, second)) == expected, (first, second)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stream_byte_by_byte_gives_the_same_frames(version: Version) -> None:
    data, expected = stream(version)
    assert decode(version, bytewise(data)) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_frame_is_returned_only_after_its_last_byte(version: Version) -> None:
    for data, expected in STREAMS[version]:
        end = len(data.rstrip(b"\r\n"))
        for size in range(end):
            assert decode(version, [data[:size]]) == []
        assert decode(version, [data[:end]]) == [expected][: bool(end)]


@pytest.mark.parametrize("version", VERSIONS)
def test_login_and_frames_after_it_are_decoded_alike_however_they_are_cut(version: Version) -> None:
    login = b"\n\0\r\nCONNECT\naccept-version:1.2\npasscode:a\\b\\t:c\n\n\n\n\0\n"
    data, expected = stream(version)
    expected = [("CONNECT", {"accept-version": "1.2", "passcode": "a\\b\\t:c"}, b""), *expected]
    assert decode(None, [login + data], version) == expected
    assert decode(None, bytewise(login + data), version) == expected
    for position in range(len(login + data)):
        assert decode(None, cut(login + data, position), version) == expected, position


def test_frames_are_returned_one_at_a_time_before_the_version_is_agreed() -> None:
    receiver = decoder(None)
    (first,) = receiver.receive(b"CONNECT\n\n\0SEND\na:\\c\n\n\0SEND\na:\\c\n\n\0")
    assert first.command == "CONNECT"
    receiver.version = Version.V1_1
    assert [frame.headers["a"] for frame in receiver.receive(b"")] == [":", ":"]
    assert receiver.receive(b"") == []


def test_many_escaped_headers_are_decoded_in_several_calls_and_each_frame_once() -> None:
    """Fixed: one read of them was a step of 0.1 s."""
    headers = b"".join(b"h%d:\\c\n" % number for number in range(100))
    sent = [b"SEND\nn:%d\n%s\nbody\0" % (number, headers) for number in range(300)]
    reader = decoder(Version.V1_2)
    calls = [reader.receive(b"".join(sent)[:-1])]
    while reader.has_more:
        calls.append(reader.receive(b""))
    calls.append(reader.receive(b"\0"))
    assert [frame.headers["n"] for frames in calls for frame in frames] == [str(number) for number in range(300)]
    assert max(map(len, calls)) < 20 and calls[-2] and len(calls[-1]) == 1


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("beat", [b"\n", b"\r\n", b"\0"])
def test_heart_beats_are_no_frames_and_are_not_kept(version: Version, beat: bytes) -> None:
    """Bytes between frames cost nothing, however many there are."""
    receiver = decoder(version)
    for _ in range(3):
        assert receiver.receive(beat * LOGIN_BYTES_MAX) == []
        assert receiver.receive(b"") == []
    (frame,) = receiver.receive(b"\nSTOMP\n\n\0")
    assert frame.command == "STOMP"


# ---- Escapes, padding, repetition ----


@pytest.mark.parametrize("version", ESCAPING_VERSIONS)
def test_escapes_are_read_in_names_and_values(version: Version) -> None:
    """1.1 and 1.2, "Value Encoding"."""
    assert one(version, b"SEND\na\\cb:c\\nd\\\\e\\cf\n\n\0").headers == {"a:b": "c\nd\\e:f"}


@pytest.mark.parametrize("version", ESCAPING_VERSIONS)
@pytest.mark.parametrize("command", [b"ERROR", b"MESSAGE", b"RECEIPT", b"SUBSCRIBE", b"ACK"])
def test_frames_of_an_agreed_version_are_unescaped(version: Version, command: bytes) -> None:
    assert one(version, command + b"\na:\\c\n\n\0").headers == {"a": ":"}


@pytest.mark.parametrize("escape", ["\\t", "\\", "\\\\\\", "\\ ", "\\C", "\\0", "\\:", "\\\u00e4"])
@pytest.mark.parametrize("version", ESCAPING_VERSIONS)
def test_an_undefined_escape_is_refused(version: Version, escape: str) -> None:
    """1.2, "Value Encoding": a fatal protocol error."""
    for line in (f"a:{escape}", f"a:x{escape}y", f"{escape}x:a"):
        with pytest.raises(RemoteProtocolError, match=r"undefined escape|not name:value"):
            decoder(version).receive(f"SEND\n{line}\n\n\0".encode())


def test_an_escaped_carriage_return_is_defined_by_1_2_only() -> None:
    assert one(Version.V1_2, b"SEND\na\\r:\\r\n\n\0").headers == {"a\r": "\r"}
    assert one(Version.V1_1, b"SEND\na\\\\r:\\\\r\n\n\0").headers == {"a\\r": "\\r"}
    for line in (b"a:\\r", b"a:\\\\\\r", b"\\r:a", b"a:x\\\\y\\rz"):
        with pytest.raises(RemoteProtocolError, match="undefined escape"):
            decoder(Version.V1_1).receive(b"SEND\n" + line + b"\n\n\0")


def test_1_0_knows_no_escapes() -> None:
    assert one(Version.V1_0, b"SEND\na\\c:\\r\\n\\t\\\n\n\0").headers == {"a\\c": "\\r\\n\\t\\"}


@pytest.mark.parametrize("version", [*VERSIONS, None])
@pytest.mark.parametrize("command", ["CONNECT", "CONNECTED", "STOMP"])
def test_the_frames_of_a_login_are_never_escaped(version: Version | None, command: str) -> None:
    """1.2, "Value Encoding"; STOMP is to be handled as CONNECT is."""
    frame = Frame(command, {"passcode": "a\\tb:c\\"})
    data = encode(frame, version or Version.V1_2)
    assert data == f"{command}\npasscode:a\\tb:c\\\n\n\0".encode()
    assert content(one(version, data)) == content(frame)


@pytest.mark.parametrize("version", [*VERSIONS, None])
def test_a_colon_in_a_value_needs_no_escape_to_be_read(version: Version | None) -> None:
    assert one(version, b"ERROR\nmessage:a:b::\n\n\0").headers == {"message": "a:b::"}


def test_1_0_trims_the_padding_of_its_own_examples() -> None:
    """1.0, "SUBSCRIBE"."""
    frame = one(Version.V1_0, b"SUBSCRIBE\ndestination: /queue/foo bar\nack : client \n\n\0")
    assert frame.headers == {"destination": "/queue/foo bar", "ack": "client"}
    assert one(Version.V1_0, b"SEND\ncontent-length : 3 \n\na\0b\0").body == b"a\0b"


@pytest.mark.parametrize("padded", [b" a:b", b"a :b", b"a: b", b"a:b "])
def test_1_0_trims_each_side_of_name_and_value(padded: bytes) -> None:
    assert one(Version.V1_0, b"SEND\n" + padded + b"\n\n\0").headers == {"a": "b"}
    assert one(Version.V1_0, b"SEND\n" + padded + b"\nc:d\n\n\0").headers == {"a": "b", "c": "d"}


@pytest.mark.parametrize("version", ESCAPING_VERSIONS)
def test_later_versions_trim_nothing(version: Version) -> None:
    """1.1, "STOMP Frames": MUST never trim or pad."""
    assert one(version, b"SEND\n a : b \n\n\0").headers == {" a ": " b "}


@pytest.mark.parametrize("blank", ["\t", "\u00a0", "\u3000"])
def test_whitespace_that_1_0_trims_does_not_depend_on_another_header(blank: str) -> None:
    alone = one(Version.V1_0, f"SEND\na:{blank}b\n\n\0".encode()).headers
    accompanied = one(Version.V1_0, f"SEND\na:{blank}b\nc: d\n\n\0".encode()).headers
    assert accompanied == alone | {"c": "d"}


@pytest.mark.parametrize("version", [*VERSIONS, None])
def test_the_first_of_repeated_headers_counts(version: Version | None) -> None:
    """1.1 and 1.2, "Repeated Header Entries"."""
    assert one(version, b"MESSAGE\nfoo:World\nb:1\nfoo:Hello\nfoo:\n\n\0").headers == {"foo": "World", "b": "1"}


@pytest.mark.parametrize("version", ESCAPING_VERSIONS)
def test_the_first_counts_however_its_name_is_written(version: Version) -> None:
    assert one(version, b"MESSAGE\na\\\\:1\nb:2\na\\\\:3\n\n\0").headers == {"a\\": "1", "b": "2"}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_first_content_length_counts(version: Version) -> None:
    assert one(version, b"SEND\ncontent-length:3\ncontent-length:1\n\na\0b\0").body == b"a\0b"


@pytest.mark.parametrize("version", VERSIONS)
def test_headers_keep_their_order(version: Version) -> None:
    assert list(one(version, b"SEND\nc:1\na:2\nb:\\\\\nc:3\n\n\0").headers) == ["c", "a", "b"]
    assert list(one(version, b"SEND\nc:1\na:2\nb:3\n\n\0").headers) == ["c", "a", "b"]


# ---- What is no frame ----

ALL: list[Version | None] = [None, *VERSIONS]
MALFORMED: dict[str, tuple[list[Version | None], bytes]] = {
    "a NUL in the command": (ALL, b"SE\0ND\na:b\n\n\0"),
    "a NUL in a name": (ALL, b"SEND\na\0:b\n\n\0"),
    "a NUL in a value": (ALL, b"SEND\na:b\0\nc:d\n\n\0"),
    "a NUL before the blank line": (ALL, b"SEND\na:b\n\0\n\n\0"),
    "no blank line": (ALL, b"SEND\0"),
    "a line without a colon": (ALL, b"SEND\na:b\nc\n\n\0"),
    "a first line without a colon": (ALL, b"SEND\nab\n\n\0"),
    "a line without a colon where others have two": (ALL, b"SEND\na:b:c\nde\n\n\0"),
    "an empty name": (ALL, b"SEND\n:b\n\n\0"),
    "an empty name behind others": (ALL, b"SEND\na:b\n:\n\n\0"),
    "a name of nothing but padding": ([Version.V1_0], b"SEND\n : b\n\n\0"),
    "a header that is not UTF-8": (ALL, b"SEND\na:\xff\n\n\0"),
    "a header of half a character": (ALL, b"SEND\na:\xc3\n\n\0"),
    "an overlong character": (ALL, b"SEND\na:\xc0\x80\n\n\0"),
    "half a surrogate": (ALL, b"SEND\na:\xed\xa0\x80\n\n\0"),
    "a command that is not UTF-8": (ALL, b"\xfe\n\n\0"),
    "a carriage return in a value": ([None, Version.V1_2], b"SEND\na:b\rc:d\n\n\0"),
    "a carriage return in a name": ([None, Version.V1_2], b"SEND\r\na\r:b\r\n\r\n\0"),
    "a carriage return in the command": ([None, Version.V1_2], b"SE\rND\na:b\n\n\0"),
    "two carriage returns before a line feed": ([None, Version.V1_2], b"SEND\na:b\r\r\nc:d\n\n\0"),
    "a body that is too short": (ALL, b"SEND\ncontent-length:3\n\nab\0SEND\n\n\0"),
    "a body that is too long": (ALL, b"SEND\ncontent-length:1\n\nab\0SEND\n\n\0"),
    "a body where none is announced": (ALL, b"SEND\ncontent-length:0\n\na\0"),
    "a body of SUBSCRIBE": ([None, Version.V1_1, Version.V1_2], b"SUBSCRIBE\nid:1\n\nbody\0"),
    "a body of CONNECT": (ALL, b"CONNECT\na:b\n\nx\0"),
    "a body of BEGIN behind line ends": (ALL, b"BEGIN\na:b\n\n\n\n \n\0"),
    "a body of an unknown command": (ALL, b"begin\na:b\n\nx\0"),
    "a body of RECEIPT": (ALL, b"RECEIPT\ncontent-length:1\n\nx\0"),
    "a body of BEGIN that is a NUL": (ALL, b"BEGIN\ncontent-length:1\n\n\0\0"),
}
LENGTHS = ["-1", "+5", "5.0", "0x5", "5e0", "", "five", "1_0", "5,5", "\u0665", "\uff15", "\u00b2", "\u2164"]
LENGTHS += [str(BODY_BYTES_MAX + 1), str(2**32 + 5), str(2**63), "9" * 5000]
for length in LENGTHS:
    MALFORMED[f"content-length {length[:20]!r}"] = ALL, f"SEND\ncontent-length:{length}\n\n12345\0".encode()


@pytest.mark.parametrize(("versions", "data"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_frame_is_refused_however_it_is_cut(versions: list[Version | None], data: bytes) -> None:
    good = b"SEND\na:b\n\nbody\0\n"
    for version in versions:
        for before in (b"", good if version else b"\n"):
            refused = [[before + data], bytewise(before + data)]
            refused += [cut(before + data, position) for position in range(0, len(before + data), 1 + len(data) // 100)]
            for chunks in refused:
                with pytest.raises(RemoteProtocolError):
                    decode(version, chunks)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unknown_command_is_not_blamed_for_its_body(version: Version) -> None:
    for data in (b"send\n\nx\0", b"send\ncontent-length:1\n\nx\0"):
        with pytest.raises(RemoteProtocolError, match=r"^unknown command 'send'; is SEND meant\?$") as raised:
            decoder(version).receive(data)
        # It ends any connection, so it has a code that says so.
        assert raised.value.code is Code.MALFORMED_FRAME
    with pytest.raises(RemoteProtocolError, match=r"^unknown command 'PUBLISH'$"):
        decoder(version).receive(b"PUBLISH\n\nx\0")


def test_a_colon_in_the_command_does_not_stand_for_one_in_the_header() -> None:
    for version in ALL:
        with pytest.raises(RemoteProtocolError, match="not name:value"):
            decoder(version).receive(b"SE:ND\nab\n\n\0")


@pytest.mark.parametrize("length", ["5 ", " 5"])
def test_a_padded_content_length_is_one_in_1_0_only(length: str) -> None:
    data = f"SEND\ncontent-length:{length}\n\n12345\0".encode()
    assert one(Version.V1_0, data).body == b"12345"
    for version in ESCAPING_VERSIONS:
        with pytest.raises(RemoteProtocolError, match="content-length"):
            decoder(version).receive(data)


def test_1_0_ignores_the_body_of_subscribe() -> None:
    frame = one(Version.V1_0, b"SUBSCRIBE\ndestination: /queue/foo\n\nwhatever\0")
    assert frame.headers == {"destination": "/queue/foo"}


@pytest.mark.parametrize("version", [Version.V1_0, Version.V1_1])
def test_carriage_return_is_no_part_of_a_line_end_before_1_2(version: Version) -> None:
    """1.1, "Augmented BNF": only NL ends a line."""
    assert one(version, b"SEND\r\n\n\0").command == "SEND\r"
    assert decoder(version).receive(b"SEND\r\na:b\r\n\r\n") == []
    with pytest.raises(RemoteProtocolError, match="not name:value"):
        decoder(version).receive(b"SEND\na:b\n\r\n\n\0")


def test_1_1_keeps_a_carriage_return_in_a_value() -> None:
    assert one(Version.V1_1, b"SEND\na:b\rc\r\n\n\0").headers == {"a": "b\rc\r"}


# ---- Limits ----


def test_frame_may_have_as_many_headers_as_the_limit_and_no_more() -> None:
    def data(count: int) -> bytes:
        return b"SEND\n" + b"".join(b"n%d:v\n" % number for number in range(count)) + b"\n\0"

    for version in VERSIONS:
        assert len(one(version, data(HEADERS_MAX)).headers) == HEADERS_MAX
        for chunks in ([data(HEADERS_MAX + 1)], bytewise(data(HEADERS_MAX + 1))):
            with pytest.raises(RemoteProtocolError, match=f"more than {HEADERS_MAX} headers"):
                decode(version, chunks)


@pytest.mark.parametrize("version", VERSIONS)
def test_repeated_headers_count_each(version: Version) -> None:
    with pytest.raises(RemoteProtocolError, match="headers in one frame"):
        decoder(version).receive(b"SEND\n" + b"a:b\n" * (HEADERS_MAX + 1) + b"\n\0")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_header_as_long_as_the_limit_and_no_longer(version: Version) -> None:
    def data(size: int) -> bytes:
        return b"SEND\na:" + b"x" * (size - len(b"SEND\na:\n\n")) + b"\n\n"

    longest = data(HEADER_BYTES_MAX)
    assert len(longest) == HEADER_BYTES_MAX
    for chunks in ([longest + b"body\0"], [longest, b"body\0"], [longest[:-1], longest[-1:] + b"body\0"]):
        assert [body for _, _, body in decode(version, chunks)] == [b"body"]
    for longer in (data(HEADER_BYTES_MAX + 1), data(70_000), data(10 * HEADER_BYTES_MAX)):
        for chunks in ([longer + b"\0"], [longer, b"\0"], [longer[:-1], b"\n\0"], cut(longer, 7, 60_000)):
            with pytest.raises(RemoteProtocolError, match=f"more than {HEADER_BYTES_MAX} bytes of headers"):
                decode(version, chunks)


@pytest.mark.parametrize("line", [b"x", b"name:value\n", b"a:b\r\n", "\u20ac".encode()])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_header_without_an_end_is_given_up_at_the_limit(version: Version, line: bytes) -> None:
    piece = line * (4096 // len(line))
    receiver = decoder(version)
    sent = len(b"SEND\n")
    receiver.receive(b"SEND\n")
    with pytest.raises(RemoteProtocolError):
        while True:
            sent += len(piece)
            receiver.receive(piece)
    assert sent <= HEADER_BYTES_MAX + len(piece)
    if b"\n" not in line:
        assert sent > HEADER_BYTES_MAX


@pytest.mark.parametrize("version", VERSIONS)
def test_a_body_of_unknown_length_is_given_up_at_the_limit(version: Version) -> None:
    receiver = decoder(version)
    piece = b"x" * (64 * 1024)
    sent = 0
    receiver.receive(b"SEND\n\n")
    with pytest.raises(RemoteProtocolError):
        while sent < 2 * BODY_BYTES_MAX:
            sent += len(piece)
            receiver.receive(piece)
    assert BODY_BYTES_MAX < sent <= BODY_BYTES_MAX + HEADER_BYTES_MAX + len(piece)


@pytest.mark.parametrize("header", [b"", b"content-length:%d\n"])
def test_a_body_as_large_as_the_limit_and_no_larger(header: bytes) -> None:
    def data(size: int) -> bytes:
        return b"SEND\n" + (header % size if header else b"") + b"\n" + b"x" * size + b"\0"

    largest = data(BODY_BYTES_MAX)
    assert len(one(Version.V1_2, largest).body) == BODY_BYTES_MAX
    ((_, _, body),) = decode(Version.V1_2, cut(largest, 3, 100, len(largest) - 1))
    assert len(body) == BODY_BYTES_MAX
    larger = data(BODY_BYTES_MAX + 1)
    for chunks in ([larger], cut(larger, 100), cut(larger, len(larger) - 1)):
        with pytest.raises(RemoteProtocolError, match="bytes"):
            decode(Version.V1_2, chunks)


@pytest.mark.parametrize("version", ALL)
def test_a_body_announced_too_large_is_refused_before_its_first_byte(version: Version | None) -> None:
    header = b"SEND\ndestination:/queue/a\ncontent-length:%d\n\n" % (BODY_BYTES_MAX + 1)
    for chunks in ([header], bytewise(header)):
        with pytest.raises(RemoteProtocolError, match="content-length"):
            decode(version, chunks)


@pytest.mark.parametrize("header", [b"CONNECT\na:%b\n\n\0", b"CONNECT\na:%b\ncontent-length:0\n\n\0"])
def test_a_login_as_long_as_the_limit_and_no_longer(header: bytes) -> None:
    def data(size: int) -> bytes:
        """`size` bytes, the NUL not counted."""
        return header % (b"x" * (size - len(header % b"") + 1))

    longest = data(LOGIN_BYTES_MAX)
    assert len(longest) == LOGIN_BYTES_MAX + 1
    longer = data(LOGIN_BYTES_MAX + 1)
    for position in (1, 10, 4000, LOGIN_BYTES_MAX - 1, LOGIN_BYTES_MAX, LOGIN_BYTES_MAX + 1):
        assert len(decode(None, cut(longest, position))) == 1
        with pytest.raises(RemoteProtocolError, match="before CONNECT is complete"):
            decode(None, cut(longer, position))


@pytest.mark.parametrize(
    "start", [b"", b"CONNECT\na:", b"SEND\n\n", b"SEND\ncontent-length:9000\n\n", b"SEND\ncontent-length:8192\n\n"]
)
def test_a_stranger_gets_no_more_memory_than_a_login_needs(start: bytes) -> None:
    receiver = decoder(None)
    sent = len(start)
    with pytest.raises(RemoteProtocolError, match="before CONNECT is complete"):
        receiver.receive(start)
        while True:
            sent += 100
            receiver.receive(b"x" * 100)
    assert sent <= LOGIN_BYTES_MAX + 100


@pytest.mark.parametrize("beat", [b"\n", b"\r\n", b"\0"])
@pytest.mark.parametrize("size", [1, 100, LOGIN_BYTES_MAX])
def test_line_ends_before_a_login_count_towards_its_limit(beat: bytes, size: int) -> None:
    receiver, sent = decoder(None), 0
    with pytest.raises(RemoteProtocolError, match="before CONNECT is complete"):
        while True:
            sent += size * len(beat)
            assert receiver.receive(beat * size) == []
    assert LOGIN_BYTES_MAX < sent <= LOGIN_BYTES_MAX + size * len(beat)


def test_line_ends_and_login_together_are_as_long_as_the_limit_and_no_longer() -> None:
    login = b"CONNECT\n\n"
    for chunks in (cut, bytewise):
        for size, count in ((LOGIN_BYTES_MAX - len(login), 1), (LOGIN_BYTES_MAX - len(login) + 1, 0)):
            data = b"\n" * size + login + b"\0"
            pieces = bytewise(data) if chunks is bytewise else cut(data, 1, 4000, len(data) - 5)
            receiver = decoder(None)
            frames = []
            try:
                for piece in pieces:
                    frames += receiver.receive(piece)
            except RemoteProtocolError:
                assert count == 0
            assert len(frames) == count


def test_the_limit_of_a_login_ends_with_the_login() -> None:
    body = b"x" * LOGIN_BYTES_MAX * 4
    login = b"CONNECT\n\n\0"
    assert [frame[2] for frame in decode(None, [login + b"SEND\n\n" + body + b"\0"], Version.V1_2)] == [b"", body]
    assert [frame[2] for frame in decode(None, [login + b"SEND\n\n", body, b"\0"], Version.V1_2)] == [b"", body]


def bytes_handled(do: Callable[[], object]) -> int:
    """Return the total size of the byte objects whose methods were called: a deterministic measure of work."""
    handled = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal handled
        if event == "c_call":
            owner = getattr(argument, "__self__", None)
            if isinstance(owner, bytes | bytearray):
                handled += len(owner)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        do()
    finally:
        sys.setprofile(before)
    return handled


@pytest.mark.parametrize("header", [b"SEND\n\n", b"SEND\ncontent-length:4194304\n\n"])
def test_the_work_for_a_body_in_small_pieces_grows_with_its_size_only(header: bytes) -> None:
    size = 4 * 1024 * 1024
    pieces = [header, *[b"x" * 1024] * (size // 1024), b"\0"]
    receiver = decoder(Version.V1_2)
    frames: list[Frame] = []

    def receive_all() -> None:
        for piece in pieces:
            frames.extend(receiver.receive(piece))

    handled = bytes_handled(receive_all)
    assert [len(frame.body) for frame in frames] == [size]
    # A few looks at the whole; looking at it again with every piece would be 8 GiB.
    assert size < handled < 12 * size


# ---- The header lines as they came ----

AWKWARD = st.text(st.sampled_from("\\\r\n: \tcrnab\u00e9\u20ac\U0001f600\u0085\u2028"), max_size=8)
PLAIN = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
    max_size=8,
)
TEXTS = AWKWARD | PLAIN
NAMES = TEXTS.filter(lambda name: name not in ("", "content-length"))
BODIES = st.binary(max_size=20) | st.sampled_from([b"\0", b"\n", b"\r\n\0", b"\n\n", b"\0SEND\n\n\0"])
COMMANDS = st.sampled_from(["SEND", "MESSAGE", "ERROR"])
LINES = st.lists(
    st.tuples(st.sampled_from(["a", "b", " a", "\u00e9"]) | NAMES, st.sampled_from(["", "1", "x y", " 1"]) | TEXTS).map(
        ":".join
    ),
    max_size=5,
)
ENDS = st.sampled_from(["\n", "\r\n"])


@given(st.sampled_from(ALL), st.sampled_from(["SEND", "MESSAGE", "\u00c9", "ACK", "SE:ND"]), LINES, ENDS)
@example(Version.V1_2, "SEND", ["b:1", "a:2"], "\n")
@example(Version.V1_0, "SEND", ["a:\\", "b: 1"], "\n")
@example(None, "\u00c9", ["a:b"], "\n")
def test_header_lines_kept_from_a_frame_are_those_the_envelope_would_write(
    version: Version | None, command: str, lines: list[str], end: str
) -> None:
    try:
        frames = decoder(version).receive((end.join([command, *lines]) + end + end + "\0").encode())
    except RemoteProtocolError:
        return
    for frame in frames:
        assert frame.lines in (b"", encode_header_lines(frame.headers))


@pytest.mark.parametrize("version", VERSIONS)
def test_lines_that_need_no_change_are_kept(version: Version) -> None:
    frame = one(version, "SEND\nb:1\na:\u00e9\ncontent-length:0\n\n\0".encode())
    assert frame.lines == "b:1\na:\u00e9\ncontent-length:0\n".encode() == encode_header_lines(frame.headers)


@pytest.mark.parametrize("line", [b"a:b:c", b"a:1\na:2", b"a:\\c", b"a:b\r"])
@pytest.mark.parametrize("version", VERSIONS)
def test_lines_that_need_a_change_are_not_kept(version: Version, line: bytes) -> None:
    assert one(version, b"SEND\n" + line + b"\nx:y\n\n\0").lines == b""


# ---- There and back ----

FRAMES = st.builds(Frame, COMMANDS, st.dictionaries(NAMES, TEXTS, max_size=5), BODIES)


@pytest.mark.parametrize("version", [Version.V1_1, Version.V1_2])
@given(frame=FRAMES, positions=st.lists(st.integers(0, 400), max_size=4))
@example(frame=Frame("SEND", {"path": "C:\\reports"}), positions=[])
def test_encoded_frame_is_decoded_unchanged(version: Version, frame: Frame, positions: list[int]) -> None:
    data = encode(frame, version)
    headers = frame.headers | ({"content-length": str(len(frame.body))} if frame.body else {})
    expected = [(frame.command, headers, frame.body)]
    assert decode(version, cut(data, *(position % len(data) for position in positions))) == expected


def as_1_0(text: str) -> str:
    """Return a name or value as 1.0 delivers it: see frame.header_line, and the padding of 1.0."""
    return text.replace("\r", "\\r").replace("\n", "\\n").strip(" ")


def is_sent_by_1_0(frame: Frame) -> bool:
    """No name holds a colon or is but padding, and no blanks but spaces, which not everybody trims alike."""
    return all(
        ":" not in name
        and as_1_0(name) not in ("", "content-length")
        and not any(sign.isspace() and sign not in " \r\n" for sign in name + value)
        for name, value in frame.headers.items()
    )


@given(FRAMES.filter(is_sent_by_1_0))
def test_1_0_keeps_a_frame_whole_and_shows_line_ends_as_escapes(frame: Frame) -> None:
    expected: dict[str, str] = {}
    for name, value in frame.headers.items():
        expected.setdefault(as_1_0(name), as_1_0(value))
    if frame.body:
        expected["content-length"] = str(len(frame.body))
    assert decode(Version.V1_0, [encode(frame, Version.V1_0)]) == [(frame.command, expected, frame.body)]


LINE_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=10) | AWKWARD


@given(LINE_TEXTS, LINE_TEXTS, st.sampled_from(VERSIONS))
def test_a_header_line_is_one_line(name: str, value: str, version: Version) -> None:
    line = header_line(name, value, version)
    assert line.index("\n") == len(line) - 1
    if version is not Version.V1_1:
        assert "\r" not in line


def test_a_body_is_announced_and_nothing_else_is() -> None:
    assert encode(Frame("SEND", {"a": "b"}, b"\0\0"), Version.V1_2) == b"SEND\na:b\ncontent-length:2\n\n\0\0\0"
    assert encode(Frame("RECEIPT", {"receipt-id": "1"}), Version.V1_1) == b"RECEIPT\nreceipt-id:1\n\n\0"


def bursts(data: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size
    yield data[start:]


@settings(max_examples=50)
@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(0, 40), max_size=10), st.sampled_from(["\n", "\r\n", ""]))
def test_many_frames_in_bursts_are_the_frames_that_were_sent(frames: list[Frame], sizes: list[int], end: str) -> None:
    data = b"".join(encode(frame, Version.V1_2) + end.encode() for frame in frames)
    got = decode(Version.V1_2, bursts(data, sizes))
    assert [(command, body) for command, _, body in got] == [(frame.command, frame.body) for frame in frames]


def test_a_client_takes_larger_headers_than_a_broker_does() -> None:
    """A message whose sender has said as much as it may, and of which the broker says why it failed."""
    client: StompProtocol[Frame] = StompProtocol(Side.CLIENT, shapes.FRAME_SHAPES)
    client.set_version(Version.V1_2)
    lines = [f"{number}:{'x' * 500}" for number in range(HEADERS_MAX)]
    causes = [f"a{number}:" + "\\n" * 4096 for number in range(4)]
    head = "\n".join(["MESSAGE", *lines, *causes])
    assert len(head) > HEADER_BYTES_MAX
    (frame,) = client.receive(f"{head}\n\n\0".encode())
    assert isinstance(frame, Frame) and frame.headers["a3"] == "\n" * 4096
    broker = Decoder(shapes.FRAME_SHAPES)
    broker.version = Version.V1_2
    with pytest.raises(RemoteProtocolError):
        broker.receive(f"{head}\n\n\0".encode())


def test_a_client_takes_a_larger_body_than_a_broker_does() -> None:
    """One answer lists all 180,000 queues of a broker."""
    head = b"MESSAGE\ncontent-length:%d\n\n" % (BODY_BYTES_MAX + 1)
    client = Decoder(shapes.FRAME_SHAPES, ANSWER_BYTES_MAX)
    client.version = Version.V1_2
    assert client.receive(head) == []
    (frame,) = client.receive(bytes(BODY_BYTES_MAX + 1) + b"\0")
    assert len(frame.body) == BODY_BYTES_MAX + 1
    broker = Decoder(shapes.FRAME_SHAPES)
    broker.version = Version.V1_2
    with pytest.raises(RemoteProtocolError, match=f"is more than {BODY_BYTES_MAX} bytes"):
        broker.receive(head)
