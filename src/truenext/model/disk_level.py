"""Disk level: how much space is free for new messages, in four steps."""

from enum import IntEnum


class DiskLevel(IntEnum):
    PLENTY = 0
    """Enough space: all sends are accepted."""
    LITTLE = 1
    """Connections that only send must wait. Connections that also consume messages may still send."""
    NONE = 2
    """Sends are refused, except in transactions that free as much as they send. Acknowledgements are never refused."""
    FULL = 3
    """A write has found no space on the disk. All sends are refused."""


DISK_FULL = (
    "the broker's disk is as full as it may be (its reserve of free space, --disk-limit or --database-limit is "
    "reached; with --memory: --memory-limit)"
)
"""Beginning of the error for a message that is refused for lack of space."""

DRAINED = (
    "the broker is being drained (truenext drain): connections that only send wait; send to another broker, or try "
    "again when the drain has ended"
)
"""Error for a message that is refused because the broker is drained."""
