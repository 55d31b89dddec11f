"""Tests of the pure part of a stage as a Spark job: what becomes of a request and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from tests.spark.stage_job.messages import QUEUE, request, row
from truenext.errors import ConfigurationError
from truenext.flows.envelope import CALLS_MAX, Envelope, ReplyTo, encode_envelope
from truenext.model.limits import CAUSE_BYTES_MAX
from truenext.spark.sink.rows import encode_rows
from truenext.spark.stage_job import answers as answers_module
from truenext.spark.stage_job.answers import NO_ANSWER, SINK_COLUMNS, BadAnswer, Result, make_result
from truenext.spark.stage_job.requests import cause_in_stage, check_queue, parse_request
from truenext.spark.stage_job.tasks import (
    REQUEST_COLUMNS,
    RESULT_COLUMNS,
    SOURCE_COLUMNS,
    add_requests,
    make_results,
)
from truenext.stage import Flow, Service
from truenext.stage.broker_transaction import encode_heads
from truenext.stage.core.flow import FlowSource
from truenext.stage.core.output import Output

TOPIC = "/topic/replies.shop.1"
CALLER = ReplyTo(TOPIC, report=TOPIC)
HANDLED = ReplyTo(
    "/queue/order.place.stage.bill", msgspec.Raw(b'{"id":"o1"}'), failure="/queue/order.place.stage.on_failure"
)


@dataclass
class Ask:
    item: str
    count: int


@dataclass
class Quote:
    cents: int


service = Service("shop")
quote = service.endpoint("price.quote", Ask, Quote, state=dict[str, int])


@quote.stage(name="first")
def first(ask: Ask, state: dict[str, int], flow: Flow) -> None:
    flow.next(ask)


@quote.stage(name="second")
def second(ask: Ask, state: dict[str, int]) -> Quote:
    return Quote(ask.count)


STATE = msgspec.Raw(b'{"tries":3}')
REQUESTS = [
    request(1, [CALLER], interactive=True, properties={"tenant": "a"}, state=STATE),
    request(2, [CALLER, HANDLED], persistent=False, state=STATE, calls=17, carrier={"traceparent": "00-1-2-01"}),
    request(3, [HANDLED], state=STATE, attachments={"file": b"x"}),
]


@pytest.mark.parametrize("envelope", REQUESTS, ids=["interactive", "nested", "attached"])
@pytest.mark.parametrize("is_reply", [True, False], ids=["reply", "next"])
def test_answer_is_the_message_that_a_service_would_send(envelope: Envelope, is_reply: bool) -> None:
    stage = quote.stages_in_order[is_reply]
    output = Output(f"{envelope.id} {stage.queue}", f"spark {stage.queue}")
    flow = Flow(stage, envelope, output, 0, FlowSource(expires_ms=1_800_000_000_000))
    if is_reply:
        flow.reply(Quote(5))
    else:
        flow.next(Ask("tea", 5))
    (message,) = output.outgoing
    answer = '{"cents":5}' if is_reply else '{"item":"tea","count":5}'
    given = row(envelope, answer=answer, queue=stage.queue, expires_ms=1_800_000_000_000)
    result = make_result(given, "" if is_reply else "second", "query 1")
    (expected,) = encode_heads([message.encode(envelope.carrier)])
    found = b"".join(encode_rows(_arrow(result), None))
    head = expected[0] + (b"" if given["priority"] == 9 or envelope.flow.interactive else b"priority:4\n")
    assert sorted(found.partition(b"\n\n")[0].splitlines()) == sorted(
        [*head.splitlines(), b"transaction:publish", b"content-length:%d" % len(expected[1])]
    )
    assert result.body == expected[1]


def _arrow(result: Result) -> pa.RecordBatch:
    """Return a result as the sink gets it."""
    columns = {name: value for name, value in result._asdict().items() if name in SINK_COLUMNS}
    types = {"headers": pa.map_(pa.string(), pa.string()), "body": pa.binary()}
    arrays = {name: pa.array([value], types.get(name)) for name, value in columns.items()}
    expires = pa.array([result.expires_ms], pa.timestamp("ms", tz="UTC"))
    return pa.RecordBatch.from_pydict({**arrays, "expires": expires})


def test_reply_without_a_caller_is_dropped() -> None:
    result = make_result(row(request(1), answer="{}"), "", "query 1")
    assert (result.queue, result.message_id, result.attempt, result.deliveries) == (None, request(1).id, 2, 2)


def test_request_without_an_answer_is_rejected_in_its_queue_as_it_came() -> None:
    envelope = request(1, [CALLER, HANDLED])
    result = make_result(row(envelope, priority=7, expires_ms=99), "", "spark query q batch 3")
    assert (result.queue, result.body, result.priority) == (f"/queue/{QUEUE}", encode_envelope(envelope), 7)
    assert (result.expires_ms, result.headers, result.correlation_id) == (99, [("colour", "red")], "from the header")
    assert (result.report_to, result.report_id) == (TOPIC, envelope.flow.id)
    assert result.on_failure == "/queue/order.place.stage.on_failure"
    assert result.reject == f"{NO_ANSWER}\nin stage {QUEUE}, by spark query q batch 3"
    frame = b"".join(encode_rows(_arrow(result), None))
    assert b"truenext-reject:true\n" in frame and b"truenext-cause:NoAnswer\\c the transform" in frame


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no JSON", "the body is not a message of stages"),
        (
            encode_envelope(request(1, version=1)),
            "the body has version 1 of messages of stages, and this truenext reads",
        ),
        (encode_envelope(request(1, [ReplyTo("/queue/a,/queue/b")])), "is not a single queue or topic"),
    ],
)
def test_body_that_a_service_could_not_read_is_rejected_with_the_same_reason(body: bytes, reason: str) -> None:
    result = make_result(row(body), "", "query 1")
    assert result.reject is not None and reason in result.reject and result.is_unreadable
    assert result.message_id == "from the header"


def test_answer_that_would_be_too_long_a_chain_or_too_large_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    last = request(1, [CALLER], calls=CALLS_MAX)
    assert "more than 200 messages" in (make_result(row(last, answer="{}"), "bill", "query 1").reject or "")
    assert make_result(row(last, answer="{}"), "", "query 1").reject is None, "replies do not count"
    monkeypatch.setattr(answers_module, "BODY_BYTES_MAX", 300)
    large = make_result(row(request(1, [CALLER]), answer=f'"{"x" * 300}"'), "", "query 1")
    assert "and a message from Spark has 300 at most" in (large.reject or "")


def _of_flow(id: str) -> Envelope:
    envelope = request(1, [CALLER])
    return msgspec.structs.replace(envelope, flow=msgspec.structs.replace(envelope.flow, id=id))


@pytest.mark.parametrize(
    "given",
    [
        row(request(1, [ReplyTo("/queue/Spark.sink.main.other.0")]), answer="{}"),
        row(request(1, [ReplyTo("/queue/bills", report="/queue/a b"), CALLER]), answer="{}"),
        row(request(1, [ReplyTo("/queue/bills", failure="/queue/a b"), CALLER]), answer="{}"),
        row(_of_flow("")),
        row(_of_flow("a\0")),
        row(encode_envelope(request(1)).replace(b"item 1", b"\xff")),
        row(b"?", reply_to="/temp-queue/1"),
        row(b"?", headers=[(f"name-{number}", "") for number in range(109)]),
        row(b"?", headers=[("a", "b"), ("", "c")]),
    ],
)
def test_request_whose_addresses_or_headers_cannot_be_sent_is_rejected_and_fails_no_batch(
    given: dict[str, Any],
) -> None:
    result = make_result(given, "", "job")
    assert result.reject and result.queue == f"/queue/{QUEUE}" and result.body == given["body"]
    assert len(list(encode_rows(_arrow(result), None))) == 1


def test_rejected_request_keeps_the_headers_that_can_be_sent() -> None:
    given = row(b"?", headers=[("a", "b"), ("", "c")], reply_to="/queue/answers")
    result = make_result(given, "", "job")
    assert result.headers == [("a", "b")]
    assert result.reply_to == "/queue/answers"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"answers": 2}, "has returned 2 rows for one request of flow 'flow 1'"),
        ({"sequence": None, "answers": 3}, "has returned 3 rows whose column flow is null"),
    ],
)
def test_doubled_or_lost_flow_fails_the_batch(more: dict[str, int], text: str) -> None:
    with pytest.raises(BadAnswer, match=text):
        make_result({**row(request(1), answer="{}"), **more}, "", "query 1")


@pytest.mark.parametrize(
    "queue", ["DLQ.order", "Spark.a", "a.stage.on_failure", "Consumer.a.VirtualTopic.b", "a/b", "a..b"]
)
def test_queue_that_is_no_stages_is_refused_in_one_sentence(queue: str) -> None:
    with pytest.raises(
        ConfigurationError, match="is not the queue of a stage that a job can be: read the queue ENDPOINT"
    ):
        parse_request(queue, 0, encode_envelope(request(1)))
    assert (check_queue("order.place"), check_queue("order.place.stage.reserve")) == ("order.place", "order.place")


def test_occurrences_of_a_recurring_message_have_ids_of_their_own() -> None:
    body = encode_envelope(request(1, recurring=True))
    found = {parse_request(QUEUE, accepted_ms, body).message_id for accepted_ms in (1, 1, 2)}
    assert len(found) == 2


def test_long_reason_leaves_room_for_the_stage_and_the_job() -> None:
    result = make_result(row(request(1, [CALLER], calls=CALLS_MAX), answer="{}"), "x", "j" * 100)
    assert result.reject is not None and result.reject.endswith("j" * 100)
    cause = cause_in_stage("é" * 5000, QUEUE, "job")
    assert len(cause.encode()) <= CAUSE_BYTES_MAX and cause.endswith(f"\nin stage {QUEUE}, by job")


def test_tasks_apply_both_steps_to_batches_with_the_declared_columns() -> None:
    rows = [row(request(number, [CALLER])) for number in range(3)]
    source, added, of_results = (
        [column.split()[0].strip("`") for column in columns.split(", ")]
        for columns in (SOURCE_COLUMNS, REQUEST_COLUMNS, RESULT_COLUMNS)
    )
    map_type = pa.map_(pa.string(), pa.string())
    lists = {name: pa.array([each[name] for each in rows], map_type if name == "headers" else None) for name in rows[0]}
    batch = pa.RecordBatch.from_pydict({name: lists[name] for name in source})
    (parsed,) = add_requests(iter([batch]))
    (results,) = make_results("", "query 1", iter([pa.RecordBatch.from_pydict(lists)]))
    assert parsed.to_pylist() == [{name: each[name] for name in parsed.schema.names} for each in rows]
    assert [each["queue"] for each in results.to_pylist()] == [f"/queue/{QUEUE}"] * 3
    assert (parsed.schema.names, results.schema.names) == ([*source, *added], of_results)
