"""Disposition of a message by the program, and which exceptions count as an attempt."""

from enum import Enum

import msgspec

from truenext.errors import ClosedError, Code, ConnectionLost, InDoubt, Refused, RolledBack


class Disposition(msgspec.Struct, frozen=True):
    is_acked: bool
    """The message was handled; otherwise handling it failed."""
    delay_ms: int | None = None
    """Milliseconds until a failed message is redelivered; None leaves that to the queue's policy."""
    is_rejected: bool = False
    """The failed message is not redelivered."""
    cause: str = ""
    """Cause of the failure, kept with the message."""


ACKED = Disposition(True)
FAILED = Disposition(False)
REJECTED = Disposition(False, is_rejected=True)


# ---- Attempts that an exception counts ----
#
# Source: docs/attempts.md, "What counts"


class CountedAttempts(Enum):
    """Messages for which a rollback counts an attempt."""

    ALL = "all"
    """Messages that were marked as failed; if there are none, all messages of the transaction."""
    FAILED = "failed"
    """Messages that were marked as failed."""
    NONE = "none"


def counted_attempts_for(error: BaseException | None) -> CountedAttempts:
    """Return which messages count an attempt after an exception. A cancellation, the end of the program, and errors
    of the broker or the connection count none, even if the program has raised another exception from them."""
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
