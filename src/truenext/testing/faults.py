"""Faults that a test wants to happen: single faults, such as the loss of a COMMIT, and states, such as a full disk."""

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, get_args

from truenext.testing.checks import checked_flag

CommitMoment = Literal["before", "after"]

_PACKAGE = "truenext.testing"


class NeverReached(AssertionError):
    """A test has ended, but a required fault has not happened, so that the test's result proves nothing about that
    fault."""


@dataclass(slots=True, eq=False)
class OrderedFault:
    """Fault that a test has ordered for a certain moment, such as the next COMMIT."""

    call_text: str
    """Text of the call by which the test has ordered the fault."""
    location: str
    """Place of that call in the test, as FILE:LINE."""
    is_required: bool
    """True if the test fails when the fault has not happened at its end."""
    was_reached: bool = False


@dataclass(slots=True)
class Faults:
    """Faults that a test has ordered for one broker. They stay ordered after a restart of the broker."""

    ordered_faults: list[OrderedFault] = field(default_factory=list)
    """Faults ordered for a certain moment, including those that have happened."""
    commit_losses: deque[tuple[CommitMoment, OrderedFault]] = field(default_factory=deque)
    """COMMITs whose connection will be lost, in order: the moment of the loss (before or after the execution), and the
    fault."""
    is_disk_full: bool = False
    disk_delay_s: float = 0.0
    """Seconds of the broker's clock for which each batch is delayed before it is durable."""

    def order_fault(self, call: str, required: bool, location: str = "") -> OrderedFault:
        """Add a fault that the test has ordered by `call`, and return it.

        Raises: ValueError if `required` is neither True nor False
        """
        fault = OrderedFault(call, location or caller_location(), checked_flag(required, "required"))
        self.ordered_faults.append(fault)
        return fault

    def order_commit_loss(self, when: CommitMoment, required: bool, location: str = "") -> None:
        """Order that the next COMMIT loses its connection, before or after its execution.

        Raises: ValueError if `when` is not a CommitMoment, or `required` is neither True nor False
        """
        if when not in get_args(CommitMoment):
            raise ValueError(f"when must be 'before' or 'after', not {when!r}")
        self.commit_losses.append((when, self.order_fault(f'lose_commit("{when}")', required, location)))

    def take_commit_loss(self, when: CommitMoment) -> bool:
        """Return whether the current COMMIT is to lose its connection at this moment. If so, mark the fault as
        happened."""
        if not self.commit_losses or self.commit_losses[0][0] != when:
            return False
        self.commit_losses.popleft()[1].was_reached = True
        return True

    def check_all_reached(self) -> None:
        """Check that each required fault has happened.

        Raises: NeverReached if a required fault has not happened
        """
        missed = [
            f"{each.call_text}, ordered at {each.location}"
            for each in self.ordered_faults
            if each.is_required and not each.was_reached
        ]
        if missed:
            raise NeverReached(
                "the test has ended, and these faults that it ordered never happened, so they were not tested:\n"
                + "\n".join(missed)
                + "\nChange the test so that each of these faults happens, or order the fault with required=False"
            )


def caller_location() -> str:
    """Return the location of the innermost caller outside of this package, as FILE:LINE."""
    frame = sys._getframe(1)
    while f"{frame.f_globals.get('__name__')}.".startswith(f"{_PACKAGE}.") and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
