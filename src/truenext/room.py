"""How much room is left for what senders bring."""

from enum import IntEnum


class Room(IntEnum):
    PLENTY = 0
    """Senders are welcome."""
    LITTLE = 1
    """Those who only send have to wait; whoever also takes messages away goes on."""
    NONE = 2
    """Sends are refused. Acknowledgements never are."""
