"""Grants of a sink: checks at the start of a program that its user may write, and not only with its first rows."""

from __future__ import annotations

import secrets

from truenext.model.spark_queues import SinkQueues
from truenext.spark.broker.latest import count
from truenext.spark.sink.decision import read_decision
from truenext.spark.sink.options import SinkOptions

_TRANSACTION = {"transaction": "grants"}


def check_grants(options: SinkOptions) -> None:
    """Try what a batch needs at the broker, in queues of an id of its own, without an effect.

    Raises: Refused if the user may not do a step; NoBroker if no broker answers
    """
    queues = SinkQueues(options.space, secrets.token_hex(8))
    own = [f"/queue/{queues.decisions}", f"/queue/{queues.drafts(0)}"]
    with options.connect() as broker:
        broker.post("BEGIN", _TRANSACTION)
        for destination in (options.destination, *own):
            if destination is not None:
                broker.call("SEND", {"destination": destination, "persistent": "true", **_TRANSACTION})
        broker.post("ABORT", _TRANSACTION)
        for destination in own:
            broker.subscribe_to_pull("grants", destination, "client")
            broker.call("UNSUBSCRIBE", {"id": "grants"})
        read_decision(broker, queues)
        count(broker, queues.drafts(0))
