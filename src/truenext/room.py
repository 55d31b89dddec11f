"""How much room is left for what senders bring, and when there is little or none.

Each mark is left a little later than it was reached, so that senders are not stopped and welcomed in turns.
"""

from enum import IntEnum


class Room(IntEnum):
    PLENTY = 0
    """Senders are welcome."""
    LITTLE = 1
    """Those who only send have to wait; whoever also takes messages away goes on."""
    NONE = 2
    """Sends are refused. Acknowledgements never are."""


LITTLE = 0.9
"""Part of a limit from which on there is little room; at the limit there is none."""

BACK = 0.03
"""Part of a limit by which a mark must be undercut again."""


FULL = "the broker's disk is as full as it may be (--disk-limit; of a broker with --memory, --memory-limit)"
"""What is said to whom there is no room for."""


def within(limit: int, used: int, before: Room) -> Room:
    """Where `used` of at most `limit` bytes are used."""
    part = used / limit
    if part >= 1 or (before is Room.NONE and part >= 1 - BACK):
        return Room.NONE
    if part >= LITTLE or (before is not Room.PLENTY and part >= LITTLE - BACK):
        return Room.LITTLE
    return Room.PLENTY


def beside(reserve: int, free: int, before: Room) -> Room:
    """Where `free` bytes are left, of which `reserve` must not be used up."""
    part = free / reserve
    if part < 1 or (before is Room.NONE and part < 1 + BACK):
        return Room.NONE
    if part < 2 or (before is not Room.PLENTY and part < 2 * (1 + BACK)):
        return Room.LITTLE
    return Room.PLENTY
