"""Executions of stages and their results, as a service makes them, for tests of interceptors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from truenext.flows.events import ExecutionOutcome, GiveUpReason
from truenext.stage.dependencies.exit_stack import StageExitStack
from truenext.stage.interceptors.chain import InterceptorChain
from truenext.stage.interceptors.interceptor import Execution, ExecutionResult, MessageToSend

FACTS: dict[str, Any] = {"message_id": "m1", "flow_id": "f1", "trace": "order 7", "size": 10}


def execution(stage: str = "place", **other: Any) -> Execution:
    facts: dict[str, Any] = {"queue": f"order.{stage}", "attempt": 1, "interactive": False, "pool": "other", **FACTS}
    return Execution(endpoint="order", stage=stage, **(facts | other))


def send(destination: str = "price", **other: Any) -> MessageToSend:
    return MessageToSend(destination=destination, **(FACTS | other))


def ending(
    outcome: ExecutionOutcome = "completed",
    error: BaseException | None = None,
    run: float | None = 0.02,
    given_up_for: GiveUpReason | None = None,
) -> ExecutionResult:
    return ExecutionResult(outcome=outcome, error=error, run=run, commit=0.001, total=0.03, given_up_for=given_up_for)


@contextmanager
def around(chain: InterceptorChain, execution: Execution) -> Iterator[None]:
    """Enter and leave the interceptors as a run of a stage does."""
    with StageExitStack() as stack:
        chain.enter_around(stack, execution)
        yield
