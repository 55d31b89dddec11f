"""Test that reloads of users and certificates under load touch no connection whose user may do what it did.

Two users talk without a pause over TLS, on connections that are never made anew. Meanwhile the broker reloads again and
again, by SIGHUP or by a control request: another user gets and loses grants, changes its password, leaves and comes
back, the certificate is replaced, or the file is faulty. Source of what is expected: docs/security.md.

    TRUENEXT_RELOADS=100 TRUENEXT_SEED=7 pytest -s tests/integration/test_reloads.py
"""

from __future__ import annotations

import os
import random
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.integration import over_tls
from tests.integration.raw_client import bodies
from tests.integration.test_grants import RequestRefused, UserClient, UserText, passwords
from tests.integration.test_logins import (
    ADMIN,
    RELOADS,
    SHOP,
    TILL,
    GuardedBroker,
    await_log_after_signal,
    code_of,
    connect_frame,
    credentials,
    reload_by_signal,
)

RELOAD_COUNT = int(os.environ.get("TRUENEXT_RELOADS", "10"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

GRANTS = ["send odd.>", "take odd.>", "browse odd.>", "send /topic/odd"]
"""Grants that the changing user may have."""


@dataclass
class Account:
    """Changing user, as the file has it."""

    grants: frozenset[str]
    password: str
    credentials: str


class Broker(GuardedBroker):
    """Broker with TLS, whose certificate and users are replaced."""

    def __init__(self, folder: Path) -> None:
        self.certificate = folder / "broker.pem"
        self.fingerprint = b""
        """Certificate of the file, encoded."""
        self.replace_certificate()
        super().__init__(folder)

    def replace_certificate(self) -> None:
        issued = over_tls.authority().issue_cert("localhost", "127.0.0.1")
        new = self.certificate.with_suffix(".new")
        new.touch(mode=0o600)
        issued.private_key_and_cert_chain_pem.write_to_path(new)
        new.rename(self.certificate)
        self.fingerprint = ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

    def write_with(self, account: Account | None) -> None:
        """Replace the file; only the changing user differs."""
        users = UserText()
        for user, has in (("shop", SHOP), ("till", TILL)):
            users.add(user, has, credentials=self.credentials_of(user))
        if account is not None:
            users.add("odd", sorted(account.grants), credentials=account.credentials)
        self.write_other(users)


class Talk:
    """Conversation of two users, in which each message is answered. Their connections are never made anew."""

    def __init__(self, broker: Broker, name: str) -> None:
        self._queue, self._answers = f"shop.{name}", f"shop.{name}-answers"
        self.count = 0
        self.failures: list[BaseException] = []
        self._shop, self._till = broker.login("shop"), broker.login("till")
        # Five at once must come, however slow the machine: an automatic window may shrink below that.
        self._shop.subscribe_to(self._answers, {"activemq.prefetchSize": "10"})
        self._till.subscribe_to(self._queue, {"activemq.prefetchSize": "10"})
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        """End the conversation; nothing may be left of it."""
        self._is_over.set()
        self._thread.join()
        assert self.failures == []
        assert self._shop.arrived() == self._till.arrived() == []

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._talk()
        except BaseException as error:
            self.failures.append(error)

    def _talk(self) -> None:
        expected = [f"{self.count}-{number}" for number in range(5)]
        for body in expected:
            self._shop.send(self._queue, body.encode(), persistent=True)
        for message in self._till.messages(5):
            self._till.begin("t")
            self._till.ack(message, transaction="t")
            self._till.send(self._answers, message.body, persistent=True, transaction="t")
            self._till.commit("t")
        answers = self._shop.messages(5)
        assert bodies(answers) == expected
        for answer in answers:
            self._shop.ack(answer, confirmed=True)
        self.count += 1


class Changes:
    """Changes of the users file and the certificate, one for each reload."""

    def __init__(self, broker: Broker, dice: random.Random) -> None:
        self._broker = broker
        self._dice = dice
        self._number = 0
        self.done: Counter[str] = Counter()
        self.account: Account | None = self._new_account()

    def make(self) -> None:
        """Change the files, reload, and check what became of the connections of the changing user."""
        before = self.account
        clients = [] if before is None else [self._login(before) for _ in range(2)]
        change = self._dice.choice([self._grants, self._grants, self._password, self._user, self._certificate])
        if self._dice.random() < 0.2:
            self._faulty(change)
        else:
            change()
            self._reload()
        self.done[change.__name__] += 1
        now = self.account
        has_lost = before is not None and (
            now is None or now.credentials != before.credentials or not before.grants <= now.grants
        )
        for client in clients:
            if has_lost:
                client.await_silent_end()
            else:
                client.barrier()
                client.disconnect()
        self._check()

    def _new_account(self) -> Account:
        self._number += 1
        password = f"password {self._number}"
        grants = frozenset(self._dice.sample(GRANTS, self._dice.randrange(len(GRANTS) + 1)))
        return Account(grants, password, passwords(password))

    def _grants(self) -> None:
        if self.account is not None:
            self.account = replace(self.account, grants=self._new_account().grants)

    def _password(self) -> None:
        if self.account is not None:
            self.account = replace(self._new_account(), grants=self.account.grants)

    def _user(self) -> None:
        self.account = self._new_account() if self.account is None else None

    def _certificate(self) -> None:
        self._broker.replace_certificate()

    def _reload(self) -> None:
        self._broker.write_with(self.account)
        how = self._dice.choice([reload_by_signal, RELOADS["control request"]])
        how(self._broker)

    def _faulty(self, change: Callable[[], None]) -> None:
        """Change a users file that has a fault: nothing takes effect."""
        before, fingerprint = self.account, self._broker.fingerprint
        change()
        self._broker.write_with(self.account)
        self._broker.file.write_text(self._broker.file.read_text() + '\n[user.bad]\nsend = ["a..b.*"]\n')
        if self._dice.random() < 0.5:
            await_log_after_signal(self._broker, "configuration not reloaded")
        else:
            answer = self._broker.login(ADMIN).ask("reload")
            assert answer["errors"] and not answer["changed"]
        assert self._shown_certificate() == fingerprint or change != self._certificate
        self.account = before
        self.done["faulty"] += 1
        self._reload()

    def _check(self) -> None:
        """Check that the file holds for new connections."""
        assert self._shown_certificate() == self._broker.fingerprint
        if self.account is None:
            # Not more often: after ten failed logins within a minute right ones are refused, too.
            if self.done["refused"] < 5:
                self.done["refused"] += 1
                client = self._broker.connect(sends_connect=False)
                client.write(connect_frame(credentials("odd", f"password {self._number}")))
                assert code_of(client.next_frame()) == "login"
            return
        client = self._login(self.account)
        for grant in GRANTS:
            right, name = grant.split()
            if right == "send":
                destination = name.replace(">", "x")
                if grant in self.account.grants:
                    client.send_to(destination)
                else:
                    with pytest.raises(RequestRefused):
                        client.send_to(destination)
                    client = self._login(self.account)
        client.disconnect()

    def _login(self, account: Account) -> UserClient:
        return self._broker.login("odd", password=account.password)

    def _shown_certificate(self) -> bytes:
        client = self._broker.connect(sends_connect=False)
        assert isinstance(client._sock, ssl.SSLSocket)
        shown = client._sock.getpeercert(binary_form=True)
        client.close()
        assert shown is not None
        return shown


@pytest.mark.timeout(120 + 5 * RELOAD_COUNT)
def test_reloads_under_load_touch_no_connection_that_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"TRUENEXT_SEED={SEED} TRUENEXT_RELOADS={RELOAD_COUNT}")
    monkeypatch.setattr(over_tls, "IS_ON", True)
    monkeypatch.setattr(over_tls, "SCHEME", "stomp+ssl")
    broker = Broker(tmp_path)
    monkeypatch.setattr(over_tls, "serve_options", lambda: ["--certificate", str(broker.certificate)])
    changes = Changes(broker, random.Random(SEED))
    broker.write_with(changes.account)
    try:
        broker.start()
        talks = [Talk(broker, name) for name in ("a", "b")]
        try:
            for _ in range(RELOAD_COUNT):
                changes.make()
        finally:
            for talk in talks:
                talk.end()
        print(f"{dict(changes.done)}, {sum(talk.count for talk in talks)} rounds of the others")
        assert all(talk.count > 1 for talk in talks)
        broker.close_clients()
        broker.stop()
    finally:
        broker.clean_up()
