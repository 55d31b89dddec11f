"""Refusals: class of the Java exception for each error, and errors for features that the broker does not offer."""

from truenext.errors import Code, RemoteProtocolError
from truenext.model.answers import ErrorAnswer

_JMS = "javax.jms."
_JMS_EXCEPTION = f"{_JMS}JMSException"
_CLASSES = {
    Code.LOGIN: "java.lang.SecurityException",
    Code.FORBIDDEN: f"{_JMS}JMSSecurityException",
    Code.DESTINATION: f"{_JMS}InvalidDestinationException",
    Code.SELECTOR: f"{_JMS}InvalidSelectorException",
    Code.NO_SPACE: f"{_JMS}ResourceAllocationException",
    Code.LIMIT: f"{_JMS}ResourceAllocationException",
    Code.DRAINING: f"{_JMS}ResourceAllocationException",
    Code.ROLLBACK_ONLY: f"{_JMS}TransactionRolledBackException",
    Code.ROLLED_BACK: f"{_JMS}TransactionRolledBackException",
    Code.NO_TRANSACTION: f"{_JMS}TransactionRolledBackException",
}
_CAUSES = (
    *(Code.FORBIDDEN, Code.NO_SPACE, Code.LIMIT, Code.DESTINATION, Code.SELECTOR),
    *(Code.NOT_SUPPORTED, Code.COMMAND, Code.HEADER, Code.MALFORMED_FRAME),
)
"""Refusals in a transaction whose class its COMMIT reports, too: a repeat at once does not help, as it does after a
TransactionRolledBackException."""
ENDED_CLASS = f"{_JMS}IllegalStateException"
ENDED = "the client has ended this connection; make a new one"
"""Reason for the refusal of a command after the RemoveInfo of its connection."""
_XA_END = "xaErrorCode:-3"
"""End of the text of an XAException, from which the client takes the code XAER_RMERR."""


def exception_class(fault: ErrorAnswer) -> str:
    """Return the name of the Java class whose exception a client gets for an error."""
    if fault.detail.endswith(_XA_END):
        return "javax.transaction.xa.XAException"
    code = fault.cause if fault.code is Code.ROLLBACK_ONLY and fault.cause in _CAUSES else fault.code
    return _CLASSES.get(code, _JMS_EXCEPTION)


def not_supported(what: str, instead: str) -> RemoteProtocolError:
    """Return the error for a feature that the broker does not offer to JMS clients."""
    return RemoteProtocolError(f"{what}: this broker does not support it; {instead}", Code.NOT_SUPPORTED)


def xa_refusal() -> RemoteProtocolError:
    return RemoteProtocolError(
        f"XA transactions: this broker does not support them; use local transactions; {_XA_END}", Code.NOT_SUPPORTED
    )


def foreign_id(what: str) -> RemoteProtocolError:
    """Return the error for an id that does not belong to the client's connection."""
    return RemoteProtocolError(f"the {what} is of another connection", Code.COMMAND)
