"""Tests that a frame means the same, whether it is read by a shape or the general way.

The reference is the decoder from before there were shapes (decoder_without_shapes.py). Compared are frames, forwarded
lines, commands, receipts and errors, for streams that repeat their header names and are nearly plain, cut anywhere.

TRUENEXT_EXAMPLES=20000 pytest tests/unit/test_stomp_shapes.py       longer
"""

import os
import random
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.decoder_without_shapes import DecoderWithoutShapes
from tests.unit.mutation import mutated
from truenext.errors import RemoteProtocolError
from truenext.model.commands import AckRun, Command, Login, SendRun
from truenext.model.limits import HEADER_BYTES_MAX
from truenext.wire.stomp import codec, request_shapes, shapes
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.request_shapes import AckShape, SendShape, ShapedCommand, StartedShape
from truenext.wire.stomp.server import StompSession
from truenext.wire.stomp.shapes import FrameShape, Shape, ShapeCache

VERSIONS = list(Version)
BODY_BYTES_MAX = 40
"""Small, so that bodies that are too large are met."""

# ---- Streams ----

NAMES = [
    *("destination", "content-length", "priority", "persistent", "expires", "receipt", "transaction", "reply-to"),
    *(
        "truenext-producer",
        "truenext-number",
        "truenext-gapless",
        "JMSXGroupID",
        "id",
        "message-id",
        "subscription",
        "x",
        "content-type",
    ),
    *("delivery-mode", "x-delay"),
    *("redelivered", "truenext-sequence", "AMQ_SCHEDULED_DELAY", "AMQ_SCHEDULED_DELEY", "colour", "a b", "n\u00e4me"),
]
VALUES = {
    "destination": [
        *("/queue/a", "/queue/a", "b", "/topic/t", "/temp-queue/r", "/queue/a,/topic/t", "/queue/>", "/control/x"),
        *("/queue/\u00e4", "/subscription/a,b", "", "/queue/a?b=c", "/remote-temp-queue/s/r", "/remote-temp-topic/s/r"),
    ],
    "content-length": ["4", "4", "4", "0", "04", "41", "5", "x", "99999999999", "\u0665"],
    "priority": [*"0123456789", "10", "-1", "04", "x", ""],
    "persistent": ["true", "false", "TRUE", "yes", ""],
    "expires": ["0", "-1", "1700000000000", "9" * 18, "9" * 19, "9" * 20, "x"],
    "receipt": ["r1", "r2", "r" * 255, "r" * 256, "\u00e4", ""],
    "transaction": ["t", "\u00e4", "", "t" * 300],
    "truenext-producer": ["p", "", "p" * 256, "\u00e4"],
    "truenext-number": ["1", "2", "9" * 18, str(2**63 - 1), str(2**63), str(2**63), "x"],
    "truenext-gapless": ["true", "false", "TRUE", "x", ""],
    "JMSXGroupID": ["g", "", "g" * 255, "g" * 256, "\u00e4"],
    "id": [
        *("1@s", "22@s", "1.2@s", "1.@s", ".1@s", "1.2.3@s", "1." + "9" * 10 + "@s", "1." + "9" * 11 + "@s"),
        *("22@", "x@s", "1@s@s", "1@\u00e4", "9" * 19 + "@s", "9" * 20 + "@s", "1@" + "s" * 300),
    ],
    "truenext-started": ["2@s", "2.3@s", "x", "2.@s", "9" * 20 + "@s", "2@" + "s" * 300],
    "reply-to": ["/queue/r", "/temp-queue/r"],
    "AMQ_SCHEDULED_DELAY": ["0", "100"],
}
OTHERS = ["1", "v", "", " v ", "two words", "\u00e4\u20ac", "v:w", "v\\cw", "v\\n", "\\", "v\rw", "v\r"]
BETWEEN = ["", "", "", "\n", "\n", "\n\n", "\r\n", "\0", "\r", " "]
OFTEN = [
    ("SEND", ("destination", "content-length")),
    ("SEND", ("destination", "priority", "x", "content-length")),
    ("SEND", ("destination", "persistent", "receipt", "priority", "x", "content-length")),
    ("SEND", ("receipt", "destination", "transaction", "x", "content-length", "colour")),
    ("SEND", ("truenext-producer", "destination", "truenext-number", "content-length", "expires", "JMSXGroupID")),
    ("SEND", ("truenext-producer", "destination", "truenext-number", "truenext-gapless", "content-length")),
    ("SEND", ("destination", "delivery-mode", "persistent", "content-length")),
    ("SEND", ("x-delay", "destination", "delivery-mode")),
    ("SEND", ("destination", "x")),
    ("SEND", ("destination", "id")),
    ("SEND", ("id", "destination")),
    ("ACK", ("id",)),
    ("ACK", ("id", "receipt")),
    ("ACK", ("transaction", "id", "x")),
    ("ACK", ("id", "truenext-started")),
    ("ACK", ("truenext-started", "id", "receipt")),
    ("ACK", ("truenext-started", "id", "transaction")),
    ("ACK", ("message-id", "subscription")),
    ("MESSAGE", ("subscription", "message-id", "destination", "content-length")),
    ("MESSAGE", ("message-id", "x")),
]


def stream(dice: random.Random) -> bytes:
    """Frames of a few shapes; some have a value that is not plain, some are wrong in another way."""
    used = dice.choices(OFTEN, k=dice.choice([1, 1, 2, 3]))
    if dice.random() < 0.3:
        names = tuple(dice.choices(NAMES, k=dice.randint(0, 6)))
        used.append((dice.choice(["SEND", "ACK", "MESSAGE", "NACK", "FOO"]), names))
    oddity = dice.choice([0.0, 0.1, 0.3])
    made = b""
    for _ in range(dice.randint(1, 12)):
        made += frame(dice, *dice.choice(used), oddity) + dice.choice(BETWEEN[:5] if oddity == 0 else BETWEEN).encode()
        if dice.random() < 0.02:
            made += b"DISCONNECT\n\n\0"
    return made


def frame(dice: random.Random, command: str, names: tuple[str, ...], oddity: float) -> bytes:
    values = {name: VALUES[name][0] if name in VALUES else dice.choice("abc") for name in names}
    if "priority" in values:
        values["priority"] = dice.choice("0123456789")
    if set(names) == {"destination", "id"}:
        values |= {"destination": "/control/started", "id": dice.choice(["1@s", "1.2@s"])}
    body = b"" if command == "ACK" or "id" in names else dice.choice([b"body", b"body", b"bo\0y", b"\n\0\n\0"])
    again = b""
    behind = b""
    blank = b"\n"
    # Rarely two things at once: the one would hide the other.
    while names and dice.random() < oddity:
        name = dice.choice(names)
        match dice.randint(0, 9):
            case 0 | 1 | 2:
                values[name] = dice.choice(VALUES.get(name, OTHERS))
            case 3 | 4:
                values[name] = dice.choice(OTHERS)
            case 5:
                body = dice.choice([b"", b"some", b"longer than it says", b"v" * BODY_BYTES_MAX])
            case 6:
                body = dice.choice([b"v" * BODY_BYTES_MAX, b"v" * (BODY_BYTES_MAX + 1), b"ACK\nid:7@s\n\n\0"])
                if "content-length" in values:
                    values["content-length"] = str(len(body))
            case 7:
                again = dice.choice([f"{name}:again\n".encode(), b"x:9\n", b"nothing\n"])
            case 8:
                behind = b"\xff"
            case _:
                values[name] += "v" * (HEADER_BYTES_MAX - dice.choice([0, 20, 100]))
                blank = dice.choice([b"\n", b"\n", b"\r\n\r\n"])
    if "content-length" not in names:
        body = body.replace(b"\0", b"x")
    lines = [f"{each}:{values[each]}".encode() + (behind if each == names[-1] else b"") + b"\n" for each in names]
    lines.insert(dice.randint(0, len(lines)), again)
    return command.encode() + b"\n" + b"".join(lines) + blank + body + b"\0"


def pieces_of(dice: random.Random, data: bytes) -> list[bytes]:
    match dice.randint(0, 3):
        case 0:
            return [data]
        case 1:
            at = dice.randint(0, len(data))
            return [data[:at], data[at:]]
        case 2 if len(data) < 2000:
            return [data[at : at + 1] for at in range(len(data))]
        case _:
            cuts = sorted(dice.randint(0, len(data)) for _ in range(dice.randint(1, 6)))
            return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# ---- What is said of them ----

Outcome = tuple[list[object], str, str | None]


class Yardstick(DecoderWithoutShapes):
    has_more = True
    """Always true: the reference decoder does not report whether more frames follow; its last read returns none."""


def frames_of(decoder: Decoder[Frame] | Yardstick, version: Version, pieces: list[bytes]) -> Outcome:
    """Frames with their lines, and the error, if one ends them."""
    decoder.version = version
    frames: list[object] = []
    try:
        for data in pieces:
            while read := decoder.receive(data):
                data = b""
                frames += [(each.command, each.headers, each.body, each.lines) for each in read]
    except RemoteProtocolError as error:
        return frames, str(error), None
    return frames, "", None


class Session(StompSession):
    """Session that lists the reports of headers without effect."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, ...]] = []
        super().__init__(
            session_id="s",
            identity="b1",
            server_name="truenext/1",
            on_ineffective_header=lambda *report: self.reported.append(report),
        )


def connected(version: Version, decoder: Decoder[ShapedCommand] | Yardstick) -> Session:
    one = Session()
    decoder.version = version
    # Its protocol asks the decoder alone what came.
    one._protocol._decoder = decoder  # type: ignore[assignment]
    one._interpreter.on_connected(version, "")
    one._protocol.set_version(version)
    one.replies.on_connected(version, Login())
    return one


def commands_of(one: Session, pieces: list[bytes]) -> Outcome:
    """Commands, each with the receipt that a refusal of it would name, and the headers without effect that are
    reported before it; the error; what the error names."""
    commands: list[object] = []
    command: Command
    try:
        for data in pieces:
            for command in one.receive(data):
                if isinstance(command, SendRun | AckRun):
                    # A part of it, and the others follow singly.
                    command.executed = len(command) // 2
                    commands += [(command[number], None, tuple(one.reported)) for number in range(command.executed)]
                else:
                    commands.append((command, one.last_receipt, tuple(one.reported)))
    except RemoteProtocolError as error:
        return commands, str(error), one.last_receipt
    return commands, "", one.last_receipt


def difference(seed: int, frame_shapes: ShapeCache[Frame], request_shapes: ShapeCache[ShapedCommand]) -> str:
    """Describe how shapes change the meaning of a random stream; an empty text if they do not."""
    dice = random.Random(seed)
    version = dice.choice(VERSIONS)
    pieces = pieces_of(dice, stream(dice))
    expected = frames_of(Yardstick(BODY_BYTES_MAX), version, pieces)
    found = frames_of(Decoder(frame_shapes, BODY_BYTES_MAX), version, pieces)
    if found != expected:
        return f"seed {seed}, STOMP {version.value}, {pieces}: frames {found}, not {expected}"
    expected = commands_of(connected(version, Yardstick(BODY_BYTES_MAX)), pieces)
    found = commands_of(connected(version, Decoder(request_shapes, BODY_BYTES_MAX)), pieces)
    if found != expected:
        return f"seed {seed}, STOMP {version.value}, {pieces}: commands {found}, not {expected}"
    return ""


def new_shapes() -> tuple[ShapeCache[Frame], ShapeCache[ShapedCommand]]:
    return ShapeCache(FrameShape), ShapeCache(request_shapes._shape)


SHARED = new_shapes()
"""Known to all examples, as to all connections of a broker."""


@settings(
    max_examples=int(os.environ.get("TRUENEXT_EXAMPLES", "300")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.integers(0, 2**48))
def test_a_frame_means_the_same_with_shapes_and_without(seed: int) -> None:
    assert difference(seed, *SHARED) == ""


def test_a_header_without_effect_is_reported_once_on_each_connection_whatever_shapes_are_known() -> None:
    made: ShapeCache[ShapedCommand] = ShapeCache(request_shapes._shape)
    frame = b"SEND\ndestination:/queue/a\ndelivery-mode:2\ncontent-length:1\n\nx\0"
    for _ in range(4):
        one = connected(Version.V1_2, Decoder(made))
        for _ in range(10):
            assert len(list(one.receive(frame))) == 1
        assert [name for _, name, _ in one.reported] == ["delivery-mode"]
        assert [type(shape) for shape in one._protocol._decoder._shapes] == [SendShape]


def long_stream(command: str, names: tuple[str, ...]) -> bytes:
    dice = random.Random(1)
    return b"".join(frame(dice, command, names, 0.0) + b"\n" * (number % 2) for number in range(5))


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.value)
@pytest.mark.parametrize(("command", "names"), OFTEN)
def test_a_frame_means_the_same_wherever_it_is_cut(version: Version, command: str, names: tuple[str, ...]) -> None:
    frame_shapes, request_shapes = new_shapes()
    data = long_stream(command, names)
    whole = frames_of(Yardstick(), version, [data])
    expected = commands_of(connected(version, Yardstick()), [data])
    for at in range(len(data) + 1):
        pieces = [data[:at], data[at:]]
        assert frames_of(Decoder(frame_shapes), version, pieces) == whole
        if command != "MESSAGE":
            assert commands_of(connected(version, Decoder(request_shapes)), pieces) == expected


# ---- What is learned, and what that may cost ----


class Made:
    """Counts the shapes that are made."""

    def __init__(self) -> None:
        self.count = 0
        self.book: ShapeCache[Frame] = ShapeCache(self.make)
        self.last: Shape[Frame] | None = None

    def make(self, version: Version, command: str, names: tuple[str, ...]) -> Shape[Frame]:
        self.count += 1
        self.last = FrameShape(version, command, names)
        return self.last


def send_of(*names: str) -> bytes:
    return b"SEND\n" + b"".join(b"%b:v\n" % name.encode() for name in names) + b"\nbody\0"


def receive(book: ShapeCache[Frame], *pieces: bytes) -> Decoder[Frame]:
    decoder = Decoder(book)
    decoder.version = Version.V1_2
    for data in pieces:
        assert len(decoder.receive(data)) == data.count(b"\0")
    return decoder


def test_a_shape_is_made_when_it_came_twice() -> None:
    made = Made()
    receive(made.book, send_of("a", "b"))
    assert made.count == 0
    receive(made.book, send_of("a", "b"))
    assert made.count == 1


def test_connections_share_their_shapes() -> None:
    made = Made()
    for _ in range(10):
        receive(made.book, send_of("a") * 4)
    assert made.count == 1


def test_a_frame_of_a_known_shape_is_read_by_it() -> None:
    made = Made()
    decoder = receive(made.book, send_of("a") * 4)
    with (
        mock.patch.object(Decoder, "_parse_unusual_headers"),
        mock.patch.object(codec, "Frame", side_effect=AssertionError),
    ):
        assert decoder.receive(send_of("a") * 100) == [Frame("SEND", {"a": "v"}, b"body", b"a:v\n")] * 100


def test_connection_that_repeats_no_header_names_is_seldom_checked_for_shapes() -> None:
    made = Made()
    with mock.patch.object(ShapeCache, "get", autospec=True, side_effect=ShapeCache.get) as of:
        receive(made.book, b"".join(send_of(f"a{number}") for number in range(6400)))
    assert made.count == 0
    assert of.call_count <= 110


def test_connection_drops_shapes_that_its_frames_no_longer_have() -> None:
    made = Made()
    decoder = receive(made.book, send_of("a") * 4)
    assert decoder._shapes
    for number in range(40):
        assert len(decoder.receive(send_of(f"b{number}"))) == 1
    assert not decoder._shapes


def test_number_of_shapes_is_limited() -> None:
    made = Made()
    for number in range(1000):
        receive(made.book, *[send_of(f"a{number}")] * 4)
    assert made.count == shapes.SHAPES_MAX == len(made.book._known)
    assert len(made.book._candidates) <= shapes.CANDIDATES_MAX


def test_frequent_shape_replaces_an_unused_one() -> None:
    made = Made()
    used = receive(made.book, *[send_of("used")] * 4)
    for number in range(shapes.SHAPES_MAX - 1):
        receive(made.book, *[send_of(f"a{number}")] * 4)
    forgotten = made.last
    assert forgotten is not None
    for number in range(shapes.SHAPES_MAX):
        assert len(used.receive(send_of("used"))) == 1
        for _ in range(shapes.COMPILE_AFTER_WHEN_FULL):
            receive(made.book, send_of(f"b{number}"))
    assert made.count == 2 * shapes.SHAPES_MAX
    assert [names for _, _, names in made.book._known].count(("used",)) == 1
    # Whoever still has it keeps nothing of what it was made of, and is served the general way.
    assert forgotten.match is shapes._never
    assert forgotten.read(send_of("a62"), 0, [], BODY_BYTES_MAX) == 0


@pytest.mark.parametrize(
    "names",
    [
        [f"a{number}" for number in range(shapes.NAMES_MAX + 1)],
        ["a" * (shapes.NAMES_BYTES_MAX + 1)],
        ["with space"],
        ["n\u00e4me"],
        ["a(b"],
        [],
    ],
)
def test_names_that_are_many_long_or_strange_are_no_shape(names: list[str]) -> None:
    made = Made()
    receive(made.book, send_of(*names) * 8)
    assert made.count == 0


def test_shapes_are_made_only_for_frames_that_come_once_per_message() -> None:
    made = Made()
    receive(made.book, *[b"BEGIN\ntransaction:t\n\n\0"] * 8, *[b"RECEIPT\nreceipt-id:1\n\n\0"] * 8)
    assert made.count == 0


@pytest.mark.parametrize("command", ["SEND", "MESSAGE"])
def test_shape_is_used_for_sends_to_a_topic(command: str) -> None:
    book: ShapeCache[ShapedCommand] = ShapeCache(request_shapes._shape)
    one = connected(Version.V1_2, Decoder(book))
    for _ in range(4):
        list(one.receive(b"SEND\ndestination:/topic/t\ncontent-length:1\n\nx\0"))
    assert [type(shape) for shape in one._protocol._decoder._shapes] == [SendShape]


# ---- Faults ----

Fault = Callable[[pytest.MonkeyPatch], None]
character_pattern, header_pattern = shapes.character_pattern, shapes.header_pattern


def _values_may_have(patch: pytest.MonkeyPatch, character: bytes) -> None:
    def faulty(version: Version, *, is_ascii: bool = False) -> bytes:
        return character_pattern(version, is_ascii=is_ascii).replace(character, b"")

    for module in (shapes, request_shapes):
        patch.setattr(module, "character_pattern", faulty)


def a_value_may_have_a_colon(patch: pytest.MonkeyPatch) -> None:
    _values_may_have(patch, b":")


def an_escape_is_taken_as_it_stands(patch: pytest.MonkeyPatch) -> None:
    _values_may_have(patch, rb"\\")


def a_value_may_have_a_carriage_return(patch: pytest.MonkeyPatch) -> None:
    _values_may_have(patch, rb"\r")


def a_connection_begins_with_the_shapes_of_others(patch: pytest.MonkeyPatch) -> None:
    make = Decoder.__init__

    def faulty(self: Decoder[ShapedCommand], book: ShapeCache[ShapedCommand], *limits: int) -> None:
        make(self, book, *limits)
        self._shapes = tuple(book._known.values())

    patch.setattr(Decoder, "__init__", faulty)


def a_space_of_stomp_1_0_is_kept(patch: pytest.MonkeyPatch) -> None:
    _values_may_have(patch, b" ")


def an_additional_header_line_is_skipped(patch: pytest.MonkeyPatch) -> None:
    """The last value of a repeated header counts, or both."""

    def faulty(command: str, lines: bytes, behind: bytes = b"") -> object:
        return header_pattern(command, rb"(?:[^:\n]+:[^\n]*\n)??" + lines, behind)

    for module in (shapes, request_shapes):
        patch.setattr(module, "header_pattern", faulty)


def invalid_utf_8_is_accepted(patch: pytest.MonkeyPatch) -> None:
    for module in (shapes, request_shapes):
        patch.setattr(module, "is_utf8", lambda _: True)


def _mutated(owner: type, name: str, old: str, new: str) -> Fault:
    return lambda patch: patch.setattr(owner, name, mutated(getattr(owner, name), old, new))


MUTATIONS: dict[str, Fault] = {
    "a header is taken from the frame before": _mutated(
        FrameShape, "read", "headers = dict(", "headers = getattr(into[-1] if into else None, 'headers', {}) | dict("
    ),
    "a priority is taken from the frame before": _mutated(
        SendShape,
        "read",
        "priority = _PRIORITIES[groups[at_priority]]",
        "priority = into[-1].message.priority if into and type(into[-1]) is Send else _PRIORITIES[groups[at_priority]]",
    ),
    "a frame that is too long in its header is taken": _mutated(
        SendShape, "read", "or body_start - start > HEADER_BYTES_MAX", ""
    ),
    "a header that is too long is a frame": _mutated(
        FrameShape, "read", "body_start - start > HEADER_BYTES_MAX or", ""
    ),
    "a body that is too long is taken": _mutated(SendShape, "read", "or length > body_bytes_max", ""),
    "a body that is too long is a frame's": _mutated(FrameShape, "read", "(body_bytes_max if", "(10**9 if"),
    "an ACK may have a body": _mutated(FrameShape, "read", "if has_body else 0", "if has_body else 9"),
    "a body without a NUL after it is taken": _mutated(SendShape, "read", "or data[body_end]", ""),
    "a body without a NUL after it is a frame's": _mutated(FrameShape, "read", "or data[body_end]", ""),
    "a body that is not all there yet is taken": _mutated(
        SendShape, "read", "body_end >= size\n            or data[body_end]", "data[body_end : body_end + 1] > b'0'"
    ),
    "a receipt is forgotten": _mutated(
        SendShape, "read", "send if at_receipt is None else (send, groups[at_receipt].decode())", "send"
    ),
    "headers for the SEND alone are forwarded": _mutated(
        SendShape, "__init__", "if is_forwarded is (name in _HOP_BY_HOP):", "if not is_forwarded:"
    ),
    "a message says no priority": _mutated(SendShape, "read", "header = DEFAULT_PRIORITY_LINE + header", ""),
    "started forgets which dispatch": _mutated(StartedShape, "read", "int(dispatch[1:] or 0)", "0"),
    "a SEND to another address counts as started": _mutated(
        StartedShape, "__init__", 'b"/control/started"', 'rb"[^\\n]*"'
    ),
    "an ACK forgets which dispatch": _mutated(AckShape, "read", "ack.dispatch = int(dispatch[1:])", "pass"),
    "an ACK forgets which dispatch it starts": _mutated(AckShape, "read", "int(which[1:]) if which else 0", "0"),
    "a number may be too large": _mutated(SendShape, "_set_optional_headers", "> PRODUCER_NUMBER_MAX", "> 10**99"),
    "a SEND may come behind a DISCONNECT": _mutated(
        StompSession, "_check", 'self._protocol.check(Frame("ACK" if isinstance(command, Ack) else "SEND", {}))', "pass"
    ),
}

FAULTS: dict[str, Fault] = {
    **{
        fault.__name__.replace("_", " "): fault
        for fault in (
            a_value_may_have_a_colon,
            an_escape_is_taken_as_it_stands,
            a_value_may_have_a_carriage_return,
            a_connection_begins_with_the_shapes_of_others,
            a_space_of_stomp_1_0_is_kept,
            an_additional_header_line_is_skipped,
            invalid_utf_8_is_accepted,
        )
    },
    **MUTATIONS,
}


def seeds() -> Iterator[int]:
    first = random.randrange(10**9)
    print("seeds from", first)
    return iter(range(first, first + 40_000))


def test_targets_of_the_faults_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults that are not drawn are included."""
    for fault in FAULTS.values():
        with monkeypatch.context() as patch:
            fault(patch)


@pytest.mark.drawn
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_seen(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    made = new_shapes()

    def is_seen(seed: int) -> bool:
        try:
            return difference(seed, *made) != ""
        except Exception:
            return True

    assert any(map(is_seen, seeds()))
