from collections.abc import Callable, Iterator

import pytest

from tests.spark.source.small_query import SmallQuery
from truenext.spark.source import driver
from truenext.testing import BlockingBroker


@pytest.fixture
def new_query(here: BlockingBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SmallQuery]]:
    """Function that makes queries that read the queue `orders`, or as told by options."""
    monkeypatch.setattr(driver, "READY_SECONDS", 0.05)
    monkeypatch.setattr(driver, "RETURN_SECONDS", 0.1)
    made: list[SmallQuery] = []

    def make(**options: str) -> SmallQuery:
        made.append(SmallQuery(here, **options))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def query(new_query: Callable[..., SmallQuery]) -> SmallQuery:
    return new_query()
