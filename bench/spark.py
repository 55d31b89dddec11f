"""Benchmark of Spark's source: rows from a queue, beside a client that receives them, and beside rows in memory.

    python -m bench.spark --rows 1000000

Each round measures the three one after the other. The client acknowledges each message by itself. Wall times of
Spark are those of `addBatch`, without the start of a session or a query.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import StructType

from bench.brokers import Truenext
from bench.options import positive
from truenext import blocking
from truenext.spark.session import start
from truenext.spark.source.bundle import BUNDLE_ROWS, record_batch
from truenext.spark.source.columns import spark_schema
from truenext.spark.source.options import parse_options

_BODY = b"x" * 1024
_PARTITIONS = 2
_BATCH_ROWS = 100_000
_QUERY_SECONDS = 1800
_SETTLE_SECONDS = 5.0
_IDLE_SECONDS = 20.0
_TICKS = os.sysconf("SC_CLK_TCK")
_WORKERS = b"pyspark.daemon"
"""Module of the process that forks the workers of tasks."""
_SOURCE = b"python_streaming_source_runner"
"""Module that runs the driver's part of a source."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.spark", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=positive, default=200_000)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--dir", type=Path, help="for the broker's data")
    options = parser.parse_args()
    with Truenext(options.dir) as broker, tempfile.TemporaryDirectory(dir=options.dir) as folder:
        spark = start(f"local[{_PARTITIONS}]")
        spark.dataSource.register(RowsInMemory)
        url = f"stomp://127.0.0.1:{broker.port}"
        bench = _Bench(broker, spark, url, Path(folder))
        bench.queue(1000)
        bench.memory(1000)
        rounds = []
        for number in range(1, options.rounds + 1):
            client = bench.client(options.rows)
            queue = bench.queue(options.rows)
            memory = bench.memory(options.rows)
            rounds.append((client, queue, memory))
            print(f"round {number}")
            for name, each in (("client", client), ("queue to no-op", queue), ("memory to no-op", memory)):
                print(f"  {name:16} {each.describe()}", flush=True)
        print(f"median of {options.rounds} rounds, {options.rows:,} messages of 1 KiB")
        for text, aim, ratios in (
            ("of the rate of the client", "at least 1.1", [q.rate / c.rate for c, q, _ in rounds]),
            ("of the rate of memory", "at least 0.2", [q.rate / m.rate for _, q, m in rounds]),
            ("of the client's processor time in a task", "at most 0.7", [q.own / c.own for c, q, _ in rounds]),
            ("of it in the broker", "at most 0.8", [q.broker / c.broker for c, q, _ in rounds]),
        ):
            print(f"  {statistics.median(ratios):.2f} {text} ({aim})")
        singles = [(bench.queue(1).seconds, bench.memory(1).seconds) for _ in range(5)]
        ratio = statistics.median(queue / memory for queue, memory in singles)
        print(f"  {ratio:.2f} of memory's time for a batch of one row (at most 1.3)")
        broker_share, driver_share = bench.idle()
        print(f"  {broker_share:.1%} of a processor in the broker while a query is idle (at most 1 %)")
        print(f"  {driver_share:.1%} of it in Python (at most 1 %)")
        print(f"  {_largest_worker_mib():,.0f} MiB, the largest Python worker at its peak (at most 256)")
        spark.stop()


class _Run:
    def __init__(self, rows: int, seconds: float, own: float, broker: float) -> None:
        """`own` and `broker` are seconds of processor time: of the client or of Spark's workers, and of the broker."""
        self.seconds, self.own, self.broker = seconds, own, broker
        self.rate = rows / seconds
        self._rows = rows

    def describe(self) -> str:
        own, broker = (1e6 * each / self._rows for each in (self.own, self.broker))
        return f"{self.rate:10,.0f} rows/s   us of processor a row: Python {own:5.1f}, broker {broker:5.1f}"


class _Bench:
    def __init__(self, broker: Truenext, spark: SparkSession, url: str, folder: Path) -> None:
        self._broker, self._spark, self._url, self._folder = broker, spark, url, folder
        self._queries = 0

    def _fill(self, rows: int) -> None:
        with blocking.connect(self._url) as connection:
            for number in range(rows):
                connection.send_nowait("/queue/rows", _BODY)
                if number % 5000 == 4999:
                    connection.flush()

    def client(self, rows: int) -> _Run:
        self._fill(rows)
        broker, own, began = self._broker.processor_seconds(), time.process_time(), time.perf_counter()
        with (
            blocking.connect(self._url) as connection,
            connection.consumer("/queue/rows", ack="individual") as consumer,
        ):
            for _ in range(rows):
                message = consumer.receive(60)
                assert message is not None
                message.ack()
        seconds = time.perf_counter() - began
        return _Run(rows, seconds, time.process_time() - own, self._broker.processor_seconds() - broker)

    def queue(self, rows: int) -> _Run:
        self._fill(rows)
        reader = self._spark.readStream.format("truenext").option("url", self._url).option("queue", "rows")
        return self._run(reader.option("partitions", _PARTITIONS).option("maxRowsPerTrigger", _BATCH_ROWS), rows)

    def memory(self, rows: int) -> _Run:
        return self._run(self._spark.readStream.format("rows-in-memory").option("rows", rows), rows)

    def idle(self) -> tuple[float, float]:
        """Return the shares of a processor that the broker and Spark's Python use while a query has no rows to read."""
        reader = self._spark.readStream.format("truenext").option("url", self._url).option("queue", "rows")
        writer = reader.load().writeStream.format("noop").option("checkpointLocation", str(self._folder / "idle"))
        query = writer.start()
        time.sleep(_SETTLE_SECONDS)
        broker, own = self._broker.processor_seconds(), _workers_seconds(_WORKERS, _SOURCE)
        time.sleep(_IDLE_SECONDS)
        broker, own = self._broker.processor_seconds() - broker, _workers_seconds(_WORKERS, _SOURCE) - own
        query.stop()
        return broker / _IDLE_SECONDS, own / _IDLE_SECONDS

    def _run(self, reader: DataStreamReader, rows: int) -> _Run:
        """Read all rows into the sink no-op."""
        broker, own = self._broker.processor_seconds(), _workers_seconds()
        self._queries += 1
        checkpoint = str(self._folder / f"checkpoint {self._queries}")
        writer = reader.load().writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination(_QUERY_SECONDS)
        progress = query.recentProgress
        taken = sum(each["numInputRows"] for each in progress)
        assert taken == rows, f"{taken} rows came, and {rows} were to come"
        seconds = sum(each["durationMs"].get("addBatch", 0) for each in progress) / 1000
        return _Run(rows, seconds, _workers_seconds() - own, self._broker.processor_seconds() - broker)


class RowsInMemory(DataSource):
    """Data source with the columns of a queue, without a broker."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._rows = int(options["rows"])

    @classmethod
    def name(cls) -> str:
        return "rows-in-memory"

    def schema(self) -> StructType:
        return spark_schema(parse_options({"url": "stomp://127.0.0.1", "queue": "rows"}))

    def streamReader(self, schema: StructType) -> _MemoryReader:
        return _MemoryReader(self._rows)


class _MemoryReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def prepareForTriggerAvailableNow(self) -> None:
        """Do nothing, since the number of rows is fixed."""

    def initialOffset(self) -> dict[str, int]:
        return {"rows": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"rows": min(start["rows"] + _BATCH_ROWS, self._rows)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        rows = end["rows"] - start["rows"]
        return [InputPartition(rows // _PARTITIONS + (each < rows % _PARTITIONS)) for each in range(_PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        row: tuple[Any, ...] = ("rows", 1, 4, True, None, None, None, None, 1, 0, 0, None, [], _BODY)
        batch = record_batch([row] * BUNDLE_ROWS)
        for first in range(0, partition.value, BUNDLE_ROWS):
            yield batch.slice(0, min(BUNDLE_ROWS, partition.value - first))


def _python_of_spark(*modules: bytes) -> Iterator[Path]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if any(each in command for each in modules):
                yield folder


def _workers_seconds(*modules: bytes) -> float:
    """Return the processor time of Python processes with these modules; the daemon counts workers that ended."""
    ticks = 0
    for folder in _python_of_spark(*(modules or (_WORKERS,))):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def _largest_worker_mib() -> float:
    largest = 0
    for folder in _python_of_spark(_WORKERS):
        with suppress(OSError, StopIteration):
            lines = (folder / "status").read_text().splitlines()
            largest = max(largest, int(next(line for line in lines if line.startswith("VmHWM")).split()[1]))
    return largest / 1024


if __name__ == "__main__":
    main()
