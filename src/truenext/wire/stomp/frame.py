"""STOMP frames: structure, versions, and encoding."""

from enum import Enum

import msgspec

from truenext.model.header_lines import escape


class Version(Enum):
    """Versions of STOMP, oldest first."""

    V1_0 = "1.0"
    V1_1 = "1.1"
    V1_2 = "1.2"


BROKER_FRAME_END = b"\0\n"
"""End of a broker's frame. STOMP 1.2 lets line ends follow the NUL ("Augmented BNF"), ActiveMQ sends one, and PHP's
stomp extension accepts no frame before that has come."""

UNESCAPED_COMMANDS = frozenset({"CONNECT", "STOMP", "CONNECTED"})
"""Frames whose headers are not escaped: they come before the version is known (STOMP 1.2, "Value Encoding")."""


class Frame(msgspec.Struct, gc=False):
    command: str
    headers: dict[str, str]
    """Unescaped headers; of a repeated one the first (STOMP 1.2, "Repeated Header Entries")."""
    body: bytes = b""
    lines: bytes = b""
    """Header lines as received, if they equal those that header_lines.py would encode; empty otherwise."""


def header_line(name: str, value: str, version: Version) -> str:
    """Return one header line, ended by a line feed.

    STOMP 1.0 has no escapes: a character that would break the line is sent as the two characters of its 1.2 escape.
    """
    if version is Version.V1_2:
        return f"{escape(name)}:{escape(value)}\n"
    if version is Version.V1_1:
        return f"{_escape_1_1(name)}:{_escape_1_1(value)}\n"
    name = name.replace(":", "\\c")
    return f"{name}:{value}".replace("\r", "\\r").replace("\n", "\\n") + "\n"


def _escape_1_1(text: str) -> str:
    """Escape for STOMP 1.1, which has no escape for a carriage return: only a line feed ends its lines."""
    return "\r".join(map(escape, text.split("\r")))


def encode(frame: Frame, version: Version, end: bytes = b"\0") -> bytes:
    """Encode a frame, with `end` after it; `content-length` is added if it has a body."""
    if frame.command in UNESCAPED_COMMANDS:
        version = Version.V1_0
    lines = [header_line(name, value, version) for name, value in frame.headers.items()]
    if frame.body:
        lines.append(f"content-length:{len(frame.body)}\n")
    return f"{frame.command}\n{''.join(lines)}\n".encode() + frame.body + end
