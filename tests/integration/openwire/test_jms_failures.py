"""Tests of `failover:` with the unmodified client of ActiveMQ: the broker is killed, and starts at the same ports."""

import os
import random
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.cutting_proxy import Cut, CuttingProxy
from tests.integration.openwire.java import Programs, missing_reason
from tests.integration.raw_client import bodies
from truenext.model.disk_level import DiskLevel

REASON = missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

CUT_RUNS = int(os.environ.get("TRUENEXT_JMS_CUTS", "0"))
"""Number of runs with cuts in quick succession; 0 is one run with slower ones."""


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("java"))


@pytest.fixture
def options() -> Sequence[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ("--listen", f"openwire://127.0.0.1:{port}")


def run_through_kills(broker: BrokerProcess, program: "subprocess.Popen[str]", every: int, kills: int) -> list[str]:
    """Kill the broker whenever the program has printed so many numbers more. Returns all other lines."""
    said: list[str] = []
    number = 0
    try:
        assert program.stdout is not None
        for line in program.stdout:
            if not line.strip().isdigit():
                said.append(line.strip())
                continue
            number += 1
            if number % every == 0 and number // every <= kills:
                broker.send_signal(signal.SIGKILL)
                broker.start_on_same_port()
        assert program.wait(PATIENCE_SECONDS) == 0
    finally:
        program.kill()
        program.communicate()
    return [line for line in said if "Failover" not in line]


def waiting(broker: BrokerProcess, *queues: str) -> Counter[str]:
    return Counter(body for queue in queues for body in bodies(broker.remaining_messages(queue)))


def test_confirmed_send_arrives_once_through_kills(own_broker: BrokerProcess, java: Programs) -> None:
    program = java.start("send_through_failures", own_broker.openwire_url, "q", "300")
    said = run_through_kills(own_broker, program, every=6, kills=4)
    assert "done" in said, "\n".join(said)
    assert waiting(own_broker, "q") == Counter(f"m{number}" for number in range(300))


@pytest.mark.alternates("transacted copies of JMS clients")
def test_transacted_copy_leaves_each_message_in_one_queue_through_kills(
    own_broker: BrokerProcess, java: Programs
) -> None:
    java.run("send_many", own_broker.openwire_url, "q", "200")
    program = java.start("copy_through_failures", own_broker.openwire_url, "q", "5", "200", "2000")
    said = run_through_kills(own_broker, program, every=40, kills=3)
    assert "done" in said, "\n".join(said)
    assert waiting(own_broker, "q", "q.out", "DLQ.q") == Counter(f"m{number}" for number in range(200))


def test_sends_on_a_full_disk_are_refused_and_nothing_is_lost(held_broker: BrokerProcess, java: Programs) -> None:
    program = java.start("full_disk", held_broker.openwire_url, "q")
    said: list[str] = []
    try:
        assert program.stdout is not None
        for line in program.stdout:
            said.append(line.strip())
            if said[-1] == "sent":
                held_broker.set_disk_level(DiskLevel.NONE)
            elif said[-1] == "refused":
                held_broker.set_disk_level(DiskLevel.PLENTY)
        assert program.wait(PATIENCE_SECONDS) == 0
    finally:
        program.kill()
        program.communicate()
    sent, is_explained, refused, count, done = said
    assert (sent, is_explained, refused, done) == ("sent", "true", "refused", "done"), said
    assert bodies(held_broker.remaining_messages("q")) == [f"m{number}" for number in range(int(count))]
    # A connection that only sends waits instead (C24.2).
    assert bodies(held_broker.remaining_messages("q.waiting")) == ["w0", "w1"]


class OftenCuttingProxy(CuttingProxy):
    """Proxy that cuts as many connections as it has plans, each at another byte; later ones stay."""

    def __init__(self, broker_port: int, cuts: list[Cut]) -> None:
        super().__init__(broker_port)
        self.cuts = cuts

    def _connect(self, client: socket.socket) -> None:
        self.expect(self.cuts.pop() if self.cuts else Cut())
        super()._connect(client)


def draw_cuts(dice: random.Random, count: int) -> list[Cut]:
    cuts = []
    for _ in range(count):
        # Half of them in the handshake and the replay, which a client of five sessions does in some 3 KB.
        size = dice.randrange(1, dice.choice([3000, 30_000]))
        is_reset = dice.random() < 0.5
        cuts.append(Cut(up=size, is_reset=is_reset) if dice.random() < 0.5 else Cut(down=size, is_reset=is_reset))
    return cuts


@pytest.mark.alternates("transacted copies of JMS clients")
@pytest.mark.parametrize("seed", range(1, 1 + (CUT_RUNS or 1)))
@pytest.mark.timeout(300)
def test_transacted_copy_leaves_each_message_in_one_queue_through_cuts(
    own_broker: BrokerProcess, java: Programs, seed: int
) -> None:
    java.run("send_many", own_broker.openwire_url, "q", "200")
    port = int(own_broker.openwire_url.rpartition(":")[2])
    # The client may need ten seconds to get up after losses in so quick a succession (C26.17).
    times = ("20", "10000") if CUT_RUNS else ("200", "4000")
    with OftenCuttingProxy(port, draw_cuts(random.Random(seed), 20)) as proxy:
        program = java.start("copy_through_failures", f"tcp://127.0.0.1:{proxy.port}", "q", "5", *times)
        said, _ = program.communicate(timeout=2 * PATIENCE_SECONDS)
        # Some are left over if all was copied before.
        assert len(proxy.cuts) <= 10, said
    assert "done" in said.splitlines(), said
    left = waiting(own_broker, "q")
    assert not (CUT_RUNS and left), said
    rest = waiting(own_broker, "q.out", "DLQ.q")
    assert left + rest == Counter(f"m{number}" for number in range(200))
