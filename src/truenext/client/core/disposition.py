"""What a program says of a message that it was handed."""

import msgspec


class Disposition(msgspec.Struct, frozen=True):
    is_acked: bool
    """It was handled; else it has failed."""
    delay_ms: int | None = None
    """What has failed is tried again after so long; None leaves that to the queue's policy."""
    is_rejected: bool = False
    """What has failed is never tried again."""
    cause: str = ""
    """Why it has failed, for whoever looks at it later."""


ACKED = Disposition(True)
FAILED = Disposition(False)
REJECTED = Disposition(False, is_rejected=True)
