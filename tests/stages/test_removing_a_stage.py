"""Tests of the removal of a stage in two deployments, as in docs/stages-running.md, while flows are under way."""

import asyncio

import msgspec

import truenext
import truenext.testing
from truenext.stage import Failure, Flow, Service
from truenext.stage.core.definitions import StatelessEndpoint
from truenext.stage.introspection.compatibility import any_breaking, compare_interfaces, interface_of


class Step(msgspec.Struct):
    path: list[str] = []


class Steps:
    """Functions of stages that record the path of a flow, in old and in new code."""

    async def begin(self, step: Step, flow: Flow) -> None:
        flow.next(Step([*step.path, "begin"]))

    async def middle(self, step: Step, flow: Flow) -> None:
        flow.next(Step([*step.path, "middle"]))

    async def end(self, step: Step) -> Step:
        return Step([*step.path, "end"])


def service(url: str, *names: str) -> Service:
    """Make a service. A name is that of the function, or FUNCTION:STAGE if the stage has another name."""
    app = Service("shop", broker=url, concurrency=1)
    place = app.endpoint("order.place", Step, Step)
    for name in names:
        function, _, stage = name.partition(":")
        place.stage(name=stage or function)(getattr(Steps(), function))
    return app


OLD = ("begin", "middle", "end")
FIRST_DEPLOYMENT = ("begin", "end", "middle", "end:end_of_before")
SECOND_DEPLOYMENT = ("begin", "end")


def changes(before: tuple[str, ...], now: tuple[str, ...]) -> bool:
    of = [service("stomp://127.0.0.1:1", *names) for names in (before, now)]
    return any_breaking(compare_interfaces(*(interface_of(each.name, each.endpoints) for each in of)))


def test_removal_of_a_stage_in_one_deployment_breaks_flows_and_the_first_of_two_does_not() -> None:
    assert changes(OLD, SECOND_DEPLOYMENT)
    assert not changes(OLD, FIRST_DEPLOYMENT)


def test_removal_of_on_failure_breaks_and_its_addition_does_not() -> None:
    without, having = (service("stomp://127.0.0.1:1", *OLD) for _ in range(2))
    endpoint = having.endpoints["order.place"]
    assert isinstance(endpoint, StatelessEndpoint)

    @endpoint.on_failure
    async def failed(failure: Failure) -> None: ...

    before, now = (interface_of(each.name, each.endpoints) for each in (having, without))
    (finding,) = compare_interfaces(before, now)
    assert (finding.is_breaking, finding.location) == (True, "order.place.stage.on_failure")
    assert finding.change == "on_failure is gone"
    assert not compare_interfaces(now, before) and not compare_interfaces(before, before)


def test_earlier_flows_pass_the_removed_stage_and_new_ones_do_not() -> None:
    async def run() -> None:
        async with truenext.testing.broker() as broker:
            ended: dict[str, list[str]] = {}
            other = Service("other", broker=broker.url)
            place = other.remote("order.place", Step, Step)

            @other.terminator("ended", Step)
            async def end(step: Step, flow: Flow) -> None:
                ended[flow.trace] = step.path

            async def begin(trace: str) -> None:
                async with other.initiate() as started:
                    started.send(place, Step(), trace=trace, reply_to=end)

            async with other.running(), truenext.connect(broker.url) as operator:
                await operator.control_request("pause", {"queue": "order.place.stage.middle"})
                async with service(broker.url, *OLD).running():
                    await begin("old")
                    while not (await broker.queue("order.place.stage.middle")).messages:
                        await asyncio.sleep(0.005)
                async with service(broker.url, *FIRST_DEPLOYMENT).running(), asyncio.timeout(10):
                    await begin("new")
                    while not ended:
                        await asyncio.sleep(0.005)
                    await operator.control_request("resume", {"queue": "order.place.stage.middle"})
                    while len(ended) < 2:
                        await asyncio.sleep(0.005)
            assert ended == {"new": ["begin", "end"], "old": ["begin", "middle", "end"]}

    asyncio.run(run())
