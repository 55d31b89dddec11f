"""Tests of log records: each says the stage, flow and message that it belongs to."""

import asyncio
import contextvars
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stages.executions import around, execution
from truenext.stage.interceptors.chain import InterceptorChain
from truenext.stage.interceptors.log import LogFields, StageFields


class Keeping(logging.Handler):
    """A handler that keeps the formatted records."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(stage)s|%(flow_id)s|%(trace)s|%(message_id)s|%(attempt)d|%(message)s"))
        self.addFilter(StageFields())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Keeping()
    logger = logging.getLogger("some")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


CHAIN = InterceptorChain([LogFields()])
OF_A_CHILD = logging.getLogger("some.library")


def test_a_record_outside_of_stages_has_empty_fields(lines: list[str]) -> None:
    OF_A_CHILD.warning("hello")
    assert lines == ["||||0|hello"]


def test_a_record_that_has_the_fields_already_keeps_them(lines: list[str]) -> None:
    """For example a record of the service itself about a message, after the stage has ended."""
    OF_A_CHILD.warning("failed", extra={"stage": "pay", "trace": "order 7", "message_id": "17", "attempt": 2})
    assert lines == ["pay||order 7|17|2|failed"]


def test_a_record_of_a_library_in_a_stage_has_its_fields_until_it_ends(lines: list[str]) -> None:
    with around(CHAIN, execution(attempt=3)):
        OF_A_CHILD.warning("in it")
    OF_A_CHILD.warning("behind it")
    assert lines == ["order.place|f1|order 7|m1|3|in it", "||||0|behind it"]


def test_stages_that_run_at_once_do_not_mix(lines: list[str]) -> None:
    async def stage(name: str, mine: asyncio.Event, other: asyncio.Event) -> None:
        with around(CHAIN, execution(name, flow_id=name)):
            mine.set()
            await other.wait()
            OF_A_CHILD.warning(name)

    async def main() -> None:
        one, other = asyncio.Event(), asyncio.Event()
        await asyncio.gather(stage("a", one, other), stage("b", other, one))

    asyncio.run(main())
    assert sorted(lines) == ["order.a|a|order 7|m1|1|a", "order.b|b|order 7|m1|1|b"]


def test_a_stage_in_a_thread_has_its_fields_and_leaves_none_behind(lines: list[str]) -> None:
    def stage() -> None:
        with around(CHAIN, execution()):
            OF_A_CHILD.warning("in it")

    with ThreadPoolExecutor(1) as threads:
        threads.submit(stage).result()
        threads.submit(OF_A_CHILD.warning, "behind it").result()
    assert lines == ["order.place|f1|order 7|m1|1|in it", "||||0|behind it"]


def test_a_thread_that_has_a_copy_of_the_context_of_a_stage_has_its_fields(lines: list[str]) -> None:
    with ThreadPoolExecutor(1) as threads, around(CHAIN, execution()):
        threads.submit(contextvars.copy_context().run, OF_A_CHILD.warning, "beside it").result()
    assert lines == ["order.place|f1|order 7|m1|1|beside it"]
