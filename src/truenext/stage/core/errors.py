"""What can go wrong with a service, and whose fault it is.

TruenextError
├── ConfigurationError
│   └── DefinitionError    an endpoint or a stage is defined as it cannot be; nothing was started
├── LocalProtocolError
│   └── FlowError          a stage has said what it may not: its message is a dead letter at once
├── BaseExceptionRaised            a stage has raised what would end its process
├── Reject                 raised by a stage: its message will never do, and is a dead letter at once
└── NotDecoded             a message is not what its stage takes: it is a dead letter at once
"""

from truenext.errors import ConfigurationError, LocalProtocolError, TruenextError


class DefinitionError(ConfigurationError):
    """An endpoint, a stage or a service is defined as it cannot be; the message says what to change."""


class FlowError(LocalProtocolError):
    """A stage has said what it may not say: two things that exclude each other, or something of the wrong type. It
    would say so again, so its message is a dead letter at once."""


class Reject(TruenextError):
    """To be raised by a stage whose message will never do: it becomes a dead letter at once, with this reason."""


class NoAttemptsLeft(Reject):
    """The attempts that a stage makes were used up before it ran: the last one ended with its process or connection.

    Attributes:
        last_cause: the first line of the cause that an earlier attempt gave; "" if none did
    """

    def __init__(self, text: str, last_cause: str) -> None:
        super().__init__(text)
        self.last_cause = last_cause


class BaseExceptionRaised(TruenextError):
    """A stage or a hook has raised what is no Exception, such as SystemExit: it has failed like any other."""


class NotDecoded(TruenextError):
    """What came is not what the stage takes, such as a field of another type; the message says where."""
