"""Profile of one message's processor time in the broker, from its SEND frame to its acknowledgement.

The parts of a broker do the same work one after the other, in this process, each with its own clock:

    parse       the producer's bytes become commands
    send        messages get their places in the queue, and a record if they are stored
    journal     a batch becomes bytes, and the store knows where they are; history included
    disk        these bytes are written and synced
    dispatch    messages are assigned to consumers
    encode      deliveries become bytes, joined to one piece
    taken       the socket took it; where messages are acknowledged one by one: the ACK frames become commands, and
                these are executed
    sockets     one piece is read from a socket, one or two are written to sockets, on loopback

The difference to the processor time of the benchmark is the event loop, and code between these parts. So the second
table counts, for one message at a time through a whole broker: calls of Python functions, and system calls that
Python can see.

python -m bench.stages --messages 20000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType
from typing import Any

from uvloop import new_event_loop

from bench import frames, machine
from bench.load import await_frame, connect, read
from bench.options import positive
from truenext.broker.broker import Broker
from truenext.broker.recovery import recover
from truenext.engine.engine import Engine
from truenext.history.writer import HistoryWriter
from truenext.model.answers import Receipt
from truenext.model.commands import Ack, AckRun, ReceiptRequest, Send, SendRun
from truenext.model.limits import READ_BYTES
from truenext.model.policy import Policies
from truenext.model.url import parse_url
from truenext.server.listener import Listener
from truenext.store import folder as disk
from truenext.store import journal
from truenext.store.embedded import EmbeddedStore
from truenext.wire.stomp.server import StompSession

STAGES = ("parse", "send", "journal", "disk", "dispatch", "encode", "taken", "sockets")
QUEUE = "/queue/bench.stages"
LOADS = {
    "transient": (False, False, 200),
    "transient, individual": (False, True, 200),
    "persistent by 200": (True, False, 200),
    "persistent by 200, individual": (True, True, 200),
    "persistent, one at a time": (True, False, 1),
}
"""Whether messages are persistent and acknowledged one by one, and how many come at once."""
SYSTEM_CALLS = ("recv", "send", "getsockopt", "pwrite", "monotonic_ns", "time_ns", "call_soon", "call_later", "cancel")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stages", description=__doc__)
    parser.add_argument("--messages", type=positive, default=20_000, metavar="N", help="a load and round")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="the best of which counts, by stage")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the store's data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder:
        for name, value in machine.facts(Path(folder)):
            print(f"{name}: {value}")
        best: dict[str, dict[str, float]] = {}
        for number in range(options.rounds):
            for load, (persistent, individual, group) in LOADS.items():
                messages = max(options.messages // (1 if group > 1 else 10), group)
                with _Path(Path(folder) / f"{number}-{len(load)}", individual=individual) as path:
                    microseconds = path.run(messages, group, persistent=persistent)
                so_far = best.setdefault(load, microseconds)
                best[load] = {stage: min(microseconds[stage], so_far[stage]) for stage in STAGES}
        _print_table(best)
        print("\none message at a time through a broker, calls a message:")
        calls, system = count_calls(Path(folder) / "broker", 500)
        print(f"Python functions {calls:.1f}, " + ", ".join(f"{name} {count:.1f}" for name, count in system.items()))
    return 0


def _print_table(best: dict[str, dict[str, float]]) -> None:
    print(f"\n{'microseconds a message':30}" + "".join(f"{stage:>10}" for stage in (*STAGES, "sum")))
    for load, microseconds in best.items():
        row = [*(microseconds[stage] for stage in STAGES), sum(microseconds.values())]
        print(f"{load:30}" + "".join(f"{value:10.2f}" for value in row))


class _Path:
    """Parts of a broker that a message passes, without an event loop."""

    def __init__(self, data: Path, *, individual: bool) -> None:
        self._opened = ExitStack()
        self._individual = individual
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._store = EmbeddedStore(data)
        self._opened.callback(self._store.close)
        self._history = HistoryWriter(data / "history")
        self._opened.callback(self._history.close)
        self._engine, _ = recover(self._store, Policies(), history=self._history)
        self._tick()
        self._engine.lifespan.start(after_clean_stop=True)
        self._commit()
        self._producer = self._engine.commands.connect("producer")
        self._consumer = self._engine.commands.connect("consumer")
        self._from_producer, self._from_consumer = _connected(), _connected()
        for command in self._from_consumer.receive(frames.subscribe(QUEUE, individual, "r")):
            if not isinstance(command, ReceiptRequest):
                self._engine.commands.subscribe(self._consumer, command)  # type: ignore[arg-type]
        self._near, self._far = _pair()
        self._opened.callback(self._near.close)
        self._opened.callback(self._far.close)
        self._seconds.clear()

    def __enter__(self) -> _Path:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def run(self, messages: int, group: int, *, persistent: bool) -> dict[str, float]:
        """Return the microseconds for a message, by stage."""
        groups = frames.send_groups(QUEUE, persistent, messages, group, persistent, 1)
        gc.collect()
        gc.freeze()
        vars(journal)["write"] = self._write
        try:
            for data in groups:
                self._carry(data)
        finally:
            vars(journal)["write"] = disk.write
            gc.unfreeze()
        return {stage: self._seconds[stage] / messages * 1e6 for stage in STAGES}

    def _carry(self, data: bytes) -> None:
        engine, seconds, now = self._engine, self._seconds, time.perf_counter
        # Bound once, as the broker does.
        send, acknowledge, commit_state = engine.commands.send, engine.commands.acknowledge, engine.state.commit_state
        send_run, acknowledge_run = engine.commands.send_run, engine.commands.acknowledge_run
        self._tick()
        at = now()
        commands = []
        for command in self._from_producer.receive(data):
            if type(command) is SendRun:
                # It is only parsed here: its SENDs must not follow.
                command.executed = len(command)
            commands.append(command)
        seconds["parse"] += now() - at
        at = now()
        for command in commands:
            if type(command) is SendRun:
                send_run(self._producer, command)
            elif type(command) is Send:
                send(self._producer, command)
            elif type(command) is ReceiptRequest:
                commit_state.answer(self._producer, Receipt(command.receipt))
        seconds["send"] += now() - at
        if commit_state.is_batch_awaited:
            self._commit()
        at = now()
        effects = engine.turn.run()
        seconds["dispatch"] += now() - at
        at = now()
        parts: list[bytes] = []
        for consumer, entries in effects.deliveries.items():
            self._from_consumer.replies.encode_deliveries(consumer.subscription, entries, parts)
        pieces = [b"".join(parts)]
        for _, answer in effects.answers:
            assert isinstance(answer, Receipt)
            pieces.append(self._from_producer.replies.encode_receipt(answer))
        seconds["encode"] += now() - at
        acks = frames.acks(frames.ACK_VALUE.findall(pieces[0])) if self._individual else b""
        at = now()
        if acks:
            for ack in self._from_consumer.receive(acks):
                if type(ack) is AckRun:
                    acknowledge_run(self._consumer, ack)
                else:
                    assert isinstance(ack, Ack)
                    acknowledge(self._consumer, ack)
        engine.commands.on_all_sent(self._consumer)
        seconds["taken"] += now() - at
        self._measure_sockets(data, pieces)

    def _tick(self) -> None:
        self._engine.state.commit_state.tick(time.time_ns() // 1000, time.monotonic_ns() // 1000)

    def _commit(self) -> None:
        at = time.perf_counter()
        batch = self._engine.take_batch()
        if batch is not None:
            if not batch.is_empty():
                self._store.apply(batch)
            self._history.append(batch.history)
            self._engine.store_results.on_committed(batch)
        self._seconds["journal"] += time.perf_counter() - at

    def _write(self, file: int, content: bytes, offset: int) -> None:
        at = time.perf_counter()
        disk.write(file, content, offset)
        seconds = time.perf_counter() - at
        self._seconds["disk"] += seconds
        self._seconds["journal"] -= seconds

    def _measure_sockets(self, data: bytes, pieces: list[bytes]) -> None:
        now = time.perf_counter
        self._far.sendall(data)
        size = 0
        while size < len(data):
            at = now()
            size += len(self._near.recv(READ_BYTES))
            self._seconds["sockets"] += now() - at
        for piece in pieces:
            at = now()
            sent = self._near.send(piece)
            self._seconds["sockets"] += now() - at
            while sent:
                sent -= len(self._far.recv(READ_BYTES))


def _connected() -> StompSession:
    server = StompSession(session_id="s", identity="00000000", server_name="truenext")
    for _ in server.receive(frames.connect()):
        pass
    return server


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near = server.accept()[0]
    for each in (near, far):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def count_calls(data: Path, messages: int) -> tuple[float, dict[str, float]]:
    """Return calls of Python functions, and of some of the system's, for a persistent message sent alone."""
    calls: Counter[str] = Counter()

    def note(_frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls["Python"] += 1
        elif event == "c_call":
            calls[argument.__name__] += 1

    with ExitStack() as opened:
        store = EmbeddedStore(data)
        opened.callback(store.close)
        history = HistoryWriter(data / "history")
        opened.callback(history.close)
        engine, recovered = recover(store, Policies(), history=history)
        runner = opened.enter_context(asyncio.Runner(loop_factory=new_event_loop))
        runner.run(_serve(engine, store, history, recovered.identity, messages, note))
    system = {name: calls[name] / messages for name in SYSTEM_CALLS if calls[name] >= messages / 10}
    return calls["Python"] / messages, system


async def _serve(
    engine: Engine,
    store: EmbeddedStore,
    history: HistoryWriter,
    identity: str,
    messages: int,
    note: Callable[[FrameType, str, Any], None],
) -> None:
    loop = asyncio.get_running_loop()
    broker = Broker(engine, store, loop, history=history)
    with closing(broker):
        await broker.start()
        listener = Listener(parse_url("stomp://127.0.0.1:0"), broker, loop, identity=identity, server_name="truenext")
        port = int(listener.url.rpartition(":")[2])
        await loop.run_in_executor(None, _send_one_at_a_time, port, 100, loop, None)
        await loop.run_in_executor(None, _send_one_at_a_time, port, messages, loop, note)
        listener.stop_reading()
        await broker.stop()
        await listener.close()


def _send_one_at_a_time(
    port: int, messages: int, loop: asyncio.AbstractEventLoop, note: Callable[[FrameType, str, Any], None] | None
) -> None:
    """Count calls in the loop's thread only, from the first SEND to the last RECEIPT."""
    with connect(port) as consumer, connect(port) as producer:
        consumer.sendall(frames.subscribe(QUEUE, individual=False, receipt="there"))
        await_frame(consumer, b"RECEIPT")
        drain = threading.Thread(target=_drain, args=(consumer, messages))
        drain.start()
        counted = threading.Event()

        def count(function: Callable[[FrameType, str, Any], None] | None) -> None:
            sys.setprofile(function)
            counted.set()

        groups = frames.send_groups(QUEUE, True, messages, 1, True, 1)
        loop.call_soon_threadsafe(count, note)
        counted.wait()
        for frame in groups:
            producer.sendall(frame)
            await_frame(producer, b"RECEIPT")
        drain.join()
        counted.clear()
        loop.call_soon_threadsafe(count, None)
        counted.wait()


def _drain(consumer: socket.socket, messages: int) -> None:
    while messages > 0:
        messages -= read(consumer).count(b"\0")


if __name__ == "__main__":
    sys.exit(main())
