"""Errors of a database, and what they mean for the message.

This module needs no SQLAlchemy, so that programs can catch its errors without it.

TruenextError
├── DatabaseUnavailable    the database is away, or cannot work; not the fault of the message
│   ├── OutboxUnusable     the tables of exactly-once processing cannot be used; the database may be there
│   └── OutboxBusy         other transactions have kept these tables locked for too long
├── Swallowed              the transaction is no longer what the function believes; nothing was committed
├── NotCommitted           the database has refused the COMMIT; nothing was committed
├── CommitInDoubt          the COMMIT was sent, and its outcome is not known here
├── AlreadyProcessed       the message was handled already; nothing of this time is committed
├── InProgress             another transaction is handling the same message; nothing was committed
└── ProducerLost           another process owns the producer of the number; nothing was committed
"""

from enum import Enum

from truenext.errors import TruenextError


class DatabaseErrorKind(Enum):
    """Kind of a database error: whose fault it is, and so what to do."""

    FULL = "full"
    """No disk space, no memory, or a failing disk: not the fault of the message; stages wait."""
    UNAVAILABLE = "away"
    """The database is away, or read-only: not the fault of the message; stages wait. If the database is available
    all the same, the work itself may use another database, or lack the right to write."""
    RETRYABLE = "again"
    """A conflict with another transaction: the same work may succeed if it is run again at once."""
    TABLES = "tables"
    """The tables of exactly-once processing cannot be used: not the fault of the message; stages wait."""
    LOST = "lost"
    """The connection was lost during the work. If the database is available, the work itself may be the cause."""
    APPLICATION = "own"
    """Any other error: the fault of the work itself."""


class DatabaseUnavailable(TruenextError):
    """The database is away, or cannot do what it could when it was opened; `__cause__` says more. Stages that use it
    release their messages, without an attempt, and continue when it is back."""

    kind = DatabaseErrorKind.UNAVAILABLE


class OutboxUnusable(DatabaseUnavailable):
    """The tables of exactly-once processing cannot be read or written now; `__cause__` says more."""

    kind = DatabaseErrorKind.TABLES


class OutboxBusy(DatabaseUnavailable):
    """The outbox was locked by other transactions for longer than the lock timeout."""

    kind = DatabaseErrorKind.RETRYABLE


class Swallowed(TruenextError):
    """The transaction has failed or ended, and the function went on as if it had not. Nothing was committed.

    `__cause__` is the error that was swallowed, if it is known. This error decides about the message.
    """


class NotCommitted(TruenextError):
    """The database has answered the COMMIT with an error, the `__cause__`: nothing of the transaction happened."""


class CommitInDoubt(TruenextError):
    """The COMMIT was sent and its answer has not come: the transaction happened or not. `__cause__` says why."""


class AlreadyProcessed(TruenextError):
    """The message was handled already, so its effects are there; those of this time are rolled back."""


class InProgress(TruenextError):
    """Conflict with another transaction that handles the same message, and has not ended in time."""


class ProducerLost(TruenextError):
    """The producer of the number was claimed by another process; nothing was committed."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, as drivers add many more."""
    return str(error).partition("\n")[0]
