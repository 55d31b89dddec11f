"""Errors of a database, and what each means for the message.

This module does not import SQLAlchemy, so that a program without SQLAlchemy can catch these errors.

TruenextError
├── DatabaseUnavailable    the database is unavailable, or cannot work; not the fault of the message
│   ├── OutboxUnusable     the tables of exactly-once processing cannot be used; the database may be available
│   └── OutboxBusy         other transactions have kept these tables locked for too long
├── Swallowed              the function returned although its transaction had failed; nothing was committed
├── NotCommitted           the database has refused the COMMIT; nothing was committed
├── CommitInDoubt          the COMMIT was sent, and its outcome is not known
├── AlreadyProcessed       the message was processed before; this transaction is rolled back
├── InProgress             another transaction is processing the same message; nothing was committed
└── ProducerLost           another process has claimed the producer; nothing was committed
"""

from enum import Enum

from truenext.errors import TruenextError


class DatabaseErrorKind(Enum):
    """Kind of a database error: whether the message or the database is at fault, and what the stage does."""

    FULL = "full"
    """No disk space, no memory, or a failing disk. The database is at fault; stages wait."""
    UNAVAILABLE = "away"
    """The database is unavailable or read-only. The database is at fault; stages wait. But if a probe then finds the
    database available, the function may have used another database, or may lack the right to write."""
    RETRYABLE = "again"
    """Conflict with another transaction. The function may succeed if it runs again at once."""
    TABLES = "tables"
    """The tables of exactly-once processing cannot be used. The database is at fault; stages wait."""
    LOST = "lost"
    """The connection was lost during the transaction. If a probe then finds the database available, the function may
    have caused the loss."""
    APPLICATION = "own"
    """Any other error. The function is at fault."""


class DatabaseUnavailable(TruenextError):
    """The database is unavailable, or can no longer do what it could when it was opened. `__cause__` has the reason.
    Stages that use the database release their messages without an attempt, and continue when it is available again."""

    kind = DatabaseErrorKind.UNAVAILABLE


class OutboxUnusable(DatabaseUnavailable):
    """The tables of exactly-once processing cannot be read or written now. `__cause__` has the reason."""

    kind = DatabaseErrorKind.TABLES


class OutboxBusy(DatabaseUnavailable):
    """The outbox stayed locked by other transactions for longer than the lock timeout."""

    kind = DatabaseErrorKind.RETRYABLE


class Swallowed(TruenextError):
    """The function has returned, but its transaction cannot be committed. The function has ignored an error or a
    refused call, or has left a statement running. Nothing was committed.

    `__cause__` is the ignored error, if known. The kind of that error decides what happens to the message.
    """


class NotCommitted(TruenextError):
    """The database has answered the COMMIT with an error, the `__cause__`. Nothing was committed."""


class CommitInDoubt(TruenextError):
    """The COMMIT was sent and not answered, so the transaction may be committed or not. `__cause__` has the reason."""


class AlreadyProcessed(TruenextError):
    """The message was processed before, and its effects are committed. This transaction is rolled back."""


class InProgress(TruenextError):
    """Conflict with another transaction that is processing the same message, and has not ended in time."""


class ProducerLost(TruenextError):
    """The producer was claimed by another process. Nothing was committed."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text. Drivers add further lines."""
    return str(error).partition("\n")[0]
