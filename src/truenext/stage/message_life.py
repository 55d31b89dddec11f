"""Life of a message in a stage: its current state, and the report of its execution to events, interceptors and logs."""

from __future__ import annotations

from truenext.client.tasks.connection import Message
from truenext.clock import monotonic, time_ns
from truenext.flows.envelope import Envelope
from truenext.flows.events import ExecutionOutcome, GiveUpReason
from truenext.stage.context import ServiceContext
from truenext.stage.core.definitions import Stage
from truenext.stage.interceptors.interceptor import Execution, ExecutionResult, PoolName
from truenext.stage.interceptors.metrics import StageCounters
from truenext.stage.message_state import (
    COMMITTED,
    OUTCOMES,
    RECEIVED,
    REPEATED,
    RETURNED,
    RUNNING,
    TRANSITIONS,
    MessageState,
)


class MessageLife:
    def __init__(self, context: ServiceContext, stage: Stage, pool: PoolName, message: Message) -> None:
        self._chain = context.chain
        self._service_counters = context.counters
        self.counters: StageCounters | None = None
        """Counters of the stage; None before `record_start`, or if hooks count."""
        self._waited_s: float | None = None
        self._events = context.events
        self._stage = stage
        self._pool: PoolName = pool
        self._message = message
        self.state: MessageState = RECEIVED
        self.execution: Execution | None = None
        """Facts about this execution, for interceptors; None if no interceptor needs them."""
        self._event_number = 0
        """Number of the recorded `started` event; 0 if events are not recorded."""
        self._trace = ""
        self._started_at = monotonic()
        self._returned_at = 0.0
        """Monotonic time at which the current run of the stage returned; 0 before its return."""

    def enter(self, state: MessageState) -> None:
        """Enter a state. Raises: AssertionError if `state` cannot follow the current state"""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"a message cannot become {state.value} while it is {self.state.value}")
        if self.counters is not None and (state is RUNNING) is not (self.state is RUNNING):
            self.counters.add_running(1 if state is RUNNING else -1)
        self.state = state
        if state is RUNNING:
            self._returned_at = 0.0
        elif state is RETURNED:
            self._returned_at = monotonic()

    def record_start(self, envelope: Envelope) -> None:
        chain, message, flow = self._chain, self._message, envelope.flow
        self._trace = flow.trace
        if self._events is not None:
            broker = message._session.core.client.store_id
            self._event_number = self._events.add_started(self._stage, message, envelope, broker)
        has_hooks = chain.has_around or chain.has_sending or chain.has_ended
        if self._service_counters is not None:
            stage = self._stage
            self.counters = self._service_counters.of_stage(stage.endpoint.name, stage.name, self._pool)
        if has_hooks or self.counters is not None:
            self._waited_s = _waited_s(message)
        if has_hooks:
            self.execution = Execution(
                endpoint=self._stage.endpoint.name,
                stage=self._stage.name,
                queue=self._stage.queue,
                message_id=envelope.id,
                flow_id=flow.id,
                trace=flow.trace,
                attempt=message.attempts + 1,
                interactive=flow.interactive,
                pool=self._pool,
                waited=self._waited_s,
                size=len(message.body),
                carrier=envelope.carrier,
                interceptor_data={},
            )

    def record_sql_commit(self) -> None:
        if self._events is not None:
            self._events.add_sql_committed(self._event_number)

    def end(
        self, outcome: ExecutionOutcome, error: BaseException | None, given_up_for: GiveUpReason | None = None
    ) -> None:
        """Enter the last state, and report the outcome to events and interceptors. `given_up_for` is the reason if the
        message is given up."""
        is_committed = self.state in (COMMITTED, REPEATED)
        self.enter(OUTCOMES[outcome])
        execution = self.execution if self._chain.has_ended else None
        counters = self.counters
        if execution is None and counters is None and not self._event_number:
            return
        now = monotonic()
        returned_at = self._returned_at or now
        result = ExecutionResult(
            outcome=outcome,
            error=error,
            given_up_for=given_up_for,
            run=returned_at - self._started_at,
            commit=now - returned_at if is_committed else None,
            total=now - self._started_at,
        )
        if self._events is not None and self._event_number:
            self._events.add_ended(self._event_number, result)
        if counters is not None:
            counters.add_ended(self._message.attempts + 1, self._waited_s, result)
        if execution is not None:
            self._chain.ended(execution, result)

    def log_fields(self) -> dict[str, object]:
        return {
            "stage": self._stage.queue,
            "trace": self._trace,
            "message_id": self._message.message_id,
            "attempt": self._message.attempts + 1,
        }


def _waited_s(message: Message) -> float | None:
    """Return the seconds since the message's arrival in its queue; None if a program may have received it before."""
    arrived_ms = message.timestamp_ms
    if message.redelivered or not arrived_ms:
        return None
    # The clocks of two machines may differ.
    return max(0.0, time_ns() / 1e9 - arrived_ms / 1000)
