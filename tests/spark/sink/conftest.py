from collections.abc import Iterator

import pytest

from truenext.testing import BlockingBroker, blocking_broker


@pytest.fixture
def here() -> Iterator[BlockingBroker]:
    with blocking_broker() as broker:
        yield broker
