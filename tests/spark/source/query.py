"""A query in a process of its own, to be killed: it copies a queue to Parquet, or through a shuffle to another queue,
until nothing is left.

python -m tests.spark.source.query URL QUEUE FOLDER [MASTER [TARGET]]
"""

import sys
from pathlib import Path

from truenext.spark.session import start


def main(url: str, queue: str, folder: str, master: str = "local[2]", target: str = "") -> None:
    """Run the query. Without a target the rows go to Parquet."""
    spark = start(master)
    rows = (
        spark.readStream.format("truenext")
        .option("url", url)
        .option("queue", queue)
        .option("maxRowsPerTrigger", 1500)
        .option("patience", 60)
        .load()
    )
    if target:
        copies = rows.select("body", "priority", "group", "headers").repartition(3)
        writer = copies.writeStream.format("truenext").options(url=url, queue=target, patience="60")
    else:
        writer = rows.writeStream.format("parquet").option("path", str(Path(folder) / "rows"))
    writer = writer.option("checkpointLocation", str(Path(folder) / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
