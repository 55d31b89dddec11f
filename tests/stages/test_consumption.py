"""Tests of stages that cannot consume messages. Source: docs/stages.md; docs/stages-running.md"""

import asyncio
from collections import Counter
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from tests.stages.services.job import Job
from truenext.client.tasks.connection import Connection
from truenext.errors import ClosedError, Refused
from truenext.stage import Service
from truenext.stage import consumption as consuming
from truenext.stage.core.health import assess_health
from truenext.testing.stages import stages


def service_that(handled: list[int]) -> Service:
    app = Service("taking", concurrency=1)

    @app.terminator("taking.jobs", Job)
    async def jobs(job: Job) -> None:
        handled.append(job.number)

    return app


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int) -> None:
    """Raise the error in each of the first `times` calls of `consume` of every connection."""
    consume = Connection.consume
    calls: dict[Connection, int] = {}

    async def failing_consume(self: Connection, *arguments: Any, **options: Any) -> None:
        calls[self] = calls.get(self, 0) + 1
        if calls[self] <= times:
            raise error
        await consume(self, *arguments, **options)

    monkeypatch.setattr(Connection, "consume", failing_consume)


@pytest.mark.parametrize("error", [Refused("no room"), TimeoutError("not in time")], ids=repr)
def test_a_stage_that_is_refused_or_not_answered_tries_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(consuming, "PAUSE_S", 0.05)
    failing(monkeypatch, error, times=2)
    handled: list[int] = []
    app = service_that(handled)

    async def run() -> None:
        async with stages(app) as t:
            why = f"taking.jobs consumes no interactive messages yet: {error}"
            while why not in (health := assess_health(t._service_run.status(), stalled_after_s=300)).reasons:
                await asyncio.sleep(0.001)
            assert (health.live, health.ready) == (True, False)
            await t.send(app.endpoints["taking.jobs"], Job(1))
            await t.wait_until_ended()
            while not assess_health(t._service_run.status(), stalled_after_s=300).ready:
                await asyncio.sleep(0.001)

    asyncio.run(run())
    assert handled == [1]


def test_pauses_of_a_stage_that_is_refused_again_grow_to_the_maximum(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(consuming, "PAUSE_S", 0.01)
    monkeypatch.setattr(consuming, "PAUSE_MAX_S", 0.64)
    failing(monkeypatch, Refused("no grant"), times=1000)

    async def run() -> None:
        async with stages(service_that([])):
            await asyncio.sleep(1)

    asyncio.run(run())
    of_stage = Counter(
        record.__dict__["stage"] for record in caplog.records if "cannot consume messages" in record.message
    )
    # At 0.01 seconds each, two pools would have logged 200.
    assert 6 <= of_stage["taking.jobs"] <= 20


def test_a_stage_that_takes_nothing_any_more_ends_the_process_and_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ClosedError("the broker does not want this user any more"), times=1000)
    app = service_that([])

    async def run() -> None:
        async with stages(app) as t:
            with pytest.raises(ClosedError, match="does not want this user"):
                await t._service_run.wait_until_failed()
            health = assess_health(t._service_run.status(), stalled_after_s=300)
            assert not health.live
            assert (
                "taking.jobs consumes no interactive messages any more: ClosedError: the broker does not"
                in health.reasons[0]
            )

    asyncio.run(run())


def test_a_login_that_is_refused_later_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed: the service retried for ever, over a connection that was closed for good."""
    app = service_that([])

    async def run() -> None:
        async with stages(app) as t:
            for lane in t._service_run._pools:
                lane.connection._driver.client.fail_permanently(Refused("this user is not known"))
            with pytest.raises(Refused, match="this user is not known"):
                await t._service_run.wait_until_failed()

    asyncio.run(run())


def test_a_service_whose_subscriber_is_refused_for_good_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ClosedError("the broker does not want this user any more"), times=1000)
    app = Service("taking")
    topic = app.topic("taking.news", Job)

    @app.subscriber(topic)
    async def news(job: Job) -> None: ...

    async def run() -> None:
        with pytest.raises(ClosedError, match="does not want this user"):
            async with stages(app):
                pass

    asyncio.run(run())


def test_a_stage_with_a_database_that_was_refused_once_is_ready_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed: it reported for ever that the messages in progress when the database failed had not ended."""
    monkeypatch.setattr(consuming, "PAUSE_S", 0.05)
    failing(monkeypatch, Refused("no room"), times=2)
    app = Service("taking", concurrency=1, database="sqlite://")

    @app.terminator("taking.jobs", Job)
    async def jobs(job: Job, sql: AsyncSession) -> None: ...

    async def run() -> None:
        async with stages(app, database="sqlite://") as t:
            await t.send(jobs, Job(1))
            await t.wait_until_ended()
            async with asyncio.timeout(30):
                while not assess_health(t._service_run.status(), stalled_after_s=300).ready:
                    await asyncio.sleep(0.001)

    asyncio.run(run())
