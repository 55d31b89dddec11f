"""For whom does it count as an attempt that the code of a program has raised?

Source: docs/client.md, "What counts as a delivery attempt"
"""

from enum import Enum

from truenext.errors import ClosedError, Code, ConnectionLost, InDoubt, Refused, RolledBack


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
