"""Jobs of the client's benchmark with aio-pika, the usual client of RabbitMQ in asyncio."""

from __future__ import annotations

import asyncio
import time

import aio_pika

from bench import frames
from bench.client.work import Done, Order, Stopwatch, check_numbers
from bench.workers import Gate

_TOGETHER = 300
"""Number of messages whose confirms are awaited together; other numbers were not clearly faster."""
_PATIENCE = 20.0


def send(gate: Gate, order: Order) -> Done:
    """Send messages, _TOGETHER at a time; RabbitMQ confirms each."""

    async def program() -> Done:
        watch = Stopwatch(gate, order)
        bodies = frames.bodies()
        async with await aio_pika.connect(_url(order.port)) as connection:
            exchange = (await connection.channel()).default_exchange
            watch.start()
            for first in range(0, order.messages, _TOGETHER):
                await asyncio.gather(
                    *(
                        exchange.publish(
                            aio_pika.Message(
                                bodies[each % len(bodies)], delivery_mode=aio_pika.DeliveryMode.PERSISTENT
                            ),
                            order.queue,
                        )
                        for each in range(first, min(first + _TOGETHER, order.messages))
                    )
                )
        return watch.stop()

    return asyncio.run(program())


def receive(gate: Gate, order: Order) -> Done:
    """Acknowledge each message by itself. The channel closes when the broker has read all acknowledgements."""

    async def program() -> Done:
        watch = Stopwatch(gate, order)
        numbers = []
        async with await aio_pika.connect(_url(order.port)) as connection:
            channel = await connection.channel()
            assert order.prefetch is not None, "RabbitMQ would send all that it has"
            await channel.set_qos(prefetch_count=order.prefetch)
            queue = await channel.get_queue(order.queue)
            watch.start()
            async with queue.iterator() as messages:
                async for message in messages:
                    numbers.append(int(str(message.headers["id"])))
                    await message.ack()
                    if len(numbers) == order.messages:
                        break
        done = watch.stop()
        check_numbers(numbers, order.messages)
        return done

    return asyncio.run(program())


async def prepare_classic(port: int, name: str, messages: int) -> None:
    await _prepare(port, name, messages, "classic")


async def prepare_quorum(port: int, name: str, messages: int) -> None:
    await _prepare(port, name, messages, "quorum")


async def _prepare(port: int, name: str, messages: int, kind: str) -> None:
    """Make a durable queue with a number of messages."""
    bodies = frames.bodies()
    async with await aio_pika.connect(_url(port)) as connection:
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True, arguments={"x-queue-type": kind})
        for first in range(0, messages, _TOGETHER):
            await asyncio.gather(
                *(
                    channel.default_exchange.publish(
                        aio_pika.Message(
                            bodies[each % len(bodies)],
                            headers={"id": str(each)},
                            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                        ),
                        name,
                    )
                    for each in range(first, min(first + _TOGETHER, messages))
                )
            )


async def finish(port: int, name: str, messages: int) -> None:
    """Remove the queue, in which this number of messages must wait.

    Raises: ValueError
    """
    async with await aio_pika.connect(_url(port)) as connection:
        channel = await connection.channel()
        deadline = time.monotonic() + _PATIENCE
        # Acknowledgements that the queue has not handled count as waiting for a moment.
        while (found := (await channel.get_queue(name)).declaration_result.message_count) != messages:
            if time.monotonic() > deadline:
                raise ValueError(f"{found} messages wait in RabbitMQ, and not {messages}")
            await asyncio.sleep(0.05)
        await channel.queue_delete(name)


def _url(port: int) -> str:
    return f"amqp://guest:guest@127.0.0.1:{port}/"
