"""What a program says of a message that it was handed, and for whom an exception counts as an attempt."""

from enum import Enum

import msgspec

from truenext.errors import ClosedError, Code, ConnectionLost, InDoubt, Refused, RolledBack


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


# ---- For whom does it count as an attempt that the code of a program has raised? ----
#
# Source: docs/client.md, "What counts as a delivery attempt"


class CountedAttempts(Enum):
    """For whom a rollback counts as an attempt."""

    ALL = "all"
    """What was named as failed; if nothing was, all that the transaction was given."""
    FAILED = "failed"
    """What was named as failed, if anything was."""
    NONE = "none"


def counted_attempts_for(error: BaseException | None) -> CountedAttempts:
    """An exception of the program's code is an attempt. A cancellation, the program's end, and what the broker or the
    connection did are none, whatever the code then raises."""
    if error is None:
        return CountedAttempts.FAILED
    if not isinstance(error, Exception):
        return CountedAttempts.NONE
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, ConnectionLost | RolledBack | InDoubt | ClosedError):
            return CountedAttempts.NONE
        if isinstance(cause, Refused) and cause.code == Code.NO_SPACE:
            return CountedAttempts.NONE
        cause = cause.__cause__ or cause.__context__
    return CountedAttempts.ALL
