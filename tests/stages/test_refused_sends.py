"""Tests of sends that are refused at the call: to the wrong kind of destination, or after the end of the stage or the
block. Source: docs/stages.md, "Endpoints and stages" """

from typing import Any

import pytest

from tests.stages.flows import Number, run, until
from truenext.stage import Flow, FlowError, Initiation, Service
from truenext.testing.stages import Stages


def test_send_to_a_topic_and_publish_to_an_endpoint_are_refused() -> None:
    app = Service("shop")
    news: Any = app.topic("news", Number)
    seen: list[str] = []
    take: Any = app.endpoint("take", Number)

    async def first(number: Number, flow: Flow) -> None:
        for call in (
            lambda: flow.send(news, number),
            lambda: flow.publish(take, number),
            lambda: flow.request(news, number),
            lambda: flow.goto(news, number),
            lambda: flow.send("take", number),  # type: ignore[arg-type]
        ):
            with pytest.raises(FlowError) as error:
                call()
            seen.append(str(error.value))
        flow.next(number)

    async def last(number: Number) -> None: ...

    take.stage(first)
    take.stage(last)

    async def work(t: Stages) -> None:
        for call in (app.send, app.ask):
            with pytest.raises(FlowError, match="is not an endpoint"):
                await call(news, Number(1), trace="t")
        with pytest.raises(FlowError, match="is not a topic: send to it"):
            await app.publish(take, Number(1), trace="t")
        await t.send(take, Number(1))
        await t.wait_until_ended()
        assert len(seen) == 5

    run(app, work)


def test_send_after_the_end_of_a_stage_or_block_is_refused() -> None:
    app = Service("shop")
    take = app.endpoint("take", Number)
    kept: list[Flow] = []

    @take.stage
    async def first(number: Number, flow: Flow) -> None:
        kept.append(flow)

    async def work(t: Stages) -> None:
        started: list[Initiation] = []
        async with app.initiate() as initiation:
            started.append(initiation)
            initiation.send(take, Number(1), trace="t")
        with pytest.raises(FlowError, match="too late"):
            started[0].send(take, Number(2), trace="t")
        await until(lambda: bool(kept))
        await t.wait_until_ended()
        with pytest.raises(FlowError, match="too late"):
            kept[0].send(take, Number(3))

    run(app, work)


def test_attachments_are_bytes() -> None:
    app = Service("shop")
    take = app.endpoint("take", Number)

    @take.stage
    async def first(number: Number) -> None: ...

    async def work(t: Stages) -> None:
        with pytest.raises(FlowError, match="attachment 'a' is str, and must be bytes"):
            await t.send(take, Number(1), attachments={"a": "text"})  # type: ignore[dict-item]

    run(app, work)
