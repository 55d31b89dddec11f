"""Benchmark of failing flows: the rate of rejected messages that are reported or handled, beside plain dead letters;
and the time until `ask` raises FlowFailed, beside that of a reply."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from pathlib import Path

from bench import queues
from bench.brokers import Truenext
from bench.client.work import Done
from bench.flows.pairs import Side, check_nothing_waits, compare, hired, report_medians
from bench.flows.shop import TOGETHER, OrderReply, OrderRequest, discarded_log, serve_until, service
from bench.flows.work import Ended, Order, Sizes, run
from bench.workers import Gate, Job
from truenext import connect
from truenext.client.core.send_options import SendOptions
from truenext.flows.envelope import CONTENT_TYPE
from truenext.stage import FlowFailed, Reject
from truenext.stage.core.initiation import Initiation
from truenext.stage.core.output import Output

REPORTED_TARGET, HANDLED_TARGET = 0.8, 1.0
FAILED_TARGET = 1.5
"""Largest ratio of the median of FlowFailed to that of a reply."""


def compare_rejections(broker: Truenext, folder: Path, sizes: Sizes) -> None:
    plain = _side(broker, "dead letters without report", start_plain, "DLQ.{}")
    reported = _side(broker, "dead letters with report", start_reported, "DLQ.{}", "{}.reports")
    handled = _side(broker, "handled failures", start_handled, "{}.handler")
    compare("reported", (reported, plain), sizes.flows, sizes.runs, target=REPORTED_TARGET)
    compare("handled", (handled, plain), sizes.flows, sizes.runs, target=HANDLED_TARGET)


def _side(broker: Truenext, name: str, start: Job, *queues_at_end: str) -> Side:
    """Return a side that rejects all messages. For each of them, each of the queues then has one."""

    def prepare(order: Order) -> None:
        hired(start, order)

    def check(order: Order) -> None:
        waiting = asyncio.run(queues.waiting(order.port))
        if waiting != {each.format(order.name): order.flows for each in queues_at_end}:
            raise ValueError(f"{order.flows} messages were rejected, and these wait: {waiting}")
        asyncio.run(queues.empty(order.port, list(waiting)))

    return Side(name, serve_rejecting, prepare, check, broker.port, broker)


def compare_asks(broker: Truenext, folder: Path, sizes: Sizes) -> None:
    medians: list[tuple[float, float]] = []
    for number in range(sizes.runs):
        order = Order(broker.port, f"failed.{number}", sizes.flows)
        medians.append(hired(ask_by_turns, order))
        asyncio.run(queues.empty(order.port, [f"DLQ.{order.name}"]))
        check_nothing_waits(order)
    report_medians(("FlowFailed", "a reply"), medians, FAILED_TARGET)


# ---- Jobs ----


def start_plain(gate: Gate, order: Order) -> None:
    _start(gate, order, {})


def start_reported(gate: Gate, order: Order) -> None:
    _start(gate, order, {"report_to": f"/queue/{order.name}.reports", "report_id": "0" * 32})


def start_handled(gate: Gate, order: Order) -> None:
    _start(gate, order, {"on_failure": [f"/queue/{order.name}.handler"]})


def _start(gate: Gate, order: Order, options: SendOptions) -> None:
    """Send all messages, which then wait."""

    async def program() -> None:
        endpoint = service(order).remote(order.name, OrderRequest)
        gate.ready()
        async with connect(f"stomp://127.0.0.1:{order.port}") as connection:
            for first in range(0, order.flows, TOGETHER):
                async with connection.session(transacted=True) as session:
                    for number in range(first, min(first + TOGETHER, order.flows)):
                        output = Output(f"{number:032x}", "bench")
                        Initiation(output, time.time_ns() // 1_000_000, {}).send(
                            endpoint, OrderRequest(number), trace=f"order {number}"
                        )
                        (message,) = (each.encode({}) for each in output.outgoing)
                        sent: SendOptions = {"content_type": CONTENT_TYPE, "correlation_id": message.id}
                        await session.send(message.destination, message.body, **sent | options)
                    await session.commit()

    run(program())


def serve_rejecting(gate: Gate, order: Order) -> Done:
    """Reject all messages. The log is formatted and discarded."""

    async def program() -> Done:
        app, ended = service(order), Ended(order.flows)

        @app.terminator(order.name, OrderRequest)
        async def check(request: OrderRequest) -> None:
            ended.one()
            raise Reject("out of stock")

        return await serve_until(app, ended, gate)

    with discarded_log():
        return run(program())


def ask_by_turns(gate: Gate, order: Order) -> tuple[float, float]:
    """Ask by turns for a reply and for a failure. Return the median seconds until a failure, and until a reply."""

    async def program() -> tuple[float, float]:
        app = service(order)

        @app.single(order.name, OrderRequest, OrderReply)
        async def check(request: OrderRequest) -> OrderReply:
            if request.id % 2:
                raise Reject("out of stock")
            return OrderReply(request.id)

        replied: list[float] = []
        failed: list[float] = []
        gate.ready()
        gc.enable()
        async with app.running():
            for number in range(2 * order.flows):
                started = time.perf_counter()
                try:
                    await app.ask(check, OrderRequest(number), trace=f"question {number}")
                except FlowFailed:
                    failed.append(time.perf_counter() - started)
                else:
                    replied.append(time.perf_counter() - started)
        if len(replied) != len(failed):
            raise ValueError(f"{len(replied)} replies, and {len(failed)} failures")
        return statistics.median(failed), statistics.median(replied)

    with discarded_log():
        return run(program())
