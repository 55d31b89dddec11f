"""Publishes what a decision names: bundle after bundle, in its order.

One transaction acknowledges a bundle and sends its rows. So a bundle is there, or its rows are, whatever is killed, and
of two drivers that publish the same decision each bundle goes to one.
"""

from __future__ import annotations

import time

from truenext.clock import monotonic
from truenext.errors import RemoteProtocolError, TruenextError
from truenext.spark.broker.connection import Answer, BrokerConnection
from truenext.spark.broker.latest import count
from truenext.spark.broker.patience import Patience
from truenext.spark.sink.decision import Decision, Draft, SinkQueues
from truenext.spark.sink.draft import DRAFT_FORMAT
from truenext.spark.sink.rows import TRANSACTION
from truenext.wire.stomp.frame import Frame

HELD_SECONDS = 30.0
"""For which another driver may hold what is to be published without publishing anything: longer than the broker needs
to notice that a connection without heart-beats has ended."""
_HELD_LOOK_SECONDS = 0.2


class HeldByAnother(TruenextError):
    """Another run holds what this one is to publish."""


def publish(broker: BrokerConnection, queues: SinkQueues, decision: Decision, patience: Patience) -> None:
    """Publish all that is left of a decision.

    Raises: HeldByAnother, Refused, ConnectionLost
    """
    for draft in decision.drafts:
        _publish_draft(broker, queues.drafts(draft.partition), draft, patience)


def _publish_draft(broker: BrokerConnection, queue: str, draft: Draft, patience: Patience) -> None:
    selector = f"spark_draft = '{draft.name}' AND spark_bundle < {draft.bundles}"
    published = _publish_ready(broker, queue, selector, patience)
    deadline = monotonic() + HELD_SECONDS
    while published < draft.bundles:
        # Another run has published the others, at an earlier time, or has them now.
        waiting, held = count(broker, queue, selector)
        if not waiting and not held:
            return
        if waiting and (found := _publish_ready(broker, queue, selector, patience)):
            published += found
            deadline = monotonic() + HELD_SECONDS
        elif monotonic() >= deadline:
            raise HeldByAnother(
                f"{waiting + held} messages of {queue} were not to be had for {HELD_SECONDS:g} s: does a second run of "
                f"this query publish them, or is the queue paused? They are published when the query is started again"
            )
        else:
            time.sleep(_HELD_LOOK_SECONDS)


def _publish_ready(broker: BrokerConnection, queue: str, selector: str, patience: Patience) -> int:
    """Publish the bundles that are ready, and return how many that were."""
    broker.subscribe_to_pull("drafts", f"/queue/{queue}", "client-individual", selector)
    published = 0
    broker.pull("drafts", 1)
    frame = broker.answer("drafts")
    while "truenext-unused" not in frame.headers:
        answer = _commit_bundle(broker, frame)
        # While the broker writes, the next one comes.
        broker.pull("drafts", 1)
        frame = broker.answer("drafts")
        broker.wait(answer)
        patience.on_success()
        published += 1
    broker.post("UNSUBSCRIBE", {"id": "drafts"})
    return published


def _commit_bundle(broker: BrokerConnection, bundle: Frame) -> Answer:
    if bundle.headers.get("spark_format") != str(DRAFT_FORMAT):
        raise RemoteProtocolError(
            f"a draft has format {bundle.headers.get('spark_format')}, and this truenext publishes {DRAFT_FORMAT}: "
            f"publish it with the truenext that wrote it"
        )
    transaction = {"transaction": TRANSACTION}
    # However this ends, the bundle is charged with no attempt.
    broker.post("BEGIN", {**transaction, "truenext-count-attempts": "nacked"})
    broker.post("ACK", {"id": bundle.headers["ack"], **transaction})
    broker.post_all(bundle.body, int(bundle.headers["spark_rows"]))
    return broker.start_call("COMMIT", transaction)
