"""Flows by Dramatiq: a pipeline of three actors on RabbitMQ, each with a queue of its own.

Settings are Dramatiq's defaults: persistent messages in durable queues, eight threads, a prefetch of twice as many
messages in each queue, no results. Each actor gets the order, and returns it to the next one.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import dramatiq
import msgspec
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from bench.client.work import Done, Stopwatch
from bench.flows.shop import OrderRequest
from bench.flows.work import Order
from bench.load import SILENCE
from bench.workers import Gate

THREADS = 8
_STAGES = ("check", "reserve", "confirm")


def start_pipelines(gate: Gate, order: Order) -> None:
    """Start all pipelines, which then wait."""
    broker, actors = _declared(order, lambda: None)
    check, reserve, confirm = actors
    gate.ready()
    for number in range(order.flows):
        request = msgspec.to_builtins(OrderRequest(number))
        dramatiq.pipeline([check.message(request), reserve.message(), confirm.message()]).run()
    broker.close()


def work(gate: Gate, order: Order) -> Done:
    """Run until the last pipeline has ended."""
    watch = Stopwatch(gate)
    remaining = order.flows
    lock, all_ = threading.Lock(), threading.Event()

    def ended() -> None:
        nonlocal remaining
        with lock:
            remaining -= 1
            if not remaining:
                all_.set()

    broker, _ = _declared(order, ended)
    worker = dramatiq.Worker(broker, worker_threads=THREADS)
    watch.start()
    worker.start()
    all_.wait()
    worker.stop()
    broker.close()
    return watch.stop()


def wait_for(order: Order) -> None:
    """Wait until all messages are in the queue, since Dramatiq gets no confirms.

    Raises: ValueError if messages are missing
    """
    deadline = time.monotonic() + SILENCE
    while (waiting := _waiting(order)) != order.flows:
        if time.monotonic() > deadline:
            raise ValueError(f"{order.flows} pipelines were begun, and {waiting} wait")
        time.sleep(0.05)


def check(order: Order) -> None:
    """Raises: ValueError unless nothing waits"""
    if waiting := _waiting(order):
        raise ValueError(f"{waiting} messages wait still")


def _waiting(order: Order) -> int:
    """Return the number of messages in the queues of all actors, including delayed and failed ones."""
    broker = _broker(order.port)
    for stage in _STAGES:
        broker.declare_queue(f"{order.name}.{stage}")
    found = sum(sum(broker.get_queue_message_counts(f"{order.name}.{stage}")) for stage in _STAGES)
    broker.close()
    return int(found)


def _broker(port: int) -> Any:
    return RabbitmqBroker(url=f"amqp://guest:guest@127.0.0.1:{port}")


def _declared(order: Order, ended: Any) -> tuple[Any, list[Any]]:
    broker = _broker(order.port)
    dramatiq.set_broker(broker)

    def check(request: dict[str, Any]) -> dict[str, Any]:
        return request

    def reserve(request: dict[str, Any]) -> dict[str, Any]:
        return request

    def confirm(request: dict[str, Any]) -> None:
        ended()

    functions = (check, reserve, confirm)
    actors = [
        dramatiq.actor(function, queue_name=f"{order.name}.{stage}", broker=broker)
        for stage, function in zip(_STAGES, functions, strict=True)
    ]
    return broker, actors
