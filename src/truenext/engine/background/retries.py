"""Retries: make failed messages ready again when their delays end."""

from __future__ import annotations

from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.memory.delays import DelayedEntries
from truenext.engine.writing.commit_state import BackgroundTask, CommitState


class RetryTask(BackgroundTask):
    def __init__(self, commit_state: CommitState, delays: DelayedEntries, settlement: Settlement) -> None:
        self._commit_state = commit_state
        self._delayed_entries = delays
        self._settlement = settlement

    @property
    def active_work_key(self) -> object:
        return self._delayed_entries

    @property
    def has_work(self) -> bool:
        return self._delayed_entries.next_us is not None

    def can_step(self) -> bool:
        next_us = self._delayed_entries.next_us
        return next_us is not None and next_us <= self._commit_state.now_us

    def step(self) -> tuple[()]:
        for entry in self._delayed_entries.pop_due():
            self._settlement.end_delay(entry)
        return ()

    def next_due_ms(self) -> int | None:
        next_us = self._delayed_entries.next_us
        if next_us is None:
            return None
        return self._commit_state.now_ms + max(0, -(-(next_us - self._commit_state.now_us) // 1000))
