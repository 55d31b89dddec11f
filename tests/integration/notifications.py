"""Socket of a service manager, which reads the notifications of a broker as systemd does."""

from __future__ import annotations

import socket
import time

from tests.integration.broker_process import PATIENCE_SECONDS


class Receiver:
    """Socket of a service manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1))

    def receive(self, seconds: float = PATIENCE_SECONDS) -> str:
        """Return the next notification. Raises: TimeoutError if none comes"""
        self.socket.settimeout(seconds)
        return self.socket.recv(4096).decode()

    def receive_first(self, beginning: str) -> str:
        """Return the first notification that begins with a text; earlier ones may only feed the watchdog."""
        while not (notification := self.receive()).startswith(beginning):
            assert notification == "WATCHDOG=1"
        return notification

    def longest_pause(self, seconds: float) -> float:
        """Return the longest time without WATCHDOG=1 in the next `seconds`."""
        last, end = time.monotonic(), time.monotonic() + seconds
        longest = 0.0
        while (now := time.monotonic()) < end:
            try:
                assert self.receive(end - now) == "WATCHDOG=1"
            except TimeoutError:
                break
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return max(longest, time.monotonic() - last)
