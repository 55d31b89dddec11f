"""States of a message that a stage handles, and the table of their transitions.

    RECEIVED ── RUNNING ── RETURNED ─┬─ SENDING ── COMMITTING ─┬─ COMMITTED ── COMPLETED
                                     │                         └─ REPEATED ─── RELEASED
                                     └─ ACKNOWLEDGING ──────────── COMMITTED

A message that sends nothing takes the lower way. After a conflict in SQL, the stage runs again in place, unless output
was sent: only the end of the message can roll that back. A cancellation releases the message, or leaves it in doubt
once the broker's COMMIT has begun. The last six states are the outcomes of an execution (`ExecutionOutcome`).
"""

from __future__ import annotations

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

    def may_become(self, state: MessageState) -> bool:
        return state in TRANSITIONS[self]


_S = MessageState
_UNDONE = frozenset({_S.FAILED, _S.REJECTED, _S.RELEASED, _S.IN_DOUBT})
"""Outcomes after an error or a cancellation."""

TRANSITIONS: dict[MessageState, frozenset[MessageState]] = {
    _S.RECEIVED: _UNDONE | {_S.RUNNING, _S.ALREADY_PROCESSED},
    _S.RUNNING: _UNDONE | {_S.RUNNING, _S.RETURNED, _S.ABANDONED, _S.ALREADY_PROCESSED},
    _S.RETURNED: _UNDONE | {_S.RUNNING, _S.SENDING, _S.ACKNOWLEDGING, _S.ABANDONED, _S.ALREADY_PROCESSED},
    _S.SENDING: _UNDONE | {_S.COMMITTING, _S.ABANDONED},
    _S.ACKNOWLEDGING: _UNDONE | {_S.COMMITTED},
    _S.COMMITTING: _UNDONE | {_S.COMMITTED, _S.REPEATED},
    _S.COMMITTED: frozenset({_S.COMPLETED}),
    _S.REPEATED: frozenset({_S.RELEASED}),
    # The thread may have committed SQL when it was abandoned: then the message goes on.
    _S.ABANDONED: frozenset({_S.ACKNOWLEDGING, _S.COMMITTING, _S.RELEASED}),
    **dict.fromkeys(_UNDONE | {_S.COMPLETED, _S.ALREADY_PROCESSED}, frozenset[MessageState]()),
}
"""States that may follow each state."""
