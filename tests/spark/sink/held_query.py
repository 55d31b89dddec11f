"""A query from the queue `orders` to others that a test holds at one point of a batch, also in a process of its own.

    draft      a task has read its first rows, and drafts nothing yet
    decide     the driver has read the last decision, and holds it; its COMMIT comes next
    publish    the driver has published one bundle, and holds the second

There a process of the query writes its id to FOLDER/held, and goes on when FOLDER/go exists.

python -m tests.spark.sink.held_query POINT BATCH URL FOLDER
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.datasource import QueueStreamWriter, TruenextDataSource
from truenext.spark.session import start
from truenext.spark.sink import publish
from truenext.spark.sink.options import SinkOptions
from truenext.wire.stomp.frame import Frame


class Hold(NamedTuple):
    point: str
    batch: int
    folder: str

    def wait(self) -> None:
        folder = Path(self.folder)
        # Several tasks may be held at once.
        new = folder / f"held-{os.getpid()}"
        new.write_text(str(os.getpid()))
        new.rename(folder / "held")
        while not (folder / "go").exists():
            time.sleep(0.02)


class HeldWriter(QueueStreamWriter):
    def __init__(self, options: SinkOptions, hold: Hold) -> None:
        super().__init__(options)
        self._hold = hold

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        batch = int(context.getLocalProperty("streaming.sql.batchId") or 0)
        return super().write(
            self._held(iterator) if (self._hold.point, self._hold.batch) == ("draft", batch) else iterator
        )

    def _held(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self._hold.wait()
            yield batch

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        # Spark may use this process for further commits.
        with pytest.MonkeyPatch.context() as patch:
            if batchId == self._hold.batch:
                if self._hold.point == "decide":
                    _hold_decision(self._hold, patch)
                elif self._hold.point == "publish":
                    _hold_second_bundle(self._hold, patch)
            super().commit(messages, batchId)


def _hold_decision(hold: Hold, patch: pytest.MonkeyPatch) -> None:
    call = BrokerConnection.call

    def held_call(self: BrokerConnection, command: str, headers: Mapping[str, str], body: bytes = b"") -> Frame:
        if command == "COMMIT" and "truenext-producer" in headers:
            self.flush()
            hold.wait()
        return call(self, command, headers, body)

    patch.setattr(BrokerConnection, "call", held_call)


def _hold_second_bundle(hold: Hold, patch: pytest.MonkeyPatch) -> None:
    commit = publish._commit_bundle
    seen = 0

    def held_commit(broker: BrokerConnection, bundle: Frame) -> Any:
        nonlocal seen
        seen += 1
        if seen == 2:
            hold.wait()
        return commit(broker, bundle)

    patch.setattr(publish, "_commit_bundle", held_commit)


class HeldDataSource(TruenextDataSource):
    """The format `held`, with an option `hold` beside those of the sink."""

    @classmethod
    def name(cls) -> str:
        return "held"

    def streamWriter(self, schema: StructType, overwrite: bool) -> QueueStreamWriter:
        point, batch, folder = self.options.pop("hold").split(",")
        options = self._sink_options(schema, overwrite, is_streaming=True)
        return HeldWriter(options, Hold(point, int(batch), folder))


def start_query(
    spark: SparkSession, hold: Hold, url: str, *, target: str = "bills", patience_s: int = 60
) -> StreamingQuery:
    # By its name in this module, which the processes of the query import.
    from tests.spark.sink.held_query import HeldDataSource

    spark.dataSource.register(HeldDataSource)
    rows = spark.readStream.format("truenext").options(url=url, queue="orders", maxRowsPerTrigger=1000).load()
    writer = rows.select("body", "headers").writeStream.format("held")
    writer = writer.options(url=url, queue=target, patience=patience_s, hold=",".join(map(str, hold)))
    return writer.option("checkpointLocation", f"{hold.folder}/checkpoint").trigger(availableNow=True).start()


def main(point: str, batch: str, url: str, folder: str) -> None:
    start_query(start("local[2]"), Hold(point, int(batch), folder), url).awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
