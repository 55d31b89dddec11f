"""In which order did messages arrive, and in which were they delivered?"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

POINTS_MAX = 4000


def positions(sweep_rows: DataFrame) -> DataFrame:
    """Places within the queue, from 1; every n-th arrival, so that a queue has at most 4,000, and the last delivery of
    each priority.
    """
    delivered = sweep_rows.where((F.col("row") == "message") & (F.col("delivery") > 0))
    last = delivered.groupBy("queue", "priority").agg(F.max("delivery").alias("last"))
    steps = delivered.groupBy("queue").agg(F.ceil(F.max("arrival") / POINTS_MAX).alias("step"))
    return (
        delivered.join(F.broadcast(steps), "queue")
        .join(F.broadcast(last), ["queue", "priority"])
        .where("arrival % step = 0 or delivery = last")
        .select("queue", "priority", "persistent", "sequence", "arrival", "delivery")
    )
