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
from tests.unit.stomp_streams import BODY_BYTES_MAX, OFTEN, VERSIONS, frame, pieces_of, stream
from truenext.errors import RemoteProtocolError
from truenext.model.commands import AckRun, Command, Login, SendRun
from truenext.wire.stomp import codec, request_shapes, shapes
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.request_shapes import AckShape, SendShape, ShapedCommand, ShapeInC, StartedShape
from truenext.wire.stomp.server import StompSession
from truenext.wire.stomp.shapes import FrameShape, Shape, ShapeCache
from truenext.wire.stomp.speedups import SPEEDUPS

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


SEND_SHAPE = SendShape if SPEEDUPS is None else ShapeInC
"""Reader of SENDs whose headers are usual."""
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
        assert [type(shape) for shape in one._protocol._decoder._shapes] == [SEND_SHAPE]


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
    assert [type(shape) for shape in one._protocol._decoder._shapes] == [SEND_SHAPE]


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
    return iter(range(first, first + 120_000))


def test_targets_of_the_faults_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults that are not drawn are included."""
    for fault in FAULTS.values():
        with monkeypatch.context() as patch:
            fault(patch)


@pytest.mark.drawn
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_seen(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    # They are planted in Python; test_stomp_speed.py compares C with it.
    monkeypatch.setattr(request_shapes, "SPEEDUPS", None)
    fault(monkeypatch)
    made = new_shapes()

    def is_seen(seed: int) -> bool:
        try:
            return difference(seed, *made) != ""
        except Exception:
            return True

    assert any(map(is_seen, seeds()))
