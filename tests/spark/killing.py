"""Kills of a query's processes and of its broker, at random moments, for tests."""

from __future__ import annotations

import os
import random
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
"""Processes after whose death the query continues by itself."""


class Kills:
    """Kills of a query's processes and of its broker, each kind once before any comes again."""

    def __init__(self, victims: tuple[str, ...], count: int, dice: random.Random) -> None:
        self._count = count
        self._dice = dice
        self._drawn = _draw(victims, dice)
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
        """Start a query again and again, with more work each time, until `count` of its runs were killed; then start it
        until it has no work. Raises: AssertionError if a run fails that was not killed"""
        victim = next(self._drawn)
        while self.killed.total() < self._count or has_work():
            if self.killed.total() < self._count:
                add_work()
            with start() as query:
                is_killed = self.killed.total() < self._count and kill(victim, broker, query, self._dice)
                status = query.wait()
                print(victim if is_killed else "nothing", "is killed; the query ends with", status)
                if not is_killed or victim in SURVIVED:
                    assert status == 0, query.log
            if is_killed:
                self.killed[victim] += 1
                victim = next(self._drawn)
        # The last batch may be written and not committed.
        with start() as last:
            assert last.wait() == 0, last.log


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
