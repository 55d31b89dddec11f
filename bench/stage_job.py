"""Benchmark of a stage as a Spark job, beside the same stage as a service: flows a second, and the batch from which
Spark is faster.

    python -m bench.stage_job --flows 200000

The stage joins its requests with a Parquet table of prices. The service looks each price up in a dict of the same
table, in one process. Both get requests that wait already, and send each reply to a queue. Times of Spark are those of
whole batches, without the start of a session or a query.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bench.brokers import Truenext
from bench.options import positive
from truenext import blocking
from truenext.flows.envelope import VERSION, Envelope, FlowContext, ReplyTo, encode_envelope
from truenext.flows.message_ids import first_id
from truenext.spark.session import start
from truenext.spark.stage_job import stage_job
from truenext.stage import Service

_ITEMS = 10_000
_BATCHES = (1_000, 10_000, 100_000)
_QUERY_SECONDS = 1800
_FLUSH = 2_000


class Ask(msgspec.Struct):
    item: str
    count: int


class Quote(msgspec.Struct):
    cents: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.stage_job", description="A stage as a Spark job.")
    parser.add_argument("--flows", type=positive, default=200_000)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--dir", type=Path, help="for the broker's data")
    options = parser.parse_args()
    with Truenext(options.dir) as broker, tempfile.TemporaryDirectory(dir=options.dir) as folder:
        bench = _Bench(f"stomp://127.0.0.1:{broker.port}", Path(folder))
        bench.run(options.flows, options.rounds)


class _Bench:
    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._number = 0
        self._prices = {f"item {number}": number % 97 + 1 for number in range(_ITEMS)}
        table = pa.table({"item": list(self._prices), "cents": list(self._prices.values())})
        pq.write_table(table, folder / "prices.parquet")
        self._spark = start("local[2]")
        self._spark.conf.set("spark.sql.shuffle.partitions", 2)

    def run(self, flows: int, rounds: int) -> None:
        self._spark_s(2_000, 1_000)
        service = statistics.median(flows / self._service_s(flows) for _ in range(rounds))
        print(f"service, one process: {service:8,.0f} flows/s")
        seconds: dict[int, float] = {}
        for batch in _BATCHES:
            count = min(flows, 5 * batch) // batch * batch
            if not count:
                continue
            batch_s = [self._spark_s(count, batch) for _ in range(rounds)]
            seconds[batch] = statistics.median(batch_s)
            print(f"Spark, batches of {batch:7,}: {batch / seconds[batch]:8,.0f} flows/s, {seconds[batch]:.2f} s each")
        small, *_, large = seconds
        each_s = (seconds[large] - seconds[small]) / (large - small)
        fixed_s = seconds[small] - small * each_s
        gain_s = 1 / service - each_s
        print(f"a batch of Spark: {fixed_s:.2f} s, and {1e6 * each_s:.1f} us for each flow")
        if gain_s > 0:
            print(f"Spark is faster from batches of {fixed_s / gain_s:,.0f} flows")
        else:
            print("Spark is slower at any size of a batch")

    # ---- One run ----

    def _fill(self, count: int) -> None:
        waiting = [ReplyTo("/queue/ends")]
        with blocking.connect(self._url) as connection:
            for _ in range(count):
                self._number += 1
                id = first_id(1_700_000_000_000, self._number.to_bytes(10))
                flow = FlowContext(id, f"flow {self._number}", 1_700_000_000_000, "bench")
                ask = msgspec.json.encode(Ask(f"item {self._number % _ITEMS}", 2))
                envelope = Envelope(VERSION, id, flow, "request", "bench", msgspec.Raw(ask), waiting=waiting)
                connection.send_nowait("/queue/price.quote", encode_envelope(envelope), correlation_id=id)
                if self._number % _FLUSH == 0:
                    connection.flush()

    def _spark_s(self, count: int, batch: int) -> float:
        """Return the median seconds of a batch."""
        self._fill(count)
        table = str(self._folder / "prices.parquet")

        def price(requests: DataFrame) -> DataFrame:
            prices = requests.sparkSession.read.parquet(table)
            return requests.join(prices, "item").select("flow", (F.col("count") * F.col("cents")).alias("cents"))

        rows = _rows(self._spark, self._url, batch)
        query = (
            rows.writeStream.foreachBatch(stage_job(price, "item string, count int", url=self._url))
            .option("checkpointLocation", str(self._folder / f"checkpoint {time.monotonic_ns()}"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(_QUERY_SECONDS)
        batches: list[float] = [each["batchDuration"] / 1000 for each in query.recentProgress if each["numInputRows"]]
        return statistics.median(batches)

    def _service_s(self, count: int) -> float:
        self._fill(count)
        return asyncio.run(self._serve(count))

    async def _serve(self, count: int) -> float:
        app = Service("prices", broker=self._url)
        prices, left = self._prices, count
        done = asyncio.Event()

        @app.single("price.quote", Ask, Quote)
        async def quote(ask: Ask) -> Quote:
            nonlocal left
            left -= 1
            if not left:
                done.set()
            return Quote(ask.count * prices[ask.item])

        began = time.monotonic()
        async with app.running():
            await done.wait()
        return time.monotonic() - began


def _rows(spark: SparkSession, url: str, batch: int) -> DataFrame:
    reader = spark.readStream.format("truenext").options(url=url, queue="price.quote", maxRowsPerTrigger=batch)
    return reader.load()


if __name__ == "__main__":
    main()
