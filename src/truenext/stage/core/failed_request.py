"""Failed request: makes the message of an `on_failure` stage from a message that another stage could not process, and
the message of a kept failure from a report.

The broker moves the failed message unchanged, so its envelope is the envelope for the stage that failed: its `waiting`
has the whole stack of requests. The header `truenext-on-failure` has the handlers after this handler. Their number
shows to which request of the stack this handler belongs.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from truenext.flows.envelope import VERSION, Envelope, FlowContext, NotDecoded, ReplyTo, failure_handlers
from truenext.model.failure_headers import ON_FAILURE
from truenext.stage.core.definitions import Stage
from truenext.stage.core.failure import FAILURE, HANDLED, failure_of


def reported_failure(headers: Mapping[str, str]) -> Envelope:
    """Return an envelope for the stage that keeps replies, made of the headers of a report. A report has no body."""
    id = headers.get("correlation-id", "")
    return Envelope(
        version=VERSION,
        # Each report has an id of its own, also those of one flow.
        id=headers.get("message-id") or id,
        flow=FlowContext(id=id, trace=id, started_ms=0, started_by=""),
        kind="report",
        sender="",
        message=msgspec.Raw(msgspec.json.encode(failure_of(headers))),
        state=msgspec.Raw(b'{"is_failure":true}'),
    )


def failed_request(stage: Stage, envelope: Envelope, headers: Mapping[str, str]) -> Envelope:
    """Return the envelope for an `on_failure` stage: with the failure as message, and with the state of the request.
    Its `waiting` ends with the failed request.

    Raises: NotDecoded if the message is no failure of a request of this endpoint
    """
    if headers.get(FAILURE) != HANDLED:
        raise NotDecoded(
            f"the message in {stage.queue} was sent there by a program: only the broker may move failed messages to "
            "this queue"
        )
    request, waiting = _request_of(stage, envelope, headers)
    return msgspec.structs.replace(
        envelope,
        message=msgspec.Raw(msgspec.json.encode(failure_of(headers))),
        state=request.state,
        waiting=[*waiting, request],
        attachments={},
    )


def _request_of(stage: Stage, envelope: Envelope, headers: Mapping[str, str]) -> tuple[ReplyTo, list[ReplyTo]]:
    waiting = envelope.waiting
    tried = len(failure_handlers(waiting)) - len(headers.get(ON_FAILURE, "").split())
    for index in range(len(waiting) - 1, -1, -1):
        request = waiting[index]
        tried -= bool(request.failure)
        if request.failure and not tried:
            if request.failure != stage.destination:
                break
            return request, waiting[:index]
    raise NotDecoded(f"no request in the failed message names {stage.queue}: was the message moved there by a command?")
