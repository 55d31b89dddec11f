"""Answers: what a stage sends for each request of a batch. Pure functions of rows; Spark calls them in its tasks.

one answer row, a caller waits        the reply, to the last address that waits
one answer row, with a next stage     the message for the next stage
one answer row, no caller waits       nothing: the flow ends here
no answer row                         the request, which its SEND rejects: a dead letter, or to its handler
two answer rows, or one of no request BadAnswer, which fails the batch before any of it is published
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from truenext.errors import TruenextError
from truenext.flows.envelope import (
    CALLS_MAX,
    CONTENT_TYPE,
    TOO_MANY_CALLS,
    Envelope,
    FailureOptions,
    continued,
    encode_envelope,
    failure_options,
    failures_of,
)
from truenext.flows.message_ids import child_id, output_seed
from truenext.flows.names import later_stage_queue
from truenext.spark.sink.options import sink_destination
from truenext.spark.sink.rows import BODY_BYTES_MAX, UnsendableRow, encode_row
from truenext.spark.stage_job.requests import cause_in_stage, check_queue, envelope_of

SERVICE = "spark"
"""Name of the service in messages and events of such stages."""
NO_ANSWER = "NoAnswer: the transform has returned no row for this request"


class BadAnswer(TruenextError):
    """Error of a transform that has lost or doubled the column of flows."""


class Result(NamedTuple):
    """What became of one request: the row for the sink, then the fields of its execution. The field names are
    columns."""

    queue: str | None = None
    """Destination of the message; None if nothing is sent."""
    body: bytes | None = None
    priority: int | None = None
    persistent: bool | None = None
    group: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    content_type: str | None = None
    expires_ms: int | None = None
    headers: list[tuple[str, str]] | None = None
    report_to: str | None = None
    report_id: str | None = None
    on_failure: str | None = None
    reject: str | None = None
    stage: str = ""
    sequence: int = 0
    message_id: str = ""
    flow_id: str = ""
    trace: str = ""
    sender: str = ""
    parent: str = ""
    attempt: int = 1
    deliveries: int = 1
    accepted_ms: int = 0
    is_unreadable: bool = False


SINK_COLUMNS = tuple(name for name in Result._fields[: Result._fields.index("stage")] if name != "expires_ms")
"""Columns of a result that are those of a row for the sink. The sink gets `expires_ms` as its column `expires`."""
_HEADERS = frozenset(SINK_COLUMNS) - {"body"}
EXECUTION_COLUMNS = Result._fields[Result._fields.index("stage") :]
"""Columns of a result that tell of its execution."""


def make_result(row: Mapping[str, Any], next_stage: str, job: str) -> Result:
    """Return what becomes of a request. `row` has the columns of the source and of `Request`, then `answers`, the
    number of the transform's rows for it, and `answer`, the message of that row as JSON.

    Raises: BadAnswer if the transform has returned two rows, or `row` has no request
    """
    if row["sequence"] is None:
        raise BadAnswer(
            f"the transform has returned {row['answers']} rows whose column flow is null, or of no request of the "
            "batch: keep the column as it is, for example with a left join that begins with the requests"
        )
    if (row["answers"] or 0) > 1:
        raise BadAnswer(
            f"the transform has returned {row['answers']} rows for one request of flow {row['trace']!r} (message "
            f"{row['message_id']}): return one row at most, for example by groupBy('flow')"
        )
    facts = _facts(row)
    if row["refused"] is not None:
        # Without ids, as the service that sent it may have meant something else.
        return _rejected(row, f"NotDecoded: {row['refused']}", job, facts._replace(is_unreadable=True))
    envelope = envelope_of(row["body"], row["accepted_ms"])
    facts = facts._replace(sender=envelope.sender, parent=envelope.parent)
    if not row["answers"]:
        return _rejected(row, NO_ANSWER, job, facts)
    return _answered(row, envelope, next_stage, job, facts)


def _answered(row: Mapping[str, Any], envelope: Envelope, next_stage: str, job: str, facts: Result) -> Result:
    sent = _answer(row["queue"], envelope, msgspec.Raw(row["answer"].encode()), next_stage)
    if sent is None:
        return facts
    destination, answer = sent
    try:
        # The caller names it, in a message that this job did not make.
        sink_destination(destination)
    except ValueError as error:
        return _rejected(row, f"Reject: {error}", job, facts)
    if answer.calls > CALLS_MAX:
        return _rejected(row, f"Reject: {TOO_MANY_CALLS}", job, facts)
    body = encode_envelope(answer)
    if len(body) > BODY_BYTES_MAX:
        reason = f"Reject: the answer has {len(body)} bytes, and a message from Spark has {BODY_BYTES_MAX} at most"
        return _rejected(row, reason, job, facts)
    result = facts._replace(
        queue=destination,
        body=body,
        priority=answer.priority,
        persistent=answer.flow.persistent,
        correlation_id=answer.id,
        content_type=CONTENT_TYPE,
        expires_ms=row["expires_ms"],
    )
    return _telling(result, failure_options(answer, destination))


def _answer(queue: str, envelope: Envelope, message: msgspec.Raw, next_stage: str) -> tuple[str, Envelope] | None:
    """Return destination and envelope of the message that a stage sends; None if no caller waits for its reply. The
    id is the one that a service would give the message."""
    kind, state, waiting = "next", envelope.state, envelope.waiting
    if next_stage:
        destination = f"/queue/{later_stage_queue(check_queue(queue), next_stage)}"
    elif not waiting:
        return None
    else:
        *waiting, last = waiting
        kind, state, destination = "reply", last.state, last.to
    answer = continued(
        envelope,
        kind=kind,
        id=child_id(output_seed(envelope.id, queue), 1),
        sender=f"{SERVICE} {queue}",
        flow=envelope.flow,
        message=message,
        state=state,
        waiting=waiting,
        attachments={},
    )
    # No interceptor adds a step here, so the next one continues from the last.
    return destination, msgspec.structs.replace(answer, carrier=envelope.carrier)


def _rejected(row: Mapping[str, Any], reason: str, job: str, facts: Result) -> Result:
    """Return the row that sends a request to its queue again, to be rejected there."""
    same = {name: row[name] for name in (*_SAME, "headers")}
    cause = cause_in_stage(reason, row["queue"], job)
    result = facts._replace(**same, queue=f"/queue/{row['queue']}", reject=cause)
    return _sendable(_telling(result, failures_of(row["queue"], row["body"])))


def _sendable(result: Result) -> Result:
    """Return the row of a rejected request without those headers that only its sender could set, or that have no room
    beside those of the rejection: otherwise one request would hold up the job for ever."""
    if _can_be_sent(result):
        return result
    bare = result._replace(headers=[], reply_to=None)
    kept = [each for each in result.headers or () if _can_be_sent(bare._replace(headers=[each]))]
    rows = (result._replace(headers=kept), bare._replace(headers=kept), bare._replace(reply_to=result.reply_to))
    return next(filter(_can_be_sent, rows), bare)


def _can_be_sent(result: Result) -> bool:
    row = {name: value for name, value in zip(Result._fields, result, strict=True) if name in _HEADERS}
    try:
        encode_row(b"", row | {"expires": result.expires_ms}, None)
    except UnsendableRow:
        return False
    return True


_SAME = ("body", "priority", "persistent", "group", "correlation_id", "reply_to", "content_type", "expires_ms")


def _telling(result: Result, told: FailureOptions) -> Result:
    """Return the row with the destinations that are told of the failure of its message."""
    return result._replace(
        report_to=told.report_to or None,
        report_id=told.report_id or None,
        on_failure=" ".join(told.on_failure) or None,
    )


def _facts(row: Mapping[str, Any]) -> Result:
    return Result(
        stage=row["queue"],
        sequence=row["sequence"],
        message_id=row["message_id"] or row["correlation_id"] or "",
        flow_id=row["flow_id"],
        trace=row["trace"],
        attempt=row["attempts"] + 1,
        deliveries=row["deliveries"],
        accepted_ms=row["accepted_ms"],
    )
