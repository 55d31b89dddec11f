"""How often were messages given back and given up?"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from truenext.model.events import FAILURES

REASONS = (*FAILURES, "released")


def redelivery(events: DataFrame) -> DataFrame:
    """Per queue: dispatches, how many of them were not the first, returns by reason, dead letters, and the most
    `deliveries` and `attempts` that one message came to."""
    kind = F.col("kind")
    return (
        events.where(kind.isin("dispatched", "returned", "dead-lettered", "expired"))
        .groupBy("queue")
        .agg(
            F.count_if(kind == "dispatched").alias("dispatches"),
            F.count_if((kind == "dispatched") & (F.col("deliveries") > 1)).alias("redeliveries"),
            *(
                # Those that then wait for their next try say so behind it.
                F.count_if((kind == "returned") & F.col("reason").startswith(reason)).alias(reason)
                for reason in REASONS
            ),
            F.count_if(kind == "dead-lettered").alias("dead_letters"),
            F.count_if(kind == "expired").alias("expired"),
            F.max("deliveries").alias("deliveries_max"),
            F.max("attempts").alias("attempts_max"),
        )
    )
