"""Tests of the test kit of stages. Source: docs/testing.md, "Services of stages"."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

import truenext
from tests.integration.environments import ROOT
from tests.stages.flows import Memo, Number, Text, run, until
from truenext.errors import LocalProtocolError
from truenext.stage import Endpoint, Flow, Reject, Service
from truenext.testing import NeverReached
from truenext.testing import stages as kit
from truenext.testing.stages import Stages, stages

PAGE = ROOT / "docs" / "testing.md"


def shop() -> tuple[Service, Endpoint[Number, Text], Endpoint[Number, Text]]:
    """Make a service with an endpoint that requests one of another service."""
    app = Service("shop", attempts=2)
    stock = app.remote("stock", Number, Text)
    place = app.endpoint("place", Number, Text, state=Memo)

    @place.stage
    async def ask(number: Number, memo: Memo, flow: Flow) -> None:
        flow.request(stock, number)

    @place.stage
    async def answer(reply: Text, memo: Memo) -> Text:
        if reply.text == "bad":
            raise ValueError("bad")
        return reply

    return app, place, stock


# ---- Mocks ----


def test_a_mock_answers_as_the_test_says_and_notes_what_it_was_asked() -> None:
    app, place, stock = shop()

    async def work(t: Stages) -> None:
        requests = t.mock(stock, lambda number: Text(f"{number.n}"))
        assert [(await t.ask(place, Number(n))).text for n in (1, 2)] == ["1", "2"]
        assert requests == [Number(1), Number(2)]

    run(app, work)


def test_a_mock_answers_anew_from_the_moment_it_is_mocked_anew_and_its_list_begins_anew() -> None:
    app, place, stock = shop()

    async def work(t: Stages) -> None:
        before = t.mock(stock, lambda number: Text("old"))
        assert await t.ask(place, Number(1)) == Text("old")
        after = t.mock(stock, lambda number: Text("new"))
        assert await t.ask(place, Number(2)) == Text("new")
        assert (before, after) == ([Number(1)], [Number(2)])

    run(app, work)


def test_an_exception_of_a_mock_is_a_failure_there() -> None:
    app, place, stock = shop()

    async def work(t: Stages) -> None:
        def answer(number: Number) -> Text:
            raise Reject("out of stock")

        requests = t.mock(stock, answer)
        await t.send(place, Number(1))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert (letter.queue, letter.attempts, len(requests)) == ("stock", 1, 1)
        assert letter.last_cause.startswith("Reject: out of stock")

    run(app, work)


def test_an_endpoint_of_the_service_itself_cannot_be_mocked() -> None:
    app, place, _ = shop()

    async def work(t: Stages) -> None:
        with pytest.raises(ValueError, match="place is an endpoint of the service itself"):
            t.mock(place, lambda number: Text())

    run(app, work)


def test_endpoint_without_a_reply_can_be_mocked() -> None:
    app = Service("shop")
    sink = app.remote("sink", Number)

    async def work(t: Stages) -> None:
        requests = t.mock(sink, lambda number: None)
        await t.send(sink, Number(3))
        await t.wait_until_ended()
        assert requests == [Number(3)]

    run(app, work)


# ---- The end ----


def test_wait_until_ended_waits_for_running_flows_and_retries() -> None:
    app = Service("shop", retry={ValueError: "5m"})
    ran: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        ran.append(flow.attempt)
        await asyncio.sleep(0.02)
        if flow.attempt < 3:
            raise ValueError("not yet")

    async def work(t: Stages) -> None:
        await t.send(take, Number())
        assert await t.wait_until_ended() == []
        assert ran == [1, 2, 3]

    run(app, work)


def test_a_dead_letter_that_was_not_expected_fails_the_test_with_its_cause() -> None:
    app, place, stock = shop()

    async def work(t: Stages) -> None:
        t.mock(stock, lambda number: Text("bad"))
        await t.send(place, Number(1), trace="o1")
        with pytest.raises(AssertionError) as failed:
            await t.wait_until_ended()
        message = str(failed.value)
        assert message.startswith("expected 0 dead letters, there are 1:\n")
        assert "place.stage.answer has given up 'o1' after 2 attempts: ValueError: bad" in message
        with pytest.raises(AssertionError, match="expected 2 dead letters, there are 1"):
            await t.wait_until_ended(dead_letters=2)

    run(app, work)


def test_dead_letters_are_told_in_the_order_in_which_they_were_given_up() -> None:
    app = Service("shop")

    @app.terminator("b", Number)
    async def first(number: Number) -> None:
        raise Reject(f"{number.n}")

    @app.terminator("a", Number)
    async def second(number: Number) -> None:
        raise Reject(f"{number.n}")

    async def work(t: Stages) -> None:
        for n, to in enumerate((first, second, first)):
            await t.send(to, Number(n), trace=f"o{n}")
            await t.wait_until_ended(dead_letters=n + 1)
        letters = await t.dead_letters()
        assert [(each.queue, each.trace, each.message) for each in letters] == [
            ("b", "o0", {"n": 0}),
            ("a", "o1", {"n": 1}),
            ("b", "o2", {"n": 2}),
        ]

    run(app, work)


def test_message_without_a_consumer_is_reported_with_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "NO_CONSUMER_TIMEOUT_S", 0.1)
    app, place, _ = shop()

    async def work(t: Stages) -> None:
        await t.send(place, Number(1))
        with pytest.raises(TimeoutError, match="messages wait without a consumer: stock has 1; mock the endpoint"):
            await t.wait_until_ended()

    run(app, work)


def test_a_stage_that_does_not_end_is_told_by_its_name() -> None:
    app = Service("shop")
    go_on = asyncio.Event()

    @app.terminator("slow", Number)
    async def slow(number: Number) -> None:
        await go_on.wait()

    async def work(t: Stages) -> None:
        await t.send(slow, Number())
        with pytest.raises(TimeoutError, match=r"have not ended within 0.1 s: slow has 1, slow is at work"):
            await t.wait_until_ended(timeout=0.1)
        go_on.set()
        await t.wait_until_ended()

    run(app, work)


def booking() -> tuple[Service, Endpoint[Number, None], list[int]]:
    """A service that is exactly-once, so that flows can begin in transactions."""
    app = Service("shop", exactly_once=True)
    received: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        await asyncio.sleep(0.02)
        received.append(number.n)

    return app, take, received


async def initiation(t: Stages, app: Service, take: Endpoint[Number, None], n: int) -> None:
    async with t.sql() as sql, app.initiate(sql) as initiation:
        initiation.send(take, Number(n), trace="t")


def test_ended_waits_for_what_a_transaction_of_the_program_has_begun(database: str) -> None:
    app, take, received = booking()

    async def work(t: Stages) -> None:
        for n in range(5):
            await initiation(t, app, take, n)
            await t.wait_until_ended()
            assert received == list(range(n + 1))

    run(app, work, database=database)


def test_ended_waits_for_what_a_process_without_a_broker_has_begun(database: str) -> None:
    """The relay is not woken: it checks the outbox once a second."""
    app, take, received = booking()

    async def work(t: Stages) -> None:
        # Past the first look of the relay.
        await asyncio.sleep(0.2)
        other, _, _ = booking()
        async with t.sql() as sql, other.initiate(sql) as initiation:
            initiation.send(take, Number(1), trace="t")
        await t.wait_until_ended()
        assert received == [1]

    run(app, work, database=database)


def test_unsent_units_of_the_outbox_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "NO_CONSUMER_TIMEOUT_S", 0.1)
    app, take, received = booking()

    async def work(t: Stages) -> None:
        t.broker.fill_disk()
        await initiation(t, app, take, 1)
        with pytest.raises(TimeoutError, match=r"have not ended within 0\.5 s: the outbox has 1 unsent message\b"):
            await t.wait_until_ended(timeout=0.5)
        assert received == []
        t.broker.free_disk()
        await t.wait_until_ended()
        assert received == [1]

    run(app, work, database="sqlite://")


def test_an_end_without_anything_under_way_comes_at_once() -> None:
    app, _, _ = shop()

    async def work(t: Stages) -> None:
        assert await t.wait_until_ended(timeout=5) == []

    run(app, work)


# ---- Faults and time ----


def test_action_at_a_point_runs_the_given_times_and_in_its_stage_alone() -> None:
    app = Service("shop")
    points: list[str] = []
    chain = app.endpoint("chain", Number)

    @chain.stage
    async def one(number: Number, flow: Flow) -> None:
        flow.next(number)

    @chain.stage
    async def two(number: Number) -> None: ...

    async def work(t: Stages) -> None:
        t.at("received", lambda: points.append("once, in any"))
        t.at("run", lambda: points.append("one"), stage="chain")
        t.at("committed", lambda: points.append("two"), stage="chain.stage.two", times=2)
        for _ in range(3):
            await t.send(chain, Number())
            await t.wait_until_ended()
        assert points == ["once, in any", "one", "two", "two"]

    run(app, work)


@pytest.mark.parametrize("point", ["received", "run"])
def test_action_that_raises_before_the_commit_fails_the_stage(point: str) -> None:
    app = Service("shop")
    ended: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        flow.after_commit(ended.append, flow.attempt)

    def fails() -> None:
        raise ConnectionError("nobody there")

    async def work(t: Stages) -> None:
        t.at("received" if point == "received" else "run", fails)
        await t.send(take, Number())
        await t.wait_until_ended()
        assert ended == [2]

    run(app, work)


def order() -> tuple[Service, Endpoint[Number, None]]:
    app = Service("shop")

    @app.terminator("take", Number)
    async def take(number: Number) -> None: ...

    return app, take


def nothing() -> None: ...


def test_a_point_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    app, _ = order()

    async def work(t: Stages) -> None:
        with pytest.raises(ValueError, match=r"no point 'SQL commited' .*'received', .*is 'SQL committed' meant\?"):
            t.at("SQL commited", nothing)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no point None in the processing of a message: there are 'received'"):
            t.at(None, nothing)  # type: ignore[arg-type]

    run(app, work)


def test_a_stage_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    app, _, _ = shop()

    async def work(t: Stages) -> None:
        message = r"shop has no stage whose queue is 'place.stage.answr': .*; is 'place.stage.answer' meant\?"
        with pytest.raises(LookupError, match=message):
            t.at("run", nothing, stage="place.stage.answr")
        with pytest.raises(LookupError, match=r"there are 'place', 'place.stage.answer'$"):
            t.at("run", nothing, stage="?")

    run(app, work)


def test_invalid_arguments_of_the_kit_are_refused() -> None:
    app, _, stock = shop()

    async def work(t: Stages) -> None:
        # What it returns would have to be awaited, and nobody does.
        for wrong in (t.broker.crash, None, "drop"):
            with pytest.raises(ValueError, match="action must be a plain function"):
                t.at("run", wrong)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="answer must be a plain function"):
                t.mock(stock, wrong)  # type: ignore[arg-type]
        for times in (0, -1, 1.5, True, None):
            with pytest.raises(ValueError, match="times must be a whole number, 1 or more"):
                t.at("run", nothing, times=times)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="required must be True or False, not 0"):
            t.at("run", nothing, required=0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"'stok' is not an endpoint of another service: .*is 'stock' meant\?"):
            t.mock("stok", lambda number: Text())  # type: ignore[arg-type]
        for dead_letters in (-1, None, True):
            with pytest.raises(ValueError, match="dead_letters must be a whole number, 0 or more"):
                await t.wait_until_ended(dead_letters=dead_letters)  # type: ignore[arg-type]
        for seconds in (0, -1, float("nan"), "1"):
            with pytest.raises(ValueError, match="timeout must be a number of seconds, more than 0"):
                await t.wait_until_ended(timeout=seconds)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="seconds, 0 or more"):
            await t.advance(seconds=float("nan"))

    run(app, work)


def test_ended_does_not_wait_for_a_durable_subscription_without_consumer() -> None:
    app = Service("shop")
    news = app.topic("news", Number)

    @app.terminator("tell", Number)
    async def tell(number: Number, flow: Flow) -> None:
        flow.publish(news, number)

    async def work(t: Stages) -> None:
        async with (
            truenext.connect(t.broker.url, client_id="c") as connection,
            connection.consumer("/topic/news", durable="n"),
        ):
            pass
        await t.send(tell, Number())
        await t.wait_until_ended(timeout=10)

    run(app, work)


def test_stages_without_a_service_or_with_an_invalid_database_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="service must be a Service, not 'shop'"):
            async with stages("shop"):  # type: ignore[arg-type]
                raise AssertionError("not reached")
        with pytest.raises(ValueError, match="database must be a URL of SQLAlchemy, as text, not of the type int"):
            async with stages(Service("shop"), database=7):  # type: ignore[arg-type]
                raise AssertionError("not reached")

    asyncio.run(main())


def test_a_point_that_is_never_reached_fails_the_test_with_its_place() -> None:
    app, take = order()

    async def work(t: Stages) -> None:
        t.at("received", nothing)
        t.at("SQL committed", nothing, stage="take")
        t.broker.lose_commit("after")
        await t.send(take, Number())
        await t.wait_until_ended()
        t.at("sent", nothing, required=False)
        t.broker.lose_commit("before")

    with pytest.raises(NeverReached) as failed:
        run(app, work)
    # The stage takes no session; the first COMMIT was that of the send.
    assert re.findall(r"^(.*), ordered at .*test_testing_stages\.py:\d+$", str(failed.value), re.MULTILINE) == [
        'at("SQL committed", stage="take")',
        'lose_commit("before")',
    ]
    assert app._current_run is None


def test_action_reached_once_of_many_times_is_enough() -> None:
    app, take = order()

    async def work(t: Stages) -> None:
        t.at("run", nothing, times=9)
        await t.send(take, Number())
        await t.wait_until_ended()

    run(app, work)


def test_an_error_of_the_test_is_raised_and_not_what_was_never_reached() -> None:
    app, _ = order()

    async def work(t: Stages) -> None:
        t.at("run", nothing)
        t.broker.lose_commit("before")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(app, work)


def test_time_is_put_forward_for_delays_and_expiry_alone() -> None:
    app = Service("shop", retry={ValueError: "10m"})
    ran: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        ran.append(flow.attempt)
        raise ValueError("not yet")

    async def work(t: Stages) -> None:
        await t.send(take, Number())
        await until(lambda: ran == [1] and not t._service_run.active_stages)
        await t.advance(seconds=590)
        assert ran == [1]
        await t.advance(seconds=20)
        await until(lambda: ran == [1, 2])

    run(app, work)


# ---- SQL ----


def test_a_test_has_a_session_of_its_own_and_an_empty_database() -> None:
    app = Service("shop")

    @app.terminator("take", Number)
    async def take(number: Number, sql: AsyncSession) -> None:
        await sql.execute(text("INSERT INTO orders VALUES (:n)"), {"n": number.n})

    async def work(t: Stages) -> None:
        async with t.sql() as sql:
            await sql.execute(text("CREATE TABLE orders (n INTEGER)"))
        await t.send(take, Number(4))
        await t.wait_until_ended()
        async with t.sql() as sql:
            assert (await sql.execute(text("SELECT n FROM orders"))).scalars().all() == [4]
        with pytest.raises(ZeroDivisionError):
            async with t.sql() as sql:
                await sql.execute(text("DELETE FROM orders"))
                raise ZeroDivisionError
        async with t.sql() as sql:
            assert (await sql.execute(text("SELECT count(*) FROM orders"))).scalar_one() == 1

    # Each is another one.
    for _ in range(2):
        run(app, work, database="sqlite://")


def test_a_service_without_a_database_has_no_session_for_its_test() -> None:
    app, _, _ = shop()

    async def work(t: Stages) -> None:
        with pytest.raises(LocalProtocolError, match="no stage of shop has a session"):
            async with t.sql():
                raise AssertionError("not reached")

    run(app, work)


# ---- The kit itself ----


def test_a_service_can_be_tested_again_and_again_and_one_at_a_time() -> None:
    app, place, stock = shop()

    async def main() -> None:
        async with stages(app) as t:
            t.mock(stock, lambda number: Text("first"))
            assert await t.ask(place, Number()) == Text("first")
            with pytest.raises(LocalProtocolError, match="shop runs already"):
                async with stages(app):
                    raise AssertionError("not reached")
        async with stages(app) as t:
            t.mock(stock, lambda number: Text("second"))
            assert await t.ask(place, Number()) == Text("second")

    asyncio.run(main())


def test_the_broker_of_the_kit_is_that_of_other_tests() -> None:
    app = Service("shop")
    received: list[Number] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number)

    async def work(t: Stages) -> None:
        async with truenext.connect(t.broker.url) as connection:
            assert connection.session_id
        t.broker.lose_commit("after")
        await t.send(take, Number(1))
        await t.broker.crash()
        await t.wait_until_ended()
        # Once more if the connection over which it was sent is that over which it came.
        assert {each.n for each in received} == {1}

    run(app, work)


def test_an_error_of_the_test_is_raised_and_nothing_is_left_of_the_service() -> None:
    app, place, stock = shop()

    async def work(t: Stages) -> None:
        t.mock(stock, lambda number: Text())
        await t.send(place, Number())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(app, work)
    assert app._current_run is None


# ---- The page ----


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    _, _, part = PAGE.read_text().partition("\n## Services of stages\n")
    service, *tests = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    (tmp_path / "shop.py").write_text(service)
    (tmp_path / "test_shop.py").write_text("\n\n".join(tests))
    count = sum(test.count("def test_") for test in tests)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_shop.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{count} passed" in ran.stdout, ran.stdout + ran.stderr
