"""Memory of connections that do nothing."""

from __future__ import annotations

import time
from pathlib import Path

from bench.brokers import Truenext
from bench.openwire.client import Connection
from truenext.wire.openwire.structures import QueueName

TARGET_MIB = 40
"""Limit for 1,000 connections with ten consumers each."""
_CONSUMERS = 10
_PREFETCH = 1_000
_SETTLING_SECONDS = 2.0
"""Time in which the broker frees what logins have taken."""


class _Broker(Truenext):
    scheme = "openwire"


def measure(folder: Path, connections: int) -> None:
    """Measure by how much the memory of a broker grows with idle connections, whose consumers share ten queues."""
    with _Broker(folder) as broker:
        _open(broker.port, 0).sock.close()
        time.sleep(_SETTLING_SECONDS)
        before = broker.anonymous_memory() or 0
        opened = [_open(broker.port, number) for number in range(1, connections + 1)]
        time.sleep(_SETTLING_SECONDS)
        after = broker.anonymous_memory() or 0
        for connection in opened:
            connection.sock.close()
    used = (after - before) / 1024
    print(
        f"idle: {connections:,} connections of {_CONSUMERS} consumers take {used:.1f} MiB, "
        f"{used * 1024 / connections:.1f} KiB each (1,000 at most {TARGET_MIB} MiB)",
        flush=True,
    )


def _open(port: int, number: int) -> Connection:
    connection = Connection(port, number)
    for each in range(_CONSUMERS):
        connection.consume(QueueName(f"bench.{each}"), each + 1, _PREFETCH)
    return connection
