"""Work in the background ends when it is told to, however often it is told. Source: src/truenext/stage/outbox"""

import asyncio

from truenext.stage.outbox import housekeeping
from truenext.stage.outbox.housekeeping import PeriodicTask


def test_what_has_ended_is_not_waited_for_a_second_time() -> None:
    """Fixed: a service took twenty seconds to end, for all is stopped once more if the first time was interrupted."""

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


def test_what_it_was_woken_for_is_done_before_it_ends() -> None:
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
