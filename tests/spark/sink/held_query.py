"""A query from the queue `orders` to others, in a process of its own, that a test holds at one point of a batch.

    draft      a task has read its first rows, and drafts nothing yet
    decide     the driver has read the last decision, and holds it; its COMMIT comes next
    publish    the driver has published one bundle, and holds the second

There the query touches FOLDER/held, and goes on when FOLDER/go exists.

python -m tests.spark.sink.held_query POINT BATCH URL FOLDER TARGET PATIENCE
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.datasource import QueueStreamWriter, TruenextDataSource
from truenext.spark.session import start
from truenext.spark.sink import publish
from truenext.wire.stomp.frame import Frame

_POINT = "TRUENEXT_HELD_POINT"
_BATCH = "TRUENEXT_HELD_BATCH"
_FOLDER = "TRUENEXT_HELD_FOLDER"
"""Environment of the query's processes: where they are held."""


def _hold() -> None:
    folder = Path(os.environ[_FOLDER])
    (folder / "held").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)


def _is_held_at(point: str, batch: int) -> bool:
    return os.environ[_POINT] == point and int(os.environ[_BATCH]) == batch


class HeldWriter(QueueStreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        if _is_held_at("draft", int(context.getLocalProperty("streaming.sql.batchId") or 0)):
            iterator = self._held(iterator)
        return super().write(iterator)

    @staticmethod
    def _held(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            _hold()
            yield batch

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        # Spark runs each commit in a process of its own.
        if _is_held_at("decide", batchId):
            _hold_decision()
        elif _is_held_at("publish", batchId):
            _hold_second_bundle()
        super().commit(messages, batchId)


def _hold_decision() -> None:
    call = BrokerConnection.call

    def held_call(self: BrokerConnection, command: str, headers: Mapping[str, str], body: bytes = b"") -> Frame:
        if command == "COMMIT" and "truenext-producer" in headers:
            self.flush()
            _hold()
        return call(self, command, headers, body)

    BrokerConnection.call = held_call  # type: ignore[method-assign]


def _hold_second_bundle() -> None:
    commit = publish._commit_bundle
    seen = 0

    def held_commit(broker: BrokerConnection, bundle: Frame) -> Any:
        nonlocal seen
        seen += 1
        if seen == 2:
            _hold()
        return commit(broker, bundle)

    publish._commit_bundle = held_commit


class HeldDataSource(TruenextDataSource):
    @classmethod
    def name(cls) -> str:
        return "held"

    def streamWriter(self, schema: StructType, overwrite: bool) -> QueueStreamWriter:
        return HeldWriter(self._sink_options(schema, overwrite, is_streaming=True))


def main(point: str, batch: str, url: str, folder: str, target: str, patience: str) -> None:
    os.environ.update({_POINT: point, _BATCH: batch, _FOLDER: folder})
    spark = start("local[2]")
    # By its name in this module, which the processes of the query import.
    from tests.spark.sink.held_query import HeldDataSource

    spark.dataSource.register(HeldDataSource)
    rows = (
        spark.readStream.format("truenext")
        .options(url=url, queue="orders", patience="60")
        .option("maxRowsPerTrigger", 1000)
        .load()
    )
    writer = rows.select("body", "headers").writeStream.format("held")
    writer = writer.options(url=url, queue=target, patience=patience)
    writer = writer.option("checkpointLocation", str(Path(folder) / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
