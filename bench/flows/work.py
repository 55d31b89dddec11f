"""One run: its flows, and the end of the last of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from uvloop import new_event_loop

T = TypeVar("T")

CONCURRENCY = 8
"""Number of messages that one stage handles at once."""
STAGES = 3
"""Number of stages of each flow."""


class Order(NamedTuple):
    port: int
    """Port of the broker."""
    name: str
    """Name of the endpoint, and so of the queue of its first stage."""
    flows: int
    database: str = ""
    """URL of the database."""
    concurrency: int = CONCURRENCY


class Sizes(NamedTuple):
    """Sizes on the command line."""

    flows: int
    runs: int
    workers: Sequence[int] = (CONCURRENCY,)
    """Numbers of workers for each stage with exactly-once processing; each number is measured."""
    inbox_rows: int = 10_000_000
    units: int = 100_000
    """Number of units left in the outbox, and of delayed flows."""
    checkout: Path | None = None
    """Checkout of an earlier version."""


class Ended:
    """Count of flows that have come to their last stage."""

    def __init__(self, flows: int) -> None:
        self._remaining = flows
        self._all = asyncio.Event()

    def one(self) -> None:
        self._remaining -= 1
        if self._remaining <= 0:
            self._all.set()

    async def wait(self) -> None:
        """Wait until all flows have come there."""
        await self._all.wait()


def run(program: Coroutine[Any, Any, T]) -> T:
    """Run a program in an event loop like that of a service."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(program)
