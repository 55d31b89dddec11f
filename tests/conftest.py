"""A run has a part of the tests that take long, drawn anew each time; TRUENEXT_DRAW=all has all of them, and the number
that a run prints has the same again. What is named on the command line always runs.

- `drawn`: one in 160. They plant faults, so they test tests; or they try benchmarks. They change seldom.
- `one_of`: of the tests that differ in nothing but this parameter, one.
- `alternates`: of the tests with the same argument of this marker, one. They take long, and differ little.

At its end a run prints how long the tests of each folder took, and how much processor time: that of the test processes
and of the child processes that they have waited for.
"""

import gc
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import PurePosixPath
from random import Random, SystemRandom

import pytest
from hypothesis import settings

from tests.drawing import not_drawn

# A slow machine is no fault.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

PROCESSOR_SECONDS = "processor seconds"
PROCESSOR_SECONDS_BEFORE = pytest.StashKey[float]()
"""Processor seconds of this process up to the start of the test."""


def pytest_configure(config: pytest.Config) -> None:
    # Commands that tests run get their broker and their user from the tests alone.
    for name in ("TRUENEXT_URL", "TRUENEXT_USER", "TRUENEXT_PASSWORD", "TRUENEXT_PASSWORD_FILE", "TRUENEXT_CA"):
        os.environ.pop(name, None)
    # The processes of a run inherit it: all must draw the same.
    os.environ.setdefault("TRUENEXT_DRAW", str(SystemRandom().randrange(2**32)))


def pytest_report_header() -> str:
    return f"TRUENEXT_DRAW={os.environ['TRUENEXT_DRAW']}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    draw = os.environ["TRUENEXT_DRAW"]
    if draw == "all" or config.option.keyword or any("::" in each for each in config.args):
        return
    left = not_drawn(items, Random(int(draw)))
    config.hook.pytest_deselected(items=[each for each in items if each in left])
    items[:] = [each for each in items if each not in left]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Thousands of tests stay to the end: garbage collection need not look at them again and again.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.config.stash[PROCESSOR_SECONDS_BEFORE] = sum(os.times()[:4])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        now = sum(os.times()[:4])
        report.user_properties.append((PROCESSOR_SECONDS, now - item.config.stash[PROCESSOR_SECONDS_BEFORE]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: defaultdict[str, float] = defaultdict(float)
    processor_seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = "/".join(PurePosixPath(report.location[0]).parts[:2])
                seconds[folder] += report.duration
                if report.when == "teardown":
                    processor_seconds[folder] += sum(
                        value
                        for name, value in report.user_properties
                        if name == PROCESSOR_SECONDS and isinstance(value, float)
                    )
    for folder in sorted(seconds):
        terminalreporter.write_line(
            f"{folder}: {seconds[folder]:.0f} s of tests, {processor_seconds[folder]:.0f} s of processor time"
        )
