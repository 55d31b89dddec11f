"""Tests of exactly-once processing with lost connections, lost answers, restored brokers and restored databases.
Source: docs/stages-database.md"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec import Raw
from msgspec.json import decode as decode_json
from msgspec.structs import replace
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.drawing import each_one_of
from tests.prometheus_samples import samples_of
from tests.stages.ended_messages import settles_messages
from tests.stages.flows import Number, Text, run, until
from tests.stages.postgres import PostgresServer
from truenext.cli.main import main
from truenext.client.tasks.connection import Session as ClientSession
from truenext.client.tasks.connection import connect
from truenext.errors import ConnectionLost, RolledBack
from truenext.flows.envelope import decode_envelope, encode_envelope
from truenext.stage import Endpoint, Flow, Service
from truenext.stage.core.initiation import Initiation
from truenext.stage.core.outbox_unit import EncodedMessage, OutboxProducer, OutboxUnit
from truenext.stage.core.output import Output
from truenext.stage.events import StageEvents
from truenext.stage.interceptors.metrics import Metrics
from truenext.stage.outbox.housekeeping import OutboxConfirmer
from truenext.stage.outbox.publishing import send_unit
from truenext.stage.outbox.relay import OutboxRelay
from truenext.stage.sql.errors import DatabaseUnavailable
from truenext.stage.sql.outbox_table import Outbox, StoredUnit, UnsentCounts
from truenext.stage.sql.session_outbox import SessionOutbox
from truenext.testing.stages import Point, Stages

PATIENCE_S = 30
UNSENT = "SELECT 1 FROM truenext_outbox"
INSERT = text("INSERT INTO orders VALUES (:n)")


@pytest.fixture(params=each_one_of([True, False], ["async", "plain"]))
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Shop:
    """An exactly-once stage that inserts a row and sends a message. The message has no consumer: its queue shows all
    that was sent."""

    def __init__(self, is_async: bool, **settings: Any) -> None:
        self.app = app = Service("shop", exactly_once=True, **settings)
        self.runs: list[int] = []
        self.body: Callable[[Number, Flow], None] = lambda number, flow: None
        self.take = take = app.remote("take", Number)

        async def asynchronous(number: Number, flow: Flow, sql: AsyncSession) -> None:
            self.runs.append(number.n)
            await sql.execute(INSERT, {"n": number.n})
            flow.send(take, number)
            self.body(number, flow)

        def plain(number: Number, flow: Flow, sql: Session) -> None:
            self.runs.append(number.n)
            sql.execute(INSERT, {"n": number.n})
            flow.send(take, number)
            self.body(number, flow)

        place = app.endpoint("placing", Number)
        place.stage(asynchronous if is_async else plain)
        self.place: Endpoint[Number, None] = place


async def make_table(t: Stages) -> None:
    async with t.sql() as sql:
        # No key: what is done twice is there twice.
        await sql.execute(text("CREATE TABLE orders (n INTEGER)"))


async def numbers(t: Stages, of: str) -> list[int]:
    async with t.sql() as sql:
        return sorted((await sql.execute(text(of))).scalars())


async def sent(t: Stages) -> list[int]:
    return sorted(
        decode_json(decode_envelope(each.body).message)["n"] for each in (await t.broker.queue("take")).messages
    )


async def all_is_over(t: Stages) -> None:
    still = 0
    async with asyncio.timeout(PATIENCE_S):
        # What waits and what somebody has is not looked at in the same instant.
        while still < 3:
            await asyncio.sleep(0.02)
            # The connection over which the test asks is lost with the others.
            with suppress(OSError, ConnectionLost):
                queue = await t.broker.queue("placing")
                has_messages = queue.messages or queue.unacknowledged or settles_messages(t.broker)
                still = 0 if has_messages or await numbers(t, UNSENT) else still + 1


async def expect(t: Stages, *placed: int) -> None:
    """Check that each of these orders was inserted once, and sent once."""
    await all_is_over(t)
    assert not await t.dead_letters()
    assert await numbers(t, "SELECT n FROM orders") == sorted(placed)
    assert await sent(t) == sorted(placed)
    assert len(await numbers(t, "SELECT 1 FROM truenext_inbox")) == len(placed)


def test_messages_are_processed_and_sent_once_and_the_outbox_is_empty_afterwards(database: str, is_async: bool) -> None:
    shop = Shop(is_async)

    async def work(t: Stages) -> None:
        await make_table(t)
        for n in range(20):
            await t.send(shop.place, Number(n))
        await expect(t, *range(20))
        assert sorted(shop.runs) == list(range(20))
        assert sum(await numbers(t, "SELECT number FROM truenext_producers")) == 20

    run(shop.app, work, database=database)


def test_a_function_without_a_session_is_remembered_too(database: str) -> None:
    app = Service("shop", exactly_once=True)
    received: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        received.append(number.n)

    async def work(t: Stages) -> None:
        await t.send(take, Number(1))
        await t.wait_until_ended()
        assert received == [1]
        assert len(await numbers(t, "SELECT 1 FROM truenext_inbox")) == 1

    run(app, work, database=database)


POINTS: list[Point] = ["received", "run", "checked", "sent", "SQL committed", "committed"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("fault", ["connections dropped", "broker crashed"])
def test_a_connection_or_broker_that_is_lost_at_any_point_doubles_and_loses_nothing(
    database: str, is_async: bool, point: Point, fault: str
) -> None:
    shop = Shop(is_async)

    async def work(t: Stages) -> None:
        await make_table(t)
        starting: list[asyncio.Task[None]] = []

        def crash() -> None:
            t.broker.kill()
            starting.append(asyncio.create_task(t.broker._start_again()))

        t.at(point, t.broker.drop if fault == "connections dropped" else crash, stage="placing")
        for n in range(5):
            await t.send(shop.place, Number(n))
        await asyncio.gather(*starting)
        await expect(t, *range(5))

    run(shop.app, work, database=database)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lost_answer_to_a_commit_loses_and_repeats_nothing(database: str, is_async: bool, when: str) -> None:
    shop = Shop(is_async)

    async def work(t: Stages) -> None:
        await make_table(t)
        t.at("SQL committed", lambda: t.broker.lose_commit("before" if when == "before" else "after"), stage="placing")
        for n in range(5):
            await t.send(shop.place, Number(n))
        await expect(t, *range(5))

    run(shop.app, work, database=database)


def test_process_whose_producers_were_claimed_uses_others_and_counts_no_attempt(database: str, is_async: bool) -> None:
    shop = Shop(is_async, attempts=1)

    async def work(t: Stages) -> None:
        await make_table(t)
        for n in range(20):
            await t.send(shop.place, Number(n))
        await all_is_over(t)
        async with t.sql() as sql:
            await sql.execute(text("UPDATE truenext_producers SET owner = 'another process'"))
            await sql.execute(
                text(
                    "INSERT INTO truenext_owners (name, service, instance, alive_until_ms) "
                    "VALUES ('another process', 'shop', 'shop', 9999999999999)"
                )
            )
        for n in range(20, 40):
            await t.send(shop.place, Number(n))
        await expect(t, *range(40))

    run(shop.app, work, database=database)


def test_a_broker_that_is_another_one_gets_what_is_left_under_new_numbers(database: str, is_async: bool) -> None:
    shop = Shop(is_async)

    async def work(t: Stages) -> None:
        await make_table(t)
        for n in range(10):
            await t.send(shop.place, Number(n))
        await all_is_over(t)
        async with t.sql() as sql:
            # As if it had never heard of these numbers.
            await sql.execute(text("UPDATE truenext_producers SET number = number + 1000"))
        for n in range(10, 20):
            await t.send(shop.place, Number(n))
        await expect(t, *range(20))

    run(shop.app, work, database=database)


@pytest.mark.parametrize("when", ["before they are settled", "afterwards"])
def test_stale_readers_do_not_send_a_unit_twice_after_a_restored_broker_lost_numbers(
    database: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stale readers have read the units before the broker was restored, and send them while its relay finds a gap."""
    shop = Shop(is_async=True)
    check, is_sent = OutboxRelay._check_outbox, OutboxRelay._send_unit

    async def nothing(relay: OutboxRelay) -> None:
        pass

    async def work(t: Stages) -> None:
        once = t._service_run.exactly_once
        assert once is not None
        relay, outbox = once._relay, once._outbox
        for n in range(2):
            async with t.sql() as sql, shop.app.initiate(sql) as initiation:
                initiation.send(shop.take, Number(n), trace=f"order {n}")
            producer = await relay.borrow_producer()
            await outbox.number_units(producer)
            producer.last_number += 1
            relay.return_producer(producer)
        read = await outbox.units_of(producer)
        assert [each.number for each in read] == [1, 2]

        async def stale() -> None:
            for each in read:
                with suppress(RolledBack):
                    await send_unit(relay._pool, each, "shop", relay._counters)

        async def interrupted(relay: OutboxRelay, unit: StoredUnit) -> bool:
            was_sent = await is_sent(relay, unit)
            if was_sent == (when == "afterwards"):
                await stale()
            return was_sent

        monkeypatch.setattr(OutboxRelay, "_send_unit", interrupted)
        # The broker had it, and has lost it.
        await outbox.confirm_rows([read[0].id], [])
        relay.mark_in_doubt(relay._free_producers.pop())
        while await numbers(t, UNSENT):
            await check(relay)
        assert await sent(t) == ([1] if when == "afterwards" else [0, 1])

    monkeypatch.setattr(OutboxRelay, "_check_outbox", nothing)
    run(shop.app, work, database=database)


def test_a_database_that_has_lost_commits_uses_none_of_their_numbers(database: str) -> None:
    shop = Shop(is_async=True)

    async def work(t: Stages) -> None:
        await make_table(t)
        for n in range(10):
            await t.send(shop.place, Number(n))
        await all_is_over(t)
        async with t.sql() as sql:
            # A backup of before the last of each.
            await sql.execute(text("UPDATE truenext_producers SET number = number - 1"))
        await t.send(shop.place, Number(10))
        await all_is_over(t)
        # The others were looked at meanwhile.
        await asyncio.sleep(1)
        for n in range(11, 30):
            await t.send(shop.place, Number(n))
        await expect(t, *range(30))

    run(shop.app, work, database=database)


@pytest.mark.parametrize("swallows", [False, True])
def test_a_message_that_was_handled_before_runs_no_more_whatever_its_function_makes_of_it(
    database: str, swallows: bool
) -> None:
    app = Service("shop", exactly_once=True)
    take = app.remote("take", Number)
    runs: list[int] = []

    @app.terminator("placing", Number)
    async def placing(number: Number, flow: Flow, sql: AsyncSession) -> None:
        runs.append(number.n)
        try:
            await sql.execute(INSERT, {"n": number.n})
        except Exception:
            if not swallows:
                raise
            flow.send(take, Number(99))
        flow.send(take, number)

    async def work(t: Stages) -> None:
        await make_table(t)
        kept: list[tuple[str, bytes]] = []
        await t.send(placing, Number(1))
        await all_is_over(t)
        async with connect(t.broker.url) as connection:
            async for each in connection.browse("/queue/take"):
                kept.append((each.destination, each.body))
            # A foreign program sends the same message twice: it is no redelivery.
            envelope = replace(
                decode_envelope(kept[0][1]),
                id="the same",
                kind="send",
                message=Raw(b'{"n":7}'),
                waiting=[],
                state=Raw(b"null"),
            )
            for _ in range(3):
                await connection.send("/queue/placing", encode_envelope(envelope))
        await all_is_over(t)
        assert not await t.dead_letters()
        assert await numbers(t, "SELECT n FROM orders") == [1, 7]
        assert await sent(t) == [1, 7]

    run(app, work, database=database)


def test_a_message_that_was_handled_before_is_told_as_that(database: str, tmp_path: Path) -> None:
    shop = Shop(is_async=True, interceptors=[metrics := Metrics()])
    (folder := tmp_path / "events").mkdir()

    async def work(t: Stages) -> None:
        t._service_run.context.events = StageEvents(folder, "shop", "here")
        await make_table(t)
        t.at("SQL committed", t.broker.drop, stage="placing")
        await t.send(shop.place, Number(1))
        await expect(t, 1)
        once = t._service_run.exactly_once
        assert once is not None
        # The answer to its COMMIT may have come all the same.
        before = once.counters.already_processed
        outcomes = next(iter(metrics.snapshot().values())).outcomes
        assert outcomes.get("already processed", 0) == before
        async with connect(t.broker.url) as connection:
            output = Output("0" * 32, "elsewhere")
            Initiation(output, 0, {}).send(shop.place, Number(2), trace="order 2")
            for _ in range(3):
                await connection.send("/queue/placing", output.outgoing[0].encode({}).body)
        await expect(t, 1, 2)
        assert once.counters.already_processed == before + 2
        samples = samples_of(await once.collect())
        assert samples["truenext_inbox_already_processed_total"] == before + 2
        assert samples['truenext_outbox_messages{numbered="yes"}'] == 0

    run(shop.app, work, database=database)
    events = b"".join(path.read_bytes() for path in folder.iterdir()).decode()
    assert events.count('"kind":"already processed"') >= 2
    assert events.count('"exactly_once":true') == events.count('"kind":"started"')


def test_processed_message_runs_again_only_by_rerun(database: str) -> None:
    shop = Shop(is_async=True)

    async def work(t: Stages) -> None:
        def run_command(*words: str) -> Result:
            return CliRunner().invoke(main, [*words, "--url", t.broker.url])

        await make_table(t)
        output = Output("0" * 32, "elsewhere")
        Initiation(output, 0, {}).send(shop.place, Number(1), trace="order 1", interactive=True)
        body = output.outgoing[0].encode({}).body
        async with connect(t.broker.url) as connection:
            for queue in ("placing", "kept", "kept", "DLQ.placing"):
                await connection.send(f"/queue/{queue}", body, priority=7)
            await expect_sent(t, 1)
            # Moved, and driven again, it is known.
            assert (await asyncio.to_thread(run_command, "move", "kept", "placing", "--count", "1")).exit_code == 0
            await expect_sent(t, 1)
            done = await asyncio.to_thread(run_command, "stages", "rerun", "kept")
            assert done.exit_code == 2 and "--to" in done.output
            done = await asyncio.to_thread(run_command, "stages", "rerun", "kept", "--to", "placing")
            assert done.exit_code == 0 and "1 message would be sent to placing" in done.output
            await expect_sent(t, 1)
            done = await asyncio.to_thread(run_command, "stages", "rerun", "kept", "--to", "placing", "--force")
            assert done.exit_code == 0 and "1 message sent to placing" in done.output
            await expect_sent(t, 1, 1)
            done = await asyncio.to_thread(run_command, "stages", "rerun", "DLQ.placing", "--force")
            assert done.exit_code == 0 and "1 message sent to placing" in done.output
            await expect_sent(t, 1, 1, 1)
            # Fixed: a queue that was misspelt was made, and "0 messages sent" was all that was said.
            done = await asyncio.to_thread(run_command, "stages", "rerun", "DLQ.plaicng", "--force")
            assert done.exit_code == 1 and "there is no queue 'DLQ.plaicng'" in done.output
            done = await asyncio.to_thread(run_command, "stages", "rerun", "kept", "--to", "plaicng")
            assert done.exit_code == 0 and "there is no queue 'plaicng' yet" in done.output
            await connection.send("/queue/kept", b"not a message of stages")
            done = await asyncio.to_thread(run_command, "stages", "rerun", "kept", "--to", "placing", "--force")
            assert done.exit_code == 1 and "not a message of stages" in done.output
            waiting = (await t.broker.queue("kept")).messages
            assert waiting[0].headers["message-id"] in done.output
            done = await asyncio.to_thread(run_command, "stages", "rerun", "kept", "--to", "kept", "--force")
            assert done.exit_code == 2 and "already" in done.output
            assert len((await t.broker.queue("kept")).messages) == 1

    run(shop.app, work, database=database)


def test_rerun_sends_large_messages(database: str) -> None:
    """Fixed: together they exceeded one transaction of the broker, and no message after them was sent."""
    app = Service("shop", exactly_once=True)
    received: list[int] = []

    @app.terminator("take", Text)
    async def take(text: Text) -> None:
        received.append(len(text.text))

    sizes = [10, 11, 12, 15 * 1024 * 1024, 13, 6_000_000, 6_000_001, 6_000_002, 14]

    async def work(t: Stages) -> None:
        async with connect(t.broker.url) as connection:
            for n, size in enumerate(sizes):
                output = Output(f"{n:032}", "elsewhere")
                Initiation(output, 0, {}).send(take, Text("x" * size), trace="large")
                await connection.send("/queue/kept", output.outgoing[0].encode({}).body)
        words = ["stages", "rerun", "kept", "--to", "take", "--force", "--url", t.broker.url]
        done = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert done.exit_code == 0 and "9 messages sent" in done.output, done.output
        await until(lambda: len(received) == len(sizes))
        assert sorted(received) == sorted(sizes)

    run(app, work, database=database)


async def expect_sent(t: Stages, *placed: int) -> None:
    await all_is_over(t)
    assert await numbers(t, "SELECT n FROM orders") == list(placed)
    assert await sent(t) == list(placed)


def test_metrics_show_unsent_units_and_omit_them_while_the_database_is_unavailable(database: str) -> None:
    shop = Shop(is_async=True)

    async def work(t: Stages) -> None:
        await make_table(t)
        once = t._service_run.exactly_once
        assert once is not None
        async with t.sql() as sql:
            for n in range(3):
                await sql.execute(
                    text(
                        "INSERT INTO truenext_outbox (id, service, producer, number, interactive, messages, "
                        f"written_ms, unit) VALUES ('{n:032x}', 'shop', '{n} of another', 1, false, 1, 0, '')"
                    )
                )
        unsent = await once._outbox.count_unsent()
        assert (unsent.numbered, unsent.unnumbered) == (3, 0)
        assert unsent.oldest_s > 1e9
        assert samples_of(await once.collect())['truenext_outbox_messages{numbered="yes"}'] == 3
        once._outbox.count_unsent = away  # type: ignore[method-assign]
        samples = samples_of(await once.collect())
        assert not any(each.startswith("truenext_outbox_messages") for each in samples)
        assert samples["truenext_inbox_already_processed_total"] == 0

    async def away() -> UnsentCounts:
        raise DatabaseUnavailable("it is not there")

    run(shop.app, work, database=database)


def test_unit_sent_but_not_confirmed_before_its_process_died_is_not_sent_again(database: str) -> None:
    shop = Shop(is_async=True)

    async def work(t: Stages) -> None:
        await make_table(t)
        once = t._service_run.exactly_once
        assert once is not None
        # Its rows stay.
        once._confirmer.add = lambda *_, **__: None  # type: ignore[method-assign]
        for n in range(5):
            await t.send(shop.place, Number(n))
        async with asyncio.timeout(PATIENCE_S):
            while await sent(t) != list(range(5)):
                await asyncio.sleep(0.02)
        async with t.sql() as sql:
            await sql.execute(text("UPDATE truenext_producers SET owner = 'one that died'"))
        await expect(t, *range(5))
        assert once.counters.claimed
        # Or with each process that dies there would be more.
        async with asyncio.timeout(PATIENCE_S):
            while await numbers(t, "SELECT count(*) FROM truenext_producers") != [0]:
                await asyncio.sleep(0.05)

    run(shop.app, work, database=database)


def test_redelivered_message_sends_its_unit_without_a_relay(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer of the redelivery sends the unit before it acknowledges: it may be the last process that knows of
    it."""

    async def nothing(relay: OutboxRelay) -> None:
        pass

    monkeypatch.setattr(OutboxRelay, "_check_outbox", nothing)
    shop = Shop(is_async=True)

    async def work(t: Stages) -> None:
        await make_table(t)
        t.at("SQL committed", t.broker.drop, stage="placing")
        for n in range(5):
            await t.send(shop.place, Number(n))
        await expect(t, *range(5))

    run(shop.app, work, database=database)


@pytest.mark.parametrize("whose", ["of the broker", "of the broker, which did not hear", "of the database"])
def test_lost_answer_to_the_relay_loses_and_repeats_nothing(
    database: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(is_async=True)
    is_sent, number_units = OutboxRelay._send_unit, Outbox.number_units

    async def work(t: Stages) -> None:
        lost: list[str] = []

        async def lossy(relay: OutboxRelay, unit: StoredUnit) -> bool:
            if len(lost) < 2 and whose != "of the database":
                lost.append(whose)
                t.broker.lose_commit("after" if whose == "of the broker" else "before")
            return await is_sent(relay, unit)

        async def forgetful(outbox: Outbox, producer: OutboxProducer, rows_max: int) -> StoredUnit | None:
            unit = await number_units(outbox, producer, rows_max)
            if len(lost) < 2 and whose == "of the database" and unit is not None:
                lost.append(whose)
                raise DatabaseUnavailable("no answer")
            return unit

        monkeypatch.setattr(OutboxRelay, "_send_unit", lossy)
        monkeypatch.setattr(Outbox, "number_units", forgetful)
        await make_table(t)
        for n in range(5):
            async with t.sql() as sql, shop.app.initiate(sql) as initiation:
                initiation.send(shop.take, Number(n), trace=f"order {n}")
        async with asyncio.timeout(PATIENCE_S):
            while await numbers(t, UNSENT):
                await asyncio.sleep(0.02)
        assert lost and await sent(t) == list(range(5))

    run(shop.app, work, database=database)


def test_a_message_that_comes_twice_and_sends_nothing_is_handled_once(database: str) -> None:
    app = Service("shop", exactly_once=True)

    @app.terminator("placing", Number)
    async def placing(number: Number, sql: AsyncSession) -> None:
        await sql.execute(INSERT, {"n": number.n})

    async def work(t: Stages) -> None:
        await make_table(t)
        output = Output("0" * 32, "elsewhere")
        Initiation(output, 0, {}).send(placing, Number(1), trace="order 1")
        async with connect(t.broker.url) as connection:
            for _ in range(3):
                # No redelivery: a foreign program sends it three times.
                await connection.send("/queue/placing", output.outgoing[0].encode({}).body)
        await all_is_over(t)
        assert not await t.dead_letters()
        assert await numbers(t, "SELECT n FROM orders") == [1]

    run(app, work, database=database)


@pytest.mark.parametrize("how", ["one message to two queues", "two messages with one id"])
def test_a_message_that_comes_to_two_stages_has_both_send_something(database: str, how: str) -> None:
    """Fixed: the messages of both stages had the same ids, so that the inbox of the third stage took the second for
    the first."""
    app = Service("shop", exactly_once=True)
    received: list[str] = []

    @app.terminator("note", Text)
    async def note(text: Text) -> None:
        received.append(text.text)

    @app.terminator("billing", Number)
    async def billing(number: Number, flow: Flow) -> None:
        flow.send(note, Text(f"billing {number.n}"))

    @app.terminator("mail", Number)
    async def mail(number: Number, flow: Flow) -> None:
        flow.send(note, Text(f"mail {number.n}"))

    async def work(t: Stages) -> None:
        async with connect(t.broker.url) as connection:
            for n in range(5):
                output = Output(f"{n:032}", "elsewhere")
                Initiation(output, 0, {}).send(mail, Number(n), trace="order")
                body = output.outgoing[0].encode({}).body
                if how == "one message to two queues":
                    await connection.send("/queue/billing,/queue/mail", body)
                else:
                    await connection.send("/queue/billing", body)
                    await connection.send("/queue/mail", body)
        await until(lambda: len(received) == 10)
        await t.wait_until_ended()
        assert sorted(received) == [f"{by} {n}" for by in ("billing", "mail") for n in range(5)]

    run(app, work, database=database)


def test_a_producer_that_is_used_here_is_not_taken_over_from_a_process_that_died_with_it(database: str) -> None:
    """Fixed: the process then had the producer twice, with two units under way. The search of all orders of steps
    found it."""
    app = Service("shop", exactly_once=True)

    @app.terminator("placing", Number)
    async def placing(number: Number, sql: AsyncSession) -> None:
        pass

    async def work(t: Stages) -> None:
        once = t._service_run.exactly_once
        assert once is not None
        relay = once._relay
        # From here on it looks when the test says so.
        await relay.stop()
        producer = await relay.borrow_producer()
        async with t.sql() as sql:
            await sql.execute(text("UPDATE truenext_producers SET owner = 'one that died'"))
        await relay._check_outbox()
        assert not relay._free_producers and not relay._producers_in_doubt
        relay.mark_in_doubt(producer)
        await relay._check_outbox()
        await relay._check_outbox()
        assert not relay._free_producers and not relay._producers_in_doubt
        assert await numbers(t, "SELECT count(*) FROM truenext_producers") == [0]

    run(app, work, database=database)


def test_inbox_row_is_not_marked_acknowledged_after_a_repeated_commit(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated COMMIT acknowledged nothing: the message is redelivered, and must be known until then."""
    shop = Shop(is_async=True)
    commit, add = ClientSession.commit, OutboxConfirmer.add
    marked: list[bool] = []

    async def second(session: ClientSession, **options: Any) -> bool:
        if "producer" in options and not marked:
            async with session._connection.session(transacted=True) as first:
                await first.send("/queue/elsewhere", b"")
                await commit(first, **options)
        return await commit(session, **options)

    def noted(confirmer: OutboxConfirmer, id: str, *, was_sent: bool, is_acknowledged: bool) -> None:
        marked.append(is_acknowledged)
        add(confirmer, id, was_sent=was_sent, is_acknowledged=is_acknowledged)

    monkeypatch.setattr(ClientSession, "commit", second)
    monkeypatch.setattr(OutboxConfirmer, "add", noted)

    async def work(t: Stages) -> None:
        await make_table(t)
        await t.send(shop.place, Number(1))
        await all_is_over(t)
        assert marked[0] is False and marked[-1] is True
        assert await numbers(t, "SELECT n FROM orders") == [1]

    run(shop.app, work, database=database)


def test_error_after_the_sql_commit_counts_no_attempt(database: str, is_async: bool) -> None:
    shop = Shop(is_async, attempts=1)

    async def work(t: Stages) -> None:
        await make_table(t)

        def fail() -> None:
            raise ValueError("whatever")

        t.at("SQL committed", fail, stage="placing")
        for n in range(3):
            await t.send(shop.place, Number(n))
        await expect(t, *range(3))
        assert sorted(shop.runs) == list(range(3))

    run(shop.app, work, database=database)


def test_failed_stage_counts_its_attempts_and_leaves_no_rows(database: str, is_async: bool) -> None:
    shop = Shop(is_async, attempts=2, retry={ValueError: "1ms"})

    def body(number: Number, flow: Flow) -> None:
        if number.n == 1:
            raise ValueError("poison")

    shop.body = body

    async def work(t: Stages) -> None:
        await make_table(t)
        for n in range(3):
            await t.send(shop.place, Number(n))
        await all_is_over(t)
        (letter,) = await t.dead_letters()
        assert letter.attempts == 2 and "poison" in letter.last_cause
        assert await numbers(t, "SELECT n FROM orders") == [0, 2]
        assert await sent(t) == [0, 2]
        assert len(await numbers(t, "SELECT 1 FROM truenext_inbox")) == 2

    run(shop.app, work, database=database)


def test_refused_message_of_a_unit_goes_to_the_refused_queue_with_its_reason_and_others_are_sent(database: str) -> None:
    shop = Shop(is_async=True)
    good = EncodedMessage("/queue/take", b"good", "a", 4, True)
    bad = EncodedMessage(f"/queue/{'x' * 300}", b"bad", "b", 4, True)

    async def work(t: Stages) -> None:
        await make_table(t)
        async with t.sql() as sql:
            await SessionOutbox(sql).write_unit_async("shop", "0" * 32, None, OutboxUnit([good, bad, good], False))
        async with asyncio.timeout(PATIENCE_S):
            while await numbers(t, UNSENT):
                await asyncio.sleep(0.02)
        assert [each.body for each in (await t.broker.queue("take")).messages] == [b"good", b"good"]
        (refused,) = (await t.broker.queue("shop.refused")).messages
        assert refused.body == b"bad" and "at most" in refused.headers["refused"]
        # Its number was used: those behind it go on.
        async with t.sql() as sql, shop.app.initiate(sql) as initiation:
            initiation.send(shop.take, Number(7), trace="order 7")
        async with asyncio.timeout(PATIENCE_S):
            while len((await t.broker.queue("take")).messages) < 3:
                await asyncio.sleep(0.02)

    run(shop.app, work, database=database)


async def insert_unit_of_dead_process(t: Stages, unit: bytes, number: int) -> None:
    """Insert a producer of a process that is gone, with a unit under this number."""
    async with t.sql() as sql:
        await sql.execute(
            text("INSERT INTO truenext_producers VALUES ('left', 'shop', 'one that died', :number, 0)"),
            {"number": number},
        )
        await sql.execute(
            text(
                "INSERT INTO truenext_outbox (id, service, producer, number, interactive, messages, written_ms, unit) "
                "VALUES (:id, 'shop', 'left', :number, false, 1, 0, :unit)"
            ),
            {"id": "0" * 32, "number": number, "unit": unit},
        )


def test_a_unit_that_cannot_be_sent_holds_up_nothing_else(database: str) -> None:
    """Fixed: the relay began each check of the outbox with that unit, and sent nothing after it."""
    shop = Shop(is_async=True)

    async def work(t: Stages) -> None:
        await insert_unit_of_dead_process(t, b"of a later version", 1)
        await asyncio.sleep(1.5)
        for n in range(3):
            async with t.sql() as sql, shop.app.initiate(sql) as initiation:
                initiation.send(shop.take, Number(n), trace=f"order {n}")
        async with asyncio.timeout(PATIENCE_S):
            while await sent(t) != [0, 1, 2]:
                await asyncio.sleep(0.05)
        assert await numbers(t, "SELECT number FROM truenext_outbox WHERE producer = 'left'") == [1]

    run(shop.app, work, database=database)


def test_refused_message_after_a_gap_of_numbers_goes_to_the_refused_queue(database: str) -> None:
    """Fixed: the gap showed only when the unit's replacement was refused, and the relay did not expect a gap there."""
    shop = Shop(is_async=True)
    good = EncodedMessage("/queue/take", b"good", "a", 4, True)
    bad = EncodedMessage(f"/queue/{'x' * 300}", b"bad", "b", 4, True)

    async def work(t: Stages) -> None:
        # The broker does not know the numbers before it.
        await insert_unit_of_dead_process(t, OutboxUnit([good, bad], False).encode(), 3)
        async with asyncio.timeout(PATIENCE_S):
            while await numbers(t, UNSENT):
                await asyncio.sleep(0.02)
        assert [each.body for each in (await t.broker.queue("take")).messages] == [b"good"]
        assert [each.body for each in (await t.broker.queue("shop.refused")).messages] == [b"bad"]

    run(shop.app, work, database=database)


def test_a_postgresql_that_forgets_what_it_has_confirmed_is_warned_of(
    postgres: PostgresServer, postgres_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(is_async=True)
    with postgres.connect() as connection:
        connection.execute(f"ALTER DATABASE {postgres_database} SET synchronous_commit = off")

    async def work(t: Stages) -> None:
        assert "synchronous_commit is off" in caplog.text

    run(shop.app, work, database=postgres.url(postgres_database))
