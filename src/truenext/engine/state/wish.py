"""How many messages a subscription that pulls has asked for and not got. Source: docs/contract.md, "Pulling" """

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from truenext.engine.state.consumer import Consumer


class Wish:
    """One for each subscription that pulls, whether it has asked for anything or not."""

    __slots__ = ("correlation", "left", "waits")

    def __init__(self) -> None:
        self.left = 0
        """Messages that were asked for and have not come."""
        self.waits = True
        """It stays until all have come; else it ends when none is ready."""
        self.correlation: str | None = None
        """What the client calls the last of what it has asked for."""


class EndedWish(NamedTuple):
    """What a client is told of a wish that has ended though not all has come, or was withdrawn."""

    consumer: Consumer
    unused: int
    """Messages that have not come."""
    correlation: str | None
