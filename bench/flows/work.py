"""What is one run: which flows there are, and when the last of them has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from uvloop import new_event_loop

T = TypeVar("T")

CONCURRENCY = 8
"""Messages of one stage that are handled at once."""
STAGES = 3
"""Of each flow."""


class Order(NamedTuple):
    port: int
    """Of the broker."""
    name: str
    """Of the endpoint, and so of the queue of its first stage."""
    flows: int
    database: str = ""
    """Its URL."""
    concurrency: int = CONCURRENCY


class Sizes(NamedTuple):
    """What the command line says."""

    flows: int
    runs: int
    workers: Sequence[int] = (CONCURRENCY,)
    """Of each stage, where effects happen once: each of these is measured."""
    inbox_rows: int = 10_000_000
    units: int = 100_000
    """Left in the outbox."""


class Ended:
    """How many flows have come to their last stage."""

    def __init__(self, flows: int) -> None:
        self._remaining = flows
        self._all = asyncio.Event()

    def one(self) -> None:
        self._remaining -= 1
        if self._remaining <= 0:
            self._all.set()

    async def wait(self) -> None:
        """Until all have."""
        await self._all.wait()


def run(program: Coroutine[Any, Any, T]) -> T:
    """In the event loop in which services run."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(program)
