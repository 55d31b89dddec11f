"""Jobs of the client's benchmark with truenext's client in asyncio, written as a user would write them."""

from __future__ import annotations

import asyncio
import time

from bench import frames
from bench.client.work import Done, Order, Stopwatch, check_numbers
from bench.workers import Gate
from truenext import connect


def receive(gate: Gate, order: Order) -> Done:
    """Acknowledge each message by itself."""

    async def program() -> Done:
        watch = Stopwatch(gate, order)
        numbers = []
        async with connect(f"stomp://127.0.0.1:{order.port}") as connection:
            watch.start()
            async with connection.consumer(order.queue, ack="individual", prefetch=order.prefetch) as consumer:
                for _ in range(order.messages):
                    message = await consumer.receive()
                    assert message is not None, "without a timeout it waits"
                    numbers.append(int(message.headers["id"]))
                    await message.ack()
        done = watch.stop()
        check_numbers(numbers, order.messages)
        return done

    return asyncio.run(program())


def iterate(gate: Gate, order: Order) -> Done:
    """Receive in auto mode, in which each message is acknowledged when the next is requested."""

    async def program() -> Done:
        watch = Stopwatch(gate, order)
        numbers: list[int] = []
        async with connect(f"stomp://127.0.0.1:{order.port}") as connection:
            watch.start()
            async with connection.consumer(order.queue, prefetch=order.prefetch) as consumer:
                async for message in consumer:
                    numbers.append(int(message.headers["id"]))
                    if len(numbers) == order.messages:
                        break
        done = watch.stop()
        check_numbers(numbers, order.messages)
        return done

    return asyncio.run(program())


def send_many(gate: Gate, order: Order) -> Done:
    async def program() -> Done:
        watch = Stopwatch(gate, order)
        bodies = frames.bodies()
        async with connect(f"stomp://127.0.0.1:{order.port}") as connection:
            watch.start()
            await connection.send_many(order.queue, (bodies[each % len(bodies)] for each in range(order.messages)))
        return watch.stop()

    return asyncio.run(program())


def copy(gate: Gate, order: Order) -> Done:
    """Copy from one queue to another, in transactions."""

    async def program() -> Done:
        watch = Stopwatch(gate, order)
        async with connect(f"stomp://127.0.0.1:{order.port}") as connection:
            watch.start()
            async with (
                connection.session(transacted=True) as session,
                session.consumer(order.queue, prefetch=order.prefetch) as consumer,
            ):
                for _ in range(0, order.messages, order.batch):
                    async with session.transaction():
                        for _ in range(order.batch):
                            message = await consumer.receive()
                            assert message is not None, "without a timeout it waits"
                            await session.send(order.target, message.body)
        return watch.stop()

    return asyncio.run(program())


def request(gate: Gate, order: Order) -> Done:
    """Send each request when the reply to the one before has come."""

    async def program() -> Done:
        watch = Stopwatch(gate, order)
        body = frames.bodies()[0]
        trips = []
        async with connect(f"stomp://127.0.0.1:{order.port}") as connection:
            watch.start()
            for _ in range(order.messages):
                started = time.perf_counter()
                reply = await connection.request(order.queue, body)
                trips.append(time.perf_counter() - started)
                if reply.body != body:
                    raise ValueError(f"another reply: {reply.body[:100]!r}")
        return watch.stop(trips)

    return asyncio.run(program())


def reply(gate: Gate, order: Order) -> Done:
    """Reply to each request with its body."""

    async def program() -> Done:
        watch = Stopwatch(gate, order)
        async with connect(f"stomp://127.0.0.1:{order.port}") as connection:
            watch.start()
            async with connection.consumer(order.queue, prefetch=order.prefetch) as consumer:
                for _ in range(order.messages):
                    message = await consumer.receive()
                    assert message is not None, "without a timeout it waits"
                    await connection.reply(message, message.body)
        return watch.stop()

    return asyncio.run(program())
