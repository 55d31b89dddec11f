"""Who takes messages, and when it may have more.

A window is open or shut whatever the next message is, so a large message is never passed over.
"""

from __future__ import annotations

from sys import maxsize
from typing import TYPE_CHECKING

from truenext.commands import AckMode, Subscribe
from truenext.engine.window import AutoWindow
from truenext.limits import WINDOW_DEFAULT

if TYPE_CHECKING:
    from truenext.engine.lane import Entry
    from truenext.engine.memory import Memory
    from truenext.engine.queue import Queue
    from truenext.engine.selecting import Scan
    from truenext.engine.session import Session


EXPRESS_MAX = 10
"""Messages beyond its window that an express consumer may hold."""

FRAME_BYTES = 200
"""Bytes of a MESSAGE frame that are the broker's own, roughly, its subscription's name apart."""


class Consumer:
    """One subscription of one connection."""

    is_of_many = False
    """It takes from more queues than one, see wildcard.py."""

    is_joining: bool = False
    """It gets nothing yet, for it has not joined all of its queues."""

    __slots__ = (
        "answered_at",
        "auto",
        "frame_bytes",
        "has_express",
        "held",
        "is_exclusive",
        "memory",
        "mode",
        "number",
        "priority",
        "queue",
        "scan",
        "served_at",
        "session",
        "standing",
        "subscription",
        "wanted",
        "window",
    )

    def __init__(
        self,
        session: Session,
        queue: Queue,
        subscribe: Subscribe,
        memory: Memory,
        *,
        number: int,
        served_at: int,
        now_ms: int,
    ) -> None:
        self.session = session
        self.memory = memory
        self.queue = queue
        self.number = number
        """What the history calls it; never used twice in a run."""
        self.subscription = subscribe.subscription
        self.mode = subscribe.mode
        self.auto = AutoWindow(now_ms) if subscribe.window is None and self.mode is AckMode.INDIVIDUAL else None
        """Decides over its window, if the client has not."""
        self.window = _window(subscribe) if self.auto is None else self.auto.size
        """Messages it may hold."""
        self.priority = subscribe.priority
        self.standing = _standing(subscribe.priority, is_stretched=False)
        """Of two that have credit the one with the smaller is served, whatever they hold."""
        self.is_exclusive = subscribe.is_exclusive
        self.has_express = subscribe.has_express
        self.answered_at = 0
        """When it last acknowledged something, on the engine's count of acknowledgements; only with express."""
        self.wanted = subscribe.selector
        """Its selector, if it has one."""
        self.scan: Scan | None = None
        """What its selector wants, if it has one; in a queue with groups everybody has."""
        self.frame_bytes = FRAME_BYTES + 2 * len(subscribe.subscription)
        """What a message costs on the connection beside its header and body, roughly."""
        self.held: dict[int, Entry] = {}
        """Dispatched and neither acknowledged nor given back, by sequence, in order of dispatch."""
        self.served_at = served_at
        """When it last got a message, or else subscribed, on the engine's count of dispatches; the smallest has waited
        longest."""

    def scan_of(self, _queue: Queue) -> Scan | None:
        """What is wanted of one of its queues; see `scan`."""
        return self.scan

    def scan_with(self, _queue: Queue, scan: Scan) -> None:
        self.scan = scan

    def all_queues(self) -> list[Queue]:
        return [self.queue]

    @property
    def is_subscribed(self) -> bool:
        """Still: its subscription has not ended."""
        return self.session.consumers.get(self.subscription) is self

    @property
    def has_selector(self) -> bool:
        return self.scan is not None and self.scan.selector is not None

    def is_open(self) -> bool:
        """It has credit for a message."""
        return len(self.held) < self.window and self.session.unsent_bytes < self.memory.unsent_max

    def adjust_window(self, now_ms: int) -> None:
        """Make of what it answered lately how many it may hold."""
        auto = self.auto
        if auto is not None and auto.answered:
            auto.look(self.held, now_ms)
            self.window = auto.size
            self.standing = _standing(self.priority, is_stretched=False)

    def stretch_window(self, now_ms: int) -> bool:
        """True if its window was full for so long, and nothing came, that it has more room now."""
        auto = self.auto
        if auto is None or len(self.held) < self.window or not auto.stretch(now_ms):
            return False
        self.window = auto.size
        self.standing = _standing(self.priority, is_stretched=True)
        return True

    def has_express_credit(self, rank: int) -> bool:
        """A message of this rank may come to it beyond its window, which is full of what goes behind it."""
        beyond = len(self.held) - self.window
        if not (self.has_express and self.window > 1 and 0 <= beyond < EXPRESS_MAX):
            return False
        if self.session.unsent_bytes >= self.memory.unsent_max:
            return False
        for entry in self.held.values():
            if entry.lane.rank <= rank:
                beyond -= 1
                if beyond < 0:
                    return False
        return True

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


def _standing(priority: int, *, is_stretched: bool) -> int:
    return is_stretched - 2 * priority


def _window(subscribe: Subscribe) -> int:
    if subscribe.window is not None:
        return subscribe.window
    # In auto mode the socket's buffer is the window; it is bounded in bytes.
    return maxsize if subscribe.mode is AckMode.AUTO else WINDOW_DEFAULT
