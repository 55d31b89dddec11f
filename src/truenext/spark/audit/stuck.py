"""When did ready messages wait although a consumer could have taken them?"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def stuck(sweep_rows: DataFrame) -> DataFrame:
    """One row per time: since `event`, for `seconds`, `waiting` messages, the first of them `sequence`."""
    return (
        sweep_rows.where(F.col("row") == "finding")
        .where(F.col("kind") == "stuck")
        .select(
            "queue",
            "event",
            F.timestamp_micros("at").alias("at"),
            "sequence",
            "priority",
            F.col("count").alias("waiting"),
            (F.col("duration") / 1e6).alias("seconds"),
        )
    )
