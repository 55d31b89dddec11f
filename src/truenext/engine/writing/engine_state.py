"""State of the engine: all that more than one part reads or changes, each once."""

from __future__ import annotations

from truenext.engine.state.clients import ClientRegistry
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.queue import Queue
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.numbers import QueueNumberAllocator
from truenext.engine.writing.producers import ProducerRegistry


class EngineState:
    """State that is passed as a whole to parts that need more than one of its fields."""

    def __init__(self, commit_state: CommitState, memory: MemoryBudget) -> None:
        self.commit_state = commit_state
        self.memory = memory
        self.clients = ClientRegistry()
        self.queues_by_name: dict[str, Queue] = {}
        """Queues by name, without ended ones, and without the hidden ones that keep scheduled sends."""
        self.numbers = QueueNumberAllocator(commit_state)
        self.producers = ProducerRegistry(commit_state)
