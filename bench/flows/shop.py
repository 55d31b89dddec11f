"""Service that is measured: an endpoint of three stages, and the programs that start its flows.

An order with its flow's context is 1 KiB in each message, and each stage keeps a value in the state.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.client.work import Done, Stopwatch
from bench.flows.work import CONCURRENCY, Ended, Order, run
from bench.workers import Gate
from truenext.flows.envelope import decode_envelope
from truenext.stage import Endpoint, Flow, Service
from truenext.stage.core.definitions import StatefulEndpoint
from truenext.stage.core.flow import FlowSource
from truenext.stage.core.initiation import Initiation
from truenext.stage.core.output import Output, OutputMessage

TOGETHER = 100
"""Number of flows that are started in one initiation."""
POISON = 20
"""One message in this number is poison, and has three attempts."""
_NOTE = "x" * 675
"""Text that brings a message to 1 KiB."""


R = TypeVar("R")


class OrderRequest(msgspec.Struct):
    id: int
    item: str = "tea"
    count: int = 1
    note: str = _NOTE


class OrderReply(msgspec.Struct):
    id: int


class Memo(msgspec.Struct):
    id: int = 0
    checked: bool = False


def service(order: Order, *, exactly_once: bool = False) -> Service:
    return Service(
        "bench",
        broker=f"stomp://127.0.0.1:{order.port}",
        database=order.database or None,
        concurrency=order.concurrency,
        attempts=3,
        retry={ValueError: "10ms"},
        exactly_once=exactly_once,
    )


def define_endpoint(app: Service, name: str, ended: Ended) -> StatefulEndpoint[OrderRequest, None, Memo]:
    """Define an endpoint of three stages that only continue."""
    endpoint = app.endpoint(name, OrderRequest, state=Memo)

    _define_first_stages(endpoint)

    @endpoint.stage
    async def confirm(request: OrderRequest, memo: Memo, flow: Flow) -> None:
        ended.one()

    return endpoint


def _define_first_stages(endpoint: StatefulEndpoint[OrderRequest, R, Memo]) -> None:
    """Define the stages before the last."""

    @endpoint.stage
    async def check(request: OrderRequest, memo: Memo, flow: Flow) -> None:
        if not request.count:
            raise ValueError("poison")
        memo.id = request.id
        flow.next(request)

    @endpoint.stage
    async def reserve(request: OrderRequest, memo: Memo, flow: Flow) -> None:
        memo.checked = True
        flow.next(request)


def define_replying_endpoint(app: Service, name: str, ended: Ended) -> StatefulEndpoint[OrderRequest, OrderReply, Memo]:
    """Define an endpoint of three stages with a reply; only interactive flows count."""
    endpoint = app.endpoint(name, OrderRequest, OrderReply, state=Memo)

    _define_first_stages(endpoint)

    @endpoint.stage
    async def confirm(request: OrderRequest, memo: Memo, flow: Flow) -> OrderReply:
        if flow.interactive:
            ended.one()
        return OrderReply(memo.id)

    return endpoint


# ---- Jobs ----


def serve(gate: Gate, order: Order) -> Done:
    """Run until the last flow has ended, and all is confirmed."""

    async def program() -> Done:
        app, ended = service(order), Ended(order.flows)
        define_endpoint(app, order.name, ended)
        return await serve_until(app, ended, gate)

    return run(program())


def serve_poisoned(gate: Gate, order: Order) -> Done:
    """Run until the last flow has ended, beside failing messages, whose log is formatted and discarded."""
    with discarded_log():
        return serve(gate, order)


@contextmanager
def discarded_log() -> Iterator[None]:
    """Let all warnings of this process be formatted, and discard them."""
    with Path(os.devnull).open("w") as nowhere:
        logging.basicConfig(stream=nowhere, level=logging.WARNING)
        yield


def serve_interactive(gate: Gate, order: Order) -> Done:
    """Run until the last interactive flow has ended."""

    async def program() -> Done:
        app, ended = service(order), Ended(order.flows)
        define_replying_endpoint(app, order.name, ended)
        return await serve_until(app, ended, gate)

    return run(program())


async def serve_until(app: Service, ended: Ended, gate: Gate) -> Done:
    # Imports the modules that stages need before the clock starts.
    app.plans()
    watch = Stopwatch(gate)
    watch.start()
    async with app.running():
        await ended.wait()
    return watch.stop()


def start_flows(gate: Gate, order: Order) -> None:
    """Start all flows, which then wait."""
    _start_all(gate, order, [1] * order.flows)


def start_flows_and_poison(gate: Gate, order: Order) -> None:
    """Start all flows, and one poison message for every nineteen."""
    _start_all(gate, order, [number % POISON for number in range(order.flows + poison_count(order.flows))])


def poison_count(flows: int) -> int:
    """Return the number of poison messages beside this number of flows."""
    return -(-flows // (POISON - 1))


def _start_all(gate: Gate, order: Order, counts: Sequence[int]) -> None:
    async def program() -> None:
        app = service(order)
        endpoint: Endpoint[OrderRequest, None] = app.remote(order.name, OrderRequest)
        gate.ready()
        async with app.connected():
            for first in range(0, len(counts), TOGETHER):
                async with app.initiate() as initiation:
                    for number, count in enumerate(counts[first : first + TOGETHER], first):
                        initiation.send(endpoint, OrderRequest(number, count=count), trace=f"order {number}")

    run(program())


# ---- What goes from stage to stage ----


async def messages(name: str) -> list[OutputMessage]:
    """Return the messages of one flow through `define_endpoint`, as its service sends them."""
    app = Service("bench", concurrency=CONCURRENCY)
    endpoint = define_endpoint(app, name, Ended(1))
    now_ms = time.time_ns() // 1_000_000
    output = Output("0" * 32, app.name)
    Initiation(output, now_ms, app.stages).send(endpoint, OrderRequest(1), trace="order 1")
    sent: list[OutputMessage] = []
    for stage in endpoint.stages_in_order:
        sent += output.outgoing
        envelope = decode_envelope(sent[-1].encode({}).body)
        output = Output(envelope.id, f"{app.name} {stage.queue}")
        flow = Flow(stage, envelope, output, now_ms, FlowSource())
        await stage.function(flow.message, flow.state, flow)
    return sent
