"""Benchmark of the engine alone with wildcard consumers: `python -m bench.wildcards`"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from bench.options import positive
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.model.commands import Ack, AckMode, Send, Subscribe
from truenext.model.destination import parse_address
from truenext.model.message import SentMessage

CASES = [
    # Queues, wildcards, window, messages in a turn
    (1, 1, 1000, 200),
    (1000, 1, 1000, 200),
    (1000, 1, 1000, 1),
    (1000, 1, 1, 50_000),
    (10_000, 1, 1000, 200),
    (1000, 10, 1000, 200),
]
HEADER = b"content-length:1\n"


def measure(count: int, queues: int, wildcards: int, window: int, in_a_turn: int) -> tuple[float, float]:
    """Return the seconds of subscribing, and messages per second of processor time."""
    engine = Engine()
    engine.state.commit_state.tick(10**12, 0)
    engine.lifespan.start()
    batch = engine.take_batch()
    assert batch is not None
    engine.store_results.on_committed(batch)
    sender, receiver = engine.commands.connect("sender"), engine.commands.connect("receiver")
    destinations = [parse_address(f"/queue/q.{number}", "sender") for number in range(queues)]
    for destination in destinations:
        engine.commands.send(sender, Send(destination, SentMessage(4, False, 0, HEADER, b"x")))
    started = time.perf_counter()
    for number in range(wildcards):
        engine.commands.subscribe(
            receiver, Subscribe(f"w{number}", parse_address("/queue/q.*", ""), AckMode.INDIVIDUAL, window)
        )
    subscribing = time.perf_counter() - started
    _drain(engine, receiver)
    messages = [SentMessage(number % 10, False, 0, HEADER, b"x") for number in range(count)]
    started = time.process_time()
    for first in range(0, count, in_a_turn):
        for number in range(first, min(first + in_a_turn, count)):
            engine.commands.send(sender, Send(destinations[number * 7919 % queues], messages[number]))
        _drain(engine, receiver)
    return subscribing, count / (time.process_time() - started)


def _drain(engine: Engine, receiver: ConnectionState) -> None:
    while deliveries := engine.turn.run().deliveries:
        for consumer, entries in deliveries.items():
            for entry in entries:
                engine.commands.acknowledge(receiver, Ack(consumer.subscription, entry.sequence))
        engine.commands.on_all_sent(receiver)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.wildcards", description=__doc__)
    parser.add_argument("--messages", type=positive, default=50_000, metavar="N", help="in each case")
    options = parser.parse_args(arguments)
    print(f"{'queues':>8} {'wildcards':>10} {'window':>8} {'in a turn':>10} {'subscribing':>12} {'messages/s':>11}")
    for case in CASES:
        subscribing, rate = measure(options.messages, *case)
        queues, wildcards, window, in_a_turn = case
        print(f"{queues:8} {wildcards:10} {window:8} {in_a_turn:10} {subscribing * 1000:9.0f} ms {rate:11,.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
