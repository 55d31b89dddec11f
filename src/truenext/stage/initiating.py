"""How a program begins flows: `async with app.initiate() as begin:`, or `with` where nothing can be awaited."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from truenext.errors import LocalProtocolError
from truenext.stage.initiator import checked_timeout

if TYPE_CHECKING:
    from types import TracebackType

    from truenext.stage.core.initiation import Initiation
    from truenext.stage.core.said import Said
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
        self._said: Said | None = None

    async def __aenter__(self) -> Initiation:
        return self._begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        said = self._end()
        if error is None:
            await self._initiator.initiate(said, self._deadline)

    def __enter__(self) -> Initiation:
        if self._is_in_loop():
            raise LocalProtocolError("this waits for the broker: say `async with` in async functions")
        return self._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        said = self._end()
        if error is None:
            self._initiator.initiate_in_thread(said, self._deadline)

    def _begin(self) -> Initiation:
        """Each block says something of its own. Raises: LocalProtocolError if one has not ended"""
        if self._said is not None:
            raise LocalProtocolError("this initiation has begun already: say initiate() once more for another")
        self._said, initiation = self._initiator.initiation()
        return initiation

    def _end(self) -> Said:
        said, self._said = self._said, None
        assert said is not None, "the block has begun"
        said.is_over = True
        return said

    @property
    def _deadline(self) -> float:
        return self._initiator.loop.time() + self._timeout

    def _is_in_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._initiator.loop
        except RuntimeError:
            return False
