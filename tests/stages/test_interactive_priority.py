"""Tests of `InteractivePriority`: other messages wait while an interactive one is in progress, but not for long."""

import asyncio
import contextlib

import pytest

from truenext.stage import context
from truenext.stage.context import InteractivePriority

LONG = 1000.0


async def is_through(turn: asyncio.Task[None]) -> bool:
    """Let everything ready run, and return whether the task is done."""
    for _ in range(5):
        await asyncio.sleep(0)
    return turn.done()


def test_another_message_begins_at_once_while_no_interactive_one_is_in_hand() -> None:
    async def program() -> None:
        order = InteractivePriority(asyncio.get_running_loop())
        turn = order.yield_to_interactive()
        with pytest.raises(StopIteration):
            turn.send(None)
        with order.running_interactive():
            pass
        with pytest.raises(StopIteration):
            order.yield_to_interactive().send(None)

    asyncio.run(program())


def test_other_messages_wait_until_the_last_interactive_message_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "WAIT_MAX_S", LONG)

    async def program() -> None:
        order = InteractivePriority(asyncio.get_running_loop())
        turns: list[asyncio.Task[None]] = []
        with order.running_interactive():
            with order.running_interactive():
                turns += [asyncio.ensure_future(order.yield_to_interactive()) for _ in range(3)]
                assert not await is_through(turns[0])
            assert not await is_through(turns[0])
        assert [await is_through(turn) for turn in turns] == [True] * 3

    asyncio.run(program())


def test_released_waiter_waits_again_for_an_interactive_message_of_the_same_loop_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context, "WAIT_MAX_S", LONG)

    async def program() -> None:
        order = InteractivePriority(asyncio.get_running_loop())
        with order.running_interactive():
            turn = asyncio.ensure_future(order.yield_to_interactive())
            assert not await is_through(turn)
        with order.running_interactive():
            assert not await is_through(turn)
        assert await is_through(turn)

    asyncio.run(program())


def test_long_interactive_message_delays_others_for_a_moment_only() -> None:
    async def program() -> None:
        order = InteractivePriority(asyncio.get_running_loop())
        with order.running_interactive():
            await asyncio.wait_for(order.yield_to_interactive(), 20)
            # Nor does it hold up the next one.
            with pytest.raises(StopIteration):
                order.yield_to_interactive().send(None)

    asyncio.run(program())


def test_successive_interactive_messages_delay_others_for_a_moment_only() -> None:
    async def program() -> None:
        order = InteractivePriority(asyncio.get_running_loop())
        turn = asyncio.ensure_future(order.yield_to_interactive())
        deadline = asyncio.get_running_loop().time() + 20
        while not turn.done():
            assert asyncio.get_running_loop().time() < deadline
            with order.running_interactive():
                await asyncio.sleep(0.001)

    asyncio.run(program())


def test_waiter_for_interactive_messages_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "WAIT_MAX_S", LONG)

    async def program() -> None:
        order = InteractivePriority(asyncio.get_running_loop())
        with order.running_interactive():
            turn = asyncio.ensure_future(order.yield_to_interactive())
            assert not await is_through(turn)
            turn.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await turn
            assert turn.cancelled()

    asyncio.run(program())
