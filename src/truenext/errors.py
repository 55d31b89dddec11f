"""Exceptions of truenext: one tree of classes. The class of an error says which side caused it.

TruenextError
├── LocalProtocolError      the caller broke the rules of the protocol
├── RemoteProtocolError     the peer broke the rules of the protocol; only its connection ends
│   ├── NoSpaceError        the broker has no space for a request; the peer did nothing wrong
│   └── OtherProtocolError  the peer speaks another protocol than expected
├── StoreError              the store cannot keep its promise; the broker stops
│   ├── StoreInUseError     another broker uses the data folder
│   ├── StoreFencedError    another broker has taken over the log
│   │   └── HandedOverError this broker has handed over to another one
│   ├── StoreBehindError    the log no longer has the rows that the folder needs
│   └── StoreForgottenError the database has lost rows that it had confirmed
├── HistoryError            history cannot be written or read; the broker stops
├── ConfigurationError      options are invalid, or cannot be satisfied
│   └── FaultyFileError     the configuration file has faults
│
│   only in clients:
├── ClosedError             the connection, session or consumer was closed by its own program
├── ConnectionLost          the connection to the broker broke, or none could be opened
│   └── NoBroker            no connection could be opened
├── Refused                 the broker answered with an ERROR; the request had no effect
├── RolledBack              the transaction was rolled back; its messages are redelivered
└── InDoubt                 the outcome of the transaction could not be found out in time
"""

from enum import StrEnum


class TruenextError(Exception):
    """Base class of all errors that truenext raises on purpose."""


class LocalProtocolError(TruenextError):
    """The caller requested something that the protocol does not allow in this state."""


class Code(StrEnum):
    """Machine-readable reason for a refusal: the header `truenext-code` of an ERROR. The values never change.

    A header or name that is invalid, or too long, has the code for its kind, such as HEADER or DESTINATION. LIMIT means
    that there is too much or too many of something, DRAINING that the client came during a drain, and should come again
    later.

    Source: docs/protocol.md, "Error codes"
    """

    MALFORMED_FRAME = "malformed-frame"
    COMMAND = "command"
    LOGIN = "login"
    STALE = "stale"
    HEADER = "header"
    NOT_SUPPORTED = "not-supported"
    DESTINATION = "destination"
    SELECTOR = "selector"
    CONTROL_REQUEST = "control-request"
    NOT_FOUND = "not-found"
    IN_USE = "in-use"
    NOT_HELD = "not-held"
    NO_TRANSACTION = "no-transaction"
    ROLLBACK_ONLY = "rollback-only"
    ROLLED_BACK = "rolled-back"
    GAP = "gap"
    LIMIT = "limit"
    NO_SPACE = "no-space"
    TOO_SLOW = "too-slow"
    BUSY = "busy"
    DRAINING = "draining"
    FORBIDDEN = "forbidden"
    CLOSED = "closed"


class RemoteProtocolError(TruenextError):
    """The peer broke the rules of the protocol, or requested something that cannot be done."""

    def __init__(self, reason: str, code: Code = Code.HEADER, cause: Code | None = None) -> None:
        """`cause` is the code of an earlier refusal that has led to this one."""
        super().__init__(reason)
        self.code = code
        self.cause = cause


class NoSpaceError(RemoteProtocolError):
    """The broker has no space for the peer's message. If the connection ends for this reason, no attempt is counted for
    any message."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, Code.NO_SPACE)


class OtherProtocolError(RemoteProtocolError):
    """The peer speaks another protocol than this connection is for; the connection ends."""

    def __init__(self, reason: str, protocol: str, answer: bytes) -> None:
        super().__init__(reason, Code.MALFORMED_FRAME)
        self.protocol = protocol
        self.answer = answer
        """Bytes to send instead of an ERROR, in the protocol that the client speaks; may be empty."""


class StoreError(TruenextError):
    """The store cannot read or write. Only changes that were not confirmed yet may be lost."""


class StoreInUseError(StoreError):
    """Another broker uses the data folder."""


class StoreFencedError(StoreError):
    """Another broker has taken over the log. This broker confirms nothing any more."""


class HandedOverError(StoreFencedError):
    """This broker has stopped cleanly, and named the broker that takes over."""


class StoreBehindError(StoreError):
    """The log no longer has the rows that follow those of the folder. Opened anew, the store makes the folder anew."""


class StoreForgottenError(StoreError):
    """The database has lost rows of the log that it had confirmed."""


class HistoryError(TruenextError):
    """History cannot be written or read."""


class ConfigurationError(TruenextError):
    """Options are invalid, or cannot be satisfied; the message says what to change."""


class FaultyFileError(ConfigurationError):
    """The configuration file has faults; none of its settings is applied."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        """Each of `faults` is a sentence with file, table, key and reason."""
        super().__init__("\n".join(faults))
        self.faults = faults


class ClosedError(TruenextError):
    """The connection, session or consumer cannot be used: the program has closed it, it belongs to another process or
    event loop, or the handler to which a session was passed has returned."""


class ConnectionLost(TruenextError):
    """The connection to the broker broke, or none could be opened. A pending request may have been carried out or
    not."""


class NoBroker(ConnectionLost):
    """No connection to a broker could be opened. The message says at which address, and why."""

    is_listening = False
    """True if a program listens at one of the addresses. That program may be a broker that does not answer, or another
    program."""

    is_refused = False
    """True if each host has refused the connection, so that nothing listens at any of the addresses."""


class Refused(TruenextError):
    """The broker has answered with an ERROR; the message says why. The refused request had no effect."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code: str = code
        """Value of `Code`; "" if the broker has sent no code, as brokers other than truenext do."""


class RolledBack(TruenextError):
    """The transaction was rolled back: its sends are discarded, and messages that it acknowledged are redelivered.

    `__cause__` is the error that caused it; None if the program itself rolled the transaction back.
    """


class InDoubt(TruenextError):
    """The outcome of the transaction could not be found out in time, or the broker does not know it any more."""

    def __init__(self, reason: str, token: str) -> None:
        super().__init__(reason)
        self.token: str = token
        """Argument for `outcome`, which asks for the outcome later, on any connection to the same broker, also in
        another process."""


def copy_error(error: TruenextError) -> TruenextError:
    """Return a copy of an error, for one more caller: an exception that is raised twice would collect the tracebacks of
    both callers."""
    kind = type(error)
    copy = kind.__new__(kind, *error.args)
    copy.__dict__ |= error.__dict__
    copy.__cause__ = error
    return copy
