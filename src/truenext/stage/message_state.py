"""States of a message that a stage processes, and the table of their transitions.

    RECEIVED ── RUNNING ── RETURNED ─┬─ SENDING ── COMMITTING ─┬─ COMMITTED ── COMPLETED
                                     │                         └─ REPEATED ─── RELEASED
                                     └─ ACKNOWLEDGING ──────────── COMMITTED

A message whose stage sends nothing takes the lower way. After a conflict in SQL, the stage runs again at once, unless
its output was already sent to the broker. A cancellation releases the message. Once the broker's COMMIT has begun, a
cancellation leaves the message in doubt. The last six states are the outcomes of an execution (`ExecutionOutcome`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class MessageState(Enum):
    """State of a message that a stage processes."""

    RECEIVED = "received"
    """The stage has not run. The message is decoded, and its id is looked up in the inbox."""
    RUNNING = "running"
    """The stage runs, or waits to run again after a conflict in SQL."""
    RETURNED = "returned"
    """The stage has returned. The SQL transaction is checked. If there is no output, it is also committed in this
    state."""
    SENDING = "sending"
    """The output is being sent, or was sent, in the broker's transaction. Then the SQL transaction is committed."""
    ACKNOWLEDGING = "acknowledging"
    """The SQL transaction is committed, if there was one. The broker's COMMIT is under way. This COMMIT only
    acknowledges the message, since there is no output."""
    COMMITTING = "committing"
    """The SQL transaction is committed, if there was one. The broker's COMMIT is under way, with the output and the
    acknowledgement."""
    COMMITTED = "committed"
    """The broker has committed its transaction, which includes the acknowledgement of the message."""
    REPEATED = "repeated"
    """The broker has answered that the COMMIT's number was used before. The output was sent at that time. The message
    is not acknowledged."""
    ABANDONED = "abandoned"
    """The stage's thread still runs after a second cancellation. The thread itself will roll back the SQL
    transaction."""
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
"""Outcomes that follow an error or a cancellation."""

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
"""States that may follow each state. All other transitions are faults of this program."""
OUTCOMES: Mapping[str, MessageState] = {each.value: each for each in _ENDS}
"""Last state for each outcome of an execution (`ExecutionOutcome`)."""
