"""Errors of services and stages, and what each means for the stage's message.

TruenextError
├── ConfigurationError
│   └── DefinitionError    an endpoint or a stage is defined wrongly; nothing was started
├── LocalProtocolError
│   └── FlowError          a stage uses its flow wrongly: its message becomes a dead letter at once
├── FlowFailed             the flow that a program has asked for ended in a dead letter
├── BaseExceptionRaised    a stage has raised an exception such as SystemExit: a failure like any other
├── Reject                 a stage can never process its message: the message becomes a dead letter at once
└── NotDecoded             a message is not of the type that its stage takes: the message becomes a dead letter at once
                           (flows/envelope.py)
"""

from __future__ import annotations

from truenext.errors import ConfigurationError, LocalProtocolError, TruenextError


class DefinitionError(ConfigurationError):
    """Invalid definition of an endpoint, a stage or a service. The text says what to change."""


class FlowError(LocalProtocolError):
    """Invalid use of a flow, such as two calls that exclude each other, or a value of the wrong type. A retry would
    fail in the same way, so the message of the stage becomes a dead letter at once."""


class FlowFailed(TruenextError):
    """The flow of an `ask` has failed: a message of it became a dead letter, and no `on_failure` has handled it.

    Attributes:
        stage: Queue of the stage that failed, such as order.place.stage.reserve.
        reason: Reason why the broker gave up the message.
        attempts: Number of attempts of the message.
        first_cause: Cause of the first attempt that had a cause; "" if no attempt had one.
        last_cause: Cause of the last attempt that had a cause; "" if no attempt had one.
    """

    def __init__(self, stage: str, reason: str, attempts: int, first_cause: str, last_cause: str) -> None:
        why = last_cause.partition("\n")[0] or reason
        after = f"{attempts} attempt{'' if attempts == 1 else 's'}"
        super().__init__(f"the flow has failed in stage {stage} after {after}: {why}")
        self.stage = stage
        self.reason = reason
        self.attempts = attempts
        self.first_cause = first_cause
        self.last_cause = last_cause

    def __reduce__(self) -> tuple[type[FlowFailed], tuple[str, str, int, str, str]]:
        return FlowFailed, (self.stage, self.reason, self.attempts, self.first_cause, self.last_cause)


class Reject(TruenextError):
    """Raise this in a stage that can never process its message. The message becomes a dead letter at once, with this
    reason."""


class NoAttemptsLeft(Reject):
    """The message had no attempts left before its stage ran. For example, its last attempt ended with its process or
    connection.

    Attributes:
        last_cause: First line of the cause of the last attempt that had a cause; "" if no attempt had one.
    """

    def __init__(self, text: str, last_cause: str) -> None:
        super().__init__(text)
        self.last_cause = last_cause


class BaseExceptionRaised(TruenextError):
    """A stage, or a function of `after_commit`, has raised an exception that is not an `Exception`, such as SystemExit.
    This counts as a failure like any other."""
