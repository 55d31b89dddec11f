"""Tests of tracing: a flow through several processes is one trace; spans follow the conventions of OpenTelemetry."""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.stages.executions import ending, execution, send
from truenext.flows.events import ExecutionOutcome
from truenext.stage.interceptors.tracing import Tracing


class Process:
    """One process of a flow, with an exporter of its own."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(self.provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def start_flow(self) -> dict[str, str]:
        """Start a flow with a message to `order.place`, and return its carrier."""
        outgoing = send("order.place")
        self.tracing.sending(None, outgoing)
        return outgoing.carrier

    def handle(
        self, carrier: Mapping[str, str], outcome: ExecutionOutcome = "completed", error: BaseException | None = None
    ) -> dict[str, str]:
        """Handle a message and send one to `price` after the stage has returned; return its carrier."""
        here = execution(carrier=carrier)
        with self.tracing.around(here), self.provider.get_tracer("sql").start_as_current_span("SELECT"):
            pass
        outgoing = send()
        self.tracing.sending(here, outgoing)
        self.tracing.ended(here, ending(outcome, error))
        return outgoing.carrier


def identity(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def parent(span: ReadableSpan) -> tuple[int, int]:
    assert span.parent is not None
    return span.parent.trace_id, span.parent.span_id


def test_a_flow_through_three_processes_is_one_trace() -> None:
    web, shop, prices = Process(), Process(), Process()
    prices.handle(shop.handle(web.start_flow()))
    [started] = web.spans
    select, sent, processed = shop.spans
    assert started.parent is None
    assert parent(processed) == identity(started)
    assert parent(select) == identity(processed)
    assert parent(sent) == identity(processed)
    assert parent(prices.spans[-1]) == identity(sent)


def test_a_flow_that_begins_in_a_span_of_its_program_belongs_to_it() -> None:
    web = Process()
    with web.provider.get_tracer("http").start_as_current_span("POST /orders"):
        web.start_flow()
    sent, post = web.spans
    assert parent(sent) == identity(post)


def test_a_message_without_a_carrier_begins_a_trace_whatever_its_service_does() -> None:
    shop = Process()
    with shop.provider.get_tracer("service").start_as_current_span("serve"):
        shop.handle({})
    assert shop.spans[-2].parent is None


def test_spans_are_named_and_described_as_the_conventions_say() -> None:
    shop = Process()
    shop.handle(carrier := shop.start_flow())
    sent, _, _, processed = shop.spans
    assert (sent.name, sent.kind) == ("send order.place", SpanKind.PRODUCER)
    assert (processed.name, processed.kind) == ("process order.place", SpanKind.CONSUMER)
    assert [link.context.span_id for link in processed.links] == [identity(sent)[1]]
    assert set(carrier) == {"traceparent"}
    both = {
        "messaging.system": "truenext",
        "messaging.destination.name": "order.place",
        "messaging.message.id": "m1",
        "messaging.message.conversation_id": "f1",
        "messaging.message.body.size": 10,
        "truenext.trace": "order 7",
    }
    assert dict(sent.attributes or {}) == both | {
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
    }
    assert dict(processed.attributes or {}) == both | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "truenext.endpoint": "order",
        "truenext.stage": "place",
        "truenext.attempt": 1,
        "truenext.outcome": "completed",
    }


@pytest.mark.parametrize("outcome", ["failed", "rejected", "in doubt"])
def test_span_of_an_unsuccessful_execution_is_an_error_with_its_exception(outcome: ExecutionOutcome) -> None:
    shop = Process()
    shop.handle({}, outcome, ValueError("no such order"))
    span = shop.spans[-1]
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no such order")
    assert (span.attributes or {})["error.type"] == "builtins.ValueError"
    assert [event.name for event in span.events] == ["exception"]


@pytest.mark.parametrize("outcome", ["completed", "already processed", "released"])
def test_span_of_a_completed_or_released_execution_is_no_error(outcome: ExecutionOutcome) -> None:
    shop = Process()
    shop.handle({}, outcome, asyncio.CancelledError())
    assert shop.spans[-1].status.status_code is StatusCode.UNSET
    assert shop.spans[-1].events == ()


def test_a_message_that_came_to_no_run_has_no_span() -> None:
    shop = Process()
    shop.tracing.ended(execution(), ending("rejected"))
    assert shop.spans == ()


def test_invalid_carrier_starts_a_trace_of_its_own() -> None:
    shop = Process()
    shop.handle({"traceparent": "nonsense", "x": ""})
    assert shop.spans[-1].parent is None


def test_a_span_of_a_stage_is_not_current_when_it_has_ended() -> None:
    shop = Process()
    with shop.tracing.around(execution()):
        assert trace.get_current_span().is_recording()
    assert not trace.get_current_span().is_recording()


def test_two_runs_for_one_message_are_one_span() -> None:
    """Fixed: after a repetition in place, or a direct next stage, the first span was never ended."""
    shop = Process()
    here = execution()
    with shop.tracing.around(here):
        first = trace.get_current_span().get_span_context()
    with shop.tracing.around(msgspec.structs.replace(here, stage="second")):
        assert trace.get_current_span().get_span_context() == first
    shop.tracing.ended(here, ending())
    assert [each.name for each in shop.spans] == ["process order.place"]
