"""Test that stages go on during a drain, also those that send more than they take."""

import asyncio
import json

import truenext
from tests.stages.flows import Number, run
from truenext.stage import Flow, Service
from truenext.testing.stages import Stages


def test_stages_end_all_their_flows_during_a_drain() -> None:
    # C31.2
    app = Service("shop", concurrency=4)
    work_on = app.endpoint("work", Number)
    ended: list[int] = []
    is_slow = True

    @app.terminator("part", Number)
    async def part(number: Number) -> None:
        ended.append(number.n)

    @work_on.stage
    async def first(number: Number, flow: Flow) -> None:
        while is_slow:
            await asyncio.sleep(0.01)
        if flow.attempt == 1 and number.n % 3 == 0:
            raise ValueError("the first try of every third fails")
        for part_number in range(3):
            flow.send(part, Number(10 * number.n + part_number))
        flow.next(number)

    @work_on.stage
    async def last(number: Number) -> None:
        ended.append(1000 + number.n)

    async def work(t: Stages) -> None:
        nonlocal is_slow
        async with app.initiate() as initiation:
            for n in range(20):
                initiation.send(work_on, Number(n), trace=f"{n}")
        async with truenext.connect(t.broker.url) as operator:
            report = json.loads(await operator.control_request("drain", {"draining": True}))
            assert (report["draining"], report["waiting"] + report["held"]) == (True, 20)
            is_slow = False
            while not (report["drained"] and not report["delayed"]):
                await asyncio.sleep(0.02)
                report = json.loads(await operator.control_request("drain"))
        assert sorted(ended) == sorted(
            [10 * n + k for n in range(20) for k in range(3)] + [1000 + n for n in range(20)]
        )
        assert report["dead"] == 0

    run(app, work)
