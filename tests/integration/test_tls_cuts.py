"""Test that connections with TLS lose and double nothing when they are cut under load at any byte, in all modes.

Each queue has a producer, which numbers its messages and repeats those without a receipt, and a consumer: in `auto`
mode, `client` and `client-individual`. All connect through proxies that cut them at a drawn byte, in the handshake too,
in the middle of a record, or when the sockets are full. What the clients saw is compared with docs/contract.md, and
then with the history of the broker. Its end: every message was acknowledged once, and every connection has ended.

    TRUENEXT_CUTS=1000 TRUENEXT_SEED=7 pytest -s tests/integration/test_tls_cuts.py
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.contract.naive_history import read_folder
from tests.integration import over_tls
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.cutting_proxy import ENDLESS, Cut, CuttingProxy
from tests.integration.raw_client import RECEIVE_SECONDS, RawClient, numbered
from truenext.wire.stomp.frame import Frame

CUTS = int(os.environ.get("TRUENEXT_CUTS", "45"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

MODES = ["auto", "client", "client-individual"]
AHEAD_MAX = 300
"""Messages that a producer is ahead of its consumer."""
WINDOWS = [1, 10, 100, 1000]
CONNECTION_LOST = (OSError, EOFError)
"""Errors by which a client notices a cut."""
UNCUT = Cut()
HELLO_BYTES = 600
"""Bytes that a client sends in any case: of its handshake, and of its CONNECT."""
HANDSHAKE_BYTES = 3000
"""Bytes of a handshake, about, in each direction."""


class CutClient(RawClient):
    """Client that knows whether the line feed behind its last frame has come, without which the frame has not left."""

    last = b""
    """Last bytes that were read."""

    def read(self, seconds: float = RECEIVE_SECONDS) -> bytes:
        data = super().read(seconds)
        self.last = data or self.last
        return data


class Story:
    """One queue with its producer and consumer, and all that they saw."""

    def __init__(self, mode: str, broker_port: int, cuts: int, dice: random.Random) -> None:
        self.mode = mode
        self.queue = f"cut-{mode}"
        self.broker_port = broker_port
        self.cuts = cuts
        """Cuts that the consumer is still to see; the producer has a fifth as many."""
        self.dice = dice
        self.sent = 0
        """Messages of which a SEND was tried."""
        self.confirmed = 0
        self.got: Counter[int] = Counter()
        """Numbers of the messages that came, with how often."""
        self.newest = 0
        self.done: set[int] = set()
        """Numbers of the messages that came and must not come again."""
        self.connections: list[list[int]] = []
        """Sequences of the messages that came, for each connection in `auto` mode."""
        self.drained: list[int] = []
        """Those of the connection that was not cut."""
        self.ends: Counter[str] = Counter()
        """How connections ended."""
        self.failures: list[BaseException] = []
        self._is_over = threading.Event()

    def draw_cut(self) -> Cut:
        """Draw the end of the next connection."""
        dice = self.dice
        down = up = ENDLESS
        how = dice.random()
        if how < 0.08:
            up = dice.randrange(1, HELLO_BYTES)
        elif how < 0.15:
            down = dice.randrange(1, HANDSHAKE_BYTES)
        elif how < 0.4 and self.mode != "auto":
            # In `auto` mode a client says nothing behind its SUBSCRIBE.
            up = HELLO_BYTES + dice.randrange(1, 3000)
        else:
            down = HANDSHAKE_BYTES + int(dice.choice([1000, 30_000, 400_000, 2_000_000]) * dice.random())
        return Cut(up, down, dice.choice([0.0, 0.002, 0.05]), dice.random() < 0.5)

    # ---- Producer ----

    def produce(self) -> None:
        """Send numbered messages until all cuts were seen, and repeat those without a receipt after each cut."""
        dice = random.Random(self.dice.random())
        cuts = self.cuts // 5
        try:
            with CuttingProxy(self.broker_port) as proxy:
                while not self._is_over.is_set():
                    cut = Cut(up=dice.randrange(1, 400_000), is_reset=dice.random() < 0.5) if cuts > 0 else UNCUT
                    self._use(proxy, partial(self._send_all, dice), cut)
                    cuts -= 1
        except BaseException as error:
            self.failures.append(error)
            self._is_over.set()

    def _send_all(self, dice: random.Random, client: RawClient) -> None:
        self.repeat(client)
        while not self._is_over.is_set():
            if self.sent - self.newest > AHEAD_MAX:
                # Not until they come: sockets that were cut may have taken all of them.
                self._is_over.wait(0.02)
            for _ in range(dice.randrange(1, 20)):
                self.sent += 1
                self._send(client, self.sent - 1)
            self._confirm(client)

    def repeat(self, client: RawClient) -> None:
        """Repeat the messages without a receipt, and wait for theirs."""
        for number in range(self.confirmed, self.sent):
            self._send(client, number)
        self._confirm(client)

    def _confirm(self, client: RawClient) -> None:
        client.send_frame("SEND", {"destination": "/topic/nobody"}, confirmed=True)
        self.confirmed = self.sent

    def _send(self, client: RawClient, number: int) -> None:
        size = random.Random(f"{self.queue} {number}").choice((10, 10, 700, 5_000, 20_000, 100_000))
        headers = numbered(self.queue, number + 1)
        client.send(self.queue, b"%d " % number + bytes(size), persistent=number % 3 > 0, headers=headers)

    # ---- Consumer ----

    def consume(self) -> None:
        """Consume until all cuts were seen."""
        try:
            with CuttingProxy(self.broker_port) as proxy:
                while self.cuts and not self._is_over.is_set():
                    self._use(proxy, self._serve, self.draw_cut())
                    self.cuts -= 1
        except BaseException as error:
            self.failures.append(error)
        finally:
            self._is_over.set()

    def drain(self, broker: BrokerProcess) -> None:
        """Send what has no receipt, and consume all that is left, on a connection that is not cut."""
        client = CutClient(self.broker_port)
        client.send_connect("1.2", "0,0")
        self.repeat(client)
        self._serve(client, broker)
        client.disconnect()

    def _use(self, proxy: CuttingProxy, use: Callable[[CutClient], None], cut: Cut) -> None:
        """Connect, and use the connection until it is cut."""
        proxy.expect(cut)
        client: CutClient | None = None
        try:
            client = CutClient(proxy.port)
            client.send_connect("1.2", "0,0")
            use(client)
        except CONNECTION_LOST as error:
            # A connection that is not cut must answer.
            if cut == UNCUT or isinstance(error, TimeoutError):
                raise
            self.ends["handshake" if client is None else type(error).__name__] += 1
        finally:
            if client is not None:
                client.close()

    def _serve(self, client: CutClient, broker: BrokerProcess | None = None) -> None:
        """Consume until the connection is cut; with `broker`, until nothing is left."""
        dice = self.dice
        came: list[int] = []
        sequences: list[int] = []
        number = 0
        try:
            window = dice.choice(WINDOWS)
            client.subscribe(self.queue, ack=self.mode, prefetch=window)
            while True:
                try:
                    message = client.message(RECEIVE_SECONDS if broker is None else 0.05)
                except TimeoutError:
                    if broker is None:
                        raise
                    if self._is_empty(broker):
                        return
                    continue
                number = int(message.body.split()[0])
                assert number not in self.done, f"{self.queue}: {number} came again, {message.headers}, {self.ends}"
                self.got[number] += 1
                self.newest = max(self.newest, number)
                sequences.append(int(message.headers["truenext-sequence"]))
                if self.mode == "auto":
                    self.done.add(number)
                    continue
                came.append(number)
                is_due = broker is not None or len(came) == window or dice.random() < 0.3
                if self.mode == "client-individual" or is_due:
                    self._acknowledge(client, came, message, confirmed=dice.random() < 0.3)
                    came.clear()
        finally:
            if self.mode == "auto" and sequences:
                if client.last.endswith(b"\0"):
                    # The frame has not left without its line feed, and may come again.
                    self.done.discard(number)
                    sequences.pop()
                self.connections.append(sequences)
                if broker is not None:
                    self.drained = sequences

    def _is_empty(self, broker: BrokerProcess) -> bool:
        facts = broker.queues()[self.queue]
        return facts.waiting == facts.unacknowledged == 0

    def _acknowledge(self, client: RawClient, numbers: list[int], last: Frame, *, confirmed: bool) -> None:
        if not confirmed:
            client.ack(last)
            return
        receipt = client.new_receipt()
        client.send_frame("ACK", {"id": last.headers["ack"], "receipt": receipt})
        client.await_receipt(receipt)
        self.done.update(numbers)

    def check(self, events: list[dict[str, Any]]) -> None:
        """Compare what came with the history."""
        acknowledged = judge(events, self.queue)
        assert len(acknowledged) == self.sent
        if self.mode != "auto":
            lost = set(range(self.sent)) - set(self.got)
            assert not lost, f"{self.queue}: lost are {lost}"
            return
        # A message may be lost only behind the last one that came, on its way to a client that is gone.
        taken_by: dict[int, list[int]] = defaultdict(list)
        for sequence, consumer in acknowledged.items():
            taken_by[consumer].append(sequence)
        for sequences in self.connections:
            if sequences:
                taken = taken_by[acknowledged[sequences[0]]]
                assert sequences == taken[: len(sequences)], f"{self.queue}: {sequences} came, and {taken} were taken"
        if self.drained:
            assert self.drained == taken_by[acknowledged[self.drained[0]]]


def judge(events: list[dict[str, Any]], queue: str) -> dict[int, int]:
    """Check that no message was held twice at a time, and that each was acknowledged once, by a consumer that held it.
    Returns these consumers by the sequences of their messages, in the order of the acknowledgements."""
    accepted: set[int] = set()
    held: dict[int, int] = {}
    acknowledged: dict[int, int] = {}
    for event in events:
        if event.get("queue") != queue or "sequence" not in event:
            continue
        sequence = event["sequence"]
        match event["kind"]:
            case "accepted":
                accepted.add(sequence)
            case "dispatched":
                assert sequence not in held and sequence not in acknowledged, event
                held[sequence] = event["consumer"]
            case "acknowledged":
                assert sequence in held, event
                acknowledged[sequence] = held.pop(sequence)
            case "returned":
                assert sequence not in acknowledged, event
                held.pop(sequence, None)
    assert set(acknowledged) == accepted
    return acknowledged


def open_sockets(broker: BrokerProcess) -> int:
    """Return the number of sockets of the broker's process."""
    count = 0
    for each in Path(f"/proc/{broker.pid}/fd").iterdir():
        # It may be closed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            count += str(each.readlink()).startswith("socket:")
    return count


def await_ends(broker: BrokerProcess, sockets: int) -> None:
    """Wait until the broker has ended all connections: it has as many sockets as before them, and no consumers."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (now := open_sockets(broker)) > sockets or any(facts.consumers for facts in broker.queues().values()):
        assert time.monotonic() < deadline, f"{now - sockets} connections have not ended: {broker.queues()}"
        time.sleep(0.05)


def cut_under_load(broker: BrokerProcess, cuts: int, dice: random.Random) -> list[Story]:
    """Let clients work on connections that are cut, and then take what is left. Returns what they saw."""
    sockets = open_sockets(broker)
    stories = [Story(mode, broker.port, cuts // len(MODES), random.Random(dice.random())) for mode in MODES]
    threads = [threading.Thread(target=work) for story in stories for work in (story.produce, story.consume)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for story in stories:
        print(f"{story.queue}: {story.sent} sent, {len(story.got)} came, {dict(story.ends)}")
        assert not story.failures, story.failures
    await_ends(broker, sockets)
    for story in stories:
        before = story.got.total()
        story.drain(broker)
        print(f"{story.queue}: {story.got.total() - before} came on a connection that was not cut")
    await_ends(broker, sockets)
    return stories


def history_of_cuts(folder: Path, cuts: int, dice: random.Random, patch: pytest.MonkeyPatch) -> Path:
    """Cut connections of a broker with TLS, and check its history. Returns its data folder."""
    patch.setattr(over_tls, "IS_ON", True)
    patch.setattr(over_tls, "SCHEME", "stomp+ssl")
    # However often connections are lost, no message becomes a dead letter.
    broker = BrokerProcess(folder, policy={"delay_ms": 0, "attempts_max": 1000})
    try:
        broker.start()
        stories = cut_under_load(broker, cuts, dice)
        broker.stop()
    finally:
        broker.clean_up()
    events = sorted(read_folder(broker.data / "history"), key=lambda event: event["event"])
    for story in stories:
        story.check(events)
    return broker.data


@pytest.mark.timeout(120 + CUTS)
def test_connections_with_tls_that_are_cut_lose_and_double_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"TRUENEXT_SEED={SEED} TRUENEXT_CUTS={CUTS}")
    history_of_cuts(tmp_path, CUTS, random.Random(SEED), monkeypatch)
