"""Requests: messages between stages, as the rows of a batch. Pure functions of rows; Spark calls them in its tasks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec

from truenext.errors import ConfigurationError
from truenext.flows.envelope import Envelope, NotDecoded, as_occurrence, decode_envelope
from truenext.flows.names import FAILURE_STAGE, endpoint_of_any_stage, later_stage_queue
from truenext.model.limits import CAUSE_BYTES_MAX


class Request(NamedTuple):
    """Message of a stage, decoded as far as the transform and the check of its batch need it. The field names are
    columns."""

    flow_id: str = ""
    trace: str = ""
    message_id: str = ""
    interactive: bool = False
    state: str = ""
    """State of the stage's endpoint, as JSON."""
    properties: str = ""
    """Properties of the flow, as JSON."""
    message: str = ""
    """Message of the stage, as JSON."""
    refused: str | None = None
    """Reason why the stage cannot take the message; None if it can."""


def parse_request(queue: str, accepted_ms: int, body: bytes | None) -> Request:
    """Decode a message that was in `queue`. A message that is not one of stages, or of another version, is refused.

    Raises: ConfigurationError if no stage has this queue
    """
    check_queue(queue)
    try:
        envelope = envelope_of(body, accepted_ms)
        state, message = bytes(envelope.state).decode(), bytes(envelope.message).decode()
    except NotDecoded as error:
        return Request(refused=str(error))
    except UnicodeDecodeError as error:
        return Request(refused=f"the body is not a message of stages: {error}")
    flow, properties = envelope.flow, msgspec.json.encode(envelope.flow.properties).decode()
    return Request(flow.id, flow.trace, envelope.id, flow.interactive, state, properties, message)


def envelope_of(body: bytes | None, accepted_ms: int) -> Envelope:
    """Decode the envelope in a body. Each occurrence of a recurring message has ids of its own, made of the time at
    which the broker accepted it.

    Raises: NotDecoded if the body is not an envelope of this version
    """
    envelope = decode_envelope(body or b"")
    return as_occurrence(envelope, str(accepted_ms)) if envelope.recurring else envelope


@lru_cache(maxsize=1000)
def check_queue(queue: str) -> str:
    """Return the endpoint of the stage that has this queue.

    Raises: ConfigurationError if no stage may have it, or if it is the queue of failed requests
    """
    endpoint = endpoint_of_any_stage(queue)
    if endpoint is None or queue == later_stage_queue(endpoint, FAILURE_STAGE):
        raise ConfigurationError(
            f"queue {queue} is not the queue of a stage that a job can be: read the queue ENDPOINT, or "
            f"ENDPOINT.stage.NAME of a stage other than {FAILURE_STAGE}"
        )
    return endpoint


def cause_in_stage(reason: str, queue: str, job: str) -> str:
    """Return the cause for which a request is rejected, as a service words it: the reason, the stage and the job."""
    end = f"\nin stage {queue}, by {job}"
    return reason.encode(errors="replace")[: CAUSE_BYTES_MAX - len(end.encode())].decode(errors="ignore") + end
