"""Dead-lettering of messages in memory that were given up (failed too often, or rejected). This is done in slices,
because one event may give up all messages that a connection holds."""

from __future__ import annotations

from truenext.engine.lifecycle.settlement import Settlement
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.writing.commit_state import BackgroundTask, CommitState


class GivenUpTask(BackgroundTask):
    def __init__(self, commit_state: CommitState, resident: ResidentSet, settlement: Settlement) -> None:
        self._commit_state = commit_state
        self._resident = resident
        self._settlement = settlement

    @property
    def active_work_key(self) -> object:
        return self._resident

    @property
    def has_work(self) -> bool:
        return bool(self._resident.given_up)

    def can_step(self) -> bool:
        return bool(self._resident.given_up) and self._commit_state.has_capacity

    def step(self) -> tuple[()]:
        self._settlement.dead_letter_given_up()
        return ()
