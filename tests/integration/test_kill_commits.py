"""Test that the outcomes of COMMITs that a client is told are true, if the broker is killed at any moment, again and
again.

A client commits transactions and sends, all with numbers that have no gaps. At a random moment the broker gets a kill
-9. The client connects to the next one and asks for the outcome of what is in doubt; half of the time it asks to
resolve it. The client believes the answers. Now and then the queue is emptied and compared with them.

    TRUENEXT_COMMIT_CYCLES=1000 TRUENEXT_SEED=7 pytest -s tests/integration/test_kill_commits.py
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broker_process import QUIET_SECONDS, dying_with_us
from tests.integration.raw_client import RECEIVE_SECONDS, RawClient, numbered

CYCLES = int(os.environ.get("TRUENEXT_COMMIT_CYCLES", "20"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)
CYCLES_PER_CHECK = 25
"""Cycles between two checks, which empty the queue."""
KILLED_WITHIN_SECONDS = 0.04
"""Longest time from the start of a broker to its kill: enough to connect, ask, and commit some transactions."""

CONNECTION_LOST = (OSError, EOFError)
"""Errors by which a client notices that the broker was killed."""
GAPLESS = {"truenext-gapless": "true"}


class ForkedBrokers:
    """Brokers, one after the other, on one data folder."""

    def __init__(self, data: Path) -> None:
        self._data = data
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            dying_with_us([sys.executable, "-m", "tests.integration.forked_brokers"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=root,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
            text=True,
        )
        self._pid = 0

    def start(self) -> int:
        """Start a broker, and return its port."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._data}\n")
        self._process.stdin.flush()
        pid, port = self._read_line().split()
        self._pid = int(pid)
        return int(port)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def await_end(self) -> None:
        """Wait for the end of a killed broker."""
        assert self._read_line() == str(-signal.SIGKILL), "it had ended by itself"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the brokers have ended"
        return line


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[ForkedBrokers]:
    brokers = ForkedBrokers(tmp_path / "data")
    try:
        yield brokers
    finally:
        brokers.close()


class Client:
    """Client that commits and sends, and remembers the outcomes that it was told."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._commit = 0
        self._send = 0
        """Highest numbers of a COMMIT and a SEND with a known outcome."""
        self._is_too_late = False
        """Whether the COMMIT of the highest number was resolved just now."""
        self._letters: dict[int, list[str]] = {}
        """Letters of the transaction in doubt, by its number."""
        self.expected: Counter[str] = Counter()
        """Letters that must be in the queue."""
        self.outcomes: Counter[str] = Counter()

    def work(self, port: int) -> None:
        """Commit and send until the connection ends. Raises: OSError, EOFError if it ends by itself"""
        client = _connected(port)
        try:
            self._resolve_doubts(client)
            if self._is_too_late and self._chance.random() < 0.3:
                self._commit_too_late(client, self._commit)
                return
            while True:
                if self._chance.random() < 0.3:
                    self._send_one(client)
                self._commit_some(client)
        finally:
            client.close()

    def finish(self, port: int) -> None:
        """Resolve all doubts."""
        client = _connected(port)
        self._resolve_doubts(client)
        client.close()

    def _resolve_doubts(self, client: RawClient) -> None:
        number = self._commit + 1
        resolves = self._chance.random() < 0.5
        answer = _query_producer(client, number, resolves=resolves)
        outcome = answer["outcome"]
        self.outcomes[outcome] += 1
        letters = self._letters.pop(number, None)
        if outcome == "committed":
            assert letters is not None, f"COMMIT {number} was never said"
            self.expected.update(letters)
            self._commit = number
        elif outcome == "rolled back":
            # Also by a question whose answer never came.
            self._commit = number
        else:
            assert outcome == "not so far", answer
            assert not resolves
        assert answer["commits"] == self._commit, answer
        assert answer["sends"] in (self._send, self._send + 1), answer
        if answer["sends"] > self._send:
            self._send += 1
            self.expected[f"send {self._send}"] += 1
        self._is_too_late = outcome == "rolled back"

    def _commit_too_late(self, client: RawClient, number: int) -> None:
        client.begin("late")
        client.send("q", b"never", persistent=True, transaction="late")
        client.commit("late", confirmed=False, headers=numbered("p", number))
        assert client.error().headers["truenext-code"] == "rolled-back"

    def _send_one(self, client: RawClient) -> None:
        number = self._send + 1
        body = f"send {number}"
        client.send("q", body.encode(), persistent=True, confirmed=True, headers=numbered("p", number) | GAPLESS)
        self._send = number
        self.expected[body] += 1

    def _commit_some(self, client: RawClient) -> None:
        number = self._commit + 1
        letters = [f"{number}.{index}" for index in range(self._chance.randint(1, 3))]
        client.begin("t")
        for letter in letters:
            client.send("q", letter.encode(), persistent=True, transaction="t")
        self._letters[number] = letters
        client.commit("t", headers=numbered("p", number) | GAPLESS)
        del self._letters[number]
        self._commit = number
        self.expected.update(letters)


def _connected(port: int) -> RawClient:
    client = RawClient(port)
    try:
        client.send_connect("1.2", "0,0")
    except CONNECTION_LOST:
        client.close()
        raise
    return client


def _query_producer(client: RawClient, number: int, *, resolves: bool) -> Any:
    client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"})
    arguments = {"producer": "p", "commit": number, "resolve": resolves}
    headers = {"destination": "/control/producer", "reply-to": "/temp-queue/answers"}
    client.send_frame("SEND", headers, json.dumps(arguments).encode())
    return json.loads(client.message().body)


def _emptied(port: int, count: int) -> Counter[str]:
    """Empty the queue and return its letters, `count` if all is right. They are read from the disk."""
    client = _connected(port)
    client.subscribe("q")
    found: Counter[str] = Counter()
    with suppress(TimeoutError):
        while True:
            message = client.message(RECEIVE_SECONDS if found.total() < count else QUIET_SECONDS)
            found[message.body.decode()] += 1
            client.ack(message)
    client.disconnect()
    return found


@pytest.mark.alternates("kills of clients")
@pytest.mark.timeout(60 + CYCLES)
def test_answered_outcomes_of_commits_are_true_whenever_the_broker_is_killed(brokers: ForkedBrokers) -> None:
    print(f"\nseed {SEED}, {CYCLES} cycles")
    chance = random.Random(SEED)
    client = Client(chance)
    messages = 0
    for cycle in range(1, CYCLES + 1):
        port = brokers.start()
        killer = threading.Timer(chance.uniform(0, KILLED_WITHIN_SECONDS), brokers.kill)
        killer.start()
        try:
            while killer.is_alive():
                with suppress(*CONNECTION_LOST):
                    client.work(port)
        finally:
            killer.join()
        brokers.await_end()
        if cycle % CYCLES_PER_CHECK == 0 or cycle == CYCLES:
            port = brokers.start()
            client.finish(port)
            found = _emptied(port, client.expected.total())
            assert not found - client.expected, f"too much by cycle {cycle}"
            assert not client.expected - found, f"lost by cycle {cycle}"
            messages += found.total()
            client.expected.clear()
            brokers.kill()
            brokers.await_end()
            # Its acknowledgements were confirmed by the receipt of its DISCONNECT.
            print(f"cycle {cycle}: {messages} messages, told {dict(client.outcomes)}", flush=True)
