"""What is called once all of a transaction has happened: outside of it, at most once, and not after a crash."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING

from truenext.stage.cancelling import is_being_cancelled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from truenext.stage.core.said import Said

_logger = logging.getLogger("truenext.stage")

HOOK_S = 30.0
"""A hook that takes longer is cancelled: its worker waits for it, and takes no messages meanwhile."""


async def call_hooks(said: Said, fields: Mapping[str, object]) -> None:
    """What a hook raises is logged, with `fields`: nothing can be taken back any more."""
    for hook in said.after_commit:
        try:
            made = hook()
            if inspect.isawaitable(made):
                await _in_time(made)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            _logger.error("what was to be called after the commit was cancelled", extra=fields, exc_info=error)
        except GeneratorExit:
            raise
        except BaseException as error:
            # Such as SystemExit: nobody is to end the process for that.
            _logger.error("what was to be called after the commit has failed", extra=fields, exc_info=error)


async def _in_time(made: Awaitable[object]) -> None:
    """Raises: TimeoutError; what the hook raises"""
    limit = asyncio.timeout(HOOK_S)
    try:
        async with limit:
            await made
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"it was cancelled, for it has not ended within {HOOK_S:g} seconds") from error
