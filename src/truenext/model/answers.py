"""Answers of the broker to one connection, apart from messages."""

import msgspec

from truenext.errors import Code


class Receipt(msgspec.Struct, gc=False):
    """Confirmation that the frame with this `receipt` header was processed: C18.1 and C18.3 hold for it from now on."""

    receipt: str
    is_repeat: bool = False
    """True if the frame was a repeat, and therefore had no effect (C18.5)."""
    is_unknown: bool = False
    """True if the repeat's number counts as used, but may never have been used."""


class ErrorAnswer(msgspec.Struct, gc=False):
    """Answer that refuses the peer's last frame: an ERROR."""

    summary: str
    code: Code
    detail: str = ""
    receipt: str | None = None
    """Receipt that the refused frame requested."""
    frame_number: int = 0
    """Number of the refused frame, 1 for the connection's first; 0 if the connection ends."""


class CloseConnection(msgspec.Struct, gc=False):
    """Last answer: the connection closes once everything before it has been sent."""


Answer = Receipt | ErrorAnswer | CloseConnection
