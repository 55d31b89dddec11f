"""Functions that write and commit small batches of a sink without Spark, step by step, for tests of one case each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pyarrow as pa

from truenext.model.spark_queues import Decision, Draft, SinkQueues
from truenext.model.url import parse_url
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.patience import Patience
from truenext.spark.sink.decision import read_decision
from truenext.spark.sink.draft import write_drafts
from truenext.spark.sink.driver import commit_batch
from truenext.spark.sink.rows import SinkBundle, bundles, encode_rows
from truenext.testing import BlockingBroker

QUEUES = SinkQueues("main", "query-1")


def connecting(here: BlockingBroker) -> Callable[[], BrokerConnection]:
    return partial(BrokerConnection, [parse_url(here.url)])


def bundles_of(*bodies: str | bytes, destination: str = "/queue/out", rows: int = 2) -> Iterator[SinkBundle]:
    """Yield bundles of up to `rows` rows."""
    for start in range(0, len(bodies), rows):
        batch = pa.RecordBatch.from_pydict({"body": list(bodies[start : start + rows])})
        yield from bundles(encode_rows(batch, destination))


def draft(
    here: BlockingBroker, batch: int, *bodies: str, partition: int = 0, patience_s: float = 0, rows: int = 2
) -> tuple[Draft, ...]:
    """Write drafts as a task of this partition does."""
    made = bundles_of(*bodies, rows=rows)
    return write_drafts(made, QUEUES, batch, partition, connecting(here), Patience(patience_s)).drafts


def commit(here: BlockingBroker, batch: int, drafts: tuple[Draft, ...], patience_s: float = 0) -> None:
    commit_batch(QUEUES, batch, drafts, connecting(here), Patience(patience_s))


def write_batch(here: BlockingBroker, batch: int, *bodies: str) -> None:
    commit(here, batch, draft(here, batch, *bodies))


def bodies_in(here: BlockingBroker, queue: str = "out") -> list[str]:
    return [body.decode() for body in here.queue(queue).bodies]


def last_decision(here: BlockingBroker) -> Decision | None:
    with connecting(here)() as broker:
        return read_decision(broker, QUEUES)


def drafts_waiting(here: BlockingBroker, partitions: int = 3) -> int:
    return sum(here.queue(QUEUES.drafts(partition)).waiting for partition in range(partitions))
