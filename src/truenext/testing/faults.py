"""Which faults a test has ordered that have not happened yet, or go on."""

from dataclasses import dataclass
from typing import Literal

When = Literal["before", "after"]


@dataclass(slots=True)
class Faults:
    """Of one broker, through all of its runs."""

    commit: When | None = None
    """The next COMMIT loses its connection."""
    is_disk_full: bool = False
    disk_seconds: float = 0.0
    """What the disk takes for each batch, by the broker's clock."""
