"""States of a message that a stage handles, and the table of their transitions.

    RECEIVED ── RUNNING ── RETURNED ─┬─ SENDING ── COMMITTING ─┬─ COMMITTED ── COMPLETED
                                     │                         └─ REPEATED ─── RELEASED
                                     └─ ACKNOWLEDGING ──────────── COMMITTED

A message that sends nothing takes the lower way. After a conflict in SQL, the stage runs again in place, unless output
was sent: only the end of the message can roll that back. A cancellation releases the message, or leaves it in doubt
once the broker's COMMIT has begun. The last six states are the outcomes of an execution (`ExecutionOutcome`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class MessageState(Enum):
    """State of a message that a stage handles."""

    RECEIVED = "received"
    """The stage has not run: the message is decoded, and looked up in the inbox."""
    RUNNING = "running"
    """The stage runs, or waits for its next run after a conflict in SQL."""
    RETURNED = "returned"
    """The stage has returned. SQL is checked, and also committed if there is no output."""
    SENDING = "sending"
    """The output is being sent in the broker's transaction, or has been. SQL is committed afterwards."""
    ACKNOWLEDGING = "acknowledging"
    """SQL is committed, if it was used. The broker's COMMIT only acknowledges the message, since there is no output."""
    COMMITTING = "committing"
    """SQL is committed, if it was used. The broker's COMMIT has the acknowledgement and the output."""
    COMMITTED = "committed"
    """The broker has committed."""
    REPEATED = "repeated"
    """The number of the COMMIT was used before: the output was sent then, and the message is not acknowledged."""
    ABANDONED = "abandoned"
    """A second cancellation has left the stage's thread running. The thread rolls back SQL itself."""
    COMPLETED = "completed"
    ALREADY_PROCESSED = "already processed"
    FAILED = "failed"
    REJECTED = "rejected"
    RELEASED = "released"
    IN_DOUBT = "in doubt"

    # Enum's own hash is a Python function, and each message looks up several states.
    __hash__ = object.__hash__


RECEIVED, RUNNING, RETURNED, SENDING, ACKNOWLEDGING, COMMITTING, COMMITTED, REPEATED, ABANDONED, *_ENDS = MessageState
COMPLETED, ALREADY_PROCESSED, FAILED, REJECTED, RELEASED, IN_DOUBT = _ENDS
_UNDONE = frozenset({FAILED, REJECTED, RELEASED, IN_DOUBT})
"""Outcomes after an error or a cancellation."""

TRANSITIONS: dict[MessageState, frozenset[MessageState]] = {
    RECEIVED: _UNDONE | {RUNNING, ALREADY_PROCESSED},
    RUNNING: _UNDONE | {RUNNING, RETURNED, ABANDONED, ALREADY_PROCESSED},
    RETURNED: _UNDONE | {RUNNING, SENDING, ACKNOWLEDGING, ABANDONED, ALREADY_PROCESSED},
    SENDING: _UNDONE | {COMMITTING, ABANDONED},
    ACKNOWLEDGING: _UNDONE | {COMMITTED},
    COMMITTING: _UNDONE | {COMMITTED, REPEATED},
    COMMITTED: frozenset({COMPLETED}),
    REPEATED: frozenset({RELEASED}),
    # The thread may have committed SQL when it was abandoned: then the message goes on.
    ABANDONED: frozenset({ACKNOWLEDGING, COMMITTING, RELEASED}),
    **dict.fromkeys(_ENDS, frozenset[MessageState]()),
}
"""States that may follow each state."""
OUTCOMES: Mapping[str, MessageState] = {each.value: each for each in _ENDS}
"""States by the outcome of the execution (`ExecutionOutcome`)."""
