"""What all work has in common that goes on beside commands, a piece in each turn.

Whoever comes to have some says so (`CommitState.active_work`), and is then asked in each turn whether a step would do
something, until it has none any more. So work costs nothing while there is none. What a step wants to be read comes
back by `StoreRead.on_page`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from truenext.engine.state.pages import StoreRead


class BackgroundTask(ABC):
    __slots__ = ()

    @property
    def active_work_key(self) -> object:
        """What stands for it in `CommitState.active_work`."""
        return self

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """There is something to do, now or later."""

    @abstractmethod
    def can_step(self) -> bool:
        """A step would do something."""

    @abstractmethod
    def step(self) -> Sequence[StoreRead]:
        """Do a piece of it. Returns the pages that are wanted to go on."""

    def next_due_ms(self) -> int | None:
        """When a step is needed though nothing else happens, in milliseconds since the epoch; None if never, or if that
        is known only when something else has happened."""
        return None
