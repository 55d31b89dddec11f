"""Chain of a service's interceptors. It calls their hooks, and logs the errors of `sending` and `ended`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from truenext.stage.dependencies.exit_stack import StageExitStack
from truenext.stage.interceptors.interceptor import Execution, ExecutionResult, Interceptor, MessageToSend

_logger = logging.getLogger("truenext.stage")


class InterceptorChain:
    """Chain of interceptors. For each hook, it calls only the interceptors that override the hook. If `has_around`,
    `has_sending` or `has_ended` is False, the caller need not make the arguments of that hook."""

    __slots__ = ("_around", "_ended", "_sending", "has_around", "has_ended", "has_sending")

    def __init__(self, interceptors: Sequence[Interceptor]) -> None:
        self._around = [each for each in interceptors if type(each).around is not Interceptor.around]
        self._sending = [each for each in interceptors if type(each).sending is not Interceptor.sending]
        self._ended = [each for each in interceptors if type(each).ended is not Interceptor.ended]
        self.has_around: bool = bool(self._around)
        self.has_sending: bool = bool(self._sending)
        self.has_ended: bool = bool(self._ended)

    def enter_around(self, stack: StageExitStack, execution: Execution) -> None:
        """Enter the context managers of `around` into the stack, which the caller closes after the stage. Call this in
        the thread of the stage."""
        for each in self._around:
            stack.enter(_name(each), each.around(execution))

    def sending(self, execution: Execution | None, send: MessageToSend) -> None:
        _call_each(self._sending, "sending", execution, send)

    def ended(self, execution: Execution, result: ExecutionResult) -> None:
        _call_each(self._ended, "ended", execution, result)


def _call_each(interceptors: Sequence[Interceptor], hook: str, *arguments: object) -> None:
    for each in interceptors:
        try:
            getattr(each, hook)(*arguments)
        except Exception as error:
            extra = {"interceptor": _name(each), "hook": hook}
            _logger.error("an interceptor has failed", extra=extra, exc_info=error)


def _name(interceptor: Interceptor) -> str:
    return type(interceptor).__qualname__
