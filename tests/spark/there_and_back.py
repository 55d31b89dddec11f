"""Two queries, one after the other, for spark-submit: from a queue of one broker to a queue of another, and back.

It imports nothing of the tests, which are not on a worker's path.

spark-submit there_and_back.py FOLDER THERE BACK, with the options of a broker as JSON
"""

import json
import sys
from pathlib import Path

from pyspark.errors import StreamingQueryException

from truenext.spark.session import start

BATCH_ROWS = 300
SOURCE = {"maxRowsPerTrigger": str(BATCH_ROWS), "patience": "120"}
SINK = {"patience": "120"}


TOO_BUSY = "Python worker failed to connect back"
"""Spark's error where a machine does not start Python within ten seconds: docs/spark.md says to start again."""


def copy(name: str, source: dict[str, str], sink: dict[str, str], folder: Path) -> None:
    """Copy all that waits in the queue of `source`, through a shuffle, to the queue of `sink`."""
    while True:
        rows = start().readStream.format("truenext").options(**source, **SOURCE).load()
        copies = rows.select("body", "priority", "headers").repartition(2)
        writer = copies.writeStream.format("truenext").options(**sink, **SINK)
        try:
            writer.option("checkpointLocation", str(folder / name)).trigger(
                availableNow=True
            ).start().awaitTermination()
            return
        except StreamingQueryException as error:
            if TOO_BUSY not in str(error):
                raise


def main(folder: str, first: str, second: str) -> None:
    one, other = json.loads(first), json.loads(second)
    copy("there", {**one, "queue": "orders"}, {**other, "queue": "bills"}, Path(folder))
    copy("back", {**other, "queue": "bills"}, {**one, "queue": "receipts"}, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
