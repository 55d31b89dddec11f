"""Flow: the object by which a stage sends requests, replies, continues its flow, or starts other flows.

    request           send a request to an endpoint; its reply goes to the next stage, with the current state
    reply             reply to the caller of this endpoint; a stage may also return its reply
    next              continue with the next stage; in `on_failure`, with the stage that waits for the reply
    next_direct       continue with the next stage in this transaction, without a message
    goto              continue with another endpoint, which replies in place of this one
    send, publish     start another flow, which runs concurrently with this flow

A stage uses at most one of the first five calls, and may repeat only `request`. The messages of all calls are sent
after the stage has returned. If the stage fails, none is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, Unpack

import msgspec

from truenext.flows.envelope import CALLS_MAX, EMPTY, TOO_MANY_CALLS, Envelope, FlowContext, ReplyTo, continued
from truenext.stage.core.codec import check_properties, type_name
from truenext.stage.core.definitions import Endpoint, Stage, Topic
from truenext.stage.core.errors import FlowError, Reject
from truenext.stage.core.flow_start import (
    FlowOptions,
    check_endpoint,
    check_topic,
    child_flow_context,
    delay_of,
    encode_first_message,
    start_flow,
    state_for,
)
from truenext.stage.core.outbox_unit import Delay
from truenext.stage.core.output import Output, OutputMessage, checked_attachments
from truenext.stage.core.signature import is_assignable
from truenext.stage.core.stashed_flow import StashedFlow

WAITING_MAX: Final = 35
"""Maximum depth of nested requests in one flow: number of pending replies, including the reply of the flow itself. A
deeper flow most likely has an endpoint that requests itself."""
UNSET: Final = object()

M = TypeVar("M")
R = TypeVar("R")
P = ParamSpec("P")


class FlowSource(msgspec.Struct, frozen=True):
    """Origin of a flow's message in this process: a delivery, or `Initiation.unstash`."""

    expires_ms: int = 0
    attempt: int = 1
    is_unstashed: bool = False


class Flow:
    """A flow, as one of its stages sees it: the stage continues the flow by its methods, or starts other flows.

    A stage uses at most one of `request`, `reply`, `next`, `next_direct` and `goto`, and may repeat only `request`. If
    it uses none, the flow ends. The messages of all calls are sent after the stage has returned. If the stage fails,
    none is sent. In one flow, at most 35 replies may be pending, one within the other, and at most 200 messages may
    follow one another, not counting replies.
    """

    def __init__(
        self,
        stage: Stage,
        envelope: Envelope,
        output: Output,
        now_ms: int,
        source: FlowSource,
        *,
        previous: Flow | None = None,
    ) -> None:
        """Create the flow for one message. `previous` is the flow of the stage that has called `next_direct`; None if
        the message was delivered.

        Raises: NotDecoded if the message or its state is not of the type that the stage takes
        """
        self._stage = stage
        self._envelope = envelope
        self._output = output
        self._now_ms = now_ms
        self._source = source
        self._continuation = ""
        self._failed_request: ReplyTo | None = None
        """Request that has failed, in the stage of `on_failure`; otherwise None."""
        self.next_stage: Stage | None = stage.next_stage
        """Stage with which `next` continues; None if there is none."""
        if stage.handles_failures:
            *waiting, self._failed_request = envelope.waiting
            self._envelope = msgspec.structs.replace(envelope, waiting=waiting)
            self.next_stage = stage.endpoint.stage_at(self._failed_request.to)
        self.direct_message: object = UNSET
        """Message that `next_direct` was given for the next stage; UNSET without such a call."""
        context = envelope.flow
        self.id: str = context.id
        """Id of the flow. It is the same in all stages of the flow."""
        self.trace: str = context.trace
        """Human-readable name of the flow."""
        self.message_id: str = envelope.id
        """Id of the message. It is the same in every delivery."""
        self.attempt: int = source.attempt
        """Number of the attempt: 1 plus the failures that count against the message."""
        self.interactive: bool = context.interactive
        """True if a caller waits for the flow. Its messages have priority 9."""
        self.persistent: bool = context.persistent
        """True if messages of the flow survive a crash of the broker."""
        self.sender: str = envelope.sender
        """Service and queue of the stage that sent the message."""
        self.properties: dict[str, Any] = dict(context.properties)
        """Properties of the flow: values that JSON can hold. All later stages see what a stage sets here."""
        self.attachments: Mapping[str, bytes] = envelope.attachments
        """Attachments of this message: bytes by name."""
        self.state: Any = None
        """State of the endpoint: the object that the function takes as its second parameter; None if the endpoint has
        no state."""
        codec = stage.endpoint.state
        if codec is not None:
            self.state = codec.decode(envelope.state) if previous is None else previous.state
        self.message: Any = stage.takes.decode(envelope.message) if previous is None else previous.direct_message
        """Decoded message: the object that the function takes as its first parameter."""

    def __repr__(self) -> str:
        return f"<Flow {self.trace} at {self._stage.queue}>"

    # ---- Continuation ----

    def request(self, to: Endpoint[M, Any], message: M, *, attachments: Mapping[str, bytes] | None = None) -> None:
        """Send a request to an endpoint. The reply goes to the next stage, with the current state. After several
        requests, the next stage runs once for each reply.

        Args:
            to: Endpoint whose reply the next stage takes.
            message: Message of the type that the endpoint takes.
            attachments: Bytes by name, which only this message carries.

        Raises: FlowError if this stage is the last, the next stage does not take that reply, or an argument is invalid;
        Reject if the flow exceeds a limit
        """
        check_endpoint(to)
        next_stage = self._next_stage("request")
        if to.replies is None:
            raise FlowError(f"{to.name} replies nothing: send to it instead")
        if not is_assignable(next_stage.signature.message, to.replies.type):
            raise FlowError(
                f"{to.name} replies {type_name(to.replies.type)}, but the next stage, {next_stage.name}, takes "
                f"{type_name(next_stage.signature.message)}"
            )
        failure = self._stage.endpoint.failure_destination
        waiting = [*self._envelope.waiting, ReplyTo(next_stage.destination, self._state(), failure)]
        if len(waiting) > WAITING_MAX:
            raise Reject(
                f"more than {WAITING_MAX} stages wait for a reply in this flow: check whether an endpoint calls itself"
            )
        self._continue("request", to.destination, to.takes.encode(message), EMPTY, waiting, attachments)

    def reply(self, message: object, *, attachments: Mapping[str, bytes] | None = None) -> None:
        """Reply to the caller of this endpoint. If no caller waits, the reply is dropped. A stage may return its reply
        instead.

        Args:
            message: Reply, of the endpoint's type of reply.
            attachments: Bytes by name, which only this message carries.

        Raises: FlowError if the endpoint does not reply, or replies another type
        """
        endpoint = self._stage.endpoint
        if endpoint.replies is None:
            raise FlowError(
                f"{endpoint.name} replies nothing, but {self._stage.name} has replied {type_name(type(message))}"
            )
        encoded = endpoint.replies.encode(message)
        if not self._envelope.waiting:
            self._set_continuation("reply")
            return
        *waiting, last = self._envelope.waiting
        self._continue("reply", last.to, encoded, last.state, waiting, attachments)

    def next(self, message: object, *, delay: float = 0, attachments: Mapping[str, bytes] | None = None) -> None:
        """Continue with the next stage, with the current state.

        Args:
            message: Message of the type that the next stage takes.
            delay: Seconds until the next stage may run, 0 or more. The time begins when the broker has the message.
                Until then the flow occupies no worker.
            attachments: Bytes by name, which only this message carries.

        Raises: FlowError if this stage is the last, the next stage takes another type, or the flow expires before
        `delay` is over; Reject if the flow exceeds a limit
        """
        next_stage = self._next_stage("next")
        encoded = next_stage.takes.encode(message)
        waiting = self._envelope.waiting
        due = None if delay == 0 else delay_of(delay)
        expires_ms = self._source.expires_ms
        if due is not None and expires_ms and self._now_ms + due.ms >= expires_ms:
            left_s = max(expires_ms - self._now_ms, 0) / 1000
            raise FlowError(
                f"a delay of {delay:g} s ends after the flow, which expires in {left_s:g} s: use a shorter "
                "delay, or a longer ttl when the flow starts"
            )
        self._continue("next", next_stage.destination, encoded, self._state(), waiting, attachments, due)

    def next_direct(self, message: object) -> None:
        """Run the next stage when this stage has returned, in the same transaction and without a message. The stages of
        one transaction are all `async` or all plain. If one of them takes a session, so does the first.

        Args:
            message: Object of the type that the next stage takes.

        Raises: FlowError if this stage is the last, the next stage takes another type, or the flow comes from
        `Initiation.unstash`
        """
        if self._source.is_unstashed:
            raise FlowError("no stage runs here, so none can follow directly: use next instead of next_direct")
        self._next_stage("next_direct").takes.encode(message)
        self._set_continuation("next_direct")
        self.direct_message = message

    def goto(
        self,
        to: Endpoint[M, Any],
        message: M,
        *,
        state: object = None,
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        """Continue with another endpoint, which replies in place of this endpoint.

        Args:
            to: Endpoint that continues the flow. If a caller waits for a reply, `to` must reply the
                same type as this endpoint.
            message: Message of the type that the endpoint takes.
            state: State for the first stage of `to`; None is the default of the state's type.
            attachments: Bytes by name, which only this message carries.

        Raises: FlowError if `to` replies another type, or an argument is invalid; Reject if the flow exceeds a limit
        """
        check_endpoint(to)
        endpoint = self._stage.endpoint
        if self._envelope.waiting and not _has_compatible_reply(to, endpoint):
            raise FlowError(f"{to} and {endpoint} reply different types")
        encoded = to.takes.encode(message)
        self._continue("goto", to.destination, encoded, state_for(to, state), self._envelope.waiting, attachments)

    def for_next_stage(self) -> Flow:
        """Return the flow for the next stage, after `next_direct`."""
        envelope = msgspec.structs.replace(self._envelope, flow=self._flow_context, attachments={})
        next_stage = self._next_stage("next_direct")
        return Flow(next_stage, envelope, self._output, self._now_ms, self._source, previous=self)

    def check_replied(self) -> None:
        """Check a flow whose stage has returned None. Raises: FlowError if the stage must reply, and has neither
        replied nor continued"""
        if self._stage.signature.must_reply and not self._continuation:
            name, replied = self._stage.name, type_name(self._stage.signature.reply)
            raise FlowError(
                f"{name} must return {replied}, but returned None and neither replied nor continued the flow: return "
                f"{replied}, or annotate `-> {replied} | None` if the flow may end here"
            )

    def _set_continuation(self, action: str) -> None:
        if self._continuation and not (self._continuation == action == "request"):
            raise FlowError(
                f"{self._stage.queue} has called {self._continuation} already, and cannot call {action} as well: a "
                "stage requests, replies, continues with the next stage or goes to another endpoint"
            )
        self._continuation = action

    def _next_stage(self, action: str) -> Stage:
        next_stage, endpoint = self.next_stage, self._stage.endpoint
        if next_stage is None and self._failed_request is not None:
            raise FlowError(
                f"{endpoint.name} no longer has the stage {self._failed_request.to} that waits for the reply: "
                f"{self._stage.name} cannot call {action}"
            )
        if next_stage is None:
            raise FlowError(f"{self._stage.name} is the last stage of {endpoint.name}: it cannot call {action}")
        return next_stage

    def _state(self) -> msgspec.Raw:
        codec = self._stage.endpoint.state
        return EMPTY if codec is None else codec.encode(self.state)

    @property
    def _flow_context(self) -> FlowContext:
        """Context of the flow, with the current properties. Raises: FlowError if JSON does not preserve one of the
        properties"""
        check_properties(self.properties)
        return msgspec.structs.replace(self._envelope.flow, properties=dict(self.properties))

    def _continue(
        self,
        kind: str,
        destination: str,
        message: msgspec.Raw,
        state: msgspec.Raw,
        waiting: list[ReplyTo],
        attachments: Mapping[str, bytes] | None,
        delay: Delay | None = None,
    ) -> None:
        if self._envelope.calls + (kind != "reply") > CALLS_MAX:
            raise Reject(TOO_MANY_CALLS)
        # Checked before the continuation is set: the stage may catch the error, and continue in another way.
        context, checked = self._flow_context, checked_attachments(attachments)
        self._set_continuation(kind)
        envelope = continued(
            self._envelope,
            kind=kind,
            id=self._output.new_id(),
            sender=self._output.sender,
            flow=context,
            message=message,
            state=state,
            waiting=waiting,
            attachments=checked,
        )
        self._output.outgoing.append(OutputMessage(destination, envelope, self._source.expires_ms, delay=delay))

    # ---- Other flows ----

    def send(
        self,
        to: Endpoint[M, R],
        message: M,
        *,
        trace: str = "",
        reply_to: Endpoint[R, Any] | Topic[R] | None = None,
        reply_state: object = None,
        state: object = None,
        **options: Unpack[FlowOptions],
    ) -> str:
        """Start another flow, in the same transaction, and return its id. It runs concurrently with this flow.

        Args:
            to: Endpoint that handles the flow first.
            message: Message of the type that the endpoint takes.
            trace: Human-readable name of the new flow. In the flow `this`, `child` becomes `this|child`, an empty text
                becomes `this`, and `!child` becomes `child`.
            reply_to: Endpoint or topic that gets the new flow's reply; None drops the reply.
            reply_state: State for the first stage of `reply_to`; None is the default of the state's type.
            state: State for the first stage of `to`; None is the default of the state's type.
            **options: Options of the new flow (`FlowOptions`). It inherits `interactive`, `persistent` and `properties`
                of this flow.

        Raises: FlowError if an argument is invalid
        """
        check_endpoint(to)
        context = child_flow_context(self._output, self._now_ms, trace, self._flow_context, options)
        first = encode_first_message(to, message, state=state, reply_to=reply_to, reply_state=reply_state)
        return start_flow(self._output, context, first, options, self.message_id)

    def publish(self, to: Topic[M], message: M, *, trace: str = "", **options: Unpack[FlowOptions]) -> str:
        """Start a flow with each connected subscriber of a topic, in the same transaction, and return the id that these
        flows share.

        Args:
            to: Topic to which the message is published.
            message: Message of the type that the topic takes.
            trace: Human-readable name of the new flow. In the flow `this`, `child` becomes `this|child`, an empty text
                becomes `this`, and `!child` becomes `child`.
            **options: Options of the new flow (`FlowOptions`). It inherits `interactive`, `persistent` and `properties`
                of this flow.

        Raises: FlowError if an argument is invalid
        """
        check_topic(to)
        context = child_flow_context(self._output, self._now_ms, trace, self._flow_context, options)
        return start_flow(self._output, context, encode_first_message(to, message), options, self.message_id)

    # ---- After this stage ----

    def after_commit(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function after the commit, outside of the transaction. It is called at most once, and not after a
        crash. An exception of the function is logged, and does not affect the commit.

        Args:
            function: Function to call. The worker waits for it. An `async` function is cancelled after 30 seconds. A
                plain function runs in a thread if the stage is a plain function, otherwise in the event loop.
            *args: Positional arguments of `function`.
            **kwargs: Keyword arguments of `function`.
        """
        self._output.after_commit.append(partial(function, *args, **kwargs))

    def stash(self) -> bytes:
        """Return bytes from which `Initiation.unstash` can continue the flow later, as from this stage, any number of
        times. `stash` itself sends nothing.

        Raises: FlowError if JSON does not preserve the state or a property
        """
        now = msgspec.structs.replace(self._envelope, flow=self._flow_context, state=self._state())
        if self._failed_request is not None:
            now = msgspec.structs.replace(now, waiting=[*now.waiting, self._failed_request])
        expires_ms = self._source.expires_ms
        return msgspec.json.encode(StashedFlow(stage=self._stage.queue, expires_ms=expires_ms, envelope=now))


def _has_compatible_reply(other: Endpoint[Any, Any], endpoint: Endpoint[Any, Any]) -> bool:
    if endpoint.replies is None or other.replies is None:
        return endpoint.replies is None
    return is_assignable(endpoint.replies.type, other.replies.type)
