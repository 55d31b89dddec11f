"""Exit stack: closes the context managers of one run of a stage, and decides which of several errors is raised.

All context managers are closed, the last one first, even after errors. Each context manager gets the first error so
far, which is the error of the stage or of closing an earlier context manager. In the end the first error is raised; the
other errors are logged. A context manager cannot suppress an error. An error that ends the program or its task, such as
a cancellation or Ctrl-C, replaces an earlier `Exception`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_logger = logging.getLogger("truenext.stage")


class _OpenResource(NamedTuple):
    name: str
    exit: Callable[..., Any]
    is_async: bool


class StageExitStack:
    """Stack of entered context managers. Use it with `async with`, or with `with` if `enter_async` is not called."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: list[_OpenResource] = []

    def enter(self, name: str, manager: AbstractContextManager[T]) -> T:
        value = manager.__enter__()
        self._open.append(_OpenResource(name, manager.__exit__, False))
        return value

    async def enter_async(self, name: str, manager: AbstractAsyncContextManager[T]) -> T:
        value = await manager.__aenter__()
        self._open.append(_OpenResource(name, manager.__aexit__, True))
        return value

    def __enter__(self) -> StageExitStack:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close all context managers. Raises: an error in closing, if it is the first error or replaces `error`"""
        first = error
        while self._open:
            one = self._open.pop()
            try:
                one.exit(*_exc_info(first))
            except BaseException as other:
                first = _more_severe(first, other, one.name)
        if first is not None and first is not error:
            raise first

    async def __aenter__(self) -> StageExitStack:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        first = error
        while self._open:
            one = self._open.pop()
            try:
                result = one.exit(*_exc_info(first))
                if one.is_async:
                    await result
            except BaseException as other:
                first = _more_severe(first, other, one.name)
        if first is not None and first is not error:
            raise first


def _exc_info(error: BaseException | None) -> tuple[object, BaseException | None, object]:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


def _more_severe(first: BaseException | None, other: BaseException, name: str) -> BaseException:
    """Return the error to raise: `other` if only this error would end the program or its task; else `first`, after
    logging `other`."""
    if first is None or other is first:
        return other
    if isinstance(first, Exception) and not isinstance(other, Exception):
        return other
    _logger.error("the end of a stage's context manager has failed as well", extra={"context": name}, exc_info=other)
    return first
