"""Tests of failed stages: retries, dead letters and causes, and the effect on other messages. Source: docs/stages.md,
"Failures and outages" """

import asyncio
import logging
import warnings
from collections import Counter
from functools import wraps
from pathlib import Path

import msgspec
import pytest

import truenext
from tests.stages.flows import Memo, Number, Text, disconnected, run, until
from truenext.engine.lifecycle.redelivery import retry_delay_ms
from truenext.model.limits import CAUSE_BYTES_MAX
from truenext.model.policy import Policy
from truenext.stage import Endpoint, Failure, Flow, FlowError, Reject, Service, queue_policies
from truenext.stage.core.definitions import Stage
from truenext.stage.core.failure import cause_of, describe_error
from truenext.stage.core.retry import RedeliveryPolicy, RetryDecision, RetryRules
from truenext.stage.interceptors.metrics import Metrics
from truenext.testing.stages import Stages

POLICY_ATTEMPTS = 7
"""Attempts of a message under the broker's default policy."""


class Busy(Exception):
    pass


class VeryBusy(Busy):
    pass


class Sending:
    """A service with a stage that sends each message on to another one."""

    def __init__(self) -> None:
        self.app = Service("shop")
        self.ran: list[int] = []
        """Attempts of the sending stage."""
        self.received: list[int] = []

        @self.app.terminator("take", Number)
        async def take(number: Number) -> None:
            self.received.append(number.n)

        @self.app.terminator("sends", Number)
        async def send(number: Number, flow: Flow) -> None:
            self.ran.append(flow.attempt)
            flow.send(take, number)

        self.send: Endpoint[Number, None] = send


def test_stage_that_always_fails_uses_its_attempts_and_its_message_is_a_dead_letter() -> None:
    app = Service("shop")
    ran: list[int] = []
    replies: list[Number] = []

    @app.single("fails", Number, Number, attempts=2)
    async def fails(number: Number, flow: Flow) -> Number:
        ran.append(flow.attempt)
        flow.reply(number)
        raise ValueError("no")

    @app.terminator("take", Number)
    async def take(reply: Number) -> None:
        replies.append(reply)

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(fails, Number(3), trace="o3", reply_to=take)
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert (letter.queue, letter.trace, letter.message, letter.attempts) == ("fails", "o3", {"n": 3}, 2)
        assert (ran, replies) == ([1, 2], [])

    run(app, work)


def test_refuse_is_a_dead_letter_at_once() -> None:
    app = Service("shop")
    ran: list[int] = []

    @app.single("refuses", Number, Number)
    async def rejects(number: Number, flow: Flow) -> Number:
        ran.append(flow.attempt)
        raise Reject("out of stock")

    async def work(t: Stages) -> None:
        await t.send(rejects, Number(3))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert (letter.attempts, ran) == (1, [1])

    run(app, work)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_stage_that_is_out_of_memory_fails_as_any_other_and_its_worker_goes_on(is_async: bool) -> None:
    app = Service("shop", concurrency=1, attempts=2)
    received: list[int] = []
    take = app.endpoint("take", Number)

    def plain(number: Number) -> None:
        if number.n == 0:
            raise MemoryError
        received.append(number.n)

    async def asynchronous(number: Number) -> None:
        plain(number)

    take.stage(asynchronous if is_async else plain)

    async def work(t: Stages) -> None:
        for n in range(3):
            await t.send(take, Number(n))
        await t.wait_until_ended(dead_letters=1)
        assert received == [1, 2]

    run(app, work)


@pytest.mark.parametrize("is_async", [True, False])
def test_cancelled_error_without_a_cancellation_is_a_failure(is_async: bool) -> None:
    """An operation awaited by the stage was cancelled, and not the stage."""
    app = Service("shop", concurrency=1, attempts=2)
    ran: list[int] = []
    take = app.endpoint("take", Number)

    def plain(number: Number, flow: Flow) -> None:
        ran.append(flow.attempt)
        raise asyncio.CancelledError

    async def asynchronous(number: Number, flow: Flow) -> None:
        plain(number, flow)

    take.stage(asynchronous if is_async else plain)

    async def work(t: Stages) -> None:
        await t.send(take, Number())
        await t.wait_until_ended(dead_letters=1)
        assert ran == [1, 2]

    run(app, work)


# ---- When it is tried again ----


def test_a_stage_that_says_nothing_is_tried_again_as_the_policy_of_its_queue_says() -> None:
    app = Service("shop")
    ran: list[int] = []

    @app.terminator("fails", Number)
    async def fails(number: Number, flow: Flow) -> None:
        ran.append(flow.attempt)
        raise ValueError("no")

    async def work(t: Stages) -> None:
        await t.send(fails, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.attempts == POLICY_ATTEMPTS
        assert ran == list(range(1, POLICY_ATTEMPTS + 1))

    run(app, work)


def test_attempts_above_attempts_max_change_nothing_and_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    app = Service("shop", attempts=100)

    @app.terminator("fails", Number)
    async def fails(number: Number) -> None:
        raise ValueError("no")

    async def work(t: Stages) -> None:
        await t.send(fails, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.attempts == POLICY_ATTEMPTS
        await until(lambda: bool(warnings_of_attempts(caplog)))

    run(app, work)
    (warning,) = warnings_of_attempts(caplog)
    facts = vars(warning)
    assert (facts["stage"], facts["attempts"], facts["attempts_max"]) == ("fails", 100, POLICY_ATTEMPTS)


def test_attempts_up_to_attempts_max_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    app = Service("shop", attempts=POLICY_ATTEMPTS)
    topic = app.topic("news", Number)

    @app.terminator("take", Number)
    async def take(number: Number) -> None: ...

    # The broker sets no limit for it.
    @app.subscriber(topic)
    async def listen(number: Number) -> None: ...

    async def work(t: Stages) -> None:
        await until_policies_are_known(t, app)

    run(app, work)
    assert warnings_of_attempts(caplog) == []


def test_attempts_max_is_requested_again_and_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_policies, "PERIOD_S", 0.02)
    app = Service("shop")

    @app.terminator("take", Number)
    async def take(number: Number) -> None: ...

    async def work(t: Stages) -> None:
        (stage,) = app.stages.values()
        policies = t._service_run.context.queue_policies
        await until(lambda: policies.of(stage) is not None)
        await asyncio.sleep(0.1)
        assert warnings_of_attempts(caplog) == []
        stage.settings.attempts = 8
        await until(lambda: bool(warnings_of_attempts(caplog)))
        await asyncio.sleep(0.1)

    run(app, work)
    assert len(warnings_of_attempts(caplog)) == 1


def warnings_of_attempts(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if "gives up messages of a stage before" in each.message]


# ---- What the log says of a failure ----


def failures_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.message.startswith("a stage has ")]


async def until_policies_are_known(t: Stages, app: Service) -> None:
    policies = t._service_run.context.queue_policies
    await until(lambda: None not in map(policies.of, app.stages.values()))


def test_failure_that_is_tried_again_is_one_line_and_the_traceback_comes_with_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = Service("shop", retry={Busy: "2s"})

    @app.terminator("fails", Number)
    async def fails(number: Number, flow: Flow) -> None:
        raise Busy("no answer") if flow.attempt == 1 else ValueError("wrong")

    async def work(t: Stages) -> None:
        await until_policies_are_known(t, app)
        await t.send(fails, Number(), trace="web o1")
        await t.wait_until_ended(dead_letters=1)

    run(app, work)
    *again, last = failures_in(caplog)
    assert [each.message for each in again] == ["a stage has failed, and is tried again"] * (POLICY_ATTEMPTS - 1)
    assert [each.exc_info for each in again] == [None] * (POLICY_ATTEMPTS - 1)
    facts = [vars(each) for each in again]
    assert [each["attempt"] for each in facts] == list(range(1, POLICY_ATTEMPTS))
    # The rule of the stage, and then the policy of the queue.
    assert [each["next_s"] for each in facts] == [2.0, *[1.0] * (POLICY_ATTEMPTS - 2)]
    assert (facts[0]["stage"], facts[0]["trace"], facts[0]["error"]) == ("fails", "web o1", "Busy: no answer")
    assert (
        last.message == "a stage has failed in the last attempt, and its message is given up"
        and last.exc_info is not None
    )
    assert (vars(last)["attempt"], str(last.exc_info[1])) == (POLICY_ATTEMPTS, "wrong")
    assert vars(last)["moved_to"] == "DLQ.fails" and "moved_to" not in facts[0]


@pytest.mark.parametrize("is_older", [False, True], ids=["", "older broker"])
@pytest.mark.parametrize("is_handled", [False, True], ids=["dead letter", "handled"])
def test_log_of_a_message_that_is_given_up_names_the_queue_that_gets_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_handled: bool, is_older: bool
) -> None:
    """An older broker reports no dead-letter queue, and knows no handlers."""
    if is_older:
        known = queue_policies.QueuePolicies.of

        def of(policies: queue_policies.QueuePolicies, stage: Stage) -> RedeliveryPolicy | None:
            policy = known(policies, stage)
            return policy and msgspec.structs.replace(policy, dead_letters=None)

        monkeypatch.setattr(queue_policies.QueuePolicies, "of", of)
    app = Service("shop")
    stock, place = app.endpoint("stock", Number, Number), app.endpoint("place", Number)

    @stock.stage
    async def reserve(number: Number) -> Number:
        raise Reject("out of stock")

    @place.stage
    async def request(number: Number, flow: Flow) -> None:
        flow.request(stock, number)

    @place.stage
    async def take(reply: Number) -> None: ...

    if is_handled:

        @place.on_failure
        async def failed(failure: Failure) -> None: ...

    async def work(t: Stages) -> None:
        await until_policies_are_known(t, app)
        await t.send(place, Number())
        await t.wait_until_ended(dead_letters=0 if is_handled else 1)

    run(app, work)
    (rejected,) = failures_in(caplog)
    if is_older:
        assert "moved_to" not in vars(rejected)
        return
    assert vars(rejected)["moved_to"] == ("place.stage.on_failure" if is_handled else "DLQ.stock")


@pytest.mark.parametrize("attempts", [1, 3])
def test_last_attempt_of_the_stages_own_limit_has_the_traceback(
    caplog: pytest.LogCaptureFixture, attempts: int
) -> None:
    app = Service("shop", attempts=attempts)

    @app.terminator("fails", Number)
    async def fails(number: Number) -> None:
        raise ValueError("wrong")

    async def work(t: Stages) -> None:
        await until_policies_are_known(t, app)
        await t.send(fails, Number())
        await t.wait_until_ended(dead_letters=1)

    run(app, work)
    failures = failures_in(caplog)
    assert [each.exc_info is not None for each in failures] == [*[False] * (attempts - 1), True]


def test_failure_before_the_broker_has_told_its_policy_has_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt may be the last one."""
    monkeypatch.setattr(queue_policies.QueuePolicies, "of", lambda *_: None)
    app = Service("shop")

    @app.terminator("fails", Number)
    async def fails(number: Number) -> None:
        raise ValueError("wrong")

    async def work(t: Stages) -> None:
        await t.send(fails, Number())
        await t.wait_until_ended(dead_letters=1)

    run(app, work)
    assert [each.exc_info is not None for each in failures_in(caplog)] == [True] * POLICY_ATTEMPTS


def test_delays_that_a_service_logs_are_those_of_the_broker() -> None:
    for first, delay, backoff, most in [(0, 1000, 1.0, 300_000), (7, 250, 3.5, 9_999), (5000, 0, 1.0, 1000)]:
        broker = Policy(first_delay_ms=first, delay_ms=delay, backoff=backoff, delay_max_ms=most)
        service = RedeliveryPolicy(None, first, delay, backoff, most)
        for failures in (1, 2, 3, 7, 50, 100_000):
            expected = retry_delay_ms(broker, failures, lambda: 0.5)
            assert round(service.delay_s(failures) * 1000) == expected


# ---- What metrics say of a failure ----


def test_metrics_of_stages_count_what_was_given_up_and_why() -> None:
    metrics = Metrics()
    app = Service("shop", interceptors=[metrics])

    @app.terminator("take", Number, attempts=2)
    async def take(number: Number, flow: Flow) -> None:
        if number.n == 1:
            raise Reject("no")
        if number.n == 2:
            raise ValueError("wrong")
        if number.n == 3:
            flow.reply(number)
        if number.n == 4 and flow.attempt == 1:
            raise ValueError("once")

    @app.terminator("fails", Number)
    async def fails(number: Number) -> None:
        raise ValueError("wrong")

    async def work(t: Stages) -> None:
        await until_policies_are_known(t, app)
        for number in range(6):
            await t.send(take, Number(number), interactive=number == 5)
        await t.send(fails, Number())
        async with truenext.connect(t.broker.url) as connection:
            await connection.send("/queue/take", "plain text")
        await t.wait_until_ended(dead_letters=5)

    run(app, work)
    figures = metrics.snapshot()
    taken = figures["take", "take", "other"]
    # A message that is no message of stages has no flow, and so no execution.
    assert taken.given_up == {"rejected": 1, "attempts exhausted": 1, "wrong call": 1}
    assert taken.outcomes == {"completed": 2, "failed": 2, "rejected": 3}
    assert (taken.attempts.count, taken.attempts.sum) == (5, 7)
    assert figures["fails", "fails", "other"].given_up == {"attempts exhausted": 1}
    assert figures["fails", "fails", "other"].outcomes == {"failed": POLICY_ATTEMPTS}
    assert figures["take", "take", "interactive"].outcomes == {"completed": 1}
    # Redeliveries have not waited in the queue.
    counts = {key: each.waited.count for key, each in figures.items()}
    assert counts == {("take", "take", "other"): 5, ("take", "take", "interactive"): 1, ("fails", "fails", "other"): 1}


def test_retry_delays_are_those_of_the_list_and_the_last_one_repeats() -> None:
    app = Service("shop", retry={Busy: "2s, 10s, 1m"})
    ran: list[int] = []

    @app.terminator("fails", Number)
    async def fails(number: Number, flow: Flow) -> None:
        ran.append(flow.attempt)
        raise Busy

    async def work(t: Stages) -> None:
        await t.send(fails, Number())
        for attempt, delay_s in ((1, 2), (2, 10), (3, 60), (4, 60)):
            await until(lambda: not t._service_run.active_stages and ran == list(range(1, attempt + 1)))  # noqa: B023
            await t.advance(seconds=delay_s - 0.5)
            await asyncio.sleep(0.02)
            assert len(ran) == attempt
            await t.advance(seconds=0.6)
        await t.wait_until_ended(dead_letters=1)

    run(app, work)


def test_retry_never_makes_a_dead_letter_at_once() -> None:
    app = Service("shop")

    @app.terminator("fails", Number, retry={Busy: "never"})
    async def fails(number: Number) -> None:
        raise Busy

    async def work(t: Stages) -> None:
        await t.send(fails, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.attempts == 1

    run(app, work)


def test_retry_rule_is_that_of_the_nearest_class_and_of_stage_then_endpoint_then_service() -> None:
    app = Service("shop", retry={Exception: "never", Busy: "1ms"}, attempts=3)
    attempts: Counter[str] = Counter()
    raises = {"very busy": VeryBusy, "busy": Busy, "other": ValueError}

    by_service = app.endpoint("service", Text)
    by_endpoint = app.endpoint("endpoint", Text, retry={VeryBusy: "never"}, attempts=4)
    by_stage = app.endpoint("staged", Text, retry={VeryBusy: "never"}, attempts=4)

    @by_service.stage
    async def of_service(text: Text) -> None:
        attempts[f"service {text.text}"] += 1
        raise raises[text.text]

    @by_endpoint.stage
    async def of_endpoint(text: Text) -> None:
        attempts[f"endpoint {text.text}"] += 1
        raise raises[text.text]

    @by_stage.stage(retry={Busy: "never", VeryBusy: "1ms", Exception: "1ms"}, attempts=2)
    async def of_stage(text: Text) -> None:
        attempts[f"staged {text.text}"] += 1
        raise raises[text.text]

    async def work(t: Stages) -> None:
        for endpoint in (by_service, by_endpoint, by_stage):
            for name in raises:
                await t.send(endpoint, Text(name))
        await t.wait_until_ended(dead_letters=9)
        assert attempts == {
            "service very busy": 3,
            "service busy": 3,
            "service other": 1,
            "endpoint very busy": 1,
            "endpoint busy": 4,
            "endpoint other": 1,
            "staged very busy": 2,
            "staged busy": 1,
            "staged other": 2,
        }

    run(app, work)


def test_a_wrong_call_is_a_dead_letter_at_once_whatever_retry_says() -> None:
    """The call would be as wrong at the next attempt."""
    app = Service("shop", retry={Exception: "1ms"})

    @app.terminator("wrong", Number)
    async def wrong(number: Number, flow: Flow) -> None:
        flow.reply(number)

    async def work(t: Stages) -> None:
        await t.send(wrong, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.attempts == 1
        assert letter.last_cause.startswith("FlowError: wrong replies nothing")

    run(app, work)


def decides(error: BaseException, rules: dict[type[BaseException], str]) -> RetryDecision:
    return RetryRules(rules, "what is tested").decide(error, 1, None)


def test_exception_group_is_retried_by_the_longest_delay_of_its_exceptions() -> None:
    busy, inner = Busy(), ExceptionGroup("inner", [ValueError()])
    rules: dict[type[BaseException], str] = {Busy: "2s", ValueError: "3s"}
    assert decides(ExceptionGroup("one", [busy]), rules) == RetryDecision(2)
    assert decides(ExceptionGroup("with one that no rule names", [KeyError(), busy]), rules) == RetryDecision(2)
    assert decides(ExceptionGroup("the longest", [busy, inner]), rules) == RetryDecision(3)
    assert decides(ExceptionGroup("of no rule", [KeyError()]), rules) == RetryDecision(None)
    assert decides(ExceptionGroup("of any", [KeyError()]), {Exception: "5s"}) == RetryDecision(5)
    assert decides(ExceptionGroup("by its own class", [busy]), {**rules, ExceptionGroup: "7s"}) == RetryDecision(7)


def test_exception_group_with_one_exception_that_is_never_retried_is_rejected() -> None:
    for never in (Busy(), Reject("out of stock"), FlowError("wrong"), ExceptionGroup("inner", [Busy()])):
        assert decides(ExceptionGroup("", [ValueError(), never]), {Busy: "never", ValueError: "1s"}).is_rejected


def test_a_task_group_of_a_stage_fails_by_the_rules_of_what_is_in_it_and_its_cause_names_that() -> None:
    app = Service("shop", retry={Busy: "never"})

    async def ask(name: str) -> None:
        raise Busy(name)

    @app.terminator("fails", Number)
    async def fails(number: Number) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ask("first"))
            group.create_task(ask("second"))

    async def work(t: Stages) -> None:
        await t.send(fails, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.attempts == 1
        lines = letter.last_cause.splitlines()
        assert lines[0].startswith("ExceptionGroup: unhandled errors in a TaskGroup")
        assert lines[2] == "in it Busy: first"
        assert lines[3].startswith("at ask in test_failures.py:")
        assert lines[4] == "in it Busy: second"

    run(app, work)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_decorator_that_forgets_to_await_its_function_says_so_and_nothing_is_committed(is_async: bool) -> None:
    app = Service("shop")

    async def answer(number: Number, flow: Flow) -> Number:
        return number

    @wraps(answer)
    def forgets(number: Number, flow: Flow) -> object:
        flow.send(sink, number)
        return answer(number, flow)

    @wraps(answer)
    async def forgets_too(number: Number, flow: Flow) -> object:
        return forgets(number, flow)

    @app.terminator("sink", Number)
    async def sink(number: Number) -> None:
        raise AssertionError("nothing was sent")

    asked = app.endpoint("asked", Number, Number)
    asked.stage(forgets_too if is_async else forgets)  # type: ignore[arg-type]

    async def work(t: Stages) -> None:
        await t.send(asked, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.last_cause.startswith(
            "FlowError: answer has returned an awaitable that was not awaited (coroutine)"
        )
        assert letter.attempts == 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(app, work)


def test_poison_gets_exactly_its_attempts_and_delays_no_other_message() -> None:
    app = Service("shop", attempts=3)
    attempts: Counter[int] = Counter()
    received: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        if number.n < 0:
            attempts[number.n] += 1
            raise ValueError("poison")
        received.append(number.n)

    async def work(t: Stages) -> None:
        logging.getLogger("truenext.stage").setLevel(logging.ERROR)
        async with app.initiate() as initiation:
            for n in range(1, 61):
                initiation.send(take, Number(-n), trace="poison")
                initiation.send(take, Number(n), trace="healthy")
        # Healthy ones come while poison waits for its next try.
        await until(lambda: len(received) == 60)
        letters = await t.wait_until_ended(dead_letters=60)
        assert {letter.attempts for letter in letters} == {3}
        assert attempts == {-n: 3 for n in range(1, 61)}
        assert sorted(received) == list(range(1, 61))

    try:
        run(app, work)
    finally:
        logging.getLogger("truenext.stage").setLevel(logging.NOTSET)


def test_a_dead_letter_that_is_redriven_continues_its_flow() -> None:
    app = Service("shop", attempts=1)
    is_up = False
    ids: list[str] = []
    replies: list[tuple[Text, Memo]] = []
    outer = app.endpoint("outer", Number, Text, state=Memo)

    @outer.stage
    async def one(number: Number, memo: Memo, flow: Flow) -> None:
        memo.n = number.n
        flow.next(number)

    @outer.stage
    async def two(number: Number, memo: Memo, flow: Flow) -> Text:
        ids.append(flow.message_id)
        if not is_up:
            raise ValueError("down")
        return Text(f"{memo.n} {flow.trace} {flow.attempt}")

    @app.terminator("take", Text, state=Memo)
    async def take(reply: Text, memo: Memo) -> None:
        replies.append((reply, memo))

    async def work(t: Stages) -> None:
        nonlocal is_up
        async with app.initiate() as initiation:
            initiation.send(outer, Number(4), trace="o4", reply_to=take, reply_state=Memo(8))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.queue == "outer.stage.two"
        is_up = True
        async with truenext.connect(t.broker.url) as connection:
            await connection.control_request("redrive", {"queue": f"DLQ.{letter.queue}"})
        await t.wait_until_ended()
        assert replies == [(Text("4 o4 1"), Memo(8))]
        assert ids[0] == ids[1]

    run(app, work)


# ---- Causes ----


def test_a_dead_letter_says_class_text_place_stage_and_process_of_its_first_and_its_last_failure() -> None:
    app = Service("shop", attempts=3)

    @app.terminator("fails", Number)
    async def fails(number: Number, flow: Flow) -> None:
        raise ValueError(f"attempt {flow.attempt}") from KeyError("inner")

    async def work(t: Stages) -> None:
        await t.send(fails, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        for attempt, cause in ((1, letter.first_cause), (3, letter.last_cause)):
            first, *lines = cause.splitlines()
            assert first == f"ValueError: attempt {attempt}"
            assert lines[0].startswith("at fails in test_failures.py:")
            assert lines[1] == "because KeyError: 'inner'"
            assert lines[2].startswith("in stage fails, by shop on ") and " pid " in lines[2]

    run(app, work)


def test_a_cause_names_the_line_of_the_program_from_which_pythons_own_library_was_called() -> None:
    app = Service("shop", attempts=1)

    @app.terminator("fails", Number)
    async def fails(number: Number) -> None:
        (Path(__file__).parent / "is not there").read_text()

    async def work(t: Stages) -> None:
        await t.send(fails, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.last_cause.splitlines()[1].startswith("at fails in test_failures.py:")

    run(app, work)


def test_cause_formats_no_more_exceptions_than_it_keeps() -> None:
    calls = 0

    class Long(Exception):
        def __str__(self) -> str:
            nonlocal calls
            calls += 1
            return "x" * 100_000

    class Short(Exception):
        def __str__(self) -> str:
            nonlocal calls
            calls += 1
            return "short"

    error: Exception = Short()
    for _ in range(10_000):
        after = Short()
        after.__cause__ = error
        error = after
    group = ExceptionGroup("many", [Short() for _ in range(10_000)])
    for each, most in ((Long(), 1), (error, 1000), (group, 1000)):
        calls = 0
        cause = cause_of(each, "stage", "process")
        assert len(cause.encode()) <= CAUSE_BYTES_MAX and cause.endswith("\nin stage stage, by process")
        assert calls <= most
    assert describe_error(Long()).endswith("Long: " + "x" * CAUSE_BYTES_MAX)


def test_a_dead_letter_that_was_refused_says_the_reason() -> None:
    app = Service("shop")

    @app.terminator("refuses", Number)
    async def rejects(number: Number) -> None:
        raise Reject("out of stock")

    async def work(t: Stages) -> None:
        await t.send(rejects, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.last_cause.startswith("Reject: out of stock\n")
        with pytest.raises(AssertionError, match="out of stock"):
            await t.wait_until_ended()

    run(app, work)


def test_cause_of_a_lost_last_attempt_names_the_failure_before() -> None:
    """Fixed: the cause said "see its last cause", and had become that itself."""
    app = Service("shop")
    lost, end = asyncio.Event(), asyncio.Event()

    @app.terminator("fails", Number, attempts=2, retry={ValueError: "1ms"})
    async def fails(number: Number, flow: Flow) -> None:
        if flow.attempt == 1:
            raise ValueError("the bank says no")
        lost.set()
        await end.wait()

    async def work(t: Stages) -> None:
        await t.send(fails, Number(), interactive=True)
        await lost.wait()
        (lane,) = [each for each in t._service_run._pools if each.is_interactive]
        # The answer comes after the broker knows that the second attempt has started.
        await lane.connection.control_request("status")
        t.broker.freeze(lane.connection)
        # The broker gives it up, and with it an attempt of its message.
        await t.advance(seconds=60)
        t.broker.thaw()
        end.set()
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.first_cause.startswith("ValueError: the bank says no\n")
        assert letter.last_cause.split("\n")[:2] == [
            "ValueError: the bank says no",
            "NoAttemptsLeft: 2 of 2 allowed attempts have failed; the last one ended with its process or connection",
        ]

    run(app, work)


def test_a_circle_a_wrong_call_and_an_undecodable_message_say_what_they_are() -> None:
    app = Service("shop", attempts=1)
    circle = app.endpoint("circle", Number, Number)

    @circle.stage
    async def again(number: Number, flow: Flow) -> Number | None:
        flow.goto(circle, number)
        return None

    @app.terminator("wrong", Number)
    async def wrong(number: Number, flow: Flow) -> None:
        flow.reply(number)

    async def work(t: Stages) -> None:
        async with truenext.connect(t.broker.url) as connection:
            await connection.send("/queue/wrong", "plain text")
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert "not a message of stages" in letter.last_cause
        await t.send(wrong, Number())
        assert "wrong replies nothing" in (await t.wait_until_ended(dead_letters=2))[-1].last_cause
        await t.send(circle, Number())
        assert "more than 200 messages" in (await t.wait_until_ended(dead_letters=3))[-1].last_cause

    run(app, work)


# ---- What is nobody's failure ----


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stage_whose_connection_is_lost_during_its_commit_happens_once(when: str) -> None:
    app = Service("shop")
    received: list[tuple[int, int]] = []

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        received.append((number.n, flow.attempt))

    sends = app.endpoint("sends", Number)

    @sends.stage
    async def send(number: Number, flow: Flow) -> None:
        flow.send(take, number)
        if number.n < 1:
            flow.send(sends, Number(number.n + 1))

    async def work(t: Stages) -> None:
        t.at("run", lambda: t.broker.lose_commit("before" if when == "before" else "after"), stage="sends", times=2)
        await t.send(sends, Number(0))
        await t.wait_until_ended()
        assert received == [(0, 1), (1, 1)]

    run(app, work)


@pytest.mark.parametrize("point", ["received", "run"])
def test_a_broker_that_crashes_while_a_stage_runs_is_no_attempt_and_the_flow_ends_once(point: str) -> None:
    shop = Sending()

    async def work(t: Stages) -> None:
        crashes: list[asyncio.Task[None]] = []
        t.at(
            "received" if point == "received" else "run",
            lambda: crashes.append(asyncio.ensure_future(t.broker.crash())),
            stage="sends",
            times=2,
        )
        await t.send(shop.send, Number(1))
        await until(lambda: len(crashes) == 2)
        await asyncio.gather(*crashes)
        await t.wait_until_ended()
        assert (set(shop.ran), shop.received) == ({1}, [1])

    run(shop.app, work)


def test_a_service_outlives_a_broker_that_is_away_again_and_again() -> None:
    app = Service("shop")
    received: list[int] = []

    @app.terminator("take", Number)
    async def take(number: Number) -> None:
        received.append(number.n)

    async def work(t: Stages) -> None:
        for n in range(3):
            async with disconnected(t.broker):
                await asyncio.sleep(0.01)
            await t.send(take, Number(n))
            # One whose commit was lost runs once more.
            await until(lambda: n in received)  # noqa: B023
        await t.wait_until_ended()
        assert set(received) == {0, 1, 2}
        # One of each lane, and that of the test: none was left behind.
        await until(lambda: len(t.broker._broker_run.connections) == 3)

    run(app, work)


@pytest.mark.alternates("services that find no broker")
def test_a_service_that_finds_no_broker_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truenext.stage.service_run, "CONNECT_TIMEOUT_S", 0.2)
    app = Service("shop", broker="stomp://127.0.0.1:1")

    @app.terminator("take", Number)
    async def take(number: Number) -> None: ...

    async def main() -> None:
        with pytest.raises(truenext.ConnectionLost):
            async with app.running():
                raise AssertionError("not reached")
        assert app._current_run is None

    asyncio.run(main())


def test_messages_too_large_for_one_transaction_fail_their_stage() -> None:
    app = Service("shop", attempts=2)
    ran: list[int] = []

    @app.terminator("take", Text)
    async def take(text: Text) -> None: ...

    @app.terminator("sends", Number)
    async def send(number: Number, flow: Flow) -> None:
        ran.append(number.n)
        for _ in range(number.n):
            flow.send(take, Text("x" * 9_000_000))

    async def work(t: Stages) -> None:
        await t.send(send, Number(2))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.attempts == 2
        # The first time the broker refuses the commit, which gives the message back.
        assert ran == [2, 2, 2]
        await t.send(send, Number(1))
        await t.wait_until_ended(dead_letters=1)

    run(app, work)


def test_a_message_that_is_too_large_is_the_failure_of_its_stage() -> None:
    app = Service("shop", attempts=1)

    @app.terminator("take", Text)
    async def take(text: Text) -> None: ...

    @app.terminator("sends", Number)
    async def send(number: Number, flow: Flow) -> None:
        flow.send(take, Text("x" * 17_000_000))

    async def work(t: Stages) -> None:
        await t.send(send, Number())
        await t.wait_until_ended(dead_letters=1)

    run(app, work)


def test_want_of_room_on_the_brokers_disk_is_no_attempt() -> None:
    shop = Sending()

    async def work(t: Stages) -> None:
        t.at("received", t.broker.fill_disk, stage="sends")
        await t.send(shop.send, Number(1))
        await until(lambda: bool(shop.ran))
        await asyncio.sleep(0.05)
        assert shop.received == []
        t.broker.free_disk()
        await t.wait_until_ended()
        assert shop.received == [1]
        assert set(shop.ran) == {1}

    run(shop.app, work)


def test_error_with_a_very_long_text_is_logged_shortened(caplog: pytest.LogCaptureFixture) -> None:
    """Fixed: formatting the traceback took seconds, in which no stage ran."""
    app = Service("shop")

    @app.terminator("take", Number, attempts=1)
    async def take(number: Number) -> None:
        raise ValueError("x\n" * 1_000_000)

    async def work(t: Stages) -> None:
        await t.send(take, Number())
        await t.wait_until_ended(dead_letters=1)

    run(app, work)
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert record.exc_info is None
    assert len(str(vars(record)["error"])) < 5000
