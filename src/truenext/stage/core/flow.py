"""Flow, as one of its stages uses it: to send a request, to reply, to continue, or to start other flows.

    request           send a request to an endpoint; its reply goes to the next stage, with the current state
    reply             reply to the caller of this endpoint; a stage may also return its reply
    next              continue with the next stage
    next_direct       the same in this transaction, without a message
    goto              continue with another endpoint, which replies in place of this one
    send, publish     start another flow, concurrent with this one

A stage calls at most one of the first five, and only `request` several times. Nothing is sent before the stage has
returned: then all of it is sent, or, if the stage fails, nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, Unpack

import msgspec

from truenext.stage.core.codec import EMPTY, check_properties, type_name
from truenext.stage.core.definitions import Endpoint, Stage, Topic
from truenext.stage.core.envelope import VERSION, Envelope, FlowContext, ReplyTo, StashedFlow
from truenext.stage.core.errors import FlowError, Reject
from truenext.stage.core.flow_start import (
    FlowOptions,
    check_endpoint,
    check_topic,
    child_flow_context,
    encode_first_message,
    start_flow,
    state_for,
)
from truenext.stage.core.output import Output, OutputMessage, checked_attachments
from truenext.stage.core.signature import is_assignable

WAITING_MAX: Final = 35
"""Replies that may be pending in one flow, one within the other: of endpoints, and of the flow itself. If there are
more, an endpoint makes requests to itself."""
CALLS_MAX: Final = 200
"""Messages of one flow that may follow one another, replies not counted. If there are more, the flow goes in a
circle. The requests of one stage do not follow one another."""
UNSET: Final = object()

M = TypeVar("M")
R = TypeVar("R")
P = ParamSpec("P")


class FlowSource(msgspec.Struct, frozen=True):
    """Source of a flow's message: a delivery, or `Initiation.unstash`."""

    expires_ms: int = 0
    attempt: int = 1
    is_unstashed: bool = False


class Flow:
    """A flow, as one of its stages sees it.

    A stage calls at most one of `request`, `reply`, `next`, `next_direct` and `goto`, and only `request` several times;
    without a call the flow ends. Nothing is sent before the stage has returned: then all of it is sent, or, if the
    stage fails, nothing. At most 35 replies may be pending in one flow, one within the other, and at most 200 messages
    may follow one another, replies not counted.
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
        """Called by the service for each message. `previous` is the flow of the stage that called `next_direct`.

        Raises: NotDecoded
        """
        self._stage = stage
        self._envelope = envelope
        self._output = output
        self._now_ms = now_ms
        self._source = source
        self._continuation = ""
        self.direct_message: object = UNSET
        """Message for the next stage in this transaction, if `next_direct` was called."""
        context = envelope.flow
        self.id: str = context.id
        """Id of the flow, the same in all its stages."""
        self.trace: str = context.trace
        """Name of the flow for people."""
        self.message_id: str = envelope.id
        """Id of the message, the same however often it is delivered."""
        self.attempt: int = source.attempt
        """Number of the attempt: 1 if no consumer has failed with the message."""
        self.interactive: bool = context.interactive
        """True if a caller waits for the flow; its messages have priority 9."""
        self.persistent: bool = context.persistent
        """True if messages of the flow survive a crash of the broker."""
        self.sender: str = envelope.sender
        """Service and queue of the stage that sent the message."""
        self.properties: dict[str, Any] = dict(context.properties)
        """Properties of the flow, which JSON can hold; all later stages see what is set here."""
        self.attachments: Mapping[str, bytes] = envelope.attachments
        """Attachments of this message."""
        self.state: Any = None
        """State of the endpoint, if it has one; the object that the function takes."""
        codec = stage.endpoint.state
        if codec is not None:
            self.state = codec.decode(envelope.state) if previous is None else previous.state
        self.message: Any = stage.takes.decode(envelope.message) if previous is None else previous.direct_message
        """Decoded body of the message that the stage handles, as its function takes it."""

    def __repr__(self) -> str:
        return f"<Flow {self.trace} at {self._stage.queue}>"

    # ---- Continuation ----

    def request(self, to: Endpoint[M, Any], message: M, *, attachments: Mapping[str, bytes] | None = None) -> None:
        """Send a request to an endpoint; its reply goes to the next stage, with the current state. Several requests
        bring several replies, each as a message of its own.

        Args:
            to: Endpoint whose reply the next stage takes.
            message: Message of the type that the endpoint takes.
            attachments: Bytes by name, which go along with this message only.

        Raises: FlowError if there is no next stage, or it does not take the reply; Reject if the flow is too long
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
        waiting = [*self._envelope.waiting, ReplyTo(next_stage.destination, self._state())]
        if len(waiting) > WAITING_MAX:
            raise Reject(
                f"more than {WAITING_MAX} stages wait for a reply in this flow: check whether an endpoint calls itself"
            )
        self._continue("request", to.destination, to.takes.encode(message), EMPTY, waiting, attachments)

    def reply(self, message: object, *, attachments: Mapping[str, bytes] | None = None) -> None:
        """Reply to the caller of this endpoint; dropped if none waits. A stage may return its reply instead.

        Args:
            message: Reply of the type that the endpoint replies.
            attachments: Bytes by name, which go along with this message only.

        Raises: FlowError if the endpoint replies another type
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

    def next(self, message: object, *, attachments: Mapping[str, bytes] | None = None) -> None:
        """Continue with the next stage, with the current state.

        Args:
            message: Message of the type that the next stage takes.
            attachments: Bytes by name, which go along with this message only.

        Raises: FlowError if there is none, or it takes another type; Reject if the flow is too long
        """
        next_stage = self._next_stage("next")
        encoded = next_stage.takes.encode(message)
        self._continue("next", next_stage.destination, encoded, self._state(), self._envelope.waiting, attachments)

    def next_direct(self, message: object) -> None:
        """Continue with the next stage as soon as this one returns, in the same transaction and without a message.
        Stages that follow directly are all `async` or all plain, and the first takes the session if a later one does.

        Args:
            message: Object that the next stage takes, of its type.

        Raises: FlowError if there is none, or it takes another type, or no stage runs: after `unstash`
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
        """Continue with another endpoint, which replies in place of this one.

        Args:
            to: Endpoint with the same type of reply, if a caller waits for it.
            message: Message of the type that the endpoint takes.
            state: State for its first stage; None is the default of the state.
            attachments: Bytes by name, which go along with this message only.

        Raises: FlowError if it replies another type; Reject if the flow is too long
        """
        check_endpoint(to)
        endpoint = self._stage.endpoint
        if self._envelope.waiting and not _has_compatible_reply(to, endpoint):
            raise FlowError(f"{to} and {endpoint} reply different types")
        encoded = to.takes.encode(message)
        self._continue("goto", to.destination, encoded, state_for(to, state), self._envelope.waiting, attachments)

    def for_next_stage(self) -> Flow:
        """Return the flow as the next stage sees it in this same transaction."""
        envelope = msgspec.structs.replace(self._envelope, flow=self._flow_context, attachments={})
        next_stage = self._next_stage("next_direct")
        return Flow(next_stage, envelope, self._output, self._now_ms, self._source, previous=self)

    def check_replied(self) -> None:
        """Check a flow whose stage returned None. Raises: FlowError if the flow would end without a reply"""
        if self._stage.signature.must_reply and not self._continuation:
            name, replied = self._stage.name, type_name(self._stage.signature.reply)
            raise FlowError(
                f"{name} returns {replied}, but it has returned None without a reply or a next stage, so the flow "
                f"would end here without a reply: return {replied}, or annotate {name} with `-> {replied} | None` if "
                "the flow may end here"
            )

    def _set_continuation(self, action: str) -> None:
        if self._continuation and not (self._continuation == action == "request"):
            raise FlowError(
                f"{self._stage.queue} has called {self._continuation} already, and cannot call {action} as well: a "
                "stage requests, replies, continues with the next stage or goes to another endpoint"
            )
        self._continuation = action

    def _next_stage(self, action: str) -> Stage:
        next_stage = self._stage.next_stage
        if next_stage is None:
            raise FlowError(f"{self._stage.name} is the last stage of {self._stage.endpoint.name}: it cannot {action}")
        return next_stage

    def _state(self) -> msgspec.Raw:
        codec = self._stage.endpoint.state
        return EMPTY if codec is None else codec.encode(self.state)

    @property
    def _flow_context(self) -> FlowContext:
        """Context with the current properties. Raises: FlowError if JSON does not preserve one"""
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
    ) -> None:
        calls = self._envelope.calls + (kind != "reply")
        if calls > CALLS_MAX:
            raise Reject(
                f"this flow has more than {CALLS_MAX} messages one after another: check whether it runs in a circle"
            )
        # Checked before the continuation is set: the stage may catch the error, and continue in another way.
        context, checked = self._flow_context, checked_attachments(attachments)
        self._set_continuation(kind)
        envelope = Envelope(
            version=VERSION,
            id=self._output.new_id(),
            flow=context,
            kind=kind,
            sender=self._output.sender,
            message=message,
            parent=self.message_id,
            state=state,
            waiting=waiting,
            calls=calls,
            attachments=checked,
        )
        self._output.outgoing.append(OutputMessage(destination, envelope, self._source.expires_ms))

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
        """Start another flow in the same transaction, concurrent with this one, and return its id.

        Args:
            to: Endpoint that handles the flow first.
            message: Message of the type that the endpoint takes.
            trace: Name of the new flow, which is called `this|trace`, or as this flow if the text is empty; `!name`
                makes it just `name`.
            reply_to: Endpoint or topic that gets the reply; None drops the reply.
            reply_state: State for the first stage of `reply_to`; None is the default of the state.
            state: State for the first stage of `to`; None is the default of the state.
            **options: Options of the flow: `FlowOptions`. `interactive`, `persistent` and `properties` are inherited.

        Raises: FlowError
        """
        check_endpoint(to)
        context = child_flow_context(self._output, self._now_ms, trace, self._flow_context, options)
        first = encode_first_message(to, message, state=state, reply_to=reply_to, reply_state=reply_state)
        return start_flow(self._output, context, first, options, self.message_id)

    def publish(self, to: Topic[M], message: M, *, trace: str = "", **options: Unpack[FlowOptions]) -> str:
        """Start a flow with each connected subscriber of the topic, in the same transaction, and return the id that
        they share.

        Args:
            to: Topic.
            message: Message of the type that the topic takes.
            trace: Name of the new flow, as in `send`.
            **options: Options of the flow, as in `send`.

        Raises: FlowError
        """
        check_topic(to)
        context = child_flow_context(self._output, self._now_ms, trace, self._flow_context, options)
        return start_flow(self._output, context, encode_first_message(to, message), options, self.message_id)

    # ---- After this stage ----

    def after_commit(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function after the commit: at most once, not after a crash, and outside of the transaction. Its
        exceptions are logged, and take nothing back.

        Args:
            function: Function to call. An `async` one is cancelled after 30 seconds, and its worker waits for it; a
                plain one runs in a thread if its stage does.
            *args: Positional arguments of the call.
            **kwargs: Keyword arguments of the call.
        """
        self._output.after_commit.append(partial(function, *args, **kwargs))

    def stash(self) -> bytes:
        """Return bytes from which `Initiation.unstash` continues from this stage later, any number of times.
        `stash` itself sends nothing.

        Raises: FlowError
        """
        now = msgspec.structs.replace(self._envelope, flow=self._flow_context, state=self._state())
        expires_ms = self._source.expires_ms
        return msgspec.json.encode(StashedFlow(stage=self._stage.queue, expires_ms=expires_ms, envelope=now))


def _has_compatible_reply(other: Endpoint[Any, Any], endpoint: Endpoint[Any, Any]) -> bool:
    if endpoint.replies is None or other.replies is None:
        return endpoint.replies is None
    return is_assignable(endpoint.replies.type, other.replies.type)
