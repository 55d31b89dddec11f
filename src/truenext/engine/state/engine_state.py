"""State of the engine: memory budget, clients and queues, each once."""

from __future__ import annotations

from dataclasses import dataclass, field

from truenext.engine.state.clients import ClientRegistry
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.queue import Queue


@dataclass(frozen=True, slots=True)
class EngineState:
    """State that is passed as a whole to parts that need more than one of its fields."""

    memory: MemoryBudget
    clients: ClientRegistry = field(default_factory=ClientRegistry)
    queues_by_name: dict[str, Queue] = field(default_factory=dict)
    """Queues by name, without ended ones, and without the hidden ones that keep scheduled sends."""
