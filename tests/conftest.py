"""A run has a part of the tests that take long, drawn anew each time; TRUENEXT_DRAW=all has all of them, and the number
that a run prints has the same again. What is named on the command line always runs.

- `drawn`: one in twenty. They plant faults, so they test tests; or they try benchmarks. They change seldom.
- `one_of`: of the tests that differ in nothing but this parameter, one.
"""

import gc
import os
from random import Random, SystemRandom

import pytest

from tests.drawing import not_drawn


def pytest_configure(config: pytest.Config) -> None:
    # Commands that tests run get their broker from the tests alone.
    os.environ.pop("TRUENEXT_URL", None)
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


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # Thousands of tests stay to the end: many collections need not look at them again and again.
    gc.collect()
    gc.freeze()
