"""Schema of the history for Spark, made from history/schema.py, and the reader of the history's files."""

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from truenext.errors import ConfigurationError
from truenext.history import schema
from truenext.history.export import EVENTS_FOLDER as EVENTS_FOLDER
from truenext.history.export import export_all
from truenext.history.files import history_files
from truenext.spark.paths import path_to_read

_TYPES = (LongType(), IntegerType(), ByteType(), BooleanType(), StringType(), TimestampType())
_SPARK_TYPES = {each.simpleString(): each for each in _TYPES}
EVENTS = StructType(
    [
        *(StructField(each.name, _SPARK_TYPES[each.type], each.name not in schema.REQUIRED) for each in schema.COLUMNS),
        StructField(schema.DATE, DateType()),
    ]
)


def read_events(spark: SparkSession, folder: Path | str, scratch: Path) -> DataFrame:
    """Return all events below `folder`. Events that the broker has not exported to Parquet yet are first written to
    `scratch`. An address with a scheme (s3a://, hdfs://) is given to Spark unchanged.

    Raises: ConfigurationError if there are no events; HistoryError if a file is damaged or has another version; OSError
    if a file cannot be read
    """
    if isinstance(folder, str) and "://" in folder:
        return spark.read.schema(EVENTS).parquet(folder)
    # Files are listed one by one, so that none that the broker exports meanwhile is read twice; Spark then ignores the
    # folders that have the date.
    files = spark.read.schema(EVENTS).parquet(*map(path_to_read, event_files(Path(folder), scratch)))
    return files.withColumn("date", F.to_date("at"))


def event_files(folder: Path, scratch: Path) -> list[Path]:
    """Return Parquet files that together have every event below `folder` once. Missing ones are made in `scratch`.

    Raises: ConfigurationError if there are no events; HistoryError if a file is damaged or has another version; OSError
    if a file cannot be read
    """
    folder = folder.resolve()
    for history in (folder / "history", folder):
        if history_files(history) or (history / EVENTS_FOLDER).is_dir():
            files = export_all(history, scratch)
            if files:
                return files
    files = sorted(folder.glob("**/*.parquet"))
    if not files:
        raise ConfigurationError(
            f"no history in {folder}: neither it nor {folder / 'history'} has *.history or Parquet files. The broker "
            "writes them unless it runs with --no-history"
        )
    return files
