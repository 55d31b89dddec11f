"""Initiation: starts flows that begin in a program, all in one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, Unpack

import msgspec

from truenext.flows.envelope import ReplyTo
from truenext.stage.core.definitions import Endpoint, Stage, Topic
from truenext.stage.core.errors import FlowError
from truenext.stage.core.flow import Flow, FlowSource
from truenext.stage.core.flow_start import (
    FlowOptions,
    check_endpoint,
    check_topic,
    encode_first_message,
    new_flow_context,
    start_flow,
)
from truenext.stage.core.outbox_unit import KeptFlow
from truenext.stage.core.output import Output
from truenext.stage.core.stashed_flow import decode_stashed_flow

M = TypeVar("M")
R = TypeVar("R")


class Initiation:
    """Start of any number of flows in one transaction. The calls do not wait: all messages are sent at the end of the
    block."""

    def __init__(self, output: Output, now_ms: int, stages: Mapping[str, Stage], kept_to: str = "") -> None:
        """Create an initiation for `Service.initiate`. `stages` are the stages of the service, by queue. `kept_to` is
        the queue for replies that are kept; empty if the initiation can keep none."""
        self._output = output
        self._kept_to = kept_to
        self.kept: KeptFlow | None = None
        """Flow whose reply is kept; None if there is none."""
        self._now_ms = now_ms
        self._stages = stages

    def send(
        self,
        to: Endpoint[M, R],
        message: M,
        *,
        trace: str,
        reply_to: Endpoint[R, Any] | Topic[R] | None = None,
        reply_state: object = None,
        state: object = None,
        keep_reply: bool = False,
        **options: Unpack[FlowOptions],
    ) -> str:
        """Start a flow, and return its id.

        Args:
            to: Endpoint that handles the flow first.
            message: Message of the type that the endpoint takes.
            trace: Human-readable name of the flow, such as the number of an order. It must not be empty.
            reply_to: Endpoint or topic that gets the flow's reply; None drops the reply.
            reply_state: State for the first stage of `reply_to`; None is the default of the state's type.
            state: State for the first stage of `to`; None is the default of the state's type.
            keep_reply: True to keep the reply, or the failure, for `Service.reply` with the key of the initiation, for
                7 days. Only one flow of `initiate(session, key=...)` can keep its reply.
            **options: Options of the flow (`FlowOptions`).

        Raises: FlowError if an argument is invalid, or the block has ended
        """
        check_endpoint(to)
        if keep_reply:
            self._check_can_keep(to, reply_to)
        context = new_flow_context(self._output, self._now_ms, trace, None, options)
        first = encode_first_message(to, message, state=state, reply_to=reply_to, reply_state=reply_state)
        if not keep_reply:
            return start_flow(self._output, context, first, options)
        waiting = [ReplyTo(self._kept_to, report=self._kept_to)]
        first = msgspec.structs.replace(first, waiting=waiting)
        self.kept = KeptFlow(start_flow(self._output, context, first, options), to.name)
        return self.kept.flow

    def _check_can_keep(self, to: Endpoint[Any, Any], reply_to: object) -> None:
        if not self._kept_to:
            raise FlowError("keep_reply needs a key, under which the reply is found: initiate(session, key=...)")
        if self.kept is not None:
            raise FlowError(
                f"only one flow of an initiation can keep its reply, and the flow to "
                f"{self.kept.endpoint} does so already"
            )
        if reply_to is not None:
            raise FlowError("a reply that is kept goes to the service itself: leave out reply_to, or keep_reply")
        if to.replies is None:
            raise FlowError(f"{to.name} replies nothing that could be kept: leave out keep_reply")

    def publish(self, to: Topic[M], message: M, *, trace: str, **options: Unpack[FlowOptions]) -> str:
        """Start a flow with each connected subscriber of the topic, and return the id that these flows share.

        Args:
            to: Topic to which the message is published.
            message: Message of the type that the topic takes.
            trace: Human-readable name of the flow. It must not be empty.
            **options: Options of the flow (`FlowOptions`).

        Raises: FlowError if an argument is invalid, or the block has ended
        """
        check_topic(to)
        context = new_flow_context(self._output, self._now_ms, trace, None, options)
        return start_flow(self._output, context, encode_first_message(to, message), options)

    def unstash(self, data: bytes) -> Flow:
        """Return the flow of an earlier `Flow.stash`, with its message and state. Calls of this flow act as if the
        stashing stage had made them. Their messages are sent with this initiation. The same bytes may be unstashed
        several times.

        Args:
            data: Bytes that `Flow.stash` returned in a stage of the same service.

        Raises: FlowError if the bytes are not from `Flow.stash`, or the service no longer has the stage; NotDecoded if
        the stashed message or state is not of the type that the stage takes
        """
        stashed = decode_stashed_flow(data)
        stage = self._stages.get(stashed.stage)
        if stage is None:
            raise FlowError(
                f"the stash is of stage {stashed.stage}, which this service does not have: unstash it in the service "
                "that has the stage"
            )
        source = FlowSource(stashed.expires_ms, is_unstashed=True)
        return Flow(stage, stashed.envelope, self._output, self._now_ms, source)
