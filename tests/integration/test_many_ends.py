"""Tests that connections which end at the same time, because of time or memory, end one after the other in turns."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broker_here import broker_here, port_of
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies
from truenext.broker import connection_ends
from truenext.broker.broker import Broker
from truenext.broker.connection_ends import ConnectionEnds
from truenext.model.policy import Policies, Policy

COUNT = 6


class Turns:
    """Counts the connections that end between the beginnings of two turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.ends: Counter[int] = Counter()
        """Number of ends by the number of the turn."""
        # Each end takes at least a nanosecond, and so all time of its turn.
        monkeypatch.setattr(connection_ends, "ENDS_NS_PER_TURN", 1)
        run_turn, lost = Broker._run_turn, ConnectionEnds.lost

        def counted_turn(broker: Broker) -> None:
            self.number += 1
            run_turn(broker)

        def counted_end(ends: ConnectionEnds, *arguments: Any, **options: Any) -> None:
            self.ends[self.number] += 1
            lost(ends, *arguments, **options)

        monkeypatch.setattr(Broker, "_run_turn", counted_turn)
        monkeypatch.setattr(ConnectionEnds, "lost", counted_end)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(monkeypatch)


class Clients:
    """Connects clients to a broker, and closes them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._clients: list[RawClient] = []

    def connect(self, count: int, headers: dict[str, str] | None = None) -> list[RawClient]:
        clients = [RawClient(self._port) for _ in range(count)]
        self._clients += clients
        for client in clients:
            client.send_connect("1.2", "0,0", headers=headers)
        return clients

    def close(self) -> None:
        for client in self._clients:
            client.close()


def play(data: Path, test: Callable[[Clients], None], policies: Policies) -> None:
    """Run `test` on a thread, with clients of a broker that has these policies."""

    async def run() -> None:
        async with broker_here(data) as listener:
            listener._broker.change_policies(policies)
            clients = Clients(port_of(listener))
            try:
                await asyncio.to_thread(test, clients)
            finally:
                clients.close()

    asyncio.run(run())


def test_connections_above_the_memory_limit_of_a_topic_end_in_as_many_turns(tmp_path: Path, turns: Turns) -> None:
    def test(clients: Clients) -> None:
        [sender] = clients.connect(1)
        slow = clients.connect(COUNT)
        for number, client in enumerate(slow):
            sender.send("held", str(number).encode(), confirmed=True)
            client.subscribe("held", prefetch=1)
            client.message()
            client.subscribe("", subscription="2", headers={"destination": "/topic/t"})
        sender.send("", b"x", headers={"destination": "/topic/t"}, confirmed=True)
        for client in slow:
            assert "memory_limit of its policy is 1" in client.error().body.decode()
        sender.subscribe("held")
        assert bodies(sender.messages(COUNT)) == [str(number) for number in range(COUNT)]
        assert max(turns.ends.values()) == 1 and turns.ends.total() == COUNT

    play(tmp_path, test, Policies(by_pattern={"t": Policy(memory_limit=1)}))


def test_cut_connections_that_no_client_takes_over_end_in_as_many_turns(tmp_path: Path, turns: Turns) -> None:
    def test(clients: Clients) -> None:
        [sender] = clients.connect(1)
        cut = clients.connect(COUNT, TRUENEXT_CLIENT)
        for number, client in enumerate(cut):
            sender.send("held", str(number).encode(), confirmed=True)
            client.subscribe("held", prefetch=1)
            client.started(client.message())
            client.begin("t")
            client.abort("t")
        for client in cut:
            client.reset()
        sender.subscribe("held")
        assert sorted(bodies(sender.messages(COUNT))) == [str(number) for number in range(COUNT)]
        assert max(turns.ends.values()) == 1 and turns.ends.total() == COUNT

    play(tmp_path, test, Policies())
