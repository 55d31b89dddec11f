"""Test that guessed passwords let nobody in, and that other users notice nothing of the guesses.

Several guessers try wrong passwords of users that exist and of others, from many addresses of this machine at a time,
each with a SEND behind its CONNECT. Source of what is expected: docs/security.md, "Passwords and logins".

    TRUENEXT_GUESSES=2000 TRUENEXT_SEED=7 pytest -s tests/integration/test_guesses.py
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.raw_client import RawClient
from tests.integration.test_logins import (
    ADMIN,
    SHOP,
    GuardedBroker,
    answer_to,
    code_of,
    connect_frame,
    credentials,
    login_answer,
    send_frame,
    word_of,
)

GUESSES = int(os.environ.get("TRUENEXT_GUESSES", "200"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

GUESSERS = 4
GUESSES_PER_ADDRESS = 100
"""Guesses from one address. About half of them are hashed, the others are too many of one user."""
NEWCOMERS = [f"newcomer-{number}" for number in range(8)]
"""Users that log in for the first time while others guess."""
GROWTH_MAX_MIB = 2
"""Largest growth of the broker's own memory, from when a tenth of the guesses was made."""


class Guesses:
    """Wrong logins, each made once."""

    def __init__(self, broker: GuardedBroker, count: int, dice: random.Random) -> None:
        addresses = [f"127.0.1.{number + 1}" for number in range(max(1, GUESSES // GUESSES_PER_ADDRESS))]
        self._broker = broker
        self._logins = [(dice.choice(addresses), *self._drawn(dice)) for _ in range(count)]
        self._lock = threading.Lock()
        self.answers: Counter[str] = Counter()
        """Numbers of the answers by code."""
        self.failures: list[BaseException] = []

    def _drawn(self, dice: random.Random) -> tuple[str | None, str]:
        """Draw a user and a wrong password."""
        user = dice.choice(["shop", "shop", ADMIN, "till", "nobody", "Shop", "", None])
        right = word_of(user or "shop")
        at = dice.randrange(len(right))
        hash_of_shop = self._broker.credentials_of("shop").split('"')[1]
        wrong = [
            right[:at],
            right + " ",
            right.upper(),
            right[:at] + chr(ord("a") + dice.randrange(26)) + "x" + right[at:],
            dice.randbytes(dice.randrange(1, 600)).hex(),
            word_of("somebody else"),
            hash_of_shop,
        ]
        return user, dice.choice(wrong)

    def make(self) -> None:
        """Make all guesses, by several threads."""
        threads = [threading.Thread(target=self._guess) for _ in range(GUESSERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _guess(self) -> None:
        try:
            for address, user, password in self._taken():
                frames = connect_frame(credentials(user, password)) + send_frame("/queue/shop.guessed")
                code = code_of(answer_to(self._broker, frames, address=address))
                with self._lock:
                    self.answers[code] += 1
        except BaseException as error:
            self.failures.append(error)

    def _taken(self) -> Iterator[tuple[str, str | None, str]]:
        while True:
            with self._lock:
                if not self._logins or self.failures:
                    return
                login = self._logins.pop()
            yield login


def work(broker: GuardedBroker, is_over: threading.Event, rounds: Counter[str], newcomers: list[str]) -> None:
    """Log in, send, receive and acknowledge again and again, as a remembered user, and as one that is not."""
    staying = broker.login("till")
    while not is_over.wait(0.02):
        assert staying.arrived() == []
        coming = broker.login("till")
        coming.subscribe_to("/queue/shop.q", {"activemq.prefetchSize": "1"})
        coming.send_to("/queue/shop.q", b"%d" % rounds["till"])
        message = coming.message()
        assert message.body == b"%d" % rounds["till"]
        RawClient.ack(coming, message, confirmed=True)
        coming.disconnect()
        rounds["till"] += 1
        if newcomers:
            broker.login(newcomers.pop()).barrier()
            rounds["newcomers"] += 1


@pytest.mark.alternates("many logins")
@pytest.mark.timeout(120 + GUESSES)
def test_guesses_let_nobody_in_and_lock_nobody_out_and_take_no_memory(tmp_path: Path) -> None:
    print(f"TRUENEXT_SEED={SEED} TRUENEXT_GUESSES={GUESSES}")
    dice = random.Random(SEED)
    broker = GuardedBroker(tmp_path)
    for user in NEWCOMERS:
        broker.add(user, SHOP)
    broker.write()
    first, others = Guesses(broker, GUESSES // 10, dice), Guesses(broker, GUESSES - GUESSES // 10, dice)
    rounds: Counter[str] = Counter()
    is_over = threading.Event()
    failures: list[BaseException] = []
    newcomers = list(NEWCOMERS)

    def work_on() -> None:
        try:
            work(broker, is_over, rounds, newcomers)
        except BaseException as error:
            failures.append(error)

    try:
        broker.start()
        victim = broker.login("shop")
        first.make()
        with broker.watched_memory() as samples:
            before = samples[0]
            working = threading.Thread(target=work_on)
            working.start()
            try:
                others.make()
            finally:
                is_over.set()
                working.join()
        after = samples[-1]
        print(f"answers {first.answers + others.answers}, {rounds}, memory {before >> 10} to {after >> 10} KiB")
        assert [*first.failures, *others.failures, *failures] == []
        answers = first.answers + others.answers
        assert answers.total() == GUESSES and set(answers) == {"login", "busy"}, answers
        assert rounds["newcomers"] == len(NEWCOMERS) and rounds["till"] > len(NEWCOMERS)
        assert after - before < GROWTH_MAX_MIB << 20
        victim.barrier()
        assert login_answer(broker, "shop", word_of("shop")).command == "CONNECTED"
        assert {queue["name"] for queue in broker.login(ADMIN).ask("queues")} == {"shop.q"}
        broker.close_clients()
        broker.stop()
    finally:
        broker.clean_up()
