"""What can go wrong with a database, and what it means for the message.

It needs no SQLAlchemy, so that whoever only catches can do so without it.

TruenextError
├── DatabaseUnavailable     the database is not there, or cannot work; no message's fault
│   ├── OutboxUnusable          it is there, perhaps, but not what has effects happen once
│   └── OutboxBusy       others have kept that locked for too long
├── Swallowed        the transaction is no longer what the function believes; nothing was committed
├── NotCommitted     the database has refused the COMMIT; nothing was committed
├── CommitInDoubt    the COMMIT was sent, and nobody here knows whether it happened
├── AlreadyProcessed       the message was handled already; nothing of this time is committed
├── InProgress         somebody else is handling the same message; nothing was committed
└── ProducerLost     somebody else has the numbers that this was to have; nothing was committed
"""

from enum import Enum

from truenext.errors import TruenextError


class DatabaseErrorKind(Enum):
    """What an error says about whose fault it is, and so what is to be done."""

    FULL = "full"
    """The database has no room, no memory, or a disk that fails: no message's fault, and it is waited for."""
    UNAVAILABLE = "away"
    """The database is not there, or can only be read: no message's fault, and it is waited for. If it is there all the
    same, it may be this work that looks for another, or may not write."""
    RETRYABLE = "again"
    """Another transaction was in the way: the same work may succeed if it is run again at once."""
    TABLES = "tables"
    """The tables of what happens once cannot be used, such as for a right that was taken away: no message's fault, and
    it is waited for."""
    LOST = "lost"
    """The connection was lost in the middle of the work: if the database is there, it may be this work that ends
    connections."""
    APPLICATION = "own"
    """Anything else: the fault of the work itself."""


class DatabaseUnavailable(TruenextError):
    """The database is not there, or cannot do what it could when it was opened; `__cause__` says more."""

    kind = DatabaseErrorKind.UNAVAILABLE


class OutboxUnusable(DatabaseUnavailable):
    """What has effects happen once cannot be asked now, or not be written; `__cause__` says more."""

    kind = DatabaseErrorKind.TABLES


class OutboxBusy(DatabaseUnavailable):
    """Others have kept it locked for so long that it was not waited for."""

    kind = DatabaseErrorKind.RETRYABLE


class Swallowed(TruenextError):
    """The transaction has failed or ended, and the function went on as if it had not. Nothing was committed.

    `__cause__` is the error that was swallowed, if it is known.
    """


class NotCommitted(TruenextError):
    """The database has answered the COMMIT with an error, the `__cause__`: nothing of the transaction happened."""


class CommitInDoubt(TruenextError):
    """The COMMIT was sent and its answer has not come: the transaction happened or not. `__cause__` says why."""


class AlreadyProcessed(TruenextError):
    """The message was handled already, so its effects are there; what was done this time is taken back."""


class InProgress(TruenextError):
    """Another transaction handles the same message, and has not ended in time."""


class ProducerLost(TruenextError):
    """Another process has taken over the producer under whose number something was to be sent."""


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says: drivers say much."""
    return str(error).partition("\n")[0]
