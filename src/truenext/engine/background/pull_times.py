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
        return bool(self._pull_requests.ends_us)

    def can_step(self) -> bool:
        return min(self._pull_requests.ends_us.values(), default=self._commit_state.now_us + 1) <= (
            self._commit_state.now_us
        )

    def step(self) -> tuple[()]:
        now_us = self._commit_state.now_us
        for consumer in [one for one, end_us in self._pull_requests.ends_us.items() if end_us <= now_us]:
            self._pull_requests.end_with_notice(consumer)
        return ()

    def next_due_ms(self) -> int | None:
        next_us = min(self._pull_requests.ends_us.values(), default=None)
        if next_us is None:
            return None
        return self._commit_state.now_ms + max(0, -(-(next_us - self._commit_state.now_us) // 1000))
