"""Start of a Spark session, on one machine or on a cluster, and the error of one whose Java has ended."""

import fcntl
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.accumulators import AccumulatorTCPServer
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from truenext.errors import ConfigurationError, TruenextError
from truenext.spark.java import find_java

LOCAL = "local[*]"
SOCKET_END_SECONDS = 2.0
"""Seconds between the end of Java's sockets and that of its process, at most."""
JAVA_END_SECONDS = 30.0
"""Seconds within which the Java of a command that was killed must end. It notices the end of the command at once."""


def start(master: str | None = None, *, log: Path | None = None) -> SparkSession:
    """Return the running Spark session, or start one. With a `master` of None, the session runs where spark-submit
    says; without spark-submit, on all cores of this machine.

    Java writes its standard error to `log`: warnings of Spark and log4j. If Java runs already, or under spark-submit,
    `log` gets nothing.

    Raises: ConfigurationError if Spark does not start, or the Java of another command still writes to `log`, with what
    to do; OSError if `log` cannot be written
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
    if is_submitted or SparkContext._gateway is not None:
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
    """Use `log` as the standard error of processes that are started inside the block, such as Java.

    They keep it locked until they have ended. So the Java of a command that was killed, which may still write a table,
    and that of the next command never write into one folder.
    """
    if log is None:
        yield
        return
    sys.stderr.flush()
    with log.open("ab") as file:
        _lock(file, log)
        file.truncate(0)
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@contextmanager
def one_error_if_java_ends() -> Iterator[None]:
    """Raise one error if Java ends inside the block, for a command that uses Spark. Errors that threads of Spark and
    py4j would print are silenced up to the end of the process, since these threads may end after the block.

    Raises: TruenextError if Java has ended
    """
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # py4j also writes to the root logger, which truenext never does.
    logging.getLogger().addFilter(_is_never_shown)
    setattr(AccumulatorTCPServer, "handle_error", lambda *_: None)  # noqa: B010
    try:
        yield
    except (Py4JError, ConnectionError) as error:
        # A Py4JJavaError is an answer of Java.
        if isinstance(error, Py4JJavaError) or not _has_java_ended():
            raise
        raise TruenextError(
            "the Java of Spark has ended: it was killed, or memory was short. Start the command again; with --state it "
            "goes on where it has ended"
        ) from error


def _is_never_shown(_record: logging.LogRecord) -> bool:
    return False


def _has_java_ended() -> bool:
    java = getattr(SparkContext._gateway, "proc", None)
    if java is None:
        return False
    try:
        java.wait(SOCKET_END_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _lock(file: BinaryIO, log: Path) -> None:
    gives_up_at = time.monotonic() + JAVA_END_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= gives_up_at:
                raise ConfigurationError(
                    f"the Java of another audit still writes to {log.parent}: wait until it has ended, or name another "
                    "folder"
                ) from None
            time.sleep(0.05)
