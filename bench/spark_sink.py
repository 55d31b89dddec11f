"""Benchmark of Spark's sink: rows into a queue, and from queue to queue, beside a client that copies them.

    python -m bench.spark_sink --rows 1000000

Each round takes the measurements one after the other. The cost of a row for a task, the driver and the broker is
measured without Spark, in this process. The rates are those of a query from queue to queue, of its `addBatch`.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from bench.brokers import Truenext
from bench.options import positive
from truenext import blocking
from truenext.model.spark_queues import SinkQueues
from truenext.model.url import parse_url
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.latest import purge
from truenext.spark.broker.patience import Patience
from truenext.spark.session import start
from truenext.spark.sink.draft import write_drafts
from truenext.spark.sink.driver import commit_batch
from truenext.spark.sink.rows import bundles, encode_rows

_BODY = b"x" * 1024
_COPY_BATCH = 100
_BATCH_ROWS = 100_000
_QUERY_SECONDS = 1800
_MANY_PARTITIONS = 200
_Costs = tuple[float, float, float]
"""Seconds: elapsed, of this process's processor, of the broker's."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.spark_sink", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=positive, default=200_000)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--dir", type=Path, help="for the broker's data")
    options = parser.parse_args()
    rows = max(_COPY_BATCH, options.rows // _COPY_BATCH * _COPY_BATCH)
    with Truenext(options.dir) as broker, tempfile.TemporaryDirectory(dir=options.dir) as folder:
        bench = _Bench(broker, start("local[2]"), Path(folder))
        bench.queue_to_queue(1000)
        # Before the rounds: this is the growth of a peak.
        memory_mib = bench.memory_mib(rows)
        copies, queries, sends, drafts, published = [], [], [], [], []
        for number in range(1, options.rounds + 1):
            sends.append(bench.fill(rows))
            copies.append(bench.copy(rows))
            bench.fill(rows)
            queries.append(bench.queue_to_queue(rows))
            drafted, commit = bench.draft_and_publish(rows)
            drafts.append(drafted)
            published.append(commit)
            print(f"round {number}, {rows:,} rows: us of processor a row, this process and broker")
            for name, costs in (
                ("SEND", sends[-1]),
                ("the client's copy", copies[-1]),
                ("draft", drafts[-1]),
                ("publish", published[-1]),
            ):
                print(f"  {name:20} {1e6 * costs[1] / rows:6.1f} {1e6 * costs[2] / rows:6.1f}", flush=True)
            print(f"  queue to queue {rows / queries[-1][0]:,.0f} rows/s; the copy {rows / copies[-1][0]:,.0f}")
        rounds = range(options.rounds)
        for text, aim, ratios in (
            (
                "of the broker's processor time for a SEND, drafted and published",
                "at most 1.8",
                [(drafts[i][2] + published[i][2]) / sends[i][2] for i in rounds],
            ),
            (
                "of the copy's processor time in the driver",
                "at most 0.2",
                [published[i][1] / copies[i][1] for i in rounds],
            ),
            ("of the copy's rate from queue to queue", "at least 0.9", [copies[i][0] / queries[i][0] for i in rounds]),
            (
                "of the copy's processor time in the broker",
                "at most 1.0",
                [queries[i][2] / copies[i][2] for i in rounds],
            ),
        ):
            print(f"  {statistics.median(ratios):.2f} {text} ({aim})")
        for partitions in (1, _MANY_PARTITIONS):
            of_parquet, of_empty = bench.one_row(partitions)
            print(
                f"  {of_empty:.2f} of an empty Python sink's time for a batch of one row, {partitions} partitions "
                f"(at most 1.3), {of_parquet:.2f} of Parquet's"
            )
        print(f"  {memory_mib:,.0f} MiB more in the driver for a large batch (at most 64)")
        bench.stop()


class _EmptyWriter(DataSourceWriter):
    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class _EmptySink(DataSource):
    @classmethod
    def name(cls) -> str:
        return "empty"

    def writer(self, _schema: StructType, _overwrite: bool) -> _EmptyWriter:
        return _EmptyWriter()


class _Bench:
    def __init__(self, broker: Truenext, spark: SparkSession, folder: Path) -> None:
        self._broker, self._spark, self._folder = broker, spark, folder
        spark.dataSource.register(_EmptySink)
        self._url = f"stomp://127.0.0.1:{broker.port}"
        self._connect = partial(BrokerConnection, [parse_url(self._url)])
        self._count = 0

    def stop(self) -> None:
        self._spark.stop()

    def _costs_since(self, began: _Costs) -> _Costs:
        now = self._now()
        return (now[0] - began[0], now[1] - began[1], now[2] - began[2])

    def _now(self) -> _Costs:
        return (time.perf_counter(), time.process_time(), self._broker.processor_seconds())

    def fill(self, rows: int) -> _Costs:
        """Send rows, confirmed now and then."""
        began = self._now()
        with blocking.connect(self._url) as connection:
            for number in range(rows):
                connection.send_nowait("/queue/rows", _BODY)
                if number % 5000 == 4999:
                    connection.flush()
        return self._costs_since(began)

    def copy(self, rows: int) -> _Costs:
        """Copy with the client, in transactions."""
        began = self._now()
        with (
            blocking.connect(self._url) as connection,
            connection.session(transacted=True) as session,
            session.consumer("/queue/rows") as consumer,
        ):
            for _ in range(0, rows, _COPY_BATCH):
                with session.transaction():
                    for _ in range(_COPY_BATCH):
                        message = consumer.receive(60)
                        assert message is not None
                        session.send("/queue/copies", message.body)
        costs = self._costs_since(began)
        self._empty("copies")
        return costs

    def queue_to_queue(self, rows: int) -> _Costs:
        """Return the seconds of `addBatch` as elapsed; the processor time of this process has no meaning here."""
        if not self._count:
            self.fill(rows)
        began = self._now()
        reader = self._spark.readStream.format("truenext").option("url", self._url).option("queue", "rows")
        frame = reader.option("maxRowsPerTrigger", _BATCH_ROWS).load().select("body")
        self._count += 1
        writer = frame.writeStream.format("truenext").option("url", self._url).option("queue", "copies")
        writer = writer.option("checkpointLocation", str(self._folder / f"checkpoint {self._count}"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination(_QUERY_SECONDS)
        taken = sum(each["numInputRows"] for each in query.recentProgress)
        assert taken == rows, f"{taken} rows came, and {rows} were to come"
        seconds = sum(each["durationMs"].get("addBatch", 0) for each in query.recentProgress) / 1000
        costs = self._costs_since(began)
        assert self._empty("copies") == rows
        return (seconds, costs[1], costs[2])

    def draft_and_publish(self, rows: int) -> tuple[_Costs, _Costs]:
        """Do the work of a task and that of the driver in this process."""
        self._count += 1
        queues = SinkQueues("bench", f"draft-{self._count}")
        began = self._now()
        frames = (frame for batch in _batches(rows) for frame in encode_rows(batch, "/queue/copies"))
        written = write_drafts(bundles(frames), queues, 0, 0, self._connect, Patience(60))
        drafted = self._costs_since(began)
        began = self._now()
        commit_batch(queues, 0, written.drafts, self._connect, Patience(60))
        published = self._costs_since(began)
        assert self._empty("copies") == rows
        return drafted, published

    def memory_mib(self, rows: int) -> float:
        """Return the growth of this process's peak while it publishes a large batch."""
        self.draft_and_publish(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.draft_and_publish(rows)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024

    def one_row(self, partitions: int) -> tuple[float, float]:
        """Return the ratios of a batch write of one row to one into Parquet, and to one into an empty Python sink.

        Spark starts Python in every task of such a sink. Medians of five.
        """
        frame = self._spark.range(1).selectExpr("string(id) AS body").repartition(partitions)
        queue, parquet, empty = [], [], []
        for number in range(6):
            began = time.perf_counter()
            writer = frame.write.format("truenext").option("url", self._url).option("queue", "single")
            writer.option("txnAppId", f"single-{partitions}").option("txnVersion", number).mode("append").save()
            middle = time.perf_counter()
            frame.write.parquet(str(self._folder / f"single {partitions} {number}"))
            end = time.perf_counter()
            frame.write.format("empty").mode("append").save()
            queue.append(middle - began)
            parquet.append(end - middle)
            empty.append(time.perf_counter() - end)
        # The first write of each includes initialisation.
        of_queue = statistics.median(queue[1:])
        return of_queue / statistics.median(parquet[1:]), of_queue / statistics.median(empty[1:])

    def _empty(self, queue: str) -> int:
        """Purge a queue, and return how many messages it had."""
        with self._connect() as broker:
            return purge(broker, queue)


def _batches(rows: int) -> Iterator[pa.RecordBatch]:
    batch = pa.RecordBatch.from_pydict({"body": [_BODY] * min(rows, 10_000)})
    for first in range(0, rows, 10_000):
        yield batch.slice(0, min(10_000, rows - first))


if __name__ == "__main__":
    main()
