"""Commit of a batch by the driver, which decides first and then publishes.

The last decision of the query determines what happens to a batch:

    none, or of a lower batch    publish the rest of that decision, decide this batch, publish it
    of this batch                publish the rest of it, and drop the new drafts, whatever their rows are
    of a higher batch, closed    fail: the checkpoint is older than the output, or the query was abandoned
    of another broker            fail, and publish nothing: this broker was restored, and lacks later output
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from truenext.errors import TruenextError
from truenext.model.spark_queues import Decision, Draft, SinkQueues
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.latest import count, purge
from truenext.spark.broker.patience import Patience
from truenext.spark.sink.decision import decide, read_decision
from truenext.spark.sink.publish import HELD_SECONDS, HeldByAnother, HeldWait, publish

_log = logging.getLogger(__name__)


class OutdatedBatch(TruenextError):
    """Error of a batch that belongs to an outdated run. Another run has published later batches, or the query was
    abandoned or forgotten."""


def commit_batch(
    queues: SinkQueues,
    batch: int,
    drafts: tuple[Draft, ...],
    connect: Callable[[], BrokerConnection],
    patience: Patience,
) -> None:
    """Make these drafts the output of the batch, and publish them. If the batch was decided before, publish that
    decision instead.

    Raises: OutdatedBatch if a later batch is published; HeldByAnother if another connection holds a message that is
    needed; TruenextError if the broker refuses a step or stays unavailable
    """
    drafts = tuple(sorted((each for each in drafts if each.bundles), key=lambda draft: draft.partition))
    with_broker(lambda broker: _commit_batch(broker, queues, Decision(batch, drafts), patience), connect, patience)


def with_broker(
    action: Callable[[BrokerConnection], object], connect: Callable[[], BrokerConnection], patience: Patience
) -> None:
    """Call `action` on a new connection, and repeat this until it succeeds or patience ends. A repeated action must do
    no harm."""
    while True:
        try:
            with connect() as broker:
                action(broker)
                return
        except TruenextError as error:
            patience.wait(error)


def _commit_batch(broker: BrokerConnection, queues: SinkQueues, decision: Decision, patience: Patience) -> None:
    last: Decision | None
    check = partial(_check_store, broker)
    if decision.drafts:
        last = decide_next(broker, queues, decision.batch, lambda _: decision, patience, check)
    else:
        last = finish_decision(broker, queues, patience, check)
        if last is None or last.batch < decision.batch:
            # A batch without rows needs no decision of its own.
            return
    if last is not decision:
        _check_not_later(last, decision.batch)
    drop_drafts(broker, queues, decision.batch)


def decide_next(
    broker: BrokerConnection,
    queues: SinkQueues,
    batch: int,
    decision_after: Callable[[Decision | None], Decision],
    patience: Patience,
    check: Callable[[Decision], None] = lambda _: None,
) -> Decision:
    """Publish the last decision. If that decision is for a batch below `batch`, call `decision_after` with it, replace
    the decision by the result, and publish the new decision. Returns the decision that is now the last one. `check` is
    that of `finish_decision`.

    Raises: OutdatedBatch if the id was forgotten; HeldByAnother if another connection holds a message that is needed;
    Refused, ConnectionLost if a step fails
    """
    wait = HeldWait()
    waits_for: Decision | None = None
    has_tried_first = False
    while (last := finish_decision(broker, queues, patience, check)) is None or last.batch < batch:
        decision = decision_after(last)
        # The number of a first decision was used, and that decision is not here.
        is_forgotten = has_tried_first and last is None
        if is_forgotten and not decision.is_closed:
            raise OutdatedBatch(
                f"batch {batch} of {queues.id} cannot be decided: the id was forgotten, and is blocked for 7 "
                f"days; use a new checkpoint; for a batch write use another txnAppId"
            )
        if decide(broker, queues, decision, last, is_forgotten=is_forgotten):
            publish(broker, queues, decision, patience)
            return decision
        has_tried_first = last is None
        if last != waits_for:
            wait, waits_for = HeldWait(), last
        if not wait.go_on():
            raise HeldByAnother(
                f"the decision of {queues.id} cannot be replaced: end another run of this query, and resume the queue "
                f"{queues.decisions} if it is paused"
            )
    return last


def finish_decision(
    broker: BrokerConnection,
    queues: SinkQueues,
    patience: Patience,
    check: Callable[[Decision], None] = lambda _: None,
) -> Decision | None:
    """Publish the rest of the last decision, and return this decision; None if there is none. Before, `check` is called
    with the decision, and may raise an error.

    Raises: HeldByAnother if another connection holds a message that is needed; Refused, ConnectionLost if a step fails
    """
    wait = HeldWait()
    while (decision := read_decision(broker, queues)) is None and any(count(broker, queues.decisions)):
        # A dying driver may still hold the decision in a transaction.
        if not wait.go_on():
            raise HeldByAnother(
                f"another connection has held the message in queue {queues.decisions} for {HELD_SECONDS:g} s: if there "
                "is a second run of this query, end one of the two"
            )
    if decision is not None:
        check(decision)
        publish(broker, queues, decision, patience)
    return decision


def _check_store(broker: BrokerConnection, decision: Decision) -> None:
    """Check that this broker has all output of the query. Raises: OutdatedBatch if another broker made its decision"""
    if decision.store not in ("", broker.store_id):
        raise OutdatedBatch(
            f"the last decision of this query was made at a broker whose data has the name {decision.store}, and the "
            f"broker at this url has {broker.store_id}: correct the option url; if the broker was restored, it lacks "
            f"what was published since: run `truenext spark abandon`, and start the query with a new checkpoint; a "
            f"batch write needs another txnAppId"
        )


def _check_not_later(last: Decision, batch: int) -> None:
    """Check that the query is not closed, and that its last decision is not for a later batch.

    Raises: OutdatedBatch otherwise
    """
    if last.is_closed:
        when = f"after batch {last.last_batch}" if last.last_batch >= 0 else "before its first batch"
        raise OutdatedBatch(f"this query was abandoned, {when}: start it with a new checkpoint")
    if last.batch > batch:
        raise OutdatedBatch(
            f"batch {batch} is older than batch {last.batch}, which is published: the checkpoint is older than the "
            f"output of the query, or two runs use it. Start the query with the newest checkpoint, or with a new one; "
            f"if this is a batch write, set a higher txnVersion"
        )
    _log.info("this batch was decided before, and its output is published", extra={"batch": batch})


def drop_drafts(broker: BrokerConnection, queues: SinkQueues, batch: int) -> None:
    """Remove drafts of failed attempts, up to this batch. No later decision can name these drafts.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    for queue in broker.ask("queues"):
        if queue["name"].startswith(f"{queues.decisions}.") and queue["waiting"]:
            purge(broker, queue["name"], f"spark_batch <= {batch}")
