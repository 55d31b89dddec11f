"""Tests of `FairSemaphore`: the order of requests for permits, and requests that are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from truenext.stage.pool import FairSemaphore


class Sharing:
    """Requests for permits in order of arrival, with the names of those that were granted."""

    def __init__(self, total: int) -> None:
        self.semaphore = FairSemaphore(total)
        self.had: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    async def start(self, name: str, count: int) -> asyncio.Task[None]:
        end = self._ends[name] = asyncio.Event()

        async def have() -> None:
            async with self.semaphore.acquired(count):
                self.had.append(name)
                await end.wait()

        task = asyncio.create_task(have())
        await settle()
        return task

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def in_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@in_loop
async def test_small_request_waits_behind_a_large_one() -> None:
    sharing = Sharing(10)
    await sharing.start("first", 6)
    await sharing.start("much", 8)
    await sharing.start("little", 1)
    assert sharing.had == ["first"]
    await sharing.end("first")
    assert sharing.had == ["first", "much", "little"]


@in_loop
async def test_request_above_the_limit_gets_all_permits() -> None:
    sharing = Sharing(10)
    await sharing.start("little", 1)
    await sharing.start("more", 1000)
    assert sharing.had == ["little"]
    await sharing.end("little")
    await sharing.start("last", 1)
    assert sharing.had == ["little", "more"]
    await sharing.end("more")
    assert sharing.had == ["little", "more", "last"]


@in_loop
async def test_cancelled_request_does_not_block_later_ones() -> None:
    sharing = Sharing(10)
    await sharing.start("first", 6)
    much = await sharing.start("much", 8)
    await sharing.start("little", 1)
    much.cancel()
    await settle()
    assert sharing.had == ["first", "little"]
    await sharing.start("rest", 3)
    assert sharing.had == ["first", "little", "rest"]


@in_loop
async def test_turn_of_a_request_cancelled_at_that_moment_passes_to_the_next() -> None:
    sharing = Sharing(10)
    first = await sharing.start("first", 10)
    much = await sharing.start("much", 10)
    await sharing.start("next", 10)
    first.cancel()
    await asyncio.sleep(0)
    # Its turn has come, and it does not run yet.
    much.cancel()
    await settle()
    assert sharing.had == ["first", "next"]
    await sharing.end("next")
    await sharing.start("all", 10)
    assert sharing.had == ["first", "next", "all"]


@in_loop
async def test_block_that_raises_releases_its_permits() -> None:
    sharing = Sharing(10)
    with pytest.raises(ValueError, match="of the block"):
        async with sharing.semaphore.acquired(10):
            raise ValueError("of the block")
    await sharing.start("all", 10)
    assert sharing.had == ["all"]
