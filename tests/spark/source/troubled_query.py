"""A query in a process of its own, whose tasks are slow or fail.

python -m tests.spark.source.troubled_query TROUBLE URL FOLDER MASTER [TARGET]
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

from truenext.spark.session import start

Batches = Iterator[pa.RecordBatch]

HANG_SECONDS = 180.0


def hanging_first(batches: Batches, attempts: Path) -> Batches:
    """Hang the first attempt of partition 0 behind its first rows until there is a second. Then both read at once."""
    batch_id, partition, _ = _note_attempt(attempts)
    for number, batch in enumerate(batches):
        if partition == 0:
            second = attempts / f"{batch_id}-0-1"
            deadline = time.monotonic() + HANG_SECONDS
            while number == 0 and not second.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(0.2)
        yield batch


def failing_twice(batches: Batches, attempts: Path) -> Batches:
    """Fail the first two attempts of each task, behind its first rows and then behind more of them."""
    _, _, attempt = _note_attempt(attempts)
    for number, batch in enumerate(batches):
        if number == 2 * attempt and attempt < 2:
            raise RuntimeError(f"attempt {attempt} fails")
        yield batch


def slow(batches: Batches, attempts: Path) -> Batches:
    """Read so slowly that a test can stop the query in the middle of a batch."""
    _note_attempt(attempts)
    for batch in batches:
        time.sleep(1.0)
        yield batch


TROUBLES: dict[str, Callable[[Batches, Path], Batches]] = {
    "hanging-first": hanging_first,
    "failing-twice": failing_twice,
    "slow": slow,
}

OPTIONS = (
    "speculation=true",
    "speculation.interval=100ms",
    "speculation.minTaskRuntime=1s",
    "speculation.quantile=0.5",
    "driver.host=127.0.0.1",
    "driver.bindAddress=127.0.0.1",
    "executor.memory=1g",
)


def _note_attempt(attempts: Path) -> tuple[str, int, int]:
    """Note for the test that a task has got rows; return its batch, partition and attempt."""
    context = TaskContext.get()
    assert context is not None
    batch = context.getLocalProperty("streaming.sql.batchId") or ""
    partition, attempt = context.partitionId(), context.attemptNumber()
    (attempts / f"{batch}-{partition}-{attempt}").touch()
    return batch, partition, attempt


def main(trouble: str, url: str, folder: str, master: str, target: str = "") -> None:
    """Without a target the rows go to Parquet."""
    options = " ".join(f"--conf spark.{option}" for option in OPTIONS)
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"{options} pyspark-shell"
    spark = start(master)
    # So that a task hands on its first rows long before it has read all.
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    attempts = Path(folder) / "attempts"
    attempts.mkdir(exist_ok=True)
    act = TROUBLES[trouble]
    rows = (
        spark.readStream.format("truenext")
        .option("url", url)
        .option("queue", "orders")
        .option("maxRowsPerTrigger", 4000)
        .option("patience", 60)
        .load()
    )
    troubled = rows.mapInArrow(lambda batches: act(batches, attempts), rows.schema)
    if target:
        copies = troubled.select("body", "headers")
        writer = copies.writeStream.format("truenext").options(url=url, queue=target, patience="60")
    else:
        writer = troubled.writeStream.format("parquet").option("path", str(Path(folder) / "rows"))
    writer = writer.option("checkpointLocation", str(Path(folder) / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
