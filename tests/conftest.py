"""Of the tests that are marked as `drawn`, each run has one in three, drawn anew; TRUENEXT_DRAW=all has all of them.

They plant faults, so they test tests; or they try benchmarks. They take long, and change seldom. One that is named on
the command line always runs.
"""

import os
from random import Random, SystemRandom

import pytest

SHARE = 1 / 3


def pytest_configure(config: pytest.Config) -> None:
    # The processes of a run inherit it: all must draw the same.
    os.environ.setdefault("TRUENEXT_DRAW", str(SystemRandom().randrange(2**32)))


def pytest_report_header() -> str:
    return f"TRUENEXT_DRAW={os.environ['TRUENEXT_DRAW']}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    draw = os.environ["TRUENEXT_DRAW"]
    if draw == "all" or config.option.keyword or any("::" in each for each in config.args):
        return
    random = Random(int(draw))
    left = [each for each in items if each.get_closest_marker("drawn") is not None and random.random() >= SHARE]
    config.hook.pytest_deselected(items=left)
    is_left = set(left)
    items[:] = [each for each in items if each not in is_left]
