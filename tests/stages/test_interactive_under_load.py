"""Test of interactive flows on the queues of thousands of other flows. Source: docs/stages.md, "Start a flow" """

import asyncio
import os

import msgspec

from truenext.stage import Flow, Service
from truenext.testing.stages import stages

BATCH = int(os.environ.get("TRUENEXT_FLOWS", "300"))
INTERACTIVE = 40


class Job(msgspec.Struct):
    number: int


def test_forty_interactive_flows_of_five_stages_end_before_the_thousands_that_were_there_first() -> None:
    app = Service("shop", concurrency=2)
    endpoint = app.endpoint("shop.work", Job)
    ended: list[bool] = []

    async def go_on(job: Job, flow: Flow) -> None:
        flow.next(job)

    for number in range(4):
        endpoint.stage(name=f"stage{number}")(go_on)

    @endpoint.stage
    async def last(job: Job, flow: Flow) -> None:
        ended.append(flow.interactive)

    async def main() -> None:
        async with stages(app) as t:
            async with app.initiate() as initiation:
                for number in range(BATCH):
                    initiation.send(endpoint, Job(number), trace=f"batch {number}")
            async with app.initiate() as initiation:
                for number in range(INTERACTIVE):
                    initiation.send(endpoint, Job(number), trace=f"somebody waits for {number}", interactive=True)
            await t.wait_until_ended(timeout=100)

    asyncio.run(main())
    assert len(ended) == BATCH + INTERACTIVE
    # The batch goes on meanwhile, with workers of its own: it is not starved, and it is not in the way.
    assert sum(ended[: 2 * INTERACTIVE + BATCH // 20]) == INTERACTIVE
