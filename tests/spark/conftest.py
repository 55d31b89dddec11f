import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.integration.broker_process import BrokerProcess
from tests.spark.compiled_home import spark_home
from tests.spark.queues import serving
from truenext.spark.schema import EVENTS
from truenext.spark.session import start
from truenext.testing import BlockingBroker, blocking_broker

# Of all sessions that tests start, in processes of their own too.
os.environ["SPARK_CONF_DIR"] = str(Path(__file__).parent / "conf")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("SPARK_HOME", str(spark_home(config.rootpath / ".pytest_cache")))


TEST_TIMEOUT_S = 900
"""Seconds for a test of Spark. A test that is interrupted in a call of Java leaves the session unusable for all tests
after it, so a slow machine gets more time than elsewhere."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/spark/") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    logging.getLogger("py4j").setLevel(logging.ERROR)
    session = start()
    session.conf.set("spark.sql.shuffle.partitions", "2")
    # To compile what is computed takes a fifth of the time, and pays for more rows than these. Commands that tests run,
    # in processes of their own, do compile it.
    session.conf.set("spark.sql.codegen.wholeStage", "false")
    session.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    yield session
    session.stop()


@pytest.fixture
def frame(spark: SparkSession) -> Callable[[list[dict[str, Any]]], DataFrame]:
    def make(events: list[dict[str, Any]]) -> DataFrame:
        rows = [tuple(each[name] for name in EVENTS.names) for each in events]
        return spark.createDataFrame(rows, EVENTS)

    return make


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker in a process of its own."""
    with serving(tmp_path) as process:
        yield process


@pytest.fixture
def here() -> Iterator[BlockingBroker]:
    """A broker in a thread of the test's process."""
    with blocking_broker() as broker:
        yield broker
