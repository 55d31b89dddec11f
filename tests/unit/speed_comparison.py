"""Comparison of the codec's inner loops in C with those in Python, for random input.

python -m tests.unit.speed_comparison INPUTS      for `make asan`
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.unit.stomp_streams import BODY_BYTES_MAX, VERSIONS, frame, pieces_of, stream
from truenext.engine.state.causes import KnownCauses
from truenext.engine.state.queue import Entry, StartState
from truenext.errors import RemoteProtocolError
from truenext.model.commands import AckMode, Login
from truenext.model.message import OPENWIRE_FORM, SentMessage
from truenext.model.openwire_message import TEXT, OpenWireSlices
from truenext.wire.stomp import replies, request_shapes
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Version
from truenext.wire.stomp.protocol import Side, StompProtocol
from truenext.wire.stomp.replies import ReplyEncoder
from truenext.wire.stomp.request_shapes import AckShape, SendShape, ShapedCommand, ShapeInC
from truenext.wire.stomp.shapes import Shape, ShapeCache
from truenext.wire.stomp.speedups import SPEEDUPS

_USUAL = [
    ("SEND", ("destination", "content-length")),
    ("SEND", ("destination", "priority", "x", "content-length")),
    ("SEND", ("persistent", "destination", "priority", "content-length", "colour")),
    ("ACK", ("id",)),
    ("ACK", ("x", "id")),
    ("ACK", ("id", "truenext-started")),
]
"""Frames that are read in C."""
_TELLING = b"\0\n\r:\\ .@09aSA\x7f\x80\xc3\xff"
"""Bytes that mean something to a reader."""


def reading_difference(seed: int) -> str:
    """Describe how C reads consecutive frames of one shape differently; an empty text if it does not."""
    dice = random.Random(seed)
    version = dice.choice(VERSIONS)
    command, names = dice.choice(_USUAL)
    if command == "ACK":
        version = Version.V1_2
    oddity = dice.choice([0.0, 0.0, 0.1, 0.3])
    frames = [frame(dice, command, names, oddity) for _ in range(dice.randint(1, 6))]
    data = dice.choice([b"", b"", b"\n", b"\r\n\0"]).join(frames)
    if dice.random() < 0.5:
        data = _with_other_byte(dice, data)
    if dice.random() < 0.3:
        data = data[: dice.randint(0, len(data))]
    start = 0 if dice.random() < 0.8 else dice.randint(0, len(data))
    body_bytes_max = dice.choice([BODY_BYTES_MAX, 3, 10**6])
    outcomes = []
    for shape in shapes_of(version, command, names):
        into: list[Any] = []
        outcomes.append((shape.read(data, start, into, body_bytes_max), into))
    # As text: 1 equals True.
    in_python, in_c = map(repr, outcomes)
    if in_c != in_python:
        return f"seed {seed}, STOMP {version.value}, {data!r} from {start}: {in_c}, not {in_python}"
    return ""


@lru_cache
def shapes_of(
    version: Version, command: str, names: tuple[str, ...]
) -> tuple[Shape[ShapedCommand], Shape[ShapedCommand]]:
    """Return the shapes in Python and in C."""
    in_c = request_shapes._shape(version, command, names)
    assert isinstance(in_c, ShapeInC)
    return SendShape(version, names) if command == "SEND" else AckShape(names), in_c


def _with_other_byte(dice: random.Random, data: bytes) -> bytes:
    """Return data with one byte changed, doubled or left out."""
    if not data:
        return data
    at = dice.randrange(len(data))
    other = bytes([dice.choice(_TELLING) if dice.random() < 0.7 else dice.randrange(256)])
    return data[:at] + dice.choice([other, other, other, data[at : at + 1] + other, b""]) + data[at + 1 :]


# ---- Decoders, cut anywhere ----


@contextmanager
def in_python() -> Iterator[None]:
    """Run the codec in Python within the block."""
    with mock.patch.object(request_shapes, "SPEEDUPS", None), mock.patch.object(replies, "_ENCODER", None):
        yield


# Expressions are compiled once, but each decoder learns its shapes anew.
_shape_in_c = lru_cache(maxsize=10_000)(request_shapes._shape)
_shape_in_python = lru_cache(maxsize=10_000)(request_shapes._shape)


def decoding_difference(seed: int) -> str:
    """Describe how C changes commands, rest or error of a stream that is cut anywhere; an empty text if not."""
    dice = random.Random(seed)
    version = dice.choice(VERSIONS)
    if dice.random() < 0.5:
        data = stream(dice)
    else:
        usual = dice.choices(_USUAL if version is Version.V1_2 else _USUAL[:3], k=dice.choice([1, 1, 2]))
        oddity = dice.choice([0.0, 0.1])
        data = b"".join(frame(dice, *dice.choice(usual), oddity) for _ in range(dice.randint(1, 20)))
    if dice.random() < 0.5:
        data = _with_other_byte(dice, data)
    pieces = pieces_of(dice, data)
    in_c = _outcome(Decoder(ShapeCache(_shape_in_c), BODY_BYTES_MAX), version, pieces)
    with in_python():
        expected = _outcome(Decoder(ShapeCache(_shape_in_python), BODY_BYTES_MAX), version, pieces)
    if in_c != expected:
        return f"seed {seed}, STOMP {version.value}, {pieces}: {in_c}, not {expected}"
    return ""


def _outcome(decoder: Decoder[ShapedCommand], version: Version, pieces: list[bytes]) -> tuple[list[str], bytes, str]:
    """Return commands, incomplete bytes and error."""
    decoder.version = version
    commands: list[str] = []
    try:
        for piece in pieces:
            data = piece
            while True:
                commands += map(repr, decoder.receive(data))
                if not decoder.has_more:
                    break
                data = b""
    except RemoteProtocolError as error:
        return commands, bytes(decoder.pending), str(error)
    return commands, bytes(decoder.pending), ""


# ---- Encoding ----

_NUMBERS = [0, 1, 2, 9, 10, 12345, 1_764_367_000_000, 2**31, 2**63 - 1, 2**63, 2**64, 10**20]


def random_encoder(dice: random.Random) -> tuple[ReplyEncoder, str]:
    """Return an encoder of a client with one subscription, and the subscription."""
    version = dice.choice([*VERSIONS, Version.V1_2, Version.V1_2])
    encoder = ReplyEncoder(StompProtocol(Side.SERVER, request_shapes.REQUEST_SHAPES), dice.choice(["", "truenext-b1-"]))
    encoder.on_connected(version, Login(number=dice.choice([0, 7])))
    subscription = dice.choice(["", "s", "a:b\\", "ä€\N{GRINNING FACE}"])
    has_pattern = dice.random() < 0.1
    encoder.add_subscription(
        subscription, dice.choice(list(AckMode)), has_id=dice.random() < 0.8, has_pattern=has_pattern
    )
    return encoder, subscription


_OPENWIRE_BODY = OpenWireSlices(
    TEXT, 0, 7, b"\1\0\1p" + bytes(16), b"\0", b"\0", bytes(6), bytes(10), b"\1\0\0\0\5\0\0\0\1x", b"\0"
).join()


def random_deliveries(dice: random.Random) -> list[Any]:
    """Return dispatches, most of them usual."""
    return [_random_delivery(dice, dice.choice([0.0, 0.0, 0.1])) for _ in range(dice.randint(0, 6))]


def _random_delivery(dice: random.Random, oddity: float) -> Any:
    def odd() -> bool:
        return dice.random() < oddity

    header = b"destination:/queue/a\nx:\\c%d\ncontent-length:1\n" % dice.randrange(100)
    body = dice.randbytes(dice.choice([0, 1, 10, 1000]))
    message = SentMessage(4, False, 0, header, body, arrived_ms=dice.choice(_NUMBERS[:9]))
    destination = SimpleNamespace(address="/queue/b")
    lane: Any = SimpleNamespace(queue=SimpleNamespace(destination=destination))
    entry = Entry(dice.choice(_NUMBERS[:9]), message, lane, 0, False, None, deliveries=1)
    if odd():
        entry.deliveries = dice.choice(_NUMBERS)
        entry.start_state = dice.choice(list(StartState))
    if odd():
        message.form, message.body = OPENWIRE_FORM, _OPENWIRE_BODY
    if odd():
        entry.sequence = dice.choice(_NUMBERS)
    if odd():
        message.arrived_ms = dice.choice(_NUMBERS)
    if dice.random() < 0.3:
        entry.attempts = dice.choice(_NUMBERS)
    entry.was_lost, entry.is_first_of_group = odd(), odd()
    if odd():
        entry.causes = KnownCauses("a: \n", "b")
    return entry


def encoding_difference(seed: int) -> str:
    """Describe how C encodes dispatches differently; an empty text if it does not."""
    dice = random.Random(seed)
    encoder, subscription = random_encoder(dice)
    deliveries = random_deliveries(dice)
    round_number, is_browse = dice.choice([0, 3]), dice.random() < 0.2
    outcomes: list[list[bytes]] = [[b"before"], [b"before"]]
    encoder.encode_deliveries(subscription, deliveries, outcomes[0], round_number, is_browse=is_browse)
    with in_python():
        encoder.encode_deliveries(subscription, deliveries, outcomes[1], round_number, is_browse=is_browse)
    in_c, expected = outcomes
    return "" if in_c == expected else f"seed {seed}: {in_c}, not {expected}"


def main(inputs: int) -> int:
    first = random.randrange(10**9)
    print(f"{SPEEDUPS.__file__}: {inputs} inputs, seeds from {first}", flush=True)
    # A whole decoder takes longest.
    compare = (*(reading_difference,) * 6, *(encoding_difference,) * 3, decoding_difference)
    for seed in range(first, first + inputs):
        difference = compare[seed % len(compare)](seed)
        if difference:
            print(difference)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
