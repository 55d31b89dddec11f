"""What can a program have done around each run of a stage, for each message that is sent, and when a run has ended?"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import msgspec

ExecutionOutcome: TypeAlias = Literal["completed", "already processed", "failed", "rejected", "released", "in doubt"]
"""What became of a message.

    completed          the stage has run, and all that it did is committed
    already processed  an exactly-once stage has processed the message before; it is acknowledged, and has no effect
    failed             it counts an attempt, and comes again, or is a dead letter if it has failed too often
    rejected           it is a dead letter at once
    released           it comes again without an attempt: the service stops, or broker or database was unavailable
    in doubt           whether the commit happened could not be found out in time
"""


class Execution(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One run of one stage with one message."""

    endpoint: str
    stage: str
    queue: str
    message_id: str
    flow_id: str
    trace: str
    """What people call the flow."""
    attempt: int
    """The first one is 1."""
    interactive: bool
    size: int
    """Of the message's body, in bytes."""
    carrier: Mapping[str, str] = {}
    """What interceptors have put into the message when it was sent."""
    interceptor_data: dict[Interceptor, Any] = {}
    """For what an interceptor wants to know again in its next hook."""


class MessageToSend(msgspec.Struct, eq=False, kw_only=True):
    """One message that is about to be sent."""

    destination: str
    """The name of a queue or topic."""
    message_id: str
    flow_id: str
    trace: str
    size: int
    """Of its body, in bytes."""
    carrier: dict[str, str] = {}
    """Goes with the message; whoever takes it finds it in `Execution.carrier`. It is part of every message: keep it to
    a few short texts."""


class ExecutionResult(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """How a run has ended. All durations are in seconds."""

    outcome: ExecutionOutcome
    error: BaseException | None = None
    """Why it has not just completed."""
    run: float | None = None
    """The stage with its dependencies; None if it did not come to that."""
    commit: float | None = None
    """None if it did not come to that."""
    total: float
    """From when the service had the message until what became of it was known."""


class Interceptor:
    """To be subclassed; a hook that is not overridden costs nothing. One interceptor serves all stages of a service, in
    several tasks and threads at once.

    Interceptors are called in the order in which the service was told of them. None may wait for long: the hooks of
    `async` stages run in the event loop.
    """

    def around(self, execution: Execution) -> AbstractContextManager[object]:
        """Entered before the dependencies of a stage are made, left when they have ended; in the thread in which the
        stage runs, and before anything is committed. It hears of the exception of the stage. For one message it is
        called more than once if its SQL has met another transaction's, and the stage runs again in place, or if it goes
        on directly with the next stage, whose name is `execution.stage` then.

        What it raises fails the stage, but it neither hides the stage's own exception nor makes a failure a success.
        """
        return nullcontext()

    def sending(self, execution: Execution | None, send: MessageToSend) -> None:
        """Before a message leaves; it is sent for good when its transaction is committed. `execution` is None if no
        stage sends it. It may put something into `send.carrier`. What it raises is logged, and the message is sent.
        """

    def ended(self, execution: Execution, result: ExecutionResult) -> None:
        """Once for each execution, when it is known what became of its message; also where `around` was never entered,
        because the message was rejected before. What it raises is logged.
        """
