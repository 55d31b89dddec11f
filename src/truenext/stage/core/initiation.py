"""How flows begin outside of stages: what a program says in one initiation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, Unpack

from truenext.stage.core.definitions import Endpoint, Stage, Topic
from truenext.stage.core.envelope import decode_stashed_flow
from truenext.stage.core.errors import FlowError
from truenext.stage.core.flow import Flow
from truenext.stage.core.flow_start import FlowOptions, check_endpoint, check_topic, new_flow_context, start_flow
from truenext.stage.core.output import Output

M = TypeVar("M")
R = TypeVar("R")


class Initiation:
    """Begins flows, any number of them in one transaction. Nothing is waited for: it is all sent at the end."""

    def __init__(self, output: Output, now_ms: int, stages: Mapping[str, Stage]) -> None:
        """By `Service.initiate`; `stages` are its own, by queue."""
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
        """Begin a flow: its id. `trace` is what people call it, such as the order that it is about.

        The reply goes to `reply_to`, with `reply_state` as its state; without that it is dropped. `state` is that of
        the first stage.

        Raises: FlowError
        """
        check_endpoint(to)
        context = new_flow_context(self._output, self._now_ms, trace, None, options)
        return start_flow(self._output, context, to, message, reply_to, reply_state, state, options)

    def publish(self, to: Topic[M], message: M, *, trace: str, **options: Unpack[FlowOptions]) -> str:
        """Begin a flow with each subscriber of the topic that is there: the id of them all.

        Raises: FlowError
        """
        check_topic(to)
        context = new_flow_context(self._output, self._now_ms, trace, None, options)
        return start_flow(self._output, context, to, message, None, None, None, options)

    def unstash(self, data: bytes) -> Flow:
        """Go on from where `Flow.stash` was called: what is said to this flow is said as by that stage, and sent with
        the rest. It has `message` and `state` of then. Each time is a continuation of its own.

        Raises: FlowError if these bytes are none, or are of a stage that this service does not have; NotDecoded
        """
        stashed = decode_stashed_flow(data)
        stage = self._stages.get(stashed.stage)
        if stage is None:
            raise FlowError(f"the stage {stashed.stage}, which has stashed this, is not of this service")
        return Flow(
            stage, stashed.envelope, self._output, self._now_ms, expires_ms=stashed.expires_ms, is_unstashed=True
        )
