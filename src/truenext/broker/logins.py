"""Logins: checks users and passwords on a thread, and remembers accepted logins.

    CONNECT --check--> the same login was accepted       accepted at once
                       too many logins have failed       refused at once
                       the same login waits already      gets the result of that login
                       else                              hashed on the thread, one login after the other

Source: docs/security.md, "Passwords and logins"
"""

from __future__ import annotations

import hashlib
import secrets
from asyncio import AbstractEventLoop, Future
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from truenext.broker.passwords import find_credential
from truenext.broker.users import Users
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Login
from truenext.model.limits import FAILED_LOGINS_PER_ADDRESS, FAILED_LOGINS_PER_USER, LOGINS_WAITING_MAX

FAILURES_SECONDS = 60.0
"""Seconds after which the counts of failed logins start again from zero."""

WRONG_LOGIN = "login refused: user or password is wrong or missing"
WRONG_CERTIFICATE = (
    "login refused: the client's certificate belongs to no user, to several users, or to another user than "
    "`login` names"
)


@dataclass(slots=True, eq=False)
class _WaitingLogin:
    user: str
    address: str
    callbacks: list[Callable[[str], object]] = field(default_factory=list)


class Logins:
    def __init__(self, users: Users, loop: AbstractEventLoop) -> None:
        self.users = users
        self._loop = loop
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="truenext-passwords")
        self._key = secrets.token_bytes(32)
        self._remembered: dict[bytes, tuple[str, str]] = {}
        """User and credential of each login that was accepted, by the digest of the login."""
        self._waiting: dict[bytes, _WaitingLogin] = {}
        """Logins that are being hashed or wait to be hashed, by digest."""
        self._failures: Counter[tuple[str, str | None]] = Counter()
        """Number of failed logins since `_failures_since`, by address and user. The user None stands for all users
        together."""
        self._failures_since = loop.time()

    def replace_users(self, users: Users) -> None:
        """Use the users of a reloaded file from now on. A login that is being hashed is still checked with the former
        users. So the caller of `check` must test whether the credential of such a login is still in
        `UserEntry.credentials`."""
        self.users = users
        self._remembered = {
            digest: (user, credential)
            for digest, (user, credential) in self._remembered.items()
            if user in users and credential in users[user].credentials
        }
        self._waiting.clear()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check(self, login: Login, address: str, on_checked: Callable[[str], object]) -> str:
        """Return the credential of a login that was accepted earlier; else "". After "", the password is hashed on a
        thread, and `on_checked` is called: with the credential, or with "" if the login is wrong.

        `address` is the client's address, without the port.

        Raises: RemoteProtocolError if too many logins have failed or wait
        """
        digest = self._digest(login)
        remembered = self._remembered.get(digest)
        if remembered is not None:
            return remembered[1]
        waiting = self._waiting.get(digest)
        if waiting is None:
            self._check_limits(login.user, address)
            waiting = self._waiting[digest] = _WaitingLogin(login.user, address)
            entry = self.users.get(login.user)
            hashed = self._loop.run_in_executor(self._thread, find_credential, entry, login.passcode)
            hashed.add_done_callback(lambda done: self._on_hashed(digest, waiting, done))
        waiting.callbacks.append(on_checked)
        return ""

    def _check_limits(self, user: str, address: str) -> None:
        if self._loop.time() - self._failures_since >= FAILURES_SECONDS:
            self._failures.clear()
            self._failures_since = self._loop.time()
        of_address = [waiting for waiting in self._waiting.values() if waiting.address == address]
        # Logins that wait may fail, too.
        of_user = self._failures[address, user] + sum(waiting.user == user for waiting in of_address)
        of_all = self._failures[address, None] + len(of_address)
        if of_user >= FAILED_LOGINS_PER_USER or of_all >= FAILED_LOGINS_PER_ADDRESS:
            raise RemoteProtocolError(
                f"login refused: {FAILED_LOGINS_PER_USER} logins of this user, or {FAILED_LOGINS_PER_ADDRESS} logins, "
                "have failed from this address within a minute; try again in a minute",
                Code.BUSY,
            )
        if len(self._waiting) >= LOGINS_WAITING_MAX or len(of_address) >= LOGINS_WAITING_MAX // 2:
            raise RemoteProtocolError(
                f"{LOGINS_WAITING_MAX} logins, or half as many from this address, wait to be checked: try again later",
                Code.BUSY,
            )

    def _on_hashed(self, digest: bytes, waiting: _WaitingLogin, done: Future[str]) -> None:
        credential = "" if done.cancelled() else done.result()
        if self._waiting.get(digest) is waiting:
            del self._waiting[digest]
            if credential:
                self._remembered[digest] = waiting.user, credential
        if not credential:
            self._failures[waiting.address, waiting.user] += 1
            self._failures[waiting.address, None] += 1
        for on_checked in waiting.callbacks:
            on_checked(credential)

    def _digest(self, login: Login) -> bytes:
        text = f"{login.user}\0{login.passcode}".encode()
        return hashlib.blake2b(text, key=self._key).digest()
