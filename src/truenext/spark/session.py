"""Start of a Spark session, on one machine or on a cluster."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from truenext.errors import ConfigurationError
from truenext.spark.java import find_java

LOCAL = "local[*]"


def start(master: str | None = None, *, log: Path | None = None) -> SparkSession:
    """Return the running Spark session, or start one. With a `master` of None, the session runs where spark-submit
    says; without spark-submit, on all cores of this machine.

    Java writes its standard error to `log`: warnings of Spark and log4j. If a session runs already, or under
    spark-submit, `log` gets nothing.

    Raises: ConfigurationError if Spark does not start, with the cause and what to do; OSError if `log` cannot be
    written
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not is_submitted:
        os.environ["JAVA_HOME"] = str(find_java())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = (
        SparkSession.builder.appName("truenext audit")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        # Rows per Arrow batch of events for Python: larger batches cost less per event.
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "65536")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
    )
    if not is_submitted:
        chosen = master or LOCAL
        builder = builder.master(chosen)
        if chosen.startswith("local"):
            # Four per core, so that one queue with most of the events leaves work for the other cores.
            builder = (
                builder.config("spark.driver.host", "127.0.0.1")
                .config("spark.driver.bindAddress", "127.0.0.1")
                .config("spark.driver.memory", os.environ.get("TRUENEXT_SPARK_MEMORY", "4g"))
                .config("spark.sql.shuffle.partitions", str(4 * (os.cpu_count() or 1)))
            )
    if is_submitted:
        log = None
    try:
        with _stderr_to(log):
            return builder.getOrCreate()
    except PySparkException as error:
        raise ConfigurationError(
            f"Spark did not start with Java of {os.environ.get('JAVA_HOME')}: {error}; its output is "
            f"{'above' if log is None else f'in {log}'}. "
            "JAVA_HOME must be Java 17 or later. If memory is short, try --master local[1], or TRUENEXT_SPARK_MEMORY=1g"
        ) from error


@contextmanager
def _stderr_to(log: Path | None) -> Iterator[None]:
    """Use `log` as the standard error of processes that are started inside the block, such as Java."""
    if log is None:
        yield
        return
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
