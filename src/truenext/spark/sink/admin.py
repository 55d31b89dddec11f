"""Operator commands for decisions and drafts of sinks: list, publish, close, forget."""

from __future__ import annotations

from truenext.errors import TruenextError
from truenext.model.spark_queues import CLOSED_BATCH, SINK_PREFIX, Decision, SinkQueues, SinkStatus, queues_by_query
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.latest import purge
from truenext.spark.broker.patience import Patience
from truenext.spark.sink.decision import read_decision
from truenext.spark.sink.driver import decide_next, drop_drafts, finish_decision

_IMPATIENT = Patience(0)


def list_sinks(broker: BrokerConnection) -> list[SinkStatus]:
    """Return all sinks that have a decision or drafts, sorted by space and id.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    sinks = [
        SinkStatus(SinkQueues(*key), draft_queues=names)
        for key, names in queues_by_query(broker.ask("queues"), SINK_PREFIX).items()
    ]
    for status in sinks:
        status.decision = read_decision(broker, status.queues)
        for name in status.draft_queues:
            for frame in broker.browse(f"/queue/{name}"):
                status.add_draft(frame.headers, len(frame.body))
    # The broker removes empty queues only after a while.
    return [each for each in sinks if each.decision or each.draft_queues]


def publish_decision(broker: BrokerConnection, queues: SinkQueues) -> int:
    """Publish the rest of the last decision, and return the number of its batch.

    Raises: TruenextError if there is no decision; HeldByAnother if another connection holds a message that is needed;
    Refused, ConnectionLost if a step fails
    """
    decision = finish_decision(broker, queues, _IMPATIENT)
    if decision is None:
        raise TruenextError(
            f"{queues.id} has no decision, so nothing can be published: restart its job, which then writes all rows"
        )
    return decision.published_batch


def close_sink(broker: BrokerConnection, queues: SinkQueues) -> int:
    """Publish the last decision, and prevent any further one. Return the last published batch; -1 if there is none. The
    call may be repeated.

    Raises: HeldByAnother if another connection holds a message that is needed; Refused, ConnectionLost if a step fails
    """
    last = decide_next(broker, queues, CLOSED_BATCH, _closed_after, _IMPATIENT)
    drop_drafts(broker, queues, CLOSED_BATCH)
    return last.published_batch


def _closed_after(last: Decision | None) -> Decision:
    return Decision(CLOSED_BATCH, last_batch=-1 if last is None else last.published_batch)


def sinks_of(broker: BrokerConnection, query: str, space: str) -> list[SinkQueues]:
    """Return the sinks of a query in all spaces. For a query without a sink, return the sink that the query would have
    in this space.

    Raises: Refused if the broker refuses a request; ConnectionLost if the connection is lost
    """
    found = {status.queues for status in list_sinks(broker) if status.queues.id == query}
    return sorted(found, key=lambda queues: queues.space) or [SinkQueues(space, query)]


def forget_sink(broker: BrokerConnection, status: SinkStatus) -> None:
    """Remove the decision and the drafts of a query that never runs again.

    Raises: TruenextError if rows are decided and not published; Refused, ConnectionLost if a step fails
    """
    if status.rows:
        raise TruenextError(
            f"{status.rows} rows of {status.queues.id} are decided and not published: run `truenext spark publish` "
            "first"
        )
    drop_drafts(broker, status.queues, CLOSED_BATCH)
    purge(broker, status.queues.decisions)
