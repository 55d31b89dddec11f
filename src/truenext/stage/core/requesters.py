"""Requesters: clients that have requested the report of this process, and the order in which they get it.

A process makes at most one report in REPORT_PERIOD_S seconds, however many clients request one. A client that requests
a second report in that time gets the next one.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final, NamedTuple

import msgspec

from truenext.model.destination import REMOTE_TEMPORARY_PREFIX
from truenext.model.process_report import REPORT_TTL_S

REPORT_PERIOD_S: Final = 1.0
"""Least time in seconds between two reports."""
WAITING_MAX: Final = 1_000
"""Largest number of requesters that wait for a report. Further requests are ignored."""
SENDS_MAX: Final = 200
"""Largest number of requesters that get one report. Others wait for the next one."""
SENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Largest number of bytes of all copies of one report."""
RECENT_MAX: Final = 100
"""Largest number of requesters that learn that the process stops: those that got a report last."""
RECENT_S: Final = 60.0
"""Seconds after its last request in which a requester learns that the process stops."""
REQUEST_BYTES_MAX: Final = 4096
CORRELATION_LENGTH_MAX: Final = 255

_is_temporary_queue = re.compile(rf"{REMOTE_TEMPORARY_PREFIX}[^/,\s]+/[^,\s]+").fullmatch


def request_fault(reply_to: str, correlation_id: str, body: bytes) -> str:
    """Return why a message is not a request for a report; empty if it is one.

    A process sends its report only to a temporary queue. Otherwise a client could let the process send to queues to
    which the client itself may not send.
    """
    if not _is_temporary_queue(reply_to):
        return "its reply-to is not one temporary queue"
    if len(correlation_id) > CORRELATION_LENGTH_MAX:
        return "its correlation-id is too long"
    if len(body) > REQUEST_BYTES_MAX:
        return "its body is too large"
    try:
        if body.strip():
            msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return "its body is neither empty nor a JSON object"
    return ""


class Requester(NamedTuple):
    reply_to: str
    """Temporary queue that gets the report."""
    correlation_id: str
    """Correlation id of the requester's last request."""
    requested_at: float


class Requesters:
    """Requesters of one process. All times are those of a clock that never goes back."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Requester] = OrderedDict()
        """Requesters that have not got the current report, by their temporary queues."""
        self._repeating: OrderedDict[str, Requester] = OrderedDict()
        """Requesters that have got the current report, and wait for the next one."""
        self._served: set[str] = set()
        """Temporary queues that have got the current report."""
        self._sends_left = 0
        self._recent: OrderedDict[str, Requester] = OrderedDict()
        """Requesters that have got a report, the last one at the end."""

    @property
    def is_empty(self) -> bool:
        """True if no requester waits."""
        return not (self._waiting or self._repeating)

    def add(self, requester: Requester) -> bool:
        """Add a requester. Return False if too many wait already."""
        reply_to = requester.reply_to
        waiting = self._repeating if reply_to in self._served else self._waiting
        if reply_to not in waiting and len(self._waiting) + len(self._repeating) >= WAITING_MAX:
            return False
        waiting[reply_to] = requester
        return True

    def start_report(self, size: int) -> None:
        """Replace the current report by a new one of `size` bytes."""
        self._served.clear()
        self._waiting |= self._repeating
        self._repeating.clear()
        self._sends_left = max(1, min(SENDS_MAX, SENT_BYTES_MAX // size))

    def next_requester(self, now: float) -> Requester | None:
        """Return the next requester that gets the current report; None if there is none now."""
        while self._waiting and self._sends_left:
            _, requester = self._waiting.popitem(last=False)
            if now - requester.requested_at <= REPORT_TTL_S:
                self._sends_left -= 1
                self._served.add(requester.reply_to)
                self._recent[requester.reply_to] = requester
                self._recent.move_to_end(requester.reply_to)
                if len(self._recent) > RECENT_MAX:
                    self._recent.popitem(last=False)
                return requester
        return None

    def recent_requesters(self, now: float) -> list[Requester]:
        """Return the requesters that learn that the process stops, the last one first."""
        return [each for each in reversed(self._recent.values()) if now - each.requested_at <= RECENT_S]
