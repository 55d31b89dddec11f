"""An undisturbed query without Spark, for tests of one case each, and functions that send to its queue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.integration.raw_client import RawClient
from truenext.model.url import parse_url
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.datasource import PlannedTask, QueueStreamReader, TruenextDataSource
from truenext.spark.source.offset import Offset, parse_offset
from truenext.testing import BlockingBroker


def connect(here: BlockingBroker) -> BrokerConnection:
    return BrokerConnection([parse_url(here.url)])


def client(here: BlockingBroker) -> RawClient:
    connected = RawClient(int(here.url.rpartition(":")[2]))
    connected.send_connect("1.2", "0,0")
    return connected


def send(here: BlockingBroker, *messages: str | bytes, queue: str = "orders", **options: Any) -> None:
    """Send persistent messages, and wait for their receipts; see RawClient.send."""
    producer = client(here)
    for message in messages:
        body = message.encode() if isinstance(message, str) else message
        producer.send(queue, body, **{"persistent": True, "confirmed": True, **options})
    producer.disconnect()


def forget_numbers(here: BlockingBroker, query: str) -> None:
    """Make the broker forget the numbers of a query's producers, as it does after a week."""
    producers = [f"spark/{query}/{name}" for name in (*range(64), "mark")]
    leaver = client(here)
    names = "[" + ", ".join(f'"{each}"' for each in producers) + "]"
    leaver.send_frame("DISCONNECT", {"truenext-forget": names}, confirmed=True)
    leaver.close()


def bodies_in(here: BlockingBroker, queue: str = "orders") -> list[str]:
    return [body.decode() for body in here.queue(queue).bodies]


class SmallQuery:
    def __init__(self, here: BlockingBroker, **options: str) -> None:
        self.here = here
        self.options = {"url": here.url, "queue": "orders", "partitions": "1", "patience": "0", **options}
        self.offsets: list[dict[str, Any]] = []
        self.rows: list[list[dict[str, Any]]] = []
        """Rows of each batch in the sink."""
        self._readers: list[QueueStreamReader] = []

    def reader(self) -> QueueStreamReader:
        """Return the reader of a new run."""
        source = TruenextDataSource(self.options)
        reader = source.streamReader(source.schema())
        assert isinstance(reader, QueueStreamReader)
        self._readers.append(reader)
        return reader

    @property
    def start(self) -> dict[str, Any]:
        return self.offsets[-1] if self.offsets else {"v": 1, "batch": 0}

    @property
    def end(self) -> Offset:
        """End offset of the last batch."""
        end = parse_offset(self.offsets[-1])
        assert end is not None
        return end

    def plan(self, reader: QueueStreamReader) -> list[PlannedTask]:
        """Plan the next batch, and write it to the offset log; no tasks if nothing is ready."""
        start = self.start
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        if end == start:
            return []
        self.offsets.append(end)
        return self.replan(reader)

    def replan(self, reader: QueueStreamReader) -> list[PlannedTask]:
        """Plan the last batch once more."""
        start = self.offsets[-2] if len(self.offsets) > 1 else reader.initialOffset()
        return [each for each in reader.partitions(start, self.offsets[-1]) if isinstance(each, PlannedTask)]

    def run_batch(self, reader: QueueStreamReader) -> list[str]:
        """Run the next batch, and return the bodies of its rows, decoded."""
        return self.finish(reader, self.plan(reader))

    def finish(self, reader: QueueStreamReader, planned: list[PlannedTask]) -> list[str]:
        rows = [row for each in planned for batch in reader.read(each) for row in batch.to_pylist()]
        if planned:
            self.rows[len(self.offsets) - 1 :] = [rows]
        return [row["body"].decode(errors="replace") for row in rows]

    def run_to_end(self, reader: QueueStreamReader) -> list[str]:
        found: list[str] = []
        while rows := self.run_batch(reader):
            found += rows
        return found

    def stop(self) -> None:
        for reader in self._readers:
            reader.stop()


def connecting(here: BlockingBroker) -> Callable[[], BrokerConnection]:
    return partial(BrokerConnection, [parse_url(here.url)])
