"""Why a message is given back."""

from enum import Enum


class RequeueReason(Enum):
    """Why a message is given back, in the words of docs/history.md; all but the last count as an attempt."""

    NACKED = "nacked"
    ABORTED = "aborted"
    LOST = "lost"
    RELEASED = "released"
