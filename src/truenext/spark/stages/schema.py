"""Schema, for Spark, of the events of stages. docs/reference/history.md describes the fields."""

from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BooleanType, IntegerType, LongType, StringType, StructField, StructType

from truenext.errors import ConfigurationError
from truenext.history.stage_files import SUFFIX, stage_files
from truenext.spark.paths import Location, below, is_address, path_to_read

OUTCOMES = ("completed", "already processed", "failed", "rejected", "released", "in doubt")

DONE = ("completed", "already processed")
"""Outcomes of an execution after which the broker has confirmed that the message is acknowledged."""

STAGE_EVENTS = StructType(
    [
        StructField(name, kind)
        for kind, names in (
            (
                StringType(),
                ("kind", "process", "service", "instance", "stage", "queue", "message", "parent", "flow", "broker"),
            ),
            (StringType(), ("trace", "sender", "error", "given_up_for")),
            (LongType(), ("number", "at", "sequence", "execution", "total_us", "run_us", "commit_us", "accepted_ms")),
            (IntegerType(), ("format", "attempt", "deliveries")),
            (BooleanType(), ("exactly_once", "taken")),
        )
        for name in names
    ]
)


def read_stage_events(spark: SparkSession, folders: Sequence[Location]) -> DataFrame:
    """Return all events of stages in these folders. An address with a scheme (s3a://) is given to Spark unchanged.
    Lines that a crash has cut are left out.

    Raises: ConfigurationError if a folder has no events
    """
    paths = []
    for folder in folders:
        if is_address(folder):
            paths.append(str(below(folder, f"*{SUFFIX}")))
            continue
        files = stage_files(Path(folder).resolve())
        if not files:
            raise ConfigurationError(
                f"no events of stages in {folder}: a service writes them with truenext stages run --events DIR"
            )
        paths += map(path_to_read, files)
    # The oldest files may be deleted meanwhile.
    reader = spark.read.schema(STAGE_EVENTS).option("ignoreMissingFiles", True)
    return reader.json(paths).where("kind is not null")
