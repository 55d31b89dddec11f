"""Parts that decide which messages are in memory."""

from __future__ import annotations

from truenext.engine.memory.delays import DelayedEntries
from truenext.engine.memory.eviction import Eviction
from truenext.engine.memory.reading import PageReader
from truenext.engine.memory.resident_set import ResidentSet
from truenext.engine.memory.spilled_subscriptions import SpilledSubscriptions
from truenext.engine.memory.timers import Timers
from truenext.engine.writing.engine_state import EngineState
from truenext.model.record import SCHEDULED_TIMERS


class MemoryParts:
    def __init__(self, state: EngineState) -> None:
        commit_state, budget = state.commit_state, state.memory
        self.delays = DelayedEntries(commit_state)
        self.expiry_timers = Timers(commit_state, end=SCHEDULED_TIMERS)
        self.resident = ResidentSet(commit_state, budget)
        self.page_reader = PageReader(
            budget, self.resident, self.delays, redelivered_below=commit_state.redelivered_below
        )
        self.spilling = SpilledSubscriptions(commit_state, state.numbers)
        self.eviction = Eviction(state, self.resident, self.spilling)
