"""Times of pull requests: withdraws requests whose time is over. Source: docs/contract.md, C26.4."""

from __future__ import annotations

from truenext.engine.lifecycle.pull_requests import PullRequests
from truenext.engine.writing.commit_state import BackgroundTask, CommitState


class PullTimesTask(BackgroundTask):
    def __init__(self, commit_state: CommitState, pull_requests: PullRequests) -> None:
        self._commit_state = commit_state
        self._pull_requests = pull_requests

    @property
    def active_work_key(self) -> object:
        return self._pull_requests

    @property
    def has_work(self) -> bool:
        return self._pull_requests.next_end_us is not None

    def can_step(self) -> bool:
        next_us = self._pull_requests.next_end_us
        return next_us is not None and next_us <= self._commit_state.now_us

    def step(self) -> tuple[()]:
        self._pull_requests.end_overdue()
        return ()

    def next_due_ms(self) -> int | None:
        next_us = self._pull_requests.next_end_us
        if next_us is None:
            return None
        return self._commit_state.now_ms + max(0, -(-(next_us - self._commit_state.now_us) // 1000))
