"""Initiation: starts flows that begin in a program, all in one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, Unpack

from truenext.stage.core.definitions import Endpoint, Stage, Topic
from truenext.stage.core.envelope import decode_stashed_flow
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
from truenext.stage.core.output import Output

M = TypeVar("M")
R = TypeVar("R")


class Initiation:
    """Start of any number of flows in one transaction. The calls do not wait: all messages are sent at the end of the
    block."""

    def __init__(self, output: Output, now_ms: int, stages: Mapping[str, Stage]) -> None:
        """Create an initiation for `Service.initiate`. `stages` are the stages of the service, by queue."""
        self._output = output
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
        **options: Unpack[FlowOptions],
    ) -> str:
        """Start a flow, and return its id.

        Args:
            to: Endpoint that handles the flow first.
            message: Message of the type that the endpoint takes.
            trace: Name of the flow for people, such as the number of an order. It must not be empty.
            reply_to: Endpoint or topic that gets the flow's reply; None drops the reply.
            reply_state: State for the first stage of `reply_to`; None is the default of the state's type.
            state: State for the first stage of `to`; None is the default of the state's type.
            **options: Options of the flow (`FlowOptions`).

        Raises: FlowError if an argument is invalid, or the block has ended
        """
        check_endpoint(to)
        context = new_flow_context(self._output, self._now_ms, trace, None, options)
        first = encode_first_message(to, message, state=state, reply_to=reply_to, reply_state=reply_state)
        return start_flow(self._output, context, first, options)

    def publish(self, to: Topic[M], message: M, *, trace: str, **options: Unpack[FlowOptions]) -> str:
        """Start a flow with each connected subscriber of the topic, and return the id that these flows share.

        Args:
            to: Topic to which the message is published.
            message: Message of the type that the topic takes.
            trace: Name of the flow for people. It must not be empty.
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
