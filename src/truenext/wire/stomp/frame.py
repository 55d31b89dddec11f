"""What a STOMP frame is, and how its header lines differ between versions."""

from enum import Enum

import msgspec

from truenext.model.header_lines import escape


class Version(Enum):
    """Versions of the protocol, oldest first."""

    V1_0 = "1.0"
    V1_1 = "1.1"
    V1_2 = "1.2"


BROKER_FRAME_END = b"\0\n"
"""How a broker ends a frame. STOMP 1.2 lets line ends follow the NUL ("Augmented BNF"), ActiveMQ sends one, and PHP's
stomp extension takes no frame before that has come."""

UNESCAPED_COMMANDS = frozenset({"CONNECT", "STOMP", "CONNECTED"})
"""Their headers are not escaped, as they come before the version is known (STOMP 1.2, "Value Encoding")."""


class Frame(msgspec.Struct, gc=False):
    command: str
    headers: dict[str, str]
    """Unescaped; of a repeated header the first (STOMP 1.2, "Repeated Header Entries")."""
    body: bytes = b""
    lines: bytes = b""
    """The header lines as they came, if they already are what header_lines.py would write; empty otherwise."""


def header_line(name: str, value: str, version: Version) -> str:
    """One header line, ended by a line feed.

    STOMP 1.0 knows no escapes: what would break the line is sent as the two characters of its 1.2 escape.
    """
    if version is Version.V1_2:
        return f"{escape(name)}:{escape(value)}\n"
    if version is Version.V1_1:
        return f"{_escape_1_1(name)}:{_escape_1_1(value)}\n"
    name = name.replace(":", "\\c")
    return f"{name}:{value}".replace("\r", "\\r").replace("\n", "\\n") + "\n"


def _escape_1_1(text: str) -> str:
    """1.1 has no escape for a carriage return, and none is needed: only a line feed ends its lines."""
    return "\r".join(map(escape, text.split("\r")))


def encode(frame: Frame, version: Version, end: bytes = b"\0") -> bytes:
    """The bytes of a frame, which `end` ends; `content-length` is added to a body."""
    if frame.command in UNESCAPED_COMMANDS:
        version = Version.V1_0
    lines = [header_line(name, value, version) for name, value in frame.headers.items()]
    if frame.body:
        lines.append(f"content-length:{len(frame.body)}\n")
    return f"{frame.command}\n{''.join(lines)}\n".encode() + frame.body + end
