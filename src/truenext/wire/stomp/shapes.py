"""Shapes: read frames whose header names have come before, in the same order, with one regular expression.

A shape is a command with a sequence of header names. The frames of a producer usually have the same shape, and differ
only in their values. A shape that was seen twice is compiled to an expression, which all connections with such frames
share.

A shape reads only plain frames. In these each name comes once; no value has a colon, backslash, carriage return or NUL,
nor in STOMP 1.0 a space; all bytes are UTF-8; and the frame is complete and within all limits. `Decoder` (codec.py)
decodes all other frames, and only `Decoder` reports errors. So each frame means the same as without shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from truenext.model.limits import HEADER_BYTES_MAX
from truenext.wire.stomp.frame import Frame, Version

SHAPES_MAX = 64
"""Maximum number of compiled shapes. Each takes some kilobytes, and 0.3 ms to compile."""
NAMES_MAX = 24
"""Maximum number of headers of a shape."""
NAMES_BYTES_MAX = 512
"""Largest total size of a shape's header names, in bytes."""
CANDIDATES_MAX = 256
"""Maximum number of shapes that are counted and not compiled yet."""
COMPILE_AFTER = 2
"""Number of times that a decoder must ask for a shape before it is compiled."""
COMPILE_AFTER_WHEN_FULL = 100
"""Number in place of COMPILE_AFTER while there are SHAPES_MAX shapes. A client that invents header names then spends
more time than the broker spends to compile their shapes. """

_COMMANDS = frozenset({"SEND", "ACK", "MESSAGE"})
"""Commands that come for each message. Only these have shapes."""
_IS_NAME = re.compile(r"[A-Za-z0-9_.-]+").fullmatch

Read = TypeVar("Read")
ShapeKey = tuple[Version, str, tuple[str, ...]]


class Shape(Protocol[Read]):
    """Reader of frames with one command and one sequence of header names."""

    match: Callable[[bytes, int], re.Match[bytes] | None]
    uses: int
    """Number of calls that have read a frame. It is halved whenever a shape is dropped."""

    def read(self, data: bytes, start: int, into: list[Frame | Read], body_bytes_max: int, /) -> int:
        """Read frames of this shape from `start` on, as long as such frames follow one another, and add them to `into`.
        Return the position of the first byte that was not read."""


def header_pattern(command: str, lines: bytes, after: bytes = b"") -> Callable[[bytes, int], re.Match[bytes] | None]:
    """Return a function that matches the beginning of a frame: bytes between frames, `command`, header lines (`lines`),
    the blank line, then `after`."""
    return re.compile(rb"[\n\r\0]*+" + command.encode() + rb"\n" + lines + rb"\n" + after).match


def line_pattern(name: str, value: bytes) -> bytes:
    """Return the pattern of a header line whose value has the pattern `value`."""
    return b"%b:%b\n" % (re.escape(name.encode()), value)


def character_pattern(version: Version, *, is_ascii: bool = False) -> bytes:
    """Return the pattern of one byte of a plain value. If `is_ascii`, only bytes of ASCII match: for a value that is
    decoded without a check of UTF-8."""
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
    """Shape that makes a Frame of each frame."""

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
    """Cache of compiled shapes, which all connections share."""

    def __init__(self, make: Callable[[Version, str, tuple[str, ...]], Shape[Read]]) -> None:
        self._make = make
        self._known: dict[ShapeKey, Shape[Read]] = {}
        self._candidates: dict[ShapeKey, int] = {}
        """Number of calls of `get` for each shape that is not compiled yet."""

    def get(self, version: Version, command: str, names: tuple[str, ...]) -> Shape[Read] | None:
        """Return the shape for a plain frame with these names; None if the shape was not asked for often enough, or if
        such frames never get a shape."""
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
        """Drop the shape with the fewest `uses`."""
        least = min(self._known, key=lambda key: self._known[key].uses)
        # Connections may still have the shape; the compiled expression must not stay alive with it.
        self._known.pop(least).match = _never
        for shape in self._known.values():
            shape.uses //= 2


def _never(data: bytes, start: int) -> None:
    return None


FRAME_SHAPES: ShapeCache[Frame] = ShapeCache(FrameShape)
"""Cache of shapes for decoders that return only frames."""
