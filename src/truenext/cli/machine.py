"""Name of the machine as that of a broker, and memory that a broker can use: the machine's memory, or the limit of its
control group if this is lower."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from sys import maxsize

from truenext.model.database import MEMBER_LENGTH_MAX

CONTROL_GROUPS = Path("/proc/self/cgroup")
"""File with lines NUMBER:CONTROLLERS:PATH, one for each control group of a process. Version 2 has one line, without
controllers."""

MOUNTED = Path("/sys/fs/cgroup")


def member_name() -> str:
    """Return the name of the machine, cut and changed to one that `fault_of_member` accepts."""
    return re.sub(r"^[.-]|[^A-Za-z0-9_.-]", "_", socket.gethostname())[:MEMBER_LENGTH_MAX] or "broker"


def memory_bytes(groups: Path = CONTROL_GROUPS, mounted: Path = MOUNTED) -> int:
    """Return the number of bytes of memory; `sys.maxsize` if the system does not report it."""
    available = maxsize
    with suppress(OSError, ValueError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _limits(groups, mounted):
        # Without a limit the file has "max", or a number larger than any memory.
        with suppress(OSError, ValueError):
            available = min(available, int(file.read_text()))
    return available


def _limits(groups: Path, mounted: Path) -> list[Path]:
    """Return the files that may contain a limit: one for the control group of this process, and one for each group that
    contains it."""
    found = []
    with suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top, name = (mounted / "memory", "memory.limit_in_bytes") if controllers else (mounted, "memory.max")
            group = top / path.lstrip("/")
            # A container sees its own group at the top, whatever its name outside.
            found += [each / name for each in (group, *group.parents) if each.is_relative_to(top)]
    return found
