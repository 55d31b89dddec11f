"""Interceptor: hooks around each run of a stage, before each message that is sent, and after each execution."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import msgspec

from truenext.flows.events import ExecutionOutcome, GiveUpReason

PoolName: TypeAlias = Literal["interactive", "other"]
"""Pool of workers that processes a message: that of interactive messages and subscribers, or that of other messages."""


class Execution(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One execution: one stage processes one message."""

    endpoint: str
    """Name of the endpoint."""
    stage: str
    """Name of the stage within its endpoint."""
    queue: str
    """Queue of the stage."""
    message_id: str
    """Id of the message. It is the same in every delivery."""
    flow_id: str
    """Id of the flow. It is the same in all its stages."""
    trace: str
    """Human-readable name of the flow."""
    attempt: int
    """Number of the attempt: 1 plus the failures that count against the message."""
    interactive: bool
    """True if a caller waits for the flow."""
    pool: PoolName
    """Pool of workers that processes the message."""
    waited: float | None = None
    """Seconds from the message's arrival in its queue, by the broker's clock, until the execution began, by the clock
    of this process; None if a process may have received the message before."""
    size: int
    """Size of the message's body in bytes, including its envelope."""
    carrier: Mapping[str, str] = {}
    """Values that the sender's interceptors have put into the message."""
    interceptor_data: dict[Interceptor, Any] = {}
    """Data of each interceptor for its later hooks, by interceptor."""


class MessageToSend(msgspec.Struct, eq=False, kw_only=True):
    """Facts about a message, for the hook `sending` before the message is sent. The hook may only put values into
    `carrier`."""

    destination: str
    """Name of the queue or topic, without /queue/ or /topic/."""
    message_id: str
    """Id of the message."""
    flow_id: str
    """Id of the message's flow."""
    trace: str
    """Human-readable name of the flow."""
    size: int
    """Size of the encoded message in bytes, without its envelope."""
    carrier: dict[str, str] = {}
    """Values for the receiver, which finds them in `Execution.carrier`. The message carries them, so put in only a few
    short texts."""


class ExecutionResult(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Result of an execution. Durations are in seconds."""

    outcome: ExecutionOutcome
    """Outcome of the execution."""
    error: BaseException | None = None
    """Error that caused the outcome; None if there was no error."""
    given_up_for: GiveUpReason | None = None
    """Reason why the message was given up: it is a dead letter now, or its subscriber has dropped it; None if it was
    not given up, or if the broker has not said after how many attempts it gives up."""
    run: float | None = None
    """Duration from the receipt of the message until the stage returned; equal to `total` if the stage did not
    return."""
    commit: float | None = None
    """Duration from the stage's return until the end of the commit; None if nothing was committed."""
    total: float
    """Duration from the receipt of the message until its outcome was known."""


class Interceptor:
    """Base class of interceptors. A hook that a subclass does not override costs no time. One interceptor serves all
    stages of a service, in several tasks and threads at once.

    Hooks are called in the order of the interceptors in `Service`. A hook must not wait for long, since hooks of
    `async` stages run in the event loop.
    """

    def around(self, execution: Execution) -> AbstractContextManager[object]:
        """Return a context manager for one run of a stage. It is entered in the thread of the stage, before the
        dependencies are made. It is exited after the dependencies are closed and before anything is committed, and gets
        the exception of the stage.

        One message may have several runs. After a conflict in SQL, the stage runs again. After `next_direct`, the next
        stage runs, and `execution.stage` names that stage.

        If the context manager raises an exception, the stage fails. The exception of the stage itself is raised in any
        case: the context manager cannot suppress or replace it.

        Args:
            execution: The execution to which the run belongs.
        """
        return nullcontext()

    def sending(self, execution: Execution | None, send: MessageToSend) -> None:
        """Inspect a message before it is sent, or put values into `send.carrier`. The message may still be rolled back
        with its transaction. If this hook raises an exception, the exception is logged, and the message is sent.

        Args:
            execution: Execution of the stage that sends the message; None if a program sends it.
            send: The message.
        """

    def ended(self, execution: Execution, result: ExecutionResult) -> None:
        """Handle the result of an execution. This is called once, when the outcome of the message is known. It is also
        called if the message was rejected before the stage ran, and so without `around`. An exception is logged.

        Args:
            execution: The execution, with the `interceptor_data` of earlier hooks.
            result: Result of the execution.
        """
