"""When failed messages are ready again: once their delays are over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.engine.writing.background_task import BackgroundTask

if TYPE_CHECKING:
    from truenext.engine.lifecycle.outcomes import Outcomes
    from truenext.engine.memory.delays import Delays
    from truenext.engine.writing.commit_state import CommitState


class Retries(BackgroundTask):
    __slots__ = ("_commit_state", "_delays", "_outcomes")

    def __init__(self, commit_state: CommitState, delays: Delays, outcomes: Outcomes) -> None:
        self._commit_state = commit_state
        self._delays = delays
        self._outcomes = outcomes

    @property
    def source(self) -> object:
        return self._delays

    @property
    def has_any(self) -> bool:
        return self._delays.next_us is not None

    def is_due(self) -> bool:
        next_us = self._delays.next_us
        return next_us is not None and next_us <= self._commit_state.now_us

    def step(self) -> tuple[()]:
        for entry in self._delays.pop_due():
            self._outcomes.end_delay(entry)
        return ()

    def next_due_ms(self) -> int | None:
        next_us = self._delays.next_us
        if next_us is None:
            return None
        return self._commit_state.now_ms + max(0, -(-(next_us - self._commit_state.now_us) // 1000))
