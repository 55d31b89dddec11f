"""What a stage knows of its flow, and can say: whom it asks, how the flow goes on, what begins beside it.

    request           ask an endpoint; its reply comes to the next stage, with the state as it is now
    reply             to whoever asked this endpoint; what the stage returns is the same
    next              go on with the next stage
    next_direct       the same in this transaction, without a message
    goto              another endpoint goes on, and replies in this one's place
    send, publish     a flow of its own, beside this one

Of the first five a stage does one at most, and may request several times. What is said is gathered, and waits for
nothing: it is sent when the stage has returned, all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, Unpack

import msgspec

from truenext.stage.core.codec import EMPTY, check_properties, type_name
from truenext.stage.core.definitions import Endpoint, Stage, Topic
from truenext.stage.core.envelope import VERSION, Envelope, FlowContext, ReplyTo, StashedFlow, encode_stashed_flow
from truenext.stage.core.errors import FlowError, Reject
from truenext.stage.core.flow_start import (
    FlowOptions,
    check_endpoint,
    check_topic,
    child_flow_context,
    start_flow,
    state_for,
)
from truenext.stage.core.output import Output, OutputMessage, checked_attachments
from truenext.stage.core.signature import is_assignable

WAITING_MAX: Final = 35
"""Places that wait for a reply in one flow, one within the other: endpoints, and where the flow's own reply goes. More
is an endpoint that asks itself."""
CALLS_MAX: Final = 200
"""Messages of one flow that follow one another, without replies: more is a circle. The requests of one stage do not
follow one another."""
UNSET: Final = object()

M = TypeVar("M")
R = TypeVar("R")
P = ParamSpec("P")


class Flow:
    """A flow, as one of its stages sees it."""

    def __init__(
        self,
        stage: Stage,
        envelope: Envelope,
        output: Output,
        now_ms: int,
        *,
        state: object = UNSET,
        message: object = UNSET,
        expires_ms: int = 0,
        attempt: int = 1,
        is_unstashed: bool = False,
    ) -> None:
        """By the service, for each message. `state` and `message` are what is here without having been sent.

        Raises: NotDecoded
        """
        self._stage = stage
        self._envelope = envelope
        self._output = output
        self._now_ms = now_ms
        self._expires_ms = expires_ms
        self._is_unstashed = is_unstashed
        self._continuation = ""
        self.direct_message: object = UNSET
        """What the next stage is to take in this same transaction."""
        context = envelope.flow
        self.id: str = context.id
        """Of the flow: the same in all its stages."""
        self.trace: str = context.trace
        """What people call the flow."""
        self.message_id: str = envelope.id
        """The same however often the message is delivered."""
        self.attempt: int = attempt
        """1 if no consumer has failed with the message."""
        self.interactive: bool = context.interactive
        """Somebody waits for it."""
        self.persistent: bool = context.persistent
        """It survives a crash of the broker."""
        self.sender: str = envelope.sender
        """The service and the queue of the stage that sent the message."""
        self.properties: dict[str, Any] = dict(context.properties)
        """Of the whole flow: what is set here is seen by all that come after this stage. Values that can be JSON."""
        self.attachments: Mapping[str, bytes] = envelope.attachments
        """Of this message."""
        self.state: Any = None
        """The state of the endpoint, if it has one; the same that the function takes."""
        codec = stage.endpoint.state
        if codec is not None:
            self.state = codec.decode(envelope.state) if state is UNSET else state
        self.message: Any = stage.takes.decode(envelope.message) if message is UNSET else message
        """What the stage takes; the same that the function takes."""

    def __repr__(self) -> str:
        return f"<Flow {self.trace} at {self._stage.queue}>"

    # ---- How it goes on ----

    def request(self, to: Endpoint[M, Any], message: M, *, attachments: Mapping[str, bytes] | None = None) -> None:
        """Ask an endpoint; its reply comes to the next stage, with the state as it is now. Several may be asked: then
        each reply comes by itself.

        Raises: FlowError if there is no next stage, or it takes something else; Reject if the flow is too long
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
            raise Reject(f"more than {WAITING_MAX} places wait for a reply in this flow: does an endpoint ask itself?")
        self._continue("request", to.destination, to.takes.encode(message), EMPTY, waiting, attachments)

    def reply(self, message: object, *, attachments: Mapping[str, bytes] | None = None) -> None:
        """Answer whoever asked this endpoint; if nobody waits for it, it is dropped. To return it is the same.

        Raises: FlowError if the endpoint replies something else
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
        """Go on with the next stage, with the state as it is now.

        Raises: FlowError if there is none, or it takes something else; Reject if the flow is too long
        """
        next_stage = self._next_stage("next")
        encoded = next_stage.takes.encode(message)
        self._continue("next", next_stage.destination, encoded, self._state(), self._envelope.waiting, attachments)

    def next_direct(self, message: object) -> None:
        """Go on with the next stage as soon as this one returns, in the same transaction and without a message.

        Raises: FlowError if there is none, or it takes something else, or no stage runs: after `unstash`
        """
        if self._is_unstashed:
            raise FlowError("no stage runs here, so none can follow directly: say next instead of next_direct")
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
        """Another endpoint goes on, and replies in this one's place. `state` is that of its first stage.

        Raises: FlowError if it replies something else; Reject if the flow is too long
        """
        check_endpoint(to)
        endpoint = self._stage.endpoint
        if self._envelope.waiting and not _has_compatible_reply(to, endpoint):
            raise FlowError(f"{to} does not reply what {endpoint} does")
        encoded = to.takes.encode(message)
        self._continue("goto", to.destination, encoded, state_for(to, state), self._envelope.waiting, attachments)

    def for_next_stage(self) -> Flow:
        """The same flow, as the next stage sees it in this same transaction."""
        envelope = msgspec.structs.replace(self._envelope, flow=self._flow_context, attachments={})
        return Flow(
            self._next_stage("next_direct"),
            envelope,
            self._output,
            self._now_ms,
            state=self.state,
            message=self.direct_message,
            expires_ms=self._expires_ms,
            attempt=self.attempt,
        )

    def check_replied(self) -> None:
        """The function of the stage has returned None. Raises: FlowError if the flow would end there unnoticed"""
        if self._stage.signature.must_reply and not self._continuation:
            name, replied = self._stage.name, type_name(self._stage.signature.reply)
            raise FlowError(
                f"{name} returns {replied}, but it has returned None, and has neither replied nor gone on, so the flow "
                f"would end here without a reply: return {replied}, or annotate {name} with `-> {replied} | None` if "
                "the flow may end here"
            )

    def _set_continuation(self, action: str) -> None:
        if self._continuation and not (self._continuation == action == "request"):
            raise FlowError(
                f"{self._stage.queue} has said {self._continuation} already, and cannot say {action} as well: a stage "
                "requests, replies, goes on with the next stage or goes to another endpoint"
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
        """Raises: FlowError if a property would come back as something else"""
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
            raise Reject(f"this flow has more than {CALLS_MAX} messages one after another: does it go in a circle?")
        # What is refused is not said: the stage may catch the error, and say something else.
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
        self._output.outgoing.append(OutputMessage(destination, envelope, self._expires_ms))

    # ---- Beside it ----

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
        """Begin a flow beside this one, in the same transaction: its id. As `Initiation.send`; what is not told is as
        in this flow. People call it `this|trace`, or as this one; with a `!` in front just what follows.

        Raises: FlowError
        """
        check_endpoint(to)
        context = child_flow_context(self._output, self._now_ms, trace, self._flow_context, options)
        return start_flow(self._output, context, to, message, reply_to, reply_state, state, options, self.message_id)

    def publish(self, to: Topic[M], message: M, *, trace: str = "", **options: Unpack[FlowOptions]) -> str:
        """Begin a flow with each subscriber of the topic that is there, in the same transaction. As `send`.

        Raises: FlowError
        """
        check_topic(to)
        context = child_flow_context(self._output, self._now_ms, trace, self._flow_context, options)
        return start_flow(self._output, context, to, message, None, None, None, options, self.message_id)

    # ---- Later ----

    def after_commit(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function when all of this has been committed: at most once, not after a crash, outside of the
        transaction. It may be async. What it raises is logged."""
        self._output.after_commit.append(partial(function, *args, **kwargs))

    def stash(self) -> bytes:
        """What is needed to go on from this stage later, as `Initiation.unstash` does; any number of times. The flow
        stays where it is until then.

        Raises: FlowError
        """
        now = msgspec.structs.replace(self._envelope, flow=self._flow_context, state=self._state())
        return encode_stashed_flow(StashedFlow(stage=self._stage.queue, expires_ms=self._expires_ms, envelope=now))


def _has_compatible_reply(other: Endpoint[Any, Any], endpoint: Endpoint[Any, Any]) -> bool:
    if endpoint.replies is None or other.replies is None:
        return endpoint.replies is None
    return is_assignable(endpoint.replies.type, other.replies.type)
