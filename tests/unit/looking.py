"""A look of the stuck audit, all its steps behind the same turn."""

from collections.abc import Callable, Collection

from truenext.engine.engine import Engine
from truenext.engine.lane import Lane
from truenext.engine.queue import Queue
from truenext.engine.stuck import StuckAudit


def looked(audit: StuckAudit, engine: Engine, read_lanes: Callable[[], Collection[Lane]] = set) -> list[Queue]:
    steps = audit.look(engine, read_lanes)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: list[Queue] = end.value
            return found
