"""How much memory there is for a broker: that of the machine, or less if it runs where somebody has set a limit."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from sys import maxsize

CONTROL_GROUPS = Path("/proc/self/cgroup")
"""In lines of NUMBER:CONTROLLERS:PATH; in version 2 of control groups there is one, without controllers."""

MOUNTED = Path("/sys/fs/cgroup")


def memory_bytes(groups: Path = CONTROL_GROUPS, mounted: Path = MOUNTED) -> int:
    """Bytes; more than anybody has if the system does not say."""
    available = maxsize
    with suppress(OSError, ValueError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _limits(groups, mounted):
        # Without a limit it says "max", or a number that is larger than any memory.
        with suppress(OSError, ValueError):
            available = min(available, int(file.read_text()))
    return available


def _limits(groups: Path, mounted: Path) -> list[Path]:
    """Where a limit may stand: in the group of this process, and in all that this is in."""
    found = []
    with suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top, name = (mounted / "memory", "memory.limit_in_bytes") if controllers else (mounted, "memory.max")
            group = top / path.lstrip("/")
            # A container sees its own group at the top, under whatever name it has outside.
            found += [each / name for each in (group, *group.parents) if each.is_relative_to(top)]
    return found
