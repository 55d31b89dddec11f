"""Grants of a sink: checks at the start of a program that its user may write, and not only with its first rows."""

from __future__ import annotations

import secrets

from truenext.errors import Refused
from truenext.model.spark_queues import SinkQueues
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.latest import count
from truenext.spark.broker.patience import PASSING_CODES
from truenext.spark.sink.decision import read_decision
from truenext.spark.sink.options import SinkOptions

_TRANSACTION = {"transaction": "grants"}


def check_grants(options: SinkOptions) -> None:
    """Try what a batch needs at the broker, in queues of an id of its own, without an effect. A broker that refuses a
    step for now, such as one whose disk is full, is left to the patience of the first batch.

    Raises: Refused if the user may not do a step; NoBroker if no broker answers
    """
    queues = SinkQueues(options.space, secrets.token_hex(8))
    try:
        with options.connect() as broker:
            _try_sends(broker, queues, options.destination)
            _try_own_queues(broker, queues)
    except Refused as error:
        if error.code not in PASSING_CODES:
            raise


def _try_sends(broker: BrokerConnection, queues: SinkQueues, destination: str | None) -> None:
    broker.post("BEGIN", _TRANSACTION)
    for each in (destination, *_addresses(queues)):
        if each is not None:
            broker.call("SEND", {"destination": each, "persistent": "true", **_TRANSACTION})
    broker.post("ABORT", _TRANSACTION)


def _try_own_queues(broker: BrokerConnection, queues: SinkQueues) -> None:
    for each in _addresses(queues):
        broker.subscribe_to_pull("grants", each, "client")
        broker.call("UNSUBSCRIBE", {"id": "grants"})
    read_decision(broker, queues)
    count(broker, queues.drafts(0))


def _addresses(queues: SinkQueues) -> tuple[str, str]:
    return f"/queue/{queues.decisions}", f"/queue/{queues.drafts(0)}"
