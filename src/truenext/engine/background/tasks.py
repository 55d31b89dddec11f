"""Background tasks of the engine. In each turn, tasks that answer clients do a step after dispatch; all other tasks do
a step before dispatch."""

from __future__ import annotations

from collections.abc import Sequence

from truenext.engine.background.browsing import BrowseTask
from truenext.engine.background.bulk_work import BulkPieceExecutor, BulkTask
from truenext.engine.background.expiry import ExpiryTask
from truenext.engine.background.given_up import GivenUpTask
from truenext.engine.background.pull_times import PullTimesTask
from truenext.engine.background.retries import RetryTask
from truenext.engine.background.scheduled import Scheduler
from truenext.engine.lifecycle.parts import LifecycleParts
from truenext.engine.memory.parts import MemoryParts
from truenext.engine.queues.queues import Queues
from truenext.engine.state.pages import StoreRead
from truenext.engine.writing.commit_state import BackgroundTask
from truenext.engine.writing.engine_state import EngineState

_Tasks = Sequence[tuple[object, BackgroundTask]]
"""Tasks, each with its key in `CommitState.active_work`."""


class BackgroundTasks:
    def __init__(self, state: EngineState, memory: MemoryParts, queues: Queues, life: LifecycleParts) -> None:
        self._commit_state = commit_state = state.commit_state
        resident, arrivals, settlement = memory.resident, life.arrivals, life.settlement
        self.expiry = ExpiryTask(state, memory.expiry_timers, resident, memory.page_reader, queues, settlement)
        self.scheduler = Scheduler(commit_state, resident, queues, arrivals)
        self.retries = RetryTask(commit_state, memory.delays, settlement)
        self.given_up = GivenUpTask(commit_state, resident, settlement)
        self.browsing = BrowseTask(state, queues)
        self.bulk_pieces = BulkPieceExecutor(state, resident, queues, arrivals, settlement, self.scheduler)
        self.bulk = BulkTask(state, self.bulk_pieces)
        self.pull_times = PullTimesTask(commit_state, life.pull_requests)
        self.timers = (memory.expiry_timers, self.scheduler.timers)
        self._before_dispatch = _by_key(
            self.expiry,
            self.scheduler,
            queues.wildcards,
            self.retries,
            self.given_up,
            life.topic_reports,
            queues.selections,
            queues.subscription_cleanup,
        )
        self._after_dispatch = _by_key(self.browsing, self.bulk, self.pull_times)

    @property
    def can_step(self) -> bool:
        """Whether a step of any task would do something."""
        active_work = self._commit_state.active_work
        if not active_work or self._commit_state.is_stopped:
            return False
        return any(
            key in active_work and task.can_step() for key, task in (*self._before_dispatch, *self._after_dispatch)
        )

    @property
    def next_due_ms(self) -> int | None:
        """Time in milliseconds since the epoch when a turn is needed because a task is due. None if no task waits for a
        time."""
        active_work = self._commit_state.active_work
        if not active_work:
            return None
        times = [
            task.next_due_ms() for key, task in (*self._before_dispatch, *self._after_dispatch) if key in active_work
        ]
        return min((due_ms for due_ms in times if due_ms is not None), default=None)

    def step_before_dispatch(self) -> list[StoreRead]:
        """Do a step of each task that steps before dispatch and has work. Returns the pages that the tasks request."""
        return self._step(self._before_dispatch)

    def step_after_dispatch(self) -> list[StoreRead]:
        """Do a step of each task that steps after dispatch and has work. Returns the pages that the tasks request."""
        return self._step(self._after_dispatch)

    def _step(self, tasks: _Tasks) -> list[StoreRead]:
        commit_state = self._commit_state
        reads: list[StoreRead] = []
        for key, task in tasks:
            if key not in commit_state.active_work or commit_state.is_stopped:
                continue
            if task.can_step():
                reads += task.step()
            if not task.has_work:
                commit_state.active_work.pop(key, None)
        return reads


def _by_key(*tasks: BackgroundTask) -> _Tasks:
    return [(task.active_work_key, task) for task in tasks]
