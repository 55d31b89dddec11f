"""How much room is left for what senders bring: plenty, little, none?"""

from enum import IntEnum


class DiskLevel(IntEnum):
    PLENTY = 0
    """Senders are welcome."""
    LITTLE = 1
    """Those who only send have to wait; whoever also takes messages away goes on."""
    NONE = 2
    """Sends are refused, but for those of transactions that take as much as they give. Acknowledgements never are."""
    FULL = 3
    """A write has found no space: all sends are refused."""


DISK_FULL = (
    "the broker's disk is as full as it may be (its reserve of free space, or --disk-limit; of a broker with --memory, "
    "--memory-limit)"
)
"""Why a message is refused for lack of room."""
