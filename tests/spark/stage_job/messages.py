"""Messages of stages, and rows of a source with them, for tests of stages as Spark jobs."""

from __future__ import annotations

from typing import Any

import msgspec

from truenext.flows.envelope import VERSION, Envelope, FlowContext, ReplyTo, encode_envelope
from truenext.flows.message_ids import first_id
from truenext.spark.stage_job.answers import Result
from truenext.spark.stage_job.requests import parse_request

QUEUE = "price.quote"


def request(number: int, waiting: list[ReplyTo] | None = None, **fields: Any) -> Envelope:
    """Return the first message of flow `number`, by default without a caller. `fields` are those of the envelope and of
    its flow."""
    id = first_id(1_700_000_000_000, number.to_bytes(10))
    of_flow = {name: fields.pop(name) for name in ("interactive", "persistent", "properties") if name in fields}
    message = fields.pop("message", {"item": f"item {number % 3}", "count": number})
    return Envelope(
        version=fields.pop("version", VERSION),
        id=id,
        flow=FlowContext(id, f"flow {number}", 1_700_000_000_000, "shop", **of_flow),
        kind="request",
        sender="shop order.place",
        message=msgspec.Raw(msgspec.json.encode(message)),
        waiting=waiting or [],
        **fields,
    )


def row(
    envelope: Envelope | bytes, *, answer: str | None = None, answers: int | None = None, **more: Any
) -> dict[str, Any]:
    """Return the row of a request, and of its answer, as `make_result` takes it."""
    body = envelope if isinstance(envelope, bytes) else encode_envelope(envelope)
    source = {
        "queue": QUEUE,
        "sequence": 7,
        "priority": 4,
        "persistent": True,
        "group": None,
        "correlation_id": "from the header",
        "reply_to": None,
        "content_type": "application/json",
        "deliveries": 2,
        "attempts": 1,
        "accepted_ms": 1_700_000_000_500,
        "expires_ms": None,
        "headers": [("colour", "red")],
        "body": body,
        **more,
    }
    parsed = parse_request(source["queue"], source["accepted_ms"], body)
    count = answers if answers is not None else None if answer is None else 1
    return {**source, **parsed._asdict(), "answer": answer, "answers": count}


def sent(result: Result) -> Envelope:
    """Return the envelope that a result sends."""
    assert result.body is not None
    return msgspec.json.decode(result.body, type=Envelope)
