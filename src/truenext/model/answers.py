"""What the broker says to one connection, apart from messages."""

import msgspec

from truenext.errors import Code


class Receipt(msgspec.Struct, gc=False):
    """The frame that asked for `receipt` was processed, and what L1 and L3 promise of it is now true."""

    receipt: str
    is_repeat: bool = False
    """That frame was a repeat, and did nothing (L5)."""
    is_unknown: bool = False
    """... and whether its number was ever used is not known."""


class ErrorAnswer(msgspec.Struct, gc=False):
    """The peer's last frame was refused; its connection ends behind this."""

    summary: str
    code: Code
    detail: str = ""
    receipt: str | None = None
    """The receipt that the refused frame asked for."""
    frame_number: int = 0
    """Which frame it was, counted from the first of its connection; 0 is not said: then the connection ends."""


class CloseConnection(msgspec.Struct, gc=False):
    """Nothing follows: the connection closes once everything before has left."""


Answer = Receipt | ErrorAnswer | CloseConnection
