"""A query in a process of its own, to be killed: a queue to Parquet, until nothing is left.

python -m tests.spark.source.query URL QUEUE FOLDER [MASTER]
"""

import sys
from pathlib import Path

from truenext.spark.session import start


def main(url: str, queue: str, folder: str, master: str = "local[2]") -> None:
    spark = start(master)
    rows = (
        spark.readStream.format("truenext")
        .option("url", url)
        .option("queue", queue)
        .option("maxRowsPerTrigger", 1500)
        .option("patience", 60)
        .load()
    )
    query = (
        rows.writeStream.format("parquet")
        .option("path", str(Path(folder) / "rows"))
        .option("checkpointLocation", str(Path(folder) / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
