"""Tests of flows initiated outside of stages or by a transaction of their own, and of their outcomes. Source:
docs/stages.md"""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.stages.flows import Memo, Number, Text, disconnected, run, until
from truenext.errors import InDoubt, LocalProtocolError, RolledBack
from truenext.stage import Endpoint, Flow, FlowError, Service, broker_transaction, initiator
from truenext.testing.stages import Stages, stages


class Shop:
    """A service that notes the messages it receives."""

    def __init__(self) -> None:
        self.app = Service("shop")
        self.received: list[int] = []
        self.flows: list[Flow] = []

        @self.app.terminator("take", Number)
        async def take(number: Number, flow: Flow) -> None:
            self.received.append(number.n)
            self.flows.append(flow)

        self.take: Endpoint[Number, None] = take


# ---- One transaction ----


def test_initiation_sends_all_its_messages_once_when_it_ends() -> None:
    """Sends, requests and publications, interactive or not, persistent or not."""
    shop = Shop()
    app = shop.app
    topic = app.topic("numbers", Number)

    @app.subscriber(topic)
    async def listen(number: Number) -> None:
        shop.received.append(number.n)

    @app.single("leaf", Number, Number)
    async def leaf(request: Number) -> Number:
        return request

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            for n in range(5):
                initiation.send(shop.take, Number(n), trace=f"{n}", interactive=n % 2 == 0, persistent=n % 3 == 0)
                initiation.send(leaf, Number(10 + n), trace=f"{n}", reply_to=shop.take)
                initiation.publish(topic, Number(20 + n), trace=f"{n}")
            assert (await t.broker.queue("take")).waiting == 0
            await asyncio.sleep(0.02)
            assert shop.received == []
        await t.wait_until_ended()
        assert sorted(shop.received) == [*range(5), *range(10, 15), *range(20, 25)]

    run(app, work)


def test_an_initiation_whose_block_raises_sends_nothing_and_the_error_is_the_programs() -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        with pytest.raises(ZeroDivisionError):
            async with shop.app.initiate() as initiation:
                initiation.send(shop.take, Number(1), trace="t")
                raise ZeroDivisionError
        await t.wait_until_ended()
        assert shop.received == []

    run(shop.app, work)


def test_an_initiation_that_says_nothing_needs_no_broker() -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        t.broker.freeze()
        async with shop.app.initiate():
            pass
        t.broker.thaw()

    run(shop.app, work)


def test_a_plain_function_begins_flows_with_with() -> None:
    shop = Shop()

    def begins() -> str:
        with shop.app.initiate() as initiation:
            return initiation.send(shop.take, Number(7), trace="t")

    async def work(t: Stages) -> None:
        id = await asyncio.to_thread(begins)
        await t.wait_until_ended()
        assert (shop.received, shop.flows[0].id) == ([7], id)

    run(shop.app, work)


def test_a_process_that_runs_no_stages_begins_flows_and_asks() -> None:
    stages_of = Service("shop")

    @stages_of.single("double", Number, Number)
    async def double(request: Number) -> Number:
        return Number(2 * request.n)

    web = Service("web")
    remote_endpoint = web.remote("double", Number, Number)

    async def work(t: Stages) -> None:
        web.broker = (t.broker.url,)
        async with web.connected():
            assert await web.ask(remote_endpoint, Number(3), trace="t", timeout=10) == Number(6)

    run(stages_of, work)


def test_a_service_that_is_only_connected_runs_no_stage() -> None:
    running, connected = Shop(), Shop()

    async def work(t: Stages) -> None:
        connected.app.broker = (t.broker.url,)
        async with connected.app.connected():
            await connected.app.send(connected.take, Number(1), trace="t")
            await t.wait_until_ended()
        assert (running.received, connected.received) == ([1], [])

    run(running.app, work)


# ---- What a flow is called, and what it takes along ----


def test_a_flow_that_a_stage_begins_is_called_after_its_parent() -> None:
    app = Service("shop")
    traces: dict[int, str] = {}

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        traces[number.n] = flow.trace

    @app.terminator("begins", Number)
    async def begins(number: Number, flow: Flow) -> None:
        flow.send(take, Number(1), trace="child")
        flow.send(take, Number(2), trace="!alone")
        flow.send(take, Number(3))
        async with app.initiate() as initiation:
            initiation.send(take, Number(4), trace="of its own")
        start_again(flow)

    def start_again(flow: Flow) -> None:
        flow.publish(app.topic("nobody", Number), Number(5), trace="x")

    async def work(t: Stages) -> None:
        await t.send(begins, Number(), trace="parent")
        await t.send(take, Number(0), trace="!x")
        await t.wait_until_ended()
        assert traces == {0: "!x", 1: "parent|child", 2: "alone", 3: "parent", 4: "of its own"}

    run(app, work)


def test_flow_sent_by_a_stage_inherits_interactive_and_persistent_unless_given() -> None:
    app = Service("shop")
    seen: dict[int, tuple[bool, bool, dict[str, object]]] = {}

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        seen[number.n] = flow.interactive, flow.persistent, flow.properties

    @app.terminator("begins", Number)
    async def begins(number: Number, flow: Flow) -> None:
        flow.send(take, Number(number.n + 1))
        flow.send(take, Number(number.n + 2), interactive=False, persistent=True, properties={"b": 2})
        async with app.initiate() as initiation:
            initiation.send(take, Number(number.n + 3), trace="t")

    async def work(t: Stages) -> None:
        await t.send(begins, Number(0), interactive=True, persistent=False, properties={"a": 1})
        await t.send(begins, Number(10))
        await t.wait_until_ended()
        assert seen == {
            1: (True, False, {"a": 1}),
            2: (False, True, {"a": 1, "b": 2}),
            3: (False, True, {}),
            11: (False, True, {}),
            12: (False, True, {"b": 2}),
            13: (False, True, {}),
        }

    run(app, work)


# ---- In stages ----


def test_failed_stage_loses_messages_of_its_flow_and_keeps_its_own_initiations() -> None:
    shop = Shop()
    app = shop.app

    @app.terminator("fails", Number, attempts=1)
    async def fails(number: Number, flow: Flow) -> None:
        flow.send(shop.take, Number(1))
        async with app.initiate() as initiation:
            initiation.send(shop.take, Number(2), trace="of its own")
        await app.send(shop.take, Number(3), trace="of its own")
        raise ValueError("no")

    async def work(t: Stages) -> None:
        await t.send(fails, Number())
        await t.wait_until_ended(dead_letters=1)
        assert sorted(shop.received) == [2, 3]

    run(app, work)


def _nestings() -> Iterator[tuple[bool, bool, bool, bool]]:
    for outer in (False, True):
        for middle in (False, True):
            for inner in (False, True):
                for stage in (False, True):
                    yield outer, middle, inner, stage


@pytest.mark.parametrize("is_async", [True, False])
def test_an_exception_undoes_the_transactions_around_it_and_no_other(is_async: bool) -> None:
    """Three nested initiations in a stage; each of the four ends well or with an exception that is caught around it."""
    shop = Shop()
    app = shop.app
    cases = list(_nestings())
    expected: list[int] = []

    async def in_tasks(number: Number, flow: Flow) -> None:
        outer, middle, inner, stage = cases[number.n]
        base = 10 * number.n
        flow.send(shop.take, Number(base))
        try:
            async with app.initiate() as first:
                first.send(shop.take, Number(base + 1), trace="t")
                try:
                    async with app.initiate() as second:
                        second.send(shop.take, Number(base + 2), trace="t")
                        try:
                            async with app.initiate() as third:
                                third.send(shop.take, Number(base + 3), trace="t")
                                _raise_if(inner)
                        except ZeroDivisionError:
                            pass
                        _raise_if(middle)
                except ZeroDivisionError:
                    pass
                _raise_if(outer)
        except ZeroDivisionError:
            pass
        _raise_if(stage)

    def in_threads(number: Number, flow: Flow) -> None:
        outer, middle, inner, stage = cases[number.n]
        base = 10 * number.n
        flow.send(shop.take, Number(base))
        try:
            with app.initiate() as first:
                first.send(shop.take, Number(base + 1), trace="t")
                try:
                    with app.initiate() as second:
                        second.send(shop.take, Number(base + 2), trace="t")
                        try:
                            with app.initiate() as third:
                                third.send(shop.take, Number(base + 3), trace="t")
                                _raise_if(inner)
                        except ZeroDivisionError:
                            pass
                        _raise_if(middle)
                except ZeroDivisionError:
                    pass
                _raise_if(outer)
        except ZeroDivisionError:
            pass
        _raise_if(stage)

    nested = app.endpoint("nested", Number, attempts=1)
    nested.stage(in_tasks if is_async else in_threads)

    for n, fails in enumerate(cases):
        outer, middle, inner, stage = fails
        fates = [stage, outer, middle, inner]
        expected.extend(10 * n + level for level, has_failed in enumerate(fates) if not has_failed)

    async def work(t: Stages) -> None:
        for n in range(len(cases)):
            await t.send(nested, Number(n))
        await t.wait_until_ended(dead_letters=sum(stage for *_, stage in cases))
        assert sorted(shop.received) == sorted(expected)

    run(app, work)


def _raise_if(it_fails: bool) -> None:
    if it_fails:
        raise ZeroDivisionError


# ---- After the commit ----


def test_after_commit_is_called_once_all_is_committed_and_its_errors_are_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shop = Shop()
    app = shop.app
    called: list[object] = []

    async def awaited(text: str, *, number: int) -> None:
        await asyncio.sleep(0)
        called.append((text, number))

    def breaks() -> None:
        raise ZeroDivisionError("in the hook")

    @app.terminator("begins", Number)
    async def begins(number: Number, flow: Flow) -> None:
        flow.send(shop.take, Number(1))
        flow.after_commit(called.append, "first")
        flow.after_commit(breaks)
        flow.after_commit(awaited, "second", number=2)
        called.append("ran")

    @app.terminator("plain", Number)
    def plain(number: Number, flow: Flow) -> None:
        flow.after_commit(called.append, "plain")

    async def work(t: Stages) -> None:
        t.at("committed", lambda: called.append("committed"), stage="begins")
        await t.send(begins, Number())
        await t.wait_until_ended()
        assert called == ["ran", "committed", "first", ("second", 2)]
        assert shop.received == [1]
        await t.send(plain, Number())
        await t.wait_until_ended()
        assert called[-1] == "plain"

    run(app, work)
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.exc_info is not None and "in the hook" in str(record.exc_info[1])


def test_a_hook_that_never_ends_is_cancelled_and_logged_and_its_worker_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.stage.user_code.HOOK_TIMEOUT_S", 0.05)
    app = Service("shop", concurrency=1)
    ended: list[int] = []

    async def hangs() -> None:
        await asyncio.Event().wait()

    @app.terminator("hooked", Number)
    async def hooked(number: Number, flow: Flow) -> None:
        flow.after_commit(hangs)
        flow.after_commit(ended.append, number.n)

    async def work(t: Stages) -> None:
        await t.send(hooked, Number(1))
        await t.send(hooked, Number(2))
        await until(lambda: ended == [1, 2])

    run(app, work)
    errors = [each for each in caplog.records if each.levelname == "ERROR"]
    assert len(errors) == 2
    assert "not ended within 0.05 seconds" in str((errors[0].exc_info or (None, None))[1])


def test_after_commit_is_not_called_for_an_attempt_that_has_failed() -> None:
    app = Service("shop")
    called: list[int] = []

    @app.terminator("begins", Number)
    async def begins(number: Number, flow: Flow) -> None:
        flow.after_commit(called.append, flow.attempt)
        if flow.attempt < 3:
            raise ValueError("not yet")

    async def work(t: Stages) -> None:
        await t.send(begins, Number())
        await t.wait_until_ended()
        assert called == [3]

    run(app, work)


def test_after_commit_runs_outside_of_the_transaction() -> None:
    """A hook's calls of the flow are refused, and its own initiations are sent."""
    shop = Shop()
    app = shop.app

    @app.terminator("begins", Number)
    async def begins(number: Number, flow: Flow) -> None:
        async def hook() -> None:
            with pytest.raises(FlowError, match="too late"):
                flow.send(shop.take, Number(1))
            await app.send(shop.take, Number(2), trace="t")

        flow.after_commit(hook)

    async def work(t: Stages) -> None:
        await t.send(begins, Number())
        await t.wait_until_ended()
        assert shop.received == [2]

    run(app, work)


# ---- What became of it ----


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_initiation_whose_connection_is_lost_during_its_commit_happens_once(when: str) -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        t.broker.lose_commit("before" if when == "before" else "after")
        async with shop.app.initiate() as initiation:
            initiation.send(shop.take, Number(1), trace="t")
            initiation.send(shop.take, Number(2), trace="t")
        await t.wait_until_ended()
        assert shop.received == [1, 2]

    run(shop.app, work)


def test_an_initiation_without_a_broker_is_rolled_back_when_its_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()

    def lost() -> int:
        return sum("connection lost" in each.getMessage() for each in caplog.records)

    async def work(t: Stages) -> None:
        async with disconnected(t.broker):
            # Until a client knows it, its commit would be in doubt.
            await until(lambda: lost() == 3)
            with pytest.raises(RolledBack) as rolled_back:
                await shop.app.send(shop.take, Number(1), trace="t", timeout=0.1)
        assert "in time" in str(rolled_back.value)
        await shop.app.send(shop.take, Number(2), trace="t")
        await t.wait_until_ended()
        assert shop.received == [2]

    run(shop.app, work)


def test_an_initiation_waits_for_a_broker_that_is_away_for_a_moment() -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        async with disconnected(t.broker):
            sending = asyncio.create_task(shop.app.send(shop.take, Number(1), trace="t"))
            await asyncio.sleep(0.05)
            assert not sending.done()
        await sending
        await t.wait_until_ended()
        assert shop.received == [1]

    run(shop.app, work)


def test_initiation_without_disk_space_waits_for_it() -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        t.broker.fill_disk()
        with pytest.raises((RolledBack, InDoubt)):
            await shop.app.send(shop.take, Number(1), trace="t", timeout=0.1)
        sending = asyncio.create_task(shop.app.send(shop.take, Number(2), trace="t"))
        await asyncio.sleep(0.05)
        assert not sending.done()
        t.broker.free_disk()
        await sending
        await t.wait_until_ended()
        assert shop.received == [2]

    run(shop.app, work)


def test_initiation_without_disk_space_is_retried_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop()
    tried: list[Any] = []

    async def send_all(session: Any, *message: Any) -> None:
        tried.append(message)
        await broker_transaction.send_messages(session, *message)

    async def work(t: Stages) -> None:
        monkeypatch.setattr(initiator, "send_messages", send_all)
        t.broker.fill_disk()
        with pytest.raises((RolledBack, InDoubt)):
            await shop.app.send(shop.take, Number(1), trace="t", timeout=1)
        t.broker.free_disk()

    run(shop.app, work)
    # Half of each pause, added up, is more than a second.
    assert len(tried) <= 6


@pytest.mark.parametrize("when", ["before", "after"])
def test_initiation_with_an_unknown_outcome_is_in_doubt_and_can_be_queried(when: str) -> None:
    shop = Shop()

    async def work(t: Stages) -> None:
        t.broker.lose_commit("before" if when == "before" else "after")
        sending = asyncio.create_task(shop.app.send(shop.take, Number(1), trace="t", timeout=0.3))
        # The commit is lost, and so is the broker for a while.
        await until(lambda: not t.broker.faults.commit_losses)
        async with disconnected(t.broker):
            with pytest.raises(InDoubt) as doubt:
                await sending
        outcome = await shop.app.outcome(doubt.value.token)
        await t.wait_until_ended()
        # Its stage may have been at work when the broker went, and have run again.
        assert (outcome, set(shop.received)) == (("rolled back", set()) if when == "before" else ("committed", {1}))
        assert await shop.app.outcome(doubt.value) == outcome

    run(shop.app, work)


def test_initiation_refused_by_the_broker_is_rolled_back_at_once() -> None:
    """Its two messages exceed one transaction."""
    app = Service("shop")
    take = app.remote("take", Text)

    async def work(t: Stages) -> None:
        with pytest.raises(RolledBack):
            async with app.initiate() as initiation:
                for _ in range(2):
                    initiation.send(take, Text("x" * 9_000_000), trace="t")
        await t.send(take, Text("small"))
        assert (await t.broker.queue("take")).waiting == 1

    run(app, work)


def test_an_initiation_in_a_stage_is_sent_before_the_stage_ends() -> None:
    shop = Shop()
    app = shop.app
    sent = asyncio.Event()

    @app.terminator("begins", Number)
    async def begins(number: Number) -> None:
        await app.send(shop.take, Number(1), trace="t")
        # Its message is handled while this one is.
        await until(lambda: shop.received == [1])
        sent.set()

    async def work(t: Stages) -> None:
        await t.send(begins, Number())
        await t.wait_until_ended()
        assert sent.is_set()

    run(app, work)


def test_a_reply_may_go_to_a_topic_with_its_state() -> None:
    app = Service("shop")
    received: list[tuple[int, Memo]] = []
    topic = app.topic("replies", Number)

    @app.single("double", Number, Number)
    async def double(request: Number) -> Number:
        return Number(2 * request.n)

    @app.subscriber(topic, state=Memo)
    async def listen(reply: Number, memo: Memo) -> None:
        received.append((reply.n, memo))

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            initiation.send(double, Number(2), trace="t", reply_to=topic, reply_state=Memo(7))
            initiation.send(double, Number(3), trace="t", reply_to=topic)
        await t.wait_until_ended()
        assert sorted(received, key=lambda each: each[0]) == [(4, Memo(7)), (6, Memo())]

    run(app, work)


def test_a_child_that_was_forked_is_told_to_connect_itself_and_can(broker: BrokerProcess) -> None:
    """For example a worker of a web server, forked after its parent had connected."""
    app = Service("web", broker=f"stomp://127.0.0.1:{broker.port}")
    to = app.remote("work", Number, None)

    def say() -> None:
        with app.initiate(timeout=3) as initiation:
            initiation.send(to, Number(1), trace="1")

    def in_child() -> str:
        try:
            say()
        except LocalProtocolError as error:
            message = str(error)

        async def again() -> None:
            async with app.connected(), app.initiate() as initiation:
                initiation.send(to, Number(2), trace="2")

        asyncio.run(again())
        return message

    async def parent() -> int:
        async with app.connected():
            child = os.fork()
            if not child:
                # A child of a running loop is in that loop, as far as asyncio knows.
                asyncio._set_running_loop(None)
                signal.alarm(30)
                os._exit("was forked" not in in_child())
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            await asyncio.to_thread(say)
            return os.waitstatus_to_exitcode(status)

    assert asyncio.run(parent()) == 0
    broker.await_facts("work", waiting=2)


def test_a_stage_whose_own_initiation_the_broker_refuses_has_failed() -> None:
    """Fixed: the message was released without an attempt, for ever."""
    app = Service("shop")
    take = app.remote("take", Text)

    @app.terminator("begins", Number, attempts=2)
    async def begins(number: Number) -> None:
        async with app.initiate() as initiation:
            for _ in range(2):
                initiation.send(take, Text("x" * 9_000_000), trace="t")

    async def work(t: Stages) -> None:
        await t.send(begins, Number())
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.attempts == 2
        assert "RolledBack" in letter.last_cause

    run(app, work)


def test_initiation_entered_twice_sends_the_messages_of_each_block() -> None:
    shop = Shop()
    app = shop.app

    async def work(t: Stages) -> None:
        initiating = app.initiate()
        for n in (1, 2):
            async with initiating as initiation:
                initiation.send(shop.take, Number(n), trace="t")
        await t.wait_until_ended()
        assert sorted(shop.received) == [1, 2]
        async with initiating:
            with pytest.raises(LocalProtocolError, match="was entered already"):
                async with initiating:
                    pass

    run(app, work)


def test_an_initiation_that_waits_when_the_service_stops_is_told_what_is_known_of_it() -> None:
    app = Service("shop")
    take = app.remote("take", Number)

    async def main() -> None:
        async with stages(app) as t, disconnected(t.broker):
            sending = asyncio.create_task(app.send(take, Number(), trace="t"))
            await asyncio.sleep(0.05)
            await t._service_run.stop(0.0)
            with pytest.raises((RolledBack, InDoubt)):
                await sending

    asyncio.run(main())
