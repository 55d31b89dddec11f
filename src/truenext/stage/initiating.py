"""How a program begins flows: `async with app.initiate() as begin:`, or `with` where nothing can be awaited."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from truenext.errors import LocalProtocolError
from truenext.stage.initiator import checked_timeout

if TYPE_CHECKING:
    from types import TracebackType

    from truenext.stage.core.initiation import Initiation
    from truenext.stage.initiator import Initiator


class Initiating:
    """All that is said in the block is sent at its end, in one transaction that commits by itself; nothing, if the
    block raises.

    Raises: RolledBack if nothing of it was sent; InDoubt if that is not known, with a token to ask again
    """

    def __init__(self, initiator: Initiator, timeout: float) -> None:
        """By `Service.initiate`. Raises: ValueError"""
        self._initiator = initiator
        self._timeout = checked_timeout(timeout)
        self._said, self._initiation = initiator.initiation()

    async def __aenter__(self) -> Initiation:
        return self._initiation

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._said.is_over = True
        if error is None:
            await self._initiator.initiate(self._said, self._timeout)

    def __enter__(self) -> Initiation:
        if self._is_in_loop():
            raise LocalProtocolError("this waits for the broker: say `async with` in async functions")
        return self._initiation

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._said.is_over = True
        if error is None:
            asyncio.run_coroutine_threadsafe(
                self._initiator.initiate(self._said, self._timeout), self._initiator.loop
            ).result()

    def _is_in_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._initiator.loop
        except RuntimeError:
            return False
