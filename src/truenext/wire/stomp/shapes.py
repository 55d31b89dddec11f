"""Frames whose header names came before, in the same order: one match finds all their values.

The frames of a producer differ in their values alone. A command and a sequence of header names is a shape; once it has
come twice it gets a compiled expression, which every connection uses that says the same.

What a shape takes is plain: each name once; no colon, backslash, carriage return or NUL in a value, in STOMP 1.0 no
space; all of it UTF-8; within all limits, and complete. Everything else is left to the general way (codec.py), which
alone says what is wrong with a frame. So no frame means anything else than it would without shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from truenext.model.limits import HEADER_BYTES_MAX
from truenext.wire.stomp.frame import Frame, Version

SHAPES_MAX = 64
"""Shapes that are known at once; each is some kilobytes of compiled expression, and took 0.3 ms to compile."""
NAMES_MAX = 24
"""Headers of a shape."""
NAMES_BYTES_MAX = 512
"""Bytes of their names together."""
CANDIDATES_MAX = 256
"""Sequences of names that came, and not often enough."""
COMPILE_AFTER = 2
"""How often one is looked at until it is compiled."""
COMPILE_AFTER_WHEN_FULL = 100
"""The same while there are SHAPES_MAX, so that it takes longer to make us compile than to compile."""

_COMMANDS = frozenset({"SEND", "ACK", "MESSAGE"})
"""Those that come once for each message."""
_IS_NAME = re.compile(r"[A-Za-z0-9_.-]+").fullmatch

Read = TypeVar("Read")
ShapeKey = tuple[Version, str, tuple[str, ...]]


class Shape(Protocol[Read]):
    """One way to read."""

    match: Callable[[bytes, int], re.Match[bytes] | None]
    uses: int
    """How often it was of use, halved whenever another one goes."""

    def read(self, data: bytes, start: int, into: list[Frame | Read], body_bytes_max: int) -> int:
        """Take all frames of this shape that are complete from `start` on, one behind the other, and what may stand
        before them. Says where the first byte is that was not taken.
        """


def header_pattern(command: str, lines: bytes, after: bytes = b"") -> Callable[[bytes, int], re.Match[bytes] | None]:
    """Matches what may stand between frames, a header of these lines with its blank line, and what is `behind` it."""
    return re.compile(rb"[\n\r\0]*+" + command.encode() + rb"\n" + lines + rb"\n" + after).match


def line_pattern(name: str, value: bytes) -> bytes:
    """Matches one header line."""
    return b"%b:%b\n" % (re.escape(name.encode()), value)


def character_pattern(version: Version, *, is_ascii: bool = False) -> bytes:
    """Matches a character of a value that is used as it stands; of ASCII alone, if it becomes text by itself."""
    others = rb"\x80-\xff" if is_ascii else b""
    space = b" " if version is Version.V1_0 else b""
    return rb"[^:\\\r\n\0%b%b]" % (others, space)


def is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class FrameShape(Generic[Read]):
    """Reads frames."""

    def __init__(self, version: Version, command: str, names: tuple[str, ...]) -> None:
        self._command = command
        self._names = names
        self._has_body = command != "ACK"
        self._length_at = names.index("content-length") + 1 if "content-length" in names else 0
        value = b"(%b*+)" % character_pattern(version)
        lines = b"".join(line_pattern(name, rb"(\d{1,9}+)" if name == "content-length" else value) for name in names)
        self.match = header_pattern(command, rb"(%b)" % lines)
        self.uses = 0

    def read(self, data: bytes, start: int, into: list[Frame | Read], body_bytes_max: int) -> int:
        match, command, names = self.match, self._command, self._names
        has_body, length_at = self._has_body, self._length_at
        size = len(data)
        while start < size and (found := match(data, start)) is not None:
            body_start = found.end()
            groups = found.groups()
            lines = groups[0]
            if body_start - start > HEADER_BYTES_MAX or not is_utf8(lines):
                break
            if length_at:
                body_end = body_start + int(groups[length_at])
                if body_end >= size or data[body_end]:
                    break
            else:
                body_end = data.find(b"\0", body_start)
            if not 0 <= body_end - body_start <= (body_bytes_max if has_body else 0):
                break
            headers = dict(zip(names, b"\n".join(groups[1:]).decode().split("\n"), strict=True))
            if has_body:
                into.append(Frame(command, headers, data[body_start:body_end], lines))
            else:
                into.append(Frame(command, headers))
            start = body_end + 1
        return start


class ShapeCache(Generic[Read]):
    """All shapes that are known."""

    def __init__(self, make: Callable[[Version, str, tuple[str, ...]], Shape[Read]]) -> None:
        self._make = make
        self._known: dict[ShapeKey, Shape[Read]] = {}
        self._candidates: dict[ShapeKey, int] = {}
        """How often they came."""

    def get(self, version: Version, command: str, names: tuple[str, ...]) -> Shape[Read] | None:
        """The shape of a frame that was plain; None as long as it has not come often enough."""
        if command not in _COMMANDS or len(names) > NAMES_MAX:
            return None
        key = (version, command, names)
        known = self._known.get(key)
        if known is not None:
            return known
        joined = "".join(names)
        if len(joined) > NAMES_BYTES_MAX or not _IS_NAME(joined):
            return None
        count = self._candidates.pop(key, 0) + 1
        is_full = len(self._known) >= SHAPES_MAX
        if count < (COMPILE_AFTER_WHEN_FULL if is_full else COMPILE_AFTER):
            self._candidates[key] = count
            if len(self._candidates) > CANDIDATES_MAX:
                del self._candidates[next(iter(self._candidates))]
            return None
        if is_full:
            self._drop_one()
        shape = self._known[key] = self._make(version, command, names)
        return shape

    def _drop_one(self) -> None:
        """The one that was of least use lately."""
        least = min(self._known, key=lambda key: self._known[key].uses)
        # There may be connections that have it; they shall not keep what it was made of.
        self._known.pop(least).match = _never
        for shape in self._known.values():
            shape.uses //= 2


def _never(data: bytes, start: int) -> None:
    return None


FRAME_SHAPES: ShapeCache[Frame] = ShapeCache(FrameShape)
"""For whoever wants frames."""
