"""Helpers of unit tests of the engine: a run of the stuck audit, eviction, and the groups of a queue."""

from collections.abc import Callable, Collection

from truenext.engine.engine import Engine
from truenext.engine.selecting.groups import GroupOwnership
from truenext.engine.state.queue import Lane, Queue
from truenext.engine.stuck import StuckQueueDetector


def run_stuck_audit(
    audit: StuckQueueDetector, engine: Engine, read_lanes: Callable[[], Collection[Lane]] = set
) -> list[Queue]:
    steps = audit.check(engine, read_lanes)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: list[Queue] = end.value
            return found


def evict_all(engine: Engine) -> None:
    """Evict all messages that can be evicted."""
    limit, engine.state.memory.limit = engine.state.memory.limit, 0
    engine.evict()
    while engine._memory.eviction.is_unfinished:
        engine.evict()
    engine.state.memory.limit = limit


def groups_of(engine: Engine, queue: Queue) -> GroupOwnership | None:
    """Return the groups of the queue, None if it has none."""
    selecting = engine.queues.selections.by_queue.get(queue)
    return None if selecting is None else selecting.groups
