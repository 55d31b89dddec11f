"""Decisions: which drafts are the output of a batch.

A **decision** is the only message in the query's own queue. It names the drafts that are the output of a batch. A
numbered COMMIT puts the decision there. After this COMMIT the batch cannot change any more: the rows of the named
drafts are published, each once, and no other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from truenext.model.destination import SPARK_PREFIX
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.latest import CLOSED_BATCH, Latest, read_latest, replace_latest

QUEUES_PREFIX = f"{SPARK_PREFIX}sink."
"""Prefix of the names of queues with decisions and drafts. Space, id and partition follow it."""

_FIRST_NUMBER = 1
"""Number of the COMMIT of a query's first decision. Later decisions have higher numbers."""


@dataclass(frozen=True)
class Draft:
    """Confirmed bundles of one partition. These bundles carry the name of this draft, and a bundle number below
    `bundles`."""

    partition: int
    name: str
    bundles: int
    rows: int


@dataclass(frozen=True)
class Decision:
    """Content of a decision: the drafts that are the output of one batch."""

    batch: int
    """Number of the batch. CLOSED_BATCH for an abandoned query, which publishes nothing more."""
    drafts: tuple[Draft, ...] = ()
    last_batch: int = -1
    """For a closed query: its last published batch; -1 if there is none."""
    store: str = ""
    """Identity of the broker where the decision was made (`truenext-store`); empty if an earlier version made it."""

    @property
    def is_closed(self) -> bool:
        return self.batch == CLOSED_BATCH

    @property
    def published_batch(self) -> int:
        """Number of the last batch whose output counts; -1 if there is none."""
        return self.last_batch if self.is_closed else self.batch


@dataclass(frozen=True)
class SinkQueues:
    """Names of the queues in the broker that the sink of one query uses."""

    space: str
    id: str
    """Spark's id of the query. For a batch write it is txnAppId, or a random word."""

    @property
    def decisions(self) -> str:
        return f"{QUEUES_PREFIX}{self.space}.{self.id}"

    def drafts(self, partition: int) -> str:
        return f"{self.decisions}.{partition}"

    @property
    def producer(self) -> str:
        return f"spark/{self.space}/{self.id}"


def read_decision(broker: BrokerConnection, queues: SinkQueues) -> Decision | None:
    """Return the last decision; None if none waits. A decision that another connection holds is not seen.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    latest = read_latest(broker, queues.decisions)
    return None if latest is None else _parse_decision(latest)


def decide(
    broker: BrokerConnection,
    queues: SinkQueues,
    decision: Decision,
    last: Decision | None,
    *,
    is_forgotten: bool = False,
) -> bool:
    """Replace `last`, which is published, by `decision`. Return False if another driver was first.

    If two drivers replace the same `last`, only one of them can acknowledge its message. Before a first decision there
    is no such message; then both use the same number for the COMMIT, and the first COMMIT wins. If the query was
    forgotten (`is_forgotten`), this number was used before. Then only the decision that closes the query may use a
    higher number, because no other decision competes with it.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    latest: Latest = {"batch": decision.batch, "store": broker.store_id}
    if decision.is_closed:
        latest["last"] = decision.last_batch
    else:
        latest["drafts"] = [(each.partition, each.name, each.bundles, each.rows) for each in decision.drafts]
    return replace_latest(
        broker,
        queues.decisions,
        latest,
        queues.producer,
        _FIRST_NUMBER if last is None and not is_forgotten else _FIRST_NUMBER + 1 + decision.batch,
        replaces=lambda batch: batch == (None if last is None else last.batch),
    )


def _parse_decision(latest: Latest) -> Decision:
    drafts = tuple(Draft(*draft) for draft in latest.get("drafts", ()))
    return Decision(latest["batch"], drafts, latest.get("last", -1), latest.get("store", ""))
