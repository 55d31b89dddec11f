"""Decisions: which drafts are the output of a batch.

A **decision** is the only message in the query's own queue. It names the drafts that are the output of a batch. A
numbered COMMIT puts the decision there. After this COMMIT the batch cannot change any more: the rows of the named
drafts are published, each once, and no other rows.
"""

from __future__ import annotations

from truenext.model.spark_queues import Decision, Latest, SinkQueues, parse_decision
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.latest import read_latest, replace_latest

_FIRST_NUMBER = 1
"""Number of the COMMIT of a query's first decision. Later decisions have higher numbers."""


def read_decision(broker: BrokerConnection, queues: SinkQueues) -> Decision | None:
    """Return the last decision; None if none waits. A decision that another connection holds is not seen.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    latest = read_latest(broker, queues.decisions)
    return None if latest is None else parse_decision(latest)


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
