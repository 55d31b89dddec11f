"""Functions that run a service in a test until its work is done, and the messages that many tests of stages send."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from truenext.stage import Service
from truenext.stage.dependencies.depends import Overrides
from truenext.testing.local import LocalBroker
from truenext.testing.stages import Stages, stages

PATIENCE_S = 30.0


class Number(msgspec.Struct):
    n: int = 0


class Text(msgspec.Struct):
    text: str = ""


@dataclass
class Memo:
    """The state of an endpoint."""

    n: int = 0
    text: str = ""


def run(
    app: Service,
    work: Callable[[Stages], Awaitable[None]],
    *,
    database: str | None = None,
    overrides: Overrides | None = None,
) -> None:
    """Run a service while the work is done, and check that nothing is left behind."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            async with stages(app, database=database, overrides=overrides) as t:
                await work(t)
            remaining = asyncio.all_tasks() - {asyncio.current_task()}
            # A connection that has ended is forgotten in the next turn of the loop.
            await asyncio.sleep(0)
            assert not [task for task in remaining if not task.done()]

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def disconnected(broker: LocalBroker) -> AsyncIterator[None]:
    """Crash the broker, and start it again at the end of the block."""
    broker.kill()
    yield
    await broker._start_again()
