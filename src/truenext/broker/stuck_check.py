"""Stuck check: once a second, reports queues that have a ready message and a consumer with credit.

The check runs in steps, each directly after a turn's dispatch. At any other time, such a queue is no fault: the next
turn will dispatch the message.
"""

import logging
from collections.abc import Callable

from truenext.broker.event_loop import SlicedWork, Steps
from truenext.broker.pager import Pager
from truenext.engine.engine import Engine
from truenext.engine.state.pages import SideRead
from truenext.engine.state.queue import Lane
from truenext.engine.stuck import StuckQueueDetector

logger = logging.getLogger(__name__)


class StuckCheck(SlicedWork):
    def __init__(self, engine: Engine, pager: Pager, monotonic_ns: Callable[[], int]) -> None:
        super().__init__(monotonic_ns)
        self._engine = engine
        self._pager = pager
        self.detector = StuckQueueDetector()

    def begin(self) -> bool:
        """Begin a check, to be run in slices. Returns False if the check before it is not finished."""
        if self.pending:
            return False
        self.add(self._check())
        return True

    def _check(self) -> Steps:
        stuck = yield from self.detector.check(self._engine, self._lanes_being_read)
        for queue in stuck:
            logger.error("queue is stuck: a message is ready and a consumer has credit", extra={"queue": queue.name})

    def _lanes_being_read(self) -> set[Lane]:
        return {read.lane for read in self._pager.pending if not isinstance(read, SideRead)}
