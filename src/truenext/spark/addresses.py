"""Errors of Spark at addresses, such as those of hdfs:// and s3a://."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from truenext.errors import ConfigurationError
from truenext.spark.paths import Location

_NO_FILE_SYSTEM = re.compile(r"No FileSystem for scheme|Class \S+ not found")
_CAUSE = re.compile(r"^:? ?(?:[\w$]+\.)+[\w$]+: (.+)$", re.MULTILINE)
"""Line of a Java exception's text, after its class."""


@contextmanager
def opening(address: Location) -> Iterator[None]:
    """Name the address in errors of Spark inside the block.

    Raises: ConfigurationError if Spark cannot open the address
    """
    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        text = str(error)
        if _NO_FILE_SYSTEM.search(text):
            scheme = str(address).partition("://")[0]
            cause = (
                f"no jar for {scheme}:// is there; add one, such as with spark-submit --packages "
                "org.apache.hadoop:hadoop-aws:VERSION for s3a://, where VERSION is that of Spark's hadoop-client jars"
            )
        else:
            found = _CAUSE.search(text)
            cause = found[1] if found is not None else text.partition("\n")[0]
        raise ConfigurationError(f"Spark cannot open {address}: {cause}") from error
