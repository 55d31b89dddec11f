"""STOMP frames: their structure, versions and encoding."""

from enum import Enum

import msgspec

from truenext.model.header_lines import escape


class Version(Enum):
    """Versions of STOMP, oldest first."""

    V1_0 = "1.0"
    V1_1 = "1.1"
    V1_2 = "1.2"


BROKER_FRAME_END = b"\0\n"
"""Last bytes of a frame of the broker. STOMP 1.2 allows line ends after the NUL ("Augmented BNF"). ActiveMQ sends one,
and PHP's stomp extension takes a frame only once the line end has come."""

UNESCAPED_COMMANDS = frozenset({"CONNECT", "STOMP", "CONNECTED"})
"""Commands of frames whose headers are not escaped, because the version is not agreed yet (STOMP 1.2, "Value
Encoding")."""


class Frame(msgspec.Struct, gc=False):
    command: str
    headers: dict[str, str]
    """Headers, unescaped. If a header is repeated, only its first value is here (STOMP 1.2, "Repeated Header
    Entries")."""
    body: bytes = b""
    lines: bytes = b""
    """Header lines as received, if header_lines.py would encode the headers to the same bytes; else empty."""


def header_line(name: str, value: str, version: Version) -> str:
    """Return one header line, with the line feed at its end.

    STOMP 1.0 has no escapes. There a character that would break the line is sent as the two characters by which STOMP
    1.2 escapes it.
    """
    if version is Version.V1_2:
        return f"{escape(name)}:{escape(value)}\n"
    if version is Version.V1_1:
        return f"{_escape_1_1(name)}:{_escape_1_1(value)}\n"
    name = name.replace(":", "\\c")
    return f"{name}:{value}".replace("\r", "\\r").replace("\n", "\\n") + "\n"


def _escape_1_1(text: str) -> str:
    """Escape a text for STOMP 1.1. STOMP 1.1 has no escape for a carriage return, which does not end a line in that
    version."""
    return "\r".join(map(escape, text.split("\r")))


def encode(frame: Frame, version: Version, end: bytes = b"\0") -> bytes:
    """Encode a frame, and add `end`. A frame with a body gets a `content-length`."""
    if frame.command in UNESCAPED_COMMANDS:
        version = Version.V1_0
    lines = [header_line(name, value, version) for name, value in frame.headers.items()]
    if frame.body:
        lines.append(f"content-length:{len(frame.body)}\n")
    return f"{frame.command}\n{''.join(lines)}\n".encode() + frame.body + end
