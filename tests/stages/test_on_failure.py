"""Tests of failures that reach the one that waits: `ask` raises FlowFailed, and `on_failure` handles failed requests.
Source: docs/stages.md, "Failures of requests" """

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import truenext
from tests.stages.flows import Memo, Number, Text, run, until
from truenext.cli.main import main
from truenext.clock import monotonic
from truenext.flows.envelope import decode_envelope
from truenext.stage import DefinitionError, Failure, Flow, FlowFailed, NotDecoded, Reject, Service
from truenext.testing.stages import DeadLetter, Stages

AT_ONCE_S = 5.0
"""Seconds within which an asker is told on a busy machine; far less than its timeout."""


async def told(t: Stages, *asked: Any, **options: Any) -> FlowFailed:
    """Ask, and return the error that comes long before the timeout."""
    started = monotonic()
    with pytest.raises(FlowFailed) as caught:
        await t.ask(*asked, timeout=20, **options)
    assert monotonic() - started < AT_ONCE_S
    return caught.value


# ---- The asker is told ----


def test_ask_of_a_stage_that_rejects_raises_flow_failed_with_the_facts() -> None:
    app = Service("shop")

    @app.single("order.place", Number, Number)
    async def place(number: Number) -> Number:
        raise Reject("out of stock")

    async def work(t: Stages) -> None:
        failed = await told(t, place, Number(1), trace="web o1")
        assert (failed.stage, failed.attempts) == ("order.place", 1)
        assert failed.first_cause == failed.last_cause
        assert failed.last_cause.startswith("Reject: out of stock\nat place in test_on_failure.py:")
        assert "rejected" in failed.reason
        assert str(failed) == "the flow has failed in stage order.place after 1 attempt: Reject: out of stock"
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.last_cause == failed.last_cause

    run(app, work)


def test_ask_raises_flow_failed_after_the_last_attempt_only() -> None:
    app = Service("shop", retry={ValueError: "1ms"})
    attempts: list[int] = []

    @app.single("answer", Number, Number, attempts=3)
    async def answer(number: Number, flow: Flow) -> Number:
        attempts.append(flow.attempt)
        raise ValueError(f"no {flow.attempt}")

    async def work(t: Stages) -> None:
        failed = await told(t, answer, Number(1))
        assert attempts == [1, 2, 3] and failed.attempts == 3
        assert failed.first_cause.startswith("ValueError: no 1\n")
        assert failed.last_cause.startswith("ValueError: no 3\n")
        await t.wait_until_ended(dead_letters=1)

    run(app, work)


def test_ask_is_told_of_a_failure_deep_in_the_flow() -> None:
    app = Service("shop")
    deep = app.endpoint("deep", Number, Number, state=Memo)
    outer = app.endpoint("outer", Number, Number)

    @app.single("leaf", Number, Number)
    async def leaf(number: Number) -> Number:
        raise Reject("no")

    @outer.stage
    async def first(number: Number, flow: Flow) -> None:
        flow.request(deep, number)

    @outer.stage
    async def second(number: Number) -> Number:
        return number

    @deep.stage
    async def begin(number: Number, memo: Memo, flow: Flow) -> None:
        flow.request(leaf, number)

    @deep.stage
    async def end(number: Number, memo: Memo) -> Number:
        return number

    async def work(t: Stages) -> None:
        assert (await told(t, outer, Number(1))).stage == "leaf"
        await t.wait_until_ended(dead_letters=1)

    run(app, work)


def test_hundred_asks_at_once_are_told_each_of_its_own_flow() -> None:
    app = Service("shop")

    @app.single("some", Number, Number)
    async def some(number: Number) -> Number:
        if number.n % 3:
            raise Reject(f"no {number.n}")
        return number

    async def work(t: Stages) -> None:
        ended = await asyncio.gather(*(t.ask(some, Number(n)) for n in range(100)), return_exceptions=True)
        for n, each in enumerate(ended):
            if n % 3:
                assert isinstance(each, FlowFailed) and each.last_cause.startswith(f"Reject: no {n}\n")
            else:
                assert each == Number(n)
        await t.wait_until_ended(dead_letters=66)

    run(app, work)


def test_ask_is_told_of_a_message_that_cannot_be_read() -> None:
    app = Service("shop")
    asked = app.remote("answer", Number, Number)
    other = Service("other")

    @other.single("answer", Text, Number)
    async def answer(text: Text) -> Number:
        raise AssertionError("it cannot be read")

    class Wrong(Number):
        text: int = 1

    wrong = app.remote("wrong", Wrong, Number)
    wrong.destination = asked.destination

    async def work(t: Stages) -> None:
        other.broker = (t.broker.url,)
        async with other.running():
            failed = await told(t, wrong, Wrong(1))
        assert failed.last_cause.startswith("NotDecoded: ")
        await t.wait_until_ended(dead_letters=1)

    run(app, work)


def test_ask_waits_no_longer_than_the_ttl_of_its_flow() -> None:
    app = Service("shop")
    nowhere = app.remote("nowhere", Number, Number)

    async def work(t: Stages) -> None:
        started = monotonic()
        with pytest.raises(TimeoutError, match=r"nowhere has not replied within the ttl of the flow, 0.2 s"):
            await t.ask(nowhere, Number(1), timeout=20, ttl=0.2)
        assert monotonic() - started < AT_ONCE_S

    run(app, work)


def test_ask_after_its_end_ignores_a_report_and_a_re_driven_flow_replies_to_nobody() -> None:
    app = Service("shop")
    is_broken = True
    done: list[int] = []

    @app.single("answer", Number, Number)
    async def answer(number: Number) -> Number:
        if is_broken:
            raise Reject("broken")
        done.append(number.n)
        return number

    async def work(t: Stages) -> None:
        nonlocal is_broken
        await told(t, answer, Number(1))
        is_broken = False
        async with truenext.connect(t.broker.url) as connection:
            await connection.control_request("redrive", {"queue": "DLQ.answer"})
        await t.wait_until_ended()
        assert done == [1]
        assert await t.ask(answer, Number(2)) == Number(2)

    run(app, work)


# ---- on_failure ----


def shop(service: Service, *, is_async: bool = True) -> tuple[Any, list[tuple[Failure, Memo]]]:
    """Define an endpoint `order.place` whose request of `stock.reserve` fails, and return it with the failures that
    its `on_failure` gets. It then does what the text of the failed request says."""
    failures: list[tuple[Failure, Memo]] = []
    place = service.endpoint("order.place", Text, Text, state=Memo)

    @service.single("stock.reserve", Text, Text)
    async def reserve(wish: Text) -> Text:
        if wish.text == "again":
            return Text("second try")
        raise Reject("out of stock")

    @place.stage
    async def check(order: Text, memo: Memo, flow: Flow) -> None:
        memo.n, memo.text = 7, order.text
        flow.request(reserve, order, attachments={"a": b"1"})

    @place.stage
    async def finish(reserved: Text, memo: Memo) -> Text:
        return Text(f"finished {memo.n} {reserved.text}")

    def act(failure: Failure, memo: Memo, flow: Flow) -> Text | None:
        assert not flow.attachments and flow.message == failure
        failures.append((failure, Memo(memo.n, memo.text)))
        memo.n += 1
        match memo.text:
            case "return":
                return Text("returned")
            case "reply":
                flow.reply(Text("replied"))
            case "next":
                flow.next(Text("by next"))
            case "direct":
                flow.next_direct(Text("by next_direct"))
            case "request":
                flow.request(reserve, Text("again"))
            case "goto":
                flow.goto(other, Text("gone"))
            case "raise":
                raise ValueError("fails, too")
        return None

    @service.single("other", Text, Text)
    async def other(text: Text) -> Text:
        return Text(f"other {text.text}")

    if is_async:

        @place.on_failure(attempts=1)
        async def failed(failure: Failure, memo: Memo, flow: Flow) -> Text | None:
            return act(failure, memo, flow)
    else:

        @place.on_failure(attempts=1)
        def failed_plain(failure: Failure, memo: Memo, flow: Flow) -> Text | None:
            return act(failure, memo, flow)

    return place, failures


@pytest.mark.parametrize(
    ("what", "reply"),
    [
        ("return", "returned"),
        ("reply", "replied"),
        ("next", "finished 8 by next"),
        ("direct", "finished 8 by next_direct"),
        ("request", "finished 8 second try"),
        ("goto", "other gone"),
    ],
)
def test_on_failure_continues_the_flow_with_the_state_of_the_request(what: str, reply: str) -> None:
    app = Service("shop")
    place, failures = shop(app)

    async def work(t: Stages) -> None:
        assert await t.ask(place, Text(what)) == Text(reply)
        ((failure, memo),) = failures
        assert memo == Memo(7, what)
        assert (failure.stage, failure.attempts) == ("stock.reserve", 1)
        assert failure.last_cause.startswith("Reject: out of stock\n")
        assert failure.first_cause == failure.last_cause and failure.reason
        await t.wait_until_ended()

    run(app, work)


def test_on_failure_may_be_a_plain_function() -> None:
    app = Service("shop")
    place, failures = shop(app, is_async=False)

    async def work(t: Stages) -> None:
        assert await t.ask(place, Text("next")) == Text("finished 8 by next")
        assert len(failures) == 1
        await t.wait_until_ended()

    run(app, work)


def test_on_failure_that_does_nothing_ends_the_flow_without_a_dead_letter() -> None:
    app = Service("shop")
    place, failures = shop(app)

    async def work(t: Stages) -> None:
        await t.send(place, Text("nothing"))
        await t.wait_until_ended()
        assert len(failures) == 1

    run(app, work)


def test_on_failure_that_fails_becomes_a_dead_letter_with_the_facts_of_the_first_failure_and_the_asker_is_told() -> (
    None
):
    app = Service("shop")
    place, failures = shop(app)

    async def work(t: Stages) -> None:
        failed = await told(t, place, Text("raise"))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert failed.stage == "stock.reserve"
        assert failed.first_cause.startswith("Reject: out of stock\n")
        assert (letter.queue, letter.first_cause) == (failed.stage, failed.first_cause)
        assert len(failures) == 1

    run(app, work)


def test_dead_letter_of_a_handler_is_re_driven_to_it_with_the_facts_of_the_first_failure() -> None:
    app = Service("shop")
    place = app.endpoint("order.place", Number, Number, state=Memo)
    is_broken = True
    seen: list[tuple[Failure, int]] = []
    ended: list[int] = []

    @app.single("stock", Number, Number)
    async def stock(number: Number) -> Number:
        raise Reject("no")

    @place.stage
    async def check(number: Number, memo: Memo, flow: Flow) -> None:
        memo.n = 7
        flow.request(stock, number)

    @place.stage
    async def finish(number: Number, memo: Memo) -> Number:
        ended.append(memo.n)
        return number

    @place.on_failure
    async def failed(failure: Failure, memo: Memo, flow: Flow) -> None:
        seen.append((failure, memo.n))
        if is_broken:
            raise Reject("broken")
        flow.next(Number(0))

    def run_command(t: Stages, *words: str) -> Result:
        return CliRunner().invoke(main, [*words, "--url", t.broker.url])

    async def work(t: Stages) -> None:
        nonlocal is_broken
        await told(t, place, Number(1))
        await t.wait_until_ended(dead_letters=1)
        queue = "DLQ.order.place.stage.on_failure"
        done = await asyncio.to_thread(run_command, t, "stages", "rerun", queue, "--force")
        assert done.exit_code == 1 and "reports a failure to an on_failure stage" in done.output
        is_broken = False
        assert (await asyncio.to_thread(run_command, t, "redrive", queue)).exit_code == 0
        await t.wait_until_ended()
        first, second = seen
        assert first == second and first[0].stage == "stock" and ended == [7]

    run(app, work)


def test_message_that_is_run_again_under_a_new_id_still_names_its_handlers_and_reports() -> None:
    app = Service("shop")
    place, failures = shop(app)

    async def work(t: Stages) -> None:
        asking = asyncio.create_task(t.ask(place, Text("return"), timeout=20))
        await asking
        await t.wait_until_ended()
        async with truenext.connect(t.broker.url) as connection:
            body = json.dumps(
                {
                    "version": 2,
                    "id": "0" * 32,
                    "flow": {"id": "f1", "trace": "t", "startedMs": 1, "startedBy": "theirs"},
                    "kind": "request",
                    "sender": "theirs",
                    "message": {"text": "x"},
                    "waiting": [
                        {
                            "to": "/queue/order.place.stage.finish",
                            "state": {"n": 3, "text": "nothing"},
                            "failure": "/queue/order.place.stage.on_failure",
                        }
                    ],
                }
            )
            handlers = ("/queue/order.place.stage.on_failure",)
            await connection.send("/queue/kept", body, on_failure=handlers, report_to="/queue/reports", report_id="f1")
        words = ["stages", "rerun", "kept", "--to", "stock.reserve", "--force", "--url", t.broker.url]
        done = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert done.exit_code == 0, done.output
        await t.wait_until_ended()
        assert [memo.n for _, memo in failures] == [7, 3]

    run(app, work)


def nested(service: Service, depth: int, *, failing: int) -> tuple[Any, list[tuple[int, int]]]:
    """Define endpoints `e0`, `e1` and so on, each of which requests the next one. The last one rejects. The innermost
    `failing` of the handlers fail; the others continue with the next stage. Return the outermost endpoint and the
    handlers that have run, each with its state."""
    ran: list[tuple[int, int]] = []

    @service.single(f"e{depth}", Number, Number)
    async def last(number: Number) -> Number:
        raise Reject("at the end")

    below: Any = last

    def define(level: int, below: Any) -> Any:
        endpoint = service.endpoint(f"e{level}", Number, Number, state=Memo)

        @endpoint.stage
        async def ask(number: Number, memo: Memo, flow: Flow) -> None:
            memo.n = 100 + level
            flow.request(below, number)

        @endpoint.stage
        async def pass_on(number: Number, memo: Memo) -> Number:
            assert memo.n == 200 + level or memo.n == 100 + level
            return Number(number.n + 1)

        @endpoint.on_failure
        async def failed(failure: Failure, memo: Memo, flow: Flow) -> Number | None:
            ran.append((level, memo.n))
            assert failure.stage == f"e{depth}"
            if level >= depth - failing:
                raise Reject("this, too")
            memo.n = 200 + level
            flow.next(Number(0))
            return None

        return endpoint

    for level in reversed(range(depth)):
        below = define(level, below)
    return below, ran


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_handler_that_fails_hands_on_to_the_next_one_outwards_with_the_state_of_its_own_request(failing: int) -> None:
    app = Service("shop")
    outermost, ran = nested(app, 4, failing=failing)

    async def work(t: Stages) -> None:
        assert await t.ask(outermost, Number(0)) == Number(4 - failing)
        await t.wait_until_ended()
        assert ran == [(level, 100 + level) for level in reversed(range(3 - failing, 4))]

    run(app, work)


def test_more_than_eight_handlers_leave_the_outermost_out() -> None:
    app = Service("shop")
    outermost, ran = nested(app, 10, failing=10)

    async def work(t: Stages) -> None:
        assert (await told(t, outermost, Number(0))).stage == "e10"
        await t.wait_until_ended(dead_letters=1)
        assert ran == [(level, 100 + level) for level in range(9, 1, -1)]

    run(app, work)


def test_endpoint_that_requests_itself_handles_each_level_with_its_own_state() -> None:
    app = Service("shop")
    count = app.endpoint("count", Number, Number, state=Memo)
    seen: list[int] = []

    @count.stage
    async def down(number: Number, memo: Memo, flow: Flow) -> None:
        memo.n = number.n
        if not number.n:
            raise Reject("zero")
        flow.request(count, Number(number.n - 1))

    @count.stage
    async def up(number: Number, memo: Memo) -> Number:
        return Number(memo.n)

    @count.on_failure
    async def failed(failure: Failure, memo: Memo, flow: Flow) -> Number | None:
        seen.append(memo.n)
        if memo.n < 3:
            raise Reject("not here")
        return Number(-memo.n)

    async def work(t: Stages) -> None:
        assert await t.ask(count, Number(5)) == Number(5)
        await t.wait_until_ended()
        assert seen == [1, 2, 3]

    run(app, work)


def test_on_failure_does_not_cover_the_stages_of_its_own_endpoint() -> None:
    app = Service("shop")
    place = app.endpoint("order.place", Number, Number)

    @app.single("stock", Number, Number)
    async def stock(number: Number) -> Number:
        return number

    @place.stage
    async def check(number: Number, flow: Flow) -> None:
        if number.n == 1:
            raise Reject("the first stage")
        flow.request(stock, number)

    @place.stage
    async def finish(number: Number) -> Number:
        raise Reject("the last stage")

    @place.on_failure
    async def failed(failure: Failure) -> Number:
        raise AssertionError("it covers only what the endpoint has requested")

    async def work(t: Stages) -> None:
        assert (await told(t, place, Number(1))).stage == "order.place"
        assert (await told(t, place, Number(2))).stage == "order.place.stage.finish"
        await t.wait_until_ended(dead_letters=2)

    run(app, work)


def test_on_failure_serves_the_reply_to_of_a_flow() -> None:
    app = Service("shop")
    seen: list[tuple[int, str]] = []

    @app.single("answer", Number, Number)
    async def answer(number: Number) -> Number:
        raise Reject("no")

    @app.terminator("collect", Number, state=Memo)
    async def collect(number: Number, memo: Memo) -> None:
        seen.append((memo.n, f"collected {number.n}"))

    @collect.on_failure
    async def failed(failure: Failure, memo: Memo, flow: Flow) -> None:
        seen.append((memo.n, failure.stage))
        flow.next(Number(-1))

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(answer, Number(1), trace="t", reply_to=collect, reply_state=Memo(4))
        await t.wait_until_ended()
        assert seen == [(4, "answer"), (4, "collected -1")]

    run(app, work)


def test_stash_in_on_failure_continues_later_where_the_reply_would_have_come() -> None:
    app = Service("shop")
    place = app.endpoint("order.place", Number, Number, state=Memo)
    stashed: list[bytes] = []

    @app.single("stock", Number, Number)
    async def stock(number: Number) -> Number:
        raise Reject("no")

    @place.stage
    async def check(number: Number, memo: Memo, flow: Flow) -> None:
        memo.n = 5
        flow.request(stock, number)

    @place.stage
    async def finish(number: Number, memo: Memo) -> Number:
        return Number(10 * memo.n + number.n)

    @place.on_failure
    async def failed(failure: Failure, memo: Memo, flow: Flow) -> None:
        memo.n = 6
        stashed.append(flow.stash())

    async def work(t: Stages) -> None:
        asking = asyncio.create_task(t.ask(place, Number(1)))
        await until(lambda: bool(stashed))
        async with app.initiate() as initiation:
            flow = initiation.unstash(stashed[0])
            assert isinstance(flow.message, Failure) and flow.message.stage == "stock"
            flow.next(Number(1))
        assert await asking == Number(61)
        await t.wait_until_ended()

    run(app, work)


@pytest.mark.parametrize("is_async", [True, False])
def test_exactly_once_handler_handles_a_failure_once_although_its_connection_is_lost(is_async: bool) -> None:
    app = Service("shop", exactly_once=True)
    place = app.endpoint("order.place", Number, Number, state=Memo)
    insert = text("INSERT INTO failures VALUES (:n)")

    @app.single("stock", Number, Number)
    async def stock(number: Number) -> Number:
        raise Reject("no")

    @place.stage
    async def check(number: Number, memo: Memo, flow: Flow) -> None:
        memo.n = number.n
        flow.request(stock, number)

    finished: list[int] = []

    @place.stage
    async def finish(number: Number, memo: Memo) -> Number:
        finished.append(memo.n)
        return Number(memo.n)

    if is_async:

        @place.on_failure
        async def failed(failure: Failure, memo: Memo, flow: Flow, sql: AsyncSession) -> None:
            await sql.execute(insert, {"n": memo.n})
            flow.next(Number(0))
    else:

        @place.on_failure
        def failed_plain(failure: Failure, memo: Memo, flow: Flow, sql: Session) -> None:
            sql.execute(insert, {"n": memo.n})
            flow.next(Number(0))

    async def work(t: Stages) -> None:
        async with t.sql() as sql:
            await sql.execute(text("CREATE TABLE failures (n INTEGER)"))
        t.at("SQL committed", t.broker.drop, stage="order.place.stage.on_failure")
        await t.send(place, Number(9))
        await t.wait_until_ended()
        assert finished == [9]
        async with t.sql() as sql:
            assert list((await sql.execute(text("SELECT n FROM failures"))).scalars()) == [9]

    run(app, work, database="sqlite://")


def test_flow_that_is_started_in_a_transaction_of_the_program_carries_handlers_and_reports() -> None:
    """Units of the outbox have both; the relay sends them."""
    app = Service("shop", exactly_once=True)
    handled: list[tuple[int, str]] = []

    @app.single("answer", Number, Number)
    async def answer(number: Number) -> Number:
        raise Reject("no")

    @app.terminator("collect", Number, state=Memo)
    async def collect(number: Number, memo: Memo) -> None:
        raise AssertionError("there is no reply")

    @collect.on_failure
    async def failed(failure: Failure, memo: Memo) -> None:
        handled.append((memo.n, failure.stage))

    async def work(t: Stages) -> None:
        async with t.sql() as sql, app.initiate(sql) as initiation:
            initiation.send(answer, Number(1), trace="t", reply_to=collect, reply_state=Memo(4))
        await t.wait_until_ended()
        assert handled == [(4, "answer")]

    run(app, work, database="sqlite://")


# ---- On the wire ----


def test_flow_without_waiting_endpoints_with_on_failure_has_no_new_header_or_field() -> None:
    app = Service("shop")
    there = app.remote("there", Number, Number)
    place = app.endpoint("place", Number, Number)

    @place.stage
    async def check(number: Number, flow: Flow) -> None:
        flow.request(there, number)

    @place.stage
    async def finish(number: Number) -> Number:
        return number

    async def work(t: Stages) -> None:
        await t.send(place, Number(1))
        await until_has(t, "there")
        (message,) = (await t.broker.queue("there")).messages
        assert json.loads(message.body)["waiting"] == [{"to": "/queue/place.stage.finish"}]
        assert not {"truenext-report-to", "truenext-report-id", "truenext-on-failure"} & message.headers.keys()

    run(app, work)


def test_requests_name_the_handlers_from_the_inside_out_and_where_to_report() -> None:
    app = Service("shop")
    there = app.remote("there", Number, Number)
    inner, outer = (app.endpoint(name, Number, Number) for name in ("inner", "outer"))

    @inner.stage
    async def first(number: Number, flow: Flow) -> None:
        flow.request(there, number)

    @outer.stage
    async def second(number: Number, flow: Flow) -> None:
        flow.request(inner, number)

    for each in (inner, outer):

        @each.stage
        async def finish(number: Number) -> Number:
            return number

        @each.on_failure
        async def failed(failure: Failure) -> None:
            pass

    async def work(t: Stages) -> None:
        asking = asyncio.create_task(t.ask(outer, Number(1)))
        await until_has(t, "there")
        (message,) = (await t.broker.queue("there")).messages
        envelope = decode_envelope(message.body)
        asker, *endpoints = envelope.waiting
        assert asker.report == asker.to and asker.to.startswith("/topic/replies.shop.") and not asker.failure
        assert [each.failure for each in endpoints] == [
            "/queue/outer.stage.on_failure",
            "/queue/inner.stage.on_failure",
        ]
        assert message.headers["truenext-on-failure"] == "/queue/inner.stage.on_failure /queue/outer.stage.on_failure"
        assert message.headers["truenext-report-to"] == asker.to
        assert message.headers["truenext-report-id"] == envelope.flow.id
        asking.cancel()
        await asyncio.wait([asking])

    run(app, work)


async def until_has(t: Stages, queue: str) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                if (await t.broker.queue(queue)).messages:
                    return
            except LookupError:
                pass
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("field", "address"),
    [
        ("report", "/queue/a,/queue/b"),
        ("report", "/temp-queue/a"),
        ("failure", "/topic/a"),
        ("failure", "/queue/a,/queue/b"),
        ("failure", "/queue/a.*"),
        ("failure", "/queue/DLQ.a"),
    ],
)
def test_message_that_names_an_invalid_report_or_failure_address_is_not_decoded(field: str, address: str) -> None:
    message = {
        "version": 2,
        "id": "0" * 32,
        "flow": {"id": "0" * 32, "trace": "t", "startedMs": 1, "startedBy": "theirs"},
        "kind": "request",
        "sender": "theirs",
        "message": {"n": 1},
        "waiting": [{"to": "/queue/a", field: address}],
    }
    with pytest.raises(NotDecoded, match=f"the {field} address .* is not a single queue"):
        decode_envelope(json.dumps(message).encode())
    message["waiting"] = [{"to": "/queue/a", field: "/queue/b"}]
    assert decode_envelope(json.dumps(message).encode()).waiting[0].to == "/queue/a"


def test_message_that_a_program_sends_to_the_queue_of_on_failure_is_rejected() -> None:
    app = Service("shop")
    _, failures = shop(app)

    async def work(t: Stages) -> None:
        async with truenext.connect(t.broker.url) as connection:
            body = {
                "version": 2,
                "id": "0" * 32,
                "flow": {"id": "0" * 32, "trace": "t", "startedMs": 1, "startedBy": "theirs"},
                "kind": "request",
                "sender": "theirs",
                "message": {},
                "waiting": [{"to": "/queue/a", "failure": "/queue/order.place.stage.on_failure"}],
            }
            await connection.send("/queue/order.place.stage.on_failure", json.dumps(body))
        letters: list[DeadLetter] = await t.wait_until_ended(dead_letters=1)
        assert letters[0].last_cause.startswith("NotDecoded: the message in order.place.stage.on_failure was sent")
        assert not failures

    run(app, work)


# ---- Definitions ----


def test_definition_of_on_failure_is_checked() -> None:
    app = Service("shop")
    place = app.endpoint("order.place", Number, Number, state=Memo)

    @place.stage
    async def check(number: Number, memo: Memo) -> Number:
        return number

    async def no_failure(number: Number, memo: Memo) -> None: ...

    async def no_state(failure: Failure) -> None: ...

    async def other_reply(failure: Failure, memo: Memo) -> Text:
        return Text()

    async def good(failure: Failure, memo: Memo) -> None: ...

    for function, reason in (
        (no_failure, "on_failure of order.place takes Number: annotate number with Failure"),
        (no_state, "stage on_failure of order.place must take its message and its state as its first parameters"),
        (other_reply, "stage on_failure of order.place returns Text, but the endpoint replies Number"),
    ):
        with pytest.raises(DefinitionError, match=reason):
            place.on_failure(function)  # type: ignore[arg-type]
    assert place.on_failure(good) is good
    assert app.stages.keys() == {"order.place", "order.place.stage.on_failure"}
    with pytest.raises(DefinitionError, match=r"order\.place has an on_failure already"):
        place.on_failure(good)
    with pytest.raises(DefinitionError, match=r"order\.place has a stage on_failure already"):
        place.stage(check, name="on_failure")  # type: ignore[call-overload]


def test_on_failure_inherits_the_settings_of_its_endpoint_and_has_its_own() -> None:
    app = Service("shop", concurrency=3)
    place = app.endpoint("order.place", Number, attempts=4)

    @place.stage
    async def check(number: Number) -> None: ...

    @place.on_failure(attempts=2)
    async def failed(failure: Failure) -> None: ...

    assert place.failure_stage is not None
    settings = place.failure_stage.settings
    assert (settings.concurrency, settings.attempts) == (3, 2)
