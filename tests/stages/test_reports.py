"""Tests of the reports of processes, in the process of the test. Source: docs/contract.md, 34"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

import truenext
from tests.stages.flows import PATIENCE_S, Number, until
from truenext.client.tasks.connection import Connection
from truenext.errors import ClosedError
from truenext.model.grants import Right
from truenext.model.process_report import REPORT_BYTES_MAX, STAGES_TOPIC, ProcessReport, StageFigures, Sum
from truenext.model.service_graph import EndpointNode, ServiceGraph, StageNode
from truenext.model.service_health import PoolStatus, ServiceHealth, ServiceStatus, StageStatus
from truenext.stage import Flow, Reject, Service, responder
from truenext.stage.interceptors.metrics import Metrics
from truenext.stage.report import encode_report
from truenext.stage.user_grants import request_user
from truenext.testing.local import LocalBroker
from truenext.testing.local import broker as local_broker
from truenext.version import VERSION


@pytest.fixture(autouse=True)
def period_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """Least time between two reports, shorter than in use."""
    monkeypatch.setattr(responder, "REPORT_PERIOD_S", 0.1)
    return 0.1


decode = msgspec.json.Decoder(ProcessReport).decode


def shop(broker: LocalBroker) -> Service:
    app = Service("shop", broker=broker.url)

    @app.terminator("double", Number)
    async def double(number: Number) -> None:
        if number.n < 0:
            raise ValueError

    return app


def run(work: Callable[[LocalBroker, Connection], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), local_broker() as broker, truenext.connect(broker.url) as client:
            await work(broker, client)

    asyncio.run(main())


async def subscribed(client: Connection) -> None:
    """Wait until a process is subscribed."""
    async with client.consumer("/temp-queue/subscribed") as replies:
        while True:
            await request(client, "/temp-queue/subscribed")
            if await replies.receive(0.05) is not None:
                return


async def request(client: Connection, reply_to: str, body: bytes = b"", **options: Any) -> None:
    await client.send(STAGES_TOPIC, body, persistent=False, ttl=10, reply_to=reply_to, **options)


async def report_of(client: Connection, name: str = "report") -> ProcessReport:
    async with client.consumer(f"/temp-queue/{name}") as replies:
        await request(client, f"/temp-queue/{name}", correlation_id="17")
        message = await replies.receive()
        assert message is not None and not message.persistent and message.expires_ms
        assert (message.correlation_id, message.headers["content-type"]) == ("17", "application/json")
        return decode(message.body)


def test_report_has_health_graph_and_figures(period_s: float) -> None:
    async def work(broker: LocalBroker, client: Connection) -> None:
        app = shop(broker)
        async with app.running():
            await subscribed(client)
            for number in range(3):
                await app.send(app.endpoints["double"], Number(number), trace="t")
            await until(lambda: sum(each.outcomes.get("completed", 0) for each in app.metrics.snapshot().values()) == 3)
            await asyncio.sleep(period_s)
            report, again = await asyncio.gather(report_of(client), report_of(client, "again"))
        assert (report.service, report.version, report.has_ended, report.omitted) == ("shop", VERSION, False, [])
        assert report.instance.startswith("shop on ") and again == report, "both were requested at once"
        assert report.health.ready and report.health.facts.state == "running"
        assert report.graph is not None and [each.name for each in report.graph.endpoints] == ["double"]
        assert report.metrics is not None and report.outbox is None
        (figures,) = report.metrics
        assert (figures.endpoint, figures.pool, figures.outcomes) == ("double", "other", {"completed": 3})
        assert figures.run.count == figures.attempts.count == figures.attempts.sum == 3

    run(work)


def test_later_requester_within_a_period_gets_the_report_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responder, "REPORT_PERIOD_S", PATIENCE_S)

    async def work(broker: LocalBroker, client: Connection) -> None:
        async with shop(broker).running():
            await subscribed(client)
            reports = []
            for name in "abc":
                reports.append(await report_of(client, name))
            assert len({each.at for each in reports}) == 1

    run(work)


def test_many_requesters_within_a_second_get_the_same_report(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    async def work(broker: LocalBroker, client: Connection) -> None:
        app = shop(broker)
        async with app.running():
            await subscribed(client)
            reporter = app._run_here._responder
            assert reporter is not None
            make = reporter._make_report

            async def counted(has_ended: bool) -> bytes:
                made.append(None)
                return await make(has_ended)

            reporter._make_report = counted
            monkeypatch.setattr(responder, "REPORT_PERIOD_S", 1.0)
            started = asyncio.get_running_loop().time()
            names = [f"/temp-queue/{number}" for number in range(20)]
            consumers = [await client.consumer(name) for name in names]
            for number in range(1000):
                client.send_nowait(STAGES_TOPIC, b"", persistent=False, reply_to=names[number % 20])
            await client.flush()
            bodies = []
            for consumer in consumers:
                message = await consumer.receive()
                assert message is not None
                bodies.append(message.body)
            took_s = asyncio.get_running_loop().time() - started
            await asyncio.sleep(1.2)
            assert len(set(bodies)) <= len(made) <= took_s + 2.2 + 1, "at most one a second"
            more = [await consumer.receive(0) for consumer in consumers]
            assert sum(each is not None for each in more) <= 20 * len(made)

    run(work)


BAD_REQUESTS: list[tuple[dict[str, Any], bytes]] = [
    ({}, b""),
    ({"reply_to": "/queue/orders"}, b""),
    ({"reply_to": "/topic/news"}, b""),
    ({"reply_to": "/queue/orders,/temp-queue/bad"}, b""),
    ({"reply_to": "/temp-queue/bad"}, b"[1]"),
    ({"reply_to": "/temp-queue/bad"}, b"\0" * 100_000),
    ({"reply_to": "/temp-queue/bad", "correlation_id": "x" * 300}, b""),
]


def test_message_that_is_no_request_gets_no_answer_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """C34.2."""
    caplog.set_level(logging.WARNING, "truenext.stage")

    async def work(broker: LocalBroker, client: Connection) -> None:
        async with shop(broker).running():
            await subscribed(client)
            async with client.consumer("/temp-queue/bad") as replies:
                for options, body in BAD_REQUESTS:
                    await client.send(STAGES_TOPIC, body, persistent=False, **options)
                assert (await report_of(client)).health.ready
                assert await replies.receive(0) is None
            queues = {each["name"]: each for each in json.loads(await client.control_request("queues"))}
            assert not queues.keys() & {"orders", "bad"}

    run(work)
    (warning,) = [each for each in caplog.records if "ignored a request to" in each.getMessage()]
    assert "temporary queue" in vars(warning)["reason"] and vars(warning)["more"] == 0


def test_requester_that_is_gone_leaves_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "truenext.stage")

    async def work(broker: LocalBroker, client: Connection) -> None:
        async with shop(broker).running():
            await subscribed(client)
            async with truenext.connect(broker.url) as other:
                assert (await report_of(other)).health.ready
                async with other.consumer("/temp-queue/b"):
                    await request(other, "/temp-queue/b")

    run(work)
    assert not caplog.records


def test_process_that_stops_says_so_and_unsubscribes() -> None:
    """C34.6."""

    async def work(broker: LocalBroker, client: Connection) -> None:
        async with client.consumer("/temp-queue/watching") as replies:
            async with shop(broker).running():
                await subscribed(client)
                await request(client, "/temp-queue/watching")
                first = await replies.receive()
                assert first is not None and not decode(first.body).has_ended
                facts = json.loads(await client.control_request("status"))
                before = facts["subscriptions"]["non_durable"]
            last = await replies.receive()
            assert last is not None
            report = decode(last.body)
            assert report.has_ended and report.health.facts.state == "stopping" and not report.health.ready
            facts = json.loads(await client.control_request("status"))
            assert facts["subscriptions"] == {"durable": 0, "non_durable": before - 1}
            assert not [each for each in asyncio.all_tasks() if "report" in each.get_name()]

    run(work)


@pytest.mark.parametrize("fault", ["kill", pytest.param("freeze", marks=pytest.mark.drawn)])
def test_process_stops_in_time_while_the_broker_does_not_answer(fault: str) -> None:
    async def measured(has_requesters: bool) -> float:
        loop = asyncio.get_running_loop()
        async with local_broker() as broker:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(shop(broker).running())
                client = await truenext.connect(broker.url)
                if has_requesters:
                    await subscribed(client)
                await client.close()
                getattr(broker, fault)()
                started = loop.time()
            ended = loop.time()
            if fault == "kill":
                await broker._start_again()
            return ended - started

    async def main() -> None:
        assert await measured(True) < await measured(False) + responder.LAST_REPORT_S + 1

    asyncio.run(main())


class NewerBroker:
    """Connection to a broker that tells of its users in a way which this version cannot read, until it is reloaded."""

    def __init__(self) -> None:
        self.requests = 0
        self.is_subscribed = asyncio.Event()

    async def control_request(self, verb: str) -> bytes:
        self.requests += 1
        return b"{}" if self.requests == 3 else b'{"user": ["a"]}'

    def consumer(self, destination: str, *, prefetch: int) -> AsyncExitStack:
        self.is_subscribed.set()
        raise ClosedError("closed")


def test_process_tries_again_after_an_answer_that_it_cannot_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fixed: the task ended, and the process was invisible without a word."""
    monkeypatch.setattr(responder, "RETRY_S", 0.0)

    async def main() -> None:
        connection: Any = NewerBroker()
        asked = responder.Responder(connection, make_report=AsyncMock(return_value=b""))
        await asyncio.wait_for(asked._receive_for_ever(), PATIENCE_S)
        assert connection.is_subscribed.is_set()

    asyncio.run(main())
    assert [each.levelname for each in caplog.records if "cannot receive requests" in each.message] == ["WARNING"] * 2


def test_grants_that_only_a_newer_broker_knows_are_left_out() -> None:
    """Fixed: a service did not start."""
    report = {"name": "a", "send": ["/newer/a", "orders.>"], "take": [">.a.>"], "newer": True}
    connection: Any = AsyncMock()
    connection.control_request.return_value = json.dumps({"user": report}).encode()
    user = asyncio.run(request_user(connection))
    assert user is not None
    assert [*map(str, user.grants[Right.SEND]), *user.grants[Right.TAKE]] == ["/queue/orders.>"]


def test_process_reports_again_after_a_restart_of_the_broker() -> None:
    async def work(broker: LocalBroker, client: Connection) -> None:
        async with shop(broker).running():
            await subscribed(client)
            run_id = (await report_of(client)).run
            await broker.restart()
            await subscribed(client)
            assert (await report_of(client, "later")).run == run_id

    run(work)


def test_process_whose_threads_are_all_busy_reports(period_s: float) -> None:
    async def work(broker: LocalBroker, client: Connection) -> None:
        app, ends = Service("shop", broker=broker.url, concurrency=2), threading.Event()

        @app.terminator("block", Number)
        def block(number: Number) -> None:
            assert ends.wait(PATIENCE_S)

        async with app.running():
            await subscribed(client)
            for number in range(4):
                await app.send(block, Number(number), trace="t")
            await until(lambda: sum(each.running for each in app.metrics.snapshot().values()) == 2)
            await asyncio.sleep(period_s)
            report = await report_of(client)
            ends.set()
        assert report.metrics is not None and [each.running for each in report.metrics] == [2]

    run(work)


def test_report_that_cannot_be_made_ends_neither_the_service_nor_later_reports(
    caplog: pytest.LogCaptureFixture, period_s: float
) -> None:
    async def work(broker: LocalBroker, client: Connection) -> None:
        app = shop(broker)
        async with app.running():
            await subscribed(client)
            metrics, app.metrics = app.metrics, None  # type: ignore[assignment]
            await asyncio.sleep(period_s)
            async with client.consumer("/temp-queue/a") as replies:
                await request(client, "/temp-queue/a")
                await until(lambda: "cannot answer a request" in caplog.text)
                app.metrics = metrics
                assert await replies.receive() is not None, "the request waits for the next report"

    run(work)


def test_report_of_exactly_once_stages_has_figures_of_the_outbox(tmp_path: Path) -> None:
    from truenext.stage.sql import apply_schema

    url = f"sqlite:///{tmp_path / 'shop.db'}"
    (tmp_path / "shop.db").touch()
    apply_schema(url)

    async def work(broker: LocalBroker, client: Connection) -> None:
        app = Service("shop", broker=broker.url, database=url, exactly_once=True)

        @app.terminator("write", Number)
        async def write(number: Number, sql: AsyncSession) -> None:
            pass

        async with app.running():
            await subscribed(client)
            report = await report_of(client)
        assert report.outbox is not None
        assert (report.outbox.unsent, report.outbox.oldest_s, report.outbox.refused) == (0, 0, 0)

    run(work)


def test_program_that_only_starts_flows_does_not_report() -> None:
    async def work(broker: LocalBroker, client: Connection) -> None:
        async with shop(broker).connected(), client.consumer("/temp-queue/a") as replies:
            await request(client, "/temp-queue/a")
            assert await replies.receive(0.3) is None

    run(work)


def test_service_counts_with_the_metrics_that_it_is_given() -> None:
    own = Metrics()
    assert Service("shop", interceptors=[own]).metrics is own
    app = Service("shop")
    assert app.interceptors == [app.metrics]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
def test_service_counts_as_the_hooks_of_metrics_do(is_async: bool) -> None:
    """A service counts with its metrics directly; further ones are called as interceptors."""
    direct, hooked = Metrics(), Metrics()

    async def work(broker: LocalBroker, client: Connection) -> None:
        app = Service("shop", broker=broker.url, attempts=2, interceptors=[direct, hooked])
        place, other = app.endpoint("place", Number), app.endpoint("other", Number)

        def handle(number: Number, flow: Flow) -> None:
            if number.n % 5 == 1:
                raise ValueError
            if number.n % 5 == 2:
                raise Reject("bad")
            if number.n % 5 == 3:
                flow.send(other, Number(0))
                flow.send(other, Number(0))

        async def handle_async(number: Number, flow: Flow) -> None:
            handle(number, flow)

        place.stage(handle_async if is_async else handle)

        @other.stage
        async def end(number: Number, flow: Flow) -> None:
            pass

        async with app.running():
            async with app.initiate() as initiation:
                for number in range(20):
                    initiation.send(place, Number(number), trace="t", interactive=number % 3 == 0)
            await client.send("/queue/place", b"no envelope")
            await until(lambda: sum(sum(each.outcomes.values()) for each in direct.snapshot().values()) == 32)
        assert direct.snapshot() == hooked.snapshot()
        assert direct.sent_outside_stages == hooked.sent_outside_stages == 20
        outcomes = [each.outcomes for each in direct.snapshot().values()]
        assert {key for each in outcomes for key in each} == {"completed", "failed", "rejected"}
        assert not any(each.running for each in direct.snapshot().values())

    run(work)


def test_subclass_of_metrics_is_called_as_an_interceptor() -> None:
    class Own(Metrics):
        pass

    own = Own()
    app = Service("shop", interceptors=[own])
    assert app.metrics is own and app.direct_counters is None and app.interceptor_chain().has_ended


# ---- Size ----


def large_report(stages: int, metrics: int, reason: str = "") -> ProcessReport:
    name = "order.place.of.a.long.name"
    nodes = [StageNode(f"{name}{number}", name, "Order", []) for number in range(stages)]
    statuses = [
        StageStatus(
            stage=f"{name}{number}",
            pool="other",
            active=0,
            waits_for_database=False,
            broker_wait_reason=reason,
            without_progress_s=0,
            end_reason="",
        )
        for number in range(stages)
    ]
    pool = PoolStatus(pool="other", state="closed", error=reason, since_s=0, reconnects=0, has_disk_space=True)
    facts = ServiceStatus(service="shop", state="running", broker=[pool], database=reason, stages=statuses)
    total = Sum(1, 1.0)
    figures = StageFigures(
        endpoint=name,
        stage=name,
        pool="other",
        running=0,
        outcomes={},
        given_up={},
        sent=0,
        attempts=total,
        waited=total,
        run=total,
        total=total,
    )
    return ProcessReport(
        service="shop",
        version="1",
        instance="shop",
        run="a",
        started_at=0,
        at=0,
        health=ServiceHealth(live=True, ready=False, reasons=[reason] * stages, facts=facts),
        graph=ServiceGraph("shop", [EndpointNode(name, "Order", None, None, "", nodes)], [], []),
        metrics=[figures] * metrics,
        outbox=None,
    )


@pytest.mark.parametrize(
    ("report", "omitted"),
    [
        (large_report(100, 200), []),
        (large_report(1200, 100), ["graph"]),
        (large_report(700, 2000), ["graph", "metrics"]),
        (large_report(2000, 4000), ["graph", "metrics", "health"]),
        (large_report(100, 100, "x" * 100_000), ["graph", "metrics", "health"]),
    ],
)
def test_large_report_lacks_parts(report: ProcessReport, omitted: list[str]) -> None:
    """C34.5."""
    body = encode_report(report)
    assert len(body) <= REPORT_BYTES_MAX
    decoded = decode(body)
    assert decoded.omitted == omitted and (decoded.graph is None) is ("graph" in omitted)
    assert (decoded.metrics is None) is ("metrics" in omitted)
    assert (
        decoded.health.reasons[:1] == [report.health.reasons[0][:500]] if "health" in omitted else report.health.reasons
    )
