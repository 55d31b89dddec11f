"""Logins: users of the console, by the cookie of the browser; and bounds on attempts to log in.

The console stores no cookie and no password. A login is found by the hash of its cookie, and lasts as long as its
connection to the broker, at most LOGIN_S, and without use IDLE_S.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable

from truenext.console.link import Link
from truenext.console.work import Work

LOGINS_MAX = 100
"""Largest number of logins at once. The one that was not used for longest ends for a new one."""
LOGIN_S = 12 * 3600
IDLE_S = 3600
STREAMS_MAX = 5
"""Largest number of streams of one login; each live page has one while it is visible. A browser opens six connections
to one address, and the last one is for pages and forms."""
ATTEMPTS_PER_MINUTE = 5
"""Failed logins from one address within a minute; further ones are refused for the rest of it."""
ATTEMPTS_IN_ALL = 20
"""The same from all addresses. The broker counts all of them for the address of the console."""


class Login:
    """One login: the connection of a user, and what was begun with it."""

    def __init__(self, key: bytes, link: Link, now_s: float) -> None:
        self.key = key
        self.link = link
        self.opened_s = self.used_s = now_s
        self.streams = 0
        self.work: OrderedDict[str, Work] = OrderedDict()
        """Bulk work of this login, by its id, the oldest first."""


class Logins:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_key: OrderedDict[bytes, Login] = OrderedDict()
        """Logins by the hash of the cookie, the one that was not used for longest first."""

    def find(self, cookie: str) -> Login | None:
        """Return the login of a cookie, and note that it was used."""
        login = self._by_key.get(_key(cookie))
        if login is None or self._is_over(login):
            return None
        login.used_s = self._clock()
        self._by_key.move_to_end(login.key)
        return login

    def open(self, link: Link) -> str:
        """Add a login, and return its cookie. The caller has called `expired` before."""
        cookie = secrets.token_urlsafe(32)
        login = Login(_key(cookie), link, self._clock())
        self._by_key[login.key] = login
        return cookie

    def end(self, login: Login) -> None:
        self._by_key.pop(login.key, None)

    def is_open(self, login: Login) -> bool:
        return self._by_key.get(login.key) is login and not self._is_over(login)

    def over(self) -> list[Login]:
        """Return logins that are over, and were not ended."""
        return [login for login in self._by_key.values() if self._is_over(login)]

    def expired(self) -> list[Login]:
        """Return logins that are over, and the ones that make place for another one."""
        over = self.over()
        surplus = len(self._by_key) - len(over) - LOGINS_MAX + 1
        return over + [login for login in self._by_key.values() if login not in over][: max(0, surplus)]

    def all(self) -> list[Login]:
        return list(self._by_key.values())

    def _is_over(self, login: Login) -> bool:
        now = self._clock()
        return now - login.opened_s > LOGIN_S or now - login.used_s > IDLE_S


class Attempts:
    """Failed logins of the last minute, by the address of the browser."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: deque[tuple[float, str]] = deque()

    def are_too_many(self, address: str) -> bool:
        """Return whether a login from an address is refused without being tried."""
        while self._failed and self._clock() - self._failed[0][0] > 60:
            self._failed.popleft()
        own = sum(each == address for _, each in self._failed)
        return own >= ATTEMPTS_PER_MINUTE or len(self._failed) >= ATTEMPTS_IN_ALL

    def note(self, address: str) -> None:
        """Note an attempt before it is tried, so that attempts at the same time count."""
        self._failed.append((self._clock(), address))

    def forgive(self, address: str) -> None:
        """Take back the last attempt of an address: it was right, or the broker did not answer."""
        for index in range(len(self._failed) - 1, -1, -1):
            if self._failed[index][1] == address:
                del self._failed[index]
                return


def _key(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()
