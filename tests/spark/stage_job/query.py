"""A stage as a Spark job in a process of its own, to be killed: answers the requests in its queue until none is left.

python -m tests.spark.stage_job.query URL FOLDER [MASTER]
"""

import sys
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.spark.stage_job.messages import QUEUE
from truenext.spark.session import start
from truenext.spark.stage_job import stage_job


def price(requests: DataFrame) -> DataFrame:
    """Join prices, and count what is asked for in the batch. A third of the items has no price."""
    prices = requests.sparkSession.createDataFrame([("item 0", 5), ("item 1", 7)], "item string, cents int")
    asked = requests.groupBy("item").agg(F.count("*").alias("asked"))
    joined = requests.join(prices, "item").join(asked, "item")
    return joined.select("flow", (F.col("count") * F.col("cents")).alias("cents"), "asked")


def main(url: str, folder: str, master: str = "local[2]") -> None:
    spark = start(master)
    spark.conf.set("spark.sql.shuffle.partitions", 3)
    rows = spark.readStream.format("truenext").options(url=url, queue=QUEUE, maxRowsPerTrigger=500, patience=60).load()
    job = stage_job(price, "item string, count int", events=Path(folder) / "events", url=url, patience="60")
    writer = rows.writeStream.foreachBatch(job).option("checkpointLocation", str(Path(folder) / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
