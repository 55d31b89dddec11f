"""Interceptor: hooks around each run of a stage, before each message that is sent, and after each execution."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import msgspec

ExecutionOutcome: TypeAlias = Literal["completed", "already processed", "failed", "rejected", "released", "in doubt"]
"""Outcome of an execution.

    completed          the stage has run, and all its effects are committed
    already processed  an exactly-once stage had processed the message before; it is acknowledged, and has no effect
    failed             the message counts an attempt, and is redelivered, or a dead letter after too many attempts
    rejected           the message is a dead letter at once
    released           the message is redelivered without an attempt: service stopped, broker or database unavailable
    in doubt           the client could not find out in time whether the commit happened
"""


class Execution(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One run of one stage with one message."""

    endpoint: str
    """Name of the endpoint."""
    stage: str
    """Name of the stage within its endpoint."""
    queue: str
    """Queue of the stage."""
    message_id: str
    """Id of the message, the same however often it is delivered."""
    flow_id: str
    """Id of the flow, the same in all its stages."""
    trace: str
    """Name of the flow for people."""
    attempt: int
    """Number of the attempt; the first is 1."""
    interactive: bool
    """True if a caller waits for the flow."""
    size: int
    """Bytes of the message's body, with its envelope."""
    carrier: Mapping[str, str] = {}
    """Values that interceptors put into the message when it was sent."""
    interceptor_data: dict[Interceptor, Any] = {}
    """Value that each interceptor keeps for its next hooks."""


class MessageToSend(msgspec.Struct, eq=False, kw_only=True):
    """Message that is about to be sent, as interceptors see it."""

    destination: str
    """Name of a queue or topic."""
    message_id: str
    """Id of the message."""
    flow_id: str
    """Id of its flow."""
    trace: str
    """Name of the flow for people."""
    size: int
    """Bytes of the encoded message, without its envelope."""
    carrier: dict[str, str] = {}
    """Values that the receiver finds in `Execution.carrier`. Every message carries them: keep them to a few short
    texts."""


class ExecutionResult(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Result of an execution. All durations are in seconds."""

    outcome: ExecutionOutcome
    """Outcome of the message."""
    error: BaseException | None = None
    """Cause of the outcome, if that is an error."""
    run: float | None = None
    """Duration until the stage returned, or `total` if it did not return."""
    commit: float | None = None
    """Duration from the stage's return until the end of the commit; None without a commit."""
    total: float
    """Duration from the receipt of the message until its outcome is known."""


class Interceptor:
    """Base class of interceptors; a hook that is not overridden costs nothing. One interceptor serves all stages of
    a service, in several tasks and threads at once.

    Interceptors are called in the order that `Service` was given. None may wait for long: the hooks of `async`
    stages run in the event loop.
    """

    def around(self, execution: Execution) -> AbstractContextManager[object]:
        """Return a context manager for one run of a stage, in the thread of the stage. It is entered before the
        dependencies are made, left after they are closed, before anything is committed, and gets the exception of
        the stage. One message may have several runs: again in place after a conflict in SQL, and, by `next_direct`,
        a run of the next stage, which `execution.stage` then names.

        Its exception fails the stage, and neither hides the stage's own exception nor makes a failure a success.

        Args:
            execution: The run.
        """
        return nullcontext()

    def sending(self, execution: Execution | None, send: MessageToSend) -> None:
        """Inspect a message before it is sent, or put values into `send.carrier`. The message is final once its
        transaction is committed. An exception is logged, and the message is sent.

        Args:
            execution: Run of the stage that sends the message; None if no stage sends it.
            send: The message.
        """

    def ended(self, execution: Execution, result: ExecutionResult) -> None:
        """Get the result of an execution, once, when the outcome of its message is known; also if `around` was never
        entered, because the message was rejected before. An exception is logged.

        Args:
            execution: The execution, with the `interceptor_data` of the hooks before.
            result: Its result.
        """
