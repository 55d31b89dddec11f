"""State of the engine that more than one part reads or changes."""

from __future__ import annotations

from truenext.engine.state.clients import ClientRegistry
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.queue import Queue
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.numbers import QueueNumberAllocator
from truenext.engine.writing.producers import JmsProducerRegistry, ProducerRegistry


class EngineState:
    """State that is passed as a whole to parts of the engine that need several of its fields."""

    def __init__(self, commit_state: CommitState, memory: MemoryBudget) -> None:
        self.commit_state = commit_state
        self.memory = memory
        self.clients = ClientRegistry()
        self.queues_by_name: dict[str, Queue] = {}
        """Queues by name. Ended queues, and hidden queues of scheduled sends, are left out."""
        self.numbers = QueueNumberAllocator(commit_state)
        self.producers = ProducerRegistry(commit_state)
        self.jms_producers = JmsProducerRegistry(commit_state)

    def producers_of(self, session: ConnectionState) -> ProducerRegistry:
        """Return the registry of the producers of a connection."""
        return self.jms_producers if session.is_jms_client else self.producers
