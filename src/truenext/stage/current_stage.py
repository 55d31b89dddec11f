"""The stage whose function runs in this task or thread: the calls that would wait for that stage are refused."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from truenext.stage.core.errors import FlowError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from truenext.stage.core.definitions import Endpoint, Stage

CURRENT: Final[ContextVar[Stage | None]] = ContextVar("truenext stage", default=None)
"""Set for the call of the function alone; the tasks that it starts inherit it."""


def check_can_await(call: str, advice: str) -> None:
    """Refuse an async method that a plain function of a stage calls: it cannot await the result.

    Raises: FlowError
    """
    stage = CURRENT.get()
    if stage is None or stage.signature.is_async or _is_in_loop():
        return
    raise FlowError(
        f"{call} must be awaited, and stage {stage.name} of {stage.endpoint.name} is a plain function, which cannot: "
        f"make it an async function, or {advice}"
    )


def check_not_own_endpoint(to: Endpoint[Any, Any], stages: Mapping[str, Stage]) -> None:
    """Refuse an ask of the endpoint whose stage asks: the stage holds one of the workers that the reply needs. `stages`
    are those of the service that asks, by queue: an endpoint of the same name at another broker may be asked.

    Raises: FlowError
    """
    stage = CURRENT.get()
    if stage is None or stages.get(stage.queue) is not stage or to.name != stage.endpoint.name:
        return
    raise FlowError(
        f"stage {stage.name} of {to.name} asks {to.name} itself: while it waits it holds one of the workers that the "
        "reply needs, and if all of them wait, none replies. Request it with the flow: the reply comes to the next "
        "stage, and no worker waits"
    )


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
