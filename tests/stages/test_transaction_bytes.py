"""Test of many workers with large messages: they stay within the limit of a connection's open transactions. Source:
docs/reference/limits.md"""

import asyncio

import msgspec

from truenext.stage import Flow, Service
from truenext.testing.stages import stages

WORKERS = 32
SIZE = 1 << 20


class Large(msgspec.Struct):
    text: str


def test_thirty_two_workers_with_a_megabyte_each_wait_for_room_and_none_is_refused() -> None:
    app = Service("large", concurrency=WORKERS)
    work = app.endpoint("large.work", Large)
    together = asyncio.Event()
    attempts: list[int] = []
    started = 0

    @work.stage
    async def first(message: Large, flow: Flow) -> None:
        nonlocal started
        started += 1
        attempts.append(flow.attempt)
        if started == WORKERS:
            together.set()
        # So all of them send at once: twice of what the connection may have open.
        await together.wait()
        flow.next(message)

    @work.stage
    async def last(message: Large) -> None:
        assert len(message.text) == SIZE

    async def main() -> None:
        async with stages(app) as t:
            async with asyncio.TaskGroup() as group:
                for _ in range(WORKERS):
                    group.create_task(t.send(work, Large("x" * SIZE)))
            await t.wait_until_ended()

    asyncio.run(main())
    assert attempts == [1] * WORKERS
