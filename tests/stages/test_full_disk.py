"""Tests of stages while the broker's disk is full. Source: docs/stages.md, "Failures and outages" """

import asyncio

import pytest

from tests.stages.flows import Number, run, until
from truenext.stage import Flow, Service
from truenext.stage.core.health import assess_health
from truenext.testing.stages import Stages


def test_stages_that_send_pause_longer_and_longer_while_the_broker_is_full() -> None:
    app = Service("shop", concurrency=4)
    work_on = app.endpoint("work", Number)
    attempts: list[int] = []
    ended: list[int] = []

    @work_on.stage
    async def first(number: Number, flow: Flow) -> None:
        attempts.append(flow.attempt)
        flow.next(number)

    @work_on.stage
    async def last(number: Number) -> None:
        ended.append(number.n)

    async def work(t: Stages) -> None:
        t.at("run", t.broker.fill_disk)
        async with app.initiate() as initiation:
            for n in range(4):
                initiation.send(work_on, Number(n), trace=f"{n}")
        await asyncio.sleep(1.2)
        # Each of the four at first, after half a second, and after one more, at most.
        assert len(attempts) <= 16
        assert not ended
        assert any(
            "no disk space" in why for why in assess_health(t._service_run.status(), stalled_after_s=300).reasons
        )
        t.broker.free_disk()
        await t.wait_until_ended()
        assert sorted(ended) == [0, 1, 2, 3]
        assert set(attempts) == {1}

    run(app, work)


def test_a_stop_does_not_wait_for_a_rest_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.stage.pool.PAUSE_S", 3600.0)
    monkeypatch.setattr("truenext.stage.pool.PAUSE_MAX_S", 3600.0)
    app = Service("shop")
    there = app.remote("there", Number)

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        flow.send(there, number)

    async def work(t: Stages) -> None:
        t.at("run", t.broker.fill_disk)
        await t.send(take, Number(1))
        await until(
            lambda: any(
                "no disk space" in why for why in assess_health(t._service_run.status(), stalled_after_s=300).reasons
            )
        )
        # Not to be cancelled for want of time.
        await t._service_run.stop(3600.0)
        t.broker.free_disk()

    run(app, work)
