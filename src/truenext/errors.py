"""Exceptions of truenext: one tree, which states whose fault an error is.

TruenextError
├── LocalProtocolError      the caller broke the rules of the protocol
├── RemoteProtocolError     the peer broke them; only its connection ends
│   ├── NoSpaceError        the broker has no space for a request; the peer did nothing wrong
│   └── OtherProtocolError  the peer speaks another protocol than STOMP
├── StoreError              the store cannot keep its promise; the broker stops
│   └── StoreInUseError     another broker uses the data folder
├── HistoryError            history cannot be written or read; the broker stops
├── ConfigurationError      options are invalid, or cannot be satisfied
│   └── FaultyFileError     the configuration file has faults
│
│   of a client:
├── ClosedError             the connection, session or consumer was closed by its own program
├── ConnectionLost          the broker cannot be reached, or no longer
│   └── NoBroker            no connection could be opened at all
├── Refused                 the broker answered with an ERROR; the request had no effect
├── RolledBack              the transaction was rolled back; its messages are redelivered
└── InDoubt                 the outcome of the transaction could not be found out in time
"""

from enum import StrEnum


class TruenextError(Exception):
    """Base class of all errors that truenext raises on purpose."""


class LocalProtocolError(TruenextError):
    """The caller requested something that the protocol does not allow now."""


class Code(StrEnum):
    """Machine-readable reason for a refusal: the header `truenext-code` of an ERROR. The values never change.

    An invalid value has the code of that value, also if it is too long; LIMIT is for too many of something.

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
    FORBIDDEN = "forbidden"


class RemoteProtocolError(TruenextError):
    """The peer broke the protocol, or requested something that cannot be done."""

    def __init__(self, reason: str, code: Code = Code.HEADER) -> None:
        super().__init__(reason)
        self.code = code


class NoSpaceError(RemoteProtocolError):
    """The broker has no space for the peer's message; the connection ends without counting attempts."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, Code.NO_SPACE)


class OtherProtocolError(RemoteProtocolError):
    """The peer speaks another protocol than STOMP; its connection ends."""

    def __init__(self, reason: str, protocol: str, answer: bytes) -> None:
        super().__init__(reason, Code.MALFORMED_FRAME)
        self.protocol = protocol
        self.answer = answer
        """Bytes that a client of that protocol understands, sent instead of an ERROR; may be empty."""


class StoreError(TruenextError):
    """The store cannot read or write. Only changes that were not confirmed yet may be lost."""


class StoreInUseError(StoreError):
    """The data folder is in use by another broker."""


class HistoryError(TruenextError):
    """History cannot be written or read."""


class ConfigurationError(TruenextError):
    """Options are invalid, or cannot be satisfied; the message says what to change."""


class FaultyFileError(ConfigurationError):
    """The configuration file has faults; none of its settings is applied."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        """`faults`: file, table, key and reason of each fault."""
        super().__init__("\n".join(faults))
        self.faults = faults


class ClosedError(TruenextError):
    """The connection, session or consumer was closed by its own program, belongs to another process or loop, or the
    handler of the session has returned."""


class ConnectionLost(TruenextError):
    """The broker cannot be reached, or no longer; a pending request may have been carried out or not."""


class NoBroker(ConnectionLost):
    """No connection to a broker could be opened; the message says where, and why."""

    is_listening = False
    """True if a program listens at the address that was tried last: a broker that does not answer, or no broker."""


class Refused(TruenextError):
    """The broker answered with an ERROR; the message says why. The refused request had no effect."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code: str = code
        """Value of `Code`; empty if the broker sends no code, as brokers other than truenext do."""


class RolledBack(TruenextError):
    """The transaction was rolled back: its sends are discarded, messages that it acknowledged are redelivered.

    `__cause__` is the reason, unless the program itself rolled back.
    """


class InDoubt(TruenextError):
    """The outcome of the transaction could not be found out in time, or never can be."""

    def __init__(self, reason: str, token: str) -> None:
        super().__init__(reason)
        self.token: str = token
        """Argument for `outcome` of any connection to the same broker, also in another process."""


def copy_error(error: TruenextError) -> TruenextError:
    """Copy an error for another caller: an exception that is raised twice collects the tracebacks of both."""
    kind = type(error)
    copy = kind.__new__(kind, *error.args)
    copy.__dict__ |= error.__dict__
    copy.__cause__ = error
    return copy
