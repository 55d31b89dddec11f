"""What of a lane was taken out of its turn, because a selector wanted it.

Everything in lane.py relies on messages leaving a lane in order: who was dispatched is below the horizon. A message
that is taken from the middle of a lane, or from above its horizon, is none of those. It is a *stray* until it is done
with, whoever has it, and no page brings a stray:

    waits, below the horizon     in `Lane.returned`, like any that was given back
    waits, above it              in `plucked`
    is held, or delayed          nowhere in particular

Where it was taken from it is not looked for: its place stays, and is known to be empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.engine.empty import NO_SEQUENCES

if TYPE_CHECKING:
    from truenext.engine.lane import Entry


class Aside:
    __slots__ = ("embodying", "lifted", "plucked", "rises", "scanning", "strays", "tombs")

    def __init__(self) -> None:
        self.strays: dict[int, Entry] = {}
        """Those that were taken out of their turn and are not done with, by sequence."""
        self.plucked: dict[int, Entry] = {}
        """Those of them that wait and are above the horizon."""
        self.tombs = NO_SEQUENCES
        """Empty places in `Lane.arrived`."""
        self.lifted = NO_SEQUENCES
        """Empty places in `Lane.returned`; who comes back to one of these fills it."""
        self.scanning = 0
        """Pages that are being read for a selector: while there are any nothing leaves `Lane.recent`, for it may be
        missing on them."""
        self.rises = 0
        """How often the horizon was moved up."""
        self.embodying = NO_SEQUENCES
        """Strays that are being read."""

    @property
    def is_empty(self) -> bool:
        """Nothing of the lane was taken out of its turn and is not done with."""
        return not (self.strays or self.plucked or self.tombs or self.lifted or self.scanning or self.embodying)
