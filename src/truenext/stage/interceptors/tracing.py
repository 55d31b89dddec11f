"""Traces of OpenTelemetry: one trace for each flow, through all processes that it passes.

    send order.place            PRODUCER   start of the flow
    └── process order.place     CONSUMER   execution of its first stage, until the outcome of the message is known
        └── send price          PRODUCER   message of that stage
            └── process price   CONSUMER   ...

Each message carries the context of its sender's span, and the receiver's span continues that trace. The program's
propagators write the context, by default as `traceparent`. The SDK of the program exports the spans; without an SDK,
nothing is recorded. This module needs `truenext[opentelemetry]`.

Source: OpenTelemetry's semantic conventions for messaging spans, 1.44. These conventions require a link to the sender's
span. The sender's span may also be the parent, since each span here covers a single message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from truenext.stage.interceptors.interceptor import Execution, ExecutionResult, Interceptor, MessageToSend
from truenext.version import VERSION


class Tracing(Interceptor):
    """Interceptor that makes one trace of OpenTelemetry for each flow, through all processes that it passes."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        """Create the interceptor. It needs the package truenext[opentelemetry].

        Args:
            provider: Provider of the tracer; None is the program's global provider.
        """
        self._tracer = trace.get_tracer("truenext.stage", VERSION, provider)

    @contextmanager
    def around(self, execution: Execution) -> Iterator[None]:
        context: Context | None = execution.interceptor_data.get(self)
        if context is None:
            # Otherwise the stage runs again, or the next one in the same transaction: one span covers all runs.
            context = execution.interceptor_data[self] = self._start_span(execution)
        token = contexts.attach(context)
        try:
            yield
        finally:
            contexts.detach(token)

    def _start_span(self, execution: Execution) -> Context:
        sender = propagate.extract(execution.carrier)
        created = trace.get_current_span(sender).get_span_context()
        span = self._tracer.start_span(
            f"process {execution.queue}",
            context=sender,
            kind=SpanKind.CONSUMER,
            attributes={
                **_attributes("process", execution.queue, execution),
                "truenext.endpoint": execution.endpoint,
                "truenext.stage": execution.stage,
                "truenext.attempt": execution.attempt,
            },
            links=[Link(created)] if created.is_valid else [],
        )
        return trace.set_span_in_context(span, sender)

    def sending(self, execution: Execution | None, send: MessageToSend) -> None:
        # A message may be sent after its stage has returned, in another context.
        sender: Context | None = execution.interceptor_data.get(self) if execution is not None else None
        span = self._tracer.start_span(
            f"send {send.destination}",
            context=sender,
            kind=SpanKind.PRODUCER,
            attributes=_attributes("send", send.destination, send),
        )
        propagate.inject(send.carrier, trace.set_span_in_context(span, sender))
        span.end()

    def ended(self, execution: Execution, result: ExecutionResult) -> None:
        context: Context | None = execution.interceptor_data.pop(self, None)
        if context is None:
            return
        span = trace.get_current_span(context)
        span.set_attribute("truenext.outcome", result.outcome)
        # A release is not an error.
        if result.outcome not in ("completed", "already processed", "released"):
            error = result.error
            if error is not None:
                span.record_exception(error)
                span.set_attribute("error.type", f"{type(error).__module__}.{type(error).__qualname__}")
            span.set_status(Status(StatusCode.ERROR, str(error) if error is not None else result.outcome))
        span.end()


def _attributes(operation: str, destination: str, of: Execution | MessageToSend) -> dict[str, AttributeValue]:
    return {
        "messaging.system": "truenext",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": destination,
        "messaging.message.id": of.message_id,
        "messaging.message.conversation_id": of.flow_id,
        "messaging.message.body.size": of.size,
        "truenext.trace": of.trace,
    }
