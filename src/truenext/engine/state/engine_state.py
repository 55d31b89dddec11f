"""What there is, once for the whole engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from truenext.engine.state.clients import ClientRegistry
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.queue import Queue


@dataclass(frozen=True, slots=True)
class EngineState:
    """Rooms that need more than one of these take all of them."""

    memory: MemoryBudget
    clients: ClientRegistry = field(default_factory=ClientRegistry)
    queues_by_name: dict[str, Queue] = field(default_factory=dict)
    """Without the hidden ones, in which scheduled sends wait, and those that have ended."""
