"""The fixture `truenext_broker`, which pytest finds by itself: a broker for one test, for programs that block.

pytest imports this file whether anybody wants a broker or not: truenext itself is imported when a test does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from truenext.testing import BlockingBroker

_has_raised = pytest.StashKey[bool]()
"""The test, or what was set up for it."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
    """Remember whether the test has raised; pytest makes the report."""
    has_raised = call.when != "setup" and item.stash.get(_has_raised, False)
    item.stash[_has_raised] = has_raised or call.excinfo is not None


@pytest.fixture
def truenext_broker(request: pytest.FixtureRequest) -> Iterator[BlockingBroker]:
    """A broker in this process, on a thread of its own; see truenext.testing."""
    from truenext.testing import NeverReached, blocking_broker

    try:
        with blocking_broker() as broker:
            yield broker
    except NeverReached:
        # What the test has raised itself is why.
        if not request.node.stash.get(_has_raised, False):
            raise
