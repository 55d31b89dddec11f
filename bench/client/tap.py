"""Count of a program's writes to its sockets, and of the frames in them."""

from __future__ import annotations

import re
import socket
from collections import Counter
from typing import Any, ClassVar, NamedTuple

_FRAME = re.compile(rb"\n*([A-Z]+)\n(?:destination:(/control/[a-z-]+))?")


class Tap(socket.socket):
    """Socket that keeps a copy of its writes. No body has a NUL, so that a NUL ends each frame."""

    written: ClassVar[list[bytes]] = []

    @staticmethod
    def install() -> list[bytes]:
        """Return the list of writes to sockets that this process makes from now on."""
        socket.socket = Tap  # type: ignore[misc]
        return Tap.written

    def send(self, data: Any, *flags: int) -> int:
        sent = super().send(data, *flags)
        if self.family is not socket.AF_UNIX:
            Tap.written.append(bytes(data[:sent]))
        return sent

    def sendall(self, data: Any, *flags: int) -> None:
        super().sendall(data, *flags)
        if self.family is not socket.AF_UNIX:
            Tap.written.append(bytes(data))


class Written(NamedTuple):
    writes: int
    octets: int
    frames: dict[str, int]
    """Number of frames by command; control requests by destination."""

    @classmethod
    def of(cls, written: list[bytes]) -> Written:
        stream = b"".join(written)
        names: Counter[str] = Counter()
        for frame in stream.split(b"\0"):
            found = _FRAME.match(frame)
            if found is not None:
                names[(found[2] or found[1]).decode()] += 1
                if b"\nreceipt:" in frame:
                    names["receipt"] += 1
        return cls(len(written), len(stream), dict(names))

    def describe(self, messages: int) -> str:
        shares = sorted((name, count / messages) for name, count in self.frames.items())
        each = ", ".join(f"{share:.3f} {name}" for name, share in shares if share >= 0.0005)
        return f"{self.writes / messages:.3f} writes, {self.octets / messages:,.1f} bytes; {each}"
