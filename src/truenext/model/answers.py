"""Answers of the broker to one connection, apart from messages."""

import msgspec

from truenext.errors import Code


class Receipt(msgspec.Struct, gc=False):
    """Confirmation that the frame with this `receipt` header was processed, with the guarantees of C18.1 and C18.3."""

    receipt: str
    is_repeat: bool = False
    """True if the frame was a repeat, and therefore had no effect (C18.5)."""
    is_unknown: bool = False
    """True if the frame counts as a repeat only because its number is below the producer's highest one: the broker does
    not know whether this number was ever used."""


class ErrorAnswer(msgspec.Struct, gc=False):
    """Answer that refuses the client's last frame: an ERROR."""

    summary: str
    code: Code
    detail: str = ""
    receipt: str | None = None
    """Receipt that the refused frame requested."""
    frame_number: int = 0
    """Number of the refused frame, 1 for the first frame of the connection; 0 if the connection ends."""
    cause: Code | None = None
    """Code of an earlier refusal that has led to this one."""


class CloseConnection(msgspec.Struct, gc=False):
    """Last answer: the connection closes once all earlier answers were sent."""


Answer = Receipt | ErrorAnswer | CloseConnection
