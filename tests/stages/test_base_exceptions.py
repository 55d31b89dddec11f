"""Tests of exceptions of stages that are no `Exception`. Source: docs/stages.md, "Failures and outages" """

from collections.abc import Callable

import pytest

from tests.stages.flows import Number, run
from truenext.stage import Flow, Service
from truenext.testing.stages import Stages


class OwnError(BaseException):
    pass


def _stop_iteration() -> None:
    next(iter(()))


def _raises(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


FAILING = {
    "SystemExit": _raises(SystemExit(0)),
    "KeyboardInterrupt": _raises(KeyboardInterrupt()),
    "GeneratorExit": _raises(GeneratorExit()),
    "OwnError": _raises(OwnError("own")),
    "BaseExceptionGroup": _raises(BaseExceptionGroup("several", [SystemExit(1)])),
    "StopIteration": _stop_iteration,
}


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("is_async", [True, False])
def test_base_exception_of_a_stage_is_a_failed_attempt(name: str, is_async: bool) -> None:
    app = Service("shop", concurrency=1, attempts=2)
    bad = app.endpoint("bad", Number)
    good = app.endpoint("good", Number)
    ran: list[int] = []

    async def fails(number: Number) -> None:
        FAILING[name]()

    def fails_in_a_thread(number: Number) -> None:
        FAILING[name]()

    bad.stage(fails if is_async else fails_in_a_thread)

    @good.stage
    async def take(number: Number, flow: Flow) -> None:
        ran.append(number.n)
        flow.after_commit(FAILING[name])

    async def work(t: Stages) -> None:
        for n in range(3):
            await t.send(bad, Number(n))
            await t.send(good, Number(n))
        letters = await t.wait_until_ended(dead_letters=3)
        assert {each.attempts for each in letters} == {2}
        assert all(name in each.last_cause for each in letters)
        assert sorted(ran) == [0, 1, 2]

    run(app, work)


@pytest.mark.parametrize("name", FAILING)
def test_base_exception_of_a_hook_of_a_plain_stage_blocks_no_worker(name: str) -> None:
    app = Service("shop", concurrency=1)
    ran: list[int] = []

    @app.terminator("take", Number)
    def take(number: Number, flow: Flow) -> None:
        ran.append(number.n)
        flow.after_commit(FAILING[name])

    async def work(t: Stages) -> None:
        for n in range(3):
            await t.send(take, Number(n))
        await t.wait_until_ended()
        assert ran == [0, 1, 2]

    run(app, work)


@pytest.mark.parametrize("concurrency", [2.5, True, "2"])
def test_a_concurrency_that_is_no_number_is_refused(concurrency: object) -> None:
    with pytest.raises(Exception, match="concurrency of service shop must be 1 to 1000"):
        Service("shop", concurrency=concurrency)  # type: ignore[arg-type]
