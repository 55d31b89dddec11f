"""Jobs of the client's benchmark with nats-py on JetStream; the stream of a queue deletes acknowledged messages."""

from __future__ import annotations

import asyncio
import time

import nats
from nats.js import api

from bench import frames
from bench.client.work import Done, Order, Stopwatch, check_numbers
from bench.workers import Gate

_CONSUMER = "bench"
_TOGETHER = 1000
"""Number of messages whose acknowledgements are awaited together."""
_PATIENCE = 20.0


def send(gate: Gate, order: Order) -> Done:
    """Send messages, _TOGETHER at a time; JetStream acknowledges each."""

    async def program() -> Done:
        watch = Stopwatch(gate, order)
        bodies = frames.bodies()
        client = await nats.connect(_url(order.port))
        stream, subject = client.jetstream(), _name(order.queue)
        watch.start()
        for first in range(0, order.messages, _TOGETHER):
            waiting = [
                await stream.publish_async(subject, bodies[each % len(bodies)])
                for each in range(first, min(first + _TOGETHER, order.messages))
            ]
            await asyncio.gather(*waiting)
        await client.drain()
        return watch.stop()

    return asyncio.run(program())


def receive(gate: Gate, order: Order) -> Done:
    """Acknowledge each message by itself. The connection closes when the server has read all acknowledgements."""

    async def program() -> Done:
        watch = Stopwatch(gate, order)
        numbers: list[int] = []
        client = await nats.connect(_url(order.port))
        stream = client.jetstream()
        assert order.prefetch is not None, "a batch has a size"
        watch.start()
        subscription = await stream.pull_subscribe_bind(_CONSUMER, _name(order.queue))
        while len(numbers) < order.messages:
            for message in await subscription.fetch(min(order.prefetch, order.messages - len(numbers))):
                assert message.headers is not None, "each has an id"
                numbers.append(int(message.headers["id"]))
                await message.ack()
        await client.drain()
        done = watch.stop()
        check_numbers(numbers, order.messages)
        return done

    return asyncio.run(program())


async def prepare(port: int, name: str, messages: int) -> None:
    """Make a stream in files with a number of messages, and its durable consumer."""
    bodies = frames.bodies()
    name = _name(name)
    client = await nats.connect(_url(port))
    stream = client.jetstream()
    await stream.add_stream(
        name=name, subjects=[name], storage=api.StorageType.FILE, retention=api.RetentionPolicy.WORK_QUEUE
    )
    await stream.add_consumer(
        name, api.ConsumerConfig(durable_name=_CONSUMER, ack_policy=api.AckPolicy.EXPLICIT, max_ack_pending=1000)
    )
    for first in range(0, messages, _TOGETHER):
        waiting = [
            await stream.publish_async(name, bodies[each % len(bodies)], headers={"id": str(each)})
            for each in range(first, min(first + _TOGETHER, messages))
        ]
        await asyncio.gather(*waiting)
    await client.drain()


async def finish(port: int, name: str, messages: int) -> None:
    """Remove the stream, in which this number of messages must wait.

    Raises: ValueError
    """
    client = await nats.connect(_url(port))
    stream, name = client.jetstream(), _name(name)
    deadline = time.monotonic() + _PATIENCE
    # JetStream handles acknowledgements after it has read them.
    while (found := (await stream.stream_info(name)).state.messages) != messages:
        if time.monotonic() > deadline:
            raise ValueError(f"{found} messages wait in JetStream, and not {messages}")
        await asyncio.sleep(0.05)
    await stream.delete_stream(name)
    await client.drain()


def _url(port: int) -> str:
    return f"nats://127.0.0.1:{port}"


def _name(queue: str) -> str:
    """Return the name of the stream and of its only subject, where a dot would separate tokens."""
    return queue.rpartition("/")[2].replace(".", "-")
