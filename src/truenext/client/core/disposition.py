"""How the program settles a message, and which exceptions count as an attempt."""

from enum import Enum

import msgspec

from truenext.errors import ClosedError, Code, ConnectionLost, InDoubt, Refused, RolledBack


class Disposition(msgspec.Struct, frozen=True):
    is_acked: bool
    """True if the program has processed the message; False if it has failed."""
    delay_ms: int | None = None
    """Milliseconds until a failed message is redelivered. None: the queue's policy decides."""
    is_rejected: bool = False
    """True if the failed message becomes a dead letter instead of being redelivered."""
    cause: str = ""
    """Cause of the failure, which the broker stores with the message."""


ACKED = Disposition(True)
FAILED = Disposition(False)
REJECTED = Disposition(False, is_rejected=True)


# ---- Attempts that an exception counts ----
#
# Source: docs/attempts.md, "What counts"


class CountedAttempts(Enum):
    """Messages of a transaction for which a rollback counts an attempt."""

    ALL = "all"
    """If messages were marked as failed, only these; otherwise all messages of the transaction."""
    FAILED = "failed"
    """The messages that were marked as failed, and no other messages."""
    NONE = "none"


def counted_attempts_for(error: BaseException | None) -> CountedAttempts:
    """Return which messages count an attempt after an exception. No message counts an attempt after a cancellation, the
    end of the program, a lost or closed connection, RolledBack, InDoubt, or a refusal for lack of space. The same holds
    if one of these errors is the cause of the program's own exception."""
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
