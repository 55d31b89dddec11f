"""Reports to topics: sent in slices, because one event may make thousands of dead letters, and a topic may have
thousands of subscriptions.

Reports to queues are sent at once, with the dead letter (settlement.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from truenext.engine.lifecycle.arrivals import Arrivals
from truenext.engine.queues.queues import Queues
from truenext.engine.queues.topics import RouteAhead
from truenext.engine.writing.commit_state import BackgroundTask, CommitState
from truenext.model.destination import Destination
from truenext.model.limits import DUE_COPIES_PER_STEP, ROUTING_STEP_NS, TOPIC_REPORTS_BYTES_MAX
from truenext.model.message import SentMessage

_END = object()


class TopicReports(BackgroundTask):
    def __init__(self, commit_state: CommitState, queues: Queues, arrivals: Arrivals) -> None:
        self._commit_state = commit_state
        self._queues = queues
        self._arrivals = arrivals
        self._waiting: deque[tuple[Destination, SentMessage]] = deque()
        self._size = 0
        """Bytes of the headers of all waiting reports."""
        self._ahead: RouteAhead | None = None
        """Queues that get the first waiting report, as far as earlier steps have found them; None if they can be found
        in the step that sends the report."""
        self._search: Iterator[None] | None = None

    def add(self, topic: Destination, report: SentMessage) -> None:
        """Let a later step send the report. If too many reports wait already, the report is dropped."""
        if self._size >= TOPIC_REPORTS_BYTES_MAX:
            return
        self._waiting.append((topic, report))
        self._size += len(report.header)
        self._commit_state.active_work[self] = None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def can_step(self) -> bool:
        return bool(self._waiting) and self._commit_state.has_capacity

    def step(self) -> tuple[()]:
        copies = 0
        while self._waiting and copies < DUE_COPIES_PER_STEP:
            topic, report = self._waiting[0]
            if self._ahead is None and self._queues.routing_ns(topic, report, None) > ROUTING_STEP_NS:
                self._ahead = self._queues.new_route_ahead()
                self._search = self._queues.find_ahead(self._ahead, topic, report)
            if self._search is not None and next(self._search, _END) is not _END:
                break
            self._waiting.popleft()
            self._size -= len(report.header)
            # A topic without subscriptions takes time, too.
            copies += 1 + self._arrivals.accept_with_batch("", topic.address, report, self._ahead)
            self._ahead = self._search = None
        return ()
