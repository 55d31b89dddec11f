"""Jobs of the client's benchmark with truenext.blocking."""

from __future__ import annotations

from bench import frames
from bench.client.work import Done, Order, Stopwatch, check_numbers
from bench.workers import Gate
from truenext import blocking


def receive(gate: Gate, order: Order) -> Done:
    """Acknowledge each message by itself."""
    watch = Stopwatch(gate, order)
    numbers = []
    with blocking.connect(f"stomp://127.0.0.1:{order.port}") as connection:
        watch.start()
        with connection.consumer(order.queue, ack="individual", prefetch=order.prefetch) as consumer:
            for _ in range(order.messages):
                message = consumer.receive()
                assert message is not None, "without a timeout it waits"
                numbers.append(int(message.headers["id"]))
                message.ack()
    done = watch.stop()
    check_numbers(numbers, order.messages)
    return done


def send_many(gate: Gate, order: Order) -> Done:
    watch = Stopwatch(gate, order)
    bodies = frames.bodies()
    with blocking.connect(f"stomp://127.0.0.1:{order.port}") as connection:
        watch.start()
        connection.send_many(order.queue, (bodies[each % len(bodies)] for each in range(order.messages)))
    return watch.stop()
