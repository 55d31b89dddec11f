"""Kills of a query's processes and of its broker, at random moments, for tests."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

from tests.integration.broker_process import BrokerProcess
from tests.spark.source.query_process import QueryProcess

RUN_SECONDS = 15.0
"""Approximate time of a run, on two cores."""
COMMANDS = {
    "java": "org.apache.spark.deploy.SparkSubmit",
    "source": "pyspark.sql.streaming.python_streaming_source_runner",
    "sink": "pyspark.sql.worker.python_streaming_sink_runner",
    "worker": "pyspark.daemon pyspark.worker",
    "executor": "CoarseGrainedExecutorBackend",
}
"""Words in the command of each kind of process that can be killed; `source` and `sink` have the driver's."""
SURVIVED = {"broker", "executor"}
"""Processes after whose death the query continues by itself: a run may lose several."""

TOO_BUSY = re.compile("terminated with exception: .*Python worker failed to connect back", re.DOTALL)
"""Error of Spark where a machine does not start Python within ten seconds. The next run goes on, as after a kill."""


class Kills:
    """Kills of a query's processes and of its broker, each kind once before any comes again."""

    def __init__(self, victims: tuple[str, ...], count: int, dice: random.Random) -> None:
        self._count = count
        self._dice = dice
        self._drawn = _draw(victims, dice)
        self._next = next(self._drawn)
        self.killed: Counter[str] = Counter()
        """Number of kills of each kind."""

    def run(
        self,
        broker: BrokerProcess,
        *,
        start: Callable[[], QueryProcess],
        add_work: Callable[[], object],
        has_work: Callable[[], bool],
    ) -> None:
        """Start a query again and again, with more work each time, until `count` processes were killed; then start it
        until it has no work. Raises: AssertionError if a run fails although it survives what was killed"""
        while self.killed.total() < self._count or has_work():
            if self.killed.total() < self._count:
                add_work()
            with start() as query:
                killed = self._kill_in(query, broker)
                status = query.wait()
                print(*killed or ["nothing"], "killed; the query ends with", status, flush=True)
                assert status == 0 or not SURVIVED.issuperset(killed) or TOO_BUSY.search(query.log), query.log
        # The last batch may be written and not committed.
        while self._fails(start):
            pass

    @staticmethod
    def _fails(start: Callable[[], QueryProcess]) -> bool:
        """Run a query that nothing kills. Return True if the machine was too busy for it."""
        with start() as query:
            status = query.wait()
            assert status == 0 or TOO_BUSY.search(query.log), query.log
        return status != 0

    def _kill_in(self, query: QueryProcess, broker: BrokerProcess) -> list[str]:
        """Kill processes of one run, as long as the query survives it. Return what was killed."""
        killed: list[str] = []
        while self.killed.total() < self._count and SURVIVED.issuperset(killed):
            if not kill(self._next, broker, query, self._dice):
                break
            self.killed[self._next] += 1
            killed.append(self._next)
            self._next = next(self._drawn)
        return killed


def _draw(victims: tuple[str, ...], dice: random.Random) -> Iterator[str]:
    """Yield victims at random, each once before any comes again."""
    while True:
        yield from dice.sample(victims, len(victims))


def kill(victim: str, broker: BrokerProcess, query: QueryProcess, dice: random.Random) -> bool:
    """Kill something of a query, some time after its first question to the broker; False if the query has ended."""
    while not query.processes(COMMANDS["source"]) and query.is_running:
        time.sleep(0.1)
    time.sleep(dice.uniform(0.0, RUN_SECONDS))
    while query.is_running:
        if victim == "broker":
            broker.kill()
            time.sleep(dice.random())
            broker.start(broker.port)
            return True
        if victim == "driver":
            query.kill_driver()
            return True
        if found := query.processes(COMMANDS[victim]):
            os.kill(dice.choice(found), signal.SIGKILL)
            return True
        time.sleep(0.01)
    return False
