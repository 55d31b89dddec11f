"""Which faults a test has ordered that have not happened yet, or go on."""

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, get_args

from truenext.testing.checks import checked_flag, meant

When = Literal["before", "after"]

_KIT = "truenext.testing"


class NeverReached(AssertionError):
    """A test has ordered a fault, and has ended without it: whatever the test shows, it does not show it of that."""


@dataclass(slots=True, eq=False)
class Order:
    """A fault that waits for its moment."""

    what: str
    """As the test has said it."""
    where: str
    """FILE:LINE of the test."""
    is_required: bool
    """The test fails if the moment never comes."""
    was_reached: bool = False


@dataclass(slots=True)
class Faults:
    """Of one broker, through all of its runs."""

    orders: list[Order] = field(default_factory=list)
    """All that wait for a moment, and all whose moment has come."""
    commits: deque[tuple[When, Order]] = field(default_factory=deque)
    """Each has one COMMIT lose its connection."""
    is_disk_full: bool = False
    disk_seconds: float = 0.0
    """What the disk takes for each batch, by the broker's clock."""

    def order(self, what: str, required: bool, where: str = "") -> Order:
        """Raises: ValueError if `required` is neither True nor False"""
        order = Order(what, where or place(), checked_flag(required, "required"))
        self.orders.append(order)
        return order

    def order_commit(self, when: When, required: bool, where: str = "") -> None:
        """Raises: ValueError"""
        if when not in get_args(When):
            raise ValueError(f"a COMMIT is not lost {when!r}: {meant(when, get_args(When))}")
        self.commits.append((when, self.order(f'lose_commit("{when}")', required, where)))

    def loses_commit(self, when: When) -> bool:
        """Whether the COMMIT that is there loses its connection at this moment."""
        if not self.commits or self.commits[0][0] != when:
            return False
        self.commits.popleft()[1].was_reached = True
        return True

    def check_reached(self) -> None:
        """Raises: NeverReached if the moment of a fault that is required has not come"""
        missed = [f"{each.what}, ordered at {each.where}" for each in self.orders if not _is_satisfied(each)]
        if missed:
            raise NeverReached(
                "the test has ended, and what it ordered was never reached, so it shows nothing of that:\n"
                + "\n".join(missed)
                + "\nHave the program come there, or order it with required=False"
            )


def place() -> str:
    """FILE:LINE of what has called the kit."""
    frame = sys._getframe(1)
    while f"{frame.f_globals.get('__name__')}.".startswith(f"{_KIT}.") and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_satisfied(order: Order) -> bool:
    return order.was_reached or not order.is_required
