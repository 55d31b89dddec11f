"""What can go wrong, and whose fault it is.

TruenextError
├── LocalProtocolError     our own caller broke the rules of a protocol
├── RemoteProtocolError    the peer did; its connection ends, nothing else does
│   ├── NoSpaceError        what it asked for would be allowed if there were room; it did nothing wrong
│   └── OtherProtocolError it speaks another protocol than STOMP
├── StoreError             the store cannot keep its promise; the broker stops
│   └── StoreInUseError    another broker holds the data folder
├── HistoryError           history cannot be written or read; the broker stops
├── ConfigurationError     a command line asks for what cannot be
│   └── FaultyFileError    a configuration file does
│
│   of a client:
├── ClosedError            the connection, session or consumer was closed by its own program
├── ConnectionLost         the broker is not there, or no longer
│   └── NoBroker           it could not be connected to at all
├── Refused                the broker answered with an ERROR; it has done nothing
├── RolledBack             the transaction did not happen; what it was given comes again
└── InDoubt                whether the transaction happened could not be found out in time
"""

from enum import StrEnum


class TruenextError(Exception):
    """Anything truenext raises on purpose."""


class LocalProtocolError(TruenextError):
    """Our own caller asked for what the protocol does not allow now."""


class Code(StrEnum):
    """Why a client is refused, for a program: what an ERROR says as `truenext-code`. The values never change.

    What is wrong with one value has the code of that value, also if it is too long; LIMIT is for too many of something.

    Source: docs/stomp.md, "Codes"
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


class RemoteProtocolError(TruenextError):
    """The peer sent what the protocol does not allow, or asked for what cannot be done."""

    def __init__(self, reason: str, code: Code = Code.HEADER) -> None:
        super().__init__(reason)
        self.code = code


class NoSpaceError(RemoteProtocolError):
    """There is no room for what the peer sent; its connection ends as if it had taken leave."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, Code.NO_SPACE)


class OtherProtocolError(RemoteProtocolError):
    """The peer speaks another protocol than STOMP; its connection ends."""

    def __init__(self, reason: str, protocol: str, answer: bytes) -> None:
        super().__init__(reason, Code.MALFORMED_FRAME)
        self.protocol = protocol
        self.answer = answer
        """Bytes that its client understands, in place of an ERROR; may be empty."""


class StoreError(TruenextError):
    """The store cannot read or write; what was not yet confirmed may be lost, nothing else."""


class StoreInUseError(StoreError):
    """Another broker uses the data folder."""


class HistoryError(TruenextError):
    """History cannot be written or read."""


class ConfigurationError(TruenextError):
    """What was asked for at start cannot be done; the message says what to change."""


class FaultyFileError(ConfigurationError):
    """There are faults in the configuration file; nothing of it counts."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        """Of each fault the file, table and key, and the reason."""
        super().__init__("\n".join(faults))
        self.faults = faults


class ClosedError(TruenextError):
    """The connection, session or consumer was closed by its own program, belongs to another process or loop, or the
    handler of the session has returned."""


class ConnectionLost(TruenextError):
    """The broker is not there, or no longer; what was asked for may have happened or not."""


class NoBroker(ConnectionLost):
    """No broker could be connected to; the message says where, and why."""


class Refused(TruenextError):
    """The broker answered with an ERROR; the message says why. What was refused has done nothing."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code: str = code
        """One of `Code`; empty if the broker names none, as others than truenext do."""


class RolledBack(TruenextError):
    """The transaction did not happen: nothing of it was sent, and what it was given comes again.

    `__cause__` says why, if something but the program has ended it.
    """


class InDoubt(TruenextError):
    """Whether the transaction happened could not be found out in time, or never can be."""

    def __init__(self, reason: str, token: str) -> None:
        super().__init__(reason)
        self.token: str = token
        """For `outcome` of any connection to the same broker, in another process as well."""


def copy_error(error: TruenextError) -> TruenextError:
    """The same error for another caller: an exception that is raised twice collects the tracebacks of both."""
    kind = type(error)
    copy = kind.__new__(kind, *error.args)
    copy.__dict__ |= error.__dict__
    copy.__cause__ = error
    return copy
