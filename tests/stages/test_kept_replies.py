"""Tests of flows under a key whose reply is kept: `ask(key=)`, `keep_reply` and `reply`. Source:
docs/stages-database.md, "Kept replies" """

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import truenext
from tests.stages.flows import Memo, Number, Text, run
from truenext.clock import monotonic, time_ns
from truenext.errors import ConfigurationError
from truenext.stage import DefinitionError, Failure, Flow, FlowError, FlowFailed, NotDecoded, Reject, Service
from truenext.stage.sql.errors import OutboxUnusable
from truenext.testing.stages import Stages, stages


class Shop:
    """Service with an endpoint that counts its runs, and fails while it is broken."""

    def __init__(self, **options: Any) -> None:
        self.app = Service("shop", **({"exactly_once": True} | options))
        self.runs: list[int] = []
        self.is_broken = False
        self.may_reply = asyncio.Event()
        self.may_reply.set()

        @self.app.single("order.place", Number, Number)
        async def place(number: Number) -> Number:
            self.runs.append(number.n)
            await self.may_reply.wait()
            if self.is_broken:
                raise Reject("broken")
            return Number(10 * number.n)

        @self.app.single("order.cancel", Number, Text)
        async def cancel(number: Number) -> Text:
            return Text("cancelled")

        self.place, self.cancel = place, cancel


def test_asks_with_one_key_start_one_flow_and_all_get_its_reply(database: str) -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        asked = [t.ask(shop.place, Number(1), key="o1", trace="web") for _ in range(5)]
        assert await asyncio.gather(*asked) == [Number(10)] * 5
        assert await t.ask(shop.place, Number(1), key="o1", trace="web") == Number(10)
        assert await shop.app.reply(shop.place, key="o1", timeout=0) == Number(10)
        assert shop.runs == [1]
        assert await t.ask(shop.place, Number(2), key="o2") == Number(20)
        await t.wait_until_ended()

    run(shop.app, work, database=database)


def test_reply_is_found_by_another_process_of_the_service(database: str) -> None:
    shop, other = Shop(), Shop()

    async def work(t: Stages) -> None:
        other.app.broker, other.app.database = (t.broker.url,), database
        async with other.app.connected():
            shop.may_reply.clear()
            async with t.sql() as sql, shop.app.initiate(sql, key="o1") as initiation:
                initiation.send(shop.place, Number(1), trace="t", keep_reply=True)
            waiting = asyncio.create_task(other.app.reply(other.place, key="o1", timeout=20))
            with pytest.raises(TimeoutError, match=r"order\.place has not replied under the key 'o1' yet"):
                await other.app.reply(other.place, key="o1", timeout=0)
            with pytest.raises(TimeoutError):
                await shop.app.reply(shop.place, key="o1", timeout=0.05)
            shop.may_reply.set()
            assert await waiting == Number(10)
            asked = other.app.ask(other.place, Number(1), key="o1", trace="t", timeout=20)
            assert await asked == Number(10)
            assert await other.app.ask(other.place, Number(3), key="o3", trace="t", timeout=20) == Number(30)
        assert (shop.runs, other.runs) == ([1, 3], [])
        await t.wait_until_ended()

    run(shop.app, work, database=database)


def test_kept_failure_is_replaced_by_a_later_reply_but_never_the_reverse(database: str) -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        shop.is_broken = True
        for _ in range(2):
            with pytest.raises(FlowFailed) as caught:
                await t.ask(shop.place, Number(1), key="o1", timeout=20)
            assert (caught.value.stage, caught.value.attempts) == ("order.place", 1)
            assert caught.value.last_cause.startswith("Reject: broken\n")
        assert shop.runs == [1]
        shop.is_broken = False
        async with truenext.connect(t.broker.url) as connection:
            await connection.control_request("redrive", {"queue": "DLQ.order.place"})
            await t.wait_until_ended()
            assert await shop.app.reply(shop.place, key="o1", timeout=0) == Number(10)
            # The report comes again, such as after a crash.
            async with t.sql() as sql:
                (flow,) = (await sql.execute(text("SELECT flow FROM truenext_replies"))).scalars()
            store = shop.app._kept_replies
            assert store is not None
            await keep_again(t, str(flow).replace("-", ""))
        assert await shop.app.reply(shop.place, key="o1", timeout=0) == Number(10)

    run(shop.app, work, database=database)


async def keep_again(t: Stages, flow: str) -> None:
    """Keep a failure and another reply of a flow that has a reply."""
    from truenext.stage.sql import keep_reply

    async with t.sql() as sql:
        assert await keep_reply(sql, flow, b"{}", is_failure=True) is None
        assert await keep_reply(sql, flow, b'{"n":99}', is_failure=False) is None


def test_key_is_for_one_endpoint_and_one_content(database: str) -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        assert await t.ask(shop.place, Number(1), key="o1") == Number(10)
        with pytest.raises(FlowError, match="other flows began under this key before"):
            await t.ask(shop.place, Number(2), key="o1")
        with pytest.raises(FlowError, match=r"the flow under the key 'o1' has asked order\.place, not order\.cancel"):
            await shop.app.reply(shop.cancel, key="o1", timeout=5)
        for timeout in (0, 5):
            with pytest.raises(FlowError, match="no flow with keep_reply was started under the key 'o2'"):
                await shop.app.reply(shop.place, key="o2", timeout=timeout)
        async with t.sql() as sql, shop.app.initiate(sql, key="o3") as initiation:
            initiation.send(shop.place, Number(3), trace="t")
        with pytest.raises(FlowError, match="no flow with keep_reply was started under the key 'o3'"):
            await shop.app.reply(shop.place, key="o3", timeout=0)
        await t.wait_until_ended()

    run(shop.app, work, database=database)


def test_wrong_uses_of_keep_reply_are_refused() -> None:
    shop = Shop()
    silent = shop.app.remote("silent", Number)

    async def work(t: Stages) -> None:
        async with t.sql() as sql, shop.app.initiate(sql) as initiation:
            with pytest.raises(FlowError, match="keep_reply needs a key"):
                initiation.send(shop.place, Number(1), trace="t", keep_reply=True)
        async with shop.app.initiate() as initiation:
            with pytest.raises(FlowError, match="keep_reply needs a key"):
                initiation.send(shop.place, Number(1), trace="t", keep_reply=True)
        async with t.sql() as sql, shop.app.initiate(sql, key="o1") as initiation:
            with pytest.raises(FlowError, match="silent replies nothing that could be kept"):
                initiation.send(silent, Number(1), trace="t", keep_reply=True)
            with pytest.raises(FlowError, match="leave out reply_to, or keep_reply"):
                initiation.send(shop.place, Number(1), trace="t", keep_reply=True, reply_to=shop.place)
            initiation.send(shop.place, Number(1), trace="t", keep_reply=True)
            with pytest.raises(FlowError, match=r"the flow to order\.place does so already"):
                initiation.send(shop.cancel, Number(1), trace="t", keep_reply=True)
        assert await shop.app.reply(shop.place, key="o1", timeout=20) == Number(10)
        with pytest.raises(ValueError, match="timeout must be a number of seconds"):
            await shop.app.reply(shop.place, key="o1", timeout=-1)
        with pytest.raises(FlowError, match="key must be a text"):
            await shop.app.reply(shop.place, key="", timeout=0)
        with pytest.raises(FlowError, match="silent replies nothing"):
            await shop.app.reply(silent, key="o1")
        await t.wait_until_ended()

    run(shop.app, work, database="sqlite://")


@pytest.mark.parametrize(
    ("options", "database"), [({"exactly_once": False}, "sqlite://"), ({"exactly_once": False}, None)]
)
def test_service_without_database_or_exactly_once_processing_keeps_nothing(options: Any, database: str | None) -> None:
    shop = Shop(**options)

    async def work(t: Stages) -> None:
        with pytest.raises(FlowError, match="shop keeps no replies: it needs a database and exactly-once processing"):
            await t.ask(shop.place, Number(1), key="o1")
        with pytest.raises(FlowError, match="shop keeps no replies"):
            await shop.app.reply(shop.place, key="o1")

    run(shop.app, work, database=database)


def test_endpoint_with_the_name_of_the_queue_of_replies_is_refused() -> None:
    for name in ("shop.replies", ".replies"):
        with pytest.raises(DefinitionError, match=r"shop\.replies is the queue for replies that shop keeps"):
            Service("shop").endpoint(name, Number)
    Service("other").endpoint("shop.replies", Number)


def test_on_failure_answers_for_a_flow_under_a_key(database: str) -> None:
    app = Service("shop", exactly_once=True)
    place = app.endpoint("order.place", Number, Number, state=Memo)

    @app.single("stock", Number, Number)
    async def stock(number: Number) -> Number:
        raise Reject("no")

    @place.stage
    async def check(number: Number, memo: Memo, flow: Flow) -> None:
        memo.n = number.n
        flow.request(stock, number)

    @place.stage
    async def finish(number: Number, memo: Memo) -> Number:
        return number

    @place.on_failure
    async def failed(failure: Failure, memo: Memo) -> Number:
        return Number(-memo.n)

    async def work(t: Stages) -> None:
        assert await t.ask(place, Number(7), key="o7", timeout=20) == Number(-7)
        await t.wait_until_ended()

    run(app, work, database=database)


def test_rows_of_8_days_are_deleted_and_their_key_starts_another_flow(database: str) -> None:
    shop = Shop()
    days = 8 * 86_400_000

    async def work(t: Stages) -> None:
        once = t._service_run.exactly_once
        assert once is not None
        await t.ask(shop.place, Number(1), key="o1")
        await once._outbox.delete_expired()
        assert await shop.app.reply(shop.place, key="o1", timeout=0) == Number(10)
        async with t.sql() as sql:
            await sql.execute(text(f"UPDATE truenext_replies SET kept_ms = kept_ms - {days}"))
        await once._outbox.delete_expired()
        with pytest.raises(FlowError, match="no flow with keep_reply was started"):
            await shop.app.reply(shop.place, key="o1", timeout=0)

    run(shop.app, work, database=database)


@pytest.mark.parametrize("option", ["delay", "at"])
def test_retention_of_a_delayed_flow_begins_when_it_is_due(database: str, option: str) -> None:
    shop = Shop()
    day_s = 86_400
    options: Any = {"delay": 3 * day_s} if option == "delay" else {"at": datetime.now(UTC) + timedelta(days=3)}

    async def work(t: Stages) -> None:
        asking = asyncio.create_task(t.ask(shop.place, Number(1), key="o1", timeout=25, **options))
        async with asyncio.timeout(20):
            rows: list[int] = []
            while not rows:
                await asyncio.sleep(0.02)
                # One statement: PostgreSQL takes a new snapshot for each, and the flow may commit between two.
                both = "SELECT started_ms FROM truenext_keys UNION ALL SELECT kept_ms FROM truenext_replies"
                async with t.sql() as sql:
                    rows = list((await sql.execute(text(both))).scalars())
        now_ms = time_ns() // 1_000_000
        assert len(rows) == 2
        assert all(abs(each - now_ms - 3 * day_s * 1000) < 60_000 for each in rows)
        assert shop.runs == []
        await t.wait_until_ended()
        assert await asking == Number(10)

    run(shop.app, work, database=database)


def test_key_that_was_deleted_before_its_reply_starts_another_flow_whose_reply_counts(database: str) -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        assert await t.ask(shop.place, Number(1), key="o1") == Number(10)
        async with t.sql() as sql:
            await sql.execute(text("DELETE FROM truenext_keys"))
        assert await t.ask(shop.place, Number(2), key="o1") == Number(20)
        assert shop.runs == [1, 2]
        await t.wait_until_ended()

    run(shop.app, work, database=database)


def test_ask_with_a_key_is_woken_by_the_topic_and_not_by_its_look_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("truenext.stage.kept_replies.POLL_S", 15.0)
    shop = Shop()

    async def work(t: Stages) -> None:
        await t.ask(shop.place, Number(1), key="o1")
        started = monotonic()
        await t.ask(shop.place, Number(2), key="o2", timeout=25)
        assert monotonic() - started < 10
        await t.wait_until_ended()

    run(shop.app, work, database="sqlite://")


def test_caller_finds_a_reply_whose_news_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.stage.kept_replies.KeptReplies._on_kept", lambda *_: None)
    shop = Shop()

    async def work(t: Stages) -> None:
        assert await t.ask(shop.place, Number(1), key="o1", timeout=20) == Number(10)

    run(shop.app, work, database="sqlite://")


def test_reply_of_another_type_is_not_decoded_and_is_kept() -> None:
    shop = Shop()
    wrong = Service("other").remote("order.place", Number, Text)

    async def work(t: Stages) -> None:
        await t.ask(shop.place, Number(1), key="o1")
        with pytest.raises(NotDecoded):
            await shop.app.reply(Service("x").remote("order.place", Number, list[int]), key="o1", timeout=0)
        assert await shop.app.reply(wrong, key="o1", timeout=0) == Text()

    run(shop.app, work, database="sqlite://")


def test_service_runs_without_the_table_and_names_it_to_callers_with_a_key(database: str) -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        async with t.sql() as sql:
            await sql.execute(text("DROP TABLE truenext_replies"))
        other = Shop()
        other.app.broker, other.app.database = (t.broker.url,), database
        async with other.app.running():
            once = other.app._current_run
            assert once is not None and not [
                each for each in once.stage_consumers if each.stage.queue == "shop.replies"
            ]
            assert await other.app.ask(other.place, Number(1), trace="t", timeout=20) == Number(10)
            assert once.exactly_once is not None
            await once.exactly_once._outbox.delete_expired()
            with pytest.raises(ConfigurationError, match="no table truenext_replies: create the tables with"):
                await other.app.ask(other.place, Number(1), trace="t", key="o1", timeout=5)
            with pytest.raises(OutboxUnusable, match="no table truenext_replies: create the tables with"):
                await other.app.reply(other.place, key="o1", timeout=5)

    run(shop.app, work, database=database)


def test_forged_reply_of_an_unknown_flow_is_rejected_or_ignored() -> None:
    shop = Shop()
    body = (
        b'{"version":2,"id":"x","flow":{"id":"%s","trace":"t","startedMs":1,"startedBy":"theirs"},'
        b'"kind":"reply","sender":"theirs","message":{"n":1}}'
    )

    async def work(t: Stages) -> None:
        async with truenext.connect(t.broker.url) as connection:
            for id in (b"0" * 32, b"not an id"):
                await connection.send("/queue/shop.replies", body % id)
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.last_cause.startswith("Reject: no flow of shop has the id 'not an id'")

    run(shop.app, work, database="sqlite://")


def test_service_that_only_starts_flows_keeps_their_replies(tmp_path: Path) -> None:
    """No process runs its stages, so the connected ones keep the replies."""
    file = tmp_path / "web.db"
    file.touch()
    shop = Shop()
    web = Service("web", exactly_once=True, database=f"sqlite:///{file}")
    place = web.remote("order.place", Number, Number)

    async def main() -> None:
        from truenext.stage.sql import apply_schema

        apply_schema(f"sqlite:///{file}")
        async with stages(shop.app, database="sqlite://") as t:
            web.broker = (t.broker.url,)
            async with web.connected():
                assert await web.ask(place, Number(4), trace="t", key="o4", timeout=20) == Number(40)
            async with web.connected():
                assert await web.reply(place, key="o4", timeout=0) == Number(40)

    asyncio.run(main())
