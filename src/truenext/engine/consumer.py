"""Who takes messages, and when it may have more.

A window is open or shut whatever the next message is, so a large message is never passed over.
"""

from __future__ import annotations

from sys import maxsize
from typing import TYPE_CHECKING

from truenext.commands import AckMode, Subscribe
from truenext.limits import WINDOW_DEFAULT, WINDOW_MAX

if TYPE_CHECKING:
    from truenext.engine.lane import Entry
    from truenext.engine.memory import Memory
    from truenext.engine.queue import Queue
    from truenext.engine.session import Session


FRAME_BYTES = 200
"""Bytes of a MESSAGE frame that are the broker's own, roughly, its subscription's name apart."""


class Consumer:
    """One subscription of one connection."""

    __slots__ = (
        "frame_bytes",
        "held",
        "memory",
        "mode",
        "number",
        "queue",
        "served_at",
        "session",
        "subscription",
        "window",
    )

    def __init__(
        self, session: Session, queue: Queue, subscribe: Subscribe, memory: Memory, *, number: int, served_at: int
    ) -> None:
        self.session = session
        self.memory = memory
        self.queue = queue
        self.number = number
        """What the history calls it; never used twice in a run."""
        self.subscription = subscribe.subscription
        self.mode = subscribe.mode
        self.window = _window(subscribe)
        self.frame_bytes = FRAME_BYTES + 2 * len(subscribe.subscription)
        """What a message costs on the connection beside its header and body, roughly."""
        self.held: dict[int, Entry] = {}
        """Dispatched and neither acknowledged nor given back, by sequence, in order of dispatch."""
        self.served_at = served_at
        """When it last got a message, or else subscribed, on the engine's count of dispatches; the smallest has waited
        longest."""

    def is_open(self) -> bool:
        """It has credit for a message."""
        return len(self.held) < self.window and self.session.unsent_bytes < self.memory.unsent_max

    def covered_by(self, sequence: int) -> list[int]:
        """The sequences that an ACK or NACK of a held one covers, in order of dispatch."""
        if self.mode is not AckMode.CLIENT:
            return [sequence]
        covered = []
        for earlier in self.held:
            covered.append(earlier)
            if earlier == sequence:
                break
        return covered


def _window(subscribe: Subscribe) -> int:
    if subscribe.window is not None:
        return min(subscribe.window, WINDOW_MAX)
    # In auto mode the socket's buffer is the window; it is bounded in bytes.
    return maxsize if subscribe.mode is AckMode.AUTO else WINDOW_DEFAULT
