"""How does a Spark session start, on one machine or many?"""

import os
import sys

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from truenext.errors import ConfigurationError
from truenext.spark.java import find_java

LOCAL = "local[*]"


def start(master: str | None = None) -> SparkSession:
    """A session, or the one that runs already; `master` None is what spark-submit said, else all cores of this machine.

    Raises: ConfigurationError, with the cause and what to do
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
        # Batches of Arrow in which events go to Python: larger ones cost less per event.
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "65536")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
    )
    if not is_submitted:
        chosen = master or LOCAL
        builder = builder.master(chosen)
        if chosen.startswith("local"):
            # Two per core, so that one queue with most of the events leaves the other cores something to do.
            builder = (
                builder.config("spark.driver.host", "127.0.0.1")
                .config("spark.driver.bindAddress", "127.0.0.1")
                .config("spark.driver.memory", os.environ.get("TRUENEXT_SPARK_MEMORY", "4g"))
                .config("spark.sql.shuffle.partitions", str(4 * (os.cpu_count() or 1)))
            )
    try:
        return builder.getOrCreate()
    except PySparkException as error:
        raise ConfigurationError(
            f"Spark did not start with Java of {os.environ.get('JAVA_HOME')}: {error}; what Java said is above. "
            f"Try --master local[1], less memory (TRUENEXT_SPARK_MEMORY=1g), or another JAVA_HOME"
        ) from error
