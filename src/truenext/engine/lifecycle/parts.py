"""Parts of the engine that handle the arrival, settlement and pull requests of messages."""

from __future__ import annotations

from collections.abc import Callable

from truenext.engine.lifecycle.arrivals import Arrivals
from truenext.engine.lifecycle.pull_requests import PullRequests
from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.lifecycle.topic_reports import TopicReports
from truenext.engine.memory.parts import MemoryParts
from truenext.engine.queues.queues import Queues
from truenext.engine.writing.commit_state import CommitState


class LifecycleParts:
    def __init__(
        self, commit_state: CommitState, memory: MemoryParts, queues: Queues, random: Callable[[], float]
    ) -> None:
        resident = memory.resident
        self.arrivals = Arrivals(
            commit_state, resident, queues.selections, queues.wildcards, queues, memory.expiry_timers
        )
        self.topic_reports = TopicReports(commit_state, queues, self.arrivals)
        self.settlement = Settlement(
            commit_state, memory.delays, resident, queues, self.arrivals, self.topic_reports, random
        )
        self.pull_requests = PullRequests(commit_state)
