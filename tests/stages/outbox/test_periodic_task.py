"""Tests of periodic background tasks: they end when they are stopped, also a second time. Source:
src/truenext/stage/outbox"""

import asyncio

from truenext.stage.outbox import housekeeping
from truenext.stage.outbox.housekeeping import PeriodicTask


def test_periodic_task_that_has_ended_stops_at_once() -> None:
    """Fixed: a service took twenty seconds to end, as an interrupted stop is repeated for all tasks."""

    async def main() -> None:
        async def step() -> float:
            return 60.0

        work = PeriodicTask("test", step)
        work.start()
        await asyncio.sleep(0.01)
        async with asyncio.timeout(housekeeping.STOP_TIMEOUT_S / 2):
            await work.stop()
            await work.stop()

    asyncio.run(main())


def test_periodic_task_woken_before_its_stop_runs_once_more() -> None:
    async def main() -> None:
        done: list[int] = []

        async def step() -> float:
            await asyncio.sleep(0.01)
            done.append(len(done))
            return 60.0

        work = PeriodicTask("test", step)
        work.start()
        await asyncio.sleep(0.05)
        work.wake()
        await work.stop()
        assert done == [0, 1]

    asyncio.run(main())
