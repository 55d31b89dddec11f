"""How does the history look to Spark? The columns of docs/history.md."""

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
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

EVENTS = StructType(
    [
        StructField("event", LongType(), nullable=False),
        StructField("run", IntegerType(), nullable=False),
        StructField("at", TimestampType(), nullable=False),
        StructField("kind", StringType(), nullable=False),
        StructField("queue", StringType()),
        StructField("sequence", LongType()),
        StructField("priority", ByteType()),
        StructField("persistent", BooleanType()),
        StructField("size", IntegerType()),
        StructField("batch", LongType()),
        StructField("consumer", LongType()),
        StructField("deliveries", IntegerType()),
        StructField("attempts", IntegerType()),
        StructField("reason", StringType()),
        StructField("mode", StringType()),
        StructField("window", IntegerType()),
        StructField("target_queue", StringType()),
        StructField("target_sequence", LongType()),
        StructField("count", LongType()),
        StructField("date", DateType()),
    ]
)

PLACES = ("history/events", "events", ".")
"""Where the Parquet files may be, seen from the folder that was named: a broker's data, its history, or they alone."""


def events_folder(folder: Path) -> Path:
    """The folder with the Parquet files.

    Raises: ConfigurationError
    """
    for place in PLACES:
        candidate = folder / place
        if next(candidate.glob("**/*.parquet"), None) is not None:
            return candidate
    raise ConfigurationError(
        f"no history in {folder}: there is no Parquet file in {', '.join(str(folder / place) for place in PLACES)}. "
        "The broker writes one unless it runs with --no-history"
    )


def read_events(spark: SparkSession, folder: Path | str) -> DataFrame:
    """All events below `folder`; an address with a scheme (s3a://, hdfs://) is read as it is.

    Raises: ConfigurationError
    """
    place = folder if isinstance(folder, str) and "://" in folder else str(events_folder(Path(folder)).resolve())
    return spark.read.schema(EVENTS).parquet(place)
