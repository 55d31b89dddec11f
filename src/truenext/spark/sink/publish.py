"""Publication of a decision: its bundles are published one after the other, in order.

One transaction acknowledges a bundle and sends its rows. So after any crash there is either the bundle or its rows. If
two drivers publish the same decision, each bundle goes to one of them.
"""

from __future__ import annotations

import time

from truenext.errors import RemoteProtocolError, TruenextError
from truenext.model.spark_queues import Decision, Draft, SinkQueues
from truenext.spark.broker.connection import Answer, BrokerConnection
from truenext.spark.broker.latest import count
from truenext.spark.broker.patience import Patience
from truenext.spark.sink.draft import DRAFT_FORMAT
from truenext.spark.sink.rows import TRANSACTION
from truenext.wire.stomp.frame import Frame

HELD_SECONDS = 30.0
"""Seconds to wait, without progress, for messages that another connection holds. The broker drops a dead connection
earlier."""
_LOOK_SECONDS = 0.2
"""Seconds between two looks whether such messages are available."""


class HeldByAnother(TruenextError):
    """Error of a run that must publish or replace a message which another connection holds."""


class HeldWait:
    """Wait for messages that another connection holds.

    Only sleep counts. While this process was stopped, or published other messages, it has not looked, and so does not
    know whether those it waits for are still held.
    """

    def __init__(self) -> None:
        self._left_s = HELD_SECONDS

    def go_on(self) -> bool:
        """Sleep until the next look, and return True. Return False instead after HELD_SECONDS of sleep."""
        if self._left_s <= 0:
            return False
        self._left_s -= _LOOK_SECONDS
        time.sleep(_LOOK_SECONDS)
        return True


def publish(broker: BrokerConnection, queues: SinkQueues, decision: Decision, patience: Patience) -> None:
    """Publish the bundles of a decision that are not published yet.

    Raises: HeldByAnother if another connection holds a bundle for too long; Refused, ConnectionLost if a step fails
    """
    for draft in decision.drafts:
        _publish_draft(broker, queues.drafts(draft.partition), draft, patience)


def _publish_draft(broker: BrokerConnection, queue: str, draft: Draft, patience: Patience) -> None:
    selector = f"spark_draft = '{draft.name}' AND spark_bundle < {draft.bundles}"
    published = _publish_ready(broker, queue, selector, patience)
    wait = HeldWait()
    while published < draft.bundles:
        # Another run has published the missing bundles, or holds them.
        waiting, held = count(broker, queue, selector)
        if not waiting and not held:
            return
        if waiting and (found := _publish_ready(broker, queue, selector, patience)):
            published += found
            wait = HeldWait()
        elif not wait.go_on():
            raise HeldByAnother(
                f"{waiting + held} messages of {queue} were not available for {HELD_SECONDS:g} s: end a second run of "
                f"this query, or resume the queue if it is paused. They are published when the query is restarted"
            )


def _publish_ready(broker: BrokerConnection, queue: str, selector: str, patience: Patience) -> int:
    """Publish the bundles that are ready, and return their number."""
    broker.subscribe_to_pull("drafts", f"/queue/{queue}", "client-individual", selector)
    published = 0
    broker.pull("drafts", 1)
    frame = broker.answer("drafts")
    while "truenext-unused" not in frame.headers:
        answer = _commit_bundle(broker, frame)
        # The next bundle arrives while the broker writes this one.
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
    # No outcome counts an attempt for the bundle.
    broker.post("BEGIN", {**transaction, "truenext-count-attempts": "nacked"})
    broker.post("ACK", {"id": bundle.headers["ack"], **transaction})
    broker.post_all(bundle.body, int(bundle.headers["spark_rows"]))
    return broker.start_call("COMMIT", transaction)
