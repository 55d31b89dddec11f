"""Kills of a query's processes and of its broker, at random moments, for tests."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

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


def draw(victims: tuple[str, ...], dice: random.Random) -> Iterator[str]:
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
