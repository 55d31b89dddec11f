"""Does the protocol of inbox, outbox and numbers hold in every order of steps, and does the search see where it would
not? Source: docs/decisions/0067-once.md"""

import os

import pytest

from tests.stages.outbox.protocol import FAULTS, Bounds, Violation, search

SMALL = Bounds(messages=1, losses=1, crashes=1, takeovers=1)
FEW = {
    "two units under way in a producer": Bounds(messages=2, losses=0, crashes=0, takeovers=0),
    "used on in doubt": Bounds(messages=2, losses=1, crashes=0, takeovers=0),
    "neither owner nor number is looked at": Bounds(messages=2, losses=0, crashes=0, takeovers=1),
}


def test_nothing_happens_twice_or_is_lost_in_any_order_of_steps() -> None:
    print(search(SMALL), "states")


@pytest.mark.skipif("TRUENEXT_SEARCH" not in os.environ, reason="minutes: make search")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "bounds",
    [Bounds(1, 3, 1, 2), Bounds(2, 1, 0, 1), Bounds(2, 0, 1, 1), Bounds(2, 1, 1, 0), Bounds(2, 1, 1, 1)],
    ids=str,
)
def test_nor_where_more_goes_wrong(bounds: Bounds) -> None:
    print(search(bounds), "states")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_search_notices(fault: str) -> None:
    with pytest.raises(Violation) as violation:
        search(FEW.get(fault, SMALL), fault)
    print(violation.value)


@pytest.mark.skipif("TRUENEXT_SEARCH" not in os.environ, reason="minutes: make search")
def test_the_search_notices_an_owner_that_is_not_looked_at() -> None:
    """The number alone prevents that anything is doubled. But a unit is left to whoever does not know of it."""
    with pytest.raises(Violation, match="cannot end well") as violation:
        search(Bounds(messages=2, losses=1, crashes=1, takeovers=1), "owner unchecked")
    print(violation.value)
