"""Tests that the broker survives control requests with invalid bodies."""

import pytest

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, bodies

pytestmark = LIMITS

ANSWERS = "/temp-queue/answers"
FIELDS = {
    "release": b"subscriptions",
    "producer": b"producer",
    **dict.fromkeys(("pause", "resume", "redrive", "move", "purge", "scheduled", "unschedule"), b"queue"),
}
WRONG = {
    "no UTF-8": b'{"%b":["\xff"]}',
    "no UTF-8, as a text": b'{"%b":"\xff"}',
    "no UTF-8, as a name": b'{"%b":"a","\xff":1}',
    "half a character": b'{"%b":"\\ud800"}',
    "lists in lists": b'{"%b":' + b"[" * 20_000,
    "lists in lists, of no field": b'{"x%b":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "nothing": b"",
    "no JSON": b"queue=%b",
    "a number": b"17",
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("verb", FIELDS)
def test_a_control_request_with_an_invalid_body_is_refused_and_ends_nothing_else(
    broker: BrokerProcess, queue: str, verb: str, body: bytes
) -> None:
    """Regression: a text that was no UTF-8 ended the broker."""
    other = broker.connect()
    other.send(queue, b"still there", confirmed=True)
    client = broker.connect(headers=TRUENEXT_CLIENT)
    client.send_frame("SUBSCRIBE", {"id": "a", "destination": ANSWERS}, confirmed=True)
    field = FIELDS[verb]
    content = body % field if b"%b" in body else body
    answered = {} if verb == "release" else {"reply-to": ANSWERS}
    client.send_frame("SEND", {"destination": f"/control/{verb}"} | answered, content)
    assert client.next_error().headers["truenext-code"] == "control-request"
    other.subscribe(queue)
    assert bodies(other.only(1)) == ["still there"]


@pytest.mark.parametrize("names", [b'["\\ud800"]', b"[1]", b"p", b"[" * 20_000])
def test_producers_to_forget_that_are_no_list_of_names_are_refused(broker: BrokerProcess, names: bytes) -> None:
    client = broker.connect()
    client.write(b"DISCONNECT\ntruenext-forget:%b\n\n\0" % names.replace(b"\\", b"\\\\"))
    assert client.error().headers["truenext-code"] == "header"
