"""What a batch publishes, and where drafts and decisions are kept.

The **decision** is the one message of a query's own queue. It names the drafts that are the output of a batch. The
COMMIT that puts it there, with a producer's number, is the point of no return: from then on these rows are published,
each once, and no others of this batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from truenext.model.destination import SPARK_PREFIX
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.latest import CLOSED_BATCH, Latest, read_latest, replace_latest

QUEUES_PREFIX = f"{SPARK_PREFIX}sink."
"""How the names of the queues begin in which sinks keep decisions and drafts; then come space, id and partition."""


@dataclass(frozen=True)
class Draft:
    """Bundles of one partition that are confirmed: those of this name whose number is below `bundles`."""

    partition: int
    name: str
    bundles: int
    rows: int


@dataclass(frozen=True)
class Decision:
    """The output of a batch."""

    batch: int
    """CLOSED_BATCH if the query was abandoned: it publishes nothing more."""
    drafts: tuple[Draft, ...] = ()
    last_batch: int = -1
    """Of a query that is closed: the last batch whose output was published."""

    @property
    def is_closed(self) -> bool:
        return self.batch == CLOSED_BATCH

    @property
    def published_batch(self) -> int:
        """The last batch whose output counts; -1 if none does."""
        return self.last_batch if self.is_closed else self.batch


@dataclass(frozen=True)
class SinkQueues:
    """The names of one query's queues."""

    space: str
    id: str
    """Spark's id of a query; of a batch write its txnAppId, or a random word."""

    @property
    def decisions(self) -> str:
        return f"{QUEUES_PREFIX}{self.space}.{self.id}"

    def drafts(self, partition: int) -> str:
        return f"{self.decisions}.{partition}"

    @property
    def producer(self) -> str:
        return f"spark/{self.id}"


def read_decision(broker: BrokerConnection, queues: SinkQueues) -> Decision | None:
    """Return the last decision; None if none waits. One that another connection holds is not seen.

    Raises: Refused, ConnectionLost
    """
    latest = read_latest(broker, queues.decisions)
    return None if latest is None else _parse_decision(latest)


def decide(broker: BrokerConnection, queues: SinkQueues, decision: Decision, last: Decision | None) -> bool:
    """Put this decision in the place of `last`, which is published; False if another driver has decided meanwhile.

    Raises: Refused, ConnectionLost
    """
    latest: Latest = {"batch": decision.batch}
    if decision.is_closed:
        latest["last"] = decision.last_batch
    else:
        latest["drafts"] = [(each.partition, each.name, each.bundles, each.rows) for each in decision.drafts]
    return replace_latest(
        broker,
        queues.decisions,
        latest,
        queues.producer,
        decision.batch + 1,
        replaces=lambda batch: batch == (None if last is None else last.batch),
    )


def _parse_decision(latest: Latest) -> Decision:
    return Decision(latest["batch"], tuple(Draft(*draft) for draft in latest.get("drafts", ())), latest.get("last", -1))
