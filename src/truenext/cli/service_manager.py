"""Notifications to the service manager that has started this process, such as systemd with Type=notify.

Each notification is one datagram to the Unix socket that NOTIFY_SOCKET names. Without NOTIFY_SOCKET there is no service
manager, and nothing is sent.

    READY=1       clients can connect, or the broker stands by
    STOPPING=1    the broker has begun its stop
    WATCHDOG=1    the event loop turns; sent twice in each period of the watchdog

A broker whose event loop is held sends no WATCHDOG=1, so that the service manager ends it after one period. A busy
broker goes on: timers are part of each pass of its loop. Source: sd_notify(3), sd_watchdog_enabled(3)
"""

from __future__ import annotations

import logging
import os
import socket
from asyncio import AbstractEventLoop
from collections.abc import Mapping

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5.0
"""Longest time for which a notification other than WATCHDOG=1 waits until the service manager has read earlier ones. A
lost READY=1 would be worse: the service manager would end a broker that works."""


class ServiceManager:
    def __init__(self, sock: socket.socket | None = None, watchdog_s: float | None = None) -> None:
        """`sock` is a connected socket; None if there is no service manager. `watchdog_s` is the period of its
        watchdog in seconds; None if it has none."""
        self._sock = sock
        self._watchdog_s = watchdog_s

    @property
    def has_watchdog(self) -> bool:
        return self._watchdog_s is not None

    def ready(self, status: str) -> None:
        """Report that the broker does what `status` says."""
        self._send(f"READY=1\nSTATUS={status}", SEND_TIMEOUT_S)

    def stopping(self) -> None:
        self._send("STOPPING=1", SEND_TIMEOUT_S)

    def feed_watchdog(self) -> None:
        if self._watchdog_s is not None:
            # Not a second: a service manager that does not read must not hold the event loop.
            self._send("WATCHDOG=1", 0.0)

    def feed_watchdog_from(self, loop: AbstractEventLoop) -> None:
        """Feed the watchdog now, and then until the loop ends."""
        if self._watchdog_s is not None:
            self.feed_watchdog()
            loop.call_later(self._watchdog_s / 2, self.feed_watchdog_from, loop)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()

    def _send(self, notification: str, timeout_s: float) -> None:
        if self._sock is None:
            return
        try:
            self._sock.settimeout(timeout_s)
            self._sock.send(notification.encode())
        except OSError as error:
            logger.warning("service manager not notified", extra={"notification": notification, "reason": str(error)})


def find_service_manager(environment: Mapping[str, str] | None = None) -> ServiceManager:
    """Return the service manager that the environment names; by default the environment is that of this process."""
    variables = os.environ if environment is None else environment
    address = variables.get("NOTIFY_SOCKET")
    if not address:
        return ServiceManager()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        # A name that begins with @ is in Linux's abstract namespace.
        sock.connect(f"\0{address[1:]}" if address.startswith("@") else address)
    except OSError as error:
        sock.close()
        logger.warning("service manager not reached", extra={"socket": address, "reason": str(error)})
        return ServiceManager()
    return ServiceManager(sock, watchdog_period_s(variables, os.getpid()))


def watchdog_period_s(environment: Mapping[str, str], pid: int) -> float | None:
    """Return the period of the watchdog of the process `pid` in seconds; None if it has none.

    >>> watchdog_period_s({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "17"}, 17)
    30.0
    >>> watchdog_period_s({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "16"}, 17)
    """
    period_us = environment.get("WATCHDOG_USEC", "")
    if not (period_us.isdecimal() and int(period_us) and environment.get("WATCHDOG_PID", str(pid)) == str(pid)):
        return None
    return int(period_us) / 1_000_000
