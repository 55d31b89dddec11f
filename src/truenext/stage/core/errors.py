"""Errors of services and stages, and what becomes of the message.

TruenextError
├── ConfigurationError
│   └── DefinitionError    an endpoint or a stage is defined wrongly; nothing was started
├── LocalProtocolError
│   └── FlowError          a stage uses its flow wrongly: its message is a dead letter at once
├── BaseExceptionRaised    a stage has raised an exception that would end its process
├── Reject                 raised by a stage that can never process its message: it is a dead letter at once
└── NotDecoded             a message is not of the type that its stage takes: it is a dead letter at once
"""

from truenext.errors import ConfigurationError, LocalProtocolError, TruenextError


class DefinitionError(ConfigurationError):
    """Invalid definition of an endpoint, a stage or a service; the message says what to change."""


class FlowError(LocalProtocolError):
    """Invalid use of a flow, such as two calls that exclude each other, or a value of the wrong type. A retry would
    fail in the same way, so the stage's message becomes a dead letter at once."""


class Reject(TruenextError):
    """Raise it in a stage that can never process its message, which becomes a dead letter at once with this reason."""


class NoAttemptsLeft(Reject):
    """The attempts of the stage were used up before it ran: the last one ended with its process or connection.

    Attributes:
        last_cause: first line of the cause of an earlier attempt; "" if none had one
    """

    def __init__(self, text: str, last_cause: str) -> None:
        super().__init__(text)
        self.last_cause = last_cause


class BaseExceptionRaised(TruenextError):
    """A stage or a hook raised an exception that is no Exception, such as SystemExit: a failure like any other."""


class NotDecoded(TruenextError):
    """Message that is not of the type that the stage takes, such as a field of another type; the text says where. It
    becomes a dead letter at once."""
