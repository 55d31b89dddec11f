"""Tests of flows and stages that begin later: `delay` and `at`. Source: docs/stages.md, "Later" """

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from tests.integration.broker_process import BrokerProcess
from tests.stages.flows import PATIENCE_S, Memo, Number, Text, run, until
from tests.unit.mutation import mutated
from truenext import testing
from truenext.client.tasks.connection import connect
from truenext.flows.envelope import decode_envelope
from truenext.stage import Flow, FlowError, Service
from truenext.stage.core import outbox_unit
from truenext.stage.core.outbox_unit import (
    Delay,
    EncodedMessage,
    OutboxUnit,
    UnreadableUnit,
    combine_units,
    decode_unit,
)
from truenext.stage.sql import apply_schema
from truenext.testing.stages import Stages

LONG_S = 600.0


class Shop:
    def __init__(self, **options: Any) -> None:
        self.app = app = Service("shop", **options)
        self.received: list[int] = []

        @app.terminator("take", Number)
        async def take(number: Number) -> None:
            self.received.append(number.n)

        self.take = take


async def scheduled_count(t: Stages, queue: str) -> int:
    return sum(each.scheduled for each in await t._read_queue_statuses() if each.name == queue)


def test_delayed_flow_starts_when_its_delay_is_over_and_occupies_no_worker() -> None:
    shop = Shop(concurrency=1)

    async def work(t: Stages) -> None:
        for n in range(20):
            await t.send(shop.take, Number(n), delay=LONG_S)
        await t.send(shop.take, Number(100))
        await until(lambda: shop.received == [100])
        assert await scheduled_count(t, "take") == 20
        await t.advance(seconds=LONG_S - 5)
        await asyncio.sleep(0.05)
        assert shop.received == [100]
        await t.advance(seconds=6)
        await until(lambda: shop.received == [100, *range(20)])

    run(shop.app, work)


def test_flow_starts_at_its_time_and_a_past_time_is_now() -> None:
    shop = Shop()
    now = datetime.now(UTC)

    async def work(t: Stages) -> None:
        await t.send(shop.take, Number(1), at=(now + timedelta(seconds=2 * LONG_S)).astimezone(ZoneInfo("Asia/Tokyo")))
        await t.send(shop.take, Number(2), at=now + timedelta(seconds=LONG_S))
        await t.send(shop.take, Number(3), at=now - timedelta(days=400))
        await t.send(shop.take, Number(4), at=datetime(1900, 1, 1, tzinfo=UTC))
        await until(lambda: shop.received == [3, 4])
        await t.advance(seconds=LONG_S + 1)
        await until(lambda: shop.received == [3, 4, 2])
        await t.advance(seconds=LONG_S + 1)
        await until(lambda: shop.received == [3, 4, 2, 1])

    run(shop.app, work)


def test_delay_of_zero_is_no_delay() -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        await t.send(shop.take, Number(1), delay=0)
        await until(lambda: shop.received == [1])

    run(shop.app, work)


def test_stage_continues_after_a_delay_with_its_state_and_replies() -> None:
    app = Service("shop", concurrency=1)
    begun: list[int] = []
    replies: list[str] = []
    sleeper = app.endpoint("sleep", Number, Text, state=Memo)

    @sleeper.stage
    async def first(number: Number, memo: Memo, flow: Flow) -> None:
        begun.append(number.n)
        memo.n = number.n
        flow.next(Text("awake"), delay=600)

    @sleeper.stage
    async def second(woken: Text, memo: Memo) -> Text:
        return Text(f"{woken.text} {memo.n}")

    @app.terminator("hear", Text)
    async def hear(reply: Text) -> None:
        replies.append(reply.text)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            for n in range(3):
                initiation.send(sleeper, Number(n), trace="t", reply_to=hear)
        # One worker takes the next flow although the first one sleeps.
        await until(lambda: begun == [0, 1, 2])
        while await scheduled_count(t, "sleep.stage.second") < 3:
            await asyncio.sleep(0.005)
        await t.advance(seconds=600 - 10)
        await asyncio.sleep(0.05)
        assert not replies
        await t.advance(seconds=20)
        await until(lambda: sorted(replies) == ["awake 0", "awake 1", "awake 2"])
        await t.wait_until_ended()

    run(app, work)


def test_flow_that_a_stage_starts_may_be_delayed() -> None:
    shop = Shop()
    app = shop.app

    @app.terminator("begin", Number)
    async def begin(number: Number, flow: Flow) -> None:
        flow.send(shop.take, Number(1), delay=LONG_S)
        flow.send(shop.take, Number(2), at=datetime.now(UTC) + timedelta(seconds=LONG_S / 2))
        flow.send(shop.take, Number(3))

    async def work(t: Stages) -> None:
        await t.send(begin, Number())
        await until(lambda: shop.received == [3])
        await t.advance(seconds=LONG_S / 2 + 1)
        await until(lambda: shop.received == [3, 2])
        await t.advance(seconds=LONG_S / 2 + 1)
        await until(lambda: shop.received == [3, 2, 1])

    run(app, work)


def test_delayed_publication_reaches_the_subscribers_of_its_due_time() -> None:
    app = Service("shop")
    news = app.topic("news", Number)
    heard: list[int] = []

    @app.subscriber(news)
    async def listen(number: Number) -> None:
        heard.append(number.n)

    async def work(t: Stages) -> None:
        await t.publish(news, Number(1), delay=LONG_S)
        await t.publish(news, Number(2))
        await until(lambda: heard == [2])
        await t.advance(seconds=LONG_S + 1)
        await until(lambda: heard == [2, 1])

    run(app, work)


def test_time_to_live_of_a_delayed_flow_counts_from_its_due_time() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), testing.broker() as local:
            app = Service("web", broker=local.url)
            take = app.remote("nobody", Number)
            async with app.connected():
                await app.send(take, Number(1), trace="t", delay=LONG_S, ttl=60)
                await local.advance(seconds=LONG_S + 5)
                (message,) = (await local.queue("nobody")).messages
                left_ms = int(message.headers["expires"]) - local._clock.wall_ns() // 1_000_000
                assert 20_000 < left_ms < 61_000
                await local.advance(seconds=62)
                assert not (await local.queue("nobody")).messages

    asyncio.run(main())


def test_sleeping_flow_survives_a_kill_of_the_broker_and_never_starts_early(broker: BrokerProcess) -> None:
    """A real broker, its disk, and the clock of the machine."""
    app = Service("shop", broker=broker.url)
    times: dict[int, float] = {}
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def first(number: Number, flow: Flow) -> None:
        flow.next(number, delay=number.n / 1000)

    @chain.stage
    async def second(number: Number) -> None:
        times[number.n] = time.time()

    delays = [700, 1100, 1500, 1900, 2300]

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), app.running():
            start = time.time()
            for n in delays:
                await app.send(chain, Number(n), trace="t")
            await asyncio.sleep(0.3)
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start, broker.port)
            await until(lambda: len(times) == len(delays))
            assert all(times[n] - start >= n / 1000 for n in delays), (start, times)

    asyncio.run(main())


# ---- What is refused ----


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"delay": -1}, "delay must be a number of seconds, 0 to .* not -1"),
        ({"delay": float("nan")}, "delay must be a number of seconds"),
        ({"delay": float("inf")}, "delay must be a number of seconds"),
        ({"delay": 1e10}, "100 years"),
        ({"delay": "3d"}, "not '3d'"),
        ({"delay": True}, "not True"),
        ({"delay": None}, "not None"),
        ({"at": datetime(2030, 1, 1)}, "at is 2030-01-01T00:00:00, without a time zone: use datetime.now"),
        (
            {"at": 1_900_000_000},
            "at must be a datetime with a time zone, not 1900000000; for a number of seconds use delay",
        ),
        ({"at": datetime(2300, 1, 1, tzinfo=UTC)}, "the latest time is in the year 2169"),
        ({"at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 1}, "delay and at both"),
    ],
)
def test_invalid_delay_is_refused_by_name_and_nothing_is_sent(options: dict[str, Any], why: str) -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        with pytest.raises(FlowError, match=why):
            await t.send(shop.take, Number(), **options)
        await t.wait_until_ended()
        assert not shop.received

    run(shop.app, work)


@pytest.mark.parametrize("options", [{"delay": 1}, {"delay": 0}, {"at": datetime(2030, 1, 1, tzinfo=UTC)}])
def test_ask_with_a_delay_is_refused(options: dict[str, Any]) -> None:
    app = Service("shop")

    @app.single("echo", Number, Number)
    async def echo(number: Number) -> Number:
        return number

    async def work(t: Stages) -> None:
        with pytest.raises(FlowError, match=f"ask waits for the reply, so {next(iter(options))} needs a key"):
            await t.ask(echo, Number(), **options)

    run(app, work)


def test_delay_beyond_the_end_of_the_flow_is_refused_and_a_shorter_one_is_not() -> None:
    app = Service("shop")
    refused: list[str] = []
    ended: list[int] = []
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def first(number: Number, flow: Flow) -> None:
        for delay in (60.0, 3600.0, -1.0):
            with pytest.raises(FlowError) as error:
                flow.next(number, delay=delay)
            refused.append(str(error.value))
        flow.next(number, delay=30)

    @chain.stage
    async def second(number: Number) -> None:
        ended.append(number.n)

    async def work(t: Stages) -> None:
        await t.send(chain, Number(7), ttl=60)
        await t.wait_until_ended()
        assert ended == [7]

    run(app, work)
    assert refused[0].startswith("a delay of 60 s ends after the flow, which expires in 5")
    assert "a delay of 3600 s ends after the flow" in refused[1] and "0 to" in refused[2]


# ---- The outbox ----


@pytest.fixture
def session(database: str) -> Iterator[Session]:
    apply_schema(database)
    engine = create_engine(database)
    with Session(engine) as session:
        yield session
    engine.dispose()


def _make_older(session: Session, ms: int) -> None:
    session.execute(text("UPDATE truenext_outbox SET written_ms = written_ms - :ms"), {"ms": ms})
    session.commit()


def _check_delay_in_the_outbox(session: Session, database: str) -> None:
    """The flows were written 90 s ago: a delay of 100 s has 10 left; of the ttl only what passed since the due time."""
    app = Service("web", database=database, exactly_once=True)
    take = app.remote("nobody", Number)
    with app.initiate(session) as initiation:
        initiation.send(take, Number(1), trace="t", delay=100)
        initiation.send(take, Number(2), trace="t", delay=100, ttl=50)
        initiation.send(take, Number(3), trace="t", delay=60, ttl=50)
        initiation.send(take, Number(4), trace="t", delay=30, ttl=50)
        initiation.send(take, Number(5), trace="t")
    session.commit()
    _make_older(session, 90_000)

    async def numbers(local: testing.LocalBroker) -> dict[int, float]:
        """Return the numbers of the messages that are due, with the seconds that each has to live."""
        now_ms = local._clock.wall_ns() / 1e6
        return {
            _number_of(each.body): (int(each.headers.get("expires", 0)) - now_ms) / 1000
            for each in (await local.queue("nobody")).messages
        }

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), testing.broker() as local:
            app.broker = (local.url,)
            async with app.connected():
                while set(found := await numbers(local)) != {3, 5}:
                    assert not set(found) - {3, 5}, found
                    await asyncio.sleep(0.01)
                assert 10 < found[3] <= 20.1 and found[5] < 0
                await local.advance(seconds=5)
                assert set(await numbers(local)) == {3, 5}
                await local.advance(seconds=6)
                found = await numbers(local)
                assert set(found) == {1, 2, 3, 5} and found[1] < 0 and 38 < found[2] <= 50.1, found

    asyncio.run(main())


def _number_of(body: bytes) -> int:
    return msgspec.json.decode(decode_envelope(body).message, type=Number).n


def test_delay_in_the_outbox_counts_from_the_write_and_the_ttl_from_the_due_time(
    session: Session, database: str
) -> None:
    _check_delay_in_the_outbox(session, database)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max(delay.ms - age_ms, 0)", "delay.ms"),  # the delay counts from the sending
        ("age_ms -= delay.ms", "pass"),  # the ttl counts from the write
        ("delay=left if left.ms or left.at_ms else None", "delay=None"),  # no delay
    ],
)
def test_planted_fault_in_the_time_of_the_outbox_is_caught(
    old: str, new: str, session: Session, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_unit, "_adjust_time", mutated(outbox_unit._adjust_time, old, new))
    monkeypatch.setattr("tests.stages.test_delays.PATIENCE_S", 10)
    with pytest.raises((AssertionError, TimeoutError)):
        _check_delay_in_the_outbox(session, database)


def test_time_of_a_flow_in_the_outbox_stays_and_a_key_ignores_when_it_was_called(
    session: Session, database: str
) -> None:
    app = Service("web", database=database, exactly_once=True)
    take = app.remote("nobody", Number)
    at = datetime.now(UTC) + timedelta(seconds=100)
    for _ in range(2):
        with app.initiate(session, key="k") as initiation:
            initiation.send(take, Number(1), trace="t", at=at)
        session.commit()
        time.sleep(0.01)
    with pytest.raises(FlowError, match="other flows"), app.initiate(session, key="k") as initiation:
        initiation.send(take, Number(1), trace="t", at=at + timedelta(seconds=1))
    session.rollback()
    # However old the unit seems to be: the time is the broker's.
    _make_older(session, 90_000)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), testing.broker() as local:
            app.broker = (local.url,)
            async with app.connected(), connect(local.url) as control:
                while b'"scheduled":1' not in await control.control_request("queues"):
                    await asyncio.sleep(0.01)
                await local.advance(seconds=60)
                assert not (await local.queue("nobody")).messages
                await local.advance(seconds=41)
                assert len((await local.queue("nobody")).messages) == 1

    asyncio.run(main())


@pytest.mark.parametrize(("age_ms", "delay"), [(0, Delay(100)), (60, Delay(40)), (100, None), (1000, None)])
def test_delay_of_a_unit_is_reduced_by_its_age(age_ms: int, delay: Delay | None) -> None:
    data = OutboxUnit([EncodedMessage("/queue/a", b"x", "id", 4, True, delay=Delay(100))], False).encode()
    for each in (data, combine_units([(5, data)])):
        assert [message.delay for message in decode_unit(each, age_ms)] == [delay]


def test_unit_with_a_delay_is_left_to_processes_that_know_delays() -> None:
    """A truenext that reads version 1 only would send its messages at once."""
    plain = EncodedMessage("/queue/a", b"x", "id", 4, True)
    assert OutboxUnit([plain], False).encode().startswith(b"\x92\x01")
    delayed = OutboxUnit([plain, EncodedMessage("/queue/a", b"x", "id", 4, True, delay=Delay(1))], False).encode()
    assert delayed.startswith(b"\x92\x03")
    with pytest.raises(UnreadableUnit, match="version 4, and this truenext reads 1 and 3"):
        decode_unit(b"\x92\x04\x90", 0)


# ---- The test kit ----


def test_kit_advances_the_clock_for_delays_of_weeks_and_not_for_cron() -> None:
    app = Service("shop")
    ended: list[int] = []
    reports: list[int] = []
    chain = app.endpoint("chain", Number)
    news = app.topic("news", Number)

    @chain.stage
    async def first(number: Number, flow: Flow) -> None:
        flow.next(number, delay=21 * 86_400)

    @chain.stage
    async def second(number: Number, flow: Flow) -> None:
        if flow.attempt < 3:
            raise ValueError("not yet")
        ended.append(number.n)
        flow.publish(news, number, delay=7 * 86_400)

    @app.subscriber(news)
    async def listen(number: Number) -> None:
        ended.append(10 * number.n)

    @app.terminator("report", Number)
    async def report(number: Number) -> None:
        reports.append(number.n)

    app.cron("yearly", "0 0 1 1 *", report, Number(1))
    cron = app.crons["yearly"]

    async def work(t: Stages) -> None:
        async with connect(t.broker.url) as connection:
            yearly = f"0 0 1 {(datetime.now(UTC).month + 5) % 12 + 1} *"
            await connection.send("/queue/report", cron.body, cron=yearly, headers=cron.headers)
            await connection.send("/queue/report", cron.body, period=40 * 86_400.0, repeat=-1, delay=40 * 86_400.0)
        async with app.initiate() as initiation:
            initiation.send(chain, Number(1), trace="t", delay=3 * 86_400)
            initiation.send(chain, Number(2), trace="t", at=datetime.now(UTC) + timedelta(hours=1))
        await t.wait_until_ended()
        assert sorted(ended) == [1, 2, 10, 20] and not reports
        # Only cron is left.
        start = time.monotonic()
        await t.wait_until_ended()
        assert time.monotonic() - start < 10 and await scheduled_count(t, "report") == 2

    run(app, work)


def test_kit_gives_up_on_a_delayed_message_that_nothing_consumes() -> None:
    app = Service("shop")
    nobody = app.remote("nobody", Number)

    async def work(t: Stages) -> None:
        await t.send(nobody, Number(), delay=LONG_S)
        with pytest.raises(TimeoutError, match="nobody has 1"):
            await t.wait_until_ended()

    run(app, work)
