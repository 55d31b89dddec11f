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
        for each in self._sending:
            try:
                each.sending(execution, send)
            except Exception as error:
                _report(each, "sending", error)

    def ended(self, execution: Execution, result: ExecutionResult) -> None:
        for each in self._ended:
            try:
                each.ended(execution, result)
            except Exception as error:
                _report(each, "ended", error)


def _name(interceptor: Interceptor) -> str:
    return type(interceptor).__qualname__


def _report(interceptor: Interceptor, hook: str, error: Exception) -> None:
    extra = {"interceptor": _name(interceptor), "hook": hook}
    _logger.error("an interceptor has failed", extra=extra, exc_info=error)
