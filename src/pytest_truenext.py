"""The fixture `truenext_broker`, which pytest finds by itself: a broker for one test, for programs that block.

pytest imports this file whether anybody wants a broker or not: truenext itself is imported when a test does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from truenext.testing import BlockingBroker


@pytest.fixture
def truenext_broker() -> Iterator[BlockingBroker]:
    """A broker in this process, on a thread of its own; see truenext.testing."""
    from truenext.testing import blocking_broker

    with blocking_broker() as broker:
        yield broker
