"""Where to connect to next, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from truenext.model.url import Address

DELAY_FIRST_S = 0.1
DELAY_MAX_S = 15.0
"""Between two rounds over all addresses: doubled with each, and shortened by chance, so that a thousand clients of a
broker that comes back do not come at once."""
STABLE_CONNECTION_S = 5.0
"""A connection that lived for so long was a success."""
QUICK_FAILURES_MAX = 3
"""Others count as failures, but not as so many that the pauses get long: the broker is there."""


class ConnectBackoff:
    def __init__(self, addresses: Sequence[Address], random: Callable[[], float]) -> None:
        self.addresses = addresses
        self.failure_count = 0
        """Since the last success."""
        self._random = random
        self._index = 0

    @property
    def current_address(self) -> Address:
        """The one that is tried, or connected to."""
        return self.addresses[self._index % len(self.addresses)]

    def next_address_and_delay(self) -> tuple[Address, float]:
        """Where to, and after how many seconds."""
        address = self.current_address
        if not self.failure_count:
            return address, 0.0
        rounds = (self.failure_count - 1) // len(self.addresses)
        longest = min(DELAY_FIRST_S * 2 ** min(rounds, 20), DELAY_MAX_S)
        return address, longest * (0.5 + self._random() / 2)

    def on_connect_failed(self) -> None:
        """Nobody was there, or nobody who would have us: the next address is next."""
        self.failure_count += 1
        self._index += 1

    def on_connection_lost(self, lifetime_s: float) -> None:
        """A connection has ended; its address is next."""
        self.failure_count = 0 if lifetime_s >= STABLE_CONNECTION_S else min(self.failure_count + 1, QUICK_FAILURES_MAX)
